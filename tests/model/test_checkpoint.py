"""Checkpoints: loading, saving for `transformers`, and errors that name what does not match."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from slipstream.errors import ConfigError, MappingError
from slipstream.model.checkpoints import hf_weights
from slipstream.model.checkpoints.hf_config import read_config
from slipstream.model.transformer import decoder
from tests.tiny import VARIANTS, hf_directory, random_params, tiny_config


def change(directory: Path, **tensors: np.ndarray | None) -> None:
    """Rewrite stored tensors: a value replaces or adds one, None removes it. Dots in names are written `__`."""
    stored = load_file(directory / "model.safetensors")
    for key, value in tensors.items():
        name = key.replace("__", ".")
        if value is None:
            del stored[name]
        else:
            stored[name] = value
    save_file(stored, directory / "model.safetensors")


@pytest.mark.parametrize("name", VARIANTS)
def test_load_save_load_is_exact_and_transformers_reads_it(name: str, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    original = hf_directory(tmp_path / "hf", name)
    config = read_config(original)
    params = hf_weights.load(original)
    hf_weights.save(tmp_path / "ours", params, config)
    assert read_config(tmp_path / "ours") == config
    again = hf_weights.flatten(hf_weights.load(tmp_path / "ours"))
    stored = load_file(original / "model.safetensors")
    assert set(again) == set(stored)
    for tensor, array in again.items():
        assert array.dtype == stored[tensor].dtype
        np.testing.assert_array_equal(array, stored[tensor])

    tokens = np.arange(20)[None] % config.vocab_size
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()(torch.from_numpy(tokens)).logits
    ours = jax.jit(decoder.forward, static_argnums=1)(params, config, tokens)
    np.testing.assert_allclose(ours, theirs.numpy(), atol=2e-4)


def test_save_leaves_no_temporary_files(tmp_path: Path) -> None:
    config = tiny_config()
    hf_weights.save(tmp_path, random_params(config), config)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_save_refuses_parameters_of_another_model(tmp_path: Path) -> None:
    params = random_params(tiny_config("qwen2"))
    with pytest.raises(MappingError, match=r"q_proj\.bias"):
        hf_weights.save(tmp_path, params, tiny_config("llama"))
    assert list(tmp_path.iterdir()) == []


def test_bfloat16_survives_a_round_trip(tmp_path: Path) -> None:
    config = tiny_config()
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), random_params(config))
    hf_weights.save(tmp_path, params, config)
    again = hf_weights.load(tmp_path)
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: a.dtype == b.dtype and bool((a == b).all()), params, again)))
    wide = hf_weights.load(tmp_path, dtype=jnp.float32)
    assert all(a.dtype == jnp.float32 for a in jax.tree.leaves(wide))


def test_a_transposed_leaf_is_saved_as_it_reads(tmp_path: Path) -> None:
    config = tiny_config(tie_word_embeddings=True)
    params = hf_weights.flatten(random_params(config))
    name = "model.embed_tokens.weight"
    params[name] = np.ascontiguousarray(np.asarray(params[name]).T).T
    hf_weights.save(tmp_path, hf_weights.unflatten(params), config)
    np.testing.assert_array_equal(hf_weights.flatten(hf_weights.load(tmp_path))[name], params[name])


def test_sharded_checkpoint(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    whole = hf_directory(tmp_path / "whole", "qwen2")
    model = AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="10KB")
    assert (tmp_path / "sharded" / "model.safetensors.index.json").exists()
    assert hf_weights.has_weights(tmp_path / "sharded")
    a, b = hf_weights.load(whole), hf_weights.load(tmp_path / "sharded")
    assert all(jax.tree.leaves(jax.tree.map(lambda x, y: bool((x == y).all()), a, b)))

    next((tmp_path / "sharded").glob("model-*.safetensors")).unlink()
    with pytest.raises(ConfigError, match="index lists it"):
        hf_weights.load(tmp_path / "sharded")


def test_saving_over_a_sharded_checkpoint_replaces_it(tmp_path: Path) -> None:
    config = tiny_config()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "gone.safetensors"}}))
    hf_weights.save(tmp_path, random_params(config), config)
    hf_weights.load(tmp_path)


def test_has_weights(tmp_path: Path) -> None:
    assert not hf_weights.has_weights(tmp_path)
    config = tiny_config()
    hf_weights.save(tmp_path, random_params(config), config)
    assert hf_weights.has_weights(tmp_path)


def test_missing_extra_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    directory = hf_directory(tmp_path, "llama")
    change(
        directory,
        model__norm__weight=None,
        model__surprise=np.zeros(3, np.float32),
        lm_head__weight=np.zeros((5, 32), np.float32),
    )
    with pytest.raises(MappingError) as caught:
        hf_weights.load(directory)
    for text in ("missing: model.norm.weight", "model.surprise", "lm_head.weight is (5, 32), expected (96, 32)"):
        assert text in str(caught.value)


def test_rotary_buffers_of_old_checkpoints_are_ignored(tmp_path: Path) -> None:
    directory = hf_directory(tmp_path, "llama")
    change(directory, model__layers__0__self_attn__rotary_emb__inv_freq=np.ones(4, np.float32))
    hf_weights.load(directory)


def test_a_tied_checkpoint_may_store_its_head_if_it_is_the_embedding(tmp_path: Path) -> None:
    directory = hf_directory(tmp_path, "llama-tied")
    embedding = load_file(directory / "model.safetensors")["model.embed_tokens.weight"]
    change(directory, lm_head__weight=embedding)
    assert "lm_head" not in hf_weights.load(directory)
    change(directory, lm_head__weight=embedding + 1)
    with pytest.raises(MappingError, match="tie_word_embeddings"):
        hf_weights.load(directory)


def test_an_unreadable_file_and_an_empty_directory_say_so(tmp_path: Path) -> None:
    config = tiny_config()
    with pytest.raises(ConfigError, match="holds no weights"):
        hf_weights.load(tmp_path, config)
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors at all")
    with pytest.raises(ConfigError, match="not a readable safetensors file"):
        hf_weights.load(tmp_path, config)


def test_a_tensor_of_a_type_that_numpy_lacks_is_named(tmp_path: Path) -> None:
    config, file = tiny_config(), tmp_path / "model.safetensors"
    header = json.dumps({"lm_head.weight": {"dtype": "F8_E8M0", "shape": [2], "data_offsets": [0, 2]}}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + b"ab")
    with pytest.raises(ConfigError, match=r"model\.safetensors: the tensor lm_head\.weight cannot be read"):
        hf_weights.read_arrays(tmp_path, config)


def test_flatten_and_unflatten_are_inverse() -> None:
    tree = {"model": {"layers": [{"w": 1}, {"w": 2}], "norm": 3}, "lm_head": 4}
    flat = {"model.layers.0.w": 1, "model.layers.1.w": 2, "model.norm": 3, "lm_head": 4}
    assert hf_weights.flatten(tree) == flat
    assert hf_weights.unflatten(flat) == tree


def test_unflatten_refuses_gaps_and_names_below_a_tensor() -> None:
    with pytest.raises(MappingError, match="lacks number 1"):
        hf_weights.unflatten({"layers.0.w": 1, "layers.2.w": 2})
    with pytest.raises(MappingError, match="is a tensor"):
        hf_weights.unflatten({"norm": 1, "norm.weight": 2})
