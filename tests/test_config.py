import ast
import inspect
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from slipstream.config import (
    EmbeddedConfig,
    EngineConfig,
    GatewayConfig,
    HttpConfig,
    RayConfig,
    RemoteConfig,
    Settings,
    SyncOptions,
    VllmConfig,
    engine_config,
    load,
)
from slipstream.errors import ConfigError
from slipstream.rl import config as rl_config
from slipstream.rl.config import Recipe, TrainConfig


def test_defaults_file_and_overrides(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        'steps = 7\n[algorithm]\ngroup = 4\n[algorithm.optimizer]\nlearning_rate = 1\n[task]\nname = "sort"\n'
    )
    config = load(TrainConfig, path, ["algorithm.group=16", "task.name=add", "seed=3"])
    assert (config.steps, config.algorithm.group, config.task.name, config.seed) == (7, 16, "add", 3)
    assert config.algorithm.optimizer.learning_rate == 1.0
    assert load(TrainConfig) == TrainConfig()


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("algorithm.grop=4", "unknown setting 'algorithm.grop'; did you mean 'group'"),
        ("xyzzy=1", "unknown setting 'xyzzy'; known keys"),
        ("steps", "not of the form"),
        ("steps=many", "steps must be a valid integer, got 'many'"),
        ("steps=true", "steps must be a valid integer, got True"),
        ("steps=1.0", "steps must be a valid integer, got 1.0"),
        ("steps=0", "steps must be greater than 0, got 0"),
        ("model=5", "model must be a valid string, got 5"),
        ("algorithm=5", "algorithm must be a valid dictionary or instance of AlgorithmConfig, got 5"),
        ("seed.x=5", "seed must be a valid integer, got {'x': 5}"),
        ("algorithm.clip=1.5", "algorithm.clip must be less than 1, got 1.5"),
        ("algorithm.clip_high=0", "algorithm.clip_high must be greater than 0, got 0"),
        ("algorithm.temperature=0", "algorithm.temperature must be greater than 0, got 0"),
        ("algorithm.kind=grop", "algorithm.kind must be 'grpo', 'dr_grpo', 'dapo', 'ppo' or 'reinforce++', got 'grop'"),
        ("algorithm.advantage=gea", "algorithm.advantage must be 'group', "),
        ("algorithm.optimizer.lr=1", "unknown setting 'algorithm.optimizer.lr'; known keys"),
        ("algorithm.optimizer.decay=linear", "algorithm.optimizer: decay is 'linear' and decay_steps is 0"),
        ("algorithm.correction.kind=is", "algorithm.correction.kind must be 'none', 'tis'"),
        ("algorithm.correction.cap=0.5", "algorithm.correction.cap must be greater than or equal to 1, got 0.5"),
        ("algorithm.value.lam=1.5", "algorithm.value.lam must be less than or equal to 1, got 1.5"),
        ("algorithm.group=1", "algorithm: group must be at least 2, got 1: 'grpo' compares the samples of a prompt"),
        (
            "algorithm.micro_batches=3",
            "prompts × group = 256 completions per step are not divisible by micro_batches 3",
        ),
        ("algorithm.filter_groups=yes", "algorithm.filter_groups must be a valid boolean, got 'yes'"),
        ("algorithm.resample=2", "algorithm: resample is 2, which needs filter_groups = true"),
        ("algorithm.overlong_tokens=9", "overlong_tokens must be at most max_tokens (8), got 9"),
        ("engine.dtype=float8", "engine.dtype must be 'auto', 'float32' or 'bfloat16', got 'float8'"),
        ("engine.max_num_seq=3", "unknown setting 'engine.max_num_seq'; did you mean 'max_num_seqs'"),
        ("engine.kind=vlm", "engine.kind must be one of 'embedded', 'vllm', 'remote', got 'vlm'"),
        (
            "engine.enforce_eager=true",
            "engine.enforce_eager is a setting of VllmConfig; EmbeddedConfig does not have it",
        ),
        ("engine.listen=10.0.0.1", "engine: listen is '10.0.0.1': beyond loopback"),
        ("engine=vlm", "engine.kind must be one of"),
        ("engine=3", "engine must be a valid dictionary"),
    ],
)
def test_mistakes_are_named(override, said):
    with pytest.raises(ConfigError) as error:
        load(TrainConfig, None, [override])
    assert said in str(error.value)


def test_all_mistakes_are_reported_at_once():
    with pytest.raises(ConfigError, match=r"steps must be .*; seed must be .*; unknown setting 'stesp'"):
        load(TrainConfig, None, ["steps=0", "seed=-1", "stesp=3"])


def test_building_a_model_raises_config_error_and_value_error():
    for error in (ConfigError, ValueError):
        with pytest.raises(error, match="did you mean 'max_num_seqs'"):
            EmbeddedConfig(max_num_seq=4)
    with pytest.raises(ConfigError, match=r"task\.digits must be greater than 0, got 0"):
        TrainConfig(task={"digits": 0})


# --- engines ----------------------------------------------------------------------------------------------------------


