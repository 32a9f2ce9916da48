"""Message conversion: round trips, and typed errors for invalid messages."""

import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st

from slipstream import errors
from slipstream.errors import EngineFailure, SlipstreamError
from slipstream.gateway import convert
from slipstream.gateway import slipstream_pb2 as pb
from slipstream.model import families
from slipstream.model.config import ModelConfig
from slipstream.types import (
    Checksums,
    CommitReport,
    Completion,
    Destinations,
    EngineInfo,
    Failure,
    FleetStatus,
    MemoryReport,
    Offer,
    ParameterChecksums,
    Progress,
    Request,
    SamplingParams,
    Score,
    StageReport,
    TopLogprobs,
    UpdateReports,
    UpdateSteps,
    VersionSpan,
)

tokens = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=5).map(tuple)
float32s = st.lists(st.floats(width=32, allow_nan=False), max_size=5).map(tuple)
numbers = st.floats(-9, 9)


def likeliest(positions):
    """What an engine reports of that many positions: as many tokens at each."""
    rows = st.integers(1, 4).flatmap(
        lambda width: st.lists(
            st.tuples(
                *[st.lists(st.integers(0, 2**32 - 1), min_size=width, max_size=width).map(tuple)],
                *[st.lists(st.floats(width=32, allow_nan=False), min_size=width, max_size=width).map(tuple)],
            ).map(lambda row: TopLogprobs(*row)),
            min_size=positions,
            max_size=positions,
        )
    )
    return st.just(()) | rows.map(tuple)


samplings = st.builds(
    SamplingParams,
    max_tokens=st.integers(9, 12),
    temperature=st.floats(0, 2),
    top_k=st.integers(0, 9),
    top_p=st.floats(0.1, 1),
    n=st.integers(1, 9),
    seed=st.integers(0, 2**63 - 1),
    stop_token_ids=st.lists(st.integers(0, 99), max_size=3),
    ignore_eos=st.booleans(),
    stop=st.lists(st.text(min_size=1, max_size=3), max_size=3),
    min_tokens=st.integers(0, 9),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0.1, 2),
    presence_penalty=numbers,
    frequency_penalty=numbers,
    logit_bias=st.dictionaries(st.integers(0, 99), numbers, max_size=3),
    top_logprobs=st.integers(0, 20),
)


priorities = st.integers(-(2**31), 2**31 - 1)


@given(st.lists(st.tuples(st.text(min_size=1, max_size=9) | tokens, samplings, priorities, st.booleans()), max_size=5))
def test_requests(rows):
    requests = [Request(str(i), *row) for i, row in enumerate(rows)]
    wire = convert.requests_to_pb(requests).SerializeToString()
    assert convert.requests_from_pb(pb.GenerateRequest.FromString(wire)) == requests


def test_requests_that_share_their_settings_carry_them_once():
    requests = [Request(str(i), (1,), SamplingParams(n=4, seed=i)) for i in range(10)]
    assert len(convert.requests_to_pb(requests).sampling) == 1


@given(
    st.data(),
    st.integers(0, 99),
    tokens,
    tokens,
    st.text(max_size=9),
    float32s,
    st.sampled_from(["stop", "length"]),
    st.integers(-1, 2**40),
)
def test_results(data, index, prompt, ids, text, logprobs, reason, version):
    spans, top = (VersionSpan(version, 0, 3),), data.draw(likeliest(len(ids)))
    completion = Completion("r/1", index, prompt, ids, text, logprobs, logprobs, reason, spans, "e", top_logprobs=top)
    (back,) = convert.results_from_pb(pb.Results.FromString(convert.results_to_pb([completion]).SerializeToString()))
    assert back == completion


@given(st.data(), st.integers(0, 99), st.integers(0, 2**31), tokens)
def test_progress(data, index, start, ids):
    logprobs = data.draw(st.lists(st.floats(width=32, allow_nan=False), min_size=len(ids), max_size=len(ids)))
    told = Progress("r/1", index, start, ids, tuple(logprobs), data.draw(likeliest(len(ids))))
    message = pb.Results.FromString(convert.results_to_pb([told]).SerializeToString())
    assert convert.progress_from_pb(message) == [told] and convert.results_from_pb(message) == []


