"""How fast tokens come: Slipstream's own engine beside real vLLM and, on CPU, beside `transformers`, in one run.

    python benchmarks/decode.py --cpu [--json benchmarks/results/decode_cpu.json]
    python benchmarks/decode.py --gpu [--cases 512,64] [--deterministic] [--json benchmarks/results/decode_gpu.json]

--cpu: the 135M shape (SmolLM2) in float32, 8 prompts of 128 tokens with 8 samples each, whose lengths have a long tail (16
to 256 tokens), as rollouts do. --gpu: the 1.24B shape (Llama 3.2) in bfloat16, completions of 256 tokens. Weights are
random, written once as an HF directory that every side reads; tokens are drawn at temperature 1, with logprobs; every side
generates exactly the same number of tokens, and only those count.

Each side has a process of its own, one after another, so that none disturbs the other; with --in-turn all are up at once, and
a round of each goes before the next round of any, so that what slows the machine slows all alike. It warms up first
(compilation is told apart), and every round has new prompts, so that no prefix cache knows them already. Medians are printed,
also to a .md file beside the JSON. `--sides vllm,gateway` compares vLLM called directly with vLLM as an engine of ours. vLLM
runs in the environment that `make vllm-env` makes, or where --vllm-python says. The exit code is 0 whatever the verdict: a
benchmark reports."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
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

import ml_dtypes
import numpy as np
import psutil
from decode_job import GO, READY, SAID, Case, Job
from decode_report import DETERMINISTIC, GATEWAY, HF, NO_CACHE, OURS, VLLM, describe, report, targets, write
from rich.console import Console

from slipstream.model import checkpoint
from slipstream.model.config import ModelConfig
from slipstream.model.tree import unflatten
from slipstream.weights import families

HERE = Path(__file__).resolve().parent
VLLM_PYTHON = HERE.parent / ".venv-vllm" / "bin" / "python"
MOST_BUSY = 0.1
"""Above this share of the processors, what else runs on the machine shows in the numbers."""
SHARE, SHARE_IN_TURN = 0.6, 0.3
"""Of a GPU's memory, for each vLLM."""

