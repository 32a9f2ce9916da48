"""What a publisher remembers from one update to the next, against a real engine in this process."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest

import slipstream
from slipstream.config import EngineConfig
from slipstream.errors import MappingError
from tests.tiny import random_params, tiny_config, write_config

CONFIG = tiny_config()
PARAMS = jax.tree.map(jnp.asarray, random_params(CONFIG))
NORM = {"model.norm.weight": PARAMS["model"]["norm"]["weight"]}
NORM_BYTES = 4 * CONFIG.hidden_size


@pytest.fixture
def bridge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slipstream.Bridge]:
    """Its engine holds nothing yet."""
    model = write_config(tmp_path_factory.mktemp("model"), CONFIG)
    with slipstream.inprocess(model, engine=EngineConfig(max_concurrency=8)) as bridge:
        yield bridge


# --- parts of a tree ---


def test_a_part_of_the_tree_is_taken_for_the_whole_by_nobody(bridge: slipstream.Bridge) -> None:
    bridge.sync(PARAMS)
    for version in (1, 2):
        part = jax.tree.map(lambda leaf: leaf * 2, NORM)
        assert bridge.sync(part, partial=True).num_bytes == NORM_BYTES
        with pytest.raises(MappingError, match=r"missing: lm_head\.weight"):
            bridge.sync(part)
        assert bridge.version == version


def test_a_whole_tree_as_a_part_is_the_whole(bridge: slipstream.Bridge) -> None:
    """The way to the engine stays, and with it what the engine is known to hold."""
    sent = [bridge.sync(PARAMS, partial=partial).num_bytes for partial in (False, True, False)]
    assert sent == [sum(leaf.nbytes for leaf in jax.tree.leaves(PARAMS)), 0, 0]
    assert bridge.verify(PARAMS).is_same
