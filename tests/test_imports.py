"""What importing costs, and what must not come along."""

import json
import subprocess
import sys

import pytest

import slipstream

HEAVY = ("jax", "jaxlib", "torch", "grpc", "numpy", "transformers", "vllm", "optax", "typer", "rich")


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
    modules = (
        "slipstream.gateway.server, slipstream.gateway.client, slipstream.bridge, slipstream.topology, slipstream.cli"
    )
    without = ("jax", "jaxlib", "torch", "vllm", "transformers", "ray")
    assert loaded_by(f"import {modules}", absent=without).isdisjoint(without)


def test_the_http_front_needs_neither_jax_nor_torch_and_comes_only_when_asked_for():
    without = ("jax", "jaxlib", "torch", "vllm", "transformers", "httpx")
    assert loaded_by("import slipstream.http.server, slipstream.weights.publisher", absent=without).isdisjoint(without)
    assert loaded_by("import slipstream.gateway.server, slipstream.cli").isdisjoint(("starlette", "uvicorn", "jinja2"))


def test_the_engine_and_training_need_neither_torch_nor_transformers():
    modules = "slipstream.engines.host, slipstream.rl.loop, slipstream.demo"
    without = ("torch", "vllm", "transformers", "ray", "matplotlib", "reasoning_gym")
    assert loaded_by(f"import {modules}", absent=without).isdisjoint(without)


def test_an_engine_for_a_server_needs_neither_jax_nor_vllm():
    without = ("jax", "jaxlib", "torch", "vllm", "transformers", "nccl")
    assert loaded_by("import slipstream.engines.remote.engine", absent=without).isdisjoint(without)


def test_a_diagnosis_needs_numpy_alone():
    without = ("jax", "jaxlib", "torch", "vllm", "grpc", "rich")
    assert loaded_by("import slipstream.observe.watch", absent=without).isdisjoint(without)


def test_weights_and_gateway_do_not_import_each_other():
    code = (
        "import slipstream.{0}\nassert not any(m.startswith('slipstream.{1}') for m in sys.modules), sys.modules.keys()"
    )
    loaded_by(code.format("weights.publisher", "gateway"))
    loaded_by(code.format("gateway.server", "weights"))


def test_public_names():
    assert slipstream.__all__ == [
        "Bridge",
        "Completion",
        "Engine",
        "EngineConfig",
        "Failure",
        "GatewayConfig",
        "HttpConfig",
        "RayConfig",
        "SamplingParams",
        "Score",
        "SlipstreamError",
        "SyncReport",
        "VersionSpan",
        "connect",
        "inprocess",
        "launch",
        "__version__",
    ]
    for name in slipstream.__all__:
        assert getattr(slipstream, name) is not None
    assert set(slipstream.__all__) <= set(dir(slipstream))
    with pytest.raises(AttributeError, match="lanch"):
        slipstream.lanch


def test_the_public_function_is_not_shadowed_by_a_module():
    import slipstream.topology

    assert callable(slipstream.launch) and callable(slipstream.connect)
