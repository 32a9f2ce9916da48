"""Diagnose why the logprobs of trainer and engine differ for the same tokens.

Engines report logprobs before and after sampling settings are applied, so that the gap of a token splits exactly:

    processed − trainer  =  (processed − raw)  +  (raw − trainer)
                             sampling settings     staleness, numerics or wrong weights

The second part is split by the age of the weights that sampled each token. Tokens of the trainer's current version give the
baseline, the gap without staleness. A baseline that is small, symmetric and without outliers is numerics; otherwise the
weights are wrong. What older tokens have beyond the baseline is staleness. `docs/mismatch.md` has the remedies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from slipstream.errors import RequestError, VersionError
from slipstream.observe.recorder.mismatch import TOLERANCE
from slipstream.types import Completion, VerifyReport

Cause: TypeAlias = Literal["none", "unknown", "staleness", "sampling", "numerics", "weights"]
"""`none`: no significant gap. `unknown`: too few tokens to tell."""

NEGLIGIBLE = 1e-4
"""Nats by which two float32 programs may differ: treated as no gap."""
OUTLIER, OUTLIER_SHARE = 20.0, 0.01
"""A token whose gap is this many tolerances is an outlier: 1 nat in bfloat16. Rounding causes few. A wrong embedding row or a
wrong expert causes more than this share while the mean stays small."""
LOPSIDED = 0.5
"""|mean gap| / mean |gap|. Rounding errors are symmetric, and so is a slightly wrong distribution, since probabilities sum to
1; a very wrong one is not. Applied to gaps above a quarter of the tolerance."""
PROCESSED, PROCESSED_SHARE = 1e-3, 0.01
"""Nats between processed and raw logprobs above which a sampling setting had an effect (more than rounding, less than any
usual setting), and the share of tokens above which it counts."""
MIN_TOKENS = 16
"""With fewer tokens, means are not significant."""
SIGMAS = 4.0
"""Standard errors from which a difference of means is significant."""
GROWTH = 0.25
"""Older tokens show staleness if they exceed the baseline by this share of it."""
GROSS = 0.5
"""Nats per version. Training steps that still learn move logprobs by far less. If no token is fresh, numbers cannot separate
staleness from wrong weights, and more than this is suspect."""
STANDS_OUT = 4.0
"""An engine stands out from the others if its gap is this many times theirs."""
MAX_GAP = 50.0
"""Gaps in nats are clipped to this; NaN and infinity count as this."""


class TokenLogprobs(NamedTuple):
    """The engines' logprobs of a step's tokens, `[completions, length]`, with the layout of `rl.algorithm.batch.Batch`."""

    processed: np.ndarray
    raw: np.ndarray
    age: np.ndarray
    """Versions by which the weights that sampled the token are behind the trainer's."""
    mask: np.ndarray


