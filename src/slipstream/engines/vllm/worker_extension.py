"""The methods we add to vLLM's workers (`worker_extension_cls`). The engine calls them by name, on all workers at once;
arguments and results are plain values."""

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
from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank
from vllm.model_executor.model_loader import get_model_loader

from slipstream.engines.frontend.draw_rate import Drawn, DrawRate
from slipstream.engines.vllm import compat
from slipstream.engines.vllm.draft import WorkerDraft
from slipstream.engines.vllm.live_parameters import LiveParameters, NotYetReceived
from slipstream.engines.vllm.mapping_check import check_mapping, module_siblings, random_tensors
from slipstream.engines.vllm.sampler import DualLogprobSampler
from slipstream.engines.vllm.shared_names import remove_names
from slipstream.engines.vllm.undoable_reload import (
    NothingWritten,
    UndoableReload,
    Weights,
    abandon,
    pack_tied,
    reset_scales,
)
from slipstream.engines.vllm.worker_adapters import AdapterExtension, without_adapters
from slipstream.errors import ChecksumMismatch
from slipstream.model import families
from slipstream.model.checkpoints.hf_config import read_config
from slipstream.model.families.vllm_parameters import vllm_parameters, written_parameters
from slipstream.runtime.process_times import process_start_time
from slipstream.types import Parameter, TensorSpec
from slipstream.vllm_arguments import DRAFT_MODEL
from slipstream.weights.plan import Plan
from slipstream.weights.transports.cuda.driver import CudaDriver, NotExportable
from slipstream.weights.transports.shared.engine_memory import export_parameters
from slipstream.weights.update.publisher import DRAFT

POLL_SECONDS = 0.5

compat.pin_norms()  # here, because workers import this module before they capture CUDA graphs


