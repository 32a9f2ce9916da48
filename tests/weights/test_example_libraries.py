"""The examples with models of JAX libraries: logits and greedy tokens of model and engine agree."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def beside_the_examples(monkeypatch):
    """Run in one process, so that the engine's programs are compiled once."""
    monkeypatch.syspath_prepend(str(EXAMPLES))


@pytest.mark.parametrize("name", ["flax_nnx", "equinox_model", "maxtext_style"])
def test_the_engine_matches_the_model_after_every_sync(name, capsys):
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    rows = capsys.readouterr().out.splitlines()
    assert [row.split(":")[0] for row in rows] == ["version 0", "version 1", "version 2"]
    assert all("same tokens: True" in row for row in rows)
    assert "→ 6 7 8 9 10 11 12 13 " in rows[-1], "it has learned to count"
    assert "→ 6 7 8 9 10 11 12 13 " not in rows[0]


@pytest.mark.parametrize("names", [("mlp.gate_proj", "mlp.up_proj"), ("self_attn.k_proj", "self_attn.v_proj")])
def test_a_wrong_mapping_is_noticed(names):
    import counting

    style = runpy.run_path(str(EXAMPLES / "maxtext_style.py"))
    params = style["init"](seed=0)
    tensors = style["MAPPING"].tensors(params)
    one, other = (f"model.layers.1.{name}.weight" for name in names)
    swapped = tensors | {one: tensors[other], other: tensors[one]}
    with counting.engine() as bridge:
        counting.compare(bridge, tensors, lambda ids: style["logits_of"](params, ids))
        with pytest.raises(SystemExit, match="is the mapping right"):
            counting.compare(bridge, swapped, lambda ids: style["logits_of"](params, ids))