@dataclass(frozen=True, slots=True)
class MismatchFinding:
    """A cause and its size."""

    cause: Cause
    nats: float
    """Mean |gap| per token that it explains, over all tokens. Findings roughly add up."""
    share: float
    """Share of all tokens that show it."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """The numbers of a diagnosis; gaps in nats."""

    num_tokens: int
    gap: float
    """Mean |processed − trainer|, the gap in the importance ratio."""
    raw_gap: float
    """Mean |raw − trainer|."""
    baseline: float | None
    """Mean |raw − trainer| without staleness; None if no token shows it."""
    bias: float
    """Mean of raw − trainer over its mean magnitude, of the baseline tokens: 0 is symmetric, ±1 one-sided."""
    outlier_share: float
    """Share of the baseline tokens that are outliers."""
    by_age: tuple[tuple[int, float, int], ...]
    """`(age, mean |raw − trainer|, tokens)`."""
    num_mixed: int
    """Fresh tokens whose context was computed by older weights, after a sync that kept running requests."""
    num_not_finite: int


@dataclass(frozen=True, slots=True)
class MismatchDiagnosis:
    cause: Cause
    """The cause of most of the gap; `weights` takes precedence."""
    findings: tuple[MismatchFinding, ...]
    """All causes found, the main one first."""
    sentence: str
    evidence: Evidence
    tensors: tuple[str, ...] = ()
    """Tensors that differ between an engine and the trainer, if they were compared."""
    suspects_weights: bool = False
    """Whether comparing checksums (`bridge.verify`) is advisable."""

    def size(self, cause: Cause) -> float:
        """Nats per token of a cause; 0 if it was not found."""
        return next((f.nats for f in self.findings if f.cause == cause), 0.0)


def engine_logprobs(completions: Sequence[Completion], version: int, length: int) -> TokenLogprobs:
    """Arrays from a step's completions. `version` is the policy version with which the trainer computes its logprobs. Position
    `[i, p]` describes token `p + 1` of prompt plus completion."""
    logprobs = TokenLogprobs(*(np.zeros((len(completions), length), kind) for kind in (float, float, int, bool)))
    for row, completion in enumerate(completions):
        start = len(completion.prompt_token_ids) - 1
        at = slice(start, start + len(completion.token_ids))
        if at.stop > length:
            raise RequestError(f"completion {row} ends at position {at.stop}, beyond length {length}; increase length")
        logprobs.processed[row, at], logprobs.raw[row, at] = completion.logprobs, completion.raw_logprobs
        logprobs.mask[row, at] = completion.episode is None
        for span in completion.spans:
            logprobs.mask[row, start + span.start : start + span.stop] = True
            if span.version > version:
                raise VersionError(
                    f"completion {row} has tokens of version {span.version}, newer than the trainer's {version}; pass the "
                    "version of the weights that the trainer's logprobs are computed with"
                )
            logprobs.age[row, start + span.start : start + span.stop] = version - span.version
    return logprobs


def diagnose(
    trainer: np.ndarray,
    processed: np.ndarray,
    raw: np.ndarray,
    age: np.ndarray,
    mask: np.ndarray,
    *,
    dtype: str = "bfloat16",
    report: VerifyReport | None = None,
) -> MismatchDiagnosis:
    """Explain the gap between the trainer's raw logprobs of sampled tokens (temperature 1, no truncation) and the engine's
    processed and raw ones. All arrays have the same shape: `[tokens]`, or `[completions, tokens]` in order of generation,
    which reveals fresh tokens with an older context. `dtype` is the coarser of trainer's and engine's; `report` is the
    result of `bridge.verify`."""
    arrays = [np.atleast_1d(np.asarray(x)) for x in (trainer, processed, raw, age, mask)]
    if len({x.shape for x in arrays}) != 1:
        raise RequestError(f"all arrays must have the same shape, got {[x.shape for x in arrays]}")
    if dtype not in TOLERANCE:
        raise RequestError(f"dtype must be one of {', '.join(TOLERANCE)}, got {dtype!r}")
    ages, keep = arrays[3], arrays[4] > 0
    if (ages[keep] < 0).any():
        raise RequestError("ages must be at least 0: the trainer's weights are never older than the engine's")
    oldest = np.maximum.accumulate(np.where(keep, ages, 0), axis=-1) if ages.ndim > 1 else ages
    mixed = (ages == 0) & (oldest > 0)
    trainer, processed, raw = (x[keep].astype(np.float64) for x in arrays[:3])
    return _diagnosis(_StepGaps(trainer, processed, raw, ages[keep], mixed[keep], TOLERANCE[dtype]), report)


def disagreeing_engines(
    trainer: np.ndarray, logprobs: TokenLogprobs, engines: Sequence[str], *, dtype: str = "bfloat16"
) -> dict[str, str]:
    """Return the engines that hold wrong weights or compute wrongly, each with what was found; empty if none stands out.

    `engines` names the engine of each row. An engine stands out if its tokens of the trainer's version differ by more than
    arithmetic explains, and several times more than those of an engine that agrees. If no engine agrees, the cause is not in
    the engines."""
    found = {}
    for name in set(engines):
        rows = np.flatnonzero([engine == name for engine in engines])
        own = TokenLogprobs(*(array[rows] for array in logprobs))
        found[name] = diagnose(trainer[rows], own.processed, own.raw, own.age, own.mask, dtype=dtype)
    sound = [d.evidence.baseline or 0.0 for d in found.values() if d.cause not in ("weights", "unknown")]
    return {
        name: d.sentence
        for name, d in found.items()
        if d.cause == "weights" and sound and (d.evidence.baseline or 0.0) > STANDS_OUT * max(sound)
    }


def kl_per_token(trainer: np.ndarray, engine: np.ndarray, mask: np.ndarray) -> float:
    """KL(engine ‖ trainer) in nats per token, the k3 estimate from the engine's tokens, where the mask is not 0."""
    log_ratio = np.asarray(trainer, np.float64)[mask > 0] - np.asarray(engine, np.float64)[mask > 0]
    return float((np.expm1(log_ratio) - log_ratio).mean()) if log_ratio.size else 0.0


