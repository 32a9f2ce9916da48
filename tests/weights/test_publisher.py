"""State that a publisher keeps between updates, tested with a real engine in this process."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import slipstream
from slipstream.config import EmbeddedConfig, SyncOptions
from slipstream.errors import DeadlineExceeded, MappingError, NonFiniteWeights, TransferError, UpdateInProgress
from slipstream.model import families
from slipstream.model.tree import flatten
from slipstream.runtime import event_loop
from slipstream.types import CommitReport, Destinations, Offer, StageReport, UpdateReports, UpdateSteps
from slipstream.weights.sources.named_tensors import named_tensors
from slipstream.weights.sources.transforms import Permute, Take, Unstack
from slipstream.weights.sources.tree_mapping import Rule, Target, TreeMapping, Within
from slipstream.weights.update import publication, publisher, transport_choice
from slipstream.weights.update.publisher import Publisher
from slipstream.weights.update.transfer import Sent
from slipstream.weights.update.unchanged import HeldTensors
from tests.tiny import random_params, tiny_config, write_config

CONFIG = tiny_config()
PARAMS = jax.tree.map(jnp.asarray, random_params(CONFIG))
NORM = {"model.norm.weight": PARAMS["model"]["norm"]["weight"]}
NORM_BYTES = 4 * CONFIG.hidden_size
ALL_BYTES = sum(leaf.nbytes for leaf in jax.tree.leaves(PARAMS))


@pytest.fixture
def bridge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slipstream.Bridge]:
    """Its engine holds nothing yet."""
    model = write_config(tmp_path_factory.mktemp("model"), CONFIG)
    with slipstream.inprocess(model, engine=EmbeddedConfig(max_num_seqs=8)) as bridge:
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
    assert sent == [ALL_BYTES, 0, 0]
    assert bridge.verify(PARAMS).is_same


@pytest.mark.parametrize(("framework", "transport"), [("jax", "device"), ("torch", "memory")])
def test_only_jax_arrays_go_from_device_to_device(
    bridge: slipstream.Bridge, framework: str, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The embedded engine copies them with a JAX program."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(publisher, "on_accelerator", lambda tensors: True)
    monkeypatch.setattr(publisher, "gpu_ordinals", lambda tensors: set())
    tensors = {name: torch.tensor(np.asarray(leaf)) for name, leaf in flatten(PARAMS).items()}
    assert bridge.sync(tensors if framework == "torch" else PARAMS).engines[0].transport == transport
    assert bridge.verify(PARAMS).is_same


# --- what did not change ---


def test_an_array_that_was_written_to_is_sent_again(bridge: slipstream.Bridge) -> None:
    params = jax.tree.map(np.array, PARAMS)
    assert [bridge.sync(params).num_bytes for _ in range(2)] == [ALL_BYTES, 0]
    params["model"]["norm"]["weight"] += 1
    assert bridge.sync(params).num_bytes == NORM_BYTES
    assert bridge.verify(params).is_same


def test_an_engine_that_is_not_trusted_gets_everything_again(
    bridge: slipstream.Bridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [bridge.sync(PARAMS).num_bytes for _ in range(2)] == [ALL_BYTES, 0]
    engine: Any = bridge._fleet._engine  # type: ignore[attr-defined]
    describe = engine.describe
    monkeypatch.setattr(engine, "describe", lambda: replace(describe(), weights_epoch=1))  # as a gateway does
    bridge._known_fleet = None  # the gateway's next answer is that the fleet has changed
    assert [bridge.sync(PARAMS).num_bytes for _ in range(2)] == [ALL_BYTES, 0]
    assert bridge.verify(PARAMS).is_same


def test_a_version_without_changes_leaves_the_way_open(tmp_path: Path) -> None:
    """The memory for the version after next was made and not opened."""
    with slipstream.inprocess(write_config(tmp_path, CONFIG), transport="shm") as bridge:
        sent = [bridge.sync(PARAMS).num_bytes, bridge.sync(PARAMS).num_bytes]
        changed = jax.tree.map(lambda leaf: leaf * 2, PARAMS)
        assert [*sent, bridge.sync(changed).num_bytes] == [ALL_BYTES, 0, ALL_BYTES]
        assert bridge.verify(changed).is_same


@pytest.mark.parametrize("is_mapped", [False, True])
@pytest.mark.parametrize("deleted", ["all", "one"])
def test_deleted_arrays_are_refused_in_every_sync(bridge: slipstream.Bridge, is_mapped: bool, deleted: str) -> None:
    """They are the same objects as those that were synced, and they do not count as unchanged."""
    mapping, tree = scanned()
    if not is_mapped:
        tree = named_tensors(PARAMS)  # type: ignore[assignment]
    tree = {name: jnp.copy(leaf) for name, leaf in tree.items()}
    tensors = mapping.tensors(tree) if is_mapped else tree
    for _ in range(2):
        bridge.sync(tensors)
    for name in tree if deleted == "all" else ["model.norm.weight"]:
        tree[name].delete()
    for _ in range(2):
        with pytest.raises(MappingError, match=r"was donated or deleted before the sync"):
            bridge.sync(tensors)
    with pytest.raises(MappingError, match=r"was donated or deleted before the sync"):
        bridge.verify(tensors)
    assert bridge.version == 1 and bridge.sync(PARAMS).version == 2


def test_weights_that_are_not_finite_are_refused_unless_that_is_wanted(tmp_path: Path) -> None:
    model = write_config(tmp_path, CONFIG)
    bad = jax.tree.map(lambda leaf: leaf, PARAMS)
    bad["model"]["norm"]["weight"] = bad["model"]["norm"]["weight"].at[0].set(jnp.nan)
    with slipstream.inprocess(model) as bridge:
        for _ in range(2):  # step by step, then bundled
            bridge.sync(PARAMS)
            with pytest.raises(NonFiniteWeights, match=rf"model.norm.weight \(1 of {CONFIG.hidden_size} values\)"):
                bridge.sync(bad)
        assert bridge.version == 1 and bridge.verify(PARAMS).is_same
    with slipstream.inprocess(model, check_finite=False) as bridge:
        assert bridge.sync(bad).version == 0


LAYER = "model.layers.{layer}."


def scanned() -> tuple[TreeMapping, dict[str, Any]]:
    """Every tensor of the layers as one stacked leaf, the other leaves as they are; and the mapping from there."""
    flat = named_tensors(PARAMS)
    in_layers = [name.removeprefix("model.layers.0.") for name in flat if name.startswith("model.layers.0.")]
    others = [name for name in flat if not name.startswith("model.layers.")]
    rules = [Rule(f"layers.{name}", Target(LAYER + name, (Unstack(0, "layer"),))) for name in in_layers]
    rules += [Rule(name, Target(name)) for name in others]
    stacks = {
        f"layers.{name}": jnp.stack([flat[LAYER.format(layer=i) + name] for i in range(CONFIG.num_layers)])
        for name in in_layers
    }
    return TreeMapping(tuple(rules), families.tensors(CONFIG)), stacks | {name: flat[name] for name in others}


def test_mapped_tensors_of_unchanged_arrays_are_not_sent(bridge: slipstream.Bridge) -> None:
    mapping, tree = scanned()
    assert bridge.sync(mapping.tensors(tree)).num_bytes == ALL_BYTES
    assert bridge.sync(mapping.tensors(tree)).num_bytes == 0
    up = tree["layers.mlp.up_proj.weight"]
    tree["layers.mlp.up_proj.weight"] = up.at[1, 0, 0].add(1)  # both layers are cut from it
    assert bridge.sync(mapping.tensors(tree)).num_bytes == up.nbytes
    assert bridge.verify(mapping.tensors(tree)).is_same
    assert bridge.sync(mapping.tensors(tree)).num_bytes == 0
    tree["layers.mlp.up_proj.weight"] = up  # what was committed once is not what was committed last
    assert bridge.sync(mapping.tensors(tree)).num_bytes == up.nbytes
    assert bridge.verify(mapping.tensors(tree)).is_same


def test_what_a_donating_step_returns_is_sent(bridge: slipstream.Bridge) -> None:
    mapping, tree = scanned()
    step = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * 1.25, tree), donate_argnums=0)
    tree = jax.tree.map(jnp.copy, tree)  # PARAMS stay
    for _ in range(4):
        given = tree
        assert bridge.sync(mapping.tensors(tree)).num_bytes == ALL_BYTES
        tree = step(tree)
        assert all(leaf.is_deleted() for leaf in given.values())
    bridge.sync(mapping.tensors(tree))
    assert bridge.verify(mapping.tensors(tree)).is_same


FUSED = TreeMapping((Rule("kv", Target("k", (Take(0, 0, 2),)), Target("v", (Take(0, 2, 4),))),))
SWAPPED = TreeMapping((Rule("kv", Target("v", (Take(0, 0, 2),)), Target("k", (Take(0, 2, 4),))),))
TURNED = TreeMapping(
    (Rule("kv", Target("k", (Take(0, 0, 2), Permute((1, 0)))), Target("v", (Take(0, 2, 4), Permute((1, 0))))),)
)


def unchanged(held: HeldTensors, tensors: Any) -> set[str]:
    return held.unchanged(tensors, ())


def test_the_same_array_cut_in_another_way_is_another_tensor() -> None:
    held, tree = HeldTensors(), {"kv": jnp.arange(8.0).reshape(4, 2)}
    held = held.after(FUSED.tensors(tree))
    assert unchanged(held, FUSED.tensors(tree)) == {"k", "v"}
    assert unchanged(held, TreeMapping(FUSED.rules).tensors(tree)) == {"k", "v"}  # no matter who says how
    for other in (SWAPPED, TURNED):
        assert unchanged(held, other.tensors(tree)) == set()
    held = held.after(SWAPPED.tensors(tree))
    assert unchanged(held, FUSED.tensors(tree)) == set()


def test_of_a_tensor_from_several_arrays_all_must_be_the_same() -> None:
    """Of one that is sharded, and of one that two leaves hold."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    put = lambda array: jax.device_put(array, NamedSharding(mesh, PartitionSpec("x")))  # noqa: E731
    halves = TreeMapping(tuple(Rule(x, Target("w", within=Within(0, 4 * i, 8))) for i, x in enumerate("ab")))
    held, tree = HeldTensors(), {x: put(jnp.ones((4, 2))) for x in "ab"}
    held = held.after(halves.tensors(tree))
    assert unchanged(held, halves.tensors(tree)) == {"w"}
    assert unchanged(held, halves.tensors({"a": tree["b"], "b": tree["a"]})) == set()
    for x in "ab":
        assert unchanged(held, halves.tensors({**tree, x: put(jnp.zeros((4, 2)))})) == set()


