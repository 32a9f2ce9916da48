"""A fleet that answers each request with the tokens of a scripted text, or with random ones; and an `openai` client of it."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
from tokenizers import Tokenizer

from slipstream.config import HttpConfig
from slipstream.gateway.tokens import TokenTable
from slipstream.http.app import create_app
from slipstream.http.state import Front
from slipstream.types import Completion, Progress, Request, VersionSpan
from tests.http.fakes import TOKEN, FakeFleet


class SamplingFleet(FakeFleet):
    """Keeps the requests. `replies` are texts, sampled in turn; without any, tokens are random, also special ones."""

    def __init__(self, model: Path, seed: int = 0) -> None:
        super().__init__()
        (engine,) = self.status_value.engines
        roomy = replace(engine, info=replace(engine.info, max_model_len=4096))
        self.status_value = replace(self.status_value, engines=(roomy,))
        self.tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self.replies: list[str] = []
        self.requests: list[Request] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self._random = random.Random(seed)

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[list[Any]]:
        (request,) = requests
        self.requests.append(request)
        await self.gate.wait()
        tokens, reason = self._sample()
        logprobs = tuple(-0.1 * (i + 1) for i in range(len(tokens)))
        if request.progress:
            for start in range(0, len(tokens), 3):
                yield [Progress(request.id, 0, start, tokens[start : start + 3], logprobs[start : start + 3])]
        text = self.tokenizer.decode(list(tokens), skip_special_tokens=True)
        spans = (VersionSpan(0, 0, 1), VersionSpan(1, 1, len(tokens)))
        yield [Completion(request.id, 0, request.prompt, tokens, text, logprobs, logprobs, reason, spans, "one")]

    def _sample(self) -> tuple[tuple[int, ...], str]:
        if self.replies:
            return tuple(self.tokenizer.encode(self.replies.pop(0), add_special_tokens=False).ids), "stop"
        count = self._random.randint(2, 12)
        return tuple(self._random.randrange(self.tokenizer.get_vocab_size()) for _ in range(count)), "length"


def front_of(fleet: Any, model: Path, directory: Path | None = None, **config: Any) -> Front:
    return Front.create(fleet, lambda: fleet, HttpConfig(model=str(model), **config), directory)


@contextlib.asynccontextmanager
async def client_of(front: Front, path: str = "/v1", **options: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    transport = httpx.ASGITransport(create_app(front, TokenTable(TOKEN)), raise_app_exceptions=False)
    async with (
        httpx.AsyncClient(transport=transport, timeout=60) as http,
        openai.AsyncOpenAI(
            base_url=f"http://front{path}", api_key=TOKEN, http_client=http, max_retries=0, **options
        ) as client,
    ):
        yield client
