"""Check an exported checkpoint: compare greedy tokens of transformers, the embedded engine and vLLM.

    python examples/check_export.py runs/smollm/checkpoint [--config examples/smollm_grpo.toml] [--prompts 32] \
        [--max-tokens 24] [--vllm-python /path/to/python] [--device cpu|cuda] [--sides transformers,embedded,vllm]

The prompts are held-out prompts of the run's task, and everything runs in float32. Sides whose package is not installed
are skipped with a message. Each side runs in its own process, so that only one holds memory at a time.

If answers differ, the first difference is printed with the margin between transformers' two best logits at that token.
A margin near zero means rounding; a larger one means a wrong export. The exit code is 1 if any answer differs."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, TypeAlias

from slipstream.model.checkpoints.hf_config import read_config

SIDES = ("transformers", "embedded", "vllm")
TIMEOUT_SECONDS = 1200.0
"""Limit for one side to load the model and answer all prompts."""
Answer: TypeAlias = tuple[list[int], list[float]]
"""Tokens, including the stop token; and for transformers, the margin between the two best logits of each token."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument(
        "--config",
        type=Path,
        help="config of the run, whose task provides the prompts (default: run.json beside the checkpoint)",
    )
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--sides", default=",".join(SIDES))
    parser.add_argument("--vllm-python", default=sys.executable, help="interpreter of an environment with vLLM")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--answer", nargs=2, metavar=("SIDE", "QUESTION"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.answer:
        side, question = arguments.answer
        answers = ANSWER[side](**json.loads(Path(question).read_text()))
        Path(question).with_suffix(".answers").write_text(json.dumps(answers))
        return 0

    asked, stops = held_out(arguments)
    question = {
        "directory": str(arguments.checkpoint.resolve()), "prompts": asked, "stops": stops,
        "max_tokens": arguments.max_tokens, "device": arguments.device,
    }  # fmt: skip
    found = {}
    for side in arguments.sides.split(","):
        python = arguments.vllm_python if side == "vllm" else sys.executable
        if not installed(side, python):
            print(f"{side:13} not installed for {python}, skipped")
            continue
        found[side] = ask(side, python, question)
        print(
            f"{side:13} answered {len(asked)} prompts, {sum(len(tokens) for tokens, _ in found[side])} tokens",
            flush=True,
        )
    return report(arguments.checkpoint, asked, found)


def held_out(arguments: argparse.Namespace) -> tuple[list[list[int]], list[int]]:
    """Return the tokenized held-out prompts, and the stop tokens."""
    import numpy as np

    from slipstream.config import load
    from slipstream.rl.config import TaskConfig, TrainConfig
    from slipstream.rl.data.tasks import task_named
    from slipstream.rl.data.tokens import codec_of

    if arguments.config:
        task = load(TrainConfig, arguments.config).task
    else:
        run = arguments.checkpoint.parent / "run.json"
        task = TaskConfig(**json.loads(run.read_text())["task"])
    codec = codec_of(task, arguments.checkpoint)
    texts = task_named(task).prompts(np.random.default_rng(0), arguments.prompts, "heldout")
    eos = read_config(arguments.checkpoint).eos_token_ids
    return [list(ids) for ids in codec.prompts(list(dict.fromkeys(texts)))], list(dict.fromkeys([*codec.stops, *eos]))


def installed(side: str, python: str) -> bool:
    package = {"transformers": "transformers", "embedded": "slipstream", "vllm": "vllm"}[side]
    if python == sys.executable:
        return importlib.util.find_spec(package) is not None
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    return subprocess.run([python, "-c", code]).returncode == 0


def ask(side: str, python: str, question: dict[str, Any]) -> list[Answer]:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "question"
        path.write_text(json.dumps(question))
        log = Path(directory) / "log"
        with log.open("w") as out:
            command = [python, __file__, question["directory"], "--answer", side, str(path)]
            try:
                done = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, timeout=TIMEOUT_SECONDS)
            except subprocess.TimeoutExpired:
                sys.exit(f"{side} did not answer within {TIMEOUT_SECONDS:.0f} s:\n{log.read_text()[-4000:]}")
        if done.returncode:
            sys.exit(f"{side} failed with exit code {done.returncode}:\n{log.read_text()[-4000:]}")
        return [(tokens, margins) for tokens, margins in json.loads(path.with_suffix(".answers").read_text())]


