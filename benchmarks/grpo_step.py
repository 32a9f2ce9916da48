"""A whole GRPO step beside TRL's: time by phase, memory, and utilization.

    python benchmarks/grpo_step.py [--sides ours,trl]                     # CPU: a tiny model, to try the benchmark itself
    python benchmarks/grpo_step.py --gpu --sides ours,ours-vllm,trl       # a GPU: 1.24B parameters

    ours        `slipstream train` with the embedded engine in the trainer's process
    ours-vllm   the same with vLLM in a process of its own, on the same GPU
    trl         TRL's GRPOTrainer with vLLM in its process (`vllm_mode="colocate"`); on CPU, where that does not run, with the
                `generate` of transformers

All sides start from one checkpoint of random weights, and train on the same prompts in the same order, with the same group
size, lengths, micro-batches, loss, reward, optimizer and learning rate. Every completion has the full length. On a GPU all
sides keep float32 weights, and compute and generate in bfloat16; a table says what each side really does. TRL runs with its
defaults, except for gradient checkpointing, which is off because it takes time. With vLLM, its defaults include a forward pass
for logprobs that ours takes from the engine. It is a phase of its own, and
--trl '{"vllm_importance_sampling_correction": false}' leaves it out.

The sides run one after another, each in its own process. Times are medians over the steps after the warm-up. MFU is the model's
FLOPs of an update over the time of `train` and `optimizer` (`rl/algorithm/utilization.py`). Memory is the peak of what arrays
take in the trainer's process, and the peak in use on the whole GPU, which includes what JAX and vLLM reserve. The results are
written after each side. The exit code is 1 if a side failed."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from decode_workloads import gpu_model, num_parameters, write_model
from grpo_job import PHASES, Job, median_step
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, models, pre_tokenizers

from slipstream.model.config import ModelConfig
from slipstream.rl.algorithm.utilization import peak_flops, training_flops
from slipstream.runtime import gpus

HERE = Path(__file__).resolve().parent
SCRIPTS = {"ours": "grpo_slipstream.py", "ours-vllm": "grpo_slipstream.py", "trl": "grpo_trl.py"}
TINY = ModelConfig(
    "llama", vocab_size=512, hidden_size=64, intermediate_size=192, num_layers=2, num_heads=2, num_kv_heads=1,
    head_dim=32, tie_word_embeddings=True,
)  # fmt: skip
ON_GPU = {"prompts": 32, "group": 8, "prompt_tokens": 256, "completion_tokens": 256, "rows": 16}
ON_CPU = {"prompts": 4, "group": 4, "prompt_tokens": 8, "completion_tokens": 16, "rows": 8}
LEARNING_RATE = 1e-6
SIDE_SECONDS = 400
VLLM_SHARE, JAX_SHARE = 0.3, 0.6
"""Fractions of the GPU's memory: for vLLM on both sides, which is TRL's default, and for JAX beside vLLM."""
SPECIAL = ("<pad>", "<eos>")
"""TRL needs them. They are in the vocabulary, but no completion ends with them."""
LOG_LINES, SAMPLE_SECONDS = 80, 0.5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--gpu", action="store_true", help="1.24B parameters, bfloat16")
    where.add_argument("--cpu", action="store_true", help="a tiny model in float32 (default)")
    parser.add_argument("--sides", default=",".join(SCRIPTS), help="sides to run, separated by commas (default: all)")
    parser.add_argument("--steps", type=int, default=5, help="measured steps")
    parser.add_argument("--warm-up", type=int, default=2, help="steps before them")
    for name in ON_GPU:
        default = f"default: {ON_GPU[name]} on GPU, {ON_CPU[name]} on CPU"
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help=default)
    parser.add_argument("--vllm-python", default="", help="interpreter of an environment with vLLM, for ours-vllm")
    parser.add_argument("--trl-python", default=sys.executable, help="interpreter of an environment with TRL and ours")
    parser.add_argument("--ours", type=json.loads, default={}, help="settings of `slipstream train` by key, as JSON")
    parser.add_argument("--trl", type=json.loads, default={}, help="arguments of TRL's GRPOConfig, as JSON")
    parser.add_argument("--json", type=Path, help="default: benchmarks/results/grpo_step_{gpu,cpu}.json")
    arguments = parser.parse_args()
    sides = arguments.sides.split(",")
    if unknown := set(sides) - set(SCRIPTS):
        parser.error(f"--sides: unknown {', '.join(sorted(unknown))}; choose from {', '.join(SCRIPTS)}")
    console = Console() if sys.stdout.isatty() else Console(width=140)
    results = measure(arguments, sides, console)
    if results["sides"]:
        show(results, console)
    return bool(results["failed"])


def measure(arguments: argparse.Namespace, sides: list[str], console: Console) -> dict[str, Any]:
    device = "gpu" if arguments.gpu else "cpu"
    path = arguments.json or HERE / "results" / f"grpo_step_{device}.json"
    defaults = ON_GPU if arguments.gpu else ON_CPU
    sizes = {name: getattr(arguments, name) or default for name, default in defaults.items()}
    model = gpu_model(small=False) if arguments.gpu else TINY
    dtype = "bfloat16" if arguments.gpu else "float32"
    results: dict[str, Any] = {
        "machine": {
            "host": platform.node(),
            "system": f"{platform.system()} {platform.machine()}",
            "cpus": os.cpu_count(),
        },
        "model": {"parameters": num_parameters(model), "dtype": dtype},
        "workload": sizes | {"steps": arguments.steps, "warm_up": arguments.warm_up, "learning_rate": LEARNING_RATE},
        "sides": {},
        "failed": {},
        "over_trl": {},
    }
    with tempfile.TemporaryDirectory(prefix="grpo-") as temporary:
        root = Path(temporary)
        write_model(root / "model", model, dtype)
        write_tokenizer(root / "model", model.vocab_size)
        steps = arguments.warm_up + arguments.steps
        # A step more, since a side may prepare the next one.
        write_prompts(root / "prompts.jsonl", (steps + 1) * sizes["prompts"], sizes["prompt_tokens"], model.vocab_size)
        for name in sides:
            job = Job(
                model=str(root / "model"),
                data=str(root / "prompts.jsonl"),
                result=str(root / f"{name}.json"),
                gpu=arguments.gpu,
                dtype=dtype,
                steps=steps,
                learning_rate=LEARNING_RATE,
                options={"settings": side_settings(name, arguments)},
                **sizes,
            )
            with console.status(name), watched_gpu(arguments.gpu) as used:
                found, error = run_side(name, job, arguments)
            if found is None:
                results["failed"][name] = error
                console.print(f"{name} failed: {error}", highlight=False, markup=False)
            else:
                results["machine"] |= found.pop("machine")
                results["sides"][name] = summary(found, job, model, results["machine"]["device"], arguments.warm_up)
                results["sides"][name]["gpu_bytes"] = max(used, default=None)
                results["over_trl"] = compare(results["sides"])
                console.print(f"{name}: {results['sides'][name]['seconds']['step']:.2f} s per step", highlight=False)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(results, indent=2) + "\n")
    return results


# --- what all sides read ----------------------------------------------------------------------------------------------


def write_tokenizer(directory: Path, vocab_size: int) -> None:
    """A word for each token: its number."""
    words = [*SPECIAL, *(str(token) for token in range(len(SPECIAL), vocab_size))]
    tokenizer = Tokenizer(models.WordLevel({word: token for token, word in enumerate(words)}, unk_token=SPECIAL[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(directory / "tokenizer.json"))
    pad, eos = SPECIAL
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": pad, "eos_token": eos}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def write_prompts(path: Path, count: int, length: int, vocab_size: int) -> None:
    source = random.Random(0)
    tokens = range(len(SPECIAL), vocab_size)
    rows = ({"prompt": " ".join(map(str, source.choices(tokens, k=length)))} for _ in range(count))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


# --- the sides --------------------------------------------------------------------------------------------------------


def side_settings(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    if name == "trl":
        return ({"vllm_gpu_memory_utilization": VLLM_SHARE} if arguments.gpu else {}) | arguments.trl
    if name == "ours":
        return {"engines": 0} | arguments.ours
    own = {"engine.kind": "vllm", "engine.python": arguments.vllm_python}
    return own | ({"engine.gpu_memory_utilization": VLLM_SHARE} if arguments.gpu else {}) | arguments.ours


def run_side(name: str, job: Job, arguments: argparse.Namespace) -> tuple[dict[str, Any] | None, str]:
    """Return the result of a side, or None and the end of its output."""
    job_file, log_file = Path(job.result).with_suffix(".job"), Path(job.result).with_suffix(".log")
    job.write(job_file)
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    if name == "ours-vllm":
        environment.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(JAX_SHARE))
    python = arguments.trl_python if name == "trl" else sys.executable
    command = [python, str(HERE / SCRIPTS[name]), str(job_file)]
    with log_file.open("w") as log:
        process = subprocess.Popen(
            command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            end = f"exit code {process.wait(SIDE_SECONDS)}"
        except subprocess.TimeoutExpired:
            end = f"not done after {SIDE_SECONDS} s"
        finally:  # vLLM's child processes would survive an interrupt
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode == 0 and Path(job.result).exists():
        return json.loads(Path(job.result).read_text()), ""
    return None, "\n".join([end, *log_file.read_text(errors="replace").splitlines()[-LOG_LINES:]])


@contextlib.contextmanager
def watched_gpu(exists: bool) -> Iterator[list[int]]:
    """Bytes in use on the first GPU that this process sees, from `nvidia-smi`, as they are while the context is open."""
    used: list[int] = []
    if not exists:
        yield used
        return
    done = threading.Event()
    query = ["nvidia-smi", f"--id={gpus.allocated()[0].id}", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]

    def watch() -> None:
        while not done.wait(SAMPLE_SECONDS):
            answer = subprocess.run(query, capture_output=True, text=True, timeout=60)
            used.extend(int(line) << 20 for line in answer.stdout.splitlines() if line.strip().isdigit())

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield used
    finally:
        done.set()
        thread.join()


# --- results ----------------------------------------------------------------------------------------------------------


def summary(found: dict[str, Any], job: Job, model: ModelConfig, device: str, warm_up: int) -> dict[str, Any]:
    seconds = median_step(found["steps"], warm_up)
    peak, update = peak_flops(device), seconds["train"] + seconds["optimizer"]
    flops = training_flops(model, [job.length] * job.completions)
    return {
        "seconds": seconds,
        "steps_per_hour": 3600 / seconds["step"],
        "mfu": None if peak is None else flops / update / peak,
        "settings": job.options["settings"],
        **found,
    }


def compare(sides: dict[str, Any]) -> dict[str, float]:
    """Steps per hour of each side of ours over those of TRL."""
    if "trl" not in sides:
        return {}
    return {
        name: side["steps_per_hour"] / sides["trl"]["steps_per_hour"] for name, side in sides.items() if name != "trl"
    }


def show(results: dict[str, Any], console: Console) -> None:
    sides, work = results["sides"], results["workload"]
    title = (
        f"{results['model']['parameters'] / 1e6:,.1f}M parameters, {work['prompts']} prompts × {work['group']}, "
        f"{work['prompt_tokens']} + {work['completion_tokens']} tokens, micro-batches of {work['rows']}; seconds, median of "
        f"{work['steps']} steps"
    )
    times = table(title, sides)
    for phase in (*PHASES, "step"):
        times.add_row(phase, *(f"{side['seconds'][phase]:.3f}" for side in sides.values()))
    times.add_section()
    times.add_row("steps per hour", *(f"{side['steps_per_hour']:,.0f}" for side in sides.values()))
    times.add_row("over TRL's", *(f"{ratio:.2f}" if (ratio := results["over_trl"].get(name)) else "" for name in sides))
    times.add_row("MFU of the update", *(f"{mfu:.3f}" if (mfu := side["mfu"]) else "" for side in sides.values()))
    for label, key in (("trainer's process, GB", "peak_bytes"), ("whole GPU, GB", "gpu_bytes")):
        times.add_row(label, *(f"{side[key] / 1e9:.1f}" if side[key] else "" for side in sides.values()))
    times.add_row("reward, first and last", *(f"{s['rewards'][0]:.3f}, {s['rewards'][-1]:.3f}" for s in sides.values()))
    console.print(times)
    does = table("What each side does", sides)
    for key in dict.fromkeys(key for side in sides.values() for key in side["does"]):
        told = [side["does"].get(key, "") for side in sides.values()]
        does.add_row(key, *(", ".join(f"{k} {v}" for k, v in t.items()) if isinstance(t, dict) else t for t in told))
    console.print(does)
    console.print(", ".join(f"{key} {value}" for key, value in results["machine"].items()), highlight=False)


def table(title: str, sides: dict[str, Any]) -> Table:
    made = Table("", *sides, title=title)
    for column in made.columns[1:]:
        column.justify = "right"
    return made


if __name__ == "__main__":
    sys.exit(main())
