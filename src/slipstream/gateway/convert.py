"""Conversion between protobuf messages and `slipstream.types`.

`x_to_pb` never fails on valid types. `x_from_pb` checks its input and raises the typed error that a direct call would raise.
Fields of the same name are copied (`_fields`, `_read`); only those that differ in form are converted one by one."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, get_args

from google.protobuf.message import Message

from slipstream import errors
from slipstream.errors import InvalidPrompt, ProtocolMismatch
from slipstream.gateway import slipstream_pb2 as pb
from slipstream.gateway.journal import TakenGroup
from slipstream.gateway.prefix_affinity import CHARACTERS_PER_TOKEN, LEVELS
from slipstream.gateway.staleness import Late, RolloutBound
from slipstream.types import (
    AdapterSupport,
    Box,
    Checksums,
    Circuit,
    CommitReport,
    Completion,
    Decision,
    Destinations,
    EndReason,
    EngineInfo,
    EngineState,
    EngineStatus,
    EpisodeOutcome,
    ExpertRoutes,
    Failure,
    FinishReason,
    FleetStatus,
    InFlight,
    Lora,
    MemoryReport,
    MemoryTag,
    Offer,
    Parameter,
    ParameterChecksums,
    ParameterPart,
    Progress,
    Request,
    RolloutGroup,
    RolloutStatus,
    SamplingParams,
    Score,
    StageReport,
    TensorSpec,
    TopLogprobs,
    UpdatePhases,
    UpdateRecord,
    UpdateReports,
    UpdateSteps,
    UpdateTotals,
    VersionSpan,
)

T = TypeVar("T")


@functools.cache
def _plain_fields(message: Any, kind: Any) -> tuple[tuple[str, bool], ...]:
    """Return the fields that a message and a dataclass share, without messages, each with whether it may be absent."""
    names = {field.name for field in dataclasses.fields(kind)}
    fields = message.DESCRIPTOR.fields
    return tuple((f.name, f.has_presence) for f in fields if f.name in names and f.message_type is None)


def _fields(value: Any, message: Callable[..., Message]) -> dict[str, Any]:
    """Return a dataclass's plain fields as arguments of a message."""
    return {name: getattr(value, name) for name, _ in _plain_fields(message, value.__class__)}


def _read(kind: Callable[..., T], message: Any, **converted: Any) -> T:
    """Make a dataclass of `converted` and of a message's other plain fields. An absent field has the dataclass's default."""
    for name, is_optional in _plain_fields(message.__class__, kind):
        if name not in converted and not (is_optional and not message.HasField(name)):
            value = getattr(message, name)
            # Slicing a repeated field is a third faster than iterating over it.
            converted[name] = value if isinstance(value, (int, float, str, bytes)) else tuple(value[:])
    return kind(**converted)


def error_to_pb(error: BaseException) -> pb.Error:
    kind, message = errors.to_wire(error)
    return pb.Error(kind=kind, message=message)


def error_from_pb(error: pb.Error) -> errors.SlipstreamError:
    return errors.from_wire(error.kind, error.message)


def word(value: str, allowed: object, what: str) -> str:
    """Return `value` if it is one of a `Literal`'s strings."""
    if value not in get_args(allowed):
        raise ProtocolMismatch(f"{what} is {value!r}; expected one of {', '.join(get_args(allowed))}")
    return value


# --- rollouts ---------------------------------------------------------------------------------------------------------


def requests_to_pb(requests: Sequence[Request], engine: str = "") -> pb.GenerateRequest:
    message = pb.GenerateRequest(engine=engine)
    index: dict[SamplingParams, int] = {}
    for request in requests:
        shared = request.sampling.with_seed(None)
        if shared not in index:
            index[shared] = len(index)
            message.sampling.append(_sampling_to_pb(shared))
        row = message.requests.add(
            id=request.id,
            sampling=index[shared],
            seed=request.sampling.seed or 0,
            priority=request.priority,
            progress=request.progress,
            traceparent=request.traceparent,
            adapter=request.adapter,
        )
        if isinstance(request.prompt, str):
            row.text = request.prompt
        else:
            row.tokens.ids.extend(request.prompt)
    return message


