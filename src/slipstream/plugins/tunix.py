"""Rollouts of a Tunix run by Slipstream's engines: vLLM or the embedded one, in other processes or in this one.

    ClusterConfig(rollout_engine=SlipstreamRollout, ...)
    ClusterConfig(rollout_engine=partial(SlipstreamRollout, engine=EngineConfig(kind="vllm"), engines=2), ...)

Tunix makes the rollout with its actor, tokenizer, mesh and `RolloutConfig`, and calls `update_params` after every step. Its
threads may call `generate` at the same time. See docs/tunix.md."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.generate.utils import next_power_of_2, pad_to_length
from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig, RolloutOutput

from slipstream.bridge import Bridge
from slipstream.config import EngineConfig
from slipstream.errors import ConfigError, InvalidPrompt
from slipstream.model.config import ModelConfig
from slipstream.plugins.tunix_models import model_config, with_adapters
from slipstream.topology import connect, launch
from slipstream.types import SamplingParams
from slipstream.weights.source import named_tensors
from slipstream.weights.trainers import tunix as tunix_mapping
from slipstream.weights.trees import TreeMapping


class SlipstreamRollout(BaseRollout):
    """A Tunix `BaseRollout` over a `Bridge`."""

    def __init__(
        self,
        *,
        rollout_actor: nnx.Module,
        tokenizer: Any,
        mesh: jax.sharding.Mesh,
        rollout_config: RolloutConfig,
        engine: EngineConfig | None = None,
        model: str | Path | None = None,
        mapping: TreeMapping | None = None,
        lora_alpha: float | None = None,
        fleet: str | Path | None = None,
        start: Callable[..., Bridge] = launch,
        **options: Any,
    ) -> None:
        """The first four are Tunix's; the rest is bound by `functools.partial`.

        Engines are started by `start` (`slipstream.launch`, or `slipstream.inprocess` for an engine in this process), which
        gets `engine` and the `options`; with `fleet`, a run directory or an address, those that are up are joined by
        `slipstream.connect` instead. Their model is the actor's. For one that is none of Tunix's, give its HF directory as
        `model`, and the `mapping` of its tree. `lora_alpha` is that of the actor's adapters, if it has any."""
        self._actor, self._tokenizer, self._lora_alpha = rollout_actor, tokenizer, lora_alpha
        self._calls = itertools.count()
        self._directory = tempfile.TemporaryDirectory(prefix="slipstream-tunix-")
        engine = _engine(engine or EngineConfig(), rollout_config, rollout_actor)
        if mapping is None:
            config = model_config(rollout_actor, engine.max_model_len)
            (Path(self._directory.name) / "config.json").write_text(json.dumps(config.to_hf()))
        elif model is not None:
            config = ModelConfig.read(model)
        else:
            raise ConfigError("a mapping of one's own needs model=, the HF directory of the model that it leads to")
        self._mapping = mapping or tunix_mapping(config)
        if fleet is not None:
            self.bridge = connect(fleet, **options)
        else:
            self.bridge = start(model or self._directory.name, engine=engine, **options)
        try:
            self._check_fleet(config)
            self.update_params(nnx.state(rollout_actor, nnx.Param))
        except BaseException:
            self.close()
            raise

    def _check_fleet(self, config: ModelConfig) -> None:
        for engine in self.bridge.status().engines:
            if engine.info.model != config.fingerprint():
                raise ConfigError(
                    f"engine {engine.info.name!r} runs another model ({engine.info.model}) than the actor is "
                    f"({config.fingerprint()}): {config}. Is its config.json of the same model, and of the same rotary scaling?"
                )

    def generate(self, prompts: list[str], rollout_config: RolloutConfig, **kwargs: Any) -> RolloutOutput:
        """One completion for each prompt, its stop token kept. `kwargs` are further `SamplingParams`."""
        rows = [self._encode(prompt) for prompt in prompts]
        sampling = dataclasses.replace(_sampling(rollout_config, self.eos_id()), **kwargs)
        each = [sampling.with_seed(seed) for seed in self._seeds(rollout_config.seed, len(rows))]
        completions = self.bridge.generate(rows, each)
        stops = set(sampling.stop_token_ids)
        longest = max(map(len, rows))
        width = rollout_config.max_prompt_length
        if width < longest:  # what Tunix's own rollouts do
            width = next_power_of_2(longest)
        padded = [pad_to_length(np.asarray(row, np.int32), width, self.pad_id(), left=True) for row in rows]
        return RolloutOutput(
            text=[self._tokenizer.decode(_without_stop(c.token_ids, stops)) for c in completions],
            logits=[],
            tokens=[np.asarray(c.token_ids, np.int32) for c in completions],
            left_padded_prompt_tokens=np.stack(padded),
            logprobs=[np.asarray(c.logprobs, np.float32) for c in completions]
            if rollout_config.return_logprobs
            else None,
        )

    def _encode(self, prompt: str) -> list[int]:
        """As Tunix's samplers do it."""
        bos = self._tokenizer.bos_id()
        ids = [*([bos] if bos else []), *self._tokenizer.encode(prompt)]
        return list(self._tokenizer.dedup_bos_ids(ids))

    def _seeds(self, seed: Any, count: int) -> list[int | None]:
        """Of one call's prompts. A prompt comes once for every sample of its group, and step after step: each must be drawn
        anew, so that row and call enter into it."""
        if seed is None:
            return [None] * count
        if isinstance(seed, jax.Array) and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
            seed = jax.random.key_data(seed)
        base = f"{np.asarray(seed).tolist()}/{next(self._calls)}/"
        hashes = (hashlib.blake2b(f"{base}{row}".encode(), digest_size=8) for row in range(count))
        return [int.from_bytes(h.digest(), "big") >> 1 for h in hashes]

    def get_per_token_logps(self, prompt_tokens: jax.Array, completion_tokens: jax.Array) -> jax.Array:
        """Logprobs of the completions' tokens under the engines' policy, at temperature 1, as `VanillaRollout` has them; 0 for
        padding."""
        prompts, completions, pad = np.asarray(prompt_tokens), np.asarray(completion_tokens), self.pad_id()
        found = np.zeros(completions.shape, np.float32)
        asked = [row for row in range(len(completions)) if (completions[row] != pad).any()]
        sequences = []
        for row in asked:
            prompt = prompts[row][prompts[row] != pad]
            if not len(prompt):
                raise InvalidPrompt(f"row {row} has no prompt, so its first token has no logprob")
            sequences.append([*prompt, *completions[row][completions[row] != pad]])
        for row, score in zip(asked, self.bridge.score(sequences)):
            kept = completions[row] != pad
            found[row, kept] = score.logprobs[-kept.sum() :]
        return jnp.asarray(found)

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Makes `params` the policy of every engine, as `bridge.sync` does. Of an actor with LoRA, Tunix gives the adapters
        alone; the rest is read from the actor."""
        # On CPU, Tunix forbids transfers around this call, meaning its own.
        with jax.transfer_guard("allow"):
            leaves = named_tensors(params)
            if filter_types is not None and nnx.LoRAParam in filter_types:
                leaves = named_tensors(nnx.state(self._actor, nnx.Param)) | leaves
            self.last_sync = self.bridge.sync(
                self._mapping.tensors(with_adapters(self._actor, leaves, self._lora_alpha))
            )

    def pad_id(self) -> int:
        return int(self._tokenizer.pad_id())

    def eos_id(self) -> int:
        return int(self._tokenizer.eos_id())

    def model(self) -> None:
        """None says to Tunix that engines have weights of their own, to be synced."""

    def close(self) -> None:
        """Ends the engines that were started for this rollout; they also end with this process."""
        if bridge := getattr(self, "bridge", None):
            bridge.close()
        self._directory.cleanup()


def _engine(engine: EngineConfig, config: RolloutConfig, actor: nnx.Module) -> EngineConfig:
    """With what Tunix says of it, where the engine's own settings are left open: how long sequences become, and the dtype."""
    length = max(config.kv_cache_size, config.max_prompt_length + config.max_tokens_to_generate)
    engine = dataclasses.replace(engine, max_model_len=engine.max_model_len or length)
    dtype = config.data_type or jax.tree.leaves(nnx.state(actor, nnx.Param))[0].dtype
    if np.dtype(dtype).name == "bfloat16" and engine.kind != "remote":
        engine = dataclasses.replace(engine, dtype="bfloat16")
    return engine


def _sampling(config: RolloutConfig, eos: int) -> SamplingParams:
    """Tunix's stop tokens replace the model's own."""
    return SamplingParams(
        max_tokens=config.max_tokens_to_generate,
        temperature=float(config.temperature),
        top_p=1.0 if config.top_p is None else float(config.top_p),
        top_k=max(0, config.top_k or 0),
        stop_token_ids=tuple(config.eos_tokens or (eos,)),
        ignore_eos=True,
    )


def _without_stop(tokens: Sequence[int], stops: set[int]) -> list[int]:
    return list(tokens[:-1] if tokens and tokens[-1] in stops else tokens)
