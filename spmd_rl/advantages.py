"""Advantages: `fn(config, batch, all_sum) -> batch` with `advantages` [B, T] float32, exactly 0 off `response_mask`.

To add one: write a function of that signature here or in your own package, and add a row to `config.ADVANTAGES`
(or set `algorithm.advantage=package.module:function`).

`all_sum` sums a small float64 tensor over the data-parallel ranks. It is a collective: a function that needs global
moments calls it the same number of times on every rank, also with 0 rows; the group functions never call it.
A row whose reward is NaN (scoring failed) or whose mask is empty takes no part in any moment and gets advantage 0.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from spmd_rl.batch import Batch
from spmd_rl.config import AlgorithmConfig
from spmd_rl.kl import kl_estimate, kl_kind
from spmd_rl.metrics import Max, Mean, Stats

AllSum = Callable[[Tensor], Tensor]


def one_rank(x: Tensor) -> Tensor:
    """The `all_sum` of a single rank."""
    return x


def grpo(config: AlgorithmConfig, batch: Batch, all_sum: AllSum = one_rank) -> Batch:
    """Reward minus the mean of its group, over `std + 1e-6` (unbiased) unless `config.normalize_std` is False.

    A group is the rows of one `uid`, in any order; one of a single row, or of equal rewards, gives exactly 0.
    GRPO https://arxiv.org/abs/2402.03300; without the std Dr.GRPO https://arxiv.org/abs/2503.20783."""
    centered, size, group = _group_centered(batch)
    if config.normalize_std:
        variance = torch.zeros_like(size).index_add(0, group, centered.square()) / (size - 1).clamp(min=1)
        centered = centered / (variance.sqrt() + 1e-6)[group]
    return _spread(batch, centered)


def rloo(config: AlgorithmConfig, batch: Batch, all_sum: AllSum = one_rank) -> Batch:
    """Reward minus the mean reward of the *other* rows of its group; 0 in a group of one. https://arxiv.org/abs/2402.14740"""
    centered, size, group = _group_centered(batch)
    return _spread(batch, centered * (size / (size - 1).clamp(min=1))[group])


def reinforce_plus_plus(config: AlgorithmConfig, batch: Batch, all_sum: AllSum = one_rank) -> Batch:
    """Discounted reward-to-go, whitened over every valid token of the global batch. https://arxiv.org/abs/2501.03262"""
    mask = _valid_tokens(batch)
    rewards = _token_rewards(batch, mask)
    to_go = gae_advantages(rewards, torch.zeros_like(rewards), mask, config.gamma, 1.0)
    return batch.replace(advantages=whiten(to_go, mask, all_sum).float())


def gae(config: AlgorithmConfig, batch: Batch, all_sum: AllSum = one_rank) -> Batch:
    """Generalised advantage estimates, whitened over the global batch; `returns` are the raw ones plus `values`.

    Rewards are `token_rewards` where present, else the row's reward at its last valid token. https://arxiv.org/abs/1506.02438
    Raises ValueError without `values`."""
    if batch.values is None:
        raise ValueError("batch.values is None where gae needs it - infer values with the critic first")
    mask = _valid_tokens(batch)
    values = torch.where(batch.response_mask, batch.values, 0.0).double()
    raw = gae_advantages(_token_rewards(batch, mask), values, mask, config.gamma, config.lam)
    return batch.replace(advantages=whiten(raw, mask, all_sum).float(), returns=(raw + values).float())


