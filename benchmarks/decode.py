"""Generation throughput: the embedded engine compared with real vLLM and, on CPU, `transformers`, in one run.

    python benchmarks/decode.py --cpu [--json benchmarks/results/decode_cpu.json]
    python benchmarks/decode.py --gpu [--cases 512,64] [--deterministic] [--json benchmarks/results/decode_gpu.json]
    python benchmarks/decode.py --gpu --workload nano|experts|speculative [--json benchmarks/results/decode_nano_gpu.json]

--cpu: the 135M shape (SmolLM2) in float32, 8 prompts of 128 tokens with 8 samples each, and long-tailed completion
lengths (16 to 256 tokens), as in rollouts. --gpu: the 1.24B shape (Llama 3.2) in bfloat16, completions of 256 tokens.
Weights are random, written once as an HF directory that every side reads. Tokens are sampled at temperature 1, with
logprobs. Every side returns exactly the same number of tokens, and only these count. `decode_workloads.py` describes the
other workloads. In `speculative`, the embedded engine and vLLM both run without speculation, with prompt lookup, and
with a draft model.

The sides run one after another, each in its own process. With --in-turn, all processes run at the same time and the
rounds alternate, so that a noisy machine slows all sides equally. Each side warms up first; compilation is reported
separately. Every round has new prompts, which no prefix cache contains. The medians are printed, and written to a .md
file beside the JSON. `--sides vllm,gateway` compares vLLM called directly with vLLM as a Slipstream engine. vLLM runs
in the environment of `make vllm-env`, or in that of --vllm-python. The exit code is 0 even if a target is missed."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import psutil
from decode_job import GO, PROGRESS_PREFIX, READY, Case, Job
from decode_report import (
    DETERMINISTIC,
    DRAFT,
    GATEWAY,
    HF,
    LOOKUP,
    NO_CACHE,
    OURS,
    VLLM,
    describe,
    report,
    targets,
    write,
)
from decode_workloads import WORKLOADS, num_parameters, write_model, write_walking_model
from rich.console import Console

from slipstream.engines.embedded.compute.prompt_lookup import MAX_NGRAM, MIN_NGRAM

HERE = Path(__file__).resolve().parent
VLLM_PYTHON = HERE.parent / ".venv-vllm" / "bin" / "python"
MAX_BACKGROUND_LOAD = 0.1
"""CPU load by other processes above which the results are unreliable."""
SHARE, SHARE_IN_TURN = 0.6, 0.3
"""Fraction of the GPU's memory for each vLLM, without and with `--in-turn`."""
NUM_SPECULATIVE = 4
"""Draft tokens per step in the workload `speculative`."""

