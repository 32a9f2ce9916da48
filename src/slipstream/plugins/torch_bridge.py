"""A weight bridge for PyTorch trainers, in one class.

    bridge = TorchWeightBridge(module)
    bridge.initialize()                      wait for the engines and compare their parameters with the module's
    module = bridge.get_trainable_model()
    for batch in data:
        loss(module, batch).backward()
        optimizer.step()
        bridge.broadcast_weights()           hand the new values over
        version = bridge.notify_update()     every engine serves them
    bridge.close()

Modes:

    local         over HTTP (`slipstream launch --http 9001 …`): a checkpoint in a directory that the gateway reads
    distributed   by the transports of `Bridge.sync`: NCCL between GPUs, TCP between CPUs; every rank of the trainer takes part,
                  and sends its own shards
    shared        the module's parameters are the engines' memory; `optimizer.step()` pauses the engines"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, get_args

import torch

from slipstream.bridge.bridge import Bridge
from slipstream.bridge.gateway_http import GatewayHttp
from slipstream.deploy.fleet import connect
from slipstream.deploy.slurm.job import rendezvous
from slipstream.errors import (
    ConfigError,
    DeadlineExceeded,
    GatewayLost,
    MappingError,
    NotReady,
    Unsupported,
)
from slipstream.gateway.mapping_file import FILE
from slipstream.plugins.torch_trainer import named_parameters, share_weights, stored_parameters, update_weights
from slipstream.runtime.process_times import process_start_time
from slipstream.weights.sources.torch_shards import is_dtensor_type

BridgeMode = Literal["local", "distributed", "shared"]
DEFAULT_URL = "http://127.0.0.1:9001"
START_SECONDS, POLL_SECONDS = 900.0, 0.1


class TorchWeightBridge:
    """Brings a PyTorch module's weights to inference engines. For one thread.

    Args:
        model: The module to train, with the names of the HF checkpoint, as in `transformers`; or an HF directory or Hub name,
            which `AutoModelForCausalLM` loads.
        mode: See the module's docstring. By default "distributed" in a job with inference nodes (NUM_INFERENCE_NODES), else
            "local".
        url: The gateway's HTTP address, in local mode. Default: the one in the run directory, or http://127.0.0.1:9001.
        token: The gateway's token, in local mode. Default: the one in the run directory. A gateway with `tokenless=true`
            needs none.
        log_dir: Directory of `vllm_bridge_config.json`, which is the run directory unless the gateway was started with
            another. Default: SLIPSTREAM_RUN_DIR, or LOGDIR. In local mode it may be missing.
        transport: Data plane in distributed mode, as for `slipstream.connect`. By default the fastest that works.
        timeout: Time limit in seconds for the engines to start, for each call over HTTP, and for each collective call of a
            process group that `initialize` creates.
    """

    def __init__(
        self,
        model: torch.nn.Module | str | Path,
        *,
        mode: BridgeMode | None = None,
        url: str = "",
        token: str = "",
        log_dir: str | Path | None = None,
        transport: str | None = None,
        timeout: float = START_SECONDS,
    ) -> None:
        self._job = rendezvous(os.environ)
        self.mode: BridgeMode = mode or ("distributed" if self._job.inference else "local")
        if self.mode not in get_args(BridgeMode):
            raise ConfigError(f"mode must be one of {', '.join(get_args(BridgeMode))}, got {mode!r}")
        where = log_dir or os.environ.get("SLIPSTREAM_RUN_DIR") or os.environ.get("LOGDIR")
        self._log_dir = Path(where) if where else None
        if self._log_dir is None and self.mode != "local":
            raise ConfigError(
                f"mode {self.mode!r} needs log_dir, SLIPSTREAM_RUN_DIR or LOGDIR: the fleet's run directory"
            )
        self._model, self._url, self._token = model, url, token
        self._transport, self._timeout = transport, timeout
        self._module: torch.nn.Module | None = model if isinstance(model, torch.nn.Module) else None
        self._delivery: _Delivery | None = None
        self.mappings: Mapping[str, Any] = {}
        """`param_mappings` of the mapping file: where each tensor lies in an engine."""

    def initialize(self) -> None:
        """Wait for the engines, connect to them, and check that the module fits them."""
        if self._delivery is not None:
            return
        deadline = time.monotonic() + self._timeout
        if self.mode == "local":
            http = _Http(*self._http_address(), self._timeout)
            _wait_for(http.is_alive, deadline, f"the gateway at {http.url} to answer; is it running with --http?")
            self._check(http.mapping(deadline))
            self._delivery = _Checkpoints(http)
            return
        content = self._mapping_file(self._log_dir, deadline)  # type: ignore[arg-type]
        rank, count = self._join_trainers()
        self._check(content)
        options = {"process_index": rank, "process_count": count, "transport": self._transport}
        module = self.get_trainable_model()
        bridge = connect(self._log_dir, **options, snapshot="none")  # type: ignore[arg-type]
        try:
            self._delivery = _Shared(bridge, module) if self.mode == "shared" else _Transfers(bridge)
        except BaseException:
            bridge.close()  # it may hold the fleet's updates
            raise

    def get_trainable_model(self) -> torch.nn.Module:
        """Return the module. In shared mode, after `initialize`, its parameters are the engines' memory."""
        if self._module is None:
            from transformers import AutoModelForCausalLM

            from slipstream.model.checkpoints.hub import model_directory

            directory = model_directory(str(self._model))
            module: torch.nn.Module = AutoModelForCausalLM.from_pretrained(directory, torch_dtype="auto")
            self._module = module
        return self._module

    def broadcast_weights(self) -> None:
        """Hand the module's present values to the engines. They serve them when `notify_update` returns, if not before. In
        distributed mode every rank calls it, and it raises what the engines raise: they keep the old version then."""
        self._started().broadcast(self.get_trainable_model())

    def notify_update(self) -> int:
        """Return the version that every engine now serves: the values of the last `broadcast_weights`, in shared mode those
        that the parameters have."""
        return self._started().notify()

    def close(self) -> None:
        """Disconnect. Engines keep the version that they serve."""
        if self._delivery is not None:
            self._delivery.close()
            self._delivery = None

    def __enter__(self) -> TorchWeightBridge:
        self.initialize()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _started(self) -> _Delivery:
        if self._delivery is None:
            raise NotReady("the weight bridge is not connected; call initialize() first")
        return self._delivery

    def _http_address(self) -> tuple[str, str]:
        """Return URL and token: those given, or those of the run directory."""
        url, token = self._url, self._token
        if self._log_dir is not None:
            try:
                url = url or json.loads((self._log_dir / "gateway.json").read_text()).get("http", "")
                token = token or (self._log_dir / "token").read_text().strip()
            except FileNotFoundError:  # the directory holds only the mapping file
                pass
        return (url or DEFAULT_URL).rstrip("/"), token

    def _mapping_file(self, log_dir: Path, deadline: float) -> dict[str, Any]:
        """Wait for the mapping file and return its content."""
        file = log_dir / FILE
        _wait_for(file.exists, deadline, f"{file}, which the gateway writes when engines have registered")
        content: dict[str, Any] = json.loads(file.read_text())
        return content

    def _join_trainers(self) -> tuple[int, int]:
        """Return this process's rank in the trainer and the number of ranks. Several ranks get a process group."""
        from torch import distributed

        rank, count = (
            int(os.environ.get(name, os.environ.get(ours, default)))
            for name, ours, default in (
                ("RANK", "SLIPSTREAM_PROCESS_INDEX", "0"),
                ("WORLD_SIZE", "SLIPSTREAM_PROCESS_COUNT", "1"),
            )
        )
        if is_joined := distributed.is_initialized():
            rank, count = distributed.get_rank(), distributed.get_world_size()
        if self.mode == "shared" and count > 1:
            raise Unsupported(
                f"shared mode is for a trainer of one process, and this one has {count}; use distributed mode"
            )
        if count > 1 and not is_joined:
            backend = "nccl" if torch.cuda.is_available() else "gloo"
            url, limit = self._job.trainers_url(backend), timedelta(seconds=self._timeout)
            try:
                distributed.init_process_group(backend, init_method=url, rank=rank, world_size=count, timeout=limit)
            except RuntimeError as error:
                raise DeadlineExceeded(
                    f"rank {rank} of the trainer did not find the {count - 1} other(s) at {url}: {error}; start them all, with "
                    "the same WORLD_SIZE"
                ) from None
        return rank, count

    def _check(self, content: Mapping[str, Any]) -> None:
        """Compare names and shapes with the engines'."""
        self.mappings = content["param_mappings"]
        wanted = {
            name: tuple(row["shape"]) for name, row in next(iter(content["engines"].values()))["parameters"].items()
        }
        parameters = named_parameters if self.mode == "shared" else stored_parameters
        found = {name: tuple(p.shape) for name, p in parameters(self.get_trainable_model()).items()}
        for name in sorted(wanted.keys() | found.keys()):
            if wanted.get(name) != found.get(name):
                raise MappingError(
                    f"{name}: the engines have {_shape(wanted.get(name))}, the module has {_shape(found.get(name))}; train the "
                    "model that the engines were started with"
                )


