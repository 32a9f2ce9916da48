"""Seeded sampling on a GPU, for all rows at once.

vLLM draws the noise of every request that has a seed by a generator of its own, one small kernel per row and step. Here a
request's noise is a function of its seed, the position of the token and the token's number (Philox, a counter-based
generator): one kernel draws for the whole batch, and what a request draws does not depend on the others in it."""

from __future__ import annotations

from typing import Any

SEED = "slipstream_seed"
"""Among a request's `extra_args`."""

BLOCK = 4096


def install(model_runner: Any) -> None:
    """In a worker on a GPU: from now on vLLM's sampler draws by `draw`, wherever a request has a seed of ours."""
    import vllm.v1.sample.ops.topk_topp_sampler as ops

    theirs = ops.random_sample

    def random_sample(probs: Any, generators: Any, *rest: Any, **named: Any) -> Any:
        keys = _keys(model_runner, probs.shape[0])
        return theirs(probs, generators, *rest, **named) if keys is None else draw(probs, *keys)

    ops.random_sample = random_sample


def _keys(model_runner: Any, num_rows: int) -> tuple[Any, Any] | None:
    """Seeds and positions of the batch's rows; None when a row has no seed (vLLM measures itself with such requests)."""
    import torch

    names = model_runner.input_batch.req_ids
    if len(names) != num_rows:
        return None
    states = [model_runner.requests.get(name) for name in names]
    rows = []
    for state in states:
        seed = None if state is None else (state.sampling_params.extra_args or {}).get(SEED)
        if seed is None:
            return None
        rows.append((seed, len(state.output_token_ids)))
    keys = torch.tensor(rows, dtype=torch.int64).pin_memory().to(model_runner.device, non_blocking=True)
    return keys[:, 0], keys[:, 1]


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