def test_failures_and_scores():
    (back,) = convert.results_from_pb(convert.results_to_pb([Failure("r", errors.InvalidPrompt("too long"))]))
    assert isinstance(back, Failure) and isinstance(back.error, errors.InvalidPrompt) and str(back.error) == "too long"
    scores = [Score((1, 2), (-0.5,), 3, "e"), Score((1, 2), (-0.5,), 3, "e", (TopLogprobs((7, 2), (-0.25, -0.5)),))]
    assert convert.scores_from_pb(convert.scores_to_pb(scores)) == scores
    request = pb.ScoreRequest.FromString(convert.sequences_to_pb([(1, 2), (3,)], "e", 5).SerializeToString())
    assert convert.sequences_from_pb(request) == [(1, 2), (3,)] and (request.engine, request.top_k) == ("e", 5)


@given(st.data(), st.integers(1, 4), st.integers(-1, 2**40))
def test_scores(data, positions, version):
    score = Score((1,) * (positions + 1), (-0.5,) * positions, version, "e", data.draw(likeliest(positions)))
    assert convert.scores_from_pb(pb.ScoreReply.FromString(convert.scores_to_pb([score]).SerializeToString())) == [
        score
    ]


@given(*[st.integers(0, 2**60)] * 3, st.lists(st.sampled_from(["weights", "kv_cache"]), unique=True).map(tuple))
def test_memory(weights, kv_cache, in_use, asleep):
    report = MemoryReport(weights, kv_cache, in_use, asleep)
    wire = convert.memory_to_pb(report).SerializeToString()
    assert convert.memory_from_pb(pb.MemoryReport.FromString(wire)) == report


@given(st.integers(-1, 2**40), st.lists(st.tuples(st.integers(0, 7), st.lists(st.integers(0, 2**64 - 1)).map(tuple))))
def test_checksums(version, rows):
    found = Checksums(version, tuple(ParameterChecksums(f"p{i}", rank, parts) for i, (rank, parts) in enumerate(rows)))
    wire = convert.checksums_to_pb(found).SerializeToString()
    assert convert.checksums_from_pb(pb.Checksums.FromString(wire)) == found


@pytest.mark.parametrize(
    "top",
    [
        pb.TopLogprobs(width=2, token_ids=[1, 2], logprobs=[-1.0]),
        pb.TopLogprobs(width=2, token_ids=[1, 2], logprobs=[-1.0, -2.0]),
        pb.TopLogprobs(width=0, token_ids=[1], logprobs=[-1.0]),
        pb.TopLogprobs(width=2**31),
    ],
)
def test_likeliest_tokens_that_do_not_fit_the_completion_are_refused(top):
    row = pb.Completion(finish_reason="stop", token_ids=[5, 6], top_logprobs=top)
    with pytest.raises(errors.ProtocolMismatch, match="2 positions"):
        convert.results_from_pb(pb.Results(completions=[row]))


def test_a_bias_without_its_values_is_refused():
    sampling = convert.requests_to_pb([Request("r", (1,), SamplingParams(seed=1))]).sampling[0]
    sampling.bias_token_ids.append(3)
    with pytest.raises(errors.ProtocolMismatch, match="1 tokens and 0 values"):
        convert.requests_from_pb(pb.GenerateRequest(sampling=[sampling]))


def test_engine_info_with_and_without_layout():
    config = ModelConfig(
        "qwen3", vocab_size=8, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=4
    )
    info = EngineInfo(
        "e", "embedded", config.fingerprint(), "float32", 2, families.tensors(config), families.parameters(config, 2),
        ("shm",), "host", 64, 8, 3, 17, devices=("0", "0"), not_held=("seeds: a reason",),
    )  # fmt: skip
    assert convert.engine_from_pb(pb.EngineInfo.FromString(convert.engine_to_pb(info).SerializeToString())) == info
    assert convert.engine_from_pb(convert.engine_to_pb(info, layout=False)).parameters == ()


def test_offers_and_reports():
    offer = Offer(b"\x00plan", "f", "disk:/x", fresh=False, hashed=False)
    assert convert.offer_from_pb(convert.offer_to_pb(offer)) == offer
    destinations = Destinations(((b"a", b""), (b"\xff", b"b")), b"\x00\x01")
    assert convert.destinations_from_pb(convert.destinations_to_pb(destinations)) == destinations