class _StepGaps:
    """Statistics of the gaps of a step's tokens."""

    def __init__(
        self,
        trainer: np.ndarray,
        processed: np.ndarray,
        raw: np.ndarray,
        age: np.ndarray,
        mixed: np.ndarray,
        tolerance: float,
    ) -> None:
        self.tolerance, self.num_tokens = tolerance, len(age)
        signed, self.processing = _gap(raw, trainer), np.abs(_gap(processed, raw))
        self.model, self.total = np.abs(signed), np.abs(_gap(processed, trainer))
        self.num_not_finite = int((~np.isfinite(trainer) | ~np.isfinite(raw) | ~np.isfinite(processed)).sum())
        self.old, self.num_mixed = (age > 0) | mixed, int(mixed.sum())
        self.by_age = tuple((int(a), float(self.model[age == a].mean()), int((age == a).sum())) for a in np.unique(age))
        fresh = (age == 0) & ~mixed
        self.is_baseline = fresh if fresh.sum() >= MIN_TOKENS else np.zeros_like(fresh)
        """Tokens that show the baseline."""
        if not self.is_baseline.any() and mixed.sum() >= MIN_TOKENS and self.model[mixed].mean() <= tolerance:
            self.is_baseline = mixed  # their older context has no visible effect
        gaps = self.model[self.is_baseline]
        self.baseline = float(gaps.mean()) if len(gaps) else _extrapolated_baseline(self.model, age)
        self.bias = float(signed[self.is_baseline].mean() / max(gaps.mean(), 1e-12)) if len(gaps) else 0.0
        self.num_outliers = int((gaps > OUTLIER * tolerance).sum())
        self.outlier_share = self.num_outliers / max(len(gaps), 1)
        self.is_lopsided = abs(self.bias) > LOPSIDED and len(gaps) > 0 and _is_significant(signed[self.is_baseline])

    @property
    def wrong_by_numbers(self) -> bool:
        """Whether fresh tokens differ by more than arithmetic explains."""
        if self.baseline is None:
            return False
        is_large = self.baseline > self.tolerance
        has_outliers = self.outlier_share > OUTLIER_SHARE and self.num_outliers > 1
        return is_large or has_outliers or (self.is_lopsided and self.baseline > self.tolerance / 4)

    @property
    def is_gross(self) -> bool:
        """Without a baseline: whether the gap is larger than the ages explain."""
        return self.baseline is None and any(mean > GROSS * age for age, mean, count in self.by_age if age and count)

    def staleness(self) -> MismatchFinding | None:
        """The gap of old tokens beyond the baseline."""
        old, baseline = self.model[self.old], self.baseline or 0.0
        if len(old) < MIN_TOKENS:
            return None
        excess = float(old.mean()) - baseline
        error = math.hypot(_standard_error(old), _standard_error(self.model[self.is_baseline]))
        if excess <= max(NEGLIGIBLE, GROWTH * baseline, SIGMAS * error):
            return None
        limit = max(2 * baseline, NEGLIGIBLE)
        return MismatchFinding(
            "staleness", excess * len(old) / self.num_tokens, float((old > limit).sum() / self.num_tokens)
        )

    def sampling(self) -> MismatchFinding | None:
        share = float((self.processing > PROCESSED).mean())
        return MismatchFinding("sampling", float(self.processing.mean()), share) if share > PROCESSED_SHARE else None

    def remainder(self, cause: Cause) -> MismatchFinding:
        """The gap without staleness."""
        gaps = self.model[self.is_baseline] if self.is_baseline.any() else self.model
        limit = self.tolerance if cause == "weights" else NEGLIGIBLE
        return MismatchFinding(cause, self.baseline or 0.0, float((gaps > limit).sum() / max(len(gaps), 1)))

    def evidence(self) -> Evidence:
        return Evidence(
            num_tokens=self.num_tokens,
            gap=float(self.total.mean()) if self.num_tokens else 0.0,
            raw_gap=float(self.model.mean()) if self.num_tokens else 0.0,
            baseline=self.baseline,
            bias=self.bias,
            outlier_share=self.outlier_share,
            by_age=self.by_age,
            num_mixed=self.num_mixed,
            num_not_finite=self.num_not_finite,
        )


