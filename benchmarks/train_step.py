"""A train step beside the plain one: time, memory, compile time, and utilization.

    python benchmarks/train_step.py [--json FILE]              # CPU: a small shape
    python benchmarks/train_step.py --gpu [--json FILE]        # a GPU: 1.24B parameters, 8 × 1,024 and 4 × 8,192 tokens
    python benchmarks/train_step.py --gpu --compile-only       # without running: compile time and memory, on any machine

`plain` is the step without what saves memory or time: all layers unrolled, all logits and attention scores at once, nothing
computed again in the backward pass. A step is all that `make_train_step` compiles: forward, loss, gradients, clipping, Adam.
Every side runs in its own process, which compiles without a cache.

Memory is what a step needs beyond weights, optimizer state and batch, new weights included: on a GPU the peak that JAX's
allocator saw, elsewhere what XLA has planned. MFU counts the FLOPs of the model (`rl/algorithm/utilization.py`), not what is
computed twice."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from slipstream.model.config import ModelConfig
from slipstream.rl.config import AlgorithmConfig, ComputeConfig

SMALL = ModelConfig(
    "llama", vocab_size=16_384, hidden_size=256, intermediate_size=768, num_layers=12, num_heads=8, num_kv_heads=4,
    head_dim=32, tie_word_embeddings=True, max_position_embeddings=8192,
)  # fmt: skip
LARGE = ModelConfig(
    "llama", vocab_size=128_256, hidden_size=2048, intermediate_size=8192, num_layers=16, num_heads=32, num_kv_heads=8,
    head_dim=64, rope_theta=500_000.0, tie_word_embeddings=True, max_position_embeddings=8192,
)  # fmt: skip
"""Llama 3.2 with 1.24B parameters."""
MFU_TARGET, MEMORY_TARGET, COMPILE_TARGET = 0.45, 30e9, 20.0
SIDE_SECONDS = 900


@dataclass(frozen=True, slots=True)
class Side:
    name: str
    compute: dict[str, Any]
    micro_batches: int = 1
    is_plain: bool = False


@dataclass(frozen=True, slots=True)
class Case:
    large: bool
    rows: int
    time: int

    @property
    def name(self) -> str:
        return f"{self.rows} × {self.time:,}"


FLOAT32 = {"dtype": "float32", "param_dtype": "float32"}
BFLOAT16 = {"dtype": "bfloat16", "param_dtype": "bfloat16"}
MIXED = {"dtype": "bfloat16", "param_dtype": "float32", "scan_layers": True}
PLAIN = {"scan_layers": False, "remat": "none"}
CPU_SIDES = (
    Side("plain float32", FLOAT32 | PLAIN, is_plain=True),
    Side("float32, scanned", FLOAT32 | {"scan_layers": True, "remat": "none"}, is_plain=True),
    Side("float32, saving memory", FLOAT32 | {"scan_layers": True, "remat": "full", "logits_chunk": 128}),
)
GPU_SIDES = (
    Side("plain float32", FLOAT32 | PLAIN, is_plain=True),
    Side("plain bfloat16", BFLOAT16 | PLAIN, is_plain=True),
    Side("mixed", MIXED),
    Side("mixed, cuDNN", MIXED | {"attention": "cudnn"}),
    Side("mixed, cuDNN, full remat", MIXED | {"attention": "cudnn", "remat": "full"}),
)
# Whole scores of a layer in float32 take 34 GB: the plain step is there to see that it does not fit.
LONG_SIDES = (*GPU_SIDES[1:], Side("mixed, cuDNN, 4 micro-batches", MIXED | {"attention": "cudnn"}, micro_batches=4))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", action="store_true", help="1.24B parameters, in float32 and bfloat16")
    parser.add_argument("--compile-only", action="store_true", help="compile for this machine, and run nothing")
    parser.add_argument("--cases", default="", help="comma-separated, such as 8x1024; default: all")
    parser.add_argument("--sides", default="", help="comma-separated parts of names of sides; default: all")
    parser.add_argument("--layers", type=int, default=0, help="another number of layers")
    parser.add_argument("--repeats", type=int, default=7, help="measured steps, after two")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        print(json.dumps(run(json.loads(arguments.worker))))
        return
    console, results = Console(), []
    for case, side in plan(arguments):
        with console.status(f"{case.name}: {side.name}"):
            results.append(measure(case, side, arguments))
        show_line(console, results[-1])
    found = {"machine": machine(results), "targets": judge(results), "results": results}
    show(console, found)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


def plan(arguments: argparse.Namespace) -> list[tuple[Case, Side]]:
    shapes = ((8, 1024), (4, 8192)) if arguments.gpu else ((4, 256),)
    wanted = [name for name in arguments.sides.split(",") if name]
    chosen = []
    for rows, length in shapes:
        if arguments.cases and f"{rows}x{length}" not in arguments.cases.split(","):
            continue
        sides = CPU_SIDES if not arguments.gpu else LONG_SIDES if length > 1024 else GPU_SIDES
        chosen += [
            (Case(arguments.gpu, rows, length), side)
            for side in sides
            if not wanted or any(part in side.name for part in wanted)
        ]
    return chosen


def measure(case: Case, side: Side, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run a side in a process of its own. One that fails, as for lack of memory, says so."""
    options = {"layers": arguments.layers, "repeats": arguments.repeats, "compile_only": arguments.compile_only}
    job = json.dumps({"case": asdict(case), "side": asdict(side)} | options)
    environment = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    row = {"case": case.name, "side": side.name}
    try:
        done = subprocess.run(
            [sys.executable, __file__, "--worker", job],
            env=environment,
            capture_output=True,
            text=True,
            timeout=SIDE_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return row | {"error": f"no result after {SIDE_SECONDS} s"}
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        telling = [line for line in lines if "RESOURCE_EXHAUSTED" in line or "Error" in line]
        return row | {"error": (telling or lines or [f"exit code {done.returncode}"])[-1][:300]}
    return row | json.loads(done.stdout.splitlines()[-1])


# --- in the process of a side -----------------------------------------------------------------------------------------


def run(job: dict[str, Any]) -> dict[str, Any]:
    import jax

    from slipstream.rl.algorithm import compute
    from slipstream.rl.algorithm.train_step import init_state, make_train_step
    from slipstream.rl.algorithm.utilization import peak_flops, training_flops

    case, side = Case(**job["case"]), Side(**job["side"])
    model = LARGE if case.large else SMALL
    if job["layers"]:
        model = replace(model, num_layers=job["layers"])
    if side.is_plain:
        compute.WHOLE_BYTES = 1 << 62
    config = AlgorithmConfig(
        prompts=case.rows, group=2, max_tokens=case.time - 8, micro_batches=side.micro_batches,
        compute=ComputeConfig(**side.compute),
    )  # fmt: skip
    batch, step = make_rows(case, model), make_train_step(model, config)
    if job["compile_only"]:
        state = jax.eval_shape(partial(shapes_of_state, config), jax.eval_shape(partial(weights, model)))
    else:
        state = jax.block_until_ready(init_state(weights(model), model, config))
    state_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))

    start = time.perf_counter()
    lowered = step.update.lower(state.params, state.opt_state, batch)  # type: ignore[attr-defined]
    traced = time.perf_counter() - start
    program = lowered.compile()
    memory = program.memory_analysis()
    device = jax.devices()[0]
    found: dict[str, Any] = {
        "device": device.device_kind,
        "compile_seconds": time.perf_counter() - start,
        "of_that_tracing_seconds": traced,
        "state_bytes": state_bytes,
        "planned_bytes": memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes,
    }
    if job["compile_only"]:
        return found
    seconds = []
    batch = jax.device_put(batch)
    for _ in range(job["repeats"] + 2):
        start = time.perf_counter()
        params, opt_state, metrics = program(state.params, state.opt_state, batch)
        state = jax.block_until_ready(type(state)(params, opt_state))
        seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds[2:])
    flops, peak = training_flops(model, [case.time] * case.rows), peak_flops(device.device_kind)
    found |= {
        "step_seconds": median,
        "tokens_per_second": case.rows * case.time / median,
        "model_flops": flops,
        "mfu": None if peak is None else flops / median / peak,
        "loss": float(metrics["loss"]),
        "gradient_norm": float(metrics["gradient_norm"]),
    }
    if stats := device.memory_stats():
        found["peak_bytes"] = stats["peak_bytes_in_use"] - state_bytes
    return found


