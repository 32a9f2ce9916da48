"""Seeded sampling: each draw depends only on the request's seed and the token's position.

vLLM keeps one random generator per seeded request. On a GPU it then samples row by row, one small kernel each. On CPU it fails
when a seeded prompt is prefilled in chunks, because it tries to rewind the generator. Here the random numbers are computed
afresh for every token: on a GPU by one kernel for the whole batch (Philox, a counter-based generator), on CPU by a generator
seeded with both. A draw depends neither on the other requests of the batch nor on preemptions."""

from __future__ import annotations

from typing import Any

from slipstream.engines.frontend.draw_rate import DrawRate
from slipstream.engines.frontend.sample_tasks import mixed_seed

SEED = "slipstream_seed"
"""Key of a request's `extra_args`: its seed."""
PLAIN = "slipstream_plain"
"""Key of a request's `extra_args`: present if it samples the model's own distribution, unchanged."""

BLOCK = 4096


def install(model_runner: Any, batch: SeededBatch) -> None:
    """Make the worker's sampler use our seeds for every batch in which all rows have one."""
    if model_runner.device.type == "cpu":
        sampler = model_runner.sampler.topk_topp_sampler
        forward = sampler.forward
        sampler.forward = lambda logits, generators, k, p: forward(
            logits, batch.generators(len(logits)) or generators, k, p
        )
        return
    import vllm.v1.sample.ops.topk_topp_sampler as ops

    original = ops.random_sample

    def random_sample(probs: Any, generators: Any, *args: Any, **kwargs: Any) -> Any:
        keys = batch.keys(probs.shape[0])
        return original(probs, generators, *args, **kwargs) if keys is None else draw(probs, *keys)

    ops.random_sample = random_sample


class SeededBatch:
    """Seeds and positions of the rows of the current batch. This runs for every token of every row, so values
    that stay constant while the batch is unchanged are looked up once."""

    def __init__(self, model_runner: Any) -> None:
        self._runner, self.draw_rate = model_runner, DrawRate()
        self._request_ids: list[str] = []
        self._seeds: list[int] = []
        self._states: list[Any] = []
        self._is_plain = False
        self._device_seeds: Any = None

    def token_counts(self) -> dict[str, int]:
        """Return how many tokens each request has drawn, whether or not it is in the current batch."""
        return {request_id: len(state.output_token_ids) for request_id, state in self._runner.requests.items()}

    def is_plain(self, num_rows: int) -> bool:
        """Return whether all rows sample the model's own distribution."""
        return self._refresh(num_rows) and self._is_plain

    def keys(self, num_rows: int) -> tuple[Any, Any] | None:
        """Return seeds and positions on the device, or None unless all rows have a seed."""
        if not self._refresh(num_rows):
            return None
        if self._device_seeds is None:
            self._device_seeds = self._to_device(self._seeds)
        return self._device_seeds, self._to_device(self._positions())

    def _to_device(self, values: list[int]) -> Any:
        """Copy without synchronizing with the device."""
        import torch

        pinned = torch.tensor(values, dtype=torch.int64, pin_memory=True)
        return pinned.to(self._runner.device, non_blocking=True)

    def generators(self, num_rows: int) -> dict[int, Any] | None:
        """Return a freshly seeded generator per row, or None unless all rows have a seed."""
        import torch

        if not self._refresh(num_rows):
            return None
        keys = zip(self._seeds, self._positions())
        return {row: torch.Generator().manual_seed(mixed_seed(*key)) for row, key in enumerate(keys)}

    def _positions(self) -> list[int]:
        return [len(state.output_token_ids) for state in self._states]

    def _refresh(self, num_rows: int) -> bool:
        """Look up the batch if it has changed. Return whether every row has a seed of ours; the dummy requests with which
        vLLM profiles itself have none."""
        request_ids, requests = self._runner.input_batch.req_ids, self._runner.requests
        if len(request_ids) != num_rows:
            return False
        if request_ids != self._request_ids:
            states = [requests.get(request_id) for request_id in request_ids]
            extras = [(state.sampling_params.extra_args if state else None) or {} for state in states]
            if any(SEED not in extra for extra in extras):
                return False
            self._request_ids, self._states = [*request_ids], states
            self._seeds, self._device_seeds = [extra[SEED] for extra in extras], None
            self._is_plain = all(PLAIN in extra for extra in extras)
        return True


def draw(probs: Any, seeds: Any, positions: Any) -> Any:
    """Sample one token per row of `probs` [rows, vocabulary]: the argmax of p / e with e drawn from an exponential
    distribution."""
    import torch

    from slipstream.engines.vllm.seeded_sampling_triton import draw_rows  # Triton needs a GPU

    rows, vocabulary = probs.shape
    out = torch.empty(rows, dtype=torch.int64, device=probs.device)
    probs = probs.contiguous()
    draw_rows[(rows,)](probs, seeds, positions, out, vocabulary, seeds.stride(0), BLOCK=BLOCK)
    return out