def requests_from_pb(message: pb.GenerateRequest) -> list[Request]:
    requests = []
    for row, sampling in zip(message.requests, samplings_from_pb(message)):
        prompt = row.text if row.HasField("text") else tuple(row.tokens.ids[:])
        requests.append(Request(row.id, prompt, sampling, row.priority, row.progress, row.traceparent, row.adapter))
    return requests


def prompt_start(row: pb.Request) -> str | Sequence[int]:
    """Return the part of a prompt that routing looks at."""
    if row.HasField("text"):
        return row.text[: LEVELS[-1] * CHARACTERS_PER_TOKEN]
    return row.tokens.ids[: LEVELS[-1]]


def samplings_from_pb(message: pb.GenerateRequest) -> list[SamplingParams]:
    """Return the sampling params of each request, and check the message as far as possible without unpacking prompts."""
    shared, samplings = [_sampling_from_pb(s) for s in message.sampling], []
    for row in message.requests:
        if row.sampling >= len(shared):
            raise ProtocolMismatch(f"request {row.id!r} refers to sampling {row.sampling} of {len(shared)}")
        if row.WhichOneof("prompt") is None:
            raise InvalidPrompt(f"request {row.id!r} has no prompt; give text or token ids")
        if not (row.text or row.tokens.ids):
            raise InvalidPrompt(f"the prompt of request {row.id!r} is empty; give at least one token")
        samplings.append(shared[row.sampling].with_seed(row.seed))
    if len({row.id for row in message.requests}) != len(message.requests):
        raise ProtocolMismatch("two requests of one message have the same id")
    return samplings


def _sampling_to_pb(sampling: SamplingParams) -> pb.Sampling:
    tokens, values = zip(*sampling.logit_bias) if sampling.logit_bias else ((), ())
    return pb.Sampling(**_fields(sampling, pb.Sampling), bias_token_ids=tokens, bias_values=values)


def _sampling_from_pb(message: pb.Sampling) -> SamplingParams:
    if len(message.bias_token_ids) != len(message.bias_values):
        raise ProtocolMismatch(
            f"a logit bias came with {len(message.bias_token_ids)} tokens and {len(message.bias_values)} values"
        )
    return _read(SamplingParams, message, logit_bias=tuple(zip(message.bias_token_ids, message.bias_values)))


def results_to_pb(results: Iterable[Completion | Failure | Progress]) -> pb.Results:
    message = pb.Results()
    for result in results:
        if isinstance(result, Failure):
            message.failures.add(request_id=result.request_id, error=error_to_pb(result.error))
        elif isinstance(result, Progress):
            top = _top_to_pb(result.top_logprobs)
            message.progress.add(**_fields(result, pb.Progress), top_logprobs=top)
        else:
            top = _top_to_pb(result.top_logprobs)
            row = message.completions.add(**_fields(result, pb.Completion), top_logprobs=top)
            for span in result.spans:
                row.spans.add(version=span.version, start=span.start, stop=span.stop)
            if result.episode is not None:
                row.episode.CopyFrom(pb.EpisodeOutcome(**_fields(result.episode, pb.EpisodeOutcome)))
            if result.routes is not None:
                row.routes.CopyFrom(pb.ExpertRoutes(**_fields(result.routes, pb.ExpertRoutes)))
    return message


def results_from_pb(message: pb.Results) -> list[Completion | Failure]:
    results: list[Completion | Failure] = [completion_from_pb(row) for row in message.completions]
    results += [Failure(row.request_id, error_from_pb(row.error)) for row in message.failures]
    return results


def progress_from_pb(message: pb.Results) -> list[Progress]:
    return [
        _read(Progress, row, top_logprobs=_top_from_pb(row.top_logprobs, len(row.token_ids)))
        for row in message.progress
    ]


def completion_to_pb(completion: Completion) -> pb.Completion:
    return results_to_pb([completion]).completions[0]


def completion_from_pb(row: pb.Completion) -> Completion:
    return _read(
        Completion,
        row,
        finish_reason=word(row.finish_reason, FinishReason, "finish_reason"),
        spans=tuple(VersionSpan(s.version, s.start, s.stop) for s in row.spans),
        top_logprobs=_top_from_pb(row.top_logprobs, len(row.token_ids)),
        episode=_episode_from_pb(row.episode) if row.HasField("episode") else None,
        routes=_routes_from_pb(row.routes) if row.HasField("routes") else None,
    )


