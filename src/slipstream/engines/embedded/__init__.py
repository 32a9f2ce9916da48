"""The embedded JAX engine."""

from slipstream.engines.embedded.engine import EmbeddedEngine

__all__ = ["EmbeddedEngine"]
