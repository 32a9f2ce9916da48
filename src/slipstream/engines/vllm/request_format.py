"""Conversion of requests to vLLM's sampling params, and of its outputs to samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slipstream.engines.frontend.sample_tasks import mixed_seed, shared_settings
from slipstream.engines.frontend.sequence import Sample
from slipstream.engines.vllm import seeded_sampling
from slipstream.errors import EngineFailure, InvalidSampling
from slipstream.types import TopLogprobs


def sampling_params(sample: Sample) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    request, sampling = sample.request, sample.request.sampling
    seed = mixed_seed(request.seed, sample.sample_index)
    needs_every_token = request.find_stop_string is not None or request.streams
    extras = {seeded_sampling.SEED: seed, **({seeded_sampling.PLAIN: True} if sampling.is_plain else {})}
    try:
        return SamplingParams(
            **shared_settings(sampling),
            repetition_penalty=sampling.repetition_penalty,
            extra_args=extras,
            stop_token_ids=list(request.stop_ids),
            ignore_eos=True,  # unless ignored, end-of-sequence tokens are among the stop tokens
            min_tokens=sampling.min_tokens,
            max_tokens=request.max_new_tokens,
            logprobs=sampling.top_logprobs + 1,  # see `DualLogprobSampler`
            flat_logprobs=True,
            detokenize=False,
            logit_bias=dict(sampling.logit_bias) or None,
            # Stop strings and streaming need every token. Not as deltas: vLLM merges unread deltas and keys their logprobs by
            # token, and our columns hold the drawn token twice.
            output_kind=RequestOutputKind.CUMULATIVE if needs_every_token else RequestOutputKind.FINAL_ONLY,
        )
    except Exception as error:  # vLLM has its own bounds, such as penalties of at most 2
        raise InvalidSampling(f"vLLM rejects these sampling params: {error}") from None


def scoring_params(sample: Sample) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=0,
        max_tokens=1,
        prompt_logprobs=sample.request.sampling.top_logprobs,
        flat_logprobs=True,
        detokenize=False,
        ignore_eos=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
        # Unused by scoring, but one row without a seed would disable seeded sampling for its batch.
        extra_args={seeded_sampling.SEED: 0},
    )


def pooling_params() -> Any:
    """The outputs of a model for sequence classification as they are, without sigmoid or softmax."""
    from vllm import PoolingParams

    return PoolingParams(task="classify", use_activation=False)


def take_tokens(sample: Sample, output: Any, versions: Sequence[tuple[int, int]]) -> None:
    """Append the new tokens of a cumulative `output`, each under the version that drew it."""
    before, columns, count = len(sample.tokens), output.logprobs, sample.request.sampling.top_logprobs
    tokens = list(output.token_ids)[before:]
    total, width = before + len(tokens), 2 + count  # see `DualLogprobSampler`
    if len(columns.logprobs) != width * len(columns.start_indices) or len(columns.start_indices) < total:
        raise EngineFailure(f"vLLM returned {len(columns.logprobs)} logprobs for {total} tokens; expected {width} each")
    rows = slice(before * width, total * width)
    ids, logprobs = columns.token_ids[rows], columns.logprobs[rows]
    sampled, raw, top_logprobs = logprobs[::width], logprobs[1::width], []
    if count:
        starts = range(2, len(ids), width)
        top_logprobs = [TopLogprobs(tuple(ids[i : i + count]), tuple(logprobs[i : i + count])) for i in starts]
    stops = [start for _, start in versions[1:]] + [total]
    for (version, start), stop in zip(versions, stops):
        part = slice(max(start, before) - before, min(stop, total) - before)
        if part.start < part.stop:
            stopped = output.finish_reason == "stop" and part.stop == len(tokens)
            sample.extend(tokens[part], sampled[part], raw[part], top_logprobs[part], stopped, version)


def take_scores(sample: Sample, output: Any, version: int) -> None:
    columns, count = output.prompt_logprobs, sample.request.sampling.top_logprobs
    if columns is None:
        return
    for start, end in list(zip(columns.start_indices, columns.end_indices))[1:]:  # nothing precedes the first token
        sample.raw_logprobs.append(columns.logprobs[start])
        if count:
            ids, logprobs = columns.token_ids[start + 1 : end], columns.logprobs[start + 1 : end]
            sample.top_logprobs.append(TopLogprobs(tuple(ids[:count]), tuple(logprobs[:count])))
    sample.versions = [(version, 0)]