def _episode_from_pb(message: pb.EpisodeOutcome) -> EpisodeOutcome:
    return _read(EpisodeOutcome, message, end=word(message.end, EndReason, "end"))


def _routes_from_pb(message: pb.ExpertRoutes) -> ExpertRoutes:
    per_token = message.num_layers * message.num_chosen * message.item_size
    if not per_token or len(message.experts) % per_token or message.item_size > 2:
        raise ProtocolMismatch(
            f"got {len(message.experts)} bytes of expert routes for {message.num_layers} layers of {message.num_chosen} "
            f"experts in {message.item_size} bytes each"
        )
    return _read(ExpertRoutes, message)


def _top_to_pb(rows: Sequence[TopLogprobs]) -> pb.TopLogprobs | None:
    """Pack the most likely tokens of all positions. Every position has the same number, so one width locates them."""
    if not rows:
        return None
    message = pb.TopLogprobs(width=len(rows[0].token_ids))
    for row in rows:
        message.token_ids.extend(row.token_ids)
        message.logprobs.extend(row.logprobs)
    return message


def _top_from_pb(message: pb.TopLogprobs, num_positions: int) -> tuple[TopLogprobs, ...]:
    ids, logprobs, width = tuple(message.token_ids), tuple(message.logprobs), message.width
    if not width and not ids and not logprobs:
        return ()
    if len(ids) != width * num_positions or len(logprobs) != len(ids):
        raise ProtocolMismatch(
            f"got {len(ids)} top tokens and {len(logprobs)} logprobs for {num_positions} positions of {width} each"
        )
    return tuple(TopLogprobs(ids[i : i + width], logprobs[i : i + width]) for i in range(0, len(ids), width))


def sequences_to_pb(
    sequences: Sequence[Sequence[int]], engine: str = "", top_k: int = 0, adapter: str = ""
) -> pb.ScoreRequest:
    for index, sequence in enumerate(sequences):
        if any(not 0 <= token < 1 << 32 for token in sequence):
            raise errors.InvalidPrompt(f"sequence {index} has a token id outside [0, 2**32): {[*sequence]}")
    rows = [pb.TokenIds(ids=s) for s in sequences]
    return pb.ScoreRequest(sequences=rows, engine=engine, top_k=top_k, adapter=adapter)


def sequences_from_pb(message: pb.ScoreRequest) -> list[tuple[int, ...]]:
    return [tuple(s.ids) for s in message.sequences]


def scores_to_pb(scores: Sequence[Score]) -> pb.ScoreReply:
    message = pb.ScoreReply()
    for score in scores:
        message.scores.add(**_fields(score, pb.Score), top_logprobs=_top_to_pb(score.top_logprobs))
    return message


def scores_from_pb(message: pb.ScoreReply) -> list[Score]:
    return [_read(Score, row, top_logprobs=_top_from_pb(row.top_logprobs, len(row.logprobs))) for row in message.scores]


# --- pause and sleep --------------------------------------------------------------------------------------------------


def tags_from_pb(tags: Iterable[str]) -> tuple[MemoryTag, ...]:
    return tuple(word(tag, MemoryTag, "a memory tag") for tag in tags)  # type: ignore[misc]


def memory_to_pb(report: MemoryReport) -> pb.MemoryReport:
    return pb.MemoryReport(**_fields(report, pb.MemoryReport))


def memory_from_pb(message: pb.MemoryReport) -> MemoryReport:
    return _read(MemoryReport, message, asleep=tags_from_pb(message.asleep))


# --- weight updates ---------------------------------------------------------------------------------------------------


def offer_to_pb(offer: Offer) -> pb.Offer:
    return pb.Offer(**_fields(offer, pb.Offer), adapters=[pb.Lora(**_fields(a, pb.Lora)) for a in offer.adapters])


def offer_from_pb(message: pb.Offer) -> Offer:
    return _read(Offer, message, adapters=tuple(_read(Lora, row) for row in message.adapters))


