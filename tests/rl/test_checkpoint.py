"""Checkpoints of a run: exact, atomic, with damage reported."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from slipstream.errors import CheckpointError
from slipstream.rl.trainer import checkpoint
from slipstream.rl.trainer.checkpoint import RunProgress, RunState
from tests.forked import Forks

OPTIMISER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))


def made(step, width=5, sharding=None):
    """A state in which every number depends on the step."""
    rng = np.random.default_rng(step)
    params = {
        "model": {
            "layers": [{"w": rng.normal(size=(4, width)).astype(np.float32)}, {"w": np.float32(rng.normal(size=3))}]
        },
        "head": jnp.asarray(rng.normal(size=(2, 2)), jnp.bfloat16),
    }
    params = jax.device_put(params, sharding)
    gradients = jax.tree.map(lambda p: p * 0.5, params)
    opt_state = OPTIMISER.update(gradients, OPTIMISER.init(params), params)[1]
    progress = RunProgress(step, step, 3, step + 7, journal=2 * step, recent=(0.1, 1 / 3), evaluated=step - 1)
    return RunState(params, opt_state, progress)


def blank(like):
    return jax.tree.map(jnp.zeros_like, (like.params, like.opt_state))


def bits(tree):
    return [(np.asarray(leaf).dtype, np.asarray(leaf).tobytes()) for leaf in jax.tree.leaves(tree)]


def assert_same(found, expected):
    assert found.progress == expected.progress
    for a, b in ((found.params, expected.params), (found.opt_state, expected.opt_state)):
        assert jax.tree.structure(a) == jax.tree.structure(b) and bits(a) == bits(b)


def test_round_trip_is_bit_exact(tmp_path):
    saved = made(5)
    directory = checkpoint.save(tmp_path, saved, {"seed": 3, "grpo": {"group": 8}})
    assert directory == tmp_path / "state" / "step-00000005" == checkpoint.latest(tmp_path)
    assert_same(checkpoint.load(directory, *blank(saved)), saved)
    assert checkpoint.read(directory) == (saved.progress, {"seed": 3, "grpo": {"group": 8}})


def test_latest_and_keep(tmp_path):
    assert checkpoint.latest(tmp_path) is None
    for step in (1, 2, 9, 10):
        checkpoint.save(tmp_path, made(step), {}, keep=2)
    assert sorted(p.name for p in (tmp_path / "state").iterdir()) == ["step-00000009", "step-00000010"]
    assert_same(checkpoint.load(checkpoint.latest(tmp_path), *blank(made(10))), made(10))


def test_checkpoints_load_with_another_sharding(tmp_path):
    """Saved with one half of the rows per device; loaded so, with halves of the columns, and unsharded."""
    mesh = Mesh(np.array(jax.devices()), ("a",))

    def shardings(spec):
        part, whole = NamedSharding(mesh, spec), NamedSharding(mesh, PartitionSpec())
        return {"model": {"layers": [{"w": part}, {"w": whole}]}, "head": part}

    saved = made(4, width=6, sharding=shardings(PartitionSpec("a")))
    directory = checkpoint.save(tmp_path, saved, {})
    for spec in (PartitionSpec("a"), PartitionSpec(None, "a"), PartitionSpec()):
        like = made(4, width=6, sharding=shardings(spec))
        found = checkpoint.load(directory, *blank(like))
        assert_same(found, saved)
        w = found.params["model"]["layers"][0]["w"]
        assert w.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2), w.sharding


# Kills itself in the n-th of the calls that write a checkpoint to disk.
_KILLED = """
import os, pathlib, signal, sys
from slipstream.rl.trainer import checkpoint as state
from tests.rl.test_checkpoint import made
root, count = pathlib.Path(sys.argv[1]), int(sys.argv[2])
def counted(call):
    def wrapped(*arguments, **options):
        global count
        count -= 1
        if count == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*arguments, **options)
    return wrapped
