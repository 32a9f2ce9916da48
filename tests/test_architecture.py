"""Checks of the architecture: imports between folders, modules kept out of processes, public names."""

import ast
import functools
import json
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import slipstream

SOURCE = Path(slipstream.__file__).parent

FOLDERS = [
    ".",
    "runtime",
    "tensors",
    "model",
    "model/families",
    "model/transformer",
    "model/checkpoints",
    "model/checkpoints/gguf",
    "weights",
    "weights/sources",
    "weights/transports",
    "weights/transports/host",
    "weights/transports/cuda",
    "weights/transports/nccl",
    "weights/transports/shared",
    "weights/transports/servers",
    "weights/update",
    "observe/recorder",
    "engines",
    "engines/frontend",
    "engines/embedded/scheduling",
    "engines/embedded/sampling",
    "engines/embedded/compute",
    "engines/embedded",
    "engines/vllm",
    "engines/remote",
    "gateway",
    "bridge",
    "observe/dashboard",
    "http",
    "deploy/processes",
    "deploy/ray",
    "deploy",
    "deploy/fanout",
    "deploy/slurm",
    "deploy/advice",
    "observe",
    "observe/terminal",
    "rl",
    "rl/data",
    "rl/rewards",
    "rl/algorithm",
    "rl/agents",
    "rl/reporting",
    "rl/trainer",
    "plugins",
    "chaos",
    "cli",
]
"""All folders of the package, lowest first. A module imports from its own folder and from folders before it."""


@functools.cache
def nodes() -> dict[Path, list[ast.AST]]:
    """The imports and classes of every file."""
    kinds = (ast.Import, ast.ImportFrom, ast.ClassDef)
    paths = (path for path in SOURCE.rglob("*.py") if "_pb2" not in path.name)
    return {path: [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, kinds)] for path in paths}


@functools.cache
def imports() -> dict[str, set[str]]:
    """Every module with the modules of this package that it imports, lazy and type-only imports included."""
    paths = {module_name(path): path for path in nodes()}
    found: dict[str, set[str]] = {}
    for module, path in paths.items():
        names: set[str] = set()
        for node in nodes()[path]:
            if isinstance(node, ast.ImportFrom) and node.module:
                names |= {n if (n := f"{node.module}.{a.name}") in paths else node.module for a in node.names}
            elif isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
        found[module] = {name for name in names if name in paths and name not in (module, "slipstream")}
    del found["slipstream"]  # the public names, imported on first use
    return found


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")


def folder(module: str) -> str:
    path = Path(*module.split(".")[1:])
    return str(path if (SOURCE / path / "__init__.py").exists() else path.parent)


def test_every_folder_has_its_place():
    assert {folder(module) for module in imports()} == set(FOLDERS)


def test_imports_go_to_earlier_folders_only():
    order = {name: place for place, name in enumerate(FOLDERS)}
    wrong = [
        f"{module} ({folder(module)}) imports {imported} ({folder(imported)})"
        for module, others in imports().items()
        for imported in others
        if order[folder(imported)] > order[folder(module)]
    ]
    assert not wrong, "\n".join(wrong)


def test_no_modules_import_each_other_in_a_circle():
    try:
        TopologicalSorter(imports()).prepare()
    except CycleError as error:
        pytest.fail(" → ".join(error.args[1]))


def test_a_class_name_has_one_meaning():
    places: dict[str, list[str]] = {}
    for path, found in nodes().items():
        for node in found:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name.lstrip("_"), []).append(str(path.relative_to(SOURCE)))
    assert not {name: paths for name, paths in places.items() if len(paths) > 1}


HEAVY = ("jax", "jaxlib", "torch", "grpc", "numpy", "transformers", "vllm", "optax", "typer", "rich", "pydantic")


def loaded_by(code, absent=()):
    """Modules that a fresh interpreter has loaded after `code`; those in `absent` cannot be imported in it."""
    script = f"""
import sys, json
for name in {list(absent)!r}:
    sys.modules[name] = None
{code}
print(json.dumps(sorted({{m.partition('.')[0] for m, v in sys.modules.items() if v is not None}})))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_importing_slipstream_loads_nothing_heavy():
    assert loaded_by("import slipstream").isdisjoint(HEAVY)


def test_the_gateway_and_the_trainers_client_need_neither_jax_nor_torch():
    modules = "slipstream.gateway.server, slipstream.gateway.client, slipstream.bridge.bridge, slipstream.deploy.fleet, slipstream.cli.main"
    without = ("jax", "jaxlib", "torch", "vllm", "transformers", "ray")
    assert loaded_by(f"import {modules}", absent=without).isdisjoint(without)


def test_the_http_front_needs_neither_jax_nor_torch_and_comes_only_when_asked_for():
    without = ("jax", "jaxlib", "torch", "vllm", "transformers", "httpx")
    assert loaded_by("import slipstream.http.server, slipstream.weights.update.publisher", absent=without).isdisjoint(
        without
    )
    assert loaded_by("import slipstream.gateway.server, slipstream.cli.main").isdisjoint(
        ("fastapi", "starlette", "uvicorn", "jinja2")
    )


def test_the_engine_and_training_need_neither_torch_nor_transformers():
    modules = "slipstream.deploy.processes.engine_process, slipstream.rl.trainer.loop, slipstream.cli.demo"
    without = ("torch", "vllm", "transformers", "ray", "matplotlib", "reasoning_gym")
    assert loaded_by(f"import {modules}", absent=without).isdisjoint(without)


def test_an_engine_for_a_server_needs_neither_jax_nor_vllm():
    without = ("jax", "jaxlib", "torch", "vllm", "transformers", "nccl")
    assert loaded_by("import slipstream.engines.remote.engine", absent=without).isdisjoint(without)


def test_a_diagnosis_needs_numpy_alone():
    without = ("jax", "jaxlib", "torch", "vllm", "grpc", "rich")
    assert loaded_by("import slipstream.observe.mismatch_watch", absent=without).isdisjoint(without)


def test_weights_and_gateway_do_not_import_each_other():
    code = (
        "import slipstream.{0}\nassert not any(m.startswith('slipstream.{1}') for m in sys.modules), sys.modules.keys()"
    )
    loaded_by(code.format("weights.update.publisher", "gateway"))
    loaded_by(code.format("gateway.server", "weights"))


def test_public_names():
    assert slipstream.__all__ == [
        "AdapterConfig",
        "Bridge",
        "Completion",
        "EmbeddedConfig",
        "Engine",
        "EngineConfig",
        "Failure",
        "FleetStatus",
        "GatewayConfig",
        "HttpConfig",
        "Lora",
        "ModelConfig",
        "RayConfig",
        "RemoteConfig",
        "RolloutGroup",
        "Rollouts",
        "SamplingParams",
        "Score",
        "SharedWeights",
        "SlipstreamError",
        "SyncReport",
        "TokenEvent",
        "TrainConfig",
        "VerifyReport",
        "VersionSpan",
        "VllmConfig",
        "connect",
        "errors",
        "inprocess",
        "launch",
        "train",
        "write_sample_model",
        "__version__",
    ]
    for name in slipstream.__all__:
        assert getattr(slipstream, name).__doc__
    assert set(slipstream.__all__) <= set(dir(slipstream))
    with pytest.raises(AttributeError, match="lanch"):
        slipstream.lanch


def test_the_public_function_is_not_shadowed_by_a_module():
    import slipstream.deploy.fleet

    assert callable(slipstream.launch) and callable(slipstream.connect)