def test_an_array_in_the_place_of_one_that_is_gone_is_another() -> None:
    held, array = HeldTensors(), jnp.zeros((4, 2))
    held = held.after(FUSED.tensors({"kv": array}))
    del array
    gc.collect()
    kept = []  # so that sooner or later one has the address of the first
    for number in range(100):
        kept.append(jnp.full((4, 2), float(number)))
        assert unchanged(held, FUSED.tensors({"kv": kept[-1]})) == set()


def test_arrays_that_can_be_written_to_are_sent_where_they_are_mapped() -> None:
    held, array = HeldTensors(), np.zeros((4, 2), np.float32)
    held = held.after(FUSED.tensors({"kv": array}))
    array[0] = 1
    assert unchanged(held, FUSED.tensors({"kv": array})) == set()


def test_a_checksum_is_of_what_was_committed_last() -> None:
    """Not of what was before, when an array of another kind has come between."""
    held, array, mapped = HeldTensors(), np.zeros((2, 2), np.float32), FUSED.tensors({"kv": jnp.ones((4, 2))})
    for between in (jnp.ones((2, 2)), mapped["k"]):
        held = held.after({"k": array})
        assert unchanged(held, {"k": array.copy()}) == {"k"}
        held = held.after({"k": between})
        assert unchanged(held, {"k": array}) == set()


