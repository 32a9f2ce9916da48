"""An engine as a process: make the engine, attach it to its gateway, serve until told to stop."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from pathlib import Path

from slipstream.config import MAX_MESSAGE_BYTES, EngineConfig
from slipstream.engines.base import Engine
from slipstream.garbage import leave_what_is_loaded
from slipstream.gateway.attach import knock, serve_engine

log = logging.getLogger(__name__)


async def host(
    model: Path,
    name: str,
    options: EngineConfig,
    address: str,
    token: str,
    patience: float,
    ready: Path | None,
    stop: asyncio.Event,
    ca: str = "",
) -> None:
    """Raises `GatewayLost` when the gateway is gone for longer than `patience` seconds. `ready` is a file to touch once
    the engine is registered. `ca` is who has signed the gateway's certificate, where it has one."""
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await knock(address, token, MAX_MESSAGE_BYTES, ca)
    engine, ended = await _start(model, name, options)
    leave_what_is_loaded()
    log.info("engine %s: %s, tp=%d, pid %d", name, engine.describe().model, options.tp, os.getpid())
    on_registered = ready.touch if ready is not None else None
    serving = asyncio.create_task(serve_engine(engine, address, token, patience, MAX_MESSAGE_BYTES, on_registered, ca))
    ends = [asyncio.create_task(event.wait()) for event in (stop, ended)]
    try:
        await asyncio.wait({serving, *ends}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
    finally:
        serving.cancel()
        await engine.close()


async def _start(model: Path, name: str, options: EngineConfig) -> tuple[Engine, asyncio.Event]:
    """The engine, and what is set when it has come to an end by itself."""
    if options.kind == "vllm":
        from slipstream.engines.vllm.engine import VllmEngine

        engine = await VllmEngine.start(model, name=name, options=options)
        return engine, engine.ended
    if options.kind == "remote":
        from slipstream.engines.remote.engine import RemoteEngine

        remote = await RemoteEngine.start(model, name=name, options=options)
        return remote, remote.ended
    from slipstream.engines.embedded.engine import EmbeddedEngine

    _keep_compiled()
    return EmbeddedEngine.from_directory(model, name=name, options=options), asyncio.Event()


def _keep_compiled() -> None:
    """Programs compiled once are found again by the next process, unless the user has said where (or that not)."""
    import jax

    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(home / "slipstream" / "programs"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