class _Delivery(Protocol):
    """How the weights travel."""

    def broadcast(self, module: torch.nn.Module) -> None: ...

    def notify(self) -> int: ...

    def close(self) -> None: ...


class _Checkpoints:
    """Local mode: two directories take turns, so that the gateway never reads one that is being written."""

    def __init__(self, http: _Http) -> None:
        self._http, self._count, self._pending = http, 0, ""
        info = http.call("/bridge/info")
        if not info["enabled"]:
            raise Unsupported(
                f"the gateway at {http.url} loads no checkpoints; start it with the directory that holds them, as in "
                "--http-option weights=/dev/shm/weights"
            )
        own = os.getpid()
        self._root, self._name = Path(info["weights"]), f"torch-{own}-{process_start_time(own)}"
        for left in self._root.glob("torch-*-*-[01]"):  # by trainers that were killed
            pid, start = map(int, left.name.split("-")[1:3])
            if process_start_time(pid) != start:
                shutil.rmtree(left, ignore_errors=True)

    def broadcast(self, module: torch.nn.Module) -> None:
        from safetensors.torch import save_file

        parameters = stored_parameters(module)
        if sharded := [name for name, parameter in parameters.items() if is_dtensor_type(type(parameter))]:
            raise Unsupported(f"{sharded[0]} is a DTensor, of which this process holds a part; use distributed mode")
        self._pending = f"{self._name}-{self._count % 2}"
        directory = self._root / self._pending
        directory.mkdir(exist_ok=True)
        tensors = {name: parameter.contiguous().cpu() for name, parameter in parameters.items()}
        save_file(tensors, directory / "model.safetensors")

    def notify(self) -> int:
        if not self._pending:
            raise NotReady("no weights to announce; call broadcast_weights() before notify_update()")
        self._count += 1
        body = {"path": self._pending, "trainer_rank": 0, "timestamp": time.time()}
        answer = self._http.call("/bridge/notify_update", body)
        self._pending = ""
        return int(answer["policy_version"])

    def close(self) -> None:
        for number in range(2):
            shutil.rmtree(self._root / f"{self._name}-{number}", ignore_errors=True)


