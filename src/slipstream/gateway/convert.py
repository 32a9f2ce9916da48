"""Conversion between protobuf messages and `slipstream.types`.

`x_to_pb` never fails on valid types. `x_from_pb` checks its input and raises the typed error that a direct call would raise."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import get_args

from slipstream import errors
from slipstream.errors import InvalidPrompt, ProtocolMismatch
from slipstream.gateway import prefix_affinity
from slipstream.gateway import slipstream_pb2 as pb
from slipstream.gateway.journal import TakenGroup
from slipstream.gateway.staleness import Late, RolloutBound
from slipstream.types import (
    Box,
    Checksums,
    Circuit,
    CommitReport,
    Completion,
    Destinations,
    EngineInfo,
    EngineState,
    EngineStatus,
    Failure,
    FinishReason,
    FleetStatus,
    InFlight,
    MemoryReport,
    MemoryTag,
    Offer,
    Parameter,
    ParameterChecksums,
    ParameterPart,
    Progress,
    Request,
    RolloutGroup,
    SamplingParams,
    Score,
    StageReport,
    TensorSpec,
    TopLogprobs,
    UpdateReports,
    UpdateSteps,
    VersionSpan,
)


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
        requests.append(Request(row.id, prompt, sampling, row.priority, row.progress))
    return requests


def prompt_start(row: pb.Request) -> str | Sequence[int]:
    """Return the part of a prompt that routing looks at."""
    if row.HasField("text"):
        return row.text[: prefix_affinity.max_prefix_length(is_text=True)]
    return row.tokens.ids[: prefix_affinity.max_prefix_length(is_text=False)]


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
    return pb.Sampling(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        n=sampling.n,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        stop=sampling.stop,
        min_tokens=sampling.min_tokens,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        bias_token_ids=[token for token, _ in sampling.logit_bias],
        bias_values=[value for _, value in sampling.logit_bias],
        top_logprobs=sampling.top_logprobs,
    )


def _sampling_from_pb(message: pb.Sampling) -> SamplingParams:
    if len(message.bias_token_ids) != len(message.bias_values):
        raise ProtocolMismatch(
            f"a logit bias came with {len(message.bias_token_ids)} tokens and {len(message.bias_values)} values"
        )
    return SamplingParams(
        max_tokens=message.max_tokens,
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        n=message.n,
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        stop=tuple(message.stop),
        min_tokens=message.min_tokens,
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty if message.HasField("repetition_penalty") else 1.0,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=tuple(zip(message.bias_token_ids, message.bias_values)),
        top_logprobs=message.top_logprobs,
    )


def results_to_pb(results: Iterable[Completion | Failure | Progress]) -> pb.Results:
    message = pb.Results()
    for result in results:
        if isinstance(result, Failure):
            message.failures.add(request_id=result.request_id, error=error_to_pb(result.error))
            continue
        if isinstance(result, Progress):
            message.progress.add(
                request_id=result.request_id,
                sample_index=result.sample_index,
                start=result.start,
                token_ids=result.token_ids,
                logprobs=result.logprobs,
                top_logprobs=_top_to_pb(result.top_logprobs),
            )
            continue
        row = message.completions.add(
            request_id=result.request_id,
            sample_index=result.sample_index,
            prompt_token_ids=result.prompt_token_ids,
            token_ids=result.token_ids,
            text=result.text,
            logprobs=result.logprobs,
            raw_logprobs=result.raw_logprobs,
            finish_reason=result.finish_reason,
            engine=result.engine,
            top_logprobs=_top_to_pb(result.top_logprobs),
        )
        for span in result.spans:
            row.spans.add(version=span.version, start=span.start, stop=span.stop)
    return message


def results_from_pb(message: pb.Results) -> list[Completion | Failure]:
    results: list[Completion | Failure] = [completion_from_pb(row) for row in message.completions]
    results += [Failure(row.request_id, error_from_pb(row.error)) for row in message.failures]
    return results


def progress_from_pb(message: pb.Results) -> list[Progress]:
    return [
        Progress(
            request_id=row.request_id,
            sample_index=row.sample_index,
            start=row.start,
            token_ids=tuple(row.token_ids),
            logprobs=tuple(row.logprobs),
            top_logprobs=_top_from_pb(row.top_logprobs, len(row.token_ids)),
        )
        for row in message.progress
    ]


def completion_from_pb(row: pb.Completion) -> Completion:
    return Completion(
        request_id=row.request_id,
        sample_index=row.sample_index,
        # Slicing a repeated field is a third faster than iterating over it.
        prompt_token_ids=tuple(row.prompt_token_ids[:]),
        token_ids=tuple(row.token_ids[:]),
        text=row.text,
        logprobs=tuple(row.logprobs[:]),
        raw_logprobs=tuple(row.raw_logprobs[:]),
        finish_reason=word(row.finish_reason, FinishReason, "finish_reason"),  # type: ignore[arg-type]
        spans=tuple(VersionSpan(s.version, s.start, s.stop) for s in row.spans),
        engine=row.engine,
        top_logprobs=_top_from_pb(row.top_logprobs, len(row.token_ids)),
    )


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


def sequences_to_pb(sequences: Sequence[Sequence[int]], engine: str = "", top_k: int = 0) -> pb.ScoreRequest:
    for index, sequence in enumerate(sequences):
        if any(not 0 <= token < 1 << 32 for token in sequence):
            raise errors.InvalidPrompt(f"sequence {index} has a token id outside [0, 2**32): {[*sequence]}")
    return pb.ScoreRequest(sequences=[pb.TokenIds(ids=s) for s in sequences], engine=engine, top_k=top_k)


def sequences_from_pb(message: pb.ScoreRequest) -> list[tuple[int, ...]]:
    return [tuple(s.ids) for s in message.sequences]


def scores_to_pb(scores: Sequence[Score]) -> pb.ScoreReply:
    message = pb.ScoreReply()
    for score in scores:
        message.scores.add(
            token_ids=score.token_ids,
            logprobs=score.logprobs,
            version=score.version,
            engine=score.engine,
            top_logprobs=_top_to_pb(score.top_logprobs),
        )
    return message


def scores_from_pb(message: pb.ScoreReply) -> list[Score]:
    return [
        Score(
            token_ids=tuple(row.token_ids),
            logprobs=tuple(row.logprobs),
            version=row.version,
            engine=row.engine,
            top_logprobs=_top_from_pb(row.top_logprobs, len(row.logprobs)),
        )
        for row in message.scores
    ]


# --- pause and sleep --------------------------------------------------------------------------------------------------


def tags_from_pb(tags: Iterable[str]) -> tuple[MemoryTag, ...]:
    return tuple(word(tag, MemoryTag, "a memory tag") for tag in tags)  # type: ignore[misc]


def memory_to_pb(report: MemoryReport) -> pb.MemoryReport:
    return pb.MemoryReport(**dataclasses.asdict(report))


def memory_from_pb(message: pb.MemoryReport) -> MemoryReport:
    return MemoryReport(message.weights, message.kv_cache, message.in_use, tags_from_pb(message.asleep))


# --- weight updates ---------------------------------------------------------------------------------------------------


def offer_to_pb(offer: Offer) -> pb.Offer:
    return pb.Offer(
        plan=offer.plan,
        fingerprint=offer.fingerprint,
        transport=offer.transport,
        fresh=offer.fresh,
        hashed=offer.hashed,
    )


def offer_from_pb(message: pb.Offer) -> Offer:
    return Offer(message.plan, message.fingerprint, message.transport, message.fresh, message.hashed)


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
    offer, expected, manifests = None, None, None
    in_flight: InFlight | None = None
    if message.HasField("begin"):
        offer = offer_from_pb(message.begin.offer)
        if message.begin.HasField("expected"):
            expected = destinations_from_pb(message.begin.expected)
    if message.HasField("stage"):
        manifests = [tuple(rank.senders) for rank in message.stage.ranks]
    if message.HasField("commit"):
        in_flight = word(message.commit.in_flight, InFlight, "in_flight")  # type: ignore[assignment]
    return UpdateSteps(message.version, offer, expected, manifests, in_flight)


def reports_to_pb(reports: UpdateReports) -> pb.UpdateReports:
    begin = stage = commit = None
    if reports.destinations is not None:
        begin = destinations_to_pb(reports.destinations)
    if (report := reports.stage) is not None:
        stage = pb.StageReport(
            num_bytes=report.num_bytes,
            verify_seconds=report.verify_seconds,
            receive_seconds=report.receive_seconds,
        )
    if (committed := reports.commit) is not None:
        commit = pb.CommitReport(
            pause_seconds=committed.pause_seconds,
            wait_seconds=committed.wait_seconds,
            load_seconds=committed.load_seconds,
        )
    return pb.UpdateReports(begin=begin, stage=stage, commit=commit)


def reports_from_pb(message: pb.UpdateReports) -> UpdateReports:
    destinations = stage = commit = None
    if message.HasField("begin"):
        destinations = destinations_from_pb(message.begin)
    if message.HasField("stage"):
        report = message.stage
        stage = StageReport(report.num_bytes, report.verify_seconds, report.receive_seconds)
    if message.HasField("commit"):
        committed = message.commit
        commit = CommitReport(committed.pause_seconds, committed.wait_seconds, committed.load_seconds)
    return UpdateReports(destinations, stage, commit)


def bound_to_pb(bound: RolloutBound) -> pb.RolloutBound:
    return pb.RolloutBound(**dataclasses.asdict(bound))


def bound_from_pb(message: pb.RolloutBound) -> RolloutBound:
    surplus = message.surplus if message.HasField("surplus") else None
    late: Late = word(message.late, Late, "late")  # type: ignore[assignment]
    return RolloutBound(message.max_staleness, message.batch, late, surplus)


def request_bytes(request: Request) -> bytes:
    """Serialize a request for the journal, deterministically."""
    return requests_to_pb([request]).SerializeToString(deterministic=True)


def error_bytes(error: errors.SlipstreamError) -> bytes:
    return error_to_pb(error).SerializeToString()


def taken_to_pb(taken: TakenGroup) -> pb.TakenGroup:
    group = pb.TakenGroup(position=taken.position, id=taken.id, version=taken.version, age=taken.age)
    group.completions.extend(pb.Completion.FromString(data) for data in taken.completions)
    if taken.error:
        group.error.ParseFromString(taken.error)
    return group


def group_from_pb(message: pb.TakenGroup) -> RolloutGroup:
    error = error_from_pb(message.error) if message.HasField("error") else None
    completions = tuple(dataclasses.replace(completion_from_pb(c), request_id=message.id) for c in message.completions)
    return RolloutGroup(message.id, message.position, message.version, message.age, completions, error)


def checksums_to_pb(checksums: Checksums) -> pb.Checksums:
    rows = [pb.ParameterChecksums(name=p.name, rank=p.rank, parts=p.parts) for p in checksums.parameters]
    return pb.Checksums(version=checksums.version, parameters=rows)


def checksums_from_pb(message: pb.Checksums) -> Checksums:
    rows = tuple(ParameterChecksums(p.name, p.rank, tuple(p.parts)) for p in message.parameters)
    return Checksums(message.version, rows)


# --- engines ----------------------------------------------------------------------------------------------------------


def engine_to_pb(info: EngineInfo, layout: bool = True) -> pb.EngineInfo:
    """Convert an engine's description; `layout=False` leaves out tensors and parameters, which only updates need."""
    message = pb.EngineInfo(
        name=info.name,
        kind=info.kind,
        model=info.model,
        dtype=info.dtype,
        num_ranks=info.num_ranks,
        transports=info.transports,
        host=info.host,
        max_model_len=info.max_model_len,
        max_num_seqs=info.max_num_seqs,
        version=info.version,
        pid=info.pid,
        protocol=info.protocol,
    )
    if layout:
        message.tensors.extend(pb.TensorSpec(name=t.name, shape=t.shape) for t in info.tensors)
        message.parameters.extend(_parameter_to_pb(p) for p in info.parameters)
    return message


