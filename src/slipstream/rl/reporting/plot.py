"""Plot of the learning curve."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from slipstream.errors import Unsupported
from slipstream.rl.reporting.records import Evaluation, StepRecord

SMOOTH_STEPS = 10


def write_curve(path: Path, steps: Sequence[StepRecord], evaluations: Sequence[Evaluation], title: str = "") -> Path:
    """Write a PNG of reward per step and accuracy per evaluation. `Unsupported` if matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise Unsupported("the plot needs matplotlib; install it with: pip install 'slipstream-rl[plot]'") from None

    # Not pyplot: its global state and backend belong to the user's program.
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="step", ylabel="share of right answers", title=title, ylim=(-0.02, 1.02))
    numbers, rewards = [s.step for s in steps], [s.reward for s in steps]
    axes.plot(numbers, rewards, color="tab:blue", alpha=0.25, linewidth=1, label="reward of each step")
    axes.plot(numbers, smooth(rewards), color="tab:blue", linewidth=2, label=f"mean of {SMOOTH_STEPS} steps")
    for name, label, style in (
        ("sampled_heldout", "held-out prompts, sampled", "o-"),
        ("greedy_heldout", "held-out prompts, greedy", "s--"),
    ):
        points = [(e.step, getattr(e, name)) for e in evaluations if getattr(e, name) is not None]
        if points:
            axes.plot(*zip(*points), style, color="tab:orange", markersize=4, linewidth=1, label=label)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)
    return path


def smooth(values: Sequence[float], width: int = SMOOTH_STEPS) -> np.ndarray:
    """Moving average over each value and up to `width` − 1 values before it."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(sums))
    starts = np.maximum(ends - width, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)
