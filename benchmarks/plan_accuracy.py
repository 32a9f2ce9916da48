"""`slipstream plan` against reality: predicted beside measured steps, for configurations that its constants were not fitted to.

    python benchmarks/plan_accuracy.py [--gpu] [--save hardware.json] [--json benchmarks/results/plan_accuracy_cpu.json]

For two models the benchmark measures a few short steps (generation, training, sync) and fits the rates of this host. With
these it predicts other configurations: a third model, other batches, groups and lengths. Then it measures them. Models and
configurations are measured in turn, and the fastest round counts. `--clock cpu` counts CPU time on one thread instead of wall
time, for a machine that is busy with other work. `--save` writes the rates, which `slipstream plan --hardware` reads."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PHASES = ("generate", "train", "sync")
ROUNDS, SYNC_ROUNDS = 2, 3
TARGET = 0.2
"""Largest error of a prediction."""


@dataclass(frozen=True, slots=True)
class Case:
    model: str
    samples: int
    group: int
    prompt: int
    completion: int
    is_fitted: bool = False
    """Part of the calibration."""

    @property
    def name(self) -> str:
        return (
            f"{self.model}: {self.samples} samples in groups of {self.group}, {self.prompt} + {self.completion} tokens"
        )


CPU_MODELS = {"4M": (256, 4, 2048), "11M": (384, 5, 4096), "22M": (512, 6, 4096)}
"""Hidden size, layers, vocabulary. The middle one is never fitted."""
CPU_CASES = (
    *(Case(model, 8, 1, 24, 8, True) for model in ("4M", "22M")),
    *(Case(model, 32, 1, 24, 8, True) for model in ("4M", "22M")),
    *(Case(model, 32, 1, 8, 24, True) for model in ("4M", "22M")),
    *(Case(model, 16, 1, 56, 8, True) for model in ("4M", "22M")),
    Case("4M", 16, 4, 32, 32),
    Case("4M", 32, 8, 40, 16),
    Case("22M", 16, 4, 32, 32),
    Case("22M", 32, 8, 40, 16),
    Case("11M", 8, 1, 24, 8),
    Case("11M", 16, 4, 32, 32),
    Case("11M", 32, 8, 40, 16),
    Case("11M", 32, 1, 8, 24),
    Case("11M", 16, 1, 56, 8),
    Case("11M", 8, 1, 16, 48),
)
FLEETS = (("4M", 1, True), ("22M", 1, True), ("11M", 1, False), ("11M", 2, False), ("22M", 2, False))
"""Model, engines in other processes, and whether it is part of the calibration: syncs over shared memory."""
GPU_MODELS = {"0.1B": (1024, 6, 32_000), "0.3B": (1536, 8, 32_000), "0.7B": (2048, 12, 32_000)}
GPU_CASES = (
    *(Case(model, 64, 1, 128, 128, True) for model in ("0.1B", "0.7B")),
    *(Case(model, 64, 1, 224, 32, True) for model in ("0.1B", "0.7B")),
    *(Case(model, 192, 1, 128, 256, True) for model in ("0.1B", "0.7B")),
    *(Case(model, 192, 1, 320, 64, True) for model in ("0.1B", "0.7B")),
    Case("0.1B", 64, 8, 64, 192),
    Case("0.1B", 192, 8, 256, 128),
    Case("0.1B", 192, 1, 256, 128),
    Case("0.7B", 64, 8, 64, 192),
    Case("0.7B", 64, 1, 64, 192),
    Case("0.7B", 192, 8, 256, 128),
    Case("0.3B", 64, 1, 128, 128),
    Case("0.3B", 64, 8, 64, 192),
    Case("0.3B", 192, 1, 128, 256),
    Case("0.3B", 192, 8, 256, 128),
)
"""Of each model, two shapes of training batches, since each is compiled."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", action="store_true", help="models and batches for one GPU")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--seconds", type=float, default=220.0, help="start no further case after this time")
    parser.add_argument("--save", type=Path, help="write the rates to this file, for `slipstream plan --hardware`")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    if not options.gpu:
        os.environ["JAX_PLATFORMS"] = "cpu"
    if options.clock == "cpu":
        os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    measured = measure(options)
    results = compare(measured, options)
    if not options.gpu and options.clock == "wall":  # the CPU time of other processes is not counted
        results["fleets"] = compare_fleets(options)
    show(results)
    if options.save:
        from slipstream.deploy.advice.step_cost import Hardware, Rates

        rates, machine = {name: Rates(**found) for name, found in results["rates"].items()}, results["machine"]
        measured_rates = rates["decode"], rates["prefill"], rates["train"], rates["sync"]
        Hardware(machine["device"], machine["memory"], *measured_rates).save(options.save)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(results, indent=2) + "\n")


