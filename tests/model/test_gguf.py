"""GGUF to HF directory: bit-exact weights, the tokenizer, and damaged files."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from slipstream.errors import ConfigError
from slipstream.model.checkpoints import hf_weights
from slipstream.model.checkpoints.gguf.convert import convert
from slipstream.model.checkpoints.gguf.file import GgufFile
from slipstream.model.checkpoints.hf_config import read_config
from slipstream.model.config import LinearRopeScaling, ModelConfig
from slipstream.model.transformer.decoder import forward
from slipstream.model.tree import unflatten
from tests.model.tiny_gguf import TEMPLATE, gguf_config, write_gguf

FILES = {
    "README.md",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}
TEXTS = ("the cat's hat", "  12 and 345\n\n", "<|im_start|>the end<|im_end|>", "naïve 東京 🙂\t", "")


@pytest.mark.parametrize(
    ("config", "types"),
    [
        (gguf_config(), {}),
        (
            gguf_config(tie_word_embeddings=True),
            {"token_embd.weight": "Q8_0", "attn_q.weight": "Q4_1", "attn_k.weight": "Q8_0"},
        ),
        (gguf_config(rope_scaling=LinearRopeScaling(4.0), rope_theta=1e5, rms_norm_eps=1e-5), {"ffn_up.weight": "F16"}),
        (gguf_config("qwen2", tie_word_embeddings=True), {"attn_v.weight": "BF16"}),
        (gguf_config("qwen3", head_dim=16), {"ffn_down.weight": "Q5_0"}),
    ],
    ids=["llama", "llama-tied-quantised", "llama-linear-rope", "qwen2", "qwen3"],
)
def test_config_and_weights_come_out_as_they_went_in(
    config: ModelConfig, types: dict[str, str], tmp_path: Path
) -> None:
    written = write_gguf(tmp_path / "m.gguf", config, types=types)
    steps: list[tuple[int, int]] = []
    found = convert(written.path, tmp_path / "out", progress=lambda *step: steps.append(step), card="about\n")
    assert found == config == read_config(tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == FILES
    arrays = hf_weights.read_arrays(tmp_path / "out", config)
    assert arrays.keys() == written.params.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, written.params[name], err_msg=name)
    assert steps == [(i + 1, len(arrays)) for i in range(len(arrays))]


def test_logits_equal_those_of_transformers_and_of_our_decoder(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    written = write_gguf(tmp_path / "m.gguf", types={"attn_k.weight": "Q8_0"})
    convert(written.path, tmp_path / "out")
    tokens = np.arange(3, 24)[None]
    original = forward(
        unflatten({n: jnp.asarray(a) for n, a in written.params.items()}), written.config, jnp.asarray(tokens)
    )
    ours = forward(hf_weights.load(tmp_path / "out"), written.config, jnp.asarray(tokens))
    np.testing.assert_array_equal(np.asarray(ours), np.asarray(original))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        theirs = model(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(np.asarray(ours), theirs, atol=1e-4)
    assert model.generation_config.eos_token_id == 2


def test_bfloat16(tmp_path: Path) -> None:
    written = write_gguf(tmp_path / "m.gguf")
    convert(written.path, tmp_path / "out", dtype="bfloat16")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    for name, array in hf_weights.read_arrays(tmp_path / "out", written.config).items():
        np.testing.assert_array_equal(array, written.params[name].astype(jnp.bfloat16), err_msg=name)


# --- tokenizer ---


def test_the_tokenizer_is_the_one_that_was_written(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    written = write_gguf(tmp_path / "m.gguf")
    convert(written.path, tmp_path / "out")
    ours, theirs = (
        Tokenizer.from_file(str(tmp_path / "out/tokenizer.json")),
        AutoTokenizer.from_pretrained(tmp_path / "out"),
    )
    for text in TEXTS:
        ids = written.tokenizer.encode(text).ids
        assert ours.encode(text).ids == theirs.encode(text) == ids
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids) == text
    assert len(ours.encode("123").ids) == 3, "digits stand alone"
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (1, 2, 0)
    assert theirs.chat_template == TEMPLATE
    chat = theirs.apply_chat_template([{"role": "user", "content": "the cat"}], tokenize=False)
    assert chat == "<|im_start|>the cat<|im_end|>"
    assert ours.get_vocab_size() < written.config.vocab_size, "unused ids are no tokens"


def test_a_beginning_of_sequence_token_is_put_in_front_where_the_file_says_so(tmp_path: Path) -> None:
    written = write_gguf(tmp_path / "m.gguf", fields={"tokenizer.ggml.add_bos_token": True})
    convert(written.path, tmp_path / "out")
    tokenizer = Tokenizer.from_file(str(tmp_path / "out/tokenizer.json"))
    plain = written.tokenizer.encode("the cat").ids
    assert tokenizer.encode("the cat").ids == [1, *plain]
    assert tokenizer.encode("the cat", add_special_tokens=False).ids == plain


def test_two_tokens_that_end_a_text(tmp_path: Path) -> None:
    written = write_gguf(tmp_path / "m.gguf", fields={"tokenizer.ggml.eot_token_id": 0})
    assert convert(written.path, tmp_path / "out").eos_token_ids == (2, 0)
    assert json.loads((tmp_path / "out/generation_config.json").read_text())["eos_token_id"] == [2, 0]


@pytest.mark.parametrize("pre", ["gpt-2", "qwen2"])
def test_other_ways_to_cut_text_round_trip(pre: str, tmp_path: Path) -> None:
    convert(write_gguf(tmp_path / "m.gguf", pre=pre).path, tmp_path / "out")
    tokenizer = Tokenizer.from_file(str(tmp_path / "out/tokenizer.json"))
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


# --- what does not fit ---


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"without": ("blk.1.ffn_up.weight",)}, "tensor blk.1.ffn_up.weight is missing"),
        ({"without": ("token_embd.weight",)}, "tensor token_embd.weight is missing"),
        ({"without": ("llama.block_count",)}, "field llama.block_count is missing"),
        ({"without": ("tokenizer.ggml.merges",)}, "field tokenizer.ggml.merges is missing"),
        ({"architecture": "mamba"}, "general.architecture is 'mamba'"),
        ({"extra": {"rope_freqs.weight": np.ones(4, np.float32)}}, "rope_freqs.weight"),
        ({"extra": {"blk.0.attn_q.bias": np.ones(32, np.float32)}}, "blk.0.attn_q.bias"),
        ({"fields": {"llama.block_count": 2**31 - 1}}, "llama.block_count"),
        ({"fields": {"llama.block_count": "two"}}, "llama.block_count is 'two'"),
        ({"fields": {"llama.embedding_length": 64}}, "rope.dimension_count"),
        ({"fields": {"llama.feed_forward_length": 48}}, "ffn_gate.weight is (64, 32), expected (48, 32)"),
        ({"fields": {"llama.attention.head_count": 3}}, "dimension_count"),
        ({"fields": {"llama.attention.head_count_kv": [2, 2]}}, "head_count_kv is [2, 2]"),
        ({"fields": {"llama.expert_count": 8}}, "llama.expert_count"),
        ({"fields": {"llama.rope.scaling.type": "yarn"}}, "llama.rope.scaling.type is 'yarn'"),
        ({"fields": {"split.count": 3}}, "one of 3 parts"),
        ({"fields": {"general.alignment": 48}}, "Invalid alignment"),
        ({"fields": {"tokenizer.ggml.model": "llama"}}, "tokenizer.ggml.model is 'llama'"),
        ({"fields": {"tokenizer.ggml.tokens": ["a", "b"]}}, "tokenizer.ggml.tokens"),
        ({"fields": {"tokenizer.ggml.merges": ["a zzz"]}}, "'a zzz'"),
        ({"fields": {"tokenizer.ggml.eos_token_id": 320}}, "tokenizer.ggml.eos_token_id is 320"),
        ({"pre": "tekken"}, "tokenizer.ggml.pre is 'tekken'"),
    ],
)
def test_a_bad_file_is_refused_by_file_and_field(how: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", **how).path
    with pytest.raises(ConfigError) as caught:
        convert(path, tmp_path / "out")
    assert str(path) in str(caught.value) and words in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"], "nothing half made is left"


def test_values_that_are_not_finite(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf").path
    entry, data = GgufFile(path).tensors["blk.0.attn_q.weight"], bytearray(path.read_bytes())
    data[entry.data_offset : entry.data_offset + 4] = np.float32(np.nan).tobytes()
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"blk.0.attn_q.weight holds values that are not finite"):
        convert(path, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]


def test_what_is_no_gguf_file(tmp_path: Path) -> None:
    good = write_gguf(tmp_path / "m.gguf").path.read_bytes()
    for contents, words in (
        (b"", "cannot be read"),
        (b"PK\x03\x04 a zip file", "magic invalid"),
        (good[:6], "cut short"),
        (good[:20], "cut short"),
        (good[:400], "cut short"),
        (good[:-100], r"tensor \S+: .* cut short"),
        (good[:4] + b"\x01\0\0\0" + good[8:], "version 1"),
    ):
        (tmp_path / "bad.gguf").write_bytes(contents)
        with pytest.raises(ConfigError, match=words) as caught:
            convert(tmp_path / "bad.gguf", tmp_path / "out")
        assert "bad.gguf" in str(caught.value)
    for path in (tmp_path / "absent.gguf", tmp_path):
        with pytest.raises(ConfigError, match=str(path)):
            convert(path, tmp_path / "out")


def test_a_big_endian_file_is_refused(tmp_path: Path) -> None:
    """Quantized blocks of the other byte order would be dequantized to garbage."""
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "llama", endianess=gguf.GGUFEndian.BIG)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ConfigError, match="big-endian"):
        convert(tmp_path / "m.gguf", tmp_path / "out")


def test_where_and_in_what_dtype_it_may_be_written(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf").path
    (tmp_path / "empty").mkdir()
    convert(path, tmp_path / "empty")
    before = (tmp_path / "empty/config.json").read_bytes()
    for directory in ("empty", "m.gguf"):
        with pytest.raises(ConfigError, match="not an empty directory"):
            convert(path, tmp_path / directory)
    with pytest.raises(ConfigError, match="int4"):
        convert(path, tmp_path / "out", dtype="int4")
    assert (tmp_path / "empty/config.json").read_bytes() == before


def test_a_conversion_that_breaks_off_leaves_nothing(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf").path

    def stop(done: int, total: int) -> None:
        if done == total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(path, tmp_path / "out", progress=stop)
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, int]:
    """A file with one layer, and the offset of its data."""
    config = replace(gguf_config(tie_word_embeddings=True), num_layers=1)
    types = {"embd.weight": "Q8_0", "attn_v.weight": "Q4_1"}
    path = write_gguf(tmp_path_factory.mktemp("small") / "m.gguf", config, types=types).path
    return path.read_bytes(), min(entry.data_offset for entry in GgufFile(path).tensors.values())


@settings(max_examples=300)
@given(data=st.data())
def test_any_damage_is_an_error_or_does_no_harm(small: tuple[bytes, int], data: st.DataObject) -> None:
    good, header = small
    bad = bytearray(good)
    for _ in range(data.draw(st.integers(0, 3), label="flips")):
        # Many of the flips are near the beginning, where counts and sizes are.
        end = data.draw(st.sampled_from((512, header, len(bad))), label="within")
        bad[data.draw(st.integers(0, end - 1), label="byte")] ^= 1 << data.draw(st.integers(0, 7), label="bit")
    if data.draw(st.booleans(), label="cut"):
        del bad[data.draw(st.integers(0, len(bad)), label="at") :]
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "m.gguf")
        path.write_bytes(bad)
        try:
            convert(path, Path(directory, "out"))
        except ConfigError as error:
            assert str(path) in str(error)
            assert not Path(directory, "out").exists()
