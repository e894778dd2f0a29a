"""The KL of the policy to the reference: estimates from samples, and the controller of its coefficient. Nats throughout.

Where the KL acts: in the loss (`losses.ppo_loss`, with a gradient) or, with `algorithm.kl_in_reward`, in the rewards of the
tokens (`advantages.subtract_kl`, without one); never in both.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from spmd_rl.config import MAX_ERROR, AlgorithmConfig

MAX_EXPONENT = 20.0  # exp(20) = 4.9e8: beyond it a ratio carries no information, only overflow


def kl_estimate(d: Tensor, kind: str) -> Tensor:
    """Per-token estimate of KL(p || q) from samples of p; `d = log p - log q`, any shape, nats.

    k1 `d`, k2 `d^2 / 2`, k3 `exp(-d) - 1 + d`: http://joschu.net/blog/kl-approx.html. k3 is constant (gradient 0) below
    d = -20. Raises ValueError for another kind."""
    if kind == "k1":
        return d
    if kind == "k2":
        return d.square() / 2
    if kind == "k3":
        d = d.clamp(min=-MAX_EXPONENT)
        return torch.expm1(-d) + d
    raise ValueError(f"algorithm.kl_type: unknown '{kind}' - set k1, k2 or k3")


def kl_kind(config: AlgorithmConfig, auto: str) -> str:
    """`config.kl_type`; where that is `auto`, the kind that suits the place: k3 in a loss, k1 in a reward."""
    return auto if config.kl_type == "auto" else config.kl_type


def adapt_kl_coef(config: AlgorithmConfig, kl_coef: float, kl: float, num_samples: float) -> float:
    """The coefficient of the next step, `kl_coef * (1 + error * num_samples / config.kl_horizon)`.

    `kl`: nats of a whole sample, the mean over the step's `num_samples`; `error`: how far it is off `config.kl_target`, as a
    part of that, clipped to +-0.2. Unchanged without a target and where no sample was measured (`kl` is NaN).
    Ziegler et al. 2019, section 2.2: https://arxiv.org/abs/1909.08593"""
    if config.kl_target is None or math.isnan(kl):
        return kl_coef
    error = min(max(kl / config.kl_target - 1, -MAX_ERROR), MAX_ERROR)
    return kl_coef * (1 + error * num_samples / config.kl_horizon)
