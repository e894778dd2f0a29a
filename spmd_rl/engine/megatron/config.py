"""What the Megatron engine is told, and what it cannot do. Imports neither torch nor Megatron."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

from spmd_rl.config import EngineConfig, divisors

FAMILIES = {  # model type -> (bias of q, k and v; norm of each head's q and k)
    "llama": (False, False),
    "qwen2": (True, False),
    "qwen3": (False, True),
    "qwen3_moe": (False, True),
}
ROPE_TYPES = ("default", "linear", "llama3")  # those that change frequencies alone


@dataclass
class MegatronConfig(EngineConfig):
    """Sizes are numbers of ranks; tensor x pipeline x context ranks work on the same rows, and what is left are replicas.

    `sequence_parallel`: under tensor parallelism, norms and residuals hold a part of the sequence each.
    `virtual_pipeline_size`: runs of layers that a pipeline rank holds; over 1 the schedule is interleaved.
    `context_parallel_size`: ranks that split each packed row, and exchange tokens for heads in attention.
    `expert_parallel_size`: ranks that split the experts of a mixture, over rows of one replica or of several."""

    tensor_parallel_size: int = 1
    sequence_parallel: bool = True
    pipeline_parallel_size: int = 1
    virtual_pipeline_size: int = 1
    context_parallel_size: int = 1
    expert_parallel_size: int = 1

    @property
    def splits_sequence(self) -> bool:
        return self.sequence_parallel and self.tensor_parallel_size > 1

    @property
    def expert_tensor_size(self) -> int:
        """Ranks that split one expert: with expert parallelism experts stay whole."""
        return 1 if self.expert_parallel_size > 1 else self.tensor_parallel_size


Config = MegatronConfig

LAYOUTS = {
    "dp2": (2, {}),
    "tp2": (2, {"tensor_parallel_size": 2, "sequence_parallel": False}),
    "tp2sp": (2, {"tensor_parallel_size": 2}),
    "pp2": (2, {"pipeline_parallel_size": 2}),
    "pp2vpp2": (2, {"pipeline_parallel_size": 2, "virtual_pipeline_size": 2}),
    "cp2": (2, {"context_parallel_size": 2}),
    "ep2": (2, {"expert_parallel_size": 2}),
    "tp2ep2": (2, {"tensor_parallel_size": 2, "expert_parallel_size": 2}),
    "tp2pp2": (4, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
    "pp2cp2": (4, {"pipeline_parallel_size": 2, "context_parallel_size": 2}),
    "pp2dp2": (4, {"pipeline_parallel_size": 2}),
    "tp2dp2": (4, {"tensor_parallel_size": 2}),
    "cp2dp2": (4, {"context_parallel_size": 2}),
    "tp2cp2": (4, {"tensor_parallel_size": 2, "context_parallel_size": 2}),
}


@dataclass(frozen=True)
class Sizes:
    """The shape of a decoder, from its configuration as a dict (config.json, or a transformers config's `to_dict`)."""

    model_type: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    experts: int  # 0: no mixture
    expert_intermediate: int
    tied: bool  # the head is the embedding


def sizes_of(model: dict[str, Any]) -> Sizes:
    heads, hidden = model["num_attention_heads"], model["hidden_size"]
    return Sizes(
        model_type=model["model_type"],
        layers=model["num_hidden_layers"],
        hidden=hidden,
        heads=heads,
        kv_heads=model.get("num_key_value_heads") or heads,
        head_dim=model.get("head_dim") or hidden // heads,
        intermediate=model["intermediate_size"],
        vocabulary=model["vocab_size"],
        experts=model.get("num_experts") or model.get("num_local_experts") or 0,
        expert_intermediate=model.get("moe_intermediate_size") or 0,
        tied=bool(model.get("tie_word_embeddings")),
    )


def replica_width(config: MegatronConfig) -> int:
    """Ranks that work on the same rows."""
    return config.tensor_parallel_size * config.pipeline_parallel_size * config.context_parallel_size


def process_layout(config: MegatronConfig) -> None:
    """Two layouts may live in one process: each engine brings its groups back before it computes."""
    return


def problems(config: MegatronConfig, num_ranks: int, model: dict | None = None) -> list[str]:
    """What this engine cannot do with this configuration; needs neither Megatron nor a process group."""
    found = []
    if importlib.util.find_spec("megatron") is None:
        found.append('engine.backend: megatron-core is not installed - pip install "spmd_rl[megatron]", or set engine=fsdp')
    names = ("tensor_parallel", "pipeline_parallel", "virtual_pipeline", "context_parallel", "expert_parallel")
    low = [f"{name}_size" for name in names if vars(config)[f"{name}_size"] < 1]
    if low:
        return found + [f"engine.{name}: {vars(config)[name]} is too small - set at least 1" for name in low]
    width, pp, vpp, ep = (
        replica_width(config),
        config.pipeline_parallel_size,
        config.virtual_pipeline_size,
        config.expert_parallel_size,
    )
    if num_ranks % width:
        return [*found, f"engine.tensor_parallel_size: tensor x pipeline x context = {width} ranks do not divide the {num_ranks} "
                "ranks - set sizes whose product does"]  # fmt: skip
    if vpp > 1 and pp == 1:
        found.append(f"engine.virtual_pipeline_size: {vpp} without a pipeline - set 1, or engine.pipeline_parallel_size over 1")
    if (num_ranks // pp) % (ep * config.expert_tensor_size):
        found.append(f"engine.expert_parallel_size: {ep} does not divide the {num_ranks // pp} ranks of a pipeline stage - "
                     f"set one of {divisors(num_ranks // pp)}")  # fmt: skip
    if model is None:
        return found
    unknown = _unknown(model)
    return found + (unknown or _layout_problems(config, num_ranks, sizes_of(model)))


def _unknown(model: dict[str, Any]) -> list[str]:
    """Parts of the architecture that no layer here computes."""
    kind, rope = model.get("model_type"), model.get("rope_parameters") or model.get("rope_scaling") or {}
    if kind not in FAMILIES:
        return [f"engine.backend: megatron trains {', '.join(FAMILIES)}, not '{kind}' - set engine=fsdp"]
    parts = {
        "rope of type " + (rope_type := str(rope.get("rope_type", rope.get("type", "default")))): rope_type not in ROPE_TYPES,
        "biases beside those of q, k and v": bool(model.get("attention_bias") or model.get("mlp_bias")),
        "sliding-window attention": bool(model.get("use_sliding_window")),
        f"activation {model.get('hidden_act')}": model.get("hidden_act", "silu") != "silu",
        "layers without experts": kind == "qwen3_moe"
        and bool(model.get("mlp_only_layers") or model.get("decoder_sparse_step", 1) != 1),
    }
    return [f"engine.backend: megatron does not compute {part}, which this model has - set engine=fsdp"
            for part, present in parts.items() if present]  # fmt: skip


def _layout_problems(config: MegatronConfig, num_ranks: int, sizes: Sizes) -> list[str]:
    tp, pp, cp, ep = (config.tensor_parallel_size, config.pipeline_parallel_size, config.context_parallel_size,
                      config.expert_parallel_size)  # fmt: skip
    found, stages, kv = [], pp * config.virtual_pipeline_size, sizes.kv_heads // max(1, tp)
    if sizes.heads % tp or sizes.kv_heads % tp or sizes.intermediate % tp:
        able = [n for n in divisors(sizes.kv_heads) if sizes.heads % n == sizes.intermediate % n == 0]
        found.append(f"engine.tensor_parallel_size: {tp} does not divide {sizes.heads} heads, {sizes.kv_heads} key heads and "
                     f"{sizes.intermediate} intermediate units - set one of {able}")  # fmt: skip
    elif (sizes.heads // tp) % cp or (kv % cp and cp % kv):
        able = [n for n in divisors(sizes.heads // tp) if not (kv % n and n % kv)]
        found.append(f"engine.context_parallel_size: {cp} does not divide the {sizes.heads // tp} heads (and {kv} key heads) of a "
                     f"tensor rank - set one of {able}")  # fmt: skip
    if sizes.layers % stages:
        found.append(f"engine.pipeline_parallel_size: {stages} pipeline stages do not divide {sizes.layers} layers - "
                     f"set pipeline x virtual to one of {divisors(sizes.layers)}")  # fmt: skip
    if not sizes.experts:
        return found + ([f"engine.expert_parallel_size: {ep}, and this model has no experts - set 1"] if ep > 1 else [])
    if sizes.experts % ep:
        found.append(f"engine.expert_parallel_size: {ep} does not divide {sizes.experts} experts - "
                     f"set one of {divisors(sizes.experts)}")  # fmt: skip
    if sizes.expert_intermediate % config.expert_tensor_size:
        found.append(f"engine.tensor_parallel_size: {tp} does not divide the {sizes.expert_intermediate} units of an expert - "
                     f"set one of {divisors(sizes.expert_intermediate)}, or engine.expert_parallel_size over 1")  # fmt: skip
    if tp > 1 and not config.sequence_parallel:
        found.append("engine.sequence_parallel: tensor parallelism of a mixture of experts splits the sequence - set true")
    replicas, experts = num_ranks // (tp * pp * cp), ep * config.expert_tensor_size
    if pp > 1 and replicas > 1 and experts != tp * cp:
        found.append(f"engine.expert_parallel_size: with a pipeline and {replicas} replicas the experts are split over the "
                     f"{tp * cp} ranks of a replica's stage, not over {experts} - set {tp * cp}")  # fmt: skip
    return found