Turn: TypeAlias = tuple[str, str, list[str], dict[str, Any]]
"""Name, script, Python and changes to the job."""
Outcome: TypeAlias = tuple[str, dict[str, Any] | None, float]
"""Name, what was found if it did not fail, and how busy others kept the processors."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--cpu", action="store_true", help="135M shape, float32, groups with ragged lengths")
    where.add_argument("--gpu", action="store_true", help="1.24B shape, bfloat16, several batch sizes")
    parser.add_argument("--cases", help="only these, by name, separated by commas")
    parser.add_argument(
        "--sides",
        default="hf,vllm,ours",
        help="only these, separated by commas: hf (for --cpu), vllm, ours, gateway (vLLM behind our gateway)",
    )
    parser.add_argument("--deterministic", action="store_true", help="measure deterministic=True too")
    parser.add_argument(
        "--in-turn",
        action="store_true",
        help="all sides are up at once, and their rounds alternate: for a ratio near 1",
    )
    parser.add_argument("--rounds", type=int, help="measured rounds (3 on CPU, 2 on GPU)")
    parser.add_argument("--small", action="store_true", help="two narrow layers and little work: does it run at all?")
    parser.add_argument(
        "--vllm-python", default=str(VLLM_PYTHON), help="command that starts Python where vLLM is installed"
    )
    parser.add_argument("--vllm-options", type=json.loads, default={}, help="JSON of further arguments of vllm.LLM")
    parser.add_argument("--engine-options", type=json.loads, default={}, help="JSON of further EngineConfig settings")
    parser.add_argument(
        "--json", type=Path, help="write the results to this file, and what is printed beside it as .md"
    )
    arguments = parser.parse_args()
    console = Console() if sys.stdout.isatty() else Console(width=140)
    for results in measure(arguments, console):
        if arguments.json:  # after every side, so that an interrupted run keeps what it has
            write(arguments.json, results)
    console.print(report(results))


# --- the work ---------------------------------------------------------------------------------------------------------


def cpu_model(small: bool) -> ModelConfig:
    shape = ModelConfig(
        "llama", vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9, num_kv_heads=3,
        head_dim=64, tie_word_embeddings=True,
    )  # fmt: skip
    return replace(shape, vocab_size=4096, num_layers=2) if small else shape


def gpu_model(small: bool) -> ModelConfig:
    shape = ModelConfig(
        "llama", vocab_size=128_256, hidden_size=2048, intermediate_size=8192, num_layers=16, num_heads=32, num_kv_heads=8,
        head_dim=64, rope_theta=500_000.0, tie_word_embeddings=True,
    )  # fmt: skip
    return replace(shape, vocab_size=4096, hidden_size=256, intermediate_size=512, num_layers=2) if small else shape


def cpu_cases(small: bool) -> list[Case]:
    shrink = 8 if small else 1
    lengths = long_tail(64, low=16 // shrink, high=256 // shrink, typical=45 / shrink)
    return [Case("groups", lengths, group=8, prompt_tokens=128 // shrink)]


def long_tail(count: int, low: int, high: int, typical: float) -> list[int]:
    """Lognormal lengths within bounds, the same every time; the mean is about 1.4 × `typical`."""
    source = random.Random(0)
    return [min(high, max(low, round(typical * source.lognormvariate(0.0, 0.85)))) for _ in range(count)]


def gpu_cases(small: bool) -> list[Case]:
    shrink = 16 if small else 1
    lengths = [256 // shrink] * (1024 // shrink)
    batches = [Case(str(n), lengths[: n // shrink], group=1, prompt_tokens=256 // shrink) for n in (512, 64, 1024)]
    return [*batches, Case("groups", lengths[: 512 // shrink], group=8, prompt_tokens=1024 // shrink)]


def write_model(directory: Path, config: ModelConfig, dtype: str) -> None:
    """Random weights with deviation 0.019. Gigabytes of normal draws would take longer than the benchmark, so they are made
    of random bits: sign, mantissa and lowest bit of the exponent are random, which gives ± 2⁻⁷ to 2⁻⁵."""
    source = np.random.default_rng(0)
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    bits = np.dtype(f"u{kind.itemsize}")
    random_part = (np.iinfo(bits).max >> 8) | (1 << (8 * bits.itemsize - 1))
    exponent = 0x3C << (8 * bits.itemsize - 8)
    arrays = {}
    for spec in families.tensors(config):
        if len(spec.shape) == 1:
            arrays[spec.name] = np.ones(spec.shape, kind)
        else:
            drawn = np.frombuffer(source.bytes(kind.itemsize * int(np.prod(spec.shape))), bits)
            arrays[spec.name] = ((drawn & bits.type(random_part)) | bits.type(exponent)).view(kind).reshape(spec.shape)
    checkpoint.save(directory, unflatten(arrays), config)


def num_parameters(config: ModelConfig) -> int:
    return sum(int(np.prod(spec.shape)) for spec in families.tensors(config))


# --- the sides --------------------------------------------------------------------------------------------------------


def measure(arguments: argparse.Namespace, console: Console) -> Iterator[dict[str, Any]]:
    """The results so far, after each side."""
    small, device = arguments.small, "cpu" if arguments.cpu else "gpu"
    config = cpu_model(small) if arguments.cpu else gpu_model(small)
    dtype: Literal["float32", "bfloat16"] = "float32" if arguments.cpu or small else "bfloat16"
    cases = pick_cases(cpu_cases(small) if arguments.cpu else gpu_cases(small), arguments.cases)
    rounds = arguments.rounds or (3 if arguments.cpu else 2)
    sides: dict[str, Any] = {}
    failed: list[str] = []
    machine = {
        "system": f"{platform.system()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
    }
    turns = plan(arguments, device, cases)
    with tempfile.TemporaryDirectory(prefix="decode-") as temporary:
        directory, start = Path(temporary) / "model", time.perf_counter()
        write_model(directory, config, dtype)
        console.print(f"weights written in {time.perf_counter() - start:.0f} s")
        job = Job(str(directory), dtype, config.vocab_size, rounds, cases)
        one_by_one = in_turn if arguments.in_turn else one_after_the_other
        for name, side, busy in one_by_one(turns, job, Path(temporary), console):
            if side is None:
                failed.append(name)
            else:
                sides[name] = side | {"others_busy": busy}
                machine |= side["versions"]
            yield {
                "machine": machine,
                "device": device,
                "model": {"parameters": num_parameters(config), "dtype": dtype, "layers": config.num_layers},
                "rounds": rounds,
                "cases": {case.name: describe(case) for case in cases},
                "sides": sides,
                "failed": failed,
                "targets": targets(sides, cases),
            }


def one_after_the_other(turns: list[Turn], job: Job, folder: Path, console: Console) -> Iterator[Outcome]:
    for name, script, python, changes in turns:
        console.print(f"[bold]{name}")
        busy = look_for_others(console)
        yield name, run_side(name, HERE / script, python, replace(job, **changes), folder, console), busy


def in_turn(turns: list[Turn], job: Job, folder: Path, console: Console) -> Iterator[Outcome]:
    """Each has started before the next one does, and then a round of each goes before the next round of any."""
    busy = look_for_others(console)
    found: dict[str, dict[str, Any] | None] = {}
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
            found[name] = run_side(name, HERE / script, python, own, Path(own.turn), console)

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
        yield name, found[name], busy


def look_for_others(console: Console) -> float:
    busy = busy_share()
    if busy > MOST_BUSY:
        console.print(f"  others use {busy:.0%} of this machine's processors: these numbers will say little")
    return busy


def pick_cases(cases: list[Case], names: str | None) -> list[Case]:
    wanted = names.split(",") if names else [case.name for case in cases]
    known = {case.name: case for case in cases}
    if unknown := [name for name in wanted if name not in known]:
        raise SystemExit(f"--cases names {', '.join(unknown)}; there are: {', '.join(known)}")
    return [known[name] for name in wanted]


def plan(arguments: argparse.Namespace, device: str, cases: list[Case]) -> list[Turn]:
    """The sides."""
    wanted = arguments.sides.split(",")
    if unknown := set(wanted) - {"hf", "vllm", "ours", "gateway"}:
        raise SystemExit(f"--sides names {', '.join(sorted(unknown))}; there are: hf, vllm, ours, gateway")
    here, there = [sys.executable], shlex.split(arguments.vllm_python)
    found: list[Turn] = []
    # Several at once must share a GPU.
    share = SHARE_IN_TURN if arguments.in_turn else SHARE

    def embedded(name: str, changes: dict[str, Any], **options: Any) -> None:
        options = {"engine": arguments.engine_options | options}
        found.append((name, "decode_embedded.py", here, {"options": options} | changes))

    if "ours" in wanted:
        embedded(OURS, {})
        if groups := [case for case in cases if case.group > 1]:
            embedded(NO_CACHE, {"rounds": 1, "cases": groups}, prefix_cache=False)
        if arguments.deterministic:
            embedded(DETERMINISTIC, {}, deterministic=True)
    if "vllm" in wanted:
        if there == [str(VLLM_PYTHON)] and not VLLM_PYTHON.exists():
            raise SystemExit(
                f"{VLLM_PYTHON} is not there: `make vllm-env` makes it; or leave vLLM out: --sides hf,ours"
            )
        on = "cpu" if arguments.small else device
        llm = ({} if on == "cpu" else {"gpu_memory_utilization": share}) | arguments.vllm_options
        options = {"device": on, "llm": llm}
        found.append((VLLM, "decode_vllm.py", there, {"options": options}))
    if "gateway" in wanted:
        engine = {"kind": "vllm", "python": there[0], "memory_share": share} | arguments.engine_options
        found.append((GATEWAY, "decode_gateway.py", here, {"options": {"engine": engine}}))
    if "hf" in wanted and device == "cpu":
        found.append((HF, "decode_hf.py", here, {"options": {"threads": os.cpu_count()}}))
    if not found:
        raise SystemExit(f"no side left to run: --sides {arguments.sides} on {device}")
    return found


def busy_share() -> float:
    """Of the processors, by others: nothing of ours runs while this looks."""
    return psutil.cpu_percent(1.0) / 100


def run_side(
    name: str, script: Path, python: list[str], job: Job, folder: Path, console: Console
) -> dict[str, Any] | None:
    """Shows what the side says, and the rest of its output only if it fails; None then, since the other sides still
    have something to tell."""
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
                _, said, text = line.partition(SAID)
                last.append(line)
                if said:
                    console.print(f"  {time.perf_counter() - start:5.0f} s  {text.rstrip()}", markup=False)
        finally:  # vLLM has processes of its own, which would outlive it if this is interrupted
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode or not result_file.exists():
        console.print(
            f"{name} failed with exit code {process.returncode}. Its last lines:\n{''.join(last)}", markup=False
        )
        return None
    return {**json.loads(result_file.read_text()), "all_seconds": time.perf_counter() - start}


if __name__ == "__main__":
    main()
