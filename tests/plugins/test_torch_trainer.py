"""A PyTorch trainer that shares its parameters' memory with the engine, compared with generation in transformers."""

import os
import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import slipstream
from slipstream.config import EmbeddedConfig
from slipstream.errors import MappingError, NotReady, Unsupported, VersionError
from slipstream.plugins.torch_trainer import share_weights, update_weights
from slipstream.types import SamplingParams
from tests.tiny import hf_greedy, hf_model, tiny_config, variant, write_config
from tests.weights.memfd import stand_in

PROMPT = (5, 7, 11, 13, 17)
COUNT = 12
GREEDY = SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True)
OPTIONS = EmbeddedConfig(max_num_seqs=8, max_model_len=64)
LARGE = {"num_layers": 1, "vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1024}
"""40 MB: large enough to measure."""


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """On a busy machine the threads of torch wait for each other longer than they work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def by_transformers(module):
    return hf_greedy(module, PROMPT, COUNT)


def by_engine(bridge):
    (found,) = bridge.generate([PROMPT], GREEDY)
    return found.token_ids


def learn(module, optimizer, shared):
    """Take one step towards repeating the prompt."""
    ids = torch.tensor([PROMPT * 4])
    optimizer.zero_grad()
    module(ids, labels=ids).loss.backward()
    with shared.updating():
        optimizer.step()


@pytest.fixture
def opened(tmp_path):
    """An engine in this process, without weights, and a module for it."""
    bridges = []

    def make(name="llama", engine=OPTIONS):
        config = variant(name)
        bridges.append(slipstream.inprocess(write_config(tmp_path, config), engine=engine))
        return bridges[-1], hf_model(config, seed=1)

    yield make
    for bridge in bridges:
        bridge.close()


@pytest.mark.parametrize("name, memory", [("llama", "host"), ("llama-tied", "host"), ("llama-tied", "device")])
def test_a_step_of_the_optimiser_is_what_the_engine_serves(opened, monkeypatch, name, memory):
    if memory == "device":
        stand_in(monkeypatch)
    bridge, module = opened(name)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)  # created before the parameters move
    before = by_transformers(module)
    shared = share_weights(bridge, module)
    assert by_engine(bridge) == by_transformers(module) == before
    learn(module, optimizer, shared)
    after = by_transformers(module)
    (found,) = bridge.generate([PROMPT], GREEDY)
    assert found.token_ids == after != before
    assert found.version == shared.version == bridge.version == 1
    learn(module, optimizer, shared)
    assert by_engine(bridge) == by_transformers(module)
    assert bridge.verify(dict(module.named_parameters())).differences == ()


def test_a_block_that_raises_leaves_no_policy_until_the_next_one_ends(opened):
    bridge, module = opened()
    shared = share_weights(bridge, module)
    with pytest.raises(ZeroDivisionError), shared.updating():
        with torch.no_grad():
            module.model.norm.weight.mul_(0.5)
        1 / 0
    with pytest.raises(NotReady, match="the update to version 1 was aborted"):
        by_engine(bridge)
    with shared.updating(), torch.no_grad():
        module.model.norm.weight.mul_(2.0)
    assert by_engine(bridge) == by_transformers(module) and shared.version == 1
    shared.hold()
    shared.release()
    with pytest.raises(NotReady):
        by_engine(bridge)
    shared.hold()
    assert shared.notify_update("requeue").version == 2
    assert by_engine(bridge) == by_transformers(module)


def test_writing_outside_of_an_update_is_noticed(opened):
    bridge, module = opened()
    shared = share_weights(bridge, module)
    with torch.no_grad():
        module.model.layers[1].mlp.up_proj.weight.mul_(1.1)
    with pytest.raises(VersionError, match=r"model.layers.1.mlp.up_proj.weight was written to .* since version 0"):
        shared.hold()
    with pytest.raises(VersionError), shared.updating():
        pass
    assert by_engine(bridge) == by_transformers(module)  # the memory is shared
    shared = share_weights(bridge, module)
    with pytest.raises(VersionError, match="not held"):
        shared.notify_update()
    with shared.updating():
        pass


def test_a_parameter_that_gets_other_memory_is_noticed(opened):
    bridge, module = opened()
    shared = share_weights(bridge, module)
    with pytest.raises(MappingError, match=r"model.norm.weight was moved to memory"), shared.updating():
        module.model.norm.weight.data = module.model.norm.weight.data.clone()
    with pytest.raises(NotReady):
        by_engine(bridge)
    with pytest.raises(MappingError, match="share_weights again"):
        shared.hold()
    share_weights(bridge, module)
    assert by_engine(bridge) == by_transformers(module)


def test_modules_that_cannot_be_shared_are_refused_by_name(opened):
    bridge, module = opened()
    with pytest.raises(MappingError, match=r"float16, and engine 'inprocess' computes in float32"):
        share_weights(bridge, hf_model(variant("llama")).half())
    module.extra = torch.nn.Linear(2, 2)
    with pytest.raises(MappingError, match=r"not in the model: extra.weight \[2, 2\]"):
        share_weights(bridge, module)
    with pytest.raises(Unsupported, match="is on the meta device and has no value"):
        share_weights(bridge, hf_model(variant("llama")).to("meta"))
    tied, head = opened("llama-tied")[1], torch.nn.Linear(1, 1)
    head.weight = torch.nn.Parameter(tied.model.embed_tokens.weight.data)  # the same memory, but another parameter
    tied.lm_head = head
    with pytest.raises(MappingError, match=r"lm_head.weight .*tie_weights"):
        share_weights(bridge, tied)
    with pytest.raises(NotReady):
        by_engine(bridge)


@pytest.mark.parametrize("memory", ["host", "device"])
def test_bfloat16_is_shared_as_it_is(opened, monkeypatch, memory):
    if memory == "device":
        stand_in(monkeypatch)
    bridge, module = opened(engine=EmbeddedConfig(max_num_seqs=8, max_model_len=64, dtype="bfloat16"))
    module.bfloat16()
    shared = share_weights(bridge, module)
    with shared.updating(), torch.no_grad():
        module.model.embed_tokens.weight.mul_(2.0)
    assert module.model.embed_tokens.weight.dtype == torch.bfloat16
    assert bridge.verify(dict(module.named_parameters())).differences == ()


def test_update_weights_takes_modules_and_state_dicts_also_wrapped(opened):
    bridge, module = opened("llama-tied")
    assert update_weights(bridge, module).version == 0
    assert by_engine(bridge) == by_transformers(module)
    with torch.no_grad():
        module.model.norm.weight.mul_(-1.0)
    wrapped = {f"module._orig_mod.{name}": tensor for name, tensor in module.state_dict().items()}
    assert "module._orig_mod.lm_head.weight" in wrapped, "a state dict lists a tied head twice"
    assert update_weights(bridge, wrapped, in_flight="recompute").version == 1
    assert by_engine(bridge) == by_transformers(module)
    part = {"model.norm.weight": torch.ones_like(module.model.norm.weight)}
    with pytest.raises(MappingError, match=r"missing: model.embed_tokens.weight"):
        update_weights(bridge, part)
    assert update_weights(bridge, part, partial=True).version == 2


# --- one copy ---------------------------------------------------------------------------------------------------------


def smaps(pid):
    """`[(start, stop, name, {"Rss": bytes, "Pss": bytes, …})]` of a process's mappings."""
    found = []
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ \d+ *(.*)", line):
            found.append((int(match[1], 16), int(match[2], 16), match[4] if "r" in match[3] else None, {}))
        elif match := re.match(r"(\w+): +(\d+) kB", line):
            found[-1][3][match[1]] = 1024 * int(match[2])
    return found


def is_shared(name):
    return name is not None and "memfd:slipstream-shared" in name


def copies_elsewhere(pid, signatures):
    """Count how many of these bytes are in a process's private memory."""
    count = 0
    with open(f"/proc/{pid}/mem", "rb", 0) as memory:
        for start, stop, name, facts in smaps(pid):
            if name is None or is_shared(name) or name.startswith("[v") or not facts.get("Rss"):
                continue
            memory.seek(start)
            try:
                content = memory.read(stop - start)
            except OSError:
                continue
            count += sum(signature in content for signature in signatures)
    return count


def peak_bytes(pid):
    return 1024 * int(re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1])