class WorkerExtension(AdapterExtension):
    """`self` is a vLLM worker. vLLM calls these methods between two steps, never during one."""

    model_runner: Any
    vllm_config: Any
    device: torch.device
    _sleep_saved_buffers: dict[str, torch.Tensor]

    def slipstream_install(self, tensors: Sequence[tuple[str, Sequence[int]]]) -> dict[str, int]:
        """Set up this worker; called once, after the model is loaded. `tensors` are names and shapes of all tensors of the
        checkpoint. Return this process's pid and the bytes of its KV cache."""
        self._slipstream_token_counts, self._slipstream_draw_rate = self._slipstream_replace_sampler()
        self._slipstream_maps: dict[str, mmap.mmap] = {}
        self._slipstream_sizes: dict[int, int] = {}
        self._slipstream_tensors = [TensorSpec(name, tuple(shape)) for name, shape in tensors]
        self._slipstream_rank = (
            get_pp_group().rank_in_group * self._slipstream_split[0] + get_tensor_model_parallel_rank()
        )
        self._slipstream_prepare_stage()
        self._slipstream_adapters = None
        self._slipstream_draft: WorkerDraft | None = None
        if getattr(self.vllm_config.speculative_config, "method", "") == DRAFT_MODEL:
            self._slipstream_draft = WorkerDraft(self.vllm_config, self.model_runner, self._slipstream_split[0])
        if self.vllm_config.load_config.load_format == "dummy":
            reset_scales(self.model_runner.get_model())
        if not compat.is_cpu():
            model = self.model_runner.get_model()
            self._slipstream_reload = UndoableReload(model, self._slipstream_load, self.device)
            live = self._slipstream_named_parameters()
            live |= self._slipstream_draft.live() if self._slipstream_draft else {}
            self._slipstream_live = LiveParameters(live, self._slipstream_reload, self._slipstream_rank, self.device)
        remove_names()
        return {"pid": os.getpid(), "kv_cache": sum(s.nbytes() for s in self._slipstream_storages("kv_cache"))}

    def _slipstream_replace_sampler(self) -> tuple[Callable[[], dict[str, int]], DrawRate]:
        """Install our sampler. Return its function that counts the tokens each request has drawn, and their rate. With the V2
        runner, only the last stage of a pipeline has a sampler."""
        if self.model_runner.sampler is None:
            return dict, DrawRate()
        if getattr(self.vllm_config, "use_v2_model_runner", False):
            from slipstream.engines.vllm.v2_runner import DualLogprobV2Sampler

            sampler = DualLogprobV2Sampler.replace_sampler(self.model_runner)
            return sampler.token_counts, sampler.draw_rate
        batch = DualLogprobSampler.replace_sampler(self.model_runner).batch
        return batch.token_counts, batch.draw_rate

    def _slipstream_prepare_stage(self) -> None:
        """Allocate the buffers in which a later stage of a pipeline receives. vLLM allocates them in a profiling run, and makes
        none on CPU without compilation."""
        runner = self.model_runner
        if not get_pp_group().is_first_rank and getattr(runner, "intermediate_tensors", ()) is None:
            runner.intermediate_tensors = runner.get_model().make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=self.device
            )

    def slipstream_drawn(self) -> Drawn:
        counts = {compat.external_id(name): count for name, count in self._slipstream_token_counts().items() if count}
        return counts, self._slipstream_draw_rate.tokens_per_second

    def slipstream_map_files(self, files: Sequence[str]) -> None:
        """Map these files of shared memory, and unmap all others."""
        self._slipstream_maps = {file: self._slipstream_maps.get(file) or _map_file(file) for file in files}

    # --- on CPU: all weights through vLLM's loader ---

    def slipstream_reload(self, tensors: Sequence[Sequence[Any]], dtype: str) -> float:
        """Replace all weights; return the seconds it took. `tensors` are `(name, file, offset, shape)`: whole, under their
        Hugging Face names, in mapped files. Tensors that are not named are read from the engine's checkpoint."""
        start = time.perf_counter()
        self.slipstream_allocate_memory("weights")
        policy = [tensor for tensor in tensors if not tensor[0].startswith(DRAFT)]
        self._slipstream_load(self._slipstream_weights(policy, getattr(torch, dtype)))
        draft = [[tensor[0].removeprefix(DRAFT), *tensor[1:]] for tensor in tensors if tensor[0].startswith(DRAFT)]
        if draft and self._slipstream_draft is not None:
            count = sum(t.name.startswith(DRAFT) for t in self._slipstream_tensors)
            sent = dict(self._slipstream_mapped(draft, getattr(torch, dtype)))
            self._slipstream_draft.update(sent, is_whole=len(sent) == count)
        return time.perf_counter() - start

    def _slipstream_weights(self, tensors: Sequence[Sequence[Any]], dtype: torch.dtype) -> Weights:
        yield from self._slipstream_mapped(tensors, dtype)
        sent = {name for name, _, _, _ in tensors}
        if {t.name for t in self._slipstream_tensors if not t.name.startswith(DRAFT)} - sent:
            loader = get_model_loader(self.vllm_config.load_config)
            model = self.model_runner.get_model()
            for name, tensor in loader.get_all_weights(self.vllm_config.model_config, model):
                if name not in sent:
                    yield name, tensor

    def _slipstream_mapped(self, tensors: Sequence[Sequence[Any]], dtype: torch.dtype) -> Weights:
        for name, file, offset, shape in tensors:
            yield name, self._slipstream_tensor(file, offset, shape, dtype)

    def _slipstream_tensor(self, file: str, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        count = math.prod(shape)
        memory = torch.frombuffer(self._slipstream_maps[file], dtype=dtype, count=count, offset=offset)
        return memory.reshape(tuple(shape))

    def _slipstream_load(self, weights: Weights) -> None:
        """Give weights to vLLM's own loader. If it fails, layers have the parameters of the old version or of the new one."""
        model = self.model_runner.get_model()
        with without_adapters(model):
            try:
                self.reload_weights(weights_iterator=weights)  # type: ignore[attr-defined]
            except BaseException:
                abandon(model)
                raise
            pack_tied(model)
        if self._slipstream_adapters is not None:  # vLLM may have removed them
            self._slipstream_adapters.restore()

    def _slipstream_named_parameters(self) -> dict[str, torch.Tensor]:
        """Return the live parameters, by the names that they have without adapters."""
        model = self.model_runner.get_model()
        with without_adapters(model):
            return {name: parameter.data for name, parameter in model.named_parameters()}

    # --- on GPU: straight into the live parameters ---

    def slipstream_check_mapping(self, directory: str, has_weights: bool) -> dict[str, str]:
        """Return the live parameters that cannot be written directly, with the reason; called once, after
        `slipstream_install`. Checks with the weights the engine was started with, or else with random ones."""
        model = self.model_runner.get_model()
        config = read_config(Path(directory))
        live = self._slipstream_named_parameters()
        self._slipstream_config = config
        own, dtype = self._slipstream_parameters(), next(iter(live.values())).dtype
        if has_weights:
            loader = get_model_loader(self.vllm_config.load_config)
            failed = check_mapping(live, own, loader.get_all_weights(self.vllm_config.model_config, model))
        else:
            specs = [(t.name, t.shape) for t in families.tensors(config)]
            self._slipstream_load(random_tensors(specs, dtype, self.device))
            failed = check_mapping(live, own, random_tensors(specs, dtype, self.device))
        siblings = module_siblings(failed, live) - failed.keys()
        failed |= dict.fromkeys(siblings, "another parameter of its module failed the check")
        return failed | (self._slipstream_draft.check_mapping(self._slipstream_rank) if self._slipstream_draft else {})

    @property
    def _slipstream_split(self) -> tuple[int, int, bool]:
        """Tensor-parallel size, pipeline stages, and whether experts are split over ranks."""
        parallel = self.vllm_config.parallel_config
        tp, pp = int(parallel.tensor_parallel_size), int(parallel.pipeline_parallel_size)
        return tp, pp, bool(parallel.enable_expert_parallel)

    def _slipstream_parameters(self) -> list[Parameter]:
        """The live parameters of this rank, without those of a draft model."""
        parameters = vllm_parameters(self._slipstream_config, *self._slipstream_split)
        return [p for p in parameters if p.rank == self._slipstream_rank]

    def slipstream_export(self) -> bytes | str:
        """Return where the live parameters lie, for a trainer that writes them itself; or why it cannot. Nothing reads or
        writes them any more."""
        torch.cuda.synchronize(self.device)
        live = self._slipstream_named_parameters()
        try:
            return export_parameters(live, CudaDriver(self.device.index or 0))
        except NotExportable as error:
            return str(error)

    def slipstream_connect(self, transport: str, plan: bytes, failed: Sequence[str] | None) -> list[bytes]:
        """Prepare to receive from a trainer by this plan. Return links by trainer rank. `failed` are the parameters that go
        through vLLM's loader; None means all."""
        tp, pp, ep = self._slipstream_split
        if failed is None:
            parameters = families.whole_parameters(self._slipstream_tensors, tp * pp)
            reloaded = frozenset(t.name for t in self._slipstream_tensors)
        else:
            parameters, reloaded = written_parameters(self._slipstream_config, tp, failed, pp, ep)
            parameters += self._slipstream_draft.parameters() if self._slipstream_draft else ()
        return self._slipstream_live.connect(transport, Plan.from_bytes(plan), parameters, reloaded)

    def slipstream_expect(self, version: int) -> None:
        self._slipstream_live.expect(version)

    def slipstream_receive(self, version: int, indices: Sequence[Sequence[int]], timeout: float) -> float | str | None:
        """Wait for these pieces, listed by rank. Return the seconds their transfer took, the text of a `ChecksumMismatch`, or
        None after `timeout` seconds. No step runs meanwhile."""
        try:
            return self._slipstream_live.receive(version, indices[self._slipstream_rank], timeout)
        except ChecksumMismatch as error:  # vLLM would not keep the class of an exception
            return str(error)

    def slipstream_apply(
        self, version: int, indices: Sequence[Sequence[int]], timeout: float
    ) -> tuple[Drawn, float, str, bool]:
        """Write these pieces, listed by rank, of a staged version, waiting for them at most `timeout` seconds.

        Return the tokens that requests have drawn, the seconds that writing took, why nothing was written ("" if it was), and
        whether a retry may succeed. Counting and writing are one call, so that no step runs between them."""
        start, drawn, reason, may_retry, seconds = time.perf_counter(), self.slipstream_drawn(), "", False, 0.0
        try:
            if own := indices[self._slipstream_rank]:  # a stage of a pipeline may have nothing to write
                seconds = self._slipstream_live.apply(version, own, timeout)
        except NothingWritten as error:
            reason, may_retry = str(error), isinstance(error, NotYetReceived)
        return drawn, max(seconds, time.perf_counter() - start), reason, may_retry

    def slipstream_write(
        self, places: Sequence[Any], dtype: str, reloaded: Sequence[str]
    ) -> tuple[Drawn, float, str, bool]:
        """Like `slipstream_apply`, for parameters in mapped files: `(name, per rank (file, offset, shape))`, with None for
        ranks that do not have it."""
        drawn, torch_dtype, start = self.slipstream_drawn(), getattr(torch, dtype), time.perf_counter()
        reason = ""
        own = [(name, *place) for name, by_rank in places if (place := by_rank[self._slipstream_rank]) is not None]
        tensors = (
            (name, self._slipstream_tensor(file, offset, shape, torch_dtype)) for name, file, offset, shape in own
        )
        try:
            self._slipstream_live.write(tensors, reloaded)
        except NothingWritten as error:
            reason = str(error)
        return drawn, time.perf_counter() - start, reason, False

    def slipstream_settle(self) -> None:
        """Drop the copy of what vLLM's loader has replaced: all workers have loaded the version."""
        self._slipstream_reload.settle()

    def slipstream_undo(self) -> None:
        """Bring back what vLLM's loader has replaced: another worker could not load the version."""
        self._slipstream_reload.undo()

    def slipstream_checksums(self, names: Sequence[str]) -> list[tuple[str, list[int]]]:
        """Return a checksum for each part of these parameters."""
        wanted, parameters = set(names), self._slipstream_parameters()
        if self._slipstream_draft is not None:
            parameters += [p for p in self._slipstream_draft.parameters() if p.rank == self._slipstream_rank]
        return self._slipstream_live.checksums([p for p in parameters if p.name in wanted])

    def slipstream_discard(self) -> None:
        """Drop the update in progress."""
        self._slipstream_live.discard()

    def slipstream_disconnect(self) -> None:
        """Release everything held for the trainer."""
        self._slipstream_live.close()

    def slipstream_sleep(self, level: int) -> None:
        """Like vLLM's `sleep`, which fails if some of its memory is asleep already."""
        from vllm.device_allocator import get_mem_allocator_instance

        allocator = get_mem_allocator_instance()
        allocations = allocator.pointer_to_data
        if level == 2 and any(data.cpu_backup_tensor is not None for data in allocations.values()):
            self.wake_up(["weights"])  # type: ignore[attr-defined]  # or their copy in host memory would stay
        allocator.pointer_to_data = {address: data for address, data in allocations.items() if not data.is_asleep}
        try:
            self.sleep(level)  # type: ignore[attr-defined]
        finally:
            allocator.pointer_to_data = allocations

    def slipstream_wake(self, tags: Sequence[str]) -> None:
        """Like vLLM's `wake_up`, which after a sleep at level 2 writes the model's buffers whatever it wakes: while the weights
        sleep, no memory backs them."""
        buffers = self._sleep_saved_buffers
        if "weights" not in tags:
            self._sleep_saved_buffers = {}
        try:
            self.wake_up(list(tags))  # type: ignore[attr-defined]
        finally:
            if "weights" not in tags:
                self._sleep_saved_buffers = buffers
        if "weights" in tags and self._slipstream_adapters is not None:  # level 2 has dropped them on the device
            self._slipstream_adapters.restore()

    def slipstream_memory_in_use(self) -> int:
        """Return the bytes of device memory that back the weights and the KV cache."""
        from vllm.device_allocator import get_mem_allocator_instance

        allocations = get_mem_allocator_instance().pointer_to_data.values()
        return sum(data.handle[1] for data in allocations if not data.is_asleep)

    # --- memory on CPU, where vLLM has no sleep mode ---

    def slipstream_free_memory(self, tags: Sequence[str]) -> None:
        """Return the memory of `tags` to the system; the tensors stay, without storage."""
        for tag in tags:
            for storage in self._slipstream_storages(tag):
                self._slipstream_sizes[storage._cdata] = storage.nbytes()
                storage.resize_(0)
        if "weights" in tags:
            model = self.model_runner.get_model()
            with without_adapters(model):
                for module in model.modules():
                    if hasattr(module, "cpu_linear"):
                        module.cpu_linear = None  # a packed copy of the weight; loading packs it again

    def slipstream_allocate_memory(self, tag: str) -> None:
        """Undo `slipstream_free_memory`. The memory is zeroed: uninitialized memory may hold NaN, and zero times NaN is NaN."""
        for storage in self._slipstream_storages(tag):
            if storage.nbytes() == 0 and (size := self._slipstream_sizes.pop(storage._cdata, 0)):
                storage.resize_(size)
                storage.fill_(0)

    def _slipstream_storages(self, tag: str) -> list[torch.UntypedStorage]:
        tensors = (
            self.model_runner.get_model().parameters() if tag == "weights" else _leaves(self.model_runner.kv_caches)
        )
        return list({t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}.values())


def _leaves(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    else:
        for item in tree:
            yield from _leaves(item)


def _map_file(file: str) -> mmap.mmap:
    fd = os.open(file, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return mmap.mmap(fd, 0)
    finally:
        os.close(fd)


def _exit_with(owner: int) -> None:
    """Exit this process when process `owner` has ended."""
    started = process_start_time(owner)
    while started and process_start_time(owner) == started:
        time.sleep(POLL_SECONDS)
    os._exit(1)


# Here, because workers import this module before they load the model, which may take minutes. vLLM's own processes do not
# notice that the one that hosts the engine has been killed; they end when a worker does.
if (_owner := int(os.environ.get(compat.OWNER_VARIABLE, "0"))) not in (0, os.getpid()):
    threading.Thread(target=_exit_with, args=(_owner,), name="slipstream-lifeline", daemon=True).start()
