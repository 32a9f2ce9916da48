"""How fast tokens come: Slipstream's own engine beside real vLLM and, on CPU, beside `transformers`, in one run.

    python benchmarks/decode.py --cpu [--json benchmarks/results/decode_cpu.json]
    python benchmarks/decode.py --gpu [--cases 512,64] [--deterministic] [--json benchmarks/results/decode_gpu.json]

--cpu: the 135M shape (SmolLM2) in float32, 8 prompts of 128 tokens with 8 samples each, whose lengths have a long tail (16
to 256 tokens), as rollouts do. --gpu: the 1.24B shape (Llama 3.2) in bfloat16, completions of 256 tokens. Weights are
random, written once as an HF directory that every side reads; tokens are drawn at temperature 1, with logprobs; every side
generates exactly the same number of tokens, and only those count.

Each side has a process of its own, one after another, so that none disturbs the other. It warms up first (compilation is
told apart), and every round has new prompts, so that no prefix cache knows them already. Medians are printed, also to a
.md file beside the JSON. The vLLM side runs in the environment that `make vllm-env` makes, or where --vllm-python says. The
exit code is 0 whatever the verdict: a benchmark reports."""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from decode_job import SAID, Case, Job
from rich.console import Console, Group
from rich.table import Table

from slipstream.model import checkpoint
from slipstream.model.config import ModelConfig
from slipstream.model.tree import unflatten
from slipstream.weights import families

HERE = Path(__file__).resolve().parent
VLLM_PYTHON = HERE.parent / ".venv-vllm" / "bin" / "python"

HF_TARGET = 1.5
"""Ours, in tokens per second, over `transformers`."""
PREFILL_TARGET = 1 / 6
"""Prompt tokens computed with the prefix cache, over those without, for groups of 8."""
LOGPROB_TOLERANCE = 0.05
"""Mean logprobs of sides that sample from the same model differ by chance only."""

