"""The options of engine=torchtitan, and what it cannot do. Imports nothing of TorchTitan."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from spmd_rl.config import EngineConfig, divisors

MODEL_TYPES = ("llama", "qwen2", "qwen3", "qwen3_moe")
RESHARD = ("default", "always", "never")


@dataclass
class TorchTitanConfig(EngineConfig):
    """A replica is pipeline x context x tensor ranks. `shard_size`: replicas that one copy of the parameters is sharded over
    (HSDP when fewer than all; context ranks shard besides). None: all of them.
    `virtual_pipeline_size`: stages of a rank; more than 1 interleaves them. `expert_parallel_size`: ranks that the experts of
    a layer are spread over, out of those that share a copy.
    `reshard_after_forward`: default (not in a pipeline) | always | never."""

    shard_size: int | None = None
    tensor_parallel_size: int = 1
    sequence_parallel: bool = True
    context_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    virtual_pipeline_size: int = 1
    expert_parallel_size: int = 1
    reshard_after_forward: str = "default"


Config = TorchTitanConfig

LAYOUTS = {
    "fsdp2": (2, {}),
    "dp2": (2, {"shard_size": 1}),
    "tp2": (2, {"tensor_parallel_size": 2}),
    "tp2-nosp": (2, {"tensor_parallel_size": 2, "sequence_parallel": False}),
    "cp2": (2, {"context_parallel_size": 2}),
    "pp2": (2, {"pipeline_parallel_size": 2}),
    "pp2-vpp2": (2, {"pipeline_parallel_size": 2, "virtual_pipeline_size": 2}),
    "ep2": (2, {"expert_parallel_size": 2}),
    "hsdp2x2": (4, {"shard_size": 2}),
    "tp2-fsdp2": (4, {"tensor_parallel_size": 2}),
    "cp2-fsdp2": (4, {"context_parallel_size": 2}),
    "cp2-tp2": (4, {"context_parallel_size": 2, "tensor_parallel_size": 2}),
    "pp2-fsdp2": (4, {"pipeline_parallel_size": 2}),
    "pp2-tp2": (4, {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}),
    "pp2-cp2": (4, {"pipeline_parallel_size": 2, "context_parallel_size": 2}),
    "ep2-fsdp2": (4, {"expert_parallel_size": 2}),
    "ep4-tp2": (4, {"expert_parallel_size": 4, "tensor_parallel_size": 2}),
    "ep2-pp2": (4, {"expert_parallel_size": 2, "pipeline_parallel_size": 2}),
}


def replica_width(config: TorchTitanConfig) -> int:
    """Ranks that work on the same rows."""
    return config.pipeline_parallel_size * config.context_parallel_size * config.tensor_parallel_size


def process_layout(config: TorchTitanConfig) -> None:
    """TorchTitan keeps nothing of a layout in the process: engines of any live side by side."""


def shard_size(config: TorchTitanConfig, num_ranks: int) -> int:
    """Replicas over which one copy of the parameters is sharded."""
    return config.shard_size or num_ranks // replica_width(config)


def length_multiple(config: TorchTitanConfig) -> int:
    """Tokens that a packed row must be a multiple of: two chunks for each context rank, each even over the tensor ranks."""
    context, tensor = config.context_parallel_size, config.tensor_parallel_size
    return (2 * context if context > 1 else 1) * (tensor if config.sequence_parallel else 1)


def stage_modules(num_layers: int, num_stages: int) -> list[list[str]]:
    """The modules of each pipeline stage, as even as can be: the embedding counts as a layer, and the head too."""
    units = [["tok_embeddings"], *([f"layers.{i}"] for i in range(num_layers)), ["norm", "lm_head"]]
    least, more = divmod(len(units), num_stages)
    ends = [0]
    for stage in range(num_stages):
        ends.append(ends[-1] + least + (stage < more))
    return [[name for unit in units[begin:end] for name in unit] for begin, end in zip(ends, ends[1:])]


def problems(config: TorchTitanConfig, num_ranks: int, model: dict[str, Any] | None = None) -> list[str]:
    """What this engine cannot do with this configuration; needs neither TorchTitan nor a process group."""
    found = []
    if find_spec("torchtitan") is None:
        found.append('engine.backend: torchtitan is not installed - pip install "spmd_rl[torchtitan]", or set engine=fsdp')
    sizes = [name for name in vars(config) if name.endswith("_size")]
    small = [
        f"engine.{name}: {size} is too small - set at least 1"
        for name in sizes
        if (size := vars(config)[name]) is not None and size < 1
    ]
    if small:
        return found + small
    if config.reshard_after_forward not in RESHARD:
        found.append(f"engine.reshard_after_forward: {config.reshard_after_forward} is unknown - set one of {', '.join(RESHARD)}")
    if config.virtual_pipeline_size > 1 and config.pipeline_parallel_size == 1:
        found.append(
            f"engine.virtual_pipeline_size: {config.virtual_pipeline_size}, but there is no pipeline "
            "(engine.pipeline_parallel_size=1) - set 1, or a pipeline of 2 and more"
        )
    if not config.sequence_parallel and config.tensor_parallel_size > 1 and config.expert_parallel_size > 1:
        found.append("engine.sequence_parallel: false, but experts divided over ranks take a sequence that is split - set true")
    return found + _rank_problems(config, num_ranks) + (_model_problems(config, model) if model else [])


def _rank_problems(config: TorchTitanConfig, num_ranks: int) -> list[str]:
    width = replica_width(config)
    if num_ranks % width:
        return [
            f"engine.tensor_parallel_size: a replica of {config.pipeline_parallel_size} pipeline x {config.context_parallel_size} "
            f"context x {config.tensor_parallel_size} tensor ranks does not divide the {num_ranks} ranks - set sizes whose "
            f"product is one of {divisors(num_ranks)}"
        ]
    replicas, found = num_ranks // width, []
    if replicas % shard_size(config, num_ranks):
        return [f"engine.shard_size: {config.shard_size} does not divide the {replicas} replicas - set one of {divisors(replicas)}"]
    together = shard_size(config, num_ranks) * config.context_parallel_size * config.tensor_parallel_size
    if together % config.expert_parallel_size:
        found.append(
            f"engine.expert_parallel_size: {config.expert_parallel_size} does not divide the {together} ranks that share a copy of "
            f"a layer - set one of {divisors(together)}"
        )
    return found


def _model_problems(config: TorchTitanConfig, model: dict[str, Any]) -> list[str]:
    """`model`: the parsed config.json."""
    kind = model.get("model_type")
    if kind not in MODEL_TYPES:
        return [
            f"engine.backend: torchtitan does not train '{kind}' models - "
            f"set a model of type {', '.join(MODEL_TYPES)}, or engine=fsdp"
        ]
    tied, stages = model.get("tie_word_embeddings", False), config.pipeline_parallel_size * config.virtual_pipeline_size
    layers, experts = model["num_hidden_layers"], _experts(model)
    found = [
        f"engine.backend: torchtitan has no {what} ({kind}) - set another model, or engine=fsdp" for what in _unlike(model, kind)
    ]
    if tied and stages > 1:
        found.append(
            f"engine.pipeline_parallel_size: {config.pipeline_parallel_size}, but the model ties its embedding to its head, which "
            "would be on two ranks - set 1"
        )
    empty = any(not any(name.startswith("layers.") for name in part) for part in stage_modules(layers, stages))
    if stages > layers + 2 or (empty and config.context_parallel_size > 1):
        least = layers if config.context_parallel_size > 1 else layers + 2
        found.append(
            f"engine.pipeline_parallel_size: {stages} stages are too many for {layers} layers - set "
            f"pipeline_parallel_size x virtual_pipeline_size to at most {least}"
        )
    if config.expert_parallel_size > 1 and (not experts or experts % config.expert_parallel_size):
        allowed = divisors(experts) if experts else [1]
        found.append(
            f"engine.expert_parallel_size: {config.expert_parallel_size} does not divide the {experts} experts of a layer - "
            f"set one of {allowed}"
        )
    split = {"num_attention_heads": 1, "num_key_value_heads": model["num_attention_heads"], "vocab_size": 1, "intermediate_size": 1}
    if experts and config.expert_parallel_size == 1:
        split["moe_intermediate_size"] = 1
    odd = {name: n for name, other in split.items() if (n := model.get(name) or other) % config.tensor_parallel_size}
    if odd:
        found.append(
            f"engine.tensor_parallel_size: {config.tensor_parallel_size} does not divide the model's "
            f"{', '.join(f'{name} ({n})' for name, n in odd.items())} - set a common divisor"
        )
    return found


def _experts(model: dict[str, Any]) -> int:
    """Of a layer; transformers writes the key one way and older files have it the other."""
    return model.get("num_experts") or model.get("num_local_experts") or 0 if model["model_type"] == "qwen3_moe" else 0


def _unlike(model: dict[str, Any], kind: str) -> list[str]:
    """What the model has and TorchTitan's decoder has not."""
    rope = model.get("rope_parameters") or model.get("rope_scaling") or {}
    layer_types = set(model.get("layer_types") or ()) - {"full_attention"}
    checks = {
        f"activation {model.get('hidden_act')}": model.get("hidden_act", "silu") != "silu",
        "sliding window": bool(model.get("use_sliding_window") or layer_types),
        "attention bias": bool(model.get("attention_bias")),
        "MLP bias": bool(model.get("mlp_bias")),
        "dynamic rotary frequencies": rope.get("rope_type", rope.get("type")) in ("dynamic", "longrope"),
    }
    return [what for what, there in checks.items() if there]
