"""TorchTitan's decoder from a Hugging Face config: its blocks, with attention, rotary embedding, experts and head of ours.

T tokens of a packed row (of this rank, under context parallelism), N response tokens, D head dimension, H heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import spmd_types as spmd
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torchtitan.distributed import ParallelDims
from torchtitan.models.common import Embedding, FeedForward, FlexAttention, GQAttention, Linear, MoE, QKVLinear, RMSNorm, RoPE
from torchtitan.models.common.decoder_sharding import dense_param_placement
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts, TokenChoiceTopKRouter
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config
from torchtitan.protocols.sharding import ShardingConfig
from transformers import PretrainedConfig

from spmd_rl.engine.attention import blocks_attention, rows_attention
from spmd_rl.engine.exchange import sum_placed
from spmd_rl.engine.logprob import VocabShard, token_log_probs
from spmd_rl.engine.packing import Packed
from spmd_rl.engine.torchtitan.layout import Config


@dataclass
class Local:
    """A micro-batch as this rank sees it."""

    packed: Packed
    rotary: tuple[Tensor, Tensor]  # cos and sin, [T, 1, D] float32
    mine: Tensor | None = None  # [T] packed positions of this rank's tokens; None: all, in order
    gathered: Tensor | None = None  # packed positions of the tokens of all context ranks, in the order of the ranks
    cache: dict[str, Any] = field(default_factory=dict)

    @property
    def input_ids(self) -> Tensor:
        """[1, T] int64"""
        ids = self.packed.input_ids
        return ids if self.mine is None else ids[:, self.mine]

    def responses(self) -> tuple[Tensor, Tensor | None]:
        """(rows of the hidden states [1, T, D] that predict this rank's response tokens, which of the N they are; None: all)."""
        if self.mine is None:
            return self.packed.source, None
        if "responses" not in self.cache:
            place = torch.full(self.packed.input_ids.shape[1:], -1, device=self.mine.device)
            place[self.mine] = torch.arange(len(self.mine), device=self.mine.device)
            rows = place[self.packed.source]
            which = (rows >= 0).nonzero()[:, 0]
            self.cache["responses"] = rows[which], which
        return self.cache["responses"]


class TokenEmbedding(Embedding):
    """TorchTitan's; as in transformers, the row of the padding token has no gradient."""

    @dataclass(kw_only=True, slots=True)
    class Config(Embedding.Config):
        padding: int | None

    def __init__(self, config: Config):
        super().__init__(config)
        self.padding = config.padding

    def forward(self, input: Tensor) -> Tensor:
        out = super().forward(input)
        return out if self.padding is None else out.detach().where((input == self.padding)[..., None], out)


class BlocksAttention(FlexAttention):
    """Attention over packed blocks; a FlexAttention, so that TorchTitan gathers keys and values over context ranks."""

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        pass

    def forward(self, q_BLNH, k_BLNH, v_BLNH, *, attention_masks: Local, scale: float, **kwargs) -> Tensor:  # noqa: N803
        local, (query, key, value) = attention_masks, (x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))
        if local.mine is None:
            return blocks_attention(self, query, key, value, None, scale, packed=local.packed)[0]
        return rows_attention(local.packed, local.mine, local.gathered, query, key, value, scale)


