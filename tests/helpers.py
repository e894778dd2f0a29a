"""Tiny models and batches that many tests share."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from spmd_rl.batch import Batch, make_batch

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def tiny_config(kind: str, tied: bool = False):
    """llama, qwen2 (qkv bias), qwen3 (qk-norm) or qwen3_moe (8 experts), 2 layers of width 32."""
    if kind == "llama":
        return LlamaConfig(**SIZES, tie_word_embeddings=tied)
    if kind == "qwen2":
        return Qwen2Config(**SIZES, tie_word_embeddings=tied)
    if kind == "qwen3":
        return Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=tied)
    moe = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
    return Qwen3MoeConfig(**SIZES, **moe, head_dim=16, norm_topk_prob=True, tie_word_embeddings=tied)


def make_rows(groups: list[tuple[int, list[int]]], seed: int = 0, temperature: float = 1.0, vocabulary: int = 64) -> Batch:
    """A batch of random ids from [(prompt length, [response lengths of its siblings]), ...]; uids 0, 1, ..."""
    g = torch.Generator().manual_seed(seed)
    width = max(prompt + max(responses) for prompt, responses in groups)
    rows = []
    for uid, (prompt, responses) in enumerate(groups):
        ids = torch.randint(3, vocabulary, (len(responses), width), generator=g)
        ids[:, :prompt] = ids[0, :prompt].clone()
        rows += [(ids[s], prompt, prompt + n, uid, s) for s, n in enumerate(responses)]
    lengths = torch.tensor([row[2] for row in rows])
    prompts = torch.tensor([row[1] for row in rows])
    columns = torch.arange(width)
    ids = torch.where(columns < lengths[:, None], torch.stack([row[0] for row in rows]), 0)
    uid = torch.tensor([row[3] for row in rows])
    return make_batch(
        {
            "input_ids": ids,
            "prompt_lengths": prompts,
            "lengths": lengths,
            "response_mask": (columns >= prompts[:, None]) & (columns < lengths[:, None]),
            "uid": uid,
            "sample": torch.tensor([row[4] for row in rows]),
            "row": uid.clone(),
            "data_source": torch.zeros_like(uid),
            "policy_version": torch.zeros(len(rows), width, dtype=torch.int32),
            "truncated": torch.zeros(len(rows), dtype=torch.bool),
            "temperature": torch.full((len(rows),), temperature),
        }
    )
