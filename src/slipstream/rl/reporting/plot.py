"""Figure of a training run: learning curve, time of a step by phase, weight syncs, staleness."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.errors import Unsupported
from slipstream.rl.reporting.records import Evaluation, PhaseSeconds, StepRecord

SMOOTH_STEPS = 10
BLUE, ORANGE, GREEN, VERMILLION, PURPLE, SKY, GREY = (
    "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#8a94a3"
)  # fmt: skip
"""Colours that colour-blind people can tell apart (Okabe and Ito)."""
PHASE_COLOURS = {
    "generate": BLUE,
    "reward": PURPLE,
    "train": ORANGE,
    "sync": GREEN,
    "diagnose": SKY,
    "wake": VERMILLION,
}
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "legend.fontsize": 8,
}


def write_curve(path: Path, steps: Sequence[StepRecord], evaluations: Sequence[Evaluation], title: str = "") -> Path:
    """Write a PNG of the run. `Unsupported` if matplotlib is not installed."""
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise Unsupported("the plot needs matplotlib; install it with: pip install 'slipstream-rl[plot]'") from None

    with matplotlib.rc_context(STYLE):
        # Not pyplot: its global state and backend belong to the user's program.
        figure = Figure(figsize=(10, 6.4), layout="constrained")
        FigureCanvasAgg(figure)
        figure.suptitle(title, fontsize=12, fontweight="bold")
        axes = figure.subplot_mosaic([["learning"] * 3, ["phases", "syncs", "staleness"]], height_ratios=[3, 2])
        _learning(axes["learning"], steps, evaluations)
        numbers = [s.step for s in steps]
        _phases(axes["phases"], numbers, [s.seconds for s in steps])
        _syncs(axes["syncs"], numbers, steps)
        _staleness(axes["staleness"], numbers, steps)
        for name in ("phases", "syncs", "staleness"):
            axes[name].set_xlabel("step")
        figure.savefig(path, dpi=120)
    return path


def _learning(axes: Any, steps: Sequence[StepRecord], evaluations: Sequence[Evaluation]) -> None:
    axes.set(title="Reward and accuracy", xlabel="step", ylim=(-0.02, 1.04))
    numbers, rewards = [s.step for s in steps], [s.reward for s in steps]
    axes.plot(numbers, rewards, color=BLUE, alpha=0.25, linewidth=1, label="reward of each step")
    axes.plot(numbers, smooth(rewards), color=BLUE, linewidth=2, label=f"mean of {SMOOTH_STEPS} steps")
    for name, label, style, color in (
        ("sampled_heldout", "accuracy on held-out prompts, sampled", "o-", VERMILLION),
        ("greedy_heldout", "accuracy on held-out prompts, greedy", "s--", GREEN),
    ):
        points = [(e.step, getattr(e, name)) for e in evaluations if getattr(e, name) is not None]
        if points:
            axes.plot(*zip(*points), style, color=color, markersize=4, linewidth=1.2, label=label)
    axes.legend(loc="lower right")


def _phases(axes: Any, numbers: Sequence[int], seconds: Sequence[PhaseSeconds]) -> None:
    """Stacked running medians. Phases that take less than a hundredth of the time are drawn as one."""
    axes.set_title("Time of a step by phase, ms")
    times = {f.name: 1e3 * medians([getattr(s, f.name) for s in seconds]) for f in fields(PhaseSeconds)}
    total = sum(values.sum() for values in times.values()) or 1.0
    shown = {name: values for name, values in times.items() if values.sum() > 0.01 * total}
    rest = [values for name, values in times.items() if name not in shown and values.any()]
    if rest:
        shown["other"] = np.sum(rest, axis=0)
    if numbers and shown:
        colors = [PHASE_COLOURS.get(name, GREY) for name in shown]
        axes.stackplot(numbers, list(shown.values()), labels=list(shown), colors=colors, alpha=0.85, linewidth=0)
        # The first steps compile, and would flatten the others.
        axes.set_ylim(0, 1.5 * float(np.percentile(np.sum(list(shown.values()), axis=0), 90)) or 1)
        axes.legend(loc="upper right", ncols=3, columnspacing=1, handlelength=1)


def _syncs(axes: Any, numbers: Sequence[int], steps: Sequence[StepRecord]) -> None:
    axes.set(title="Weight sync, ms, logarithmic", yscale="log")
    for label, color, style, seconds in (
        ("whole sync", GREEN, "-", [s.sync.total_seconds for s in steps]),
        ("engines paused", VERMILLION, "--", [s.sync.pause_seconds for s in steps]),
    ):
        values = 1e3 * np.maximum(seconds, 1e-6)
        axes.plot(numbers, values, color=color, alpha=0.25, linewidth=0.8)
        axes.plot(numbers, smooth(values), style, color=color, linewidth=1.5, label=label)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.margins(y=0.35)
    axes.legend(loc="upper right", ncols=2, columnspacing=1)


def _staleness(axes: Any, numbers: Sequence[int], steps: Sequence[StepRecord]) -> None:
    axes.set_title("Staleness of tokens, versions")
    means, oldest = [], []
    for record in steps:
        ages = {int(age): count for age, count in record.staleness.items() if count}
        means.append(sum(age * count for age, count in ages.items()) / max(sum(ages.values()), 1))
        oldest.append(max(ages, default=0))
    axes.plot(numbers, means, color=BLUE, linewidth=1.5, label="mean")
    axes.plot(numbers, oldest, color=VERMILLION, linewidth=1, linestyle=":", label="oldest")
    axes.set(ylim=(-0.05, max(1.0, 1.4 * max(oldest, default=0))), yticks=range(max(oldest, default=0) + 2))
    axes.legend(loc="upper right", ncols=2)


def smooth(values: Sequence[float] | np.ndarray, width: int = SMOOTH_STEPS) -> np.ndarray:
    """Moving average over each value and up to `width` − 1 values before it."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(sums))
    starts = np.maximum(ends - width, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)


def medians(values: Sequence[float], width: int = SMOOTH_STEPS) -> np.ndarray:
    """Median of each value and up to `width` − 1 values before it: a step that compiles does not show."""
    return np.array([np.median(values[max(0, end - width) : end]) for end in range(1, len(values) + 1)])
