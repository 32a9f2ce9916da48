"""The embedded engine as a library: generation in your own process, with nothing to start and no trainer.

    from slipstream import Engine, SamplingParams

    with Engine("path/to/model", max_concurrency=64) as engine:
        for completion in engine.generate(["1+1=", "2+2="], SamplingParams(max_tokens=8, n=4)):
            print(completion.text)

It is a `Bridge` over a fleet of one, so prompts, versions and updates are what they are with a gateway."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import threading
from collections.abc import AsyncGenerator, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from slipstream import portal
from slipstream.bridge import Bridge
from slipstream.config import EngineConfig, build
from slipstream.engines.embedded import EmbeddedEngine
from slipstream.engines.local import LocalFleet
from slipstream.errors import ConfigError, InvalidPrompt, InvalidSampling, RequestError
from slipstream.model.config import ModelConfig
from slipstream.types import (
    Completion,
    Failure,
    InFlight,
    MemoryReport,
    MemoryTag,
    Prompt,
    SamplingParams,
    Score,
    SyncReport,
    checked_ids,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from slipstream.model.decoder import Params

NAME = "engine"


class Engine:
    """May be used from several threads and event loops at once; all that is asked meanwhile shares the same batches.
    A context manager."""

    def __init__(
        self,
        model: str | Path | ModelConfig,
        params: Params | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        config: EngineConfig | None = None,
        **options: Any,
    ) -> None:
        """From an HF directory, `Engine("path/to/model")`, or from memory, `Engine(model_config, params, tokenizer=…)`.
        Without weights, the first `update` brings them.

        `options` are the fields of `EngineConfig`: `Engine("path", max_concurrency=64)`; or pass a whole one as
        `config`."""
        if config is not None and options:
            raise ConfigError(f"give config, or single options ({', '.join(options)}), not both")
        config = config or build(EngineConfig, options)
        if not isinstance(model, ModelConfig) and (params is not None or tokenizer is not None):
            raise ConfigError(
                "params and tokenizer go with a ModelConfig: Engine(ModelConfig.read(path), params, tokenizer=…). An "
                "engine from a directory has the directory's own; engine.update(params) replaces its weights"
            )

        async def start() -> LocalFleet:
            if isinstance(model, ModelConfig):
                return LocalFleet(EmbeddedEngine(model, params, name=NAME, tokenizer=tokenizer, options=config))
            return LocalFleet(EmbeddedEngine.from_directory(model, name=NAME, options=config))

        self._directory = None if isinstance(model, ModelConfig) else Path(model)
        self._tokenizer = tokenizer
        self._bridge = Bridge(portal.run(start()))

    @property
    def version(self) -> int:
        """Of the weights that serve: 0 for those it began with, one more with each update, -1 before there are any."""
        return self._bridge.version

    # --- rollouts ---

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int = 0,
    ) -> list[Completion]:
        """Completions in order: the `n` samples of the first prompt, then those of the second, and so on. `sampling` is for
        all prompts, or one per prompt. Raises the first failure, if any prompt failed."""
        return self._bridge.generate(prompts, sampling, priority=priority)

    async def agenerate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int = 0,
    ) -> list[Completion]:
        """`generate`, to await. Cancelling it cancels what is unfinished."""
        return await self._bridge.agenerate(prompts, sampling, priority=priority)

    def stream(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int = 0,
    ) -> Iterator[Completion | Failure]:
        """Each completion as soon as it is finished, failures among them. Leaving it early cancels the rest."""
        return self._bridge.stream(prompts, sampling, priority=priority)

    def astream(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int = 0,
    ) -> AsyncGenerator[Completion | Failure, None]:
        """`async for completion in engine.astream(prompts): ...`, otherwise as `stream`."""
        return self._bridge.astream(prompts, sampling, priority=priority)

    def score(self, sequences: Sequence[Sequence[int]], top_k: int = 0) -> list[Score]:
        """Raw logprobs of token sequences, in order; with `top_k`, also those of the likeliest tokens at each position."""
        return self._bridge.score(sequences, top_k)

    async def ascore(self, sequences: Sequence[Sequence[int]], top_k: int = 0) -> list[Score]:
        """`score`, to await."""
        return await self._bridge.ascore(sequences, top_k)

    def session(self, prompt: Prompt | None = None, *, seed: int | None = None) -> Session:
        """Generation in several turns, beginning with `prompt`, if given. With a seed, the same turns give the same
        tokens."""
        return Session(self, prompt, seed)

    # --- weights and memory ---

    def update(self, params: Any, *, partial: bool = False, in_flight: InFlight = "keep") -> SyncReport:
        """Makes `params`, a pytree whose leaf paths are the checkpoint's names, the weights that serve, as the next version;
        or raises, and the old ones go on. With `partial`, `params` is a part of the tree and the rest stays. `in_flight`
        says what becomes of requests that are running."""
        return self._bridge.sync(params, partial=partial, in_flight=in_flight)

    def pause(self) -> None:
        """Once this returns, no step runs until `resume`. Requests wait, the KV cache is kept."""
        self._bridge.pause()

    def resume(self) -> None:
        self._bridge.resume()

    def sleep(self, level: int = 1) -> MemoryReport:
        """Frees device memory. Level 1 moves the weights to host memory and drops the KV cache; level 2 drops both, and an
        `update` of all weights brings new ones. Requests wait, and go on after `wake` with the tokens they have."""
        return self._bridge.sleep(level)[NAME]

    def wake(self, tags: MemoryTag | Sequence[MemoryTag] | None = None) -> MemoryReport:
        """Brings back `weights`, `kv_cache`, or all that is asleep."""
        return self._bridge.wake(tags)[NAME]

    def memory(self) -> MemoryReport:
        """What the engine holds on its devices."""
        return self._bridge.memory()[NAME]

    def close(self) -> None:
        """Unfinished requests fail with `EngineLost`. May be called twice."""
        self._bridge.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _encode(self, text: str, beginning: bool) -> tuple[int, ...]:
        """Tokens of a text; at the beginning of a sequence, with the special tokens that the model expects there."""
        if self._tokenizer is None:
            path = self._directory and self._directory / "tokenizer.json"
            if path is None or not path.exists():
                raise InvalidPrompt("this engine has no tokenizer, so a session takes token ids only")
            from tokenizers import Tokenizer

            self._tokenizer = Tokenizer.from_file(str(path))
        return tuple(self._tokenizer.encode(text, add_special_tokens=beginning).ids)


class Session:
    """One sequence that grows in turns: tokens from outside (`extend`) and tokens from the policy (`generate`).

        with engine.session("what is 6*7? ", seed=7) as session:
            thought = session.generate(SamplingParams(stop=("=",)), max_tokens=64)
            session.extend("42\\n")                           # what a tool answered
            answer = session.generate(max_tokens=16)
            session.token_ids                                 # all of it, exactly as the model saw and drew it

    What exists is never tokenised again, and its KV cache is found in the engine's prefix cache, so that a turn costs
    its own tokens only (if the cache had to make room meanwhile, it is computed anew, to the same result). Draws depend on
    the seed and the position in the sequence: generating 8 tokens and then 8 more gives the tokens of generating 16 at
    once. Settings that look back at a completion (`presence_penalty`, `frequency_penalty`, `min_tokens`, `stop`) look at
    the turn alone. One turn at a time; sessions run side by side."""

    def __init__(self, engine: Engine, prompt: Prompt | None = None, seed: int | None = None) -> None:
        self._engine, self._closed, self._lock = engine, False, threading.Lock()
        self.seed = secrets.randbits(63) if seed is None else SamplingParams(seed=seed).seed
        self.token_ids: tuple[int, ...] = ()
        """Everything so far."""
        self.turns: tuple[Completion, ...] = ()
        """What the policy generated. A turn's tokens begin at position `len(turn.prompt_token_ids)`; its `spans` tell the
        versions that drew them."""
        if prompt is not None:
            self.extend(prompt)

    def extend(self, more: Prompt) -> tuple[int, ...]:
        """Appends text or token ids and returns the tokens appended. Text gets the model's special tokens (such as one for
        the beginning) at the start of the session only."""
        with self._turn():
            if isinstance(more, str):
                more = self._engine._encode(more, beginning=not self.token_ids)
            tokens = checked_ids(more) if len(more) else ()
            self.token_ids += tokens
            return tokens

    def generate(self, sampling: SamplingParams | None = None, *, max_tokens: int | None = None) -> Completion:
        """Goes on from all tokens so far, for at most `max_tokens` (else `sampling.max_tokens`), and keeps what it drew. If
        it raises, the session is as before."""
        with self._turn():
            return self._take(self._engine.generate([self.token_ids], self._sampling(sampling, max_tokens)))

    async def agenerate(self, sampling: SamplingParams | None = None, *, max_tokens: int | None = None) -> Completion:
        """`generate`, to await."""
        with self._turn():
            return self._take(await self._engine.agenerate([self.token_ids], self._sampling(sampling, max_tokens)))

    def close(self) -> None:
        """Ends the session; what it has can still be read. The KV cache needs no release: it makes room when others need
        it."""
        self._closed = True

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _sampling(self, sampling: SamplingParams | None, max_tokens: int | None) -> SamplingParams:
        sampling = sampling or SamplingParams()
        if sampling.n != 1:
            raise InvalidSampling(f"a session goes on from one sample, got n={sampling.n}; open {sampling.n} sessions")
        return dataclasses.replace(
            sampling,
            seed=self.seed if sampling.seed is None else sampling.seed,
            max_tokens=sampling.max_tokens if max_tokens is None else max_tokens,
        )

    def _take(self, completions: Sequence[Completion]) -> Completion:
        (completion,) = completions
        self.turns += (completion,)
        self.token_ids += completion.token_ids
        return completion

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        if self._closed:
            raise RequestError("this session is closed; open another with engine.session(session.token_ids)")
        if not self._lock.acquire(blocking=False):
            raise RequestError("this session is in the middle of a turn; one at a time, or one session for each")
        try:
            yield
        finally:
            self._lock.release()
