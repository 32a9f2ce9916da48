"""What we add to vLLM's workers: `worker_extension_cls`. Its methods are called on all workers at once, by name; arguments
and results are plain values."""

from __future__ import annotations

import math
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.model_loader import get_model_loader

from slipstream.engines.vllm import compat
from slipstream.engines.vllm.live import Live, NothingWritten, NotYet, invented, prove, with_their_modules
from slipstream.engines.vllm.sampler import TwofoldSampler
from slipstream.model.config import ModelConfig
from slipstream.weights import families
from slipstream.weights.families.live import vllm_parameters, written_parameters
from slipstream.weights.plan import Plan
from slipstream.weights.transports import shm

POLL_SECONDS = 0.5


class Extension:
    """`self` is a vLLM worker. Nothing here runs during a step: vLLM calls between two."""

    model_runner: Any
    vllm_config: Any
    device: torch.device
    _sleep_saved_buffers: dict[str, torch.Tensor]

    def slipstream_install(self, owner: int, names: Sequence[str]) -> dict[str, int]:
        """Once, after the model is loaded. `owner` is the process that hosts the engine; without it there is no reason to
        live. `names` are those of all tensors of the model. Returns this process's pid, and the bytes of its KV cache."""
        self._slipstream_counts = self._slipstream_sampler()
        self._slipstream_maps: dict[str, mmap.mmap] = {}
        self._slipstream_sizes: dict[int, int] = {}
        self._slipstream_names = frozenset(names)
        self._slipstream_rank = get_tensor_model_parallel_rank()
        threading.Thread(target=_follow, args=(owner,), name="slipstream-lifeline", daemon=True).start()
        return {"pid": os.getpid(), "kv_cache": sum(s.nbytes() for s in self._slipstream_storages("kv_cache"))}

    def _slipstream_sampler(self) -> Callable[[], dict[str, int]]:
        """Puts a sampler of ours in the place of vLLM's. What is returned says how many tokens each request has drawn."""
        if compat.has_second_runner(self.vllm_config):
            from slipstream.engines.vllm.second_runner import TwofoldSlots

            return TwofoldSlots.take_over(self.model_runner).drawn
        return TwofoldSampler.take_over(self.model_runner).drawn

    def slipstream_drawn(self) -> dict[str, int]:
        """How many tokens each request has drawn. Requests that never ran are not among them."""
        return {compat.external_id(name): count for name, count in self._slipstream_counts().items() if count}

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
        self._slipstream_pack_tied()
        return time.perf_counter() - start

    def _slipstream_pack_tied(self) -> None:
        """A head that is tied to the embedding has no weight of its own to load, so vLLM would leave it with the packed copy of
        the old one."""
        seen: set[int] = set()
        for module in self.model_runner.get_model().modules():
            if (weight := getattr(module, "weight", None)) is None:
                continue
            if id(weight) in seen and hasattr(module, "cpu_linear"):
                module.quant_method.process_weights_after_loading(module)
            seen.add(id(weight))

    def _slipstream_weights(
        self, tensors: Sequence[Sequence[Any]], dtype: torch.dtype
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, file, offset, shape in tensors:
            yield name, self._slipstream_tensor(file, offset, shape, dtype)
        sent = {name for name, _, _, _ in tensors}
        if self._slipstream_names - sent:
            loader = get_model_loader(self.vllm_config.load_config)
            model = self.model_runner.get_model()
            for name, tensor in loader.get_all_weights(self.vllm_config.model_config, model):
                if name not in sent:
                    yield name, tensor

    def _slipstream_tensor(self, file: str, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        count = math.prod(shape)
        memory = torch.frombuffer(self._slipstream_maps[file], dtype=dtype, count=count, offset=offset)
        return memory.reshape(tuple(shape))

    # --- on GPU: straight into the live parameters ---

    def slipstream_prove(self, directory: str, has_weights: bool) -> dict[str, str]:
        """Once, after `slipstream_install`. Returns the live parameters that are not what we think, and why: with the weights
        that the engine was started with, or, without any, with some that are made up for it."""
        model = self.model_runner.get_model()
        config = ModelConfig.read(Path(directory))
        live = {name: parameter.data for name, parameter in model.named_parameters()}
        self._slipstream_live = Live(live, self._slipstream_reload, self._slipstream_rank, self.device)
        self._slipstream_config = config
        tp = self.vllm_config.parallel_config.tensor_parallel_size
        own = [p for p in vllm_parameters(config, tp) if p.rank == self._slipstream_rank]
        dtype = next(iter(live.values())).dtype
        if has_weights:
            loader = get_model_loader(self.vllm_config.load_config)
            failed = prove(live, own, loader.get_all_weights(self.vllm_config.model_config, model))
        else:
            specs = [(t.name, t.shape) for t in families.tensors(config)]
            self._slipstream_reload(invented(specs, dtype, self.device))
            failed = prove(live, own, invented(specs, dtype, self.device))
        beside = with_their_modules(failed, live) - failed.keys()
        return failed | dict.fromkeys(beside, "a parameter of the same module is not what we think")

    def slipstream_open(self, transport: str, plan: bytes, failed: Sequence[str]) -> list[bytes]:
        """A trainer is coming with weights, by this plan. Links by trainer rank."""
        tp = self.vllm_config.parallel_config.tensor_parallel_size
        parameters, reloaded = written_parameters(self._slipstream_config, tp, failed)
        return self._slipstream_live.open(transport, Plan.from_bytes(plan), parameters, reloaded)

    def slipstream_expect(self, version: int) -> None:
        self._slipstream_live.expect(version)

    def slipstream_stage(self, version: int, indices: Sequence[Sequence[int]], patience: float) -> float | None:
        """The seconds that it took these pieces, listed by rank, to come; None if they are not within reach after `patience`
        seconds. No step runs meanwhile."""
        return self._slipstream_live.receive(version, indices[self._slipstream_rank], patience)

    def slipstream_apply(
        self, version: int, indices: Sequence[Sequence[int]], patience: float
    ) -> tuple[dict[str, int], float, str, bool]:
        """Writes these pieces, listed by rank, of a staged version, if they are within reach within `patience` seconds. What
        every request has drawn so far, and the seconds that writing took: both in one call, so that no step comes between
        them. And why nothing was written, if so, and whether that may be otherwise later."""
        start, drawn, why, later, seconds = time.perf_counter(), self.slipstream_drawn(), "", False, 0.0
        try:
            if any(indices):
                seconds = self._slipstream_live.apply(version, indices[self._slipstream_rank], patience)
        except NothingWritten as error:
            why, later = str(error), isinstance(error, NotYet)
        return drawn, max(seconds, time.perf_counter() - start), why, later

    def slipstream_write(
        self, places: Sequence[Any], dtype: str, reloaded: Sequence[str]
    ) -> tuple[dict[str, int], float, str, bool]:
        """The same, for parameters in shared memory: `(name, per rank (file, offset, shape))`."""
        drawn, kind, start = self.slipstream_drawn(), getattr(torch, dtype), time.perf_counter()
        own = [(name, *at[self._slipstream_rank]) for name, at in places]
        self._slipstream_live.write(((n, self._slipstream_tensor(f, o, s, kind)) for n, f, o, s in own), reloaded)
        return drawn, time.perf_counter() - start, "", False

    def slipstream_checksums(self, names: Sequence[str]) -> list[tuple[str, list[int]]]:
        """Of these parameters, as they are now: a checksum for each of their parts."""
        tp = self.vllm_config.parallel_config.tensor_parallel_size
        own = [p for p in vllm_parameters(self._slipstream_config, tp) if p.rank == self._slipstream_rank]
        return self._slipstream_live.checksums([p for p in own if p.name in set(names)])

    def slipstream_forget(self) -> None:
        self._slipstream_live.forget()

    def slipstream_close(self) -> None:
        """The trainer is gone."""
        self._slipstream_live.close()

    def slipstream_sleep(self, level: int) -> None:
        """As vLLM's own `sleep`, which does not expect to find some of its memory asleep already."""
        from vllm.device_allocator import get_mem_allocator_instance

        allocator = get_mem_allocator_instance()
        everything = allocator.pointer_to_data
        if level == 2 and any(data.cpu_backup_tensor is not None for data in everything.values()):
            self.wake_up(["weights"])  # type: ignore[attr-defined]  # else its copy in host memory would stay
        allocator.pointer_to_data = {at: data for at, data in everything.items() if not data.is_asleep}
        try:
            self.sleep(level)  # type: ignore[attr-defined]
        finally:
            allocator.pointer_to_data = everything

    def slipstream_wake(self, tags: Sequence[str]) -> None:
        """As vLLM's own `wake_up`, which after a sleep of level 2 writes the model's buffers whatever is woken: while the
        weights sleep, there is no memory behind them."""
        buffers = self._sleep_saved_buffers
        if "weights" not in tags:
            self._sleep_saved_buffers = {}
        try:
            self.wake_up(list(tags))  # type: ignore[attr-defined]
        finally:
            if "weights" not in tags:
                self._sleep_saved_buffers = buffers

    def slipstream_in_use(self) -> int:
        """Bytes of device memory behind the weights and the KV cache."""
        from vllm.device_allocator import get_mem_allocator_instance

        data = get_mem_allocator_instance().pointer_to_data.values()
        return sum(one.handle[1] for one in data if not one.is_asleep)

    def _slipstream_reload(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.reload_weights(weights_iterator=weights)  # type: ignore[attr-defined]

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
