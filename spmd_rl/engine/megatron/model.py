"""The decoder of Megatron-Core, from the configuration of a transformers model to log-probs (or values) of packed rows."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_layer_with_transformer_engine_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from spmd_rl.config import OptimizerConfig
from spmd_rl.engine.exchange import sum_placed
from spmd_rl.engine.logprob import VocabShard, token_log_probs
from spmd_rl.engine.megatron import groups
from spmd_rl.engine.megatron.attention import BlocksAttention, PackedBlocks
from spmd_rl.engine.megatron.config import FAMILIES, MegatronConfig, Sizes, sizes_of
from spmd_rl.engine.megatron.names import padded_vocabulary, vocabulary_part
from spmd_rl.engine.packing import Packed, part_of


def prepare(device: torch.device) -> AbstractContextManager:
    """What a model is made inside of; on the host, Megatron is taught to do without CUDA."""
    if device.type != "cpu":
        return nullcontext()
    cpu = importlib.import_module("spmd_rl.engine.megatron.cpu")
    cpu.install()
    return cpu.CudaNames()


class Norm(nn.Module):
    """RMSNorm that may be sequence parallel; Megatron's own without Transformer Engine may not."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float):
        super().__init__()
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def transformer_config(hf: dict, sizes: Sizes, config: MegatronConfig, device: torch.device) -> TransformerConfig:
    dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
    bias, norms = FAMILIES[sizes.model_type]
    interleaved = config.virtual_pipeline_size > 1
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(
        num_layers=sizes.layers,
        hidden_size=sizes.hidden,
        num_attention_heads=sizes.heads,
        num_query_groups=sizes.kv_heads,
        kv_channels=sizes.head_dim,
        ffn_hidden_size=sizes.intermediate,
        add_bias_linear=False,
        add_qkv_bias=bias,
        qk_layernorm=norms,
        normalization="RMSNorm",
        layernorm_epsilon=hf["rms_norm_eps"],
        gated_linear_unit=True,
        activation_func=F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        use_cpu_initialization=device.type == "cpu",
        perform_initialization=False,  # every value comes from a file
        calculate_per_token_loss=True,  # gradients are sums
        tensor_model_parallel_size=config.tensor_parallel_size,
        pipeline_model_parallel_size=config.pipeline_parallel_size,
        virtual_pipeline_model_parallel_size=config.virtual_pipeline_size if interleaved else None,
        context_parallel_size=config.context_parallel_size,
        sequence_parallel=config.splits_sequence,
        variable_seq_lengths=config.pipeline_parallel_size > 1,
        moe_token_dispatcher_type="alltoall",
        overlap_p2p_comm=interleaved,  # together, else the interleaved schedule is silently wrong on 2 stages
        batch_p2p_comm=not interleaved,
        batch_p2p_sync=False,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        **(_mixture(hf, sizes, config, device) if sizes.experts else {}),
        **(recompute if config.activation_checkpointing else {}),
    )


def _mixture(hf: dict, sizes: Sizes, config: MegatronConfig, device: torch.device) -> dict[str, object]:
    return {
        "num_moe_experts": sizes.experts,
        "moe_ffn_hidden_size": sizes.expert_intermediate,
        "moe_router_topk": hf["num_experts_per_tok"],
        "moe_router_pre_softmax": not hf["norm_topk_prob"],
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": has_transformer_engine(device),
        "expert_model_parallel_size": config.expert_parallel_size,
        "expert_tensor_parallel_size": config.expert_tensor_size,
    }


def has_transformer_engine(device: torch.device) -> bool:
    return device.type == "cuda" and importlib.util.find_spec("transformer_engine") is not None


def layer_specs(config: TransformerConfig, device: torch.device, chunk: int | None) -> TransformerBlockSubmodules:
    """The layers of one chunk of a pipeline stage, with our attention and, but for Transformer Engine's, our norm."""
    kind = {"num_experts": config.num_moe_experts, "qk_layernorm": config.qk_layernorm}
    if has_transformer_engine(device):
        spec = get_gpt_layer_with_transformer_engine_spec(**kind, moe_grouped_gemm=config.moe_grouped_gemm)
    else:
        spec = get_gpt_layer_local_spec(**kind, normalization="RMSNorm")
        spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = Norm
        if config.qk_layernorm:
            attention = spec.submodules.self_attention.submodules
            attention.q_layernorm = attention.k_layernorm = Norm
    spec.submodules.self_attention.submodules.core_attention = BlocksAttention
    count = get_num_layers_to_build(config, vp_stage=chunk)
    return TransformerBlockSubmodules(layer_specs=[spec] * count, layer_norm=Norm)


