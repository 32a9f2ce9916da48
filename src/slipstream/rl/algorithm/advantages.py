"""Advantages: how much better a completion or a token was than its baseline.

For a prompt with a group of G completions and rewards r_1 … r_G:

    group           A_i = (r_i − mean(r)) / (std(r) + ε)          GRPO, Shao et al. 2024, arXiv:2402.03300
    centered        A_i = r_i − mean(r)                           Dr. GRPO, Liu et al. 2025, arXiv:2503.20783
    leave_one_out   A_i = r_i − mean(r_j for j ≠ i)               RLOO, Ahmadian et al. 2024, arXiv:2402.14740

Per token, with the reward at the last token of a completion and a KL penalty at every token:

    r_t = [t is last] r − β log(π(o_t) / π_ref(o_t))

    batch           A_t = Σ_{s ≥ t} r_s, normalized over the batch         REINFORCE++, Hu 2025, arXiv:2501.03262
    gae             δ_t = r_t + γ V_{t+1} − V_t,  A_t = δ_t + γ λ A_{t+1}  Schulman et al. 2015, arXiv:1506.02438

DAPO (Yu et al. 2025, arXiv:2503.14476) samples other prompts in place of those whose rewards are all equal (`informative`,
`chosen`), and adds a penalty for completions of length |y| close to the maximum length L, with an interval of L_c tokens:

    overlong        0 up to L − L_c tokens, then ((L − L_c) − |y|) / L_c, down to −1 at L

Everything is NumPy on the host: rewards come from the host, and they are few."""

from __future__ import annotations

import numpy as np

from slipstream.errors import ConfigError

EPSILON = 1e-6


def group(rewards: np.ndarray) -> np.ndarray:
    """GRPO, from rewards [prompts, G]; zero for a group with equal rewards.

    Dividing by the group's standard deviation gives a rare success among failures a large weight. With a constant divisor,
    learning stalls while successes are rare."""
    deviation = _groups(rewards).std(axis=1, keepdims=True)
    return ((rewards - rewards.mean(axis=1, keepdims=True)) / (deviation + EPSILON)).astype(np.float32)


def centered(rewards: np.ndarray) -> np.ndarray:
    """Dr. GRPO, from rewards [prompts, G]: without the division, which favors prompts that are too easy or too hard."""
    return (_groups(rewards) - rewards.mean(axis=1, keepdims=True)).astype(np.float32)


def leave_one_out(rewards: np.ndarray) -> np.ndarray:
    """RLOO, from rewards [prompts, G]: unbiased, since the baseline does not depend on the completion."""
    size = _groups(rewards).shape[1]
    others = (rewards.sum(axis=1, keepdims=True) - rewards) / (size - 1)
    return (rewards - others).astype(np.float32)


def informative(rewards: np.ndarray) -> np.ndarray:
    """DAPO's dynamic sampling, [prompts, G] of booleans: False for all samples of a group with equal rewards."""
    differs = _groups(rewards).max(axis=1, keepdims=True) > rewards.min(axis=1, keepdims=True)
    return np.broadcast_to(differs, rewards.shape)


def chosen(informative: np.ndarray, count: int) -> np.ndarray:
    """Indices of the `count` groups to train on, ascending: the first informative ones, filled up with the first of the others
    to keep the batch size."""
    return np.sort(np.argsort(~informative, kind="stable")[:count])


def overlong(lengths: np.ndarray, max_length: int, interval: int) -> np.ndarray:
    """DAPO's soft overlong punishment, 0 to −1, over the last `interval` tokens before `max_length`."""
    return (np.minimum(0, (max_length - interval) - lengths) / interval).astype(np.float32)


def token_rewards(rewards: np.ndarray, mask: np.ndarray, penalty: np.ndarray | None = None) -> np.ndarray:
    """r_t [B, T − 1] from rewards [B]: the reward at the last sampled token, minus `penalty` at every sampled token."""
    rewards = np.asarray(rewards, np.float32)
    if rewards.shape != mask.shape[:1]:
        raise ConfigError(f"expected one reward for each of {mask.shape[0]} rows, got {rewards.shape}")
    per_token = np.zeros(mask.shape, np.float32)
    if penalty is not None:
        per_token -= penalty * (mask > 0)
    last = mask.shape[1] - 1 - np.argmax(mask[:, ::-1] > 0, axis=1)
    has_tokens = (mask > 0).any(axis=1)
    per_token[np.flatnonzero(has_tokens), last[has_tokens]] += rewards[has_tokens]
    return per_token


def batch(rewards: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """REINFORCE++, from token rewards [B, T − 1]: the reward to go, normalized over all tokens of the batch."""
    reward_to_go = np.cumsum((rewards * mask)[:, ::-1], axis=1)[:, ::-1]
    return normalize(reward_to_go, mask)


def gae(
    rewards: np.ndarray, values: np.ndarray, mask: np.ndarray, gamma: float = 1.0, lam: float = 0.95
) -> tuple[np.ndarray, np.ndarray]:
    """Generalized advantages and the returns A_t + V_t that the critic is fitted to, both [B, T − 1].

    Time advances at sampled tokens only: tokens of an environment in between are skipped. The value after the last is 0."""
    advantages = np.zeros(mask.shape, np.float32)
    next_value, next_advantage = np.zeros(len(mask), np.float32), np.zeros(len(mask), np.float32)
    for t in reversed(range(mask.shape[1])):
        sampled = mask[:, t] > 0
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * next_advantage
        advantages[:, t] = np.where(sampled, advantage, 0)
        next_value = np.where(sampled, values[:, t], next_value)
        next_advantage = np.where(sampled, advantage, next_advantage)
    return advantages, ((advantages + values) * (mask > 0)).astype(np.float32)


def normalize(advantages: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Normalize to mean 0 and standard deviation 1 over the tokens with mask 1; 0 elsewhere."""
    chosen = advantages[mask > 0]
    if not chosen.size:
        return np.zeros(mask.shape, np.float32)
    return (((advantages - chosen.mean()) / (chosen.std() + EPSILON)) * (mask > 0)).astype(np.float32)


def _groups(rewards: np.ndarray) -> np.ndarray:
    if rewards.ndim != 2 or rewards.shape[1] < 2:
        raise ConfigError(f"rewards must be [prompts, samples] with at least 2 samples of each, got {rewards.shape}")
    return rewards