# --- measuring --------------------------------------------------------------------------------------------------------


def model_config(sizes: tuple[int, int, int], gpu: bool) -> Any:
    from slipstream.model.config import ModelConfig

    hidden, layers, vocab = sizes
    return ModelConfig(
        "llama",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=11 * hidden // 4,
        num_layers=layers,
        num_heads=hidden // 64,
        num_kv_heads=hidden // 128,
        head_dim=64,
        max_position_embeddings=1024,
        eos_token_ids=(1,),
        dtype="bfloat16" if gpu else "float32",
    )


def measure(options: argparse.Namespace) -> dict[Case, dict[str, float]]:
    """Return the fastest seconds of each phase of each case."""
    from slipstream.engines.embedded.compute import program_choice

    program_choice.PATIENCE = 0  # no compilation after the warm-up, as late in a long run
    models, cases = (GPU_MODELS, GPU_CASES) if options.gpu else (CPU_MODELS, CPU_CASES)
    deadline, found = time.monotonic() + options.seconds, {}
    # The two that rates are fitted to come first.
    for model in sorted(models, key=lambda name: not any(c.is_fitted for c in cases if c.model == name)):
        own = [case for case in cases if case.model == model]
        with stage(f"{model}: start"):
            subject = Subject(model_config(models[model], options.gpu), own, options)
        for case in own:
            if time.monotonic() > deadline:
                print(f"{case.name}: skipped, {options.seconds:g} s are over", file=sys.stderr)
                continue
            with stage(case.name):
                found[case] = subject.run(case)
            print(", ".join(f"{phase} {seconds:.4f} s" for phase, seconds in found[case].items()), file=sys.stderr)
        subject.engine.close()
    return found


class stage:
    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        self.start = time.monotonic()

    def __exit__(self, *_: object) -> None:
        print(f"{self.name}: {time.monotonic() - self.start:.1f} s", file=sys.stderr, flush=True)


