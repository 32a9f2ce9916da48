"""TRL's GRPOTrainer over a bridge, on CPU: a short run of a tiny model."""

import json

import pytest

import slipstream
from slipstream.config import EmbeddedConfig
from tests.tiny import hf_directory

trl = pytest.importorskip("trl")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("trl") / "tiny"
    hf_directory(path, tokenizer=True, vocab_size=64)
    specials = {"eos_token": "<eos>", "bos_token": "<bos>", "pad_token": "<pad>"}
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **specials}))
    return path


def reward(completions, **_):
    """Differs for almost any two completions, so that every step has advantages."""
    return [sum(map(ord, completion)) / 1000 for completion in completions]


def config(path, **more):
    return trl.GRPOConfig(
        output_dir=str(path / "out"),
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=8,
        max_steps=3,
        learning_rate=1e-2,
        temperature=0.8,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        bf16=False,
        use_cpu=True,
        **more,
    )


def test_trl_trains_over_a_bridge(model, tmp_path):
    from datasets import Dataset

    dataset = Dataset.from_dict({"prompt": ["abc", "hello", "x y", "12"] * 4})
    with slipstream.inprocess(model, engine=EmbeddedConfig(max_num_seqs=8, max_model_len=64)) as bridge:
        trainer = slipstream.trl.GRPOTrainer(str(model), reward, config(tmp_path), dataset, bridge=bridge)
        before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        trainer.train()
        logs = [row for row in trainer.state.log_history if "sampling/sampling_logp_difference/max" in row]
        assert len(logs) == 3
        for row in logs:
            assert row["sampling/sampling_logp_difference/max"] < 1e-3
            assert row["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=1e-3)
        assert bridge.version == 3
        trainer.vllm_generation.sync_weights()
        after = {name: parameter.detach() for name, parameter in trainer.model.named_parameters()}
        assert bridge.verify(after).is_same
        assert any((after[name] != before[name]).any() for name in after)


def test_other_ways_to_generate_are_refused(model, tmp_path):
    with pytest.raises(slipstream.errors.ConfigError, match="use_vllm"):
        slipstream.trl.GRPOTrainer(str(model), reward, config(tmp_path, use_vllm=True), None, bridge=None)
