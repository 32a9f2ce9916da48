"""From the start of an engine's process to the first token of its first request, with a warm compilation cache; vLLM as the
reference in the same run.

    python benchmarks/start.py --cpu [--json benchmarks/results/start_cpu.json]     # a tiny shape
    python benchmarks/start.py --gpu [--json benchmarks/results/start_gpu.json]     # 1.24B, bfloat16; goal: 10 s

Each start is a fresh process, a side of `decode.py`, with one prompt of 256 tokens, in an engine for 64 sequences of 2,048
tokens. The first start of a side has an empty cache and fills it; it is reported as `cold`. The others find their programs
there, and the phases of the one with the median time are printed. Weights are random, written once, so the file is in the
page cache. An engine's process in a fleet also connects to the gateway, which is not included."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from decode import HERE, SHARE, VLLM_PYTHON, Turn, check_background_load, run_side
from decode_job import Case, Job
from decode_report import OURS, VLLM
from decode_workloads import cpu_model, gpu_model, num_parameters, write_model
from rich.console import Console
from rich.table import Table

GOAL = 10.0
"""Seconds from the process's start to the first token, on GPU."""
CASE = Case("start", lengths=[1], prompt_lengths=[256])
ENGINE = {"max_num_seqs": 64, "max_model_len": 2048}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--cpu", action="store_true", help="a tiny shape, float32")
    where.add_argument("--gpu", action="store_true", help="1.24B shape, bfloat16")
    parser.add_argument("--sides", default="ours,vllm", help="sides to run, separated by commas: ours, vllm")
    parser.add_argument("--repeats", type=int, default=3, help="starts with a warm cache, at least 1")
    parser.add_argument("--vllm-python", default=str(VLLM_PYTHON), help="Python command of an environment with vLLM")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    arguments = parser.parse_args()
    console = Console() if sys.stdout.isatty() else Console(width=140)
    results = measure(arguments, console)
    show(results, console)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


def measure(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    config = gpu_model(small=False) if arguments.gpu else cpu_model(small=True)
    llm = ENGINE | ({"gpu_memory_utilization": SHARE} if arguments.gpu else {})
    sides: dict[str, Turn] = {
        "ours": (OURS, "decode_embedded.py", [sys.executable], {"engine": ENGINE}),
        "vllm": (
            VLLM,
            "decode_vllm.py",
            shlex.split(arguments.vllm_python),
            {"device": "gpu" if arguments.gpu else "cpu", "llm": llm},
        ),
    }
    machine: dict[str, Any] = {"system": f"{platform.system()} {platform.machine()}", "cpus": os.cpu_count()}
    found: dict[str, Any] = {}
    busy = check_background_load(console)
    with tempfile.TemporaryDirectory(prefix="start-") as temporary:
        folder = Path(temporary)
        # As `enable_compilation_cache` does. vLLM keeps its cache below XDG_CACHE_HOME.
        os.environ |= {
            "JAX_COMPILATION_CACHE_DIR": str(folder / "programs"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        job = Job(str(folder / "model"), "bfloat16" if arguments.gpu else "float32", config.vocab_size, 1, [CASE])
        write_model(folder / "model", config, job.dtype)
        for wanted in arguments.sides.split(","):
            name, script, python, options = sides[wanted]
            starts = []
            for number in range(arguments.repeats + 1):
                console.print(f"[bold]{name}[/], {'warm' if number else 'cold'}")
                started = time.monotonic()
                side = run_side(name, HERE / script, python, replace(job, options=options), folder, console)
                if side is None:
                    break
                machine |= side["versions"]
                starts.append(phases(side, started))
            else:
                found[name] = {"cold": starts[0], "warm": starts[1:]}
    if not found:
        raise SystemExit("no side ran")
    model = {"parameters": num_parameters(config), "dtype": job.dtype}
    return {
        "machine": machine,
        "others_busy": busy,
        "model": model,
        "goal": GOAL if arguments.gpu else None,
        "sides": found,
    }


def phases(side: dict[str, Any], started: float) -> dict[str, float]:
    """Return the seconds of each phase up to the first token. vLLM compiles while its engine starts."""
    first = side["cases"][CASE.name]
    imports, device = side.get("import_seconds", 0.0), side.get("device_seconds", 0.0)
    compiling = first["stats"].get("compile_seconds", 0.0)
    return {
        "interpreter, imports": side["imported"] - started + imports,
        "device": device,
        "weights, engine": side["start_seconds"] - imports - device,
        "programs: traced, compiled or read from the cache": compiling,
        "first ticks": first["warmup_seconds"] - compiling,
    }


def show(results: dict[str, Any], console: Console) -> None:
    sides = results["sides"]
    medians = {name: sorted(side["warm"], key=total)[len(side["warm"]) // 2] for name, side in sides.items()}
    columns = {
        f"{name}, {kind}": start
        for name in sides
        for kind, start in (("cold", sides[name]["cold"]), ("warm", medians[name]))
    }
    title = f"seconds to the first token; {results['model']['parameters'] / 1e6:,.0f}M, {results['model']['dtype']}"
    table = Table("", *columns, title=title)
    for phase in next(iter(columns.values())):
        table.add_row(phase, *(f"{start[phase]:.2f}" if start[phase] else "" for start in columns.values()))
    table.add_row("all", *(f"{total(start):.2f}" for start in columns.values()))
    console.print(table)
    facts = results["machine"] | {"others busy": f"{results['others_busy']:.0%}"}
    console.print(", ".join(f"{key} {value}" for key, value in facts.items()))
    if OURS in medians:
        seconds, goal = total(medians[OURS]), results["goal"]
        verdict = "" if goal is None else f"{'PASS' if seconds <= goal else 'FAIL'}  goal: {goal:g} s; "
        reference = f"; vLLM: {total(medians[VLLM]):.2f} s" if VLLM in medians else ""
        console.print(f"{verdict}start to first token, warm: {seconds:.2f} s{reference}")


def total(start: dict[str, float]) -> float:
    return sum(start.values())


if __name__ == "__main__":
    main()
