"""What travels between roles: `Prompts` and `Batch`, and the plans that split them. B rows, T tokens, G siblings."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from tensordict import tensorclass
from torch import Tensor

PER_TOKEN = ("input_ids", "response_mask", "policy_version", "rollout_log_probs", "old_log_probs", "ref_log_probs",
             "values", "advantages", "returns", "token_rewards", "token_weights")  # fmt: skip


@dataclass(frozen=True)
class Sampling:
    """How to draw completions. `temperature` 0 is greedy; its log-probs are then reported at temperature 1."""

    temperature: float
    n: int  # samples a prompt
    min_tokens: int
    max_tokens: int
    stop_token_ids: tuple[int, ...]  # every id that ends a response, the model's own included
    purpose: str = "train"  # train | validation: part of the seed


@dataclass
class TokenOutput:
    """What a forward pass says of each token; entry t belongs to token t, 0 where nothing was computed."""

    log_probs: Tensor | None = None  # [B, T] float32 nats
    entropy: Tensor | None = None  # [B, T] float32 nats
    values: Tensor | None = None  # [B, T] float32


def sample_seed(run_seed: int, sampling: Sampling, step: int, uid: int, sample: int) -> int:
    """The seed of one sample: a function of names, never of which rank draws it. 63 bits."""
    name = f"{run_seed}/{sampling.purpose}/{step}/{uid}/{sample}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") >> 1


@tensorclass(shadow=True)
class Prompts:
    """Prompts of one step, one row a prompt occurrence."""

    input_ids: Tensor  # [B, T] int64, right padded
    lengths: Tensor  # [B] int64
    uid: Tensor  # [B] int64: the prompt occurrence, unique in a run
    row: Tensor  # [B] int64: row in the dataset
    data_source: Tensor  # [B] int64


@tensorclass(shadow=True)
class Batch:
    """Samples, one row each; siblings of a prompt stay adjacent. Entry t of a per-token field belongs to token t."""

    input_ids: Tensor  # [B, T] int64, right padded
    prompt_lengths: Tensor  # [B] int64
    lengths: Tensor  # [B] int64: prompt + response
    response_mask: Tensor  # [B, T] bool: the policy chose this token
    uid: Tensor  # [B] int64: the prompt occurrence, the group key
    sample: Tensor  # [B] int64: index in the group
    row: Tensor  # [B] int64: row in the dataset
    data_source: Tensor  # [B] int64
    policy_version: Tensor  # [B, T] int32: the weights that sampled the token
    truncated: Tensor  # [B] bool: stopped by the token limit
    temperature: Tensor  # [B] float32
    rollout_log_probs: Tensor | None = None  # [B, T] float32 nats
    old_log_probs: Tensor | None = None  # [B, T] float32 nats
    ref_log_probs: Tensor | None = None  # [B, T] float32 nats
    values: Tensor | None = None  # [B, T] float32: value of the state before the token
    advantages: Tensor | None = None  # [B, T] float32
    returns: Tensor | None = None  # [B, T] float32
    token_rewards: Tensor | None = None  # [B, T] float32
    token_weights: Tensor | None = None  # [B, T] float32: carries the loss normalisation
    rewards: Tensor | None = None  # [B] float32: the score before shaping; NaN where scoring failed
