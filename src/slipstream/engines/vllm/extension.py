"""What we add to vLLM's workers: `worker_extension_cls`. Its methods are called on all workers at once, by name; arguments
and results are plain values."""

from __future__ import annotations

import math
import mmap
import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from slipstream.engines.vllm.compat import external_id
from slipstream.engines.vllm.sampler import TwofoldSampler
from slipstream.weights.transports import shm

POLL_SECONDS = 0.5


class Extension:
    """`self` is a vLLM worker. Nothing here runs during a step: vLLM calls between two."""

    model_runner: Any
    vllm_config: Any

    def slipstream_install(self, owner: int, names: Sequence[str]) -> dict[str, int]:
        """Once, after the model is loaded. `owner` is the process that hosts the engine; without it there is no reason to
        live. `names` are those of all tensors of the model. Returns this process's pid, and the bytes of its KV cache."""
        old = self.model_runner.sampler
        new = TwofoldSampler.__new__(TwofoldSampler)
        new.__dict__.update(old.__dict__)
        self.model_runner.sampler = new
        self._slipstream_maps: dict[str, mmap.mmap] = {}
        self._slipstream_sizes: dict[int, int] = {}
        self._slipstream_names = frozenset(names)
        threading.Thread(target=_follow, args=(owner,), name="slipstream-lifeline", daemon=True).start()
        return {"pid": os.getpid(), "kv_cache": sum(s.nbytes() for s in self._slipstream_storages("kv_cache"))}

    def slipstream_drawn(self) -> dict[str, int]:
        """How many tokens each request has drawn. Requests that never ran are not among them."""
        return {
            external_id(name): len(state.output_token_ids)
            for name, state in self.model_runner.requests.items()
            if state.output_token_ids
        }

    def slipstream_map(self, files: Sequence[str]) -> None:
        """From now on these files of shared memory can be loaded from, and no others."""
        self._slipstream_maps = {file: self._slipstream_maps.get(file) or _mapped(file) for file in files}

    def slipstream_load(self, tensors: Sequence[Sequence[Any]], dtype: str) -> float:
        """Replaces all weights. `tensors` are `(name, file, offset, shape)`: whole, under their Hugging Face names, in files of
        shared memory. Those that are not named come from the checkpoint that the engine was started with. Returns the
        seconds that it took."""
        start = time.perf_counter()
        self.slipstream_grow("weights")
        self.reload_weights(weights_iterator=self._slipstream_weights(tensors, getattr(torch, dtype)))  # type: ignore[attr-defined]
        return time.perf_counter() - start

    def _slipstream_weights(
        self, tensors: Sequence[Sequence[Any]], dtype: torch.dtype
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, file, offset, shape in tensors:
            count = math.prod(shape)
            memory = torch.frombuffer(self._slipstream_maps[file], dtype=dtype, count=count, offset=offset)
            yield name, memory.reshape(shape)
        sent = {name for name, _, _, _ in tensors}
        if self._slipstream_names - sent:
            from vllm.model_executor.model_loader import get_model_loader

            loader = get_model_loader(self.vllm_config.load_config)
            model = self.model_runner.get_model()
            for name, tensor in loader.get_all_weights(self.vllm_config.model_config, model):
                if name not in sent:
                    yield name, tensor

    # --- memory, on CPU, where vLLM itself has no sleep mode ---

    def slipstream_shrink(self, tags: Sequence[str]) -> None:
        """Gives the memory behind `tags` back to the system; the tensors stay, empty."""
        for tag in tags:
            for storage in self._slipstream_storages(tag):
                self._slipstream_sizes[storage._cdata] = storage.nbytes()
                storage.resize_(0)
        if "weights" in tags:
            for module in self.model_runner.get_model().modules():
                if hasattr(module, "cpu_linear"):
                    module.cpu_linear = None  # a packed copy of the weight; loading makes it anew

    def slipstream_grow(self, tag: str) -> None:
        """The opposite. What was there is gone: zeros, since what lies about in memory may be NaN, and zero times NaN is."""
        for storage in self._slipstream_storages(tag):
            if storage.nbytes() == 0 and (size := self._slipstream_sizes.pop(storage._cdata, 0)):
                storage.resize_(size)
                storage.fill_(0)  # type: ignore[attr-defined]

    def _slipstream_storages(self, tag: str) -> list[torch.UntypedStorage]:
        tensors = (
            self.model_runner.get_model().parameters() if tag == "weights" else _tensors(self.model_runner.kv_caches)
        )
        return list({t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}.values())


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    else:
        for item in tree:
            yield from _tensors(item)


def _mapped(file: str) -> mmap.mmap:
    fd = os.open(file, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return mmap.mmap(fd, 0)
    finally:
        os.close(fd)


def _follow(owner: int) -> None:
    since = shm.started(owner)
    while since and shm.started(owner) == since:
        time.sleep(POLL_SECONDS)
    os._exit(1)
