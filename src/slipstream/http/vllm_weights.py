"""vLLM's calls for new weights, for a whole fleet at once. What came over NCCL there comes as checkpoints here, and becomes the
policy of every engine by the same transaction as `bridge.sync`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from slipstream.errors import RequestError, UnknownVersion, Unsupported
from slipstream.http.answers import Answer
from slipstream.http.front import Front
from slipstream.http.shapes import Limits


@dataclass(frozen=True, kw_only=True)
class InitBody:
    init_info: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class StartBody:
    is_checkpoint_format: bool = True


@dataclass(frozen=True, kw_only=True)
class UpdateBody:
    update_info: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class FinishBody:
    weight_version: str | None = None


@dataclass(frozen=True, kw_only=True)
class LabelBody:
    new_version: Annotated[str, Limits(max_length=1000)]


@dataclass(frozen=True, kw_only=True)
class CheckerBody:
    action: Literal["checksum", "reset", "compare"]
    baseline: dict[str, str] | None = None


@dataclass(frozen=True, kw_only=True)
class RpcBody:
    method: str
    args: list[Any] | None = None
    kwargs: dict[str, Any] | None = None
    timeout: float | None = None


async def init_transfer(front: Front, body: InitBody) -> Answer:
    """`{"init_info": {"backend": "checkpoint"}}` is what there is."""
    if body.init_info.get("backend") != "checkpoint":
        raise Unsupported(
            "the HTTP front takes weights as checkpoints, init_info={'backend': 'checkpoint'}: a rendezvous over NCCL would "
            "need one communicator with every rank of every engine, and vLLM's protocol knows no version that is rolled back. "
            "To send weights from GPU to GPU use slipstream.connect(...).sync(params)"
        )
    _ = front.weights.root
    return {"message": "Weight transfer initialized"}


async def start_update(front: Front, body: StartBody) -> Answer:
    if not body.is_checkpoint_format:
        raise Unsupported("weights come in the checkpoint's own format here; is_checkpoint_format must be true")
    _ = front.weights.root
    front.weights.pending = []
    return {"message": "Weight update started"}


async def update_weights(front: Front, body: UpdateBody) -> Answer:
    """Names a checkpoint, or one of several that complete one another. Nothing changes before `/finish_weight_update`."""
    if front.weights.pending is None:
        raise UnknownVersion("no weight update is under way; /start_weight_update comes first")
    path = body.update_info.get("path")
    if not isinstance(path, str) or body.update_info.keys() - {"path"}:
        raise Unsupported(
            "update_info must be {'path': 'a directory of safetensors'}: tensors announced by names, dtypes and shapes would "
            "follow over NCCL, which the HTTP front does not speak"
        )
    front.weights.find(path)
    if path not in front.weights.pending:
        front.weights.pending.append(path)
    return {"message": "Weights announced; they are loaded by /finish_weight_update"}


async def finish_update(front: Front, body: FinishBody) -> Answer:
    """Brings what was named to every engine, as one version. Repeated after it went through, it says so again."""
    if front.weights.pending is None:
        if front.weights.finished is None:
            raise UnknownVersion("no weight update is under way; /start_weight_update comes first")
        return {"message": "Weight update finished", "policy_version": front.weights.finished}
    if not front.weights.pending:
        raise RequestError("no weights were named since /start_weight_update; /update_weights names them")
    report = await front.weights.publish(front.weights.pending, label=body.weight_version)
    front.weights.pending, front.weights.finished = None, report.version
    return {"message": "Weight update finished", "policy_version": report.version}


async def set_label(front: Front, body: LabelBody) -> Answer:
    front.weights.set_label((await front.status()).version, body.new_version)
    return {"success": True, "new_version": body.new_version}


async def weight_info(front: Front) -> Answer:
    version = (await front.status()).version
    return {"weight_version": front.weights.label(version), "policy_version": version}


async def weight_checker(front: Front, body: CheckerBody) -> Answer:
    """Checksums of what the engines hold, part by part, by `engine/rank/parameter`."""
    if body.action == "reset":
        raise Unsupported("weights are not thrown away on request: a version goes when the next one comes")
    if body.action == "compare" and body.baseline is None:
        raise RequestError("action 'compare' needs a baseline: what 'checksum' answered")
    found = {
        f"{engine}/{parameter.rank}/{parameter.name}": ",".join(f"{part:032x}" for part in parameter.parts)
        for engine, sums in (await front.fleet.checksums()).items()
        for parameter in sums.parameters
    }
    if body.baseline is None:
        return {"checksums": found}
    mismatches = sorted(k for k in found.keys() | body.baseline.keys() if found.get(k) != body.baseline.get(k))
    return {"match": not mismatches, "mismatches": mismatches}


async def collective_rpc(front: Front, body: RpcBody) -> Answer:
    raise Unsupported(
        f"{body.method[:100]!r} is not run: no method of an engine's workers can be called by name over HTTP"
    )