# --- the bundle of steps, and the bytes it is about ---


class Outbox:
    """Records what happens, and in which order."""

    note, destinations, is_scanning = "", Destinations(((b"link",),), b""), False

    def __init__(self, events: list[str], promises: bool, breaks: bool) -> None:
        self._events, self._promises, self._breaks = events, promises, breaks

    def promise(self, unchanged: Any, version: int) -> Any:
        return Sent([b"manifest"], 4) if self._promises else None

    def send(self, tensors: Any, unchanged: Any, version: int, is_computed: bool, replicas: Any) -> Any:
        self._events.append("send" if is_computed else "send: computed later")
        if self._breaks:
            raise TransferError("the line is dead")
        return Sent([b"manifest"], 4)

    async def confirmed(self) -> None:
        self._events.append("confirmed")

    async def released(self) -> float:
        return 0.0


class Client:
    def __init__(self, events: list[str]) -> None:
        self._events = events

    async def send_steps(self, steps: Mapping[str, UpdateSteps], drop_failed: bool = False) -> None:
        assert steps["a"].expected is Outbox.destinations and steps["a"].manifests == [[b"manifest"]]
        self._events.append("bundle")

    async def receive_reports(self) -> Any:
        return {"a": UpdateReports(Outbox.destinations, StageReport(4, 0.0), CommitReport(0.0, 0.0))}

    async def rollback(self, version: int) -> None:
        self._events.append("rollback")


