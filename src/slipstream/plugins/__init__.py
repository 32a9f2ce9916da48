"""Integrations with other frameworks, one module per framework. Only their users import them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.plugins.torch_bridge import TorchWeightBridge

__all__ = ["TorchWeightBridge"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from slipstream.plugins import torch_bridge

        return getattr(torch_bridge, name)
    raise AttributeError(name)
