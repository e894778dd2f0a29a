"""Tiny models and batches that many tests share."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from spmd_rl.batch import Batch, text_batch

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
WIDE = {"hidden_size": 128, "intermediate_size": 160, "head_dim": 32, "vocab_size": 97}  # heads that vLLM's host build can do


def tiny_config(kind: str, tied: bool = False, **more):
    """llama, qwen2 (qkv bias), qwen3 (qk-norm) or qwen3_moe (8 experts), 2 layers of width 32; `more`: other sizes."""
    if kind == "llama":
        return LlamaConfig(**SIZES | more, tie_word_embeddings=tied)
    if kind == "qwen2":
        return Qwen2Config(**SIZES | more, tie_word_embeddings=tied)
    if kind == "qwen3":
        return Qwen3Config(**SIZES | {"head_dim": 16} | more, tie_word_embeddings=tied)
    moe = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
    return Qwen3MoeConfig(**SIZES | moe | {"head_dim": 16} | more, norm_topk_prob=True, tie_word_embeddings=tied)


@torch.no_grad()
def randomize(model, seed: int):
    """Other values in every parameter, norms and biases too, in place; logits far from uniform."""
    g = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=g) * 0.1 + (1.0 if "norm" in name else 0.0))
    return model.eval()


def wide_model(kind: str, tied: bool, folder: Path, seed: int = 0):
    """A random float32 model that vLLM's host build can run, saved in `folder`."""
    model = randomize(AutoModelForCausalLM.from_config(tiny_config(kind, tied, **WIDE)), seed)
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def forward_log_probs(model, ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    """[T, V] float32 nats: entry t is of token t + 1, by transformers alone."""
    return (model(torch.tensor([ids])).logits[0].float() / temperature).log_softmax(-1)


def make_rows(groups: list[tuple[int, list[int]]], seed: int = 0, temperature: float = 1.0, vocabulary: int = 64) -> Batch:
    """A batch of random ids from [(prompt length, [response lengths of its siblings]), ...]; uids 0, 1, ..."""
    g = torch.Generator().manual_seed(seed)
    width = max(prompt + max(responses) for prompt, responses in groups)
    rows = []
    for uid, (prompt, responses) in enumerate(groups):
        ids = torch.randint(3, vocabulary, (len(responses), width), generator=g)
        ids[:, :prompt] = ids[0, :prompt].clone()
        rows += [(ids[s], prompt, prompt + n, uid, s) for s, n in enumerate(responses)]
    prompts, lengths, uid, sample = torch.tensor([row[1:] for row in rows]).unbind(1)
    ids = torch.where(torch.arange(width) < lengths[:, None], torch.stack([row[0] for row in rows]), 0)
    batch = text_batch(ids, prompts, lengths, uid, sample)
    batch.row, batch.temperature = uid.clone(), torch.full((len(rows),), temperature)
    return batch