class Decoder(GPTModel):
    """One chunk of a pipeline stage. The last one ends in log-probs (and entropy), or in values, of response tokens."""

    def __init__(self, config: TransformerConfig, hf: PretrainedConfig, sizes: Sizes, device, logprob_chunk: int, value: bool,
                 chunk: int | None = None):  # fmt: skip
        stage = {"ignore_virtual": False, "vp_stage": chunk}
        super().__init__(
            config,
            layer_specs(config, device, chunk),
            vocab_size=padded_vocabulary(sizes, config.tensor_model_parallel_size),
            max_sequence_length=hf.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(**stage),
            post_process=parallel_state.is_pipeline_last_stage(**stage),
            share_embeddings_and_output_weights=sizes.tied and not value,
            position_embedding_type="none",
            vp_stage=chunk,
        )
        self.rotary = LlamaRotaryEmbedding(hf).to(device)
        self.logprob_chunk, self.value_head = logprob_chunk, None
        self.padding = -1 if hf.pad_token_id is None else hf.pad_token_id
        if value and self.post_process:
            self.output_layer = None
            self.value_head = nn.Linear(sizes.hidden, 1, bias=False, dtype=config.params_dtype, device=device)
        first, rows = vocabulary_part(sizes, groups.place())
        tensor_group = self.pg_collection.tp
        self.vocabulary = VocabShard(tensor_group, first, rows) if tensor_group.size() > 1 else None

    def forward(self, packed: Packed, with_entropy: bool = False) -> Tensor | tuple[Tensor, Tensor | None]:
        """The hidden states for the next stage; of the last one [N] float32 and the entropy [N], alike on its ranks."""
        group = self.pg_collection.cp
        part, mine = part_of(packed, group) if group.size() > 1 else (packed, None)
        hidden = self._embed(part.input_ids) if self.pre_process else None
        angles = torch.outer(part.position_ids[0].float(), self.rotary.inv_freq)
        hidden = self.decoder(
            hidden_states=hidden,
            attention_mask=None,
            rotary_pos_emb=torch.cat((angles, angles), -1)[:, None, None],
            packed_seq_params=PackedBlocks(packed=part),
        )
        if not self.post_process:
            return hidden
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, False, self.pg_collection.tp)
        scores = self._score(part, hidden[:, 0].index_select(0, part.source), with_entropy)
        if mine is None:
            return scores
        tokens, entropy = scores
        whole = partial(sum_placed, places=mine, size=len(packed.targets), group=group)
        return whole(tokens), None if entropy is None else whole(entropy)

    def _embed(self, ids: Tensor) -> Tensor:
        """[1, t] -> [t, 1, H], or this tensor rank's part; as in transformers, the padding token's row has no gradient."""
        hidden, group = self.embedding(ids, None), self.pg_collection.tp
        own = ids[0].chunk(group.size())[group.rank()] if self.config.sequence_parallel else ids[0]
        return hidden.detach().where((own == self.padding)[:, None, None], hidden)

    def _score(self, packed: Packed, hidden: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
        """Of the response tokens that `hidden` [n, H] predicts."""
        if self.value_head is not None:
            return self.value_head(hidden).float()[:, 0], None
        head = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else self.output_layer.weight
        return token_log_probs(hidden, head, packed.targets, packed.temperature, self.logprob_chunk, with_entropy, self.vocabulary)


def build(hf: PretrainedConfig, config: MegatronConfig, device: torch.device, value: bool) -> list[Decoder]:
    """Collective over the replica's ranks: the chunks of this rank's pipeline stage, on the device, values unset."""
    as_dict = hf.to_dict()
    sizes = sizes_of(as_dict)
    ours = transformer_config(as_dict, sizes, config, device)
    stages = range(config.virtual_pipeline_size) if config.virtual_pipeline_size > 1 else (None,)
    found = [Decoder(ours, hf, sizes, device, config.logprob_chunk, value, chunk).to(device) for chunk in stages]
    for chunk in found:
        for parameter in chunk.parameters():
            parameter.data.zero_()  # padding of the vocabulary stays so
    return found


def with_gradients(chunks: list[Decoder], optimizer: OptimizerConfig) -> tuple[list[DistributedDataParallel], ChainedOptimizer]:
    """Collective over the cell: gradient buffers in float32, reduced by sums, and the distributed optimizer over them."""
    config = chunks[0].config
    reduction = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    wrapped = [DistributedDataParallel(config, reduction, chunk, disable_bucketing=i > 0) for i, chunk in enumerate(chunks)]
    ours = MegatronOptimizerConfig(
        optimizer="adam",
        lr=optimizer.learning_rate,
        weight_decay=optimizer.weight_decay,
        adam_beta1=optimizer.betas[0],
        adam_beta2=optimizer.betas[1],
        adam_eps=optimizer.eps,
        bf16=config.bf16,
        params_dtype=config.params_dtype,
        use_distributed_optimizer=True,
    )
    return wrapped, get_megatron_optimizer(ours, wrapped, config_overrides={}, use_gloo_process_groups=False)


def named_parameters(chunks: list[Decoder]) -> Iterator[tuple[str, nn.Parameter]]:
    """Of every chunk, layers counted over the whole model."""
    for chunk in chunks:
        numbers = [layer.layer_number - 1 for layer in chunk.decoder.layers]
        for name, parameter in chunk.named_parameters():
            if name.startswith("decoder.layers."):
                _, _, index, rest = name.split(".", 3)
                name = f"decoder.layers.{numbers[int(index)]}.{rest}"
            yield name, parameter
