import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import NotReady, ProtocolMismatch, RequestError, UnknownEngine, VersionError
from slipstream.gateway.registry import FORGET_SECONDS, Registry
from slipstream.gateway.router import route, weight
from slipstream.types import EngineInfo, Parameter, ParameterPart, SamplingParams, TensorSpec


def info(name="e0", **over):
    box = ((0, 2),)
    facts = dict(
        name=name, kind="embedded", model="llama-1", dtype="float32", num_ranks=1, tensors=(TensorSpec("w", (2,)),),
        parameters=(Parameter("w", 0, (2,), (ParameterPart("w", box, box),)),), transports=("shm",), host="h",
        max_model_len=64, max_num_seqs=8, version=-1, pid=1,
    )  # fmt: skip
    return EngineInfo(**{**facts, **over})


def states(registry):
    return {s.info.name: s.state for s in registry.statuses(0.0)}


def test_life_of_an_engine():
    registry = Registry(lease_seconds=10)
    registry.register(info("a"), now=0)
    registry.register(info("b"), now=0)
    assert states(registry) == {"a": "empty", "b": "empty"}
    registry.commit(0, ["a", "b"])
    assert states(registry) == {"a": "ready", "b": "ready"} and registry.version == 0
    registry.commit(1, ["a"])
    assert states(registry) == {"a": "ready", "b": "stale"}
    registry.commit(2, ["a", "b"])
    registry.get("a").last_heard = 11
    assert registry.expire(now=12) == ["b"] and registry.expire(now=12) == []
    assert states(registry) == {"a": "ready", "b": "lost"}
    registry.register(info("b", version=2), now=13)
    assert states(registry) == {"a": "ready", "b": "ready"}


def test_engines_that_are_long_lost_are_forgotten_and_the_living_are_not():
    registry = Registry(10)
    registry.register(info("a"), now=0)
    registry.register(info("b"), now=0)
    registry.lose("a", "gone")
    assert registry.forget(FORGET_SECONDS) == [] and set(states(registry)) == {"a", "b"}
    assert registry.forget(FORGET_SECONDS + 1) == ["a"] and states(registry) == {"b": "empty"}
    assert registry.forget(FORGET_SECONDS + 1) == []


def test_faults_are_remembered_of_an_engine_that_comes_back_under_its_name():
    registry = Registry(10)
    registry.register(info("a", version=0), now=0)
    for _ in range(3):
        registry.get("a").breaker.faulted(1.0, "it broke")
    registry.get("a").looked_up_tokens, registry.get("a").hit_tokens = 40, 30
    (row,) = registry.statuses(2.0)
    assert (row.state, row.circuit, row.num_faults, row.looked_up_tokens, row.hit_tokens) == (
        "ready",
        "open",
        3,
        40,
        30,
    )
    assert "it broke" in row.note
    registry.lose("a", "gone")
    registry.register(info("a", version=0, pid=9), now=3.0)
    (row,) = registry.statuses(3.0)
    assert (row.circuit, row.num_faults, row.looked_up_tokens) == ("open", 3, 0)


def test_an_engine_that_has_lost_its_policy_is_asked_why_only_when_nobody_serves():
    registry = Registry(10)
    registry.register(info("a"), now=0)
    registry.register(info("b"), now=0)
    registry.set_empty("a")  # it never had one
    with pytest.raises(NotReady, match="a: empty"):
        registry.available()
    registry.commit(3, ["a", "b"])
    registry.set_empty("a")
    assert states(registry) == {"a": "empty", "b": "ready"} and registry.version == 3
    assert [m.info.name for m in registry.available()] == ["b"]
    registry.lose("b", "gone")
    assert [m.info.name for m in registry.available()] == ["a"]  # which refuses
    registry.lose("a", "gone")
    with pytest.raises(NotReady):
        registry.available()
    registry.register(info("a"), now=1)
    registry.check_version(3, ["a"])  # the fleet's own may be brought to it
    registry.commit(3, ["a"])
    assert states(registry)["a"] == "ready"


def test_the_epoch_grows_when_engines_come_or_go():
    registry = Registry(10)
    epochs = [registry.epoch]
    for change in (
        lambda: registry.register(info("a"), 0),
        lambda: registry.register(info("b"), 0),
        lambda: registry.lose("a", "gone"),
        lambda: registry.register(info("a"), 0),
    ):
        change()
        epochs.append(registry.epoch)
    assert epochs == [0, 1, 2, 3, 4]
    registry.commit(0, ["a"])
    registry.lose("a", "gone"), registry.lose("a", "again")
    assert registry.epoch == 5