def published(
    monkeypatch: pytest.MonkeyPatch,
    ranks: int = 1,
    promises: bool = True,
    ready: Callable[[Any], bool] = lambda tensors: True,
    breaks: bool = False,
    in_flight: Any = "keep",
    unchanged: Collection[str] = (),
) -> list[str]:
    """What happens in the second of two updates, when links are known."""
    events: list[str] = []
    route = SimpleNamespace(
        engine=SimpleNamespace(name="a", num_ranks=ranks, host="here"),
        outbox=Outbox(events, promises, breaks),
        is_quick=lambda unchanged: True,
        network=None,
        transport_label="here",
        is_checksummed=True,
        offer=lambda: Offer(b"", "plan", "memory"),
        unchanged=lambda tensors: set(unchanged),
        prepare_commit=lambda tensors: None,
        choose_encoding=lambda: False,
        committed=lambda *_: None,
        close=lambda: events.append("close"),
    )
    publisher = Publisher(Client(events))  # type: ignore[arg-type]
    publisher._routes = {"a": route}  # type: ignore[dict-item]
    monkeypatch.setattr(publisher, "_routes_for", lambda *_: dict(publisher._routes))
    monkeypatch.setattr(publication, "are_ready", ready)
    with contextlib.suppress(TransferError):
        asyncio.run(publisher.publish({f"w{i}": jnp.ones(1) for i in range(100)}, [route.engine], 2, in_flight))
    return events


class Fleet:
    """Two engines, each of which does what is asked of it."""

    asked: list[list[str]]

    def __init__(self) -> None:
        self.asked = []

    async def send_steps(self, steps: Mapping[str, UpdateSteps], drop_failed: bool = False) -> None:
        self.asked.append(sorted(steps))

    async def receive_reports(self) -> Any:
        reports = UpdateReports(Outbox.destinations, StageReport(4, 0.0), CommitReport(0.0, 0.0))
        return dict.fromkeys(self.asked[-1], reports)

    async def rollback(self, version: int) -> None:
        self.asked.append([])


async def _never() -> None:
    await asyncio.Event().wait()


def _unreachable(*_: Any) -> Any:
    raise TransferError("the line is dead")


def _not_finite(*_: Any) -> Any:
    raise NonFiniteWeights("w0 has a NaN")


@pytest.mark.parametrize("drop_failed", [False, True])
@pytest.mark.parametrize(
    ("broken", "error"),
    [
        ({"send": _unreachable}, TransferError),
        ({"send": _not_finite}, NonFiniteWeights),
        ({"confirmed": _never}, DeadlineExceeded),
    ],
)
def test_an_engine_that_cannot_be_reached_is_dropped_only_on_request(
    monkeypatch: pytest.MonkeyPatch, broken: dict[str, Any], error: type[Exception], drop_failed: bool
) -> None:
    fleet, events = Fleet(), list[str]()
    routes = {
        name: SimpleNamespace(
            engine=SimpleNamespace(name=name, num_ranks=1, host="here"),
            outbox=Outbox(events, promises=False, breaks=False),
            is_quick=lambda unchanged: False,
            network=None,
            transport="tcp",
            transport_label="tcp",
            is_checksummed=True,
            offer=lambda: Offer(b"", "plan", "tcp"),
            unchanged=lambda tensors: set(),
            prepare_commit=lambda tensors: None,
            choose_encoding=lambda: False,
            committed=lambda *_: None,
            close=lambda: None,
        )
        for name in "ab"
    }
    vars(routes["b"].outbox).update(broken)
    publisher = Publisher(fleet, SyncOptions(timeout=0.2))  # type: ignore[arg-type]
    monkeypatch.setattr(publisher, "_routes_for", lambda *_: dict(routes))
    monkeypatch.setattr(transport_choice, "check_links", lambda *_: None)
    sync = publisher.publish(
        {"w0": jnp.ones(1)},
        [route.engine for route in routes.values()],  # type: ignore[misc]
        2,
        drop_failed=drop_failed,
    )
    if drop_failed and error is not NonFiniteWeights:
        report = asyncio.run(sync)
        assert report.lost == ("b",) and [e.engine for e in report.engines] == ["a"]
        assert fleet.asked[-1] == ["a"]  # to commit
    else:
        with pytest.raises(error):
            asyncio.run(sync)
        assert fleet.asked[-1] == []


