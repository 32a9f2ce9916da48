"""The draft model of a vLLM engine that decodes speculatively (`speculative_config`, method `draft_model`).

An update brings its tensors under a prefix, as part of the policy's version. Without them the draft stays as it is: slower, as
fewer of its proposals are accepted, but the tokens are the policy's in any case."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from vllm.config import LoadConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from slipstream.engines.vllm.mapping_check import check_mapping
from slipstream.engines.vllm.undoable_reload import abandon, pack_tied
from slipstream.model.checkpoints.hf_config import read_config
from slipstream.model.families import prefixed
from slipstream.model.families.vllm_parameters import vllm_parameters
from slipstream.types import Parameter
from slipstream.weights.update.publisher import DRAFT


class WorkerDraft:
    """The draft model in one worker."""

    def __init__(self, config: VllmConfig, runner: Any, tp: int) -> None:
        self._config, self._tp = config, tp
        self._module: torch.nn.Module = runner.drafter.model
        self._model_config = config.speculative_config.draft_model_config
        if config.load_config.load_format == "dummy":  # the policy has no weights yet; the draft always has
            self.update({}, is_whole=False)

    def update(self, tensors: Mapping[str, torch.Tensor], is_whole: bool) -> None:
        """Give these tensors, without the prefix, to vLLM's own loader; unless they are all, with the checkpoint's others."""
        kept = () if is_whole else ((name, tensor) for name, tensor in self._checkpoint() if name not in tensors)
        try:
            with set_current_vllm_config(self._config):
                initialize_layerwise_reload(self._module)
                self._module.load_weights(chain(tensors.items(), kept))
                finalize_layerwise_reload(self._module, self._model_config)
        except BaseException:
            abandon(self._module)
            raise
        pack_tied(self._module)

    def _checkpoint(self) -> Iterator[tuple[str, torch.Tensor]]:
        loader: Any = get_model_loader(LoadConfig())
        yield from loader.get_all_weights(self._model_config, self._module)

    # --- on GPU ---

    def live(self) -> dict[str, torch.Tensor]:
        return {DRAFT + name: parameter.data for name, parameter in self._module.named_parameters()}

    def parameters(self) -> tuple[Parameter, ...]:
        """The parameters of all ranks."""
        return prefixed(vllm_parameters(read_config(Path(self._model_config.model)), self._tp), DRAFT)

    def check_mapping(self, rank: int) -> dict[str, str]:
        """Return the live parameters that cannot be written directly, with the reason."""
        weights = ((DRAFT + name, tensor) for name, tensor in self._checkpoint())
        return check_mapping(self.live(), [p for p in self.parameters() if p.rank == rank], weights)