def gae_advantages(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> Tensor:
    """The recursion of https://arxiv.org/abs/1506.02438 over valid tokens: [B, T], before whitening, 0 off `mask`.

    A gap (tool or prompt tokens) is no time step: neither its rewards nor its values are read, and the token before it
    sees the next valid one. The state after the last valid token has value 0."""
    rewards, values = torch.where(mask, rewards, 0.0), torch.where(mask, values, 0.0)
    advantages = torch.zeros_like(rewards)
    next_value = next_advantage = rewards.new_zeros(len(rewards))
    for t in reversed(range(mask.shape[1])):
        advantage = rewards[:, t] + gamma * next_value - values[:, t] + gamma * lam * next_advantage
        next_advantage = torch.where(mask[:, t], advantage, next_advantage)
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        advantages[:, t] = torch.where(mask[:, t], advantage, 0.0)
    return advantages


def whiten(x: Tensor, mask: Tensor, all_sum: AllSum = one_rank, shift_mean: bool = True) -> Tensor:
    """`x` [B, T] over the global std (unbiased, 1e-8 in the variance) of its `mask` tokens; their mean is 0, or with
    `shift_mean=False` mean / std. 0 outside `mask`, and everywhere where fewer than two tokens exist.

    Collective over the data-parallel ranks: two `all_sum`, since E[x^2] - mean^2 would lose small variances."""
    values = torch.where(mask, x, 0.0).double()
    total, count = all_sum(torch.stack([values.sum(), mask.sum().double()]))
    mean = total / count.clamp(min=1)
    centered = torch.where(mask, values - mean, 0.0)
    variance = all_sum(centered.square().sum()) / (count - 1).clamp(min=1)
    scale = torch.where(count > 1, (variance + 1e-8).rsqrt(), 0.0)
    return ((centered if shift_mean else values) * scale).to(x.dtype)


def overlong_penalty(lengths: Tensor, max_length: int, buffer: int, factor: float) -> Tensor:
    """[B] float32 added to rewards: 0 up to `max_length - buffer` response tokens, then linear to `-factor` at
    `max_length` and no further. A buffer of 0 is off. DAPO https://arxiv.org/abs/2503.14476."""
    if buffer <= 0:
        return torch.zeros_like(lengths, dtype=torch.float32)
    return -factor * ((lengths.float() - (max_length - buffer)) / buffer).clamp(0, 1)


def subtract_kl(config: AlgorithmConfig, kl_coef: float, batch: Batch) -> Batch:
    """With `config.kl_in_reward`: each response token's reward less `kl_coef` times the KL estimate of `old - ref` log-probs
    there, and each row's reward less the sum of these; a row's `token_rewards` then add up to its `rewards`. Else `batch`.

    The KL is k1 unless `config.kl_type` says otherwise, and has no gradient. InstructGPT: https://arxiv.org/abs/2203.02155
    Raises ValueError without old or reference log-probs."""
    if not config.kl_in_reward:
        return batch
    mask = _valid_tokens(batch)
    penalty = kl_coef * kl_estimate(_drift(batch), kl_kind(config, "k1"))
    shaped = batch.replace(token_rewards=(_token_rewards(batch, mask) - penalty).float())
    return shaped if batch.rewards is None else shaped.replace(rewards=(_rewards(batch) - penalty.sum(-1)).float())


def kl_stats(config: AlgorithmConfig, kl_coef: float, batch: Batch) -> Stats:
    """Means and maxima, which every lane of a replica may report. `actor/kl_coef`; where there are old log-probs also
    `actor/kl_sample`: nats of a whole sample, summed `old - ref`; with `config.kl_in_reward` also
    `reward/kl_penalty_mean`: what a sample's reward is less."""
    stats: Stats = {"actor/kl_coef": Max(kl_coef)}
    if batch.old_log_probs is not None:
        d, count = _drift(batch), _valid_rows(batch).sum().double()
        stats["actor/kl_sample"] = Mean(d.sum(), count)
        if config.kl_in_reward:
            stats["reward/kl_penalty_mean"] = Mean(kl_coef * kl_estimate(d, kl_kind(config, "k1")).sum(), count)
    return stats


def _drift(batch: Batch) -> Tensor:
    """Old minus reference log-probs, [B, T] float64 nats, 0 off the valid tokens."""
    if batch.old_log_probs is None or batch.ref_log_probs is None:
        absent = "old_log_probs" if batch.old_log_probs is None else "ref_log_probs"
        raise ValueError(f"batch.{absent} is None where the KL in the reward needs it - infer it first")
    return torch.where(_valid_tokens(batch), batch.old_log_probs.double() - batch.ref_log_probs.double(), 0.0)


def _valid_rows(batch: Batch) -> Tensor:
    valid = batch.response_mask.any(-1)
    return valid if batch.rewards is None else valid & ~batch.rewards.isnan()


def _valid_tokens(batch: Batch) -> Tensor:
    return batch.response_mask & _valid_rows(batch)[:, None]


def _rewards(batch: Batch) -> Tensor:
    if batch.rewards is None:
        raise ValueError("batch.rewards is None where the advantage needs it - score the samples first")
    return batch.rewards.double()


def _token_rewards(batch: Batch, mask: Tensor) -> Tensor:
    if batch.token_rewards is not None:
        return batch.token_rewards.double()
    is_last = mask & (mask.flip(-1).cumsum(-1).flip(-1) == 1)
    return torch.where(is_last, _rewards(batch)[:, None], 0.0)


def _group_centered(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards minus their group's mean [B] float64 (0 for rows left out), rows of each group, each row's group [B]."""
    valid, rewards = _valid_rows(batch), _rewards(batch)
    ids, group = torch.unique(batch.uid, return_inverse=True)
    zeros = rewards.new_zeros(len(ids))
    size = zeros.index_add(0, group, valid.double())
    mean = zeros.index_add(0, group, torch.where(valid, rewards, 0.0)) / size.clamp(min=1)
    highest = zeros.scatter_reduce(0, group, torch.where(valid, rewards, -torch.inf), "amax", include_self=False)
    lowest = zeros.scatter_reduce(0, group, torch.where(valid, rewards, torch.inf), "amin", include_self=False)
    differs = valid & (highest > lowest)[group]  # the mean of equal floats need not be that float
    return torch.where(differs, rewards - mean[group], 0.0), size, group


def _spread(batch: Batch, advantages: Tensor) -> Batch:
    """Each row's advantage [B] at each of its response tokens."""
    return batch.replace(advantages=torch.where(batch.response_mask, advantages[:, None], 0.0).float())