os.fsync, pathlib.Path.rename, pathlib.Path.write_text = map(counted, (os.fsync, pathlib.Path.rename, pathlib.Path.write_text))
state.save(root, made(2), {}, keep=1)
print(count)
"""


def test_a_kill_during_save_leaves_a_complete_checkpoint(tmp_path):
    checkpoint.save(tmp_path / "whole", made(1), {})
    with Forks("slipstream.rl.trainer.checkpoint tests.rl.test_checkpoint", _KILLED) as saving:
        code, left = saving.run(tmp_path / "whole", 10_000)
        calls, found = 10_000 - int(left), []
        assert code == 0
        # The number of calls that Orbax makes varies: the last points may lie beyond the end.
        for count in sorted({1, calls // 2, calls - 4, calls - 1}):
            root = tmp_path / str(count)
            checkpoint.save(root, made(1), {})
            assert saving.run(root, count)[0] in ((-9,) if count <= calls // 2 else (-9, 0))
            directory = checkpoint.latest(root)
            found.append(int(directory.name.removeprefix("step-")))
            assert_same(checkpoint.load(directory, *blank(made(1))), made(found[-1]))
            checkpoint.save(root, made(3), {}, keep=1)  # leftovers do not matter
            assert [p.name for p in (root / "state").iterdir()] == ["step-00000003"]
    assert found[0] == 1 and {*found} <= {1, 2}


def test_incomplete_checkpoints_are_skipped(tmp_path):
    for step in (1, 2):
        checkpoint.save(tmp_path, made(step), {})
    home = tmp_path / "state"
    good = checkpoint.latest(tmp_path)

    def torn(name):
        return shutil.copytree(good, home / name)

    (torn("step-00000003") / "state.json").unlink()
    state = torn("step-00000004") / "state.json"
    state.write_text(state.read_text()[:-40])
    biggest = max((p for p in torn("step-00000005").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    biggest.write_bytes(biggest.read_bytes()[:-1])
    shutil.rmtree(torn("step-00000006") / "arrays")
    (home / "step-00000007").mkdir()
    shutil.copytree(good, home / ".partial-step-00000008")
    (home / "step-00000009").write_text("a file")
    assert checkpoint.latest(tmp_path) == good
    checkpoint.save(tmp_path, made(4), {})  # replaces an incomplete one
    assert checkpoint.latest(tmp_path) == home / "step-00000004"


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda d: (d / "state.json").unlink(), "is not a complete checkpoint: it has no state.json"),
        (lambda d: (d / "state.json").write_text("{"), "cannot be read .* truncated"),
        (lambda d: (d / "state.json").write_text("[]"), "cannot be read"),
        (lambda d: shutil.rmtree(d / "arrays"), "should have .* bytes and is missing: the checkpoint is incomplete"),
        (lambda d: change(d, format=99), "has format 99; this release reads format 1"),
        (lambda d: change(d, cursor=None), "lacks cursor"),
        (lambda d: flip(d), "is damaged: its hash differs from the saved one"),
        (shutil.rmtree, "is not a complete checkpoint"),
    ],
)
def test_damaged_checkpoints_are_reported(tmp_path, harm, said):
    directory = checkpoint.save(tmp_path, made(1), {})
    harm(directory)
    with pytest.raises(CheckpointError, match=said):
        checkpoint.load(directory, *blank(made(1)))


def change(directory, **fields):
    path = directory / "state.json"
    found = json.loads(path.read_text())
    for name, value in fields.items():
        found[name] = value
        if value is None:
            del found[name]
    path.write_text(json.dumps(found))


def flip(directory):
    path = max((p for p in (directory / "arrays").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_checkpoint_of_another_model_is_rejected(tmp_path):
    directory = checkpoint.save(tmp_path, made(1), {})
    with pytest.raises(
        CheckpointError,
        match=r"another model .*layers.*'w'\] is \[\[4, 5\], 'float32'\] in the checkpoint and \[\[4, 6\]",
    ):
        checkpoint.load(directory, *blank(made(1, width=6)))
    params, opt_state = blank(made(1))
    with pytest.raises(CheckpointError, match=r"head'\] is .* in the checkpoint and absent in this run"):
        checkpoint.load(directory, {"model": params["model"]}, opt_state)