def signatures_of(module):
    return [np.ascontiguousarray(p.detach().numpy()).tobytes()[:256] for p in module.parameters() if p.ndim > 1]


def test_there_is_one_copy_of_the_parameters(tmp_path):
    config = tiny_config(**LARGE)
    module = hf_model(config, seed=1)
    size = sum(p.numel() * p.element_size() for p in module.parameters())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    with slipstream.launch(
        write_config(tmp_path / "model", config), engine=OPTIONS, run_dir=tmp_path / "run"
    ) as bridge:
        update_weights(bridge, module)
        assert by_engine(bridge) == by_transformers(module)
        pid = bridge.status().engines[0].info.pid
        signatures = signatures_of(module)
        assert copies_elsewhere(pid, signatures) >= len(signatures), (
            "after a sync the engine has a copy, and it is found"
        )

        shared = share_weights(bridge, module)
        learn(module, optimizer, shared)
        assert by_engine(bridge) == by_transformers(module)
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # reset the peak
        resident = peak_bytes(pid)
        for _ in range(3):
            learn(module, optimizer, shared)
            assert by_engine(bridge) == by_transformers(module)
        assert peak_bytes(pid) < resident + size / 2, "an update made a copy for a moment"

        signatures = signatures_of(module)
        assert copies_elsewhere(pid, signatures) == 0
        mapped = {p: [facts for *_, name, facts in smaps(p) if is_shared(name)] for p in (os.getpid(), pid)}
        for facts in mapped.values():
            assert sum(f["Rss"] for f in facts) >= size, "all of the parameters, as this process sees them"
        together = sum(f["Pss"] for facts in mapped.values() for f in facts)
        assert size <= together < 1.05 * size, "and in both processes together they are there once"


def test_a_module_on_the_meta_device_is_loaded_into_the_memory_itself(tmp_path):
    config = variant("llama-tied")
    module = hf_model(config, seed=1)
    module.save_pretrained(tmp_path)
    expected = by_transformers(module)
    for parameter in module.parameters():  # as accelerate's init_empty_weights leaves it: buffers have values
        torch.utils.swap_tensors(parameter, torch.nn.Parameter(parameter.detach().to("meta")))
    with slipstream.inprocess(tmp_path, engine=OPTIONS) as bridge:
        shared = share_weights(bridge, module, tmp_path)
        assert module.lm_head.weight is module.model.embed_tokens.weight, "tied, as before"
        assert by_transformers(module) == by_engine(bridge) == expected
        learn(module, torch.optim.AdamW(module.parameters(), lr=0.05), shared)
        assert by_engine(bridge) == by_transformers(module) != expected


def test_the_example_runs(monkeypatch, capsys):
    """In this process, which has imported torch and transformers already. Its engine is another one."""
    example = Path(__file__).parents[2] / "examples" / "torch_trainer.py"
    monkeypatch.setattr(sys, "argv", [str(example), "--steps", "3"])
    runpy.run_path(str(example), run_name="__main__")
    assert "engine and module agree: True" in capsys.readouterr().out
