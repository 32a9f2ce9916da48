"""Why the trainer's and the engine's logprobs of the same tokens differ.

The gap of a token has two parts, which are told apart exactly, because engines report both kinds of logprobs:

    processed − trainer  =  (processed − raw)  +  (raw − trainer)
                             sampling settings     staleness, numerics or wrong weights

The second part is told apart by the age of the weights that made each token. Tokens that the trainer's own version made
show what is left without staleness, the baseline: small, even and without outliers it is numerics, else the weights are
wrong. What older tokens have beyond the baseline is staleness. Pure: arrays in, `Diagnosis` out. `docs/mismatch.md` says
what to do about each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from slipstream.errors import RequestError, VersionError
from slipstream.types import Completion, VerifyReport

Cause: TypeAlias = Literal["none", "unknown", "staleness", "sampling", "numerics", "weights"]
"""`none`: no gap worth speaking of. `unknown`: too few tokens to tell."""

TOLERANCE = {"float64": 5e-3, "float32": 5e-3, "float16": 1e-2, "bfloat16": 5e-2}
"""Mean |gap| in nats that arithmetic in the engine's dtype may leave. A bfloat16 has 8 bits, so a logit of 10 is rounded by up
to 0.03. The random models of the tests leave 0.014 in bfloat16, and 0.8 and more with two tensors swapped; the limit lies
between. Not calibrated on large models. On GPUs float32 products may keep 10 bits (TF32), so its limit is near float16's."""
NEGLIGIBLE = 1e-4
"""Nats that two programs for the same float32 arithmetic may differ by: no gap at all."""
OUTLIER, OUTLIER_SHARE = 20.0, 0.01
"""A token this many times the tolerance off is an outlier, a nat in bfloat16. Rounding makes few of them; a wrong row of an
embedding, or a wrong expert, makes more than this share while the mean stays small."""
LOPSIDED = 0.5
"""|mean gap| over mean |gap|. Rounding goes both ways. A distribution that is a little off goes both ways as well, since
probabilities add up to 1; one that is far off, or none at all, does not. Judged from a quarter of the tolerance up."""
PROCESSED, PROCESSED_SHARE = 1e-3, 0.01
"""Nats by which processed and raw logprobs differ where a setting was at work: far more than rounding, far less than any
setting in use makes. And the share of tokens from which it counts."""
MIN_TOKENS = 16
"""Fewer have no mean worth judging."""
SIGMAS = 4.0
"""Standard errors by which a difference of means must stand out."""
GROWTH = 0.25
"""What older tokens have beyond the baseline counts as staleness from this share of the baseline up."""
GROSS = 0.5
"""Nats per version. Steps of training that keep learning move logprobs by far less: where no token is fresh, so that staleness
cannot be told from wrong weights by the numbers, more than this is suspect."""
MAX_GAP = 50.0
"""Nats that a gap counts at most; one that is no number counts this much."""


class Tokens(NamedTuple):
    """What engines say of a step's tokens, `[completions, length]`, laid out as `rl.batch.Batch`."""

    processed: np.ndarray
    raw: np.ndarray
    age: np.ndarray
    """Versions that the trainer is ahead of the weights that made the token."""
    mask: np.ndarray