def engine_from_pb(message: pb.EngineInfo) -> EngineInfo:
    return EngineInfo(
        name=message.name,
        kind=message.kind,
        model=message.model,
        dtype=message.dtype,
        num_ranks=message.num_ranks,
        tensors=tuple(TensorSpec(t.name, tuple(t.shape)) for t in message.tensors),
        parameters=tuple(_parameter_from_pb(p) for p in message.parameters),
        transports=tuple(message.transports),
        host=message.host,
        max_model_len=message.max_model_len,
        max_num_seqs=message.max_num_seqs,
        version=message.version,
        pid=message.pid,
        protocol=message.protocol,
    )


def _parameter_to_pb(parameter: Parameter) -> pb.Parameter:
    parts = [
        pb.ParameterPart(tensor=p.tensor, tensor_box=_box_to_pb(p.tensor_box), local_box=_box_to_pb(p.local_box))
        for p in parameter.parts
    ]
    padding = [pb.Box(spans=_box_to_pb(box)) for box in parameter.padding]
    return pb.Parameter(name=parameter.name, rank=parameter.rank, shape=parameter.shape, parts=parts, padding=padding)


def _parameter_from_pb(message: pb.Parameter) -> Parameter:
    parts = tuple(ParameterPart(p.tensor, _box_from_pb(p.tensor_box), _box_from_pb(p.local_box)) for p in message.parts)
    padding = tuple(_box_from_pb(box.spans) for box in message.padding)
    return Parameter(message.name, message.rank, tuple(message.shape), parts, padding)


