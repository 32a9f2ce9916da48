"""Requests in vLLM's words, and its answers in ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import xxhash

from slipstream.engines.sequence import Sample
from slipstream.engines.vllm import noise
from slipstream.errors import EngineFailure, InvalidSampling
from slipstream.types import TopLogprobs


def sampling_params(sample: Sample) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    ticket, sampling = sample.ticket, sample.ticket.sampling
    seed = xxhash.xxh3_64_intdigest(f"{ticket.seed} {sample.sample_index}".encode()) >> 1
    looks = ticket.find_stop is not None or ticket.tells
    extras = {noise.SEED: seed, **({noise.PLAIN: True} if sampling.is_plain else {})}
    try:
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            extra_args=extras,
            stop_token_ids=list(ticket.stop),
            ignore_eos=True,  # the model's own end-of-sequence tokens are among the stop tokens, if they count
            min_tokens=sampling.min_tokens,
            max_tokens=ticket.limit,
            logprobs=sampling.top_logprobs + 1,  # see `TwofoldSampler`
            flat_logprobs=True,
            detokenize=False,
            logit_bias=dict(sampling.logit_bias) or None,
            # Whoever looks for a stop text, or tells how far it is, must see every token. (Not by deltas: vLLM joins those that
            # wait to be read, and then keys their logprobs by token, of which we send one twice.)
            output_kind=RequestOutputKind.CUMULATIVE if looks else RequestOutputKind.FINAL_ONLY,
        )
    except Exception as error:  # it has bounds of its own: penalties of at most 2, say
        raise InvalidSampling(f"vLLM does not take these sampling parameters: {error}") from None


def scoring_params(sample: Sample) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=0,
        max_tokens=1,
        prompt_logprobs=sample.ticket.sampling.top_logprobs,
        flat_logprobs=True,
        detokenize=False,
        ignore_eos=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
        # It draws nothing; but a batch with a row that has no seed is drawn in vLLM's way.
        extra_args={noise.SEED: 0},
    )


def take_tokens(sample: Sample, output: Any, versions: Sequence[tuple[int, int]]) -> None:
    """What was drawn since the last time, of all that `output` has; each token under the version that drew it."""
    before, columns, count = len(sample.tokens), output.logprobs, sample.ticket.sampling.top_logprobs
    tokens = list(output.token_ids)[before:]
    total, width = before + len(tokens), 2 + count  # see `TwofoldSampler`
    if len(columns.logprobs) != width * len(columns.start_indices) or len(columns.start_indices) < total:
        raise EngineFailure(f"vLLM gave {len(columns.logprobs)} logprobs for {total} tokens; they have {width} each")
    rows = slice(before * width, total * width)
    ids, logprobs = columns.token_ids[rows], columns.logprobs[rows]
    drawn, raw, tops = logprobs[::width], logprobs[1::width], []
    if count:
        starts = range(2, len(ids), width)
        tops = [TopLogprobs(tuple(ids[i : i + count]), tuple(logprobs[i : i + count])) for i in starts]
    stops = [start for _, start in versions[1:]] + [total]
    for (version, start), stop in zip(versions, stops):
        part = slice(max(start, before) - before, min(stop, total) - before)
        if part.start < part.stop:
            ends = output.finish_reason == "stop" and part.stop == len(tokens)
            sample.extend(tokens[part], drawn[part], raw[part], tops[part], ends, version)


def take_scores(sample: Sample, output: Any, version: int) -> None:
    columns, count = output.prompt_logprobs, sample.ticket.sampling.top_logprobs
    if columns is None:
        return
    for start, end in list(zip(columns.start_indices, columns.end_indices))[1:]:  # nothing precedes the first token
        sample.raw_logprobs.append(columns.logprobs[start])
        if count:
            ids, logprobs = columns.token_ids[start + 1 : end], columns.logprobs[start + 1 : end]
            sample.tops.append(TopLogprobs(tuple(ids[:count]), tuple(logprobs[:count])))
    sample.versions = [(version, 0)]
