"""What an engine is made of, from its options: shapes, attention, programs, and the draft model's part."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import jax

from slipstream.config import EngineConfig
from slipstream.engines.embedded.attention import BlockwiseAttention, NaiveAttention, PagedAttention
from slipstream.engines.embedded.placement import Placement
from slipstream.engines.embedded.programs import Programs
from slipstream.engines.embedded.shapes import MIN_ROWS, Shapes, ladder
from slipstream.errors import ConfigError
from slipstream.model.config import ModelConfig
from slipstream.types import Parameter, TensorSpec
from slipstream.weights import families
from slipstream.weights.publisher import DRAFT

CPU_SHARE, DEVICE_SHARE = 0.125, 0.6
"""Of memory that the KV cache may take when `kv_cache_tokens` does not say: of the host's, and of a device's free."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from malloc.h

T = TypeVar("T")


def shapes_for(model: ModelConfig, options: EngineConfig) -> Shapes:
    """CPU: a step's time follows its rows, so there are many sizes of it. Accelerators: it hardly does, and compiling takes
    longer, so there are few; and more work at once hides the way to the device."""
    max_length = _max_length(model, options)
    on_cpu = jax.default_backend() == "cpu"
    rows = max(options.max_concurrency, MIN_ROWS)
    block = 16 if on_cpu else 32
    chunk = options.prefill_tokens or (256 if on_cpu else 4096)
    guesses = 0 if options.speculation == "off" else options.speculative_tokens
    shapes = Shapes(
        page_size=min(options.page_size, max_length),
        num_pages=1,
        max_length=max_length,
        rows=ladder(MIN_ROWS, rows, 2) if on_cpu else ladder(min(32, rows), rows, 4),
        block=block,
        blocks=ladder(1, max(1, chunk // block), 4) if on_cpu else ladder(8, max(8, chunk // block), 4),
        max_steps=max(options.decode_steps or (16 if on_cpu else 32), guesses + 1),  # a draft guesses in one call
        guesses=guesses,
        has_draft=options.speculation == "draft",
    )
    if options.deterministic and not on_cpu and shapes.guesses:
        raise ConfigError(
            "deterministic and speculation do not go together on an accelerator: checking guesses multiplies matrices of "
            "another shape, and another shape means other bits there"
        )
    if options.deterministic and not on_cpu:
        # One number of rows for everything, one token per row: every product of matrices has the same shape.
        shapes = replace(shapes, rows=(rows,), block=1, blocks=(rows,))
    return replace(shapes, num_pages=_num_pages(model, options, shapes))


def _num_pages(model: ModelConfig, options: EngineConfig, shapes: Shapes) -> int:
    if options.kv_cache_tokens:
        return max(1, options.kv_cache_tokens // shapes.page_size)
    wanted = options.max_concurrency * shapes.table_width
    itemsize = 4 if options.dtype == "float32" else 2
    token_bytes = 2 * model.num_layers * model.num_kv_heads * model.head_dim * itemsize
    most = int(_memory() * options.tp) // (token_bytes * shapes.page_size)
    return max(shapes.table_width, min(wanted, most))


def _memory() -> float:
    """Bytes that a device's part of the KV cache may take."""
    stats = jax.devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return DEVICE_SHARE * (stats["bytes_limit"] - stats["bytes_in_use"])
    return CPU_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def attention_for(options: EngineConfig, head_dim: int, page_size: int, backend: str) -> PagedAttention:
    """Raises `ConfigError` where the kernels that were asked for do not take the model."""
    kind = options.attention
    if kind == "pallas" or (kind == "auto" and backend == "gpu"):
        from slipstream.engines.embedded.attention_gpu import PallasAttention, why_not

        why = why_not(head_dim, page_size)
        if not why:
            return PallasAttention(deterministic=bool(options.deterministic))
        if kind == "pallas" or options.deterministic:
            name = "attention='pallas'" if kind == "pallas" else "deterministic on a GPU"
            raise ConfigError(f"{name} cannot be had for this model: {why}")
    return NaiveAttention() if kind == "naive" else BlockwiseAttention()


@functools.lru_cache(maxsize=16)
def programs_for(model: ModelConfig, options: EngineConfig, shapes: Shapes) -> Programs:
    """Engines of one shape in one process share what is compiled."""
    placement = Placement(model, options.tp, options.dtype)
    attention = attention_for(options, model.head_dim, shapes.page_size, jax.default_backend())
    return Programs(model, placement, shapes, attention)


def keep_freed_memory() -> None:
    """On CPU a program's temporary memory is large, and glibc would give it back and fault it in again page by page with
    every call, which takes as long as sampling. Asked to keep it, the process keeps what its largest program needed."""
    if jax.default_backend() == "cpu":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's own
        for option in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
            if mallopt is not None:
                mallopt(option, 1 << 30)


def check_draft(model: ModelConfig, draft: ModelConfig) -> None:
    if draft.vocab_size != model.vocab_size:
        raise ConfigError(
            f"the draft model has {draft.vocab_size} tokens, the policy {model.vocab_size}: they must share a vocabulary"
        )


def draft_tensors(model: ModelConfig) -> tuple[TensorSpec, ...]:
    return tuple(replace(spec, name=DRAFT + spec.name) for spec in families.tensors(model))


def draft_parameters(model: ModelConfig, tp: int) -> tuple[Parameter, ...]:
    def renamed(parameter: Parameter) -> Parameter:
        parts = tuple(replace(part, tensor=DRAFT + part.tensor) for part in parameter.parts)
        return replace(parameter, name=DRAFT + parameter.name, parts=parts)

    return tuple(renamed(parameter) for parameter in families.parameters(model, tp))


def split_draft(named: Mapping[str, Sequence[T]]) -> tuple[dict[str, Sequence[T]], dict[str, Sequence[T]]]:
    """The policy's and the draft's, each under its own names."""
    policy = {name: value for name, value in named.items() if not name.startswith(DRAFT)}
    return policy, {name.removeprefix(DRAFT): value for name, value in named.items() if name.startswith(DRAFT)}


def _max_length(model: ModelConfig, options: EngineConfig) -> int:
    if options.max_model_len > model.max_position_embeddings:
        raise ConfigError(
            f"max_model_len is {options.max_model_len}, but the model knows {model.max_position_embeddings} positions "
            "(max_position_embeddings in config.json); 0 takes the model's limit"
        )
    return options.max_model_len or model.max_position_embeddings
