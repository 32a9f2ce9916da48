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
PLAIN = "slipstream_plain"
"""Among them, if what is drawn from is the model's own distribution, unchanged."""

BLOCK = 4096


def install(model_runner: Any, rows: Rows) -> None:
    """In a worker: from now on vLLM's sampler draws so, wherever every row of a batch has a seed of ours."""
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
    """Who draws in this step. What does not change from one step to the next is looked up when the batch has changed, which
    most steps do not do: this runs for every token of every row."""

    def __init__(self, model_runner: Any) -> None:
        self._runner = model_runner
        self._names: list[str] = []
        self._seeds: list[int] = []
        self._states: list[Any] = []
        self._plain = False
        self._on_device: Any = None
        """The seeds."""

    def drawn(self) -> dict[str, int]:
        """Tokens of each request, in this step or not."""
        return {name: len(state.output_token_ids) for name, state in self._runner.requests.items()}

    def are_plain(self, num_rows: int) -> bool:
        """Whether all draw from the model's own distribution."""
        return self._find(num_rows) and self._plain

    def keys(self, num_rows: int) -> tuple[Any, Any] | None:
        """Seeds and positions on the device."""
        if not self._find(num_rows):
            return None
        if self._on_device is None:
            self._on_device = self._uploaded(self._seeds)
        return self._on_device, self._uploaded(self._positions())

    def _uploaded(self, values: list[int]) -> Any:
        """Without waiting for what the device is doing."""
        import torch

        held = torch.tensor(values, dtype=torch.int64, pin_memory=True)
        return held.to(self._runner.device, non_blocking=True)

    def generators(self, num_rows: int) -> dict[int, Any] | None:
        import torch

        if not self._find(num_rows):
            return None
        keys = zip(self._seeds, self._positions())
        return {row: torch.Generator().manual_seed(_mix(*key)) for row, key in enumerate(keys)}

    def _positions(self) -> list[int]:
        return [len(state.output_token_ids) for state in self._states]

    def _find(self, num_rows: int) -> bool:
        """Whether every row of the batch has a seed of ours (vLLM measures itself with requests that have none)."""
        names, requests = self._runner.input_batch.req_ids, self._runner.requests
        if len(names) != num_rows:
            return False
        if names != self._names:
            states = [requests.get(name) for name in names]
            extras = [(state.sampling_params.extra_args if state else None) or {} for state in states]
            if any(SEED not in extra for extra in extras):
                return False
            self._names, self._states = [*names], states
            self._seeds, self._on_device = [extra[SEED] for extra in extras], None
            self._plain = all(PLAIN in extra for extra in extras)
        return True


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