def _diagnosis(step: _StepGaps, report: VerifyReport | None) -> MismatchDiagnosis:
    differs = report is not None and bool(report.differences)
    cleared = report is not None and report.is_same and not report.unchecked
    tensors = report.tensors if report is not None else ()
    if step.num_tokens < MIN_TOKENS and not differs:
        sentence = f"{step.num_tokens} tokens are too few to diagnose a gap."
        return MismatchDiagnosis("unknown", (), sentence, step.evidence())
    is_wrong = differs or (step.wrong_by_numbers and not cleared)
    findings = [f for f in (step.staleness(), step.sampling()) if f is not None] if step.num_tokens else []
    if is_wrong:
        findings.append(step.remainder("weights"))
    elif (step.baseline or 0.0) > NEGLIGIBLE:
        findings.append(step.remainder("numerics"))
    findings.sort(key=lambda f: (f.cause != "weights", -f.nats))
    suspects = report is None and (step.wrong_by_numbers or step.is_gross)
    cause: Cause = findings[0].cause if findings else "none"
    agree = "Trainer and engine agree to the bit." if step.baseline == 0 else "Trainer and engine agree."
    sentence = " ".join(_describe(f, step, tensors, cleared) for f in findings) or agree
    if suspects and step.is_gross:
        sentence += " No token is fresh, and the gap is large for its age: check the weights with bridge.verify."
    if step.num_not_finite:
        sentence += f" {step.num_not_finite} token(s) have a logprob that is not finite."
    return MismatchDiagnosis(cause, tuple(findings), sentence, step.evidence(), tensors, suspects)


def _describe(finding: MismatchFinding, step: _StepGaps, tensors: Sequence[str], cleared: bool) -> str:
    size = f"{finding.nats:.2g} nats per token, on {finding.share:.0%} of the tokens"
    match finding.cause:
        case "staleness":
            ages = ", ".join(f"{mean:.2g} at age {age}" for age, mean, _ in step.by_age)
            return f"Staleness: tokens were sampled by older weights than the trainer's ({size}; {ages})."
        case "sampling":
            return f"Sampling settings: tokens were sampled from a distribution other than the model's ({size})."
        case "weights" if tensors:
            shown = ", ".join(tensors[:3]) + (f" and {len(tensors) - 3} more" if len(tensors) > 3 else "")
            return f"Wrong weights: an engine holds other values of {shown} than the trainer ({size})."
        case "weights":
            return f"Probably wrong weights: tokens of the trainer's own version differ ({size})."
        case _ if step.wrong_by_numbers and cleared:
            return (
                f"Numerics, or a different forward pass: weights are equal byte for byte, but logprobs differ ({size})."
            )
        case _:
            return f"Numerics: rounding ({size})."


def _gap(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return np.clip(np.nan_to_num(a - b, nan=MAX_GAP, posinf=MAX_GAP, neginf=-MAX_GAP), -MAX_GAP, MAX_GAP)


def _standard_error(values: np.ndarray) -> float:
    return float(values.std() / math.sqrt(len(values))) if len(values) else 0.0


def _is_significant(values: np.ndarray) -> bool:
    return abs(float(values.mean())) > SIGMAS * _standard_error(values)


def _extrapolated_baseline(model: np.ndarray, age: np.ndarray) -> float | None:
    """A lower bound of the gap at age 0 if no token is fresh, extrapolated from two ages or more; None if not significant.

    Weights that move at every step cause gaps whose squares grow linearly with age or faster. The intercept of a line
    through them is therefore present without staleness."""
    groups = [(a, model[age == a]) for a in np.unique(age) if a > 0 and (age == a).sum() >= MIN_TOKENS]
    if len(groups) < 2:
        return None
    rows = [(a, gaps.mean() ** 2, 2 * gaps.mean() * _standard_error(gaps), len(gaps)) for a, gaps in groups]
    ages, squares, errors, counts = (np.array(column, float) for column in zip(*rows))
    design = np.stack([np.ones_like(ages), ages], axis=1)
    # Weights of the ages in the intercept of the least-squares line.
    weights = np.linalg.solve(design.T @ (counts[:, None] * design), design.T * counts)[0]
    bound = float(weights @ squares) - SIGMAS * float(np.linalg.norm(weights * errors))
    return math.sqrt(min(bound, float(squares.min()))) if bound > 0 else None
