"""A training run on disk, whole or not at all: what `slipstream train` goes on from when it is started again.

    run_dir/state/step-00000050/
        arrays/       parameters and optimiser state, as Orbax writes them: each device's shards, whatever the sharding
        state.json    all the rest, the run's config, and the name, size and hash of every file; written last

`save` writes into a hidden directory, has the disk confirm every file, and renames it. A process that is killed on the way
leaves a hidden directory, which nobody loads and the next `save` removes. `latest` passes over a directory that is not what
its state.json says; `load` says what is wrong with it.

One process holds all of the run: a trainer of several JAX processes is refused."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import xxhash

from slipstream.errors import CheckpointError, Unsupported
from slipstream.rl.train_step import OptState

FORMAT = 1
KEEP = 2
"""Checkpoints that stay on disk."""
_FACTS, _ARRAYS = "state.json", "arrays"
_CHUNK = 16 << 20

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Facts:
    """All of a run's state but its arrays: what `state.json` holds.

    After step 50 of a strictly on-policy run with seed 3: `Facts(step=50, cursor=50, seed=3, version=50, …)`."""

    step: int
    """RL steps done."""
    cursor: int
    """Batches of prompts drawn. The next one follows from `(seed, cursor + 1)`."""
    seed: int
    version: int
    """The policy version that these parameters had in the fleet. Engines that are started again count from anew."""
    journal: int = 0
    """How much of the rollout journal has been trained on; 0 where there is none."""
    recent: tuple[float, ...] = ()
    """Accuracies of the latest steps, by which `target_accuracy` is judged."""
    evaluated: int = 0
    """The step of the latest evaluation."""


@dataclass(frozen=True, slots=True)
class TrainState:
    params: Any
    """A tree of arrays: the policy, or the policy and its critic."""
    opt_state: OptState
    facts: Facts


def save(run_dir: Path, state: TrainState, config: Mapping[str, Any], keep: int = KEEP) -> Path:
    """Writes a checkpoint and returns its directory, on disk and complete. `config` is the run's, as nested mappings.

    Of the checkpoints up to this one, the `keep` latest stay."""
    _one_process()
    home = run_dir / "state"
    _remove_hidden(home)
    final = home / _name(state.facts.step)
    partial = home / f".partial-{final.name}"
    partial.mkdir(parents=True)
    arrays = _arrays(state.params, state.opt_state)
    with _checkpointer() as checkpointer:
        checkpointer.save((partial / _ARRAYS).absolute(), arrays)
    described = {
        "format": FORMAT,
        **dataclasses.asdict(state.facts),
        "config": config,
        "arrays": _shapes(arrays),
        "files": {str(path.relative_to(partial)): _seal(path) for path in _files(partial)},
    }
    (partial / _FACTS).write_text(json.dumps(described, indent=1) + "\n")
    for path in (partial / _FACTS, *_directories(partial)):
        _sync(path)
    if final.exists():  # one that is torn, since whole ones are gone on from
        final.rename(home / f".old-{final.name}")
    partial.rename(final)
    for path in (home, run_dir):
        _sync(path)
    for old in [path for path in _checkpoints(home) if path.name <= final.name][:-keep]:
        old.rename(home / f".old-{old.name}")  # first out of sight: a removal that is interrupted leaves nothing torn
    _remove_hidden(home)
    return final


def latest(run_dir: Path) -> Path | None:
    """The last checkpoint that is whole, by the names and sizes of its files; None if there is none."""
    for directory in reversed(_checkpoints(run_dir / "state")):
        try:
            _complete(directory)
        except CheckpointError as error:
            _log.warning("passed over: %s", error)
        else:
            return directory
    return None


def read(directory: Path) -> tuple[Facts, dict[str, Any]]:
    """What a checkpoint says of itself, and the config of its run. `CheckpointError` if it is not whole."""
    described = _complete(directory)
    facts = {field.name: described[field.name] for field in dataclasses.fields(Facts)}
    return Facts(**facts | {"recent": tuple(facts["recent"])}), described["config"]


def load(directory: Path, params: Any, opt_state: OptState) -> TrainState:
    """The state in a checkpoint, after every file's hash was found right.

    `params` and `opt_state` say how it is to lie in memory: arrays of the same shapes and dtypes, whose values do not
    matter and whose shardings the loaded ones get. Those may be others than when it was saved."""
    _one_process()
    facts, _ = read(directory)
    described = _complete(directory)
    for name, (_, digest) in described["files"].items():
        if _hash(directory / name) != digest:
            raise CheckpointError(
                f"{directory / name} is damaged: its bytes are not those that were saved. Remove {directory}, and the run "
                "goes on from the checkpoint before it"
            )
    wanted = _arrays(params, opt_state)
    _require_shapes(directory, described["arrays"], _shapes(wanted))
    with _checkpointer() as checkpointer:
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), wanted)
        found = checkpointer.restore((directory / _ARRAYS).absolute(), like)
    return TrainState(found["params"], found["opt_state"], facts)


# --- what a checkpoint is made of -------------------------------------------------------------------------------------


def _arrays(params: Any, opt_state: OptState) -> dict[str, Any]:
    return {"params": params, "opt_state": opt_state}


def _checkpointer() -> Any:
    from orbax.checkpoint import StandardCheckpointer  # at the leaf: engines and the gateway do without

    return StandardCheckpointer()


def _shapes(tree: Any) -> dict[str, list[Any]]:
    """`{"['params']['lm_head']['weight']": [[100, 64], "float32"]}`."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path): [list(leaf.shape), str(leaf.dtype)] for path, leaf in leaves}


