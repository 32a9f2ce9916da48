"""Random chats of agents in sessions, through OpenAI's client: is any sampled token tokenized again, is every edit a fork?

    python benchmarks/agent_chats.py [--chats 10000] [--tokenizers DIR] [--json benchmarks/results/agent_chats.json]

The chats use the templates of Qwen3, Llama 3 and Gemma 3 with tiny random models, whose tokens hardly ever survive decoding and
encoding. Each has one or more turns, some with a tool's answer, then edits: an earlier message changed, the last one repeated,
turns dropped. Checked for every turn, against what the client saw:

    exact      the prompt is the tokens of the turn that it continues, and what the template puts after them (rendered naively)
    forks      the answer reports one if and only if the client has edited the history
    prefix     share of the known tokens that the engine found in its cache, over the turns that continue one
    taken      each sampled token is in one trajectory, with its logprob
    trains     a GRPO step on the trajectories; the trainer's logprobs before it are the engine's

`--tokenizers` holds FAMILY/tokenizer.json of the real tokenizers; without it, small ones have the same special tokens. The exit
code is 1 if a check fails."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
import openai
from chat_models import FAMILIES, write_chat_model

import slipstream
from slipstream.bridge.agent_sessions import AgentSessions, Trajectory
from slipstream.bridge.bridge import Bridge
from slipstream.bridge.chat_tokenizer import ChatTokenizer
from slipstream.config import EmbeddedConfig, HttpConfig
from slipstream.model.checkpoints.hf_config import read_config
from slipstream.model.checkpoints.sample_model import sample_params
from slipstream.rl.agents.api_agent import episode_of
from slipstream.rl.agents.episodes import episode_advantages, episode_batch
from slipstream.rl.algorithm.forward import logprob_fn
from slipstream.rl.algorithm.train_step import init_state, make_train_step
from slipstream.rl.config import AlgorithmConfig

CONTEXT, BLOCK, MAX_TOKENS, MAX_NUM_SEQS = 1024, 4, 12, 64
EDITS = ("change", "repeat", "drop")
TRAIN_ROWS = 64
WORDS = [
    "the",
    "sum",
    "of",
    "two",
    "and",
    "three",
    "what",
    "is",
    "a",
    "river",
    "why",
    "do",
    "trees",
    "grow",
    "tell",
    "me",
    "more",
    "ünïcode",
    "漢字",
    "🙂",
    "<b>",
    "\t",
    "ok",
]


@dataclass
class Report:
    family: str
    chats: int
    turns: int = 0
    edits: int = 0
    sampled_tokens: int = 0
    known_tokens: int = 0
    """Tokens of earlier turns in the prompts of those that continue one, without edits."""
    hit_tokens: int = 0
    """Of these, found in the engine's prefix cache."""
    trajectories: int = 0
    train_steps: int = 0
    logprob_difference: float = 0.0
    """Largest difference between the trainer's logprobs and the engine's."""
    seconds: float = 0.0
    errors: list[str] = field(default_factory=list)

    @property
    def hit_share(self) -> float:
        return self.hit_tokens / max(self.known_tokens, 1)


@dataclass
class Said:
    """A turn, as the client saw it."""

    messages: list[dict[str, Any]]
    """The conversation with the answer."""
    tokens: tuple[int, ...]
    """The prompt and the answer."""
    sampled: tuple[int, ...]
    is_closed: bool


