"""Slipstream: JAX training with rollouts from inference engines.

    import slipstream

    with slipstream.launch("my-model", engine="vllm", engines=2) as bridge:
        bridge.sync(params)
        completions = bridge.generate(["Hello"], slipstream.SamplingParams(n=4, max_tokens=64))

`launch`, `connect` and `inprocess` return a `Bridge` to engines in other processes, in a running fleet, or in this process.
`Engine` is the embedded engine as a library, and `train` runs a whole training run. Errors are in `slipstream.errors`, and
`slipstream.trl` has TRL's trainer over a bridge.

Public names are imported on first use: `import slipstream` loads neither JAX nor gRPC."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream import errors as errors
    from slipstream.bridge.bridge import Bridge as Bridge
    from slipstream.bridge.engine import Engine as Engine
    from slipstream.bridge.rollouts import Rollouts as Rollouts
    from slipstream.bridge.shared_weights import SharedWeights as SharedWeights
    from slipstream.config import AdapterConfig as AdapterConfig
    from slipstream.config import EmbeddedConfig as EmbeddedConfig
    from slipstream.config import EngineConfig as EngineConfig
    from slipstream.config import GatewayConfig as GatewayConfig
    from slipstream.config import HttpConfig as HttpConfig
    from slipstream.config import RayConfig as RayConfig
    from slipstream.config import RemoteConfig as RemoteConfig
    from slipstream.config import VllmConfig as VllmConfig
    from slipstream.deploy.fleet import connect as connect
    from slipstream.deploy.fleet import inprocess as inprocess
    from slipstream.deploy.fleet import launch as launch
    from slipstream.errors import SlipstreamError as SlipstreamError
    from slipstream.model.checkpoints.sample_model import write_sample_model as write_sample_model
    from slipstream.model.config import ModelConfig as ModelConfig
    from slipstream.rl.config import TrainConfig as TrainConfig
    from slipstream.rl.trainer.session import train as train
    from slipstream.types import Completion as Completion
    from slipstream.types import Failure as Failure
    from slipstream.types import FleetStatus as FleetStatus
    from slipstream.types import Lora as Lora
    from slipstream.types import RolloutGroup as RolloutGroup
    from slipstream.types import SamplingParams as SamplingParams
    from slipstream.types import Score as Score
    from slipstream.types import SyncReport as SyncReport
    from slipstream.types import TokenEvent as TokenEvent
    from slipstream.types import VerifyReport as VerifyReport
    from slipstream.types import VersionSpan as VersionSpan

__version__ = "0.1.0"

_NAMES = {
    "bridge.bridge": ("Bridge",),
    "bridge.engine": ("Engine",),
    "bridge.rollouts": ("Rollouts",),
    "bridge.shared_weights": ("SharedWeights",),
    "config": (
        "AdapterConfig",
        "EmbeddedConfig",
        "EngineConfig",
        "GatewayConfig",
        "HttpConfig",
        "RayConfig",
        "RemoteConfig",
        "VllmConfig",
    ),
    "deploy.fleet": ("connect", "inprocess", "launch"),
    "errors": ("SlipstreamError",),
    "model.checkpoints.sample_model": ("write_sample_model",),
    "model.config": ("ModelConfig",),
    "rl.config": ("TrainConfig",),
    "rl.trainer.session": ("train",),
    "types": (
        "Completion",
        "Failure",
        "FleetStatus",
        "Lora",
        "RolloutGroup",
        "SamplingParams",
        "Score",
        "SyncReport",
        "TokenEvent",
        "VerifyReport",
        "VersionSpan",
    ),
}
"""Public names by module."""
_FOLDED = {"errors": "errors", "trl": "plugins.trl"}
"""Modules that are attributes of the package. `trl` needs TRL, and is not among the public names of an installation without."""
_MODULES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [*sorted([*_MODULES, "errors"]), "__version__"]


def __getattr__(name: str) -> Any:
    if name in _FOLDED:
        return import_module(f"slipstream.{_FOLDED[name]}")
    if name not in _MODULES:
        raise AttributeError(f"module 'slipstream' has no attribute {name!r}")
    value = getattr(import_module(f"slipstream.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
