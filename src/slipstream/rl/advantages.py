"""Advantages: how much better a completion, or a token, was than expected.

For a prompt with a group of G completions and rewards r_1 … r_G:

    group           A_i = (r_i − mean(r)) / (std(r) + ε)          GRPO, Shao et al. 2024, arXiv:2402.03300
    centred         A_i = r_i − mean(r)                           Dr. GRPO, Liu et al. 2025, arXiv:2503.20783
    leave_one_out   A_i = r_i − mean(r_j for j ≠ i)               RLOO, Ahmadian et al. 2024, arXiv:2402.14740

Token by token, with the reward at a completion's last token and a KL penalty at each:

    r_t = [t is last] r − β log(π(o_t) / π_ref(o_t))

    batch           A_t = Σ_{s ≥ t} r_s, normalised over the batch         REINFORCE++, Hu 2025, arXiv:2501.03262
    gae             δ_t = r_t + γ V_{t+1} − V_t,  A_t = δ_t + γ λ A_{t+1}  Schulman et al. 2015, arXiv:1506.02438

DAPO (Yu et al. 2025, arXiv:2503.14476) asks other prompts in place of those whose rewards are all equal (`informative`,
`chosen`), and takes from the reward of a completion of length |y| that comes near the longest, L, with L_c tokens to slow down:

    overlong        0 up to L − L_c tokens, then ((L − L_c) − |y|) / L_c, which is −1 at L

All in NumPy, on the host: rewards come from there, and they are few."""

from __future__ import annotations

import numpy as np

from slipstream.errors import ConfigError

EPSILON = 1e-6


def group(rewards: np.ndarray) -> np.ndarray:
    """GRPO, from rewards [prompts, G]. A group with equal rewards teaches nothing: all zero.

    Divided by the group's own deviation: a rare success among failures then weighs as much as it is rare. A constant
    in its place makes learning stall while successes are few."""
    deviation = _groups(rewards).std(axis=1, keepdims=True)
    return ((rewards - rewards.mean(axis=1, keepdims=True)) / (deviation + EPSILON)).astype(np.float32)


def centred(rewards: np.ndarray) -> np.ndarray:
    """Dr. GRPO, from rewards [prompts, G]: dividing by the deviation favours prompts that are too easy or too hard."""
    return (_groups(rewards) - rewards.mean(axis=1, keepdims=True)).astype(np.float32)


def leave_one_out(rewards: np.ndarray) -> np.ndarray:
    """RLOO, from rewards [prompts, G]: a baseline that does not depend on the completion, hence no bias."""
    size = _groups(rewards).shape[1]
    others = (rewards.sum(axis=1, keepdims=True) - rewards) / (size - 1)
    return (rewards - others).astype(np.float32)


def informative(rewards: np.ndarray) -> np.ndarray:
    """DAPO's dynamic sampling, [prompts, G] of booleans: False for all of a group whose rewards are equal."""
    differs = _groups(rewards).max(axis=1, keepdims=True) > rewards.min(axis=1, keepdims=True)
    return np.broadcast_to(differs, rewards.shape)


def chosen(informative: np.ndarray, count: int) -> np.ndarray:
    """Which of the groups, [groups] of booleans, a step learns from, in their order: the first `count` that teach something; if
    they are fewer, the first of the others with them, so that a batch has its size."""
    return np.sort(np.argsort(~informative, kind="stable")[:count])


def overlong(lengths: np.ndarray, longest: int, last: int) -> np.ndarray:
    """DAPO's soft punishment of completions with so many tokens, `longest` at most, for each of the `last` of these."""
    return (np.minimum(0, (longest - last) - lengths) / last).astype(np.float32)


def token_rewards(rewards: np.ndarray, mask: np.ndarray, penalty: np.ndarray | None = None) -> np.ndarray:
    """r_t [B, T − 1] of completions with rewards [B]: the reward at the last sampled token, less `penalty` at each."""
    rewards = np.asarray(rewards, np.float32)
    if rewards.shape != mask.shape[:1]:
        raise ConfigError(f"{mask.shape[0]} rows need as many rewards, got {rewards.shape}")
    found = np.zeros(mask.shape, np.float32)
    if penalty is not None:
        found -= penalty * (mask > 0)
    last = mask.shape[1] - 1 - np.argmax(mask[:, ::-1] > 0, axis=1)
    some = (mask > 0).any(axis=1)
    found[np.flatnonzero(some), last[some]] += rewards[some]
    return found


def batch(rewards: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """REINFORCE++, from token rewards [B, T − 1]: what is still to come, normalised over all tokens of the batch."""
    to_come = np.cumsum((rewards * mask)[:, ::-1], axis=1)[:, ::-1]
    return normalised(to_come, mask)


def gae(
    rewards: np.ndarray, values: np.ndarray, mask: np.ndarray, gamma: float = 1.0, lam: float = 0.95
) -> tuple[np.ndarray, np.ndarray]:
    """Generalised advantages and the returns A_t + V_t that the critic learns, both [B, T − 1].

    Time passes at sampled tokens only: what others wrote in between is skipped, and the value after the last is 0."""
    found = np.zeros(mask.shape, np.float32)
    next_value, next_advantage = np.zeros(len(mask), np.float32), np.zeros(len(mask), np.float32)
    for t in reversed(range(mask.shape[1])):
        sampled = mask[:, t] > 0
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * next_advantage
        found[:, t] = np.where(sampled, advantage, 0)
        next_value = np.where(sampled, values[:, t], next_value)
        next_advantage = np.where(sampled, advantage, next_advantage)
    return found, ((found + values) * (mask > 0)).astype(np.float32)


def normalised(advantages: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Mean 0 and deviation 1 over the tokens of the mask; 0 elsewhere."""
    chosen = advantages[mask > 0]
    if not chosen.size:
        return np.zeros(mask.shape, np.float32)
    return (((advantages - chosen.mean()) / (chosen.std() + EPSILON)) * (mask > 0)).astype(np.float32)


def _groups(rewards: np.ndarray) -> np.ndarray:
    if rewards.ndim != 2 or rewards.shape[1] < 2:
        raise ConfigError(f"rewards must be [prompts, samples] with at least 2 samples of each, got {rewards.shape}")
    return rewards
