"""TRL's GRPOTrainer with rollouts and weights over a bridge, also on CPU.

    with slipstream.launch("my-model") as bridge:
        trainer = slipstream.trl.GRPOTrainer("my-model", rewards, args, dataset, bridge=bridge)
        trainer.train()

TRL's own code does all but two things: completions come from `bridge.generate`, and weights go to the engines with
`bridge.sync`. Its importance sampling correction and its metrics of the difference between trainer and engine work as with
`use_vllm=True`. Without this module, TRL trains against the gateway's HTTP server (docs/trl.md)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import trl
from transformers.utils import is_peft_available
from trl.generation.vllm_generation import VLLMGeneration

from slipstream.bridge.bridge import Bridge
from slipstream.errors import ConfigError, Unsupported
from slipstream.model.checkpoints.served_model import as_stored
from slipstream.types import SamplingParams


class GRPOTrainer(trl.GRPOTrainer):
    """`trl.GRPOTrainer` with one more argument. `args.use_vllm` and the settings of vLLM stay at their defaults."""

    def __init__(self, *arguments: Any, bridge: Bridge, **named: Any) -> None:
        args = named.get("args") or next((value for value in arguments if isinstance(value, trl.GRPOConfig)), None)
        if args is not None and (args.use_vllm or args.use_transformers_continuous_batching):
            raise ConfigError(
                "completions come from the bridge: leave use_vllm and continuous batching off in GRPOConfig"
            )
        super().__init__(*arguments, **named)
        self.use_vllm, self.vllm_mode = True, "server"
        self._last_loaded_step = -1
        self.vllm_generation = _BridgeGeneration(
            bridge,
            model=self.model,
            accelerator=self.accelerator,
            processing_class=self.processing_class,
            mode="server",
            repetition_penalty=self.repetition_penalty,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            max_completion_length=self.max_completion_length,
            logprobs=0,
            generation_kwargs=vars(self.args)["generation_kwargs"],
        )


class _BridgeGeneration(VLLMGeneration):
    """Gathers prompts and parameters over all processes of the trainer, as for a vLLM server."""

    def __init__(self, bridge: Bridge, **settings: Any) -> None:
        self._bridge = bridge
        super().__init__(**settings)

    def _init_vllm(self) -> None:
        client: Any = _BridgeClient(self._bridge, self)
        self.vllm_client = client


class _BridgeClient:
    """Those methods of TRL's `VLLMClient` that `VLLMGeneration` calls."""

    def __init__(self, bridge: Bridge, generation: VLLMGeneration) -> None:
        self._bridge, self._generation = bridge, generation

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        features: Any = None,
        logprobs: int = 0,
        structured_outputs_regex: str | None = None,
        generation_kwargs: dict[str, Any] | None = None,
        **sampling: Any,
    ) -> dict[str, Any]:
        if features is not None or structured_outputs_regex is not None:
            raise Unsupported("images and structured outputs are not supported by the bridge")
        params = SamplingParams(**sampling | {"min_p": sampling.get("min_p") or 0.0} | (generation_kwargs or {}))
        completions = self._bridge.generate(prompts, params)
        return {
            "prompt_ids": [list(prompt) for prompt in prompts],
            "completion_ids": [list(c.token_ids) for c in completions],
            "logprobs": [[[logprob] for logprob in c.logprobs] for c in completions],
            "logprob_token_ids": [[[token] for token in c.token_ids] for c in completions],
        }

    def update_named_params(self, metadata: Any, named_params: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Send the parameters as the next version. Those that TRL gathers or merges are only there during the iteration."""
        model, accelerator = self._generation.model, self._generation.accelerator
        is_kept = accelerator.num_processes == 1 and not _is_peft(model)
        tensors = {name: tensor if is_kept else tensor.clone() for name, tensor in named_params}
        self._bridge.sync(as_stored(accelerator.unwrap_model(model), tensors))

    def reset_prefix_cache(self) -> None:
        """Nothing to do: KV entries of an older version are never used."""


def _is_peft(model: Any) -> bool:
    if not is_peft_available():
        return False
    from peft import PeftModel

    return isinstance(model, PeftModel)