def destinations_to_pb(destinations: Destinations) -> pb.Destinations:
    return pb.Destinations(ranks=[pb.Links(slots=slots) for slots in destinations.links], slots=destinations.slots)


def destinations_from_pb(message: pb.Destinations) -> Destinations:
    return Destinations(tuple(tuple(links.slots) for links in message.ranks), message.slots)


def steps_to_pb(steps: UpdateSteps) -> pb.UpdateSteps:
    begin = stage = commit = None
    if steps.offer is not None:
        expected = None if steps.expected is None else destinations_to_pb(steps.expected)
        begin = pb.Begin(offer=offer_to_pb(steps.offer), expected=expected)
    if steps.manifests is not None:
        stage = pb.Manifests(ranks=[pb.RankManifests(senders=senders) for senders in steps.manifests])
    if steps.in_flight is not None:
        commit = pb.Commit(in_flight=steps.in_flight)
    return pb.UpdateSteps(version=steps.version, begin=begin, stage=stage, commit=commit)


def steps_from_pb(message: pb.UpdateSteps) -> UpdateSteps:
    begin, in_flight = message.begin, message.commit.in_flight
    return UpdateSteps(
        message.version,
        offer_from_pb(begin.offer) if message.HasField("begin") else None,
        destinations_from_pb(begin.expected) if begin.HasField("expected") else None,
        [tuple(rank.senders) for rank in message.stage.ranks] if message.HasField("stage") else None,
        word(in_flight, InFlight, "in_flight") if message.HasField("commit") else None,  # type: ignore[arg-type]
    )


def reports_to_pb(reports: UpdateReports) -> pb.UpdateReports:
    begin = stage = commit = None
    if reports.destinations is not None:
        begin = destinations_to_pb(reports.destinations)
    if reports.stage is not None:
        stage = pb.StageReport(**_fields(reports.stage, pb.StageReport))
    if reports.commit is not None:
        commit = pb.CommitReport(**_fields(reports.commit, pb.CommitReport))
    return pb.UpdateReports(begin=begin, stage=stage, commit=commit)


def reports_from_pb(message: pb.UpdateReports) -> UpdateReports:
    return UpdateReports(
        destinations_from_pb(message.begin) if message.HasField("begin") else None,
        _read(StageReport, message.stage) if message.HasField("stage") else None,
        _read(CommitReport, message.commit) if message.HasField("commit") else None,
    )


def bound_to_pb(bound: RolloutBound) -> pb.RolloutBound:
    return pb.RolloutBound(**_fields(bound, pb.RolloutBound))


def bound_from_pb(message: pb.RolloutBound) -> RolloutBound:
    return _read(RolloutBound, message, late=word(message.late, Late, "late"))


def request_bytes(request: Request) -> bytes:
    """Serialize a request for the journal, deterministically. A prompt that is submitted again has another trace."""
    return requests_to_pb([dataclasses.replace(request, traceparent="")]).SerializeToString(deterministic=True)


def error_bytes(error: BaseException) -> bytes:
    return error_to_pb(error).SerializeToString()


def taken_to_pb(taken: TakenGroup) -> pb.TakenGroup:
    completions = [pb.Completion.FromString(data) for data in taken.completions]
    group = pb.TakenGroup(**_fields(taken, pb.TakenGroup), completions=completions)
    if taken.error:
        group.error.ParseFromString(taken.error)
    return group


def group_from_pb(message: pb.TakenGroup) -> RolloutGroup:
    error = error_from_pb(message.error) if message.HasField("error") else None
    completions = tuple(dataclasses.replace(completion_from_pb(c), request_id=message.id) for c in message.completions)
    return _read(RolloutGroup, message, completions=completions, error=error)


def checksums_to_pb(checksums: Checksums) -> pb.Checksums:
    rows = [pb.ParameterChecksums(**_fields(p, pb.ParameterChecksums)) for p in checksums.parameters]
    return pb.Checksums(version=checksums.version, parameters=rows)


def checksums_from_pb(message: pb.Checksums) -> Checksums:
    return Checksums(message.version, tuple(_read(ParameterChecksums, p) for p in message.parameters))


# --- engines ----------------------------------------------------------------------------------------------------------