@dataclass(frozen=True, slots=True)
class Finding:
    """One cause and what it amounts to."""

    cause: Cause
    nats: float
    """Mean |gap| per token that it explains, over all tokens: findings roughly add up."""
    share: float
    """Of all tokens: those on which it shows."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """The numbers behind a diagnosis; gaps in nats."""

    num_tokens: int
    gap: float
    """Mean |processed − trainer|: what an importance ratio sees."""
    raw_gap: float
    """Mean |raw − trainer|."""
    baseline: float | None
    """Mean |raw − trainer| without staleness; None where no token tells it."""
    bias: float
    """Mean of raw − trainer over its mean magnitude, of the tokens that tell the baseline: 0 is even, ±1 all one way."""
    outlier_share: float
    """Of the tokens that tell the baseline."""
    by_age: tuple[tuple[int, float, int], ...]
    """`(age, mean |raw − trainer|, tokens)`."""
    num_mixed: int
    """Fresh tokens whose context was computed by older weights, after a commit that kept running requests."""
    num_not_finite: int


@dataclass(frozen=True, slots=True)
class Diagnosis:
    cause: Cause
    """The one that explains most of the gap; `weights` goes before all others."""
    findings: tuple[Finding, ...]
    """All that are at work, the main one first."""
    sentence: str
    evidence: Evidence
    tensors: tuple[str, ...] = ()
    """Tensors that an engine does not hold as the trainer has them, where that was compared."""
    suspects_weights: bool = False
    """Comparing checksums (`bridge.verify`) would tell more."""

    def size(self, cause: Cause) -> float:
        """Nats per token; 0 for a cause that is not at work."""
        return next((f.nats for f in self.findings if f.cause == cause), 0.0)


def tokens_of(completions: Sequence[Completion], version: int, length: int) -> Tokens:
    """Arrays from a step's completions. `version` is that of the weights under which the trainer computes its logprobs;
    position `[i, p]` speaks of token `p + 1` of prompt and completion."""
    found = Tokens(*(np.zeros((len(completions), length), kind) for kind in (float, float, int, bool)))
    for row, completion in enumerate(completions):
        start = len(completion.prompt_token_ids) - 1
        at = slice(start, start + len(completion.token_ids))
        if at.stop > length:
            raise RequestError(f"completion {row} ends at position {at.stop} of {length}; give a greater length")
        found.processed[row, at], found.raw[row, at] = completion.logprobs, completion.raw_logprobs
        found.mask[row, at] = True
        for span in completion.spans:
            if span.version > version:
                raise VersionError(
                    f"completion {row} has tokens of version {span.version}, newer than the trainer's {version}; give the "
                    "version of the weights that the trainer's logprobs are computed with"
                )
            found.age[row, start + span.start : start + span.stop] = version - span.version
    return found


def diagnose(
    trainer: np.ndarray,
    processed: np.ndarray,
    raw: np.ndarray,
    age: np.ndarray,
    mask: np.ndarray,
    *,
    dtype: str = "bfloat16",
    report: VerifyReport | None = None,
) -> Diagnosis:
    """What explains the gap between the trainer's raw logprobs of sampled tokens (temperature 1, nothing truncated) and the
    engine's, processed and raw. All arrays have one shape: `[tokens]`, or `[completions, tokens]` in the order of
    generation, in which case fresh tokens that follow older ones are known to have an older context. `dtype` is the
    coarser of trainer's and engine's; `report` is what `bridge.verify` found."""
    arrays = [np.atleast_1d(np.asarray(x)) for x in (trainer, processed, raw, age, mask)]
    if len({x.shape for x in arrays}) != 1:
        raise RequestError(f"the arrays must have one shape, got {[x.shape for x in arrays]}")
    if dtype not in TOLERANCE:
        raise RequestError(f"dtype must be one of {', '.join(TOLERANCE)}, got {dtype!r}")
    ages, keep = arrays[3], arrays[4] > 0
    if (ages[keep] < 0).any():
        raise RequestError("ages must be 0 or more: the trainer's weights are at least as new as the engine's")
    oldest = np.maximum.accumulate(np.where(keep, ages, 0), axis=-1) if ages.ndim > 1 else ages
    mixed = (ages == 0) & (oldest > 0)
    theirs, drawn, plain = (x[keep].astype(np.float64) for x in arrays[:3])
    return _judged(_Step(theirs, drawn, plain, ages[keep], mixed[keep], TOLERANCE[dtype]), report)


class _Step:
    """The tokens of a step, and what can be read off them."""

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
        self.tells = fresh if fresh.sum() >= MIN_TOKENS else np.zeros_like(fresh)
        """Tokens that show the baseline."""
        if not self.tells.any() and mixed.sum() >= MIN_TOKENS and self.model[mixed].mean() <= tolerance:
            self.tells = mixed  # their context is older, and it does not show
        of = self.model[self.tells]
        self.baseline = float(of.mean()) if len(of) else _before_age(self.model, age)
        self.bias = float(signed[self.tells].mean() / max(of.mean(), 1e-12)) if len(of) else 0.0
        self.num_outliers = int((of > OUTLIER * tolerance).sum())
        self.outlier_share = self.num_outliers / max(len(of), 1)
        self.is_lopsided = abs(self.bias) > LOPSIDED and len(of) > 0 and _stands_out(signed[self.tells])

    @property
    def wrong_by_numbers(self) -> bool:
        """Fresh tokens disagree by more than arithmetic explains."""
        if self.baseline is None:
            return False
        far = self.baseline > self.tolerance
        outliers = self.outlier_share > OUTLIER_SHARE and self.num_outliers > 1
        return far or outliers or (self.is_lopsided and self.baseline > self.tolerance / 4)

    @property
    def is_gross(self) -> bool:
        """Where nothing tells the baseline: more than versions explain."""
        return self.baseline is None and any(mean > GROSS * age for age, mean, count in self.by_age if age and count)

    def staleness(self) -> Finding | None:
        """What old tokens have beyond the baseline."""
        old, baseline = self.model[self.old], self.baseline or 0.0
        if len(old) < MIN_TOKENS:
            return None
        excess = float(old.mean()) - baseline
        error = math.hypot(_error(old), _error(self.model[self.tells]))
        if excess <= max(NEGLIGIBLE, GROWTH * baseline, SIGMAS * error):
            return None
        limit = max(2 * baseline, NEGLIGIBLE)
        return Finding("staleness", excess * len(old) / self.num_tokens, float((old > limit).sum() / self.num_tokens))

    def sampling(self) -> Finding | None:
        share = float((self.processing > PROCESSED).mean())
        return Finding("sampling", float(self.processing.mean()), share) if share > PROCESSED_SHARE else None

    def rest(self, cause: Cause) -> Finding:
        """What remains without staleness, on every token."""
        seen = self.model[self.tells] if self.tells.any() else self.model
        limit = self.tolerance if cause == "weights" else NEGLIGIBLE
        return Finding(cause, self.baseline or 0.0, float((seen > limit).sum() / max(len(seen), 1)))

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


def _judged(step: _Step, report: VerifyReport | None) -> Diagnosis:
    differs = report is not None and bool(report.differences)
    cleared = report is not None and report.is_same and not report.unchecked
    tensors = report.tensors if report is not None else ()
    if step.num_tokens < MIN_TOKENS and not differs:
        sentence = f"{step.num_tokens} tokens are too few to tell why logprobs differ."
        return Diagnosis("unknown", (), sentence, step.evidence())
    is_wrong = differs or (step.wrong_by_numbers and not cleared)
    found = [f for f in (step.staleness(), step.sampling()) if f is not None] if step.num_tokens else []
    if is_wrong:
        found.append(step.rest("weights"))
    elif (step.baseline or 0.0) > NEGLIGIBLE:
        found.append(step.rest("numerics"))
    found.sort(key=lambda f: (f.cause != "weights", -f.nats))
    suspects = report is None and (step.wrong_by_numbers or step.is_gross)
    cause: Cause = found[0].cause if found else "none"
    sentence = " ".join(_words(f, step, tensors, cleared) for f in found) or "Trainer and engine agree."
    if suspects and step.is_gross:
        sentence += (
            " No token is fresh, and the gap is large for its age: bridge.verify tells whether weights are wrong."
        )
    if step.num_not_finite:
        sentence += f" {step.num_not_finite} token(s) have a logprob that is no number."
    return Diagnosis(cause, tuple(found), sentence, step.evidence(), tensors, suspects)


def _words(finding: Finding, step: _Step, tensors: Sequence[str], cleared: bool) -> str:
    size = f"{finding.nats:.2g} nats per token, on {finding.share:.0%} of the tokens"
    match finding.cause:
        case "staleness":
            ages = ", ".join(f"{mean:.2g} at age {age}" for age, mean, _ in step.by_age)
            return f"Staleness: older weights than the trainer's made tokens ({size}; {ages})."
        case "sampling":
            return f"Sampling settings: tokens were drawn from a distribution other than the model's ({size})."
        case "weights" if tensors:
            shown = ", ".join(tensors[:3]) + (f" and {len(tensors) - 3} more" if len(tensors) > 3 else "")
            return f"Wrong weights: an engine does not hold {shown} as the trainer does ({size})."
        case "weights":
            return f"Wrong weights, it seems: tokens that the trainer's own version made disagree ({size})."
        case _ if step.wrong_by_numbers and cleared:
            return (
                f"Numerics, or another forward pass: weights are the same, byte for byte, and logprobs differ ({size})."
            )
        case _:
            return f"Numerics: rounding ({size})."


def _gap(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return np.clip(np.nan_to_num(a - b, nan=MAX_GAP, posinf=MAX_GAP, neginf=-MAX_GAP), -MAX_GAP, MAX_GAP)


def _error(values: np.ndarray) -> float:
    return float(values.std() / math.sqrt(len(values))) if len(values) else 0.0


def _stands_out(values: np.ndarray) -> bool:
    return abs(float(values.mean())) > SIGMAS * _error(values)


def _before_age(model: np.ndarray, age: np.ndarray) -> float | None:
    """The least that the gap is at age 0, where no token is that fresh: drawn from two ages or more, None if they do not tell.

    Weights that move step by step make gaps whose squares grow with age, evenly or faster: what a straight line leaves at 0 is
    there without staleness."""
    groups = [(a, model[age == a]) for a in np.unique(age) if a > 0 and (age == a).sum() >= MIN_TOKENS]
    if len(groups) < 2:
        return None
    rows = [(a, gaps.mean() ** 2, 2 * gaps.mean() * _error(gaps), len(gaps)) for a, gaps in groups]
    ages, squares, errors, counts = (np.array(column, float) for column in zip(*rows))
    design = np.stack([np.ones_like(ages), ages], axis=1)
    shares = np.linalg.solve(design.T @ (counts[:, None] * design), design.T * counts)[
        0
    ]  # of each age in the intercept
    least = float(shares @ squares) - SIGMAS * float(np.linalg.norm(shares * errors))
    return math.sqrt(min(least, float(squares.min()))) if least > 0 else None
