"""Slipstream: JAX training in the slipstream of inference engines.

Public names are imported on first use, so that `import slipstream` loads neither JAX nor gRPC."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.bridge import Bridge as Bridge
    from slipstream.config import EngineConfig as EngineConfig
    from slipstream.config import GatewayConfig as GatewayConfig
    from slipstream.config import HttpConfig as HttpConfig
    from slipstream.config import RayConfig as RayConfig
    from slipstream.engines.library import Engine as Engine
    from slipstream.errors import SlipstreamError as SlipstreamError
    from slipstream.topology import connect as connect
    from slipstream.topology import inprocess as inprocess
    from slipstream.topology import launch as launch
    from slipstream.types import Completion as Completion
    from slipstream.types import Failure as Failure
    from slipstream.types import SamplingParams as SamplingParams
    from slipstream.types import Score as Score
    from slipstream.types import SyncReport as SyncReport
    from slipstream.types import VersionSpan as VersionSpan

__version__ = "0.1.0"

_HOME = {
    "Bridge": "slipstream.bridge",
    "Completion": "slipstream.types",
    "Engine": "slipstream.engines.library",
    "EngineConfig": "slipstream.config",
    "Failure": "slipstream.types",
    "GatewayConfig": "slipstream.config",
    "HttpConfig": "slipstream.config",
    "RayConfig": "slipstream.config",
    "SamplingParams": "slipstream.types",
    "Score": "slipstream.types",
    "SlipstreamError": "slipstream.errors",
    "SyncReport": "slipstream.types",
    "VersionSpan": "slipstream.types",
    "connect": "slipstream.topology",
    "inprocess": "slipstream.topology",
    "launch": "slipstream.topology",
}

__all__ = [*sorted(_HOME), "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'slipstream' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