class Subject:
    """A trainer and an engine of one model in this process."""

    def __init__(self, config: Any, cases: Sequence[Case], options: argparse.Namespace) -> None:
        import jax
        import jax.numpy as jnp

        from slipstream import Engine
        from slipstream.model.checkpoints.sample_model import sample_params
        from slipstream.rl.algorithm.train_step import init_state, make_train_step
        from slipstream.rl.config import AlgorithmConfig

        self.config, self.clock = config, time.process_time if options.clock == "cpu" else time.perf_counter
        params = jax.tree.map(lambda x: x.astype(jnp.dtype(config.dtype)), sample_params(config, 0))
        self.algorithm = AlgorithmConfig(micro_batches=4 if options.gpu else 1)  # activations take much memory
        self.train_step = make_train_step(config, self.algorithm)
        self.state = init_state(params, config, self.algorithm)
        longest = max(case.prompt + case.completion for case in cases)
        rows = max(case.samples for case in cases)
        self.engine = Engine(config, params, max_num_seqs=rows, max_model_len=longest + 8, dtype=config.dtype)
        self.version = 0

    def run(self, case: Case) -> dict[str, float]:
        rounds = [self.step(case, seed) for seed in range(ROUNDS + 1)][1:]  # the first compiles
        return {phase: min(seconds[phase] for seconds in rounds) for phase in rounds[0]} | {"sync": self.sync()}

    def sync(self) -> float:
        """Several times, between two sets of weights: a sync of weights that have not changed sends nothing."""
        import jax

        others, seconds = jax.tree.map(lambda x: x * 1.01, self.state.policy), []
        jax.block_until_ready(others)
        for params in (others, self.state.policy) * SYNC_ROUNDS:
            start = self.clock()
            self.engine.update(params)
            seconds.append(self.clock() - start)
        return min(seconds)

    def step(self, case: Case, seed: int) -> dict[str, float]:
        import jax
        import numpy as np

        from slipstream.rl.algorithm.batch import make_batch
        from slipstream.types import SamplingParams

        rng = np.random.default_rng((seed, case.samples, case.prompt))
        prompts = rng.integers(4, self.config.vocab_size, (case.samples // case.group, case.prompt)).tolist()
        sampling = SamplingParams(max_tokens=case.completion, n=case.group, ignore_eos=True)
        start = self.clock()
        completions = self.engine.generate(prompts, sampling)
        generated = self.clock()
        advantages = rng.standard_normal(case.samples)
        batch = make_batch(completions, version=self.engine.version, max_tokens=case.completion, advantages=advantages)
        self.state, _ = self.train_step(self.state, batch)
        jax.block_until_ready(self.state)
        return {"generate": generated - start, "train": self.clock() - generated}


def measure_fleet(config: Any, engines: int) -> float:
    """The seconds of a sync to engines in other processes."""
    import jax

    import slipstream
    from slipstream.model.checkpoints.hf_config import to_hf
    from slipstream.model.checkpoints.sample_model import sample_params

    seconds = []
    with tempfile.TemporaryDirectory() as model:
        Path(model, "config.json").write_text(json.dumps(to_hf(config)))
        engine = slipstream.EmbeddedConfig(max_num_seqs=1, max_model_len=64)
        with slipstream.launch(model, engines=engines, engine=engine, transport="shm") as bridge:
            trees = [jax.block_until_ready(sample_params(config, seed)) for seed in (0, 1)]
            for params in trees * (1 + SYNC_ROUNDS):
                start = time.perf_counter()
                bridge.sync(params)
                seconds.append(time.perf_counter() - start)
    return min(seconds)


# --- predicting -------------------------------------------------------------------------------------------------------


def terms(case: Case, options: argparse.Namespace) -> dict[str, list[float]]:
    """The work of each phase: what is done at the rates of decoding, and then, for generation, the prompts."""
    from slipstream.deploy.advice import step_cost

    sizes, item = (GPU_MODELS if options.gpu else CPU_MODELS)[case.model], 2 if options.gpu else 4
    shape = step_cost.ModelShape.of(model_config(sizes, options.gpu))
    batch = step_cost.PlannedBatch(case.samples, case.prompt, case.completion, case.group)
    prompts, operations = step_cost.prefill_work(shape, batch, item)
    return {
        "generate": [*(step_cost.decode_work(shape, batch, case.samples, item) + prompts), *operations],
        "train": [*step_cost.train_work(shape, batch, 4 * item)],
        "sync": [*step_cost.sync_work(shape, item * shape.parameters)],
    }


def fit(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Nonnegative rates with the least sum of squared relative errors."""
    import numpy as np
    from scipy.optimize import nnls  # type: ignore[import-untyped]

    matrix = np.asarray(rows, float) / np.asarray(seconds)[:, None]
    scale = np.maximum(matrix.max(axis=0), 1e-30)
    rates: list[float] = (nnls(matrix / scale, np.ones(len(seconds)))[0] / scale).tolist()
    return rates


def compare(measured: dict[Case, dict[str, float]], options: argparse.Namespace) -> dict[str, Any]:
    fitted = [case for case in measured if case.is_fitted]
    rates = {
        phase: fit([terms(case, options)[phase] for case in fitted], [measured[case][phase] for case in fitted])
        for phase in PHASES
    }
    table = []
    for case, seconds in measured.items():
        own = terms(case, options)
        predicted = {phase: math.fsum(a * b for a, b in zip(own[phase], rates[phase])) for phase in PHASES}
        both = [{**times, "step": sum(times[phase] for phase in PHASES)} for times in (predicted, seconds)]
        error = {name: both[0][name] / both[1][name] - 1 for name in ("step", *PHASES)}
        table.append({**asdict(case), "predicted": both[0], "measured": both[1], "error": error})
    names, generate = ("step", "layer", "byte", "flop", "token"), rates["generate"]
    found = {"decode": generate[:5], "prefill": generate[5:], "train": rates["train"], "sync": rates["sync"]}
    return {
        "machine": describe_machine(options),
        "rates": {name: dict(zip(names, values)) for name, values in found.items()},
        "cases": table,
        "target": TARGET,
    }


def compare_fleets(options: argparse.Namespace) -> list[dict[str, Any]]:
    from slipstream.deploy.advice import step_cost

    rows, measured = [], []
    for model, engines, _ in FLEETS:
        config = model_config(CPU_MODELS[model], gpu=False)
        shape = step_cost.ModelShape.of(config)
        work = step_cost.sync_work(shape, 4 * shape.parameters * engines)
        rows.append([*work._replace(layers=work.layers * engines)])
        with stage(f"{model}: {engines} engine(s)"):
            measured.append(measure_fleet(config, engines))
    fitted = [index for index, (_, _, is_fitted) in enumerate(FLEETS) if is_fitted]
    rates = fit([rows[index] for index in fitted], [measured[index] for index in fitted])
    predicted = [math.fsum(a * b for a, b in zip(row, rates)) for row in rows]
    return [
        {"model": model, "engines": engines, "is_fitted": is_fitted, "predicted": p, "measured": m, "error": p / m - 1}
        for (model, engines, is_fitted), p, m in zip(FLEETS, predicted, measured)
    ]


def describe_machine(options: argparse.Namespace) -> dict[str, Any]:
    import jax

    device = jax.devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit", 0) if options.gpu else 0
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "device": device.device_kind,
        "memory": limit / 0.75 if limit else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "clock": options.clock,
        "load": os.getloadavg()[0],
        "jax": jax.__version__,
    }


def show(results: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    held_out = [row for row in results["cases"] if not row["is_fitted"]]
    table = Table("not fitted", "step: predicted", "measured", "error", "sync: predicted", "measured", "error")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in held_out:
        case = Case(*(row[name] for name in Case.__slots__))
        cells = [
            text
            for phase in ("step", "sync")
            for text in (
                f"{1e3 * row['predicted'][phase]:,.1f} ms",
                f"{1e3 * row['measured'][phase]:,.1f} ms",
                f"{row['error'][phase]:+.0%}",
            )
        ]
        table.add_row(case.name, *cells)
    console = Console(width=150)
    console.print(table)
    console.print(", ".join(f"{key} {value}" for key, value in results["machine"].items()))
    for row in results.get("fleets", ()):
        console.print(
            f"{row['model']}, {row['engines']} engine(s) in other processes{', fitted' if row['is_fitted'] else ''}: sync "
            f"predicted {1e3 * row['predicted']:,.1f} ms, measured {1e3 * row['measured']:,.1f} ms, {row['error']:+.0%}"
        )
    for phase in ("step", "sync", "generate", "train"):
        errors = [abs(row["error"][phase]) for row in held_out]
        within = sum(error <= TARGET for error in errors)
        console.print(f"{phase}: {within} of {len(errors)} within {TARGET:.0%}, largest {max(errors):.0%}")
    console.print(json.dumps(results["rates"]))


if __name__ == "__main__":
    main()
