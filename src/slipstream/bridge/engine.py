"""The embedded engine as a library: generation in your own process, without a gateway or a trainer.

    from slipstream import Engine, SamplingParams

    with Engine("path/to/model", max_num_seqs=64) as engine:
        for completion in engine.generate(["1+1=", "2+2="], SamplingParams(max_tokens=8, n=4)):
            print(completion.text)

It is a `Bridge` over a fleet of one engine, so prompts, versions and updates work as they do with a gateway."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import threading
from collections.abc import AsyncGenerator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, cast

from slipstream.bridge.bridge import Bridge
from slipstream.bridge.chat_prompts import ChatOptions
from slipstream.bridge.chat_tokenizer import ChatTokenizer
from slipstream.bridge.in_process import LocalFleet
from slipstream.bridge.rollouts import Sampling
from slipstream.config import EmbeddedConfig
from slipstream.engines.embedded.engine import EmbeddedEngine
from slipstream.errors import ConfigError, InvalidPrompt, InvalidSampling, RequestError
from slipstream.model.checkpoints.hub import model_directory
from slipstream.model.config import ModelConfig
from slipstream.runtime import event_loop
from slipstream.types import (
    Completion,
    Completions,
    Failure,
    InFlight,
    MemoryReport,
    MemoryTag,
    Prompt,
    Prompts,
    SamplingParams,
    Score,
    SyncReport,
    TokenEvent,
    checked_ids,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from slipstream.model.transformer.decoder import Params

NAME = "engine"


class Engine:
    """Thread-safe; concurrent calls share the same batches. As a context manager, it closes itself at the end."""

    def __init__(
        self,
        model: str | Path | ModelConfig,
        params: Params | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        config: EmbeddedConfig | None = None,
        **options: Any,
    ) -> None:
        """Load an HF model directory or a model of the Hub, `Engine("path/to/model")`, or use weights in memory,
        `Engine(model_config, params, tokenizer=…)`. Without weights, the first `update` provides them.

        `options` are fields of `EmbeddedConfig`, as in `Engine("path", max_num_seqs=64)`; or pass a whole `config`."""
        if config is not None and options:
            raise ConfigError(f"pass either config or single options ({', '.join(options)}), not both")
        config = config or EmbeddedConfig(**options)
        if not isinstance(model, ModelConfig) and (params is not None or tokenizer is not None):
            raise ConfigError(
                "params and tokenizer need a ModelConfig: Engine(read_config(path), params, tokenizer=…). An engine from a "
                "directory uses the directory's; engine.update(params) replaces its weights"
            )

        directory = None if isinstance(model, ModelConfig) else model_directory(model)

        async def start() -> LocalFleet:
            if isinstance(model, ModelConfig):
                return LocalFleet(EmbeddedEngine(model, params, name=NAME, tokenizer=tokenizer, options=config))
            return LocalFleet(EmbeddedEngine.from_directory(cast(Path, directory), name=NAME, options=config))

        def read_tokenizer() -> ChatTokenizer:
            return ChatTokenizer(tokenizer) if directory is None else ChatTokenizer.read(directory)

        self._directory, self._tokenizer = directory, tokenizer
        self._bridge = Bridge(event_loop.run(start()), read_tokenizer=read_tokenizer)

    @property
    def version(self) -> int:
        """Version of the weights: 0 for the initial ones, one more with each update, -1 before there are any."""
        return self._bridge.version

    # --- rollouts ---

    def generate(
        self, prompts: Prompts, sampling_params: Sampling = None, *, priority: int = 0, **chat: Unpack[ChatOptions]
    ) -> Completions:
        """Generate completions; return them in order: the `n` samples of the first prompt, then those of the second, and so on.

        Prompts are texts, lists of token ids, or conversations (lists of messages; `tools` and `chat_template_kwargs` are for
        these, as in `Bridge.generate`). `sampling_params` is for all prompts, or one per prompt. Raises the first failure, if
        any prompt failed. `.by_prompt()` of the result gives one list per prompt."""
        return self._bridge.generate(prompts, sampling_params, priority=priority, **chat)

    async def agenerate(
        self, prompts: Prompts, sampling_params: Sampling = None, *, priority: int = 0, **chat: Unpack[ChatOptions]
    ) -> Completions:
        """Awaitable version of `generate`. Cancelling it cancels the unfinished requests."""
        return await self._bridge.agenerate(prompts, sampling_params, priority=priority, **chat)

    def stream(
        self, prompts: Prompts, sampling_params: Sampling = None, *, priority: int = 0, **chat: Unpack[ChatOptions]
    ) -> Iterator[Completion | Failure]:
        """Yield completions, or a `Failure`, as they finish. Closing the iterator early cancels the rest."""
        return self._bridge.stream(prompts, sampling_params, priority=priority, **chat)

    def astream(
        self, prompts: Prompts, sampling_params: Sampling = None, *, priority: int = 0, **chat: Unpack[ChatOptions]
    ) -> AsyncGenerator[Completion | Failure, None]:
        """Async version of `stream`: `async for completion in engine.astream(prompts): ...`."""
        return self._bridge.astream(prompts, sampling_params, priority=priority, **chat)

    def stream_tokens(
        self, prompts: Prompts, sampling_params: Sampling = None, *, priority: int = 0, **chat: Unpack[ChatOptions]
    ) -> Iterator[TokenEvent | Failure]:
        """Yield tokens as they are drawn. Closing the iterator early cancels the rest."""
        return self._bridge.stream_tokens(prompts, sampling_params, priority=priority, **chat)

    def astream_tokens(
        self, prompts: Prompts, sampling_params: Sampling = None, *, priority: int = 0, **chat: Unpack[ChatOptions]
    ) -> AsyncGenerator[TokenEvent | Failure, None]:
        """Async version of `stream_tokens`."""
        return self._bridge.astream_tokens(prompts, sampling_params, priority=priority, **chat)

    def score(self, sequences: Sequence[Sequence[int]], top_k: int = 0) -> list[Score]:
        """Return the raw logprobs of token sequences; with `top_k`, also of the most likely tokens at each position."""
        return self._bridge.score(sequences, top_k)

    async def ascore(self, sequences: Sequence[Sequence[int]], top_k: int = 0) -> list[Score]:
        """Awaitable version of `score`."""
        return await self._bridge.ascore(sequences, top_k)

    def session(self, prompt: Prompt | None = None, *, seed: int | None = None) -> Session:
        """Start generation in several turns, from `prompt`. The same seed and turns give the same tokens."""
        return Session(self, prompt, seed)

    # --- weights and memory ---

    def update(self, params: Any, *, partial: bool = False, in_flight: InFlight = "keep") -> SyncReport:
        """Make `params`, a pytree whose leaf paths are the checkpoint's tensor names, the next version of the weights.

        On failure the old weights stay. With `partial`, `params` is part of the tree and the rest stays. `in_flight` says what
        happens to running requests."""
        return self._bridge.sync(params, partial=partial, in_flight=in_flight)

    def pause(self) -> None:
        """Pause. Once this returns, no step runs until `resume`; requests wait and the KV cache is kept."""
        self._bridge.pause()

    def resume(self) -> None:
        self._bridge.resume()

    def sleep(self, level: int = 1) -> MemoryReport:
        """Free device memory. Level 1 moves the weights to host memory and drops the KV cache; level 2 drops both, and an
        `update` must provide all weights. Requests wait, and continue after `wake` with the tokens they have."""
        return self._bridge.sleep(level)[NAME]

    def wake(self, tags: MemoryTag | Sequence[MemoryTag] | None = None) -> MemoryReport:
        """Bring back `weights`, `kv_cache`, or everything that is asleep."""
        return self._bridge.wake(tags)[NAME]

    def memory(self) -> MemoryReport:
        """Return what the engine holds on its devices."""
        return self._bridge.memory()[NAME]

    def close(self) -> None:
        """Close the engine. Unfinished requests fail with `EngineLost`. May be called twice."""
        self._bridge.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _encode(self, text: str, beginning: bool) -> tuple[int, ...]:
        """Tokenize a text; at the beginning of a sequence, with the special tokens that the model expects there."""
        if self._tokenizer is None:
            path = self._directory and self._directory / "tokenizer.json"
            if path is None or not path.exists():
                raise InvalidPrompt("this engine has no tokenizer; pass token ids to the session")
            from tokenizers import Tokenizer

            self._tokenizer = Tokenizer.from_file(str(path))
        return tuple(self._tokenizer.encode(text, add_special_tokens=beginning).ids)


class Session:
    """A sequence that grows in turns: tokens from outside (`extend`) and tokens from the policy (`generate`).

        with engine.session("what is 6*7? ", seed=7) as session:
            thought = session.generate(SamplingParams(stop=("=",)), max_tokens=64)
            session.extend("42\\n")                           # what a tool answered
            answer = session.generate(max_tokens=16)
            session.token_ids                                 # the whole sequence, exactly as the model saw and sampled it

    Earlier tokens are never tokenized again, and their KV is usually in the engine's prefix cache, so a turn costs only its own
    tokens (evicted KV is computed again, with the same result). Samples depend on the seed and the position in the sequence:
    generating 8 tokens and then 8 more gives the tokens of generating 16 at once. Params that look back at a completion
    (`presence_penalty`, `frequency_penalty`, `min_tokens`, `stop`) look at the turn alone. A session runs one turn at a time;
    several sessions run concurrently."""

    def __init__(self, engine: Engine, prompt: Prompt | None = None, seed: int | None = None) -> None:
        self._engine, self._closed, self._lock = engine, False, threading.Lock()
        self.seed = secrets.randbits(63) if seed is None else SamplingParams(seed=seed).seed
        self.token_ids: tuple[int, ...] = ()
        """All tokens so far."""
        self.turns: tuple[Completion, ...] = ()
        """The generated turns. A turn's tokens start at `len(turn.prompt_token_ids)`; `spans` has their versions."""
        if prompt is not None:
            self.extend(prompt)

    def extend(self, more: Prompt) -> tuple[int, ...]:
        """Append text or token ids; return the tokens. Only text at the start gets special tokens, such as BOS."""
        with self._turn():
            if isinstance(more, str):
                more = self._engine._encode(more, beginning=not self.token_ids)
            tokens = checked_ids(more) if len(more) else ()
            self.token_ids += tokens
            return tokens

    def generate(self, sampling_params: SamplingParams | None = None, *, max_tokens: int | None = None) -> Completion:
        """Continue from all tokens so far and keep the new ones. `max_tokens` overrides `sampling_params.max_tokens`. On
        failure the session stays as it was."""
        with self._turn():
            return self._append(self._engine.generate([self.token_ids], self._params(sampling_params, max_tokens)))

    async def agenerate(
        self, sampling_params: SamplingParams | None = None, *, max_tokens: int | None = None
    ) -> Completion:
        """Awaitable version of `generate`."""
        with self._turn():
            return self._append(
                await self._engine.agenerate([self.token_ids], self._params(sampling_params, max_tokens))
            )

    def close(self) -> None:
        """End the session; its tokens can still be read. Its KV needs no release: the prefix cache evicts it when needed."""
        self._closed = True

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _params(self, params: SamplingParams | None, max_tokens: int | None) -> SamplingParams:
        params = params or SamplingParams()
        if params.n != 1:
            raise InvalidSampling(f"a session continues from one sample, got n={params.n}; open {params.n} sessions")
        return dataclasses.replace(
            params,
            seed=self.seed if params.seed is None else params.seed,
            max_tokens=params.max_tokens if max_tokens is None else max_tokens,
        )

    def _append(self, completions: Sequence[Completion]) -> Completion:
        (completion,) = completions
        self.turns += (completion,)
        self.token_ids += completion.token_ids
        return completion

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        if self._closed:
            raise RequestError("this session is closed; open another with engine.session(session.token_ids)")
        if not self._lock.acquire(blocking=False):
            raise RequestError("a turn of this session is running; wait for it, or open another session")
        try:
            yield
        finally:
            self._lock.release()