def make_rows(case: Case, model: ModelConfig) -> Any:
    """Full rows of random tokens: eight of prompt, the rest learned from."""
    import numpy as np

    from slipstream.rl.algorithm.batch import Batch

    rng = np.random.default_rng(0)
    shape = (case.rows, case.time - 1)
    mask = np.ones(shape, np.float32)
    mask[:, :7] = 0
    advantages = rng.normal(size=(case.rows, 1)).astype(np.float32)
    tokens = rng.integers(0, model.vocab_size, (case.rows, case.time)).astype(np.int32)
    logprobs = np.full(shape, -np.log(model.vocab_size), np.float32)
    return Batch(tokens, mask, logprobs * mask, advantages * mask, np.zeros(shape, np.int32))


def shapes_of_state(config: AlgorithmConfig, policy: Any) -> Any:
    """`init_state` for shapes."""
    from slipstream.rl.algorithm import compute
    from slipstream.rl.algorithm.forward import TrainableParams
    from slipstream.rl.algorithm.optimizer import make_optimizer
    from slipstream.rl.algorithm.train_step import TrainState

    params = TrainableParams(compute.cast(policy, compute.param_dtype(config.compute, compute.platform())), None)
    return TrainState(params, make_optimizer(config.optimizer).init(params))


def weights(model: ModelConfig) -> Any:
    import jax

    from slipstream.model.transformer import decoder

    return jax.jit(decoder.init, static_argnums=0)(model, jax.random.key(0))


