"""Atomic checkpoints of a training run, from which `slipstream train` resumes.

    run_dir/state/step-00000050/
        arrays/       parameters and optimizer state, written by Orbax as the shards of each device
        state.json    progress and config of the run, and the name, size and hash of every file; written last

`save` writes to a hidden directory, syncs every file to disk, and renames the directory. A killed process leaves a hidden
directory, which is never loaded and which the next `save` removes. `latest` skips directories that do not match their
state.json; `load` reports what is wrong.

A trainer of several JAX processes is not supported."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from slipstream.errors import CheckpointError, Unsupported

if TYPE_CHECKING:
    from slipstream.rl.algorithm.train_step import OptState

FORMAT = 1
KEEP = 2
"""Checkpoints kept on disk."""
_STATE, _ARRAYS = "state.json", "arrays"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunProgress:
    """The state of a run without its arrays, as in `state.json`.

    After step 50 of a strictly on-policy run with seed 3: `RunProgress(step=50, cursor=50, seed=3, version=50, …)`."""

    step: int
    """RL steps done."""
    cursor: int
    """Prompt batches taken. The next one depends on `(seed, cursor + 1)`."""
    seed: int
    version: int
    """The policy version of these parameters in the fleet. A restarted fleet counts from 0."""
    journal: int = 0
    """Position in the rollout journal up to which rollouts were trained on; 0 without a journal."""
    recent: tuple[float, ...] = ()
    """Accuracies of the last steps, for `target_accuracy`."""
    evaluated: int = 0
    """The step of the latest evaluation."""


@dataclass(frozen=True, slots=True)
class RunState:
    params: Any
    """A tree of arrays: the policy, or the policy and its critic."""
    opt_state: OptState
    progress: RunProgress


def save(run_dir: Path, state: RunState, config: Mapping[str, Any], keep: int = KEEP) -> Path:
    """Write a checkpoint and return its directory. `config` is the run's config as nested mappings.

    Of the checkpoints up to this one, the last `keep` are kept."""
    _require_one_process()
    home = run_dir / "state"
    _remove_hidden(home)
    final = home / f"step-{state.progress.step:08d}"
    partial = home / f".partial-{final.name}"
    partial.mkdir(parents=True)
    arrays = {"params": state.params, "opt_state": state.opt_state}
    with _checkpointer() as checkpointer:
        checkpointer.save((partial / _ARRAYS).absolute(), arrays)
    described = {
        "format": FORMAT,
        **dataclasses.asdict(state.progress),
        "config": config,
        "arrays": _shapes(arrays),
        "files": {
            str(path.relative_to(partial)): _seal(path) for path in sorted(filter(Path.is_file, partial.rglob("*")))
        },
    }
    (partial / _STATE).write_text(json.dumps(described, indent=1) + "\n")
    for path in (partial / _STATE, *filter(Path.is_dir, partial.rglob("*")), partial):
        _sync(path)
    if final.exists():  # an incomplete one: a complete one would have been resumed from
        final.rename(home / f".old-{final.name}")
    partial.rename(final)
    for path in (home, run_dir):
        _sync(path)
    for old in [path for path in _checkpoints(home) if path.name <= final.name][:-keep]:
        # Hide it first: an interrupted removal must not leave an incomplete checkpoint.
        old.rename(home / f".old-{old.name}")
    _remove_hidden(home)
    return final


def latest(run_dir: Path) -> Path | None:
    """The last complete checkpoint, by the names and sizes of its files; None if there is none."""
    for directory in reversed(_checkpoints(run_dir / "state")):
        try:
            _complete(directory)
        except CheckpointError as error:
            _log.warning("skipped a checkpoint: %s", error)
        else:
            return directory
    return None


def read(directory: Path) -> tuple[RunProgress, dict[str, Any]]:
    """Read the progress and the config of a checkpoint. `CheckpointError` if it is incomplete."""
    described = _complete(directory)
    return _progress(described), described["config"]


def _progress(described: Mapping[str, Any]) -> RunProgress:
    fields = {field.name: described[field.name] for field in dataclasses.fields(RunProgress)}
    return RunProgress(**fields | {"recent": tuple(fields["recent"])})


def load(directory: Path, params: Any, opt_state: OptState) -> RunState:
    """Load a checkpoint after verifying the hash of every file.

    `params` and `opt_state` are arrays of the same shapes and dtypes, whose values are ignored. The loaded arrays get their
    shardings, which may differ from those at the time of saving."""
    import jax

    _require_one_process()
    described = _complete(directory)
    for name, (_, digest) in described["files"].items():
        if _hash(directory / name) != digest:
            raise CheckpointError(
                f"{directory / name} is damaged: its hash differs from the saved one. Remove {directory} to resume from the "
                "checkpoint before it"
            )
    wanted = {"params": params, "opt_state": opt_state}
    stored, shapes = described["arrays"], _shapes(wanted)
    if wrong := [name for name in {**stored, **shapes} if stored.get(name) != shapes.get(name)]:
        name = wrong[0]
        raise CheckpointError(
            f"{directory} is of another model or optimizer: {name} is {stored.get(name, 'absent')} in the checkpoint and "
            f"{shapes.get(name, 'absent')} in this run; {len(wrong)} array(s) differ. Was the model directory changed?"
        )
    with _checkpointer() as checkpointer:
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), wanted)
        restored = checkpointer.restore((directory / _ARRAYS).absolute(), like)
    return RunState(restored["params"], restored["opt_state"], _progress(described))


# --- contents ---------------------------------------------------------------------------------------------------------


def _checkpointer() -> Any:
    from orbax.checkpoint import StandardCheckpointer  # imported here: engines and the gateway do not need it

    return StandardCheckpointer()


def _shapes(tree: Any) -> dict[str, list[Any]]:
    """`{"['params']['lm_head']['weight']": [[100, 64], "float32"]}`."""
    import jax

    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path): [list(leaf.shape), str(leaf.dtype)] for path, leaf in leaves}


def _complete(directory: Path) -> dict[str, Any]:
    """Read state.json and check that every file in it exists with its size."""
    path = directory / _STATE
    try:
        described = json.loads(path.read_text())
        if described["format"] != FORMAT:
            raise CheckpointError(
                f"{directory} has format {described['format']}; this release reads format {FORMAT}: use the one that wrote it"
            )
        sizes = {name: size for name, (size, _) in described["files"].items()}
        missing = [field.name for field in dataclasses.fields(RunProgress) if field.name not in described]
    except FileNotFoundError:
        raise CheckpointError(
            f"{directory} is not a complete checkpoint: it has no {_STATE}, which is written last. Expected a directory like "
            "RUN_DIR/state/step-00000050"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error!r}): it was changed or truncated; remove {directory}"
        ) from None
    if missing or not {"config", "arrays"} <= set(described):
        raise CheckpointError(
            f"{path} lacks {', '.join(missing) or 'config or arrays'}: it was changed; remove {directory}"
        )
    for name, size in sizes.items():
        file = directory / name
        actual = file.stat().st_size if file.is_file() else None
        if actual != size:
            state = "is missing" if actual is None else f"has {actual}"
            raise CheckpointError(
                f"{file} should have {size} bytes and {state}: the checkpoint is incomplete; remove {directory} to resume "
                "from the checkpoint before it"
            )
    return described


# --- files ------------------------------------------------------------------------------------------------------------


def _checkpoints(home: Path) -> list[Path]:
    return sorted(path for path in home.glob("step-*") if path.is_dir())


def _remove_hidden(home: Path) -> None:
    for pattern in (".partial-*", ".old-*"):
        for path in home.glob(pattern):
            shutil.rmtree(path)


def _seal(path: Path) -> list[Any]:
    """Sync a file to disk and return its `[size, hash]`."""
    _sync(path)
    return [path.stat().st_size, _hash(path)]


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _require_one_process() -> None:
    import jax

    if jax.process_count() > 1:
        raise Unsupported("checkpoints support a trainer of one JAX process only; set save_every = 0 for several")