OFFER = Offer(b"plan", "fingerprint", "shm", False, True)
DESTINATIONS = Destinations(((b"link", b""),), b"\x01")


@pytest.mark.parametrize("begin", [(None, None), (OFFER, None), (OFFER, DESTINATIONS)])
@pytest.mark.parametrize("manifests", [None, [], [(b"a", b"b"), ()]])
@pytest.mark.parametrize("in_flight", [None, "keep", "finish"])
def test_update_steps(begin, manifests, in_flight):
    """A step that is absent stays absent, and one without content stays present."""
    steps = UpdateSteps(3, *begin, manifests, in_flight)
    wire = convert.steps_to_pb(steps).SerializeToString()
    assert convert.steps_from_pb(pb.UpdateSteps.FromString(wire)) == steps


@pytest.mark.parametrize("destinations", [None, DESTINATIONS])
@pytest.mark.parametrize("stage", [None, StageReport(10, 0.25, 0.125)])
@pytest.mark.parametrize("commit", [None, CommitReport(0.0, 0.0), CommitReport(0.5, 0.25, 0.125, 12.5, 7)])
def test_update_reports(destinations, stage, commit):
    reports = UpdateReports(destinations, stage, commit)
    wire = convert.reports_to_pb(reports).SerializeToString()
    assert convert.reports_from_pb(pb.UpdateReports.FromString(wire)) == reports


@given(st.binary(max_size=80))
@example(b"")
@example(pb.GenerateRequest(requests=[pb.Request(sampling=3)]).SerializeToString())
@example(pb.GenerateRequest(sampling=[pb.Sampling(bias_token_ids=[1])]).SerializeToString())
@example(pb.GenerateRequest(sampling=[pb.Sampling(max_tokens=1, temperature=-1)]).SerializeToString())
@example(pb.Results(completions=[pb.Completion(finish_reason="tea")]).SerializeToString())
@example(pb.ScoreReply(scores=[pb.Score(top_logprobs=pb.TopLogprobs(token_ids=[1]))]).SerializeToString())
@example(pb.MemoryReport(asleep=["tea"]).SerializeToString())
def test_arbitrary_bytes_never_give_anything_but_a_typed_error(data):
    for message, read, kind in (
        (pb.GenerateRequest, convert.requests_from_pb, list),
        (pb.Results, convert.results_from_pb, list),
        (pb.ScoreReply, convert.scores_from_pb, list),
        (pb.EngineInfo, convert.engine_from_pb, EngineInfo),
        (pb.FleetStatus, convert.status_from_pb, FleetStatus),
        (pb.Offer, convert.offer_from_pb, Offer),
        (pb.MemoryReport, convert.memory_from_pb, MemoryReport),
        (pb.Checksums, convert.checksums_from_pb, Checksums),
    ):
        try:
            parsed = message.FromString(data)
        except DecodeError:
            continue
        try:
            found = read(parsed)
        except Exception as error:
            found = error
        assert isinstance(found, (kind, SlipstreamError)), (message, found)


def test_errors_cross_the_wire_by_name():
    for kind in (errors.ChecksumMismatch, errors.EngineLost, errors.NotReady):
        back = convert.error_from_pb(convert.error_to_pb(kind("why")))
        assert type(back) is kind and str(back) == "why"
    try:
        raise ZeroDivisionError("oh")
    except ZeroDivisionError as error:
        back = convert.error_from_pb(convert.error_to_pb(error))
    assert type(back) is EngineFailure and "ZeroDivisionError: oh" in str(back) and "test_convert" in str(back)
    newer = errors.from_wire("FromTheFuture", "x")
    assert type(newer) is SlipstreamError and "FromTheFuture" in str(newer)


def test_words_out_of_place_are_refused():
    with pytest.raises(errors.ProtocolMismatch, match="'maybe'"):
        convert.steps_from_pb(pb.UpdateSteps(commit=pb.Commit(in_flight="maybe")))
    with pytest.raises(errors.ProtocolMismatch, match="'tea'"):
        convert.tags_from_pb(["weights", "tea"])
