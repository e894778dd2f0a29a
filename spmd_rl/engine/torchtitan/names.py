"""Between the parameters of TorchTitan's decoder and the tensors of a Hugging Face checkpoint.

Every one has its own tensor in the file, but for the experts of a layer: [E, out, in] here, one by one there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from spmd_rl.engine.hf_names import Index

ROOT = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
}
LAYER = {
    "attention_norm": "input_layernorm",
    "attention.qkv_linear.wq": "self_attn.q_proj",
    "attention.qkv_linear.wk": "self_attn.k_proj",
    "attention.qkv_linear.wv": "self_attn.v_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention.wo": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "moe.router.gate": "mlp.gate",
}
EXPERTS = {"w1_EFD": "gate_proj", "w2_EDF": "down_proj", "w3_EFD": "up_proj"}
WRAPPED = "_checkpoint_wrapped_module."  # what activation checkpointing puts into names


def sources(name: str, shape: Sequence[int]) -> list[tuple[str, Index]]:
    """The checkpoint tensors that make up the parameter `name` of shape `shape`, each with the place that it fills."""
    if name in ROOT:
        return [(ROOT[name], ())]
    _, layer, inside = name.split(".", 2)
    stem, _, last = inside.rpartition(".")
    if last in EXPERTS:
        return [(f"model.layers.{layer}.mlp.experts.{e}.{EXPERTS[last]}.weight", (e,)) for e in range(shape[0])]
    return [(f"model.layers.{layer}.{LAYER[stem]}.{last}", ())]


def to_checkpoint(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The full parameter `name` as (checkpoint name, view of `tensor`)."""
    for hf_name, index in sources(name, tensor.shape):
        yield hf_name, tensor[index]
