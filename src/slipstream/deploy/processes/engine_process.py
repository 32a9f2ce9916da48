"""Main function of an engine process: start the engine, connect it to its gateway, serve until stopped."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from pathlib import Path

from slipstream.config import MAX_MESSAGE_BYTES, EngineConfig
from slipstream.engines.contract import EngineBackend
from slipstream.gateway.channels import Token
from slipstream.gateway.engine_stream import check_access, serve_engine
from slipstream.model.checkpoints.hub import model_directory
from slipstream.model.families import load_plugins
from slipstream.runtime.compilation_cache import enable_compilation_cache
from slipstream.runtime.failpoints import step
from slipstream.runtime.garbage_collection import freeze_loaded_objects
from slipstream.runtime.tls import ANONYMOUS, Identity

log = logging.getLogger(__name__)


async def host(
    model: Path,
    name: str,
    options: EngineConfig,
    address: str,
    token: Token,
    patience: float,
    ready: Path | None,
    stop: asyncio.Event,
    ca: str = "",
    identity: Identity = ANONYMOUS,
) -> None:
    """Run an engine until `stop` is set. Raise `GatewayLost` if the gateway is gone for longer than `patience` seconds.

    `ready` is a file to touch once the engine has registered; `ca` the CA of the gateway's certificate, if it has one;
    `identity` what the engine shows to a gateway with `mutual_tls`."""
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await check_access(address, token, MAX_MESSAGE_BYTES, ca, identity)
    step("launch.engine", engine=name)
    load_plugins(options.plugins)
    engine, ended = await _start(model_directory(model), name, options)
    freeze_loaded_objects()
    log.info("engine %s: %s, pid %d, %s", name, engine.describe().model, os.getpid(), options)
    on_registered = ready.touch if ready is not None else None
    serving = asyncio.create_task(
        serve_engine(engine, address, token, patience, MAX_MESSAGE_BYTES, on_registered, ca, identity)
    )
    ends = [asyncio.create_task(event.wait()) for event in (stop, ended)]
    try:
        await asyncio.wait({serving, *ends}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
    finally:
        serving.cancel()
        await engine.close()


async def _start(model: Path, name: str, options: EngineConfig) -> tuple[EngineBackend, asyncio.Event]:
    """Return the engine, and an event that is set when it ends by itself."""
    if options.kind == "vllm":
        from slipstream.engines.vllm.engine import VllmEngine

        engine = await VllmEngine.start(model, name=name, options=options)
        return engine, engine.ended
    if options.kind == "remote":
        from slipstream.engines.remote.engine import RemoteEngine

        remote = await RemoteEngine.start(model, name=name, options=options)
        return remote, remote.ended
    from slipstream.engines.embedded.engine import EmbeddedEngine

    enable_compilation_cache()
    return EmbeddedEngine.from_directory(model, name=name, options=options), asyncio.Event()