class Looks:
    """Stands in for `are_ready`, and counts how many arrays it was asked about."""

    def __init__(self, answer: Callable[[int], bool] = lambda num_arrays: True) -> None:
        self.at: list[int] = []
        self._answer = answer

    def __call__(self, tensors: Any) -> bool:
        self.at.append(len(list(tensors)))
        return self._answer(self.at[-1])


def test_the_bundle_travels_while_a_rank_is_sent_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert published(monkeypatch) == ["bundle", "send", "confirmed"]


def test_the_bundle_waits_for_weights_that_are_still_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert published(monkeypatch, ready=lambda tensors: False) == ["send: computed later", "bundle", "confirmed"]


def test_arrays_that_the_sample_missed_are_waited_for_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bundle is sent already, and the event loop must not block."""
    looks = Looks(lambda num_arrays: num_arrays < 100)
    assert published(monkeypatch, ready=looks) == ["bundle", "send: computed later", "confirmed"]
    assert looks.at[0] <= 10 and looks.at[1] == 100


def test_only_what_is_sent_says_whether_it_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What did not change is computed long since."""
    looks = Looks()
    published(monkeypatch, ready=looks, unchanged=[f"w{i}" for i in range(98)])
    assert looks.at == [3, 100]  # the last of two twice; and all of them once the bundle is sent


@pytest.mark.parametrize("policy", ["finish", "recompute"])
def test_where_an_engine_would_stand_still_all_must_be_computed(monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    looks = Looks()
    published(monkeypatch, ready=looks, in_flight=policy)
    assert looks.at[0] == 100


def test_checksums_that_result_from_sending_go_with_the_bundle(monkeypatch: pytest.MonkeyPatch) -> None:
    assert published(monkeypatch, promises=False) == ["send", "bundle", "confirmed"]


def test_several_ranks_confirm_before_any_gets_the_bundle(monkeypatch: pytest.MonkeyPatch) -> None:
    assert published(monkeypatch, ranks=2) == ["send", "confirmed", "bundle"]


def test_a_rank_that_compares_checksums_does_so_before_it_gets_the_bundle(monkeypatch: pytest.MonkeyPatch) -> None:
    """It generates meanwhile, and could not with a commit at hand."""
    monkeypatch.setattr(Outbox, "is_scanning", True)
    assert published(monkeypatch) == ["send", "confirmed", "bundle"]


def test_a_bundle_whose_bytes_fail_is_rolled_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection is closed first, which ends the wait of the rank at its other end."""
    assert published(monkeypatch, breaks=True) == ["bundle", "send", "close", "rollback"]


# --- syncs in the background ---


def test_a_started_sync_ends_by_itself_and_another_begins_after_it(bridge: slipstream.Bridge) -> None:
    begun = bridge.start_sync(PARAMS)
    report = begun.result()
    assert (report.version, bridge.version) == (0, 0) and begun.done()
    assert bridge.sync(jax.tree.map(lambda leaf: leaf * 2, PARAMS)).version == 1


def test_one_sync_at_a_time(bridge: slipstream.Bridge, monkeypatch: pytest.MonkeyPatch) -> None:
    held, publish = threading.Event(), bridge._publisher.publish

    async def waits(*args: Any) -> Any:
        await asyncio.to_thread(held.wait, 30)
        return await publish(*args)

    monkeypatch.setattr(bridge._publisher, "publish", waits)
    begun = bridge.start_sync(PARAMS)
    for another in (bridge.start_sync, bridge.sync, bridge.repair):
        with pytest.raises(UpdateInProgress, match="one at a time"):
            another(PARAMS)
    held.set()
    assert begun.result().version == 0
    monkeypatch.undo()
    assert bridge.sync(PARAMS).version == 1


def test_a_started_sync_that_fails_says_so_and_leaves_the_way_free(bridge: slipstream.Bridge) -> None:
    with pytest.raises(MappingError, match=r"missing: lm_head\.weight"):
        bridge.start_sync(NORM).result()
    assert bridge.sync(PARAMS).version == 0


def test_a_sync_that_is_called_off_before_it_began_leaves_the_way_free(bridge: slipstream.Bridge) -> None:
    busy, free = threading.Event(), threading.Event()
    event_loop.loop().call_soon_threadsafe(lambda: (busy.set(), free.wait(30)))
    busy.wait(30)
    begun = bridge.start_sync(PARAMS)
    assert begun.cancel()
    free.set()
    event_loop.run(asyncio.sleep(0))
    assert bridge.sync(PARAMS).version == 0