def _box_to_pb(box: Box) -> list[pb.Span]:
    return [pb.Span(start=start, stop=stop) for start, stop in box]


def _box_from_pb(spans: Iterable[pb.Span]) -> Box:
    return tuple((s.start, s.stop) for s in spans)


def status_to_pb(status: FleetStatus) -> pb.FleetStatus:
    rows = [
        pb.EngineStatus(
            info=engine_to_pb(e.info, layout=False),
            state=e.state,
            num_requests=e.num_requests,
            seconds_since_heartbeat=e.seconds_since_heartbeat,
            note=e.note,
            is_paused=e.is_paused,
            circuit=e.circuit,
            num_faults=e.num_faults,
            looked_up_tokens=e.looked_up_tokens,
            hit_tokens=e.hit_tokens,
        )
        for e in status.engines
    ]
    return pb.FleetStatus(
        version=status.version,
        uptime_seconds=status.uptime_seconds,
        num_completions=status.num_completions,
        engines=rows,
        num_retried=status.num_retried,
    )


def status_from_pb(message: pb.FleetStatus) -> FleetStatus:
    return FleetStatus(
        version=message.version,
        uptime_seconds=message.uptime_seconds,
        num_completions=message.num_completions,
        engines=tuple(
            EngineStatus(
                info=engine_from_pb(row.info),
                state=word(row.state, EngineState, "engine state"),  # type: ignore[arg-type]
                num_requests=row.num_requests,
                seconds_since_heartbeat=row.seconds_since_heartbeat,
                note=row.note,
                is_paused=row.is_paused,
                circuit=word(row.circuit or "closed", Circuit, "circuit"),  # type: ignore[arg-type]
                num_faults=row.num_faults,
                looked_up_tokens=row.looked_up_tokens,
                hit_tokens=row.hit_tokens,
            )
            for row in message.engines
        ),
        num_retried=message.num_retried,
    )