def _require_shapes(directory: Path, stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    wrong = [name for name in {**stored, **wanted} if stored.get(name) != wanted.get(name)]
    if wrong:
        name = wrong[0]
        raise CheckpointError(
            f"{directory} is of another model or optimiser: {name} is {stored.get(name, 'absent')} in it, and "
            f"{wanted.get(name, 'absent')} here; {len(wrong)} array(s) differ. Was the model directory changed?"
        )


def _complete(directory: Path) -> dict[str, Any]:
    """state.json, if every file that it names is there with its size."""
    path = directory / _FACTS
    try:
        described = json.loads(path.read_text())
        if described["format"] != FORMAT:
            raise CheckpointError(
                f"{directory} has format {described['format']}; this release reads format {FORMAT}: use the one that wrote it"
            )
        sizes = {name: size for name, (size, _) in described["files"].items()}
        missing = [field.name for field in dataclasses.fields(Facts) if field.name not in described]
    except FileNotFoundError:
        raise CheckpointError(
            f"{directory} is no checkpoint: it has no {_FACTS}, which is written last. Expected is a directory like "
            "RUN_DIR/state/step-00000050"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error!r}): it was changed or cut off; remove {directory}"
        ) from None
    if missing or not {"config", "arrays"} <= set(described):
        raise CheckpointError(
            f"{path} lacks {', '.join(missing) or 'config or arrays'}: it was changed; remove {directory}"
        )
    for name, size in sizes.items():
        file = directory / name
        found = file.stat().st_size if file.is_file() else "absent"
        if found != size:
            raise CheckpointError(
                f"{file} should have {size} bytes and is {found}: the checkpoint is torn; remove {directory}, and the run "
                "goes on from the one before it"
            )
    return described


# --- files ------------------------------------------------------------------------------------------------------------


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _checkpoints(home: Path) -> list[Path]:
    return sorted(path for path in home.glob("step-*") if path.is_dir())


def _remove_hidden(home: Path) -> None:
    for pattern in (".partial-*", ".old-*"):
        for path in home.glob(pattern):
            shutil.rmtree(path)


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def _directories(directory: Path) -> Iterator[Path]:
    yield from (path for path in directory.rglob("*") if path.is_dir())
    yield directory


def _seal(path: Path) -> list[Any]:
    """`[size, hash]` of a file, once the disk has it."""
    _sync(path)
    return [path.stat().st_size, _hash(path)]


def _hash(path: Path) -> str:
    hasher = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            hasher.update(chunk)
    return hasher.hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _one_process() -> None:
    if jax.process_count() > 1:
        raise Unsupported(
            "checkpoints of a run are for a trainer of one JAX process so far; set save_every=0 for several"
        )
