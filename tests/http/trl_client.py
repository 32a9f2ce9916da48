"""Script: calls the HTTP server with TRL's two unmodified clients and prints the results as JSON.

TRL imports vLLM only for NCCL. The stand-in for vLLM raises when called, unless `quiet` is set."""

import importlib.abc
import importlib.machinery
import json
import sys
import types

url, token = sys.argv[1:]


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes every module of vLLM importable, with functions that raise."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "vllm":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return Empty(spec.name)

    def exec_module(self, module):
        module.__version__ = "0.31.0"


class Empty(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return nothing


quiet = False


def nothing(*_, **__):
    if not quiet:
        raise AssertionError("vLLM is not installed")


sys.meta_path.insert(0, Absent())

import torch  # noqa: E402
from accelerate import PartialState  # noqa: E402
from trl.experimental.async_grpo.vllm_client import VLLMClient as AsyncClient  # noqa: E402
from trl.generation.vllm_client import VLLMClient  # noqa: E402

with_token = url.replace("://", f"://trainer:{token}@")  # TRL takes no API key, but a URL can carry one
client = VLLMClient(base_url=with_token)
found = {
    "model": client.model,
    "world_size": client.get_world_size(),
    "texts": client.generate(["hello", "abc"], n=2, max_tokens=6, generation_kwargs={"seed": 3}),
    "ids": client.generate([[5, 6, 7]], max_tokens=6, logprobs=2, temperature=0.7, top_p=0.9),
    "chat": client.chat([[{"role": "user", "content": "hi"}]], max_tokens=4),
    "sequence": client.get_sequence_logprobs([[5, 6, 7, 8, 9]], [2], top_logprobs=3),
    "transfer": client.get_server_info()["weight_transfer_config"],
}
client.reset_prefix_cache()


def refusal(call, *arguments):
    try:
        call(*arguments)
    except Exception as error:
        return str(error)


def version():
    return client._get(f"{client.base_url}/weight_info")["policy_version"]


def update_nothing():
    with client.weight_update():
        pass


found["version before"] = version()
found["no communicator"] = refusal(client.init_communicator, "cpu")
client.communicator, quiet = None, True  # pretend to have a communicator, to see the calls that would follow
found["no tensor"] = refusal(client.update_named_param, "model.norm.weight", torch.ones(32))
found["nothing sent"] = refusal(update_nothing)
quiet = False

PartialState(cpu=True)  # needed by its logger
other = AsyncClient(with_token)
other.wait_for_server_ready()
found["version"] = version()
found["max_model_len"], found["dtype"] = other.get_max_model_len(), other.get_dtype()
other.pause()
other.resume()
print(json.dumps(found))