class Rotary(RoPE):
    """Rotates halves, as transformers does, by cosines and sines that are computed once for all layers."""

    @dataclass(kw_only=True, slots=True)
    class Config(RoPE.Config):
        pass

    def __init__(self, config: Config):
        torch.nn.Module.__init__(self)

    def forward(self, query: Tensor, key: Tensor, positions: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return _rotate(query, *positions), _rotate(key, *positions)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[1, T, H, D]"""
    if isinstance(x, DTensor):
        return DTensor.from_local(_rotate(x.to_local(), cos, sin), x.device_mesh, x.placements, run_check=False)
    first, second = x.float().chunk(2, -1)
    return (x.float() * cos + torch.cat([-second, first], -1) * sin).type_as(x)


class Experts(GroupedExperts):
    """TorchTitan's, which compute in bfloat16 whatever they are given; here in float32 where they are given that."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:  # noqa: N803
        if x_RD.dtype == torch.bfloat16:
            return super().forward(x_RD, num_tokens_per_expert_E)
        gate, down, up = (_local(w) for w in (self.w1_EFD, self.w2_EDF, self.w3_EFD))
        parts = x_RD.split(num_tokens_per_expert_E.tolist())
        experts = zip(parts, gate.unbind(0), up.unbind(0), down.unbind(0))
        return torch.cat([F.linear(F.silu(F.linear(x, g)) * F.linear(x, u), d) for x, g, u, d in experts])


class Mixture(MoE):
    """TorchTitan's, for tokens that tensor ranks gather: torch 2.13's local_map cuts the gradient of what is still on its way."""

    @dataclass(kw_only=True, slots=True)
    class Config(MoE.Config):
        pass

    def forward(self, x_BLD: Tensor) -> Tensor:  # noqa: N803
        return super().forward(x_BLD.clone() if isinstance(x_BLD, DTensor) else x_BLD)


class TokenHead(Linear):
    """Log-probs of tokens instead of logits: [N] float32, and their entropy. Over tensor ranks, each has rows of the weight."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        chunk: int

    def __init__(self, config: Config):
        super().__init__(config)
        self.chunk, self.tensor_mesh = config.chunk, None

    def parallelize(self, parallel_dims: ParallelDims) -> None:
        super().parallelize(parallel_dims)
        self.tensor_mesh = parallel_dims.get_optional_mesh("tp")

    def forward(self, input: Tensor, targets: Tensor, temperature: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
        weight, vocab = _local(self.weight), None
        if self.tensor_mesh is not None:
            vocab = VocabShard(self.tensor_mesh.get_group(), self.tensor_mesh.get_local_rank() * len(weight), len(weight))
        return token_log_probs(input, weight, targets, temperature, self.chunk, with_entropy, vocab)


class ValueHead(Linear):
    """The scalar value of the state before a token, [N] float32; alike on all tensor ranks."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    def forward(self, input: Tensor, targets: Tensor, temperature: Tensor, with_entropy: bool) -> tuple[Tensor, None]:
        return F.linear(input, _local(self.weight)).float().flatten().clone(), None  # sharding hooks want no view


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


@dataclass
class Scheduled:
    """The micro-batches that a pipeline is working on."""

    locals: list[Local]
    with_entropy: bool
    finish: Callable[[int, Tensor, Tensor | None], Tensor]  # the loss of a micro-batch from its tokens and their entropy


class Part(Qwen3Model):
    """The layers of one pipeline stage; without a pipeline, the whole decoder.

    Hidden states between stages are plain tensors [1, T, hidden], T split over tensor ranks where it is inside."""

    scheduled: Scheduled | None = None

    @dataclass(kw_only=True, slots=True)
    class Config(Qwen3Model.Config):
        sequence_parallel: bool

    def __init__(self, config: Config):
        super().__init__(config)
        self.tensor_mesh: DeviceMesh | None = None
        self.context_mesh: DeviceMesh | None = None
        self.between: Placement = Shard(1) if config.sequence_parallel else Replicate()

    def parallelize(self, parallel_dims: ParallelDims) -> None:
        super().parallelize(parallel_dims)
        self.tensor_mesh = parallel_dims.get_optional_mesh("tp")
        self.tie()

    def tie(self) -> None:
        """Sharding and moving make two parameters of one that two modules share."""
        if self.enable_weight_tying:
            self.tok_embeddings.weight = self.lm_head.weight

    def forward(self, hidden: Tensor | None, local: Local | None = None, with_entropy: bool = False, index: Tensor | None = None):
        """`hidden`: of the stage before; the first has none. Returns hidden states, the last stage (tokens [N], entropy).

        In a pipeline `index` [1] int64 is that of the micro-batch, and the last stage returns its loss."""
        if index is None:
            return self._run(hidden, local, with_entropy)
        out = self._run(hidden, self.scheduled.locals[int(index)], self.scheduled.with_entropy)
        return self.scheduled.finish(int(index), *out) if isinstance(out, tuple) else out

    def _run(self, hidden: Tensor | None, local: Local, with_entropy: bool) -> Tensor | tuple[Tensor, Tensor | None]:
        x = hidden
        if self.tok_embeddings is not None:
            x = self.tok_embeddings(local.input_ids)
        elif self.tensor_mesh is not None:
            x = DTensor.from_local(x, self.tensor_mesh, [self.between], run_check=False)
        for layer in self.layers.values():
            x = layer(x, local, local.rotary)
        if self.lm_head is None:
            return _local(x)
        rows, which = local.responses()
        hidden = _local(self.norm(x))[0].index_select(0, rows)
        packed = local.packed
        if which is None:
            return self.lm_head(hidden, packed.targets, packed.temperature, with_entropy)
        tokens, entropy = self.lm_head(hidden, packed.targets[which], packed.temperature[which], with_entropy)
        whole = partial(sum_placed, places=which, size=len(packed.targets), group=self.context_mesh.get_group())
        return whole(tokens), None if entropy is None else whole(entropy)


def part_config(hf: PretrainedConfig, options: Config, value_model: bool) -> Part.Config:
    """The configuration of the whole decoder, with the sharding of each of its modules."""
    tied = hf.tie_word_embeddings and not value_model
    if value_model:
        head = ValueHead.Config(in_features=hf.hidden_size, out_features=1)
    else:
        head = TokenHead.Config(in_features=hf.hidden_size, out_features=hf.vocab_size, chunk=options.logprob_chunk)
    config = Part.Config(
        dim=hf.hidden_size,
        vocab_size=hf.vocab_size,
        tok_embeddings=TokenEmbedding.Config(num_embeddings=hf.vocab_size, embedding_dim=hf.hidden_size, padding=hf.pad_token_id),
        layers=[_layer(hf, index) for index in range(hf.num_hidden_layers)],
        norm=_norm(hf, hf.hidden_size),
        lm_head=head,
        enable_weight_tying=tied,
        sequence_parallel=options.sequence_parallel,
    )
    set_qwen3_sharding_config(config, enable_sp=options.sequence_parallel, enable_ep=options.expert_parallel_size > 1)
    placement = dense_param_placement(tp=spmd.R if value_model else spmd.S(0))
    config.lm_head.sharding_config = ShardingConfig(state_shardings={"weight": placement})
    return config


def _norm(hf: PretrainedConfig, size: int) -> RMSNorm.Config:
    return RMSNorm.Config(normalized_shape=size, eps=hf.rms_norm_eps)


def _linear(size: int, out: int, bias: bool = False) -> Linear.Config:
    return Linear.Config(in_features=size, out_features=out, bias=bias)


def _layer(hf: PretrainedConfig, index: int) -> Qwen3TransformerBlock.Config:
    size, heads, kv_heads = hf.hidden_size, hf.num_attention_heads, hf.num_key_value_heads
    head_dim = vars(hf).get("head_dim") or size // heads
    bias = hf.model_type == "qwen2"
    attention = GQAttention.Config(
        n_heads=heads,
        n_kv_heads=kv_heads,
        head_dim=head_dim,
        dim=size,
        qkv_linear=QKVLinear.Config(
            head_dim=head_dim,
            wq=_linear(size, heads * head_dim, bias),
            wkv=_linear(size, kv_heads * head_dim, bias),
        ),
        wo=_linear(heads * head_dim, size),
        qk_norm=_norm(hf, head_dim) if hf.model_type.startswith("qwen3") else None,
        inner_attention=BlocksAttention.Config(),
        rope=Rotary.Config(dim=head_dim, max_seq_len=hf.max_position_embeddings),
    )
    mixture = _is_mixture(hf, index)
    return Qwen3TransformerBlock.Config(
        attention=attention,
        attention_norm=_norm(hf, size),
        ffn_norm=_norm(hf, size),
        feed_forward=None if mixture else _feed_forward(size, hf.intermediate_size),
        moe=_mixture(hf) if mixture else None,
    )


def _is_mixture(hf: PretrainedConfig, index: int) -> bool:
    if hf.model_type != "qwen3_moe" or index in hf.mlp_only_layers:
        return False
    return hf.num_experts > 0 and (index + 1) % hf.decoder_sparse_step == 0


def _feed_forward(size: int, inner: int) -> FeedForward.Config:
    return FeedForward.Config(w1=_linear(size, inner), w2=_linear(inner, size), w3=_linear(size, inner))


def _mixture(hf: PretrainedConfig) -> Mixture.Config:
    count, top = hf.num_experts, hf.num_experts_per_tok
    return Mixture.Config(
        num_experts=count,
        load_balance_coeff=None,
        router=TokenChoiceTopKRouter.Config(
            num_experts=count,
            gate=_linear(hf.hidden_size, count),
            top_k=top,
            score_func="softmax",
            route_norm=hf.norm_topk_prob,
        ),
        routed_experts=RoutedExperts.Config(
            inner_experts=Experts.Config(dim=hf.hidden_size, hidden_dim=hf.moe_intermediate_size, num_experts=count),
            token_dispatcher=AllToAllTokenDispatcher.Config(num_experts=count, top_k=top),
        ),
    )