Turn: TypeAlias = tuple[str, str, list[str], dict[str, Any]]
"""Name, script, Python command, and changes to the job."""
Outcome: TypeAlias = tuple[str, dict[str, Any] | None, float]
"""Name, result (None if it failed), and the CPU load by other processes."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--cpu", action="store_true", help="135M shape, float32, groups with ragged lengths")
    where.add_argument("--gpu", action="store_true", help="1.24B shape, bfloat16, several batch sizes")
    parser.add_argument("--workload", choices=WORKLOADS, default="rollouts", help="model and cases (default: rollouts)")
    parser.add_argument("--cases", help="names of the cases to run, separated by commas (default: all)")
    parser.add_argument(
        "--sides",
        default="hf,vllm,ours",
        help="sides to run, separated by commas: hf (rollouts on CPU only), vllm, ours, gateway (vLLM behind our gateway)",
    )
    parser.add_argument("--deterministic", action="store_true", help="also measure deterministic=True")
    parser.add_argument(
        "--in-turn",
        action="store_true",
        help="run all sides at the same time with alternating rounds; for precise ratios near 1",
    )
    parser.add_argument("--rounds", type=int, help="measured rounds (default: 3 on CPU, 2 on GPU)")
    parser.add_argument("--small", action="store_true", help="smoke test: two narrow layers and little work")
    parser.add_argument("--vllm-python", default=str(VLLM_PYTHON), help="Python command of an environment with vLLM")
    parser.add_argument("--vllm-options", type=json.loads, default={}, help="further arguments of vllm.LLM, as JSON")
    parser.add_argument("--engine-options", type=json.loads, default={}, help="further engine settings, as JSON")
    parser.add_argument(
        "--json", type=Path, help="write the results to this file, and the printed tables to a .md file beside it"
    )
    arguments = parser.parse_args()
    console = Console() if sys.stdout.isatty() else Console(width=140)
    for results in measure(arguments, console):
        if arguments.json:  # after every side, so that an interrupted run keeps its results
            write(arguments.json, results)
    console.print(report(results))


# --- the sides --------------------------------------------------------------------------------------------------------


def measure(arguments: argparse.Namespace, console: Console) -> Iterator[dict[str, Any]]:
    """Yield the results so far after each side."""
    small, device = arguments.small, "cpu" if arguments.cpu else "gpu"
    workload = WORKLOADS[arguments.workload](arguments.gpu, small)
    config, cases = workload.model, pick_cases(workload.cases, arguments.cases)
    dtype: Literal["float32", "bfloat16"] = "float32" if arguments.cpu or small else "bfloat16"
    rounds = arguments.rounds or (3 if arguments.cpu else 2)
    sides: dict[str, Any] = {}
    failed: list[str] = []
    machine = {
        "system": f"{platform.system()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
    }
    with tempfile.TemporaryDirectory(prefix="decode-") as temporary:
        directory, draft = Path(temporary) / "model", Path(temporary) / "draft"
        turns, start = plan(arguments, device, cases, draft if workload.draft else None), time.perf_counter()
        if workload.draft:
            write_walking_model(directory, config, draft, workload.draft, dtype)
        else:
            write_model(directory, config, dtype)
        console.print(f"weights written in {time.perf_counter() - start:.0f} s")
        job = Job(str(directory), dtype, workload.num_ids or config.vocab_size, rounds, cases)
        run_sides = run_interleaved if arguments.in_turn else run_sequentially
        for name, side, busy in run_sides(turns, job, Path(temporary), console):
            if side is None:
                failed.append(name)
            else:
                sides[name] = side | {"others_busy": busy}
                machine |= side["versions"]
            yield {
                "machine": machine,
                "device": device,
                "workload": arguments.workload,
                "model": {"parameters": num_parameters(config), "dtype": dtype, "layers": config.num_layers},
                "rounds": rounds,
                "cases": {case.name: describe(case) for case in cases},
                "sides": sides,
                "failed": failed,
                "targets": targets(sides, cases),
            }


def run_sequentially(turns: list[Turn], job: Job, folder: Path, console: Console) -> Iterator[Outcome]:
    for name, script, python, changes in turns:
        console.print(f"[bold]{name}")
        busy = check_background_load(console)
        yield name, run_side(name, HERE / script, python, replace(job, **changes), folder, console), busy


def run_interleaved(turns: list[Turn], job: Job, folder: Path, console: Console) -> Iterator[Outcome]:
    """Start the sides one after another, then run one round of each side at a time."""
    busy = check_background_load(console)
    outcomes: dict[str, dict[str, Any] | None] = {}
    running: list[tuple[threading.Thread, Path]] = []

    def until_ready(thread: threading.Thread, place: Path) -> bool:
        while thread.is_alive() and not (place / READY).exists():
            time.sleep(0.005)
        return thread.is_alive()

    for number, (name, script, python, changes) in enumerate(turns):
        console.print(f"[bold]{name}")
        place = folder / f"side{number}"
        place.mkdir()

        own = replace(job, turn=str(place), **changes)

        def run(name: str = name, script: str = script, python: list[str] = python, own: Job = own) -> None:
            outcomes[name] = run_side(name, HERE / script, python, own, Path(own.turn), console)

        thread = threading.Thread(target=run)
        thread.start()
        if until_ready(thread, place):
            running.append((thread, place))
    while running:
        for thread, place in running:
            (place / READY).unlink()
            (place / GO).touch()
            until_ready(thread, place)
        running = [(thread, place) for thread, place in running if thread.is_alive()]
    for name, *_ in turns:
        yield name, outcomes[name], busy


def check_background_load(console: Console) -> float:
    busy = background_load()
    if busy > MAX_BACKGROUND_LOAD:
        console.print(f"  other processes use {busy:.0%} of the CPU: the results will be unreliable")
    return busy


def pick_cases(cases: list[Case], names: str | None) -> list[Case]:
    wanted = names.split(",") if names else [case.name for case in cases]
    known = {case.name: case for case in cases}
    if unknown := [name for name in wanted if name not in known]:
        raise SystemExit(f"--cases: unknown {', '.join(unknown)}; choose from {', '.join(known)}")
    return [known[name] for name in wanted]


def plan(arguments: argparse.Namespace, device: str, cases: list[Case], draft: Path | None) -> list[Turn]:
    """Return the sides to run. With a draft model, the embedded engine and vLLM also run with speculation."""
    wanted = arguments.sides.split(",")
    if unknown := set(wanted) - {"hf", "vllm", "ours", "gateway"}:
        raise SystemExit(f"--sides: unknown {', '.join(sorted(unknown))}; choose from hf, vllm, ours, gateway")
    python, vllm_python = [sys.executable], shlex.split(arguments.vllm_python)
    turns: list[Turn] = []
    # Interleaved sides share the GPU.
    share = SHARE_IN_TURN if arguments.in_turn else SHARE

    def embedded(name: str, changes: dict[str, Any], **options: Any) -> None:
        options = {"engine": arguments.engine_options | options}
        turns.append((name, "decode_embedded.py", python, {"options": options} | changes))

    def vllm(name: str, **options: Any) -> None:
        on = "cpu" if arguments.small else device
        llm = ({} if on == "cpu" else {"gpu_memory_utilization": share}) | options | arguments.vllm_options
        turns.append((name, "decode_vllm.py", vllm_python, {"options": {"device": on, "llm": llm}}))

    if "ours" in wanted:
        embedded(OURS, {})
        if groups := [case for case in cases if case.group > 1]:
            embedded(NO_CACHE, {"rounds": 1, "cases": groups}, enable_prefix_caching=False)
        if arguments.deterministic:
            embedded(DETERMINISTIC, {}, deterministic=True)
        if draft:
            embedded(OURS + LOOKUP, {}, speculation="prompt_lookup", num_speculative_tokens=NUM_SPECULATIVE)
            drafting = {"speculation": "draft", "draft_model": str(draft)}
            embedded(OURS + DRAFT, {}, **drafting, num_speculative_tokens=NUM_SPECULATIVE)
    if "vllm" in wanted:
        if vllm_python == [str(VLLM_PYTHON)] and not VLLM_PYTHON.exists():
            raise SystemExit(f"{VLLM_PYTHON} does not exist: run `make vllm-env`, or skip vLLM with --sides hf,ours")
        vllm(VLLM)
        if draft:
            ngrams = {"method": "ngram", "prompt_lookup_max": MAX_NGRAM, "prompt_lookup_min": MIN_NGRAM}
            drafting = {"method": "draft_model", "model": str(draft)}
            for name, settings in ((LOOKUP, ngrams), (DRAFT, drafting)):
                vllm(VLLM + name, speculative_config=settings | {"num_speculative_tokens": NUM_SPECULATIVE})
    if "gateway" in wanted:
        engine = {"python": vllm_python[0], "gpu_memory_utilization": share} | arguments.engine_options
        turns.append((GATEWAY, "decode_gateway.py", python, {"options": {"engine": engine}}))
    if "hf" in wanted and device == "cpu" and arguments.workload == "rollouts":
        turns.append((HF, "decode_hf.py", python, {"options": {"threads": os.cpu_count()}}))
    if not turns:
        raise SystemExit(f"--sides {arguments.sides}: none of these run on {device}")
    return turns


def background_load() -> float:
    """Return the CPU load by other processes, measured while none of ours runs."""
    return psutil.cpu_percent(1.0) / 100


def run_side(
    name: str, script: Path, python: list[str], job: Job, folder: Path, console: Console
) -> dict[str, Any] | None:
    """Run a side, print its progress, and return its result. If it fails, print the end of its output and return None,
    so that the other sides still run."""
    job_file, result_file = folder / "job.json", folder / "result.json"
    job.write(job_file)
    result_file.unlink(missing_ok=True)
    start, last = time.perf_counter(), deque[str](maxlen=60)
    command = [*python, str(script), str(job_file), str(result_file)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, text=True, errors="replace", start_new_session=True, **pipes) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                _, prefix, text = line.partition(PROGRESS_PREFIX)
                last.append(line)
                if prefix:
                    console.print(f"  {time.perf_counter() - start:5.0f} s  {text.rstrip()}", markup=False)
        finally:  # vLLM's child processes would survive an interrupt
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode or not result_file.exists():
        console.print(
            f"{name} failed with exit code {process.returncode}. End of its output:\n{''.join(last)}", markup=False
        )
        return None
    return {**json.loads(result_file.read_text()), "all_seconds": time.perf_counter() - start}


if __name__ == "__main__":
    main()