@dataclass
class Chat:
    """One session and its client."""

    id: str
    family: str
    client: openai.AsyncOpenAI
    tokenizer: ChatTokenizer
    random: random.Random
    report: Report
    turns: list[Said] = field(default_factory=list)

    async def first(self) -> None:
        await self.ask([self._user()], None, False)

    async def more(self) -> None:
        """One or two turns that continue."""
        for _ in range(self.random.randint(1, 2)):
            before = self.turns[-1]
            self.report.known_tokens += len(before.tokens)
            await self.ask([*before.messages, *self._appended()], before, False)

    async def edits(self) -> None:
        """Sometimes an edit, and a turn after it."""
        if self.random.random() < 0.5:
            return
        self.report.edits += 1
        last, kind = self.turns[-1], self.random.choice(EDITS)
        if kind == "change":
            place = self.random.randrange(0, len(last.messages))
            edited = [dict(message) for message in last.messages]
            edited[place]["content"] = "edited " + str(edited[place].get("content"))
            messages = [*edited, *self._appended()] if edited[-1]["role"] == "assistant" else edited
        elif kind == "repeat":
            messages = last.messages[:-1]
        else:
            first = self.turns[0]
            messages = [*first.messages, self._user()]
        known = [turn for turn in reversed(self.turns) if messages[: len(turn.messages)] == turn.messages]
        await self.ask(messages, max(known, key=lambda turn: len(turn.messages), default=None), True)
        if self.random.random() < 0.5:
            before = self.turns[-1]
            await self.ask([*before.messages, *self._appended()], before, False)

    async def ask(self, messages: list[dict[str, Any]], before: Said | None, is_edit: bool) -> None:
        bias = {str(self._token(FAMILIES[self.family].end_of_turn)): self.random.choice((0.0, 4.0))}
        answer = await self.client.chat.completions.create(
            model="",
            messages=messages,  # plain dicts
            max_tokens=self.random.randint(2, MAX_TOKENS),
            logit_bias=bias,  # floats
            extra_headers={"X-Slipstream-Session": self.id},
            extra_body={"return_token_ids": True},
        )
        extra: Any = answer
        choice: Any = answer.choices[0]
        prompt, sampled = tuple(extra.prompt_token_ids), tuple(choice.token_ids)
        self.report.turns += 1
        self.report.sampled_tokens += len(sampled)
        self._check(messages, before, prompt)
        if (extra.session["fork"] is not None) != is_edit:
            self._fault(f"an edit: {is_edit}, reported: {extra.session}")
        message = choice.message.model_dump(exclude_none=True)
        is_closed = choice.finish_reason == "stop"
        self.turns.append(Said([*messages, message], prompt + sampled, sampled, is_closed))

    def _check(self, messages: list[dict[str, Any]], before: Said | None, prompt: tuple[int, ...]) -> None:
        rendered = self.tokenizer.render_chat(messages)
        known = before.tokens if before is not None else ()
        if prompt[: len(known)] != known:
            self._fault("a sampled token was tokenized again, or is missing")
        added = self.decode(prompt[len(known) :])
        if before is None:
            if added != rendered:
                self._fault(f"a first prompt is {added!r}, and the template renders {rendered!r}")
            return
        end = "" if before.is_closed else FAMILIES[self.family].end_of_turn
        if not (rendered.endswith(added) and added.startswith(end + "\n" * (self.family != "llama3"))):
            self._fault(f"appended {added!r}, and the template renders {rendered!r}")

    def decode(self, tokens: tuple[int, ...]) -> str:
        return str(self.tokenizer._tokenizer.decode(list(tokens), skip_special_tokens=False))

    def _token(self, text: str) -> int:
        return int(self.tokenizer._tokenizer.token_to_id(text))

    def _fault(self, text: str) -> None:
        if len(self.report.errors) < 20:
            self.report.errors.append(f"{self.id}: {text}")

    def _appended(self) -> list[dict[str, Any]]:
        if FAMILIES[self.family].has_tools and self.random.random() < 0.3:
            return [{"role": "tool", "tool_call_id": "call_1", "content": self._text()}]
        return [self._user()]

    def _user(self) -> dict[str, Any]:
        return {"role": "user", "content": self._text()}

    def _text(self) -> str:
        return " ".join(self.random.choices(WORDS, k=self.random.randint(1, 12))).strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chats", type=int, default=10_000, help="of all families together")
    parser.add_argument("--families", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--tokenizers", type=Path, help="directory of real tokenizers, FAMILY/tokenizer.json")
    parser.add_argument("--concurrency", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    reports = []
    for index, family in enumerate(options.families):
        share = len(range(index, options.chats, len(options.families)))
        with tempfile.TemporaryDirectory() as folder:
            model = write_chat_model(Path(folder) / family, family, options.tokenizers, CONTEXT)
            reports.append(run(model, family, share, options.concurrency, options.seed))
        show(reports[-1])
        if options.json:  # after each family: a run takes long
            kind = "the families' own" if options.tokenizers else "small, with the families' special tokens"
            facts = {"machine": platform.machine(), "cores": os.cpu_count(), "tokenizers": kind}
            rows = [asdict(report) | {"hit_share": round(report.hit_share, 4)} for report in reports]
            options.json.write_text(json.dumps(facts | {"families": rows}, indent=2) + "\n")
    sys.exit(any(report.errors or report.hit_share < 0.95 for report in reports))


def run(model: Path, family: str, num_chats: int, concurrency: int = 128, seed: int = 0) -> Report:
    """Play the chats of one family, take their trajectories and train on them."""
    report, began = Report(family, num_chats), time.monotonic()
    config = read_config(model)
    params = sample_params(config, seed)
    engine = EmbeddedConfig(
        max_num_seqs=MAX_NUM_SEQS, max_model_len=CONTEXT, block_size=BLOCK, kv_cache_tokens=max(num_chats, 64) * 768
    )
    http = HttpConfig(max_sessions=num_chats + 1)
    with slipstream.launch(model, engine=engine, http=http) as bridge:
        bridge.sync(params)
        asyncio.run(play(bridge, model, report, concurrency, seed))
        trajectories = take(bridge, report, concurrency)
    train(trajectories, config, params, report)
    report.seconds = round(time.monotonic() - began, 1)
    return report


async def play(bridge: Bridge, model: Path, report: Report, concurrency: int, seed: int) -> None:
    token = (Path(bridge.run_dir) / "token").read_text()
    slots, tokenizer = asyncio.Semaphore(concurrency), ChatTokenizer.read(model)
    async with openai.AsyncOpenAI(base_url=f"{bridge.http_url}/v1", api_key=token, timeout=600) as client:
        chats = [
            Chat(f"chat-{i}", report.family, client, tokenizer, random.Random(f"{seed} {i}"), report)
            for i in range(report.chats)
        ]

        async def each(step: Callable[[Chat], Awaitable[None]]) -> None:
            async def one(chat: Chat) -> None:
                async with slots:
                    await step(chat)

            await asyncio.gather(*map(one, chats))

        await each(Chat.first)
        before = await hit_tokens(bridge)
        await each(Chat.more)
        report.hit_tokens = await hit_tokens(bridge) - before
        await each(Chat.edits)
    report.errors += [] if report.edits or report.chats < 10 else ["no chat was edited"]


async def hit_tokens(bridge: Bridge) -> int:
    """The engine's count, once heartbeats have brought it."""
    await asyncio.sleep(6)
    return sum(engine.hit_tokens for engine in bridge.status().engines)


def take(bridge: Bridge, report: Report, concurrency: int) -> list[Trajectory]:
    sessions = AgentSessions.of(bridge)

    def one(index: int) -> list[Trajectory]:
        sessions.close(f"chat-{index}", float(index % 2))
        return sessions.take(f"chat-{index}")

    with ThreadPoolExecutor(min(concurrency, 8)) as pool:
        taken = [trajectory for rows in pool.map(one, range(report.chats)) for trajectory in rows]
    report.trajectories = len(taken)
    masked = sum(sum(trajectory.sampled) for trajectory in taken)
    if masked != report.sampled_tokens:
        report.errors.append(f"{report.sampled_tokens} tokens were sampled, and {masked} are in trajectories")
    for trajectory in taken:
        for start, turn in trajectory.turns:
            if trajectory.token_ids[start : start + len(turn.token_ids)] != turn.token_ids:
                report.errors.append(f"{trajectory.session}: a turn is not where its trajectory says")
    return taken


def train(trajectories: list[Trajectory], model: Any, params: Any, report: Report) -> None:
    """Train on all trajectories, in batches of the same shape."""
    config = AlgorithmConfig(prompts=TRAIN_ROWS // 8, group=8)
    step, state, logprobs = make_train_step(model, config), init_state(params, model, config), logprob_fn(model, 1.0)
    trajectories = [trajectory for trajectory in trajectories if trajectory.turns]
    length = max(len(trajectory.token_ids) for trajectory in trajectories)
    for first in range(0, max(len(trajectories) - TRAIN_ROWS, 0) + 1, TRAIN_ROWS):
        rows = trajectories[first : first + TRAIN_ROWS]
        rows += trajectories[: TRAIN_ROWS - len(rows)]
        episodes = [episode_of(trajectory, index, index // 8, 0) for index, trajectory in enumerate(rows)]
        batch = episode_batch(episodes, episode_advantages(episodes), length)
        if first == 0:
            wanted, mask = np.asarray(logprobs(params, batch)), batch.mask > 0
            raw = np.zeros_like(wanted)
            for row, episode in enumerate(episodes):
                raw[row, : len(episode.raw_logprobs) - 1] = episode.raw_logprobs[1:]
            report.logprob_difference = float(np.abs(wanted - raw)[mask].max())
        state, metrics = jax.block_until_ready(step(state, batch))
        report.train_steps += 1
        if not np.isfinite(float(metrics["loss"])):
            report.errors.append(f"the loss of step {report.train_steps} is {float(metrics['loss'])}")
    if report.logprob_difference > 1e-3:
        report.errors.append(f"the logprobs of trainer and engine differ by {report.logprob_difference:.2g}")


def show(report: Report) -> None:
    print(
        f"{report.family:8} {report.chats:6,} chats  {report.turns:7,} turns  {report.edits:6,} edits  "
        f"{report.sampled_tokens:8,} tokens sampled  prefix hits {report.hit_share:6.2%}  "
        f"{report.trajectories:6,} trajectories  {report.train_steps} steps  "
        f"logprobs differ by {report.logprob_difference:.1e}  {report.seconds:.0f} s  {len(report.errors)} errors"
    )
    for error in report.errors:
        print("   ", error)


if __name__ == "__main__":
    main()
