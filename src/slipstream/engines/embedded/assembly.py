"""Builds the parts of an engine from its options: shapes, attention, programs, draft model."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import jax

from slipstream.config import EmbeddedConfig
from slipstream.engines.embedded.compute.attention import BlockwiseAttention, NaiveAttention
from slipstream.engines.embedded.compute.placement import Placement
from slipstream.engines.embedded.compute.programs import PagedAttention, Programs
from slipstream.engines.embedded.scheduling.shapes import MIN_ROWS, Shapes, ladder
from slipstream.errors import ConfigError
from slipstream.model import families
from slipstream.model.config import ModelConfig
from slipstream.types import Parameter, TensorSpec
from slipstream.weights.update.publisher import DRAFT

CPU_SHARE, DEVICE_SHARE = 0.125, 0.6
"""Share of host memory, and of free device memory, that the KV cache takes unless `kv_cache_tokens` is set."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from malloc.h

T = TypeVar("T")


def shapes_for(model: ModelConfig, options: EmbeddedConfig) -> Shapes:
    """On CPU a step's time is proportional to its rows, so there are many sizes. On accelerators it hardly depends on them and
    compilation is slow, so there are few; larger batches hide the latency of dispatch."""
    max_length = _max_length(model, options)
    on_cpu = jax.default_backend() == "cpu"
    rows = max(options.max_num_seqs, MIN_ROWS)
    block = 16 if on_cpu else 32
    chunk = options.max_num_batched_tokens or (256 if on_cpu else 4096)
    num_speculative = 0 if options.speculation == "off" else options.num_speculative_tokens
    shapes = Shapes(
        page_size=min(options.block_size, max_length),
        num_pages=1,
        max_length=max_length,
        rows=ladder(MIN_ROWS, rows, 2) if on_cpu else ladder(min(32, rows), rows, 4),
        block=block,
        blocks=ladder(1, max(1, chunk // block), 4) if on_cpu else ladder(8, max(8, chunk // block), 4),
        # A draft model draws all its tokens in one call.
        max_steps=max(options.decode_steps or (16 if on_cpu else 32), num_speculative + 1),
        num_speculative=num_speculative,
        has_draft=options.speculation == "draft",
    )
    if options.deterministic and not on_cpu and shapes.num_speculative:
        raise ConfigError(
            "deterministic and speculation cannot be combined on an accelerator: verifying draft tokens multiplies matrices "
            "of another shape, which gives other bits there"
        )
    if options.deterministic and not on_cpu:
        # One row count everywhere and one token per row: all matrix products have the same shape.
        shapes = replace(shapes, rows=(rows,), block=1, blocks=(rows,))
    return replace(shapes, num_pages=_num_pages(model, options, shapes))


def _num_pages(model: ModelConfig, options: EmbeddedConfig, shapes: Shapes) -> int:
    if options.kv_cache_tokens:
        return max(1, options.kv_cache_tokens // shapes.page_size)
    wanted = options.max_num_seqs * shapes.table_width
    itemsize = 4 if options.dtype == "float32" else 2
    token_bytes = 2 * model.num_layers * model.num_kv_heads * model.head_dim * itemsize
    most = int(_memory() * options.tensor_parallel_size) // (token_bytes * shapes.page_size)
    return max(shapes.table_width, min(wanted, most))


def _memory() -> float:
    """Bytes per device that the KV cache takes at most if its size is not set."""
    stats = jax.devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return DEVICE_SHARE * (stats["bytes_limit"] - stats["bytes_in_use"])
    return CPU_SHARE * min(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), _container_limit())


def check_memory(models: Sequence[Programs], options: EmbeddedConfig) -> None:
    """Raise `ConfigError` if the KV cache does not fit into memory: the kernel would end the process, without a word, when it
    is first used."""
    needed = sum(programs.cache_bytes for programs in models)
    stats = jax.devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        available = (stats["bytes_limit"] - stats["bytes_in_use"]) * options.tensor_parallel_size
    else:
        available = min(_available(), _container_limit())
    if needed > available:
        shapes = models[0].shapes
        tokens = shapes.num_pages * shapes.page_size
        raise ConfigError(
            f"the KV cache of {tokens} tokens needs {needed / 1e9:.1f} GB, and {available / 1e9:.1f} GB are available; set "
            f"kv_cache_tokens to at most {int(tokens * available / needed)}"
        )


def _available() -> float:
    """Bytes of host memory that can be allocated without swapping, as the kernel estimates."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _container_limit() -> float:
    """Bytes that this process's container may use; infinity without one."""
    for file in ("memory.max", "memory/memory.limit_in_bytes"):  # cgroups of version 2, of version 1
        with contextlib.suppress(OSError, ValueError):  # the value may be the word "max"
            return int(Path("/sys/fs/cgroup", file).read_text())
    return math.inf


def attention_for(options: EmbeddedConfig, head_dim: int, page_size: int, backend: str) -> PagedAttention:
    """Choose the attention implementation. Raises `ConfigError` if the requested kernels do not support the model."""
    kind = options.attention
    if kind == "pallas" or (kind == "auto" and backend == "gpu"):
        from slipstream.engines.embedded.compute.attention_gpu import PallasAttention, unsupported_reason

        reason = unsupported_reason(head_dim, page_size)
        if not reason:
            return PallasAttention(deterministic=bool(options.deterministic))
        if kind == "pallas" or options.deterministic:
            name = "attention='pallas'" if kind == "pallas" else "deterministic on a GPU"
            raise ConfigError(f"{name} does not support this model: {reason}")
    return NaiveAttention() if kind == "naive" else BlockwiseAttention()


@functools.lru_cache(maxsize=16)
def programs_for(model: ModelConfig, options: EmbeddedConfig, shapes: Shapes) -> Programs:
    """Engines of the same shape in one process share compiled programs."""
    if options.record_routes and model.moe is None:
        raise ConfigError(f"record_routes records experts, and this {model.family} model has none; leave it out")
    placement = Placement(model, options.tensor_parallel_size, options.dtype)
    attention = attention_for(options, model.head_dim, shapes.page_size, jax.default_backend())
    return Programs(model, placement, shapes, attention, options.record_routes)


def keep_freed_memory() -> None:
    """Tell glibc to keep freed memory. On CPU, programs use large temporary buffers; returning them to the kernel and faulting
    them in again on every call takes as long as sampling. The process keeps what its largest program needed."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc only
    if mallopt is not None and jax.default_backend() == "cpu":
        for option in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
            mallopt(option, 1 << 30)


def tensors_and_parameters(
    model: ModelConfig, draft: ModelConfig | None, tp: int
) -> tuple[tuple[TensorSpec, ...], tuple[Parameter, ...]]:
    """What updates bring: the policy's, and those of the draft model with a prefix."""
    tensors, parameters = families.tensors(model), families.parameters(model, tp)
    if draft is None:
        return tensors, parameters
    if draft.vocab_size != model.vocab_size:
        raise ConfigError(
            f"the draft model has {draft.vocab_size} tokens, the policy {model.vocab_size}; they must share a vocabulary"
        )
    tensors += tuple(replace(spec, name=DRAFT + spec.name) for spec in families.tensors(draft))
    return tensors, parameters + families.prefixed(families.parameters(draft, tp), DRAFT)


def split_draft(named: Mapping[str, Sequence[T]]) -> tuple[dict[str, Sequence[T]], dict[str, Sequence[T]]]:
    """Split into the policy's and the draft model's tensors, the latter without their prefix."""
    policy = {name: value for name, value in named.items() if not name.startswith(DRAFT)}
    return policy, {name.removeprefix(DRAFT): value for name, value in named.items() if name.startswith(DRAFT)}


def _max_length(model: ModelConfig, options: EmbeddedConfig) -> int:
    if options.max_model_len > model.max_position_embeddings:
        raise ConfigError(
            f"max_model_len is {options.max_model_len}, but the model has {model.max_position_embeddings} positions "
            "(max_position_embeddings in config.json); set 0 for the model's limit"
        )
    return options.max_model_len or model.max_position_embeddings
