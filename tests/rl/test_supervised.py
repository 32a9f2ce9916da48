import jax.numpy as jnp
import numpy as np

from slipstream.model.checkpoints.sample_model import sample_params, write_sample_config
from slipstream.rl.config import TaskConfig
from slipstream.rl.data.tasks import task_named
from slipstream.rl.data.tokens import Codec
from slipstream.rl.trainer import supervised


def test_examples_mask_the_answer_and_its_end():
    tokens, mask = supervised.make_examples([(1, 7, 8), (1, 7)], [(5, 6), (5,)], eos_id=2)
    assert tokens.tolist() == [[1, 7, 8, 5, 6, 2, 0, 0], [1, 7, 5, 2, 0, 0, 0, 0]]
    assert mask.tolist() == [[0, 0, 1, 1, 1, 0, 0], [0, 1, 1, 0, 0, 0, 0]]


def test_cross_entropy_is_the_mean_over_answer_tokens():
    logprobs, mask = np.array([[-1.0, -2.0, -9.0], [-9.0, -6.0, -9.0]]), np.array([[1, 1, 0], [0, 1, 0]])
    assert supervised.cross_entropy(jnp.asarray(logprobs), jnp.asarray(mask)) == 3.0


def test_warm_up_lowers_the_loss_reproducibly(tmp_path):
    config, codec = write_sample_config(tmp_path), Codec(tmp_path)
    task = task_named(TaskConfig(digits=2))

    def losses(seed):
        params = sample_params(config, seed)
        return [loss for _, loss in supervised.warm_up(params, config, task, codec, steps=12, seed=(seed, 0))]

    first = losses(0)
    assert len(first) == 12 and first[-1] < 0.5 * first[0]
    assert losses(0) == first != losses(1)