def engine_to_pb(info: EngineInfo, layout: bool = True) -> pb.EngineInfo:
    """Convert an engine's description; `layout=False` leaves out tensors and parameters, which only updates need."""
    message = pb.EngineInfo(**_fields(info, pb.EngineInfo))
    if info.adapters is not None:
        message.adapters.CopyFrom(pb.AdapterSupport(**_fields(info.adapters, pb.AdapterSupport)))
    if layout:
        message.tensors.extend(pb.TensorSpec(name=t.name, shape=t.shape) for t in info.tensors)
        message.parameters.extend(_parameter_to_pb(p) for p in info.parameters)
    return message


def engine_from_pb(message: pb.EngineInfo) -> EngineInfo:
    return _read(
        EngineInfo,
        message,
        tensors=tuple(TensorSpec(t.name, tuple(t.shape)) for t in message.tensors),
        parameters=tuple(_parameter_from_pb(p) for p in message.parameters),
        adapters=_read(AdapterSupport, message.adapters) if message.HasField("adapters") else None,
    )


def _parameter_to_pb(parameter: Parameter) -> pb.Parameter:
    parts = [
        pb.ParameterPart(tensor=p.tensor, tensor_box=_box_to_pb(p.tensor_box), local_box=_box_to_pb(p.local_box))
        for p in parameter.parts
    ]
    padding = [pb.Box(spans=_box_to_pb(box)) for box in parameter.padding]
    return pb.Parameter(**_fields(parameter, pb.Parameter), parts=parts, padding=padding)


def _parameter_from_pb(message: pb.Parameter) -> Parameter:
    parts = tuple(ParameterPart(p.tensor, _box_from_pb(p.tensor_box), _box_from_pb(p.local_box)) for p in message.parts)
    padding = tuple(_box_from_pb(box.spans) for box in message.padding)
    return _read(Parameter, message, parts=parts, padding=padding)


def _box_to_pb(box: Box) -> list[pb.Span]:
    return [pb.Span(start=start, stop=stop) for start, stop in box]


def _box_from_pb(spans: Iterable[pb.Span]) -> Box:
    return tuple((s.start, s.stop) for s in spans)


def status_to_pb(status: FleetStatus) -> pb.FleetStatus:
    rows = [
        pb.EngineStatus(**_fields(e, pb.EngineStatus), info=engine_to_pb(e.info, layout=False)) for e in status.engines
    ]
    decisions = [pb.Decision(**_fields(d, pb.Decision)) for d in status.decisions]
    updates = [pb.UpdateRecord(**_fields(u, pb.UpdateRecord), phases=_phases_to_pb(u.phases)) for u in status.updates]
    totals = status.update_totals
    queue = status.rollouts
    rollouts = None if queue is None else pb.RolloutStatus(**_fields(queue, pb.RolloutStatus))
    return pb.FleetStatus(
        **_fields(status, pb.FleetStatus),
        engines=rows,
        decisions=decisions,
        rollouts=rollouts,
        updates=updates,
        update_totals=pb.UpdateTotals(**_fields(totals, pb.UpdateTotals), phases=_phases_to_pb(totals.phases)),
        decision_counts=status.decision_counts,
    )


def _phases_to_pb(phases: UpdatePhases) -> pb.UpdatePhases:
    return pb.UpdatePhases(**_fields(phases, pb.UpdatePhases))


def status_from_pb(message: pb.FleetStatus) -> FleetStatus:
    engines = tuple(
        _read(
            EngineStatus,
            row,
            info=engine_from_pb(row.info),
            state=word(row.state, EngineState, "engine state"),
            circuit=word(row.circuit or "closed", Circuit, "circuit"),
        )
        for row in message.engines
    )
    updates = tuple(_read(UpdateRecord, row, phases=_read(UpdatePhases, row.phases)) for row in message.updates)
    totals = message.update_totals
    return _read(
        FleetStatus,
        message,
        engines=engines,
        decisions=tuple(_read(Decision, row) for row in message.decisions),
        rollouts=_read(RolloutStatus, message.rollouts) if message.HasField("rollouts") else None,
        updates=updates,
        update_totals=_read(UpdateTotals, totals, phases=_read(UpdatePhases, totals.phases)),
        decision_counts=dict(message.decision_counts),
    )
