"""Prefix affinity: tracking which engine has cached which prefix, and routing to it without losing load balance."""

from itertools import groupby

from hypothesis import given
from hypothesis import strategies as st

from slipstream.gateway import convert
from slipstream.gateway import slipstream_pb2 as pb
from slipstream.gateway.prefix_affinity import LEVELS, MAX_ENGINES_PER_PREFIX, PrefixAffinity, prefixes
from slipstream.gateway.router import CHUNK, PREFIX_WORTH, route
from slipstream.types import Request, SamplingParams

TOKENS = st.integers(0, 3)


def keys(prompt):
    return [p.key for p in prefixes(prompt)]


@given(st.lists(TOKENS, max_size=70), st.lists(TOKENS, max_size=40), st.lists(TOKENS, max_size=40))
def test_prompts_share_the_beginnings_that_they_have_in_common_and_no_others(common, one, other):
    a, b = (*common, 7, *one), (*common, 8, *other)
    for text in (False, True):
        if text:
            a, b = "".join(map(str, a)), "".join(map(str, b))
        found = [(p, q) for p, q in zip(prefixes(a), prefixes(b))]
        unit = 4 if text else 1
        for level, (p, q) in zip(LEVELS, found):
            assert (p == q) == (level * unit <= len(common))
    assert [p.length for p in prefixes((*common, 7))][-1] == len(common) + 1


def test_a_prompt_is_known_as_far_as_the_last_level_and_no_further():
    long = tuple(range(3000))
    assert keys(long) == keys((*long[:1024], 5, 5)) and len(keys(long)) == len(LEVELS)
    assert keys(long) != keys((*long[:1023], 5, 5))
    assert [p.length for p in prefixes(long[:100])] == [16, 32, 64, 100]
    assert [p.length for p in prefixes("x" * 130)] == [16, 32, 33]


def test_a_message_gives_as_much_of_its_prompts_as_is_looked_at():
    sampling = SamplingParams(seed=1)
    for prompt in ((1, 2, 3), tuple(range(3000)), "text", "é" * 9000):
        message = convert.requests_to_pb([Request("x", prompt, sampling)])
        (row,) = pb.GenerateRequest.FromString(message.SerializeToString()).requests
        assert keys(convert.prompt_start(row)) == keys(prompt)


@given(st.lists(st.tuples(st.lists(TOKENS, min_size=1, max_size=80), st.sampled_from("abcdefghijkl")), max_size=60))
def test_memory_is_bounded_and_the_latest_is_known(sent):
    affinity = PrefixAffinity(capacity=20)
    for prompt, name in sent:
        affinity.add(prefixes(prompt), name)
        length, names = next(affinity.engines_with(prefixes(prompt)))
        assert length == len(prompt) and name in names and len(names) <= MAX_ENGINES_PER_PREFIX
        assert len(affinity._engines) <= 20
    for name in "abcdefghijkl":
        affinity.forget(name)
    assert len(affinity._engines) == 0


def test_a_new_version_and_a_lost_engine_are_forgotten():
    affinity, known = PrefixAffinity(), prefixes((1, 2, 3))
    affinity.set_version(4)
    affinity.add(known, "a")
    affinity.add(known, "b")
    affinity.forget("a")
    assert list(affinity.engines_with(known)) == [(3, ("b",))]
    affinity.set_version(4)
    assert list(affinity.engines_with(known)) == [(3, ("b",))]
    affinity.set_version(5)
    assert list(affinity.engines_with(known)) == []


PROMPTS = st.lists(st.lists(TOKENS, min_size=1, max_size=40).map(tuple), min_size=1, max_size=6)


@given(
    PROMPTS,
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 64)), max_size=60),
    st.dictionaries(st.sampled_from("abcd"), st.integers(0, 500), min_size=1),
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from("abcdz")), max_size=6),
)
def test_every_request_goes_to_one_engine_and_the_balance_is_kept(prompts, shapes, loads, known):
    affinity = PrefixAffinity()
    for index, name in known:  # "z" is an engine that is not among those who take requests
        affinity.add(prefixes(prompts[index % len(prompts)]), name)
    weights = {str(i): weight for i, (_, weight) in enumerate(shapes)}
    beginnings = {str(i): prefixes(prompts[index % len(prompts)]) for i, (index, _) in enumerate(shapes)}
    routed = route(weights, loads, beginnings, affinity)
    assert sorted(id for share in routed.values() for id in share) == sorted(weights)
    assert set(routed) <= set(loads) and all(share == sorted(share, key=int) for share in routed.values())
    after = {name: load + sum(weights[id] for id in routed.get(name, [])) for name, load in loads.items()}
    fair = sum(after.values()) / len(after)
    piece = max(fair * CHUNK, max(weights.values(), default=0))
    assert all(after[name] <= max(fair, min(after.values()) + piece) + 40 * PREFIX_WORTH for name in routed)


@given(st.integers(2, 4), st.integers(1, 8), st.integers(1, 64))
def test_the_samples_of_a_group_stay_together_and_come_back_to_where_they_were(engines, group, weight):
    prompts = [(index,) * 20 for index in range(4 * engines)]
    asked = [prompt for prompt in prompts for _ in range(group)]
    weights = {str(i): weight for i in range(len(asked))}
    beginnings = {str(i): prefixes(prompt) for i, prompt in enumerate(asked)}
    loads, affinity = {f"e{i}": 0 for i in range(engines)}, PrefixAffinity()
    first = route(weights, loads, beginnings, affinity)
    assert {len(share) for share in first.values()} == {4 * group} and len(first) == engines
    for share in first.values():
        assert all(len(list(ids)) == group for _, ids in groupby(share, key=lambda id: asked[int(id)]))
    again = route({k: weights[k] for k in reversed(weights)}, loads, beginnings, affinity)
    assert {n: sorted(s) for n, s in again.items()} == {n: sorted(s) for n, s in first.items()}


def test_a_conversation_stays_with_its_engine_until_that_is_too_busy():
    affinity, system = PrefixAffinity(), (9,) * 64
    turns = {name: (*system, *([index] * 200)) for index, name in enumerate("ab")}
    for name, prompt in turns.items():
        affinity.add(prefixes(prompt), name)

    def goes_to(prompt, weight=64, **loads):
        ((name, _),) = route({"x": weight}, loads, {"x": prefixes(prompt)}, affinity).items()
        return name

    assert goes_to((*turns["b"], 5, 6), a=0, b=0) == "b"
    assert goes_to((*turns["b"], 5, 6), a=0, b=60) == "b", "128 cached tokens excuse 64 waiting ones"
    assert goes_to((*turns["b"], 5, 6), a=0, b=500) == "a"
    assert goes_to((*turns["b"], 5, 6), a=0, b=0) in "ab", "now both know it"
    assert goes_to((*system, *[7] * 90), a=10, b=0, c=0) == "b", "a system prompt is worth something, too"
    assert goes_to((1, 2, 3), a=10, b=5, c=0) == "c", "nobody knows it"
    assert goes_to((*turns["a"], 5), weight=40, b=3, c=0) == "b", "its engine is gone; b knows the system prompt"


def test_one_prompt_for_all_is_cut_into_pieces_and_shared_out():
    weights = {str(i): 10 for i in range(64)}
    routed = route(
        weights, {"a": 0, "b": 0, "c": 0, "d": 0}, {id: prefixes((1, 2)) for id in weights}, PrefixAffinity()
    )
    assert {name: len(share) for name, share in routed.items()} == dict.fromkeys("abcd", 16)
