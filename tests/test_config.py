import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from slipstream.config import EngineConfig, GatewayConfig, load
from slipstream.errors import ConfigError
from slipstream.rl.config import Recipe, TrainConfig


def test_defaults_file_and_overrides(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        'steps = 7\n[algorithm]\ngroup = 4\n[algorithm.optimiser]\nlearning_rate = 1\n[task]\nname = "sort"\n'
    )
    config = load(TrainConfig, path, ["algorithm.group=16", "task.name=add", "seed=3"])
    assert (
        config.steps,
        config.algorithm.group,
        config.algorithm.optimiser.learning_rate,
        config.task.name,
        config.seed,
    ) == (
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
        ("algorithm.grop=4", "unknown setting 'algorithm.grop'; did you mean 'group'"),
        ("xyzzy=1", "unknown setting 'xyzzy'; known keys"),
        ("steps", "not of the form"),
        ("steps=many", "steps must be of type int, got 'many'"),
        ("steps=true", "steps must be of type int"),
        ("steps=0", "steps must be at least 1"),
        ("engine.memory_share=1.5", "memory_share is a share of a device's memory, at most 1; got 1.5"),
        ("algorithm=5", "algorithm is a section"),
        ("seed.x=5", "seed must be of type int"),
        ("algorithm.clip=1.5", "clip must be in"),
        ("algorithm.clip_high=0", "clip_high must be positive"),
        ("algorithm.kind=grop", "algorithm.kind must be one of 'grpo', 'dr_grpo', 'dapo', 'ppo', "),
        ("algorithm.advantage=gea", "algorithm.advantage must be one of 'group'"),
        ("algorithm.optimiser.lr=1", "unknown setting 'algorithm.optimiser.lr'; known keys"),
        ("algorithm.correction.kind=is", "algorithm.correction.kind must be one of 'none', 'tis'"),
        ("algorithm.correction.cap=0.5", "cap must be at least 1"),
        ("algorithm.value.lam=1.5", "value.lam must be at most 1"),
        ("algorithm.group=1", "'grpo' compares the samples of a prompt"),
        ("algorithm.micro_batches=3", "prompts × group = 256 completions, which micro_batches 3 does not divide"),
        ("algorithm.filter_groups=yes", "algorithm.filter_groups must be of type bool"),
        ("algorithm.resample=2", "in place of groups that are left out; 0 or more, with filter_groups"),
        ("algorithm.overlong_tokens=9", "they are the last of max_tokens = 8"),
        ("engine.dtype=float8", "engine.dtype must be one of 'float32', 'bfloat16'"),
    ],
)
def test_mistakes_are_named(override, said):
    with pytest.raises(ConfigError, match=said.replace(".", r"\.")):
        load(TrainConfig, None, [override])


def test_a_kind_brings_its_papers_choices_and_settings_win_over_them():
    def recipe(*overrides):
        return load(TrainConfig, None, [f"algorithm.{o}" for o in overrides]).algorithm.recipe

    assert recipe() == Recipe("group", "sequence", 0.2, False, 0)
    assert recipe("kind=dr_grpo", "clip=0.1") == Recipe("centred", "constant", 0.1, False, 0)
    assert recipe("kind=dapo") == Recipe("group", "token", 0.28, True, 3)
    assert recipe("kind=dapo", "resample=0").resample == 0
    assert recipe("filter_groups=true", "resample=1") == Recipe("group", "sequence", 0.2, True, 1)
    assert recipe("kind=ppo", "group=1") == Recipe("gae", "token", 0.2, False, 0)
    assert recipe("kind=reinforce++") == Recipe("batch", "token", 0.2, False, 0)
    changed = recipe(
        "kind=dapo", "advantage=leave_one_out", "aggregation=sequence", "clip_high=0.4", "filter_groups=false"
    )
    assert changed == Recipe("leave_one_out", "sequence", 0.4, False, 0)


def test_k1_is_for_rewards():
    with pytest.raises(ConfigError, match="gradient of mean zero"):
        load(TrainConfig, None, ["algorithm.kl.weight=0.1", "algorithm.kl.estimator=k1"])
    load(TrainConfig, None, ["algorithm.kind=ppo", "algorithm.kl.weight=0.1", "algorithm.kl.estimator=k1"])


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
@example("algorithm..group=3")
def test_any_override_gives_a_config_or_a_config_error(text):
    try:
        found = load(TrainConfig, None, [text])
    except Exception as error:
        found = error
    assert isinstance(found, (TrainConfig, ConfigError) if "=" in text else ConfigError), found
