"""vLLM's endpoints for weight updates. Weights come as checkpoints, or over NCCL into a directory of their own, and become the
policy of every engine by the same transaction as `bridge.sync`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body
from pydantic import Field

from slipstream.errors import RequestError, UnknownVersion, Unsupported
from slipstream.http.limits import LimitedRoute
from slipstream.http.request_models import JsonModel
from slipstream.http.state import CurrentFront, Front
from slipstream.http.trainer_communicator import discard

router = APIRouter(tags=["vLLM"], route_class=LimitedRoute)


class InitTransfer(JsonModel):
    init_info: dict[str, Any]


class StartUpdate(JsonModel):
    is_checkpoint_format: bool = True


class UpdateWeights(JsonModel):
    update_info: dict[str, Any]


class FinishUpdate(JsonModel):
    weight_version: str | None = None


class SetWeightVersion(JsonModel):
    new_version: Annotated[str, Field(max_length=1000)]


class CheckWeights(JsonModel):
    action: Literal["checksum", "reset", "compare"]
    baseline: dict[str, str] | None = None


class CollectiveRpc(JsonModel):
    method: str
    args: list[Any] | None = None
    kwargs: dict[str, Any] | None = None
    timeout: float | None = None


@router.post("/init_weight_transfer_engine")
async def init_transfer(front: CurrentFront, body: InitTransfer) -> dict[str, str]:
    """Choose how weights are transferred: `{"init_info": {"backend": "checkpoint"}}`, or the rendezvous of a trainer's NCCL
    communicator, as TRL sends it."""
    front.updates.is_initialized = False
    if body.init_info.get("backend") != "checkpoint":
        await front.communicator.init(body.init_info)
    front.updates.require_enabled()
    front.updates.is_initialized = True
    return {"message": "Weight transfer initialized"}


@router.post("/start_weight_update")
async def start_update(
    front: CurrentFront, body: Annotated[StartUpdate, Body(default_factory=StartUpdate)]
) -> dict[str, str]:
    """Start an update."""
    if not body.is_checkpoint_format:
        raise Unsupported("is_checkpoint_format must be true: weights come in the checkpoint's format")
    front.updates.require_enabled()
    if not front.updates.is_initialized:
        raise UnknownVersion(
            "no weight transfer is initialized, or the last attempt was refused; call /init_weight_transfer_engine first"
        )
    _discard_received(front)
    front.updates.pending = []
    return {"message": "Weight update started"}


@router.post("/update_weights")
async def update_weights(front: CurrentFront, body: UpdateWeights) -> dict[str, str]:
    """Name a checkpoint, or one of several that complement each other; or announce the tensors that a trainer broadcasts now.
    Nothing changes before `/finish_weight_update`."""
    if front.updates.pending is None:
        raise UnknownVersion("no weight update is in progress; call /start_weight_update first")
    if front.communicator.is_enabled and "names" in body.update_info:
        directory = await front.communicator.receive(body.update_info, front.updates.require_enabled())
        front.updates.pending.append(directory.name)
        front.updates.received.append(directory)
        return {"message": "Weights received; they are loaded by /finish_weight_update"}
    path = body.update_info.get("path")
    if not isinstance(path, str) or body.update_info.keys() - {"path"}:
        raise Unsupported(
            "update_info must be {'path': 'a directory of safetensors'}: tensors announced by names, dtypes and shapes would "
            "follow over NCCL, which needs nccl_python"
        )
    await front.updates.check(path)
    if path not in front.updates.pending:
        front.updates.pending.append(path)
    return {"message": "Weights announced; they are loaded by /finish_weight_update"}


@router.post("/finish_weight_update")
async def finish_update(
    front: CurrentFront, body: Annotated[FinishUpdate, Body(default_factory=FinishUpdate)]
) -> dict[str, Any]:
    """Load the named checkpoints into every engine, as one version. Repeated after success, it returns the same answer."""
    updates = front.updates
    if updates.pending is None:
        if updates.finished_version is None:
            raise UnknownVersion("no weight update is in progress; call /start_weight_update first")
        return {"message": "Weight update finished", "policy_version": updates.finished_version}
    if not updates.pending:
        raise RequestError("no weights were named since /start_weight_update; name them with /update_weights")
    try:
        report = await updates.publish(updates.pending, label=body.weight_version)
    finally:
        _discard_received(front)
    updates.pending, updates.finished_version = None, report.version
    return {"message": "Weight update finished", "policy_version": report.version}


def _discard_received(front: Front) -> None:
    """Delete what came over NCCL."""
    while front.updates.received:
        discard(front.updates.received.pop())


@router.post("/update_weight_version")
async def set_weight_version(front: CurrentFront, body: SetWeightVersion) -> dict[str, Any]:
    """Give the current policy version a name."""
    front.updates.set_label((await front.fleet.status()).version, body.new_version)
    return {"success": True, "new_version": body.new_version}


@router.get("/weight_info")
async def weight_info(front: CurrentFront) -> dict[str, Any]:
    """Return the current policy version and its name."""
    version = (await front.fleet.status()).version
    return {"weight_version": front.updates.label(version), "policy_version": version}


@router.post("/weight_checker")
async def check_weights(front: CurrentFront, body: CheckWeights) -> dict[str, Any]:
    """Return checksums of the engines' weights by `engine/rank/parameter`, or compare them with a baseline."""
    if body.action == "reset":
        raise Unsupported("action 'reset' is not supported: weights are replaced only by the next version")
    if body.action == "compare" and body.baseline is None:
        raise RequestError("action 'compare' needs a baseline: the answer of 'checksum'")
    checksums = {
        f"{engine}/{parameter.rank}/{parameter.name}": ",".join(f"{part:032x}" for part in parameter.parts)
        for engine, sums in (await front.fleet.checksums()).items()
        for parameter in sums.parameters
    }
    if body.baseline is None:
        return {"checksums": checksums}
    names = checksums.keys() | body.baseline.keys()
    mismatches = sorted(name for name in names if checksums.get(name) != body.baseline.get(name))
    return {"match": not mismatches, "mismatches": mismatches}


@router.post("/collective_rpc")
async def collective_rpc(front: CurrentFront, body: CollectiveRpc) -> None:
    """Always refused."""
    raise Unsupported(f"cannot call {body.method[:100]!r}: methods of engine workers are not exposed over HTTP")