OURS, NO_CACHE, DETERMINISTIC, VLLM, HF = "ours", "ours, no prefix cache", "ours, deterministic", "vLLM", "transformers"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--cpu", action="store_true", help="135M shape, float32, groups with ragged lengths")
    where.add_argument("--gpu", action="store_true", help="1.24B shape, bfloat16, several batch sizes")
    parser.add_argument("--cases", help="only these, by name, separated by commas")
    parser.add_argument("--sides", default="hf,vllm,ours", help="only these, separated by commas (hf is for --cpu)")
    parser.add_argument("--deterministic", action="store_true", help="measure deterministic=True too")
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
    console = Console()
    results = measure(arguments, console)
    told = report(results)
    console.print(told)
    if arguments.json:
        write(arguments.json, results, told)


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

    def case(name: str, samples: int, group: int, prompt_tokens: int) -> Case:
        return Case(name, [256 // shrink] * (samples // shrink), group // min(group, shrink), prompt_tokens // shrink)

    return [
        case("512", 512, 1, 256),
        case("64", 64, 1, 256),
        case("1024", 1024, 1, 256),
        replace(case("groups", 512, 8, 1024), group=8),
    ]


def write_model(directory: Path, config: ModelConfig, dtype: str) -> None:
    """Random weights, uniform with deviation 0.02: 256 values, looked up by random bytes, since gigabytes of normal draws
    would take longer than the benchmark."""
    source = np.random.default_rng(0)
    values = (0.02 * np.sqrt(12) * (np.arange(256) - 127.5) / 256).astype(numpy_type := _numpy_dtype(dtype))
    arrays = {}
    for spec in families.tensors(config):
        if len(spec.shape) == 1:
            arrays[spec.name] = np.ones(spec.shape, numpy_type)
        else:
            picks = np.frombuffer(source.bytes(int(np.prod(spec.shape))), np.uint8)
            bits = values.view(f"u{numpy_type.itemsize}")
            arrays[spec.name] = bits[picks].view(numpy_type).reshape(spec.shape)
    checkpoint.save(directory, unflatten(arrays), config)


def _numpy_dtype(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


# --- the sides --------------------------------------------------------------------------------------------------------


def measure(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    small, device = arguments.small, "cpu" if arguments.cpu else "gpu"
    config = cpu_model(small) if arguments.cpu else gpu_model(small)
    dtype = "float32" if arguments.cpu or small else "bfloat16"
    cases = pick_cases(cpu_cases(small) if arguments.cpu else gpu_cases(small), arguments.cases)
    rounds = arguments.rounds or (3 if arguments.cpu else 2)
    sides: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="decode-") as temporary:
        directory, start = Path(temporary) / "model", time.perf_counter()
        write_model(directory, config, dtype)
        console.print(f"weights written in {time.perf_counter() - start:.0f} s")
        job = Job(str(directory), dtype, config.vocab_size, rounds, cases)
        for name, script, python, changes in plan(arguments, device, small):
            console.print(f"[bold]{name}")
            sides[name] = run_side(name, HERE / script, python, replace(job, **changes), Path(temporary), console)
    return {
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "cpus": os.cpu_count(),
            "python": platform.python_version(),
            **{key: value for side in sides.values() for key, value in side["versions"].items()},
        },
        "device": device,
        "model": {"parameters": num_parameters(config), "dtype": dtype, "layers": config.num_layers},
        "rounds": rounds,
        "cases": {case.name: describe(case) for case in cases},
        "sides": sides,
        "targets": targets(sides, cases, device),
    }


def pick_cases(cases: list[Case], names: str | None) -> list[Case]:
    wanted = names.split(",") if names else [case.name for case in cases]
    known = {case.name: case for case in cases}
    if unknown := [name for name in wanted if name not in known]:
        raise SystemExit(f"--cases names {', '.join(unknown)}; there are: {', '.join(known)}")
    return [known[name] for name in wanted]


def plan(arguments: argparse.Namespace, device: str, small: bool) -> list[tuple[str, str, list[str], dict[str, Any]]]:
    """Name, script, Python and changes to the job, for each side in its turn."""
    wanted = arguments.sides.split(",")
    if unknown := set(wanted) - {"hf", "vllm", "ours"}:
        raise SystemExit(f"--sides names {', '.join(sorted(unknown))}; there are: hf, vllm, ours")
    here, there = [sys.executable], shlex.split(arguments.vllm_python)
    found: list[tuple[str, str, list[str], dict[str, Any]]] = []

    def embedded(name: str, changes: dict[str, Any], **options: Any) -> None:
        options = {"engine": arguments.engine_options | options}
        found.append((name, "decode_embedded.py", here, {"options": options} | changes))

    if "ours" in wanted:
        embedded(OURS, {})
        embedded(NO_CACHE, {"rounds": 1}, prefix_cache=False)
        if arguments.deterministic:
            embedded(DETERMINISTIC, {}, deterministic=True)
    if "vllm" in wanted:
        if there == [str(VLLM_PYTHON)] and not VLLM_PYTHON.exists():
            raise SystemExit(
                f"{VLLM_PYTHON} is not there: `make vllm-env` makes it; or leave vLLM out: --sides hf,ours"
            )
        options = {"device": "cpu" if small else device, "llm": arguments.vllm_options}
        found.append((VLLM, "decode_vllm.py", there, {"options": options}))
    if "hf" in wanted and device == "cpu":
        found.append((HF, "decode_hf.py", here, {"options": {"threads": len(os.sched_getaffinity(0))}}))
    return found


def run_side(name: str, script: Path, python: list[str], job: Job, folder: Path, console: Console) -> dict[str, Any]:
    """Shows what the side says; the rest of its output only if it fails."""
    job_file, result_file = folder / "job.json", folder / "result.json"
    job.write(job_file)
    result_file.unlink(missing_ok=True)
    start, last = time.perf_counter(), deque[str](maxlen=60)
    command = [*python, str(script), str(job_file), str(result_file)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(SAID):
                console.print(
                    f"  {time.perf_counter() - start:5.0f} s  {line.removeprefix(SAID).rstrip()}", markup=False
                )
            else:
                last.append(line)
    if process.returncode or not result_file.exists():
        raise SystemExit(f"{name} failed with exit code {process.returncode}. Its last lines:\n{''.join(last)}")
    return {**json.loads(result_file.read_text()), "all_seconds": time.perf_counter() - start}


# --- the verdict ------------------------------------------------------------------------------------------------------


def num_parameters(config: ModelConfig) -> int:
    return sum(int(np.prod(spec.shape)) for spec in families.tensors(config))


def describe(case: Case) -> dict[str, Any]:
    return {
        "prompts": case.num_prompts,
        "group": case.group,
        "prompt_tokens": case.prompt_tokens,
        "num_tokens": case.num_tokens,
        "mean_length": statistics.mean(case.lengths),
        "longest": max(case.lengths),
    }


def tokens_per_second(sides: dict[str, Any], side: str, case: Case) -> float:
    return case.num_tokens / statistics.median(sides[side]["cases"][case.name]["seconds"])


def targets(sides: dict[str, Any], cases: list[Case], device: str) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def at_least(name: str, measured: float, target: float | None) -> None:
        found[name] = {"measured": measured, "at_least": target, "passed": target is None or measured >= target}

    for case in cases:
        if HF in sides and OURS in sides:
            ratio = tokens_per_second(sides, OURS, case) / tokens_per_second(sides, HF, case)
            at_least(f"{case.name}: ours over transformers", ratio, HF_TARGET)
        if VLLM in sides and OURS in sides:
            ratio = tokens_per_second(sides, OURS, case) / tokens_per_second(sides, VLLM, case)
            at_least(f"{case.name}: ours over vLLM", ratio, None)
        if DETERMINISTIC in sides:
            ratio = tokens_per_second(sides, DETERMINISTIC, case) / tokens_per_second(sides, OURS, case)
            at_least(f"{case.name}: deterministic over not", ratio, None)
        if OURS in sides and NO_CACHE in sides and case.group > 1:
            ratio = prefill_tokens(sides, OURS, case) / prefill_tokens(sides, NO_CACHE, case)
            name = f"{case.name}: prompt tokens computed, with prefix cache over without"
            found[name] = {"measured": ratio, "at_most": PREFILL_TARGET, "passed": ratio <= PREFILL_TARGET}
        if len(sides) > 1:
            means = [side["cases"][case.name]["mean_logprob"] for side in sides.values()]
            spread = max(means) - min(means)
            name = f"{case.name}: spread of the sides' mean logprobs"
            found[name] = {"measured": spread, "at_most": LOGPROB_TOLERANCE, "passed": spread <= LOGPROB_TOLERANCE}
    return found


def prefill_tokens(sides: dict[str, Any], side: str, case: Case) -> int:
    return sides[side]["cases"][case.name]["stats"]["prefill_tokens"]


def report(results: dict[str, Any]) -> Group:
    parts: list[Any] = [speeds(results, name) for name in results["cases"]]
    parts += [spent for name in results["cases"] if (spent := where_the_time_goes(results, name))]
    parts.append(", ".join(f"{key} {value}" for key, value in results["machine"].items()))
    for name, goal in results["targets"].items():
        bound = f"at least {goal['at_least']:g}" if goal.get("at_least") else ""
        bound = f"at most {goal['at_most']:.3g}" if "at_most" in goal else bound
        verdict = ("PASS" if goal["passed"] else "FAIL") if bound else "    "
        parts.append(f"{verdict}  {name}: {goal['measured']:.3f}" + (f" (target {bound})" if bound else ""))
    return Group(*parts)


def speeds(results: dict[str, Any], case: str) -> Table:
    about, model = results["cases"][case], results["model"]
    title = (
        f"{case}: {about['prompts']} prompts × {about['group']} samples, {about['prompt_tokens']} + "
        f"{about['mean_length']:.0f} tokens (longest {about['longest']}); {model['parameters'] / 1e6:,.0f}M, {model['dtype']}"
    )
    table = Table("", "tokens/s", "seconds", "lowest–highest", "warm-up", "start", "mean logprob", title=title)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, side in results["sides"].items():
        found = side["cases"][case]
        seconds = found["seconds"]
        median = statistics.median(seconds)
        table.add_row(
            name,
            f"{about['num_tokens'] / median:,.0f}",
            f"{median:.2f}",
            f"{min(seconds):.2f}–{max(seconds):.2f}",
            f"{found['warmup_seconds']:.1f} s",
            f"{side['start_seconds']:.1f} s",
            f"{found['mean_logprob']:.3f}",
        )
    return table


def where_the_time_goes(results: dict[str, Any], case: str) -> Table | None:
    """What our engine counted in the last round: seconds by phase, as shares of the round, and all other numbers."""
    sides = {name: side for name, side in results["sides"].items() if side["cases"][case]["stats"]}
    if not sides:
        return None
    table = Table("", *sides, title=f"{case}: where the time goes (last round)")
    for column in table.columns[1:]:
        column.justify = "right"
    rows: dict[str, dict[str, str]] = {}
    for name, side in sides.items():
        found = side["cases"][case]
        whole = found["seconds"][-1]
        stats = dict(found["stats"])
        spent = stats.pop("seconds", {})
        for phase, seconds in {**spent, "rest": whole - sum(spent.values())}.items():
            rows.setdefault(phase, {})[name] = f"{seconds:.2f} s  {seconds / whole:5.1%}"
        for key, value in stats.items():
            rows.setdefault(key.replace("_", " "), {})[name] = f"{value:,}"
    for label, cells in rows.items():
        table.add_row(label, *(cells.get(name, "") for name in sides))
    return table


def write(path: Path, results: dict[str, Any], told: Group) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=2) + "\n")
    plain = Console(width=160, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    plain.print(told)
    lines = "\n".join(line.rstrip() for line in plain.export_text().splitlines())
    path.with_suffix(".md").write_text(
        f"What `python benchmarks/decode.py --{results['device']}` printed:\n\n```\n{lines}\n```\n"
    )


if __name__ == "__main__":
    main()
