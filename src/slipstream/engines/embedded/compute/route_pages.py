"""The experts that cached tokens were sent to, in pages beside their keys and values. So a prefix that samples share, a copied
page and a preempted sample need no bookkeeping of their own."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from slipstream.engines.embedded.compute.attention import places
from slipstream.engines.embedded.scheduling.shapes import Shapes
from slipstream.engines.frontend.sequence import Sample
from slipstream.model.config import ModelConfig
from slipstream.types import ExpertRoutes


def new_route_pages(config: ModelConfig, shapes: Shapes, sharding: Sharding) -> jax.Array:
    """Return zeros `[pages, page_size, layers with experts × experts per token]`."""
    assert config.moe is not None, "programs_for checks it"
    width = len(config.expert_layers) * config.moe.experts_per_token
    return jnp.zeros((shapes.num_pages, shapes.page_size, width), f"uint{8 * config.moe.route_size}", device=sharding)


def write_routes(pages: jax.Array, chosen: Sequence[jax.Array], tables: jax.Array, positions: jax.Array) -> jax.Array:
    """Write each layer's `chosen` `[blocks, time, experts per token]` to the tokens' places."""
    num_pages, page_size, width = pages.shape
    page, offset = places(tables, positions, num_pages, page_size)
    rows = jnp.concatenate(chosen, axis=-1).reshape(-1, width)
    return pages.at[page, offset].set(rows.astype(pages.dtype), mode="drop")


def take_routes(pages: jax.Array, config: ModelConfig, samples: Sequence[Sample]) -> None:
    """Set the routes of finished samples, which still have their pages."""
    assert config.moe is not None
    held = np.concatenate([sample.pages for sample in samples]).astype(np.int32)
    padded = np.pad(held, (0, (1 << (len(held) - 1).bit_length()) - len(held)))  # so that few shapes are compiled
    rows = np.asarray(_gather(pages, padded))
    start = 0
    for sample in samples:
        own = rows[start : start + len(sample.pages)].reshape(-1, rows.shape[2])[: sample.length - 1]
        start += len(sample.pages)
        sample.routes = ExpertRoutes(
            own.tobytes(), len(config.expert_layers), config.moe.experts_per_token, config.moe.route_size
        )


@jax.jit
def _gather(pages: jax.Array, wanted: jax.Array) -> jax.Array:
    return pages[wanted]