def test_kind_chooses_the_backend():
    assert load(EngineConfig) == EmbeddedConfig()
    assert load(EngineConfig, None, ["kind=vllm", "enforce_eager=true"]) == VllmConfig(enforce_eager=True)
    assert load(EngineConfig, None, ["kind=remote", "url=https://host:8000"]) == RemoteConfig(url="https://host:8000")
    assert load(TrainConfig, None, ["engine.kind=vllm"]).engine == VllmConfig()
    assert load(TrainConfig, None, ["engine=vllm"]).engine == VllmConfig()
    with pytest.raises(ConfigError, match="url is required"):
        load(EngineConfig, None, ["kind=remote"])
    with pytest.raises(ConfigError, match="block_size is a setting of EmbeddedConfig; VllmConfig does not have it"):
        load(EngineConfig, None, ["kind=vllm", "block_size=16"])


def test_an_engine_by_its_name():
    assert engine_config(None) == engine_config("embedded") == EmbeddedConfig()
    assert engine_config("vllm") == VllmConfig()
    assert engine_config(VllmConfig(max_num_seqs=3)) == VllmConfig(max_num_seqs=3)
    for wrong in ("remote", "tgi", 3):
        with pytest.raises(ConfigError, match=f"engine must be .* got {wrong!r}"):
            engine_config(wrong)


def test_gpu_memory_utilization_is_a_fraction():
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization must be less than or equal to 1, got 1\.5"):
        VllmConfig(gpu_memory_utilization=1.5)


@pytest.mark.parametrize("cls", [EmbeddedConfig, VllmConfig])
def test_auto_is_the_checkpoints_dtype(cls):
    assert cls().dtype == "auto"
    assert cls(max_num_seqs=3).resolve_dtype("bfloat16") == cls(max_num_seqs=3, dtype="bfloat16")
    assert cls(dtype="float32").resolve_dtype("float16").dtype == "float32"
    unknown = "float16" if cls is EmbeddedConfig else "float64"  # vLLM has float16, too
    with pytest.raises(ConfigError, match=rf'checkpoint is {unknown}.*set dtype="bfloat16"'):
        cls().resolve_dtype(unknown)


def test_engines_in_this_process_are_embedded():
    with pytest.raises(ConfigError, match=r"engines = 0 .* needs engine\.kind = 'embedded', got 'vllm'"):
        load(TrainConfig, None, ["engines=0", "engine.kind=vllm"])


def test_paths_are_taken_as_strings(tmp_path):
    assert HttpConfig(model=tmp_path).model == str(tmp_path)


# --- all models -------------------------------------------------------------------------------------------------------


MODELS = [EmbeddedConfig, VllmConfig, RemoteConfig, GatewayConfig, HttpConfig, RayConfig]
MODELS += [cls for cls in vars(rl_config).values() if isinstance(cls, type) and issubclass(cls, Settings)]


@pytest.mark.parametrize("cls", MODELS)
def test_every_setting_is_documented_and_frozen(cls):
    assert cls.__doc__
    (body,) = (node.body for node in ast.parse(inspect.getsource(cls)).body if isinstance(node, ast.ClassDef))
    fields = [(field, after) for field, after in pairwise([*body, None]) if isinstance(field, ast.AnnAssign)]
    assert not [ast.unparse(field.target) for field, after in fields if not isinstance(after, ast.Expr)]
    if cls not in (Settings, RemoteConfig):
        with pytest.raises(ValueError, match="frozen"):
            setattr(cls(), next(iter(cls.model_fields)), 1)


def test_replace_validates():
    config = EmbeddedConfig(max_num_seqs=4)
    assert config.replace(max_model_len=8) == EmbeddedConfig(max_num_seqs=4, max_model_len=8)
    assert config.replace(max_model_len=8).model_fields_set == {"max_num_seqs", "max_model_len"}
    with pytest.raises(ConfigError, match="max_num_seqs must be greater than 0, got 0"):
        config.replace(max_num_seqs=0)
    with pytest.raises(ConfigError, match="unknown setting 'tp'"):
        config.replace(tp=2)


def test_processes_of_a_trainer():
    assert SyncOptions(process_index=1, process_count=2).process_index == 1
    with pytest.raises(ConfigError, match="process_index must be in"):
        SyncOptions(process_index=2, process_count=2)


# --- training ---------------------------------------------------------------------------------------------------------


def test_a_kind_brings_its_papers_choices_and_settings_win_over_them():
    def recipe(*overrides):
        return load(TrainConfig, None, [f"algorithm.{o}" for o in overrides]).algorithm.recipe

    assert recipe() == Recipe("group", "sequence", 0.2, False, 0)
    assert recipe("kind=dr_grpo", "clip=0.1") == Recipe("centered", "constant", 0.1, False, 0)
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


# --- files and overrides ----------------------------------------------------------------------------------------------


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


@given(st.text(max_size=30))
@example("seed=3")
@example(" seed =3")
@example("seed=")
@example("seed=[")
@example("=3")
@example("algorithm..group=3")
@example("engine.kind=[]")
@example("engine.embedded=1")
def test_any_override_gives_a_config_or_a_config_error(text):
    try:
        found = load(TrainConfig, None, [text])
    except Exception as error:
        found = error
    assert isinstance(found, (TrainConfig, ConfigError) if "=" in text else ConfigError), found