class _Transfers:
    """Distributed mode: `Bridge.sync`, by all ranks of the trainer."""

    def __init__(self, bridge: Bridge) -> None:
        self._bridge, self._version = bridge, -1

    def broadcast(self, module: torch.nn.Module) -> None:
        self._version = update_weights(self._bridge, module).version

    def notify(self) -> int:
        if self._version < 0:
            raise NotReady("no weights to announce; call broadcast_weights() before notify_update()")
        return self._version

    def close(self) -> None:
        self._bridge.close()


class _Shared:
    """Shared mode: a hook of PyTorch's optimizers holds the engines while a step writes their memory."""

    def __init__(self, bridge: Bridge, module: torch.nn.Module) -> None:
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        self._bridge, self._shared = bridge, share_weights(bridge, module)
        self._own = {id(parameter) for parameter in module.parameters()}
        self._is_held = False
        self._hook = register_optimizer_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if not self._is_held and any(id(p) in self._own for group in optimizer.param_groups for p in group["params"]):
            self._shared.hold()
            self._is_held = True

    def broadcast(self, module: torch.nn.Module) -> None:
        """The engines have them already."""

    def notify(self) -> int:
        if not self._is_held:
            self._shared.hold()
        self._is_held = False
        return self._shared.notify_update().version

    def close(self) -> None:
        self._hook.remove()
        if self._is_held:
            self._shared.release()
        self._shared.close()
        self._bridge.close()


class _Http(GatewayHttp):
    def is_alive(self) -> bool:
        try:
            return bool(self.call("/health")["status"] == "alive")
        except GatewayLost:
            return False

    def mapping(self, deadline: float) -> dict[str, Any]:
        found: list[dict[str, Any]] = []

        def ask() -> bool:
            try:
                found.append(self.call("/bridge/parameters"))
            except NotReady:
                return False
            return True

        _wait_for(ask, deadline, f"engines to register with the gateway at {self.url}")
        return found[0]


def _wait_for(is_done: Callable[[], bool], deadline: float, what: str) -> None:
    while not is_done():
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"timed out waiting for {what}")
        time.sleep(POLL_SECONDS)


def _shape(shape: tuple[int, ...] | None) -> str:
    return "none of that name" if shape is None else f"shape {list(shape)}"
