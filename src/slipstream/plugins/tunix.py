"""Tunix rollouts with Slipstream engines: vLLM or the embedded engine, in other processes or in this one.

    ClusterConfig(rollout_engine=SlipstreamRollout, ...)
    ClusterConfig(rollout_engine=partial(SlipstreamRollout, engine=VllmConfig(), engines=2), ...)

Tunix creates the rollout with its actor, tokenizer, mesh and `RolloutConfig`, and calls `update_params` after every step.
`generate` is thread-safe. See docs/tunix.md."""

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

from slipstream.bridge.bridge import Bridge
from slipstream.config import EmbeddedConfig, EngineConfig, RemoteConfig
from slipstream.deploy.fleet import connect, launch
from slipstream.errors import ConfigError, InvalidPrompt
from slipstream.model.checkpoints.hf_config import read_config, to_hf
from slipstream.model.config import ModelConfig
from slipstream.plugins.tunix_models import model_config, with_adapters
from slipstream.types import SamplingParams
from slipstream.weights.sources.known_trees import tunix as tunix_mapping
from slipstream.weights.sources.named_tensors import named_tensors
from slipstream.weights.sources.tree_mapping import TreeMapping


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
        """Tunix passes the first four arguments; bind the others with `functools.partial`.

        Args:
            engine: Config of the engines.
            model: HF directory or name on the Hub of the model, if it is not one of Tunix's; needs `mapping`.
            mapping: Mapping from the actor's tree to HF names, for `model`.
            lora_alpha: Alpha of the actor's LoRA adapters, if it has any.
            fleet: Run directory or address of a running fleet to connect to, instead of starting engines.
            start: How to start engines: `slipstream.launch`, or `slipstream.inprocess` for an engine in this process.
            options: Further arguments of `start`, or of `slipstream.connect`.
        """
        self._actor, self._tokenizer, self._lora_alpha = rollout_actor, tokenizer, lora_alpha
        self._calls = itertools.count()
        self._directory = tempfile.TemporaryDirectory(prefix="slipstream-tunix-")
        engine = _engine(engine or EmbeddedConfig(), rollout_config, rollout_actor)
        if mapping is None:
            config = model_config(rollout_actor, engine.max_model_len)
            (Path(self._directory.name) / "config.json").write_text(json.dumps(to_hf(config)))
        elif model is not None:
            config = read_config(model)
        else:
            raise ConfigError("mapping= needs model=, the HF directory of the model that it maps to")
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
                    f"engine {engine.info.name!r} runs another model ({engine.info.model}) than the actor "
                    f"({config.fingerprint()}): {config}. Check that its config.json is that of the same model, with the same "
                    "rotary scaling"
                )

    def generate(self, prompts: list[str], rollout_config: RolloutConfig, **kwargs: Any) -> RolloutOutput:
        """Generate one completion per prompt, including its stop token. `kwargs` are further `SamplingParams`."""
        rows = [self._encode(prompt) for prompt in prompts]
        sampling = dataclasses.replace(_sampling(rollout_config, self.eos_id()), **kwargs)
        seeded = [sampling.with_seed(seed) for seed in self._seeds(rollout_config.seed, len(rows))]
        completions = self.bridge.generate(rows, seeded)
        stops = set(sampling.stop_token_ids)
        longest = max(map(len, rows))
        width = rollout_config.max_prompt_length
        if width < longest:  # as Tunix's own rollouts do
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
        """Encode as Tunix's samplers do."""
        bos = self._tokenizer.bos_id()
        ids = [*([bos] if bos else []), *self._tokenizer.encode(prompt)]
        return list(self._tokenizer.dedup_bos_ids(ids))

    def _seeds(self, seed: Any, count: int) -> list[int | None]:
        """Return a seed for each prompt of a call. A prompt occurs once per sample of its group and again in later steps,
        so seeds depend on row and call."""
        if seed is None:
            return [None] * count
        if isinstance(seed, jax.Array) and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
            seed = jax.random.key_data(seed)
        base = f"{np.asarray(seed).tolist()}/{next(self._calls)}/"
        hashes = (hashlib.blake2b(f"{base}{row}".encode(), digest_size=8) for row in range(count))
        return [int.from_bytes(h.digest(), "big") >> 1 for h in hashes]

    def get_per_token_logps(self, prompt_tokens: jax.Array, completion_tokens: jax.Array) -> jax.Array:
        """Return the engines' logprobs of the completions at temperature 1, as `VanillaRollout` does; 0 for padding."""
        prompts, completions, pad = np.asarray(prompt_tokens), np.asarray(completion_tokens), self.pad_id()
        logps = np.zeros(completions.shape, np.float32)
        scored = [row for row in range(len(completions)) if (completions[row] != pad).any()]
        sequences = []
        for row in scored:
            prompt = prompts[row][prompts[row] != pad]
            if not len(prompt):
                raise InvalidPrompt(f"row {row} has no prompt, so the logprob of its first token is undefined")
            sequences.append([*prompt, *completions[row][completions[row] != pad]])
        for row, score in zip(scored, self.bridge.score(sequences)):
            kept = completions[row] != pad
            logps[row, kept] = score.logprobs[-kept.sum() :]
        return jnp.asarray(logps)

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Send `params` to every engine, as `bridge.sync` does. For an actor with LoRA, Tunix passes only the adapters; the
        other parameters are read from the actor."""
        # On CPU, Tunix disallows implicit transfers around this call; ours are intended.
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
        """Return None, which tells Tunix that the rollout has separate weights to sync."""

    def close(self) -> None:
        """Stop the engines that were started for this rollout; they also stop with this process."""
        if bridge := getattr(self, "bridge", None):
            bridge.close()
        self._directory.cleanup()


def _engine(engine: EngineConfig, config: RolloutConfig, actor: nnx.Module) -> EngineConfig:
    """Fill unset engine settings from Tunix's config: maximum length and dtype."""
    length = max(config.kv_cache_size, config.max_prompt_length + config.max_tokens_to_generate)
    engine = engine.replace(max_model_len=engine.max_model_len or length)
    dtype = config.data_type or jax.tree.leaves(nnx.state(actor, nnx.Param))[0].dtype
    if isinstance(engine, RemoteConfig):
        return engine
    return engine.resolve_dtype("bfloat16" if np.dtype(dtype).name == "bfloat16" else "float32")


def _sampling(config: RolloutConfig, eos: int) -> SamplingParams:
    """Convert to `SamplingParams`. Tunix's stop tokens replace the model's."""
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
