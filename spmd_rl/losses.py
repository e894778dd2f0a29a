"""Losses as sums: `sum(token_weights * token_loss)` over response tokens. B rows, T tokens; log-probs in nats.

To add a policy loss: write `term(config, log_ratio, advantages, mask) -> (token_loss [B, T], Stats)` here or in your
own package, and add a row to `config.POLICY_LOSSES` (or set `algorithm.policy_loss=package.module:term`).

A masked position may hold NaN or inf in any tensor, so values are selected before `exp` and never multiplied by a mask.
Stats hold detached 0-d tensors (no device sync here); their keys depend on the config and on which fields are present,
never on the number of rows.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from spmd_rl.batch import Batch, TokenOutput
from spmd_rl.config import AGGREGATIONS, CORRECTIONS, POLICY_LOSSES, AlgorithmConfig, closest, resolve
from spmd_rl.kl import MAX_EXPONENT, kl_estimate, kl_kind
from spmd_rl.metrics import Max, Mean, Stats, Sum


def ppo_loss(
    config: AlgorithmConfig,
    model_output: TokenOutput,
    data: Batch,
    *,
    kl_coef: float | None = None,
    version: int | None = None,
) -> tuple[Tensor, Stats]:
    """Policy term, plus `kl_coef` times the KL to the reference, minus `entropy_coef` times the entropy.

    `kl_coef` overrides `config.kl_coef` (an adaptive coefficient); with `config.kl_in_reward` it is 0 here. Without
    `data.old_log_probs` the batch is trained once and the old log-probs are the detached new ones. `config.rollout_correction`
    multiplies the policy term alone by `correction_weights`. `version` names the weights that the old log-probs are of:
    only tokens sampled by them count in how far rollout and trainer differ; None: every token. Returns a 0-d sum,
    connected to the graph also for 0 rows.
    Raises ValueError where a field that the config needs is absent."""
    kl_coef = 0.0 if config.kl_in_reward else config.kl_coef if kl_coef is None else kl_coef
    mask = data.response_mask
    new = _need(model_output.log_probs, "log_probs", "ask the engine for log-probs")
    weights = _need(data.token_weights, "token_weights", "call token_weights before the loss")
    advantages = _need(data.advantages, "advantages", "run an advantage function first")
    old = new.detach() if data.old_log_probs is None else data.old_log_probs

    log_ratio = torch.where(mask, new - old, 0.0)
    token_loss, stats = resolve(config.policy_loss, POLICY_LOSSES)(config, log_ratio, advantages, mask)
    rollout = data.rollout_log_probs
    if config.rollout_correction != "off":
        rollout = _need(rollout, "rollout_log_probs", "sample with log-probs, or set algorithm.rollout_correction=off")
        correction, cut = correction_weights(config, old - rollout, mask)
        token_loss = token_loss * correction
        stats |= {"rollout/correction_mean": _mean(correction, mask), "rollout/correction_clipped_fraction": _mean(cut, mask)}
    stats["actor/approx_kl"] = _mean(kl_estimate(-log_ratio, "k3"), mask)  # KL(old || new): the old policy sampled

    if kl_coef != 0:
        _need(data.ref_log_probs, "ref_log_probs", "compute them with the ref role, or set algorithm.kl_coef=0")
    if data.ref_log_probs is not None:
        kl = kl_estimate(torch.where(mask, new - data.ref_log_probs, 0.0), kl_kind(config, "k3"))
        stats["actor/kl_ref"] = _mean(kl, mask)
        if kl_coef != 0:
            token_loss = token_loss + kl_coef * kl

    entropy = model_output.entropy
    if entropy is not None:
        stats["actor/entropy"] = _mean(entropy, mask)
    if config.entropy_coef != 0:
        entropy = _need(entropy, "entropy", "ask the engine for it, or set algorithm.entropy_coef=0")
        token_loss = token_loss - config.entropy_coef * torch.where(mask, entropy, 0.0)

    if rollout is not None:
        stats |= _agreement(rollout - old, mask if version is None else mask & (data.policy_version == version))
    loss = _weighted_sum(token_loss, weights, mask)
    return loss, {"actor/loss": Sum(loss.detach()), **stats}


def value_loss(config: AlgorithmConfig, model_output: TokenOutput, data: Batch) -> tuple[Tensor, Stats]:
    """Half the squared error to `data.returns`, the worse of plain and clipped around `data.values`.

    `config.value_clip=None` is the plain one. PPO: https://arxiv.org/abs/1707.06347, clipping as in OpenAI baselines.
    Raises ValueError where a field is absent."""
    mask = data.response_mask
    weights = _need(data.token_weights, "token_weights", "call token_weights before the loss")
    values = torch.where(mask, _need(model_output.values, "values", "use a value_model engine"), 0.0)
    returns = torch.where(mask, _need(data.returns, "returns", "use algorithm.advantage=gae"), 0.0)
    plain = token_loss = (values - returns).square()
    clipped_side = torch.zeros_like(mask)
    if config.value_clip is not None:
        old = _need(data.values, "values", "infer them with the critic, or set algorithm.value_clip=null")
        old = torch.where(mask, old, 0.0)
        clipped = old + (values - old).clamp(-config.value_clip, config.value_clip)
        token_loss = torch.maximum(plain, (clipped - returns).square())
        clipped_side = ((values - old).abs() > config.value_clip) & (token_loss != plain)
    loss = 0.5 * _weighted_sum(token_loss, weights, mask)
    return loss, {
        "critic/loss": Sum(loss.detach()),
        "critic/clip_fraction": _mean(clipped_side, mask),
        "critic/value": _mean(values, mask),
        "critic/return": _mean(returns, mask),
    }


def sft_loss(config: AlgorithmConfig, model_output: TokenOutput, data: Batch) -> tuple[Tensor, Stats]:
    """Negative log-likelihood of the tokens in `response_mask`. Raises ValueError where a field is absent."""
    nll = -_need(model_output.log_probs, "log_probs", "ask the engine for log-probs")
    weights = _need(data.token_weights, "token_weights", "call token_weights before the loss")
    loss = _weighted_sum(nll, weights, data.response_mask)
    return loss, {"sft/loss": Sum(loss.detach()), "sft/nll": _mean(nll, data.response_mask)}


def ppo_term(config: AlgorithmConfig, log_ratio: Tensor, advantages: Tensor, mask: Tensor) -> tuple[Tensor, Stats]:
    """Clipped surrogate, [B, T] in and out; `mask` is bool.

    PPO https://arxiv.org/abs/1707.06347; asymmetric bounds ("clip-higher") DAPO https://arxiv.org/abs/2503.14476; dual
    clip, a bound of `dual_clip * |A|` where A < 0, https://arxiv.org/abs/1912.09729. Tokens of zero advantage, and
    ratios beyond exp(+-20), have no gradient."""
    select = mask & (advantages != 0)
    ratio = _ratio(torch.where(select, log_ratio, 0.0))
    gain = torch.where(select, advantages, 0.0)
    high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high
    plain = -gain * ratio
    token_loss = torch.maximum(plain, -gain * ratio.clamp(1 - config.clip_ratio, 1 + high))
    if config.dual_clip is not None:
        token_loss = torch.where(gain < 0, torch.minimum(token_loss, -gain * config.dual_clip), token_loss)
    return token_loss, {
        "actor/clip_fraction": _mean(token_loss != plain, mask),
        "actor/ratio_max": _max(_ratio(log_ratio.detach()), mask),
    }


def gspo_term(config: AlgorithmConfig, log_ratio: Tensor, advantages: Tensor, mask: Tensor) -> tuple[Tensor, Stats]:
    """`ppo_term` on the sequence ratio `exp(mean of log_ratio over response tokens)`, the same at each token of a row.

    GSPO https://arxiv.org/abs/2507.18071; the paper averages with `seq-mean-token-mean`."""
    total = torch.where(mask, log_ratio, 0.0).sum(-1, keepdim=True)
    mean = total / mask.sum(-1, keepdim=True).clamp(min=1)
    return ppo_term(config, mean.expand_as(log_ratio), advantages, mask)


