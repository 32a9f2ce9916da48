"""The size of a short training run, which tests share: what one has compiled, the next finds in JAX's caches."""

from slipstream.config import EmbeddedConfig
from slipstream.rl.config import AlgorithmConfig, TaskConfig, TrainConfig

ENGINE = EmbeddedConfig(max_num_seqs=16, max_model_len=16)
SHORT = TrainConfig(
    steps=1,
    warmup_steps=1,
    eval_every=10,
    eval_prompts=4,
    save_every=0,
    seed=3,
    engines=0,
    task=TaskConfig(digits=2),
    algorithm=AlgorithmConfig(prompts=4, group=4, max_tokens=4),
    engine=ENGINE,
)
"""For tests that do not learn. They say how many steps they take."""
