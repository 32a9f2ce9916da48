"""What an engine needs to know of a server."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """The settings that all servers have; each dialect adds its own."""

    version: str
    dtype: str
    max_model_len: int
    block_size: int
    num_blocks: int
    kv_cache_bytes: int
    """Size of each worker's KV cache; 0 if unknown."""
    num_workers: int
    can_sleep: bool
    has_weights: bool
    """Whether the server holds the complete weights of its checkpoint."""
    is_paused: bool