def report(checkpoint: Path, asked: list[list[int]], found: dict[str, list[Answer]]) -> int:
    from slipstream.rl.data.tokens import Codec

    codec, differing = Codec(checkpoint), 0
    if len(found) < 2:
        print(f"nothing to compare: need at least two sides, got {len(found)}")
        return 1
    (first, answers), *others = found.items()
    for side, theirs in others:
        unequal = [i for i, (a, b) in enumerate(zip(answers, theirs, strict=True)) if a[0] != b[0]]
        differing += len(unequal)
        print(f"{first} and {side}: {len(asked) - len(unequal)} of {len(asked)} held-out prompts give the same tokens")
        if not unequal:
            continue
        (expected, margins), (actual, _) = answers[unequal[0]], theirs[unequal[0]]
        at = next((k for k, (a, b) in enumerate(zip(expected, actual)) if a != b), min(len(expected), len(actual)))
        margin = f", logit margin of {first} {margins[at]:.1e}" if at < len(margins) else ""
        print(f"  first difference: prompt {unequal[0]}, token {at}{margin}")
        for name, ids in ((first, expected), (side, actual)):
            print(f"    {name:13} {codec.decode([ids])[0]!r}; token ids around it {ids[max(0, at - 2) : at + 3]}")
    print(f"example: {codec.decode([asked[0]])[0][-60:]!r} -> {codec.decode([answers[0][0]])[0]!r}")
    return int(differing > 0)


# --- the sides: token prompts in, greedy tokens out -------------------------------------------------------------------


def by_transformers(
    directory: str, prompts: list[list[int]], stops: list[int], max_tokens: int, device: str
) -> list[Answer]:
    import torch
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
    model, info = loaded
    if wrong := {key: info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys") if info[key]}:
        sys.exit(f"the tensors in {directory} do not match the model that transformers builds: {wrong}")
    model = model.to(device)
    if device == "cpu":  # on a busy machine, more threads mostly wait for each other
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))
    answers = []
    with torch.no_grad():
        for prompt in prompts:
            ids = torch.tensor([prompt], device=device)
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=max_tokens,
                eos_token_id=stops,
                output_logits=True,
                return_dict_in_generate=True,
            )
            best = torch.cat(out.logits).topk(2).values
            answers.append((out.sequences[0, len(prompt) :].tolist(), (best[:, 0] - best[:, 1]).tolist()))
    return answers


def by_embedded(
    directory: str, prompts: list[list[int]], stops: list[int], max_tokens: int, device: str
) -> list[Answer]:
    os.environ["JAX_PLATFORMS"] = device
    import slipstream

    longest = max(map(len, prompts)) + max_tokens
    sampling = slipstream.SamplingParams(max_tokens, temperature=0.0, stop_token_ids=tuple(stops))
    engine = slipstream.Engine(directory, max_num_seqs=len(prompts), max_model_len=longest)
    try:
        return [(list(completion.token_ids), []) for completion in engine.generate(prompts, sampling)]
    finally:
        engine.close()


def by_vllm(directory: str, prompts: list[list[int]], stops: list[int], max_tokens: int, device: str) -> list[Answer]:
    """Run stock vLLM, without Slipstream in the process."""
    os.environ |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    settings: dict[str, Any] = {"gpu_memory_utilization": 0.01, "kv_cache_memory_bytes": 1 << 30}
    if device == "cpu":
        os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}
        settings = {"kv_cache_memory_bytes": 1 << 30}
    else:
        os.environ["TRITON_F32_DEFAULT"] = "ieee"  # otherwise its attention computes in TF32
    from vllm import LLM, SamplingParams

    longest = max(map(len, prompts)) + max_tokens
    llm = LLM(
        directory, dtype="float32", enforce_eager=True, max_model_len=longest, max_num_seqs=len(prompts), **settings
    )
    sampling = SamplingParams(
        temperature=0.0, max_tokens=max_tokens, stop_token_ids=stops, ignore_eos=True, detokenize=False
    )
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    return [(list(output.outputs[0].token_ids), []) for output in outputs]


ANSWER = {"transformers": by_transformers, "embedded": by_embedded, "vllm": by_vllm}

if __name__ == "__main__":
    sys.exit(main())
