"""Seeded sampling: what a request draws is a function of its seed and of the token's position, and of nothing else.

vLLM keeps a generator for every request that has a seed. On a GPU it then draws row by row, one small kernel each; on a CPU it
fails when a seeded prompt is computed in parts, since it wants to turn such a generator back. Here a request's noise is made
anew for every token: on a GPU by one kernel for the whole batch (Philox, a counter-based generator), on a CPU by a generator
that is seeded with both. Requests in a batch do not depend on each other, nor on how often one was preempted."""

from __future__ import annotations

from typing import Any

import xxhash

SEED = "slipstream_seed"
"""Among a request's `extra_args`."""

BLOCK = 4096


def install(model_runner: Any) -> None:
    """In a worker: from now on vLLM's sampler draws so, wherever every row of a batch has a seed of ours."""
    rows = Rows(model_runner)
    if model_runner.device.type == "cpu":
        sampler = model_runner.sampler.topk_topp_sampler
        whole = sampler.forward
        sampler.forward = lambda logits, generators, k, p: whole(
            logits, rows.generators(len(logits)) or generators, k, p
        )
        return
    import vllm.v1.sample.ops.topk_topp_sampler as ops

    theirs = ops.random_sample

    def random_sample(probs: Any, generators: Any, *rest: Any, **named: Any) -> Any:
        keys = rows.keys(probs.shape[0])
        return theirs(probs, generators, *rest, **named) if keys is None else draw(probs, *keys)

    ops.random_sample = random_sample


class Rows:
    """Who draws in this step. Seeds are looked up when the batch has changed, which most steps do not do."""

    def __init__(self, model_runner: Any) -> None:
        self._runner = model_runner
        self._names: list[str] = []
        self._seeds: list[int] = []

    def keys(self, num_rows: int) -> tuple[Any, Any] | None:
        """Seeds and positions on the device."""
        import torch

        if (found := self._find(num_rows)) is None:
            return None
        keys = torch.tensor(found, dtype=torch.int64).pin_memory().to(self._runner.device, non_blocking=True)
        return keys[0], keys[1]

    def generators(self, num_rows: int) -> dict[int, Any] | None:
        import torch

        if (found := self._find(num_rows)) is None:
            return None
        return {row: torch.Generator().manual_seed(_mix(*key)) for row, key in enumerate(zip(*found))}

    def _find(self, num_rows: int) -> tuple[list[int], list[int]] | None:
        """Seeds and positions of the batch's rows; None when a row has no seed (vLLM measures itself with such requests)."""
        names, requests = self._runner.input_batch.req_ids, self._runner.requests
        if len(names) != num_rows or any(name not in requests for name in names):
            return None
        if names != self._names:
            extras = [requests[name].sampling_params.extra_args or {} for name in names]
            if any(SEED not in extra for extra in extras):
                return None
            self._names, self._seeds = [*names], [extra[SEED] for extra in extras]
        return self._seeds, [len(requests[name].output_token_ids) for name in names]


def _mix(seed: int, position: int) -> int:
    """A generator of torch's on CPU heeds 32 bits of its seed only: all of these go into them."""
    return xxhash.xxh3_64_intdigest(f"{seed} {position}".encode()) >> 1


def draw(probs: Any, seeds: Any, positions: Any) -> Any:
    """One token of each row of `probs` [rows, vocabulary], with these probabilities: the largest p / e, for e from an
    exponential distribution."""
    import torch

    from slipstream.engines.vllm.noise_triton import draw_rows  # there is no Triton where there is no GPU

    rows, vocabulary = probs.shape
    out = torch.empty(rows, dtype=torch.int64, device=probs.device)
    probs = probs.contiguous()
    draw_rows[(rows,)](probs, seeds, positions, out, vocabulary, seeds.stride(0), BLOCK=BLOCK)
    return out
