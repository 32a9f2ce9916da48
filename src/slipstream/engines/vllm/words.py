"""Requests in vLLM's words, and its answers in ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import xxhash

from slipstream.engines.sequence import Sample
from slipstream.engines.vllm import noise
from slipstream.errors import InvalidSampling
from slipstream.types import TopLogprobs


def sampling_params(sample: Sample, on_gpu: bool) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    ticket, sampling = sample.ticket, sample.ticket.sampling
    # A generator of torch's on CPU heeds 32 bits of its seed only: all of ours go into them.
    seed = xxhash.xxh3_64_intdigest(f"{ticket.seed} {sample.sample_index}".encode()) >> 1
    looks = ticket.find_stop is not None or ticket.tells
    try:
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            # On a GPU the seed goes to `noise`: vLLM's own way draws row by row.
            seed=None if on_gpu else seed,
            extra_args={noise.SEED: seed} if on_gpu else None,
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


def scoring_params(sample: Sample, on_gpu: bool) -> Any:
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
        extra_args={noise.SEED: 0} if on_gpu else None,
    )


def take_tokens(sample: Sample, output: Any, versions: Sequence[tuple[int, int]]) -> None:
    """What was drawn since the last time, of all that `output` has; each token under the version that drew it."""
    before, columns = len(sample.tokens), output.logprobs
    tokens = list(output.token_ids)[before:]
    total = before + len(tokens)
    drawn, raw, tops = [], [], []
    for start, end in zip(columns.start_indices[before:total], columns.end_indices[before:total]):
        drawn.append(columns.logprobs[start])
        raw.append(columns.logprobs[start + 1])
        if sample.ticket.sampling.top_logprobs:
            tops.append(
                TopLogprobs(tuple(columns.token_ids[start + 2 : end]), tuple(columns.logprobs[start + 2 : end]))
            )
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