# --- results ----------------------------------------------------------------------------------------------------------


def judge(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """On a GPU whose peak is known: for each case the fastest side with float32 master weights, against the targets."""
    judged = []
    for case in dict.fromkeys(row["case"] for row in results):
        sides = [row for row in results if row["case"] == case and row["side"].startswith("mixed") and row.get("mfu")]
        if not sides:
            continue
        best = max(sides, key=lambda row: row["mfu"])
        checks = {
            f"MFU ≥ {MFU_TARGET}": best["mfu"] >= MFU_TARGET,
            f"memory ≤ {MEMORY_TARGET / 1e9:.0f} GB": memory_of(best) <= MEMORY_TARGET,
            f"compiled in ≤ {COMPILE_TARGET:.0f} s": best["compile_seconds"] <= COMPILE_TARGET,
        }
        judged.append({"case": case, "side": best["side"], **checks})
    return judged


def memory_of(row: dict[str, Any]) -> float:
    return float(row.get("peak_bytes", row["planned_bytes"]))


def machine(results: list[dict[str, Any]]) -> dict[str, Any]:
    devices = sorted({row["device"] for row in results if "device" in row})
    host = {"host": platform.node(), "system": f"{platform.system()} {platform.machine()}", "cpus": os.cpu_count()}
    return host | {"devices": devices}


def show_line(console: Console, row: dict[str, Any]) -> None:
    console.print(
        f"{row['case']}, {row['side']}: {row.get('error') or f'''{memory_of(row) / 1e9:.2f} GB'''}", highlight=False
    )


def show(console: Console, found: dict[str, Any]) -> None:
    table = Table("tokens", "side", *(("compiled, s", "step, ms", "tokens/s", "MFU", "memory, GB")), title="Train step")
    for row in found["results"]:
        if "error" in row:
            table.add_row(row["case"], row["side"], row["error"][:40])
            continue
        step, utilization = row.get("step_seconds"), row.get("mfu")
        table.add_row(
            row["case"],
            row["side"],
            f"{row['compile_seconds']:.1f}",
            f"{step * 1e3:,.1f}" if step else "",
            f"{row['tokens_per_second']:,.0f}" if step else "",
            f"{utilization:.3f}" if utilization else "",
            f"{memory_of(row) / 1e9:.2f}",
        )
    console.print(table)
    for judged in found["targets"]:
        for name, passed in list(judged.items())[2:]:
            console.print(f"{'PASS' if passed else 'FAIL'}  {judged['case']}, {judged['side']}: {name}")


if __name__ == "__main__":
    main()