def test_an_engine_may_register_again_before_its_loss_was_noticed():
    registry = Registry(10)
    registry.register(info("a", version=0, pid=7), 0)
    registry.register(info("a", version=0, pid=7), 5)
    assert states(registry) == {"a": "ready"} and registry.epoch == 2
    with pytest.raises(RequestError, match=r"registered already \(pid 7\)"):
        registry.register(info("a", version=0, pid=8), 6)


def test_a_checkpoint_sets_the_first_version_and_a_latecomer_is_stale():
    registry = Registry(10)
    registry.register(info("a", version=0), 0)
    assert registry.version == 0 and states(registry) == {"a": "ready"}
    registry.commit(1, ["a"])
    registry.register(info("b", version=0), 0)
    assert states(registry) == {"a": "ready", "b": "stale"} and registry.version == 1
    registry.register(info("c", version=2), 0)  # committed it, and the gateway was killed before it could record that
    assert states(registry) == {"a": "stale", "b": "stale", "c": "ready"} and registry.version == 2


@pytest.mark.parametrize(
    ("other", "error", "said"),
    [
        (info("e0", pid=2), RequestError, "registered already"),
        (info("e1", model="qwen3-2"), RequestError, "one gateway serves one model"),
        (info("e1", protocol=99), ProtocolMismatch, "protocol 99"),
        (info(""), ProtocolMismatch, "registered without a name"),
        (info("e1", parameters=()), ProtocolMismatch, "registered without a name"),
    ],
)
def test_engines_that_do_not_fit_are_refused(other, error, said):
    registry = Registry(10)
    registry.register(info("e0"), 0)
    with pytest.raises(error, match=said):
        registry.register(other, 0)
    assert states(registry) == {"e0": "empty"}


def test_sleeping_engines_get_requests_only_where_all_sleep():
    registry = Registry(10)
    registry.register(info("a", version=0), 0)
    registry.register(info("b", version=0), 0)

    def names(only=""):
        return [m.info.name for m in registry.available(only)]

    registry.get("a").asleep = ("weights", "kv_cache")
    assert states(registry) == {"a": "asleep", "b": "ready"}
    assert "weights and kv_cache" in registry.statuses(0.0)[0].note
    assert names() == ["b"] and names("a") == ["a"]
    registry.get("b").asleep = ("kv_cache",)
    assert names() == ["a", "b"]
    registry.commit(1, ["a"])
    assert states(registry) == {"a": "asleep", "b": "stale"} and names() == ["a"]
    registry.get("a").asleep = ()
    assert states(registry)["a"] == "ready"
    with pytest.raises(NotReady, match="b: stale"):
        names("b")


def test_versions_only_grow_and_unknown_names_are_named():
    registry = Registry(10)
    registry.register(info("a", version=3), 0)
    with pytest.raises(VersionError, match="3 is not newer"):
        registry.check_version(3, ["a"])
    registry.check_version(4, ["a"])
    registry.register(info("b", version=2), 0)
    registry.check_version(3, ["b"])  # it has missed the fleet's own version
    with pytest.raises(UnknownEngine, match="'zebra'"):
        registry.get("zebra")


def test_why_no_engine_can_take_requests():
    registry = Registry(10)
    assert "no engine has registered" in str(registry.not_ready())
    registry.register(info("a"), 0)
    reason = registry.not_ready()
    assert isinstance(reason, NotReady) and "a: empty" in str(reason) and "bridge.sync" in str(reason)


@given(
    st.lists(st.tuples(st.integers(1, 64), st.integers(1, 64)), max_size=60),
    st.dictionaries(st.sampled_from("abcd"), st.integers(0, 500), min_size=1),
)
def test_routing_gives_every_request_to_one_engine_and_balances(shapes, loads):
    weights = {str(i): weight(SamplingParams(n=n, max_tokens=m)) for i, (n, m) in enumerate(shapes)}
    routed = route(weights, loads)
    assert sorted(id for share in routed.values() for id in share) == sorted(weights)
    for share in routed.values():
        assert share == sorted(share, key=int)
    after = {name: load + sum(weights[id] for id in routed.get(name, [])) for name, load in loads.items()}
    largest = max(weights.values(), default=0)
    busy = [after[name] for name in routed]
    assert all(load <= min(after.values()) + largest for load in busy)
