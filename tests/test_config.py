import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from slipstream.config import EngineConfig, GatewayConfig, TrainConfig, load
from slipstream.errors import ConfigError


def test_defaults_file_and_overrides(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('steps = 7\n[grpo]\ngroup = 4\nlearning_rate = 1\n[task]\nname = "sort"\n')
    config = load(TrainConfig, path, ["grpo.group=16", "task.name=add", "seed=3"])
    assert (config.steps, config.grpo.group, config.grpo.learning_rate, config.task.name, config.seed) == (
        7,
        16,
        1.0,
        "add",
        3,
    )
    assert load(TrainConfig) == TrainConfig()


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("grpo.grop=4", "unknown setting 'grpo.grop'; did you mean 'group'"),
        ("xyzzy=1", "unknown setting 'xyzzy'; known keys"),
        ("steps", "not of the form"),
        ("steps=many", "steps must be of type int, got 'many'"),
        ("steps=true", "steps must be of type int"),
        ("steps=0", "steps must be at least 1"),
        ("engine.memory_share=1.5", "memory_share is a share of a device's memory, at most 1; got 1.5"),
        ("grpo=5", "grpo is a section"),
        ("seed.x=5", "seed must be of type int"),
        ("grpo.clip=1.5", "clip must be in"),
        ("engine.dtype=float8", "engine.dtype must be one of 'float32', 'bfloat16'"),
    ],
)
def test_mistakes_are_named(override, said):
    with pytest.raises(ConfigError, match=said.replace(".", r"\.")):
        load(TrainConfig, None, [override])


def test_an_override_below_a_value_is_refused(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("seed = 1\n")
    with pytest.raises(ConfigError, match="'seed' is a value"):
        load(TrainConfig, path, ["seed.x=5"])


def test_files_that_are_missing_or_broken(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        load(TrainConfig, tmp_path / "no.toml")
    (tmp_path / "bad.toml").write_text("steps = = 3")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load(TrainConfig, tmp_path / "bad.toml")


def test_only_loopback():
    for host in ("0.0.0.0", "10.0.0.1", "example.org", ""):
        with pytest.raises(ConfigError, match="loopback"):
            GatewayConfig(host=host)
    with pytest.raises(ConfigError, match="tp must be at least 1"):
        EngineConfig(tp=0)


@given(st.text(max_size=30))
@example("seed=3")
@example(" seed =3")
@example("seed=")
@example("seed=[")
@example("=3")
@example("grpo..group=3")
def test_any_override_gives_a_config_or_a_config_error(text):
    try:
        found = load(TrainConfig, None, [text])
    except Exception as error:
        found = error
    assert isinstance(found, (TrainConfig, ConfigError) if "=" in text else ConfigError), found
