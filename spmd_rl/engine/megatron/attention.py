"""Megatron's core attention over packed blocks."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor, nn

from spmd_rl.engine.attention import blocks_attention
from spmd_rl.engine.packing import Packed


@dataclass
class PackedBlocks(PackedSeqParams):
    """What a layer hands to its core attention. To the rest of Megatron it is one plain row."""

    packed: Packed | None = None
    qkv_format: str = "sbhd"


class BlocksAttention(nn.Module):
    """Full softmax attention within the blocks of a packed row."""

    def __init__(self, config, layer_number, attn_mask_type, attention_type, softmax_scale, cp_comm_type, pg_collection):
        super().__init__()
        self.scale = softmax_scale

    def forward(
        self, query, key, value, attention_mask, attn_mask_type=None, attention_bias=None, packed_seq_params=None
    ) -> Tensor:
        """query [t, 1, H, D], key and value [t, 1, K, D] of this context rank's tokens -> [t, 1, H * D]."""
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out, _ = blocks_attention(self, query, key, value, None, scaling=self.scale, packed=packed_seq_params.packed)
        return out.flatten(2).transpose(0, 1)