def correction_weights(config: AlgorithmConfig, log_ratio: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """(weights [B, T] without gradient, where they are not the plain ratio [B, T] bool); the cap is `c` below.

    `log_ratio` [B, T] nats is log-prob of the trainer's old policy minus that of the rollout, which sampled; `r` its exp,
    of each token or, for `sequence-*`, the product over a row's response tokens, the same at each token of the row.
    `*-truncate`: min(r, c), https://fengyao.notion.site/off-policy-rl (https://openreview.net/forum?id=xsonlP8DRV).
    `*-mask`: r where 1/c <= r <= c, else 0; of tokens that is IcePop, https://arxiv.org/abs/2510.18855. Why the ratio of
    whole sequences: https://richardli.xyz/post/rl-collapse-training-inference.
    Raises ValueError for another name (`auto` must be resolved before) and for a cap below 1."""
    kind, cap = config.rollout_correction, config.rollout_correction_cap
    if kind not in (known := CORRECTIONS[2:]):
        raise ValueError(
            f"algorithm.rollout_correction: '{kind}' is no correction of the loss - "
            f"set off or one of {', '.join(known)}; auto stands for one of them and is resolved before the loss"
        )
    if not cap >= 1:
        raise ValueError(f"algorithm.rollout_correction_cap: {cap} cuts equal policies - set at least 1")
    level, _, action = kind.partition("-")
    chosen = torch.where(mask, log_ratio.detach(), 0.0)
    if level == "sequence":
        chosen = chosen.sum(-1, keepdim=True).expand_as(chosen)
    bound = math.log(cap)
    cut = chosen.abs() > bound if action == "mask" else chosen > bound
    return torch.where(cut, -math.inf if action == "mask" else bound, chosen).exp(), cut


def denominators(mask: Tensor) -> Tensor:
    """(response tokens, non-empty sequences) of `mask` [B, T] bool: [2] float64, to sum over data-parallel ranks."""
    return torch.stack([mask.sum(), mask.any(-1).sum()]).double()


def token_weights(mask: Tensor, totals: Tensor, aggregation: str, length: int | None = None) -> Tensor:
    """[B, T] float32 weights that make a sum of token losses the loss of the global batch; 0 off `mask` [B, T] bool.

    `totals` [2] are the global `denominators`; one of 0 gives weight 0. `seq-mean-token-sum-norm` divides by the
    constant `length` (Dr.GRPO https://arxiv.org/abs/2503.20783); `token-mean` is that of DAPO.
    Raises ValueError for an unknown aggregation, and for that one without a `length`."""
    if aggregation not in AGGREGATIONS:
        hint = closest(aggregation, AGGREGATIONS)
        raise ValueError(f"algorithm.aggregation: unknown '{aggregation}'{hint} - set one of {', '.join(AGGREGATIONS)}")
    total = totals[0] if aggregation == "token-mean" else totals[1]
    weight = torch.where(total > 0, 1 / total, 0.0)
    if aggregation == "seq-mean-token-mean":
        weight = weight / mask.sum(-1, keepdim=True).clamp(min=1)
    elif aggregation == "seq-mean-token-sum-norm":
        if not length or length < 0:
            raise ValueError(f"algorithm.aggregation_length: {length} with {aggregation} - set a number above 0")
        weight = weight / length
    return torch.where(mask, weight, 0.0).float()


def _need(value: Tensor | None, name: str, fix: str) -> Tensor:
    if value is None:
        raise ValueError(f"{name} is None where this loss needs it - {fix}")
    return value


def _ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_EXPONENT, MAX_EXPONENT).exp()


def _weighted_sum(token_loss: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
    return (torch.where(mask, weights, 0.0) * torch.where(mask, token_loss, 0.0)).sum()


def _agreement(d: Tensor, mask: Tensor) -> Stats:
    """How far two policies that should be one differ; `d` [B, T] is log-prob of the rollout minus the trainer's, nats."""
    return {
        "rollout/logprob_diff_mean": _mean(d.abs(), mask),
        "rollout/logprob_diff_max": _max(d.abs(), mask),
        "rollout/kl": _mean(kl_estimate(d, "k3"), mask),  # KL(rollout || trainer): the rollout sampled
    }


def _mean(values: Tensor, mask: Tensor) -> Mean:
    return Mean(torch.where(mask, values.detach(), 0.0).sum(dtype=torch.float64), mask.sum(dtype=torch.float64))


def _max(values: Tensor, mask: Tensor) -> Max:
    selected = torch.where(mask, values.detach(), -torch.inf).flatten()
    return Max(F.pad(selected, (0, 1), value=-torch.inf).max().double())  # the pad stands where there is no row
