"""VeOmni's models under its FSDP2: it builds and shards; packing, attention over a split row, log-probs and the loop are ours.

VeOmni itself is imported when an engine is made: it lives in an environment of its own (launch/veomni.sh).
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoConfig, PretrainedConfig

from spmd_rl.config import EngineConfig, divisors
from spmd_rl.engine.attention import NAME, register_attention
from spmd_rl.engine.eager import EagerEngine, TokenModel
from spmd_rl.engine.fsdp import no_dropout
from spmd_rl.engine.hf_names import sources
from spmd_rl.engine.slices import load_slices

MODEL_TYPES = ("llama", "qwen2", "qwen3", "qwen3_moe")  # of VeOmni's own models, those that are held to their numbers


@dataclass
class VeOmniConfig(EngineConfig):
    """`ulysses_size`: ranks that work on the same rows: each has a part of the packed row, and in attention of the heads.
    `shard_size`: ranks that one copy of the parameters is sharded over (HSDP when fewer than all), those of `ulysses_size`
    among them. None: all of them.
    `ops`: VeOmni's kernels by name, without `_implementation` (`{moe: fused_triton}`); those not named are eager."""

    shard_size: int | None = None
    ulysses_size: int = 1
    reshard_after_forward: bool = True
    ops: dict[str, str] = field(default_factory=dict)


Config = VeOmniConfig

LAYOUTS = {
    "fsdp2": (2, {}),
    "dp2": (2, {"shard_size": 1}),
    "ulysses2": (2, {"ulysses_size": 2}),
    "hsdp2x2": (4, {"shard_size": 2}),
    "ulysses2xfsdp2": (4, {"ulysses_size": 2}),
    "ulysses2xdp2": (4, {"ulysses_size": 2, "shard_size": 2}),
}


def replica_width(config: VeOmniConfig) -> int:
    """Ranks that work on the same rows."""
    return config.ulysses_size


def process_layout(config: VeOmniConfig) -> dict[str, str]:
    """Kernels are bound for the whole process; layouts may differ."""
    return config.ops


def problems(config: VeOmniConfig, num_ranks: int, model: dict | None = None) -> list[str]:
    """What this engine cannot do with this configuration; needs neither VeOmni nor a process group."""
    ulysses, shard = config.ulysses_size, num_ranks if config.shard_size is None else config.shard_size
    found = []
    if find_spec("veomni") is None:
        found.append("engine.backend: veomni is not installed here - start with `bash launch/veomni.sh`, or set engine=fsdp")
    if ulysses < 1 or num_ranks % ulysses:
        found.append(f"engine.ulysses_size: {ulysses} does not divide the {num_ranks} ranks - set one of {divisors(num_ranks)}")
    elif shard < 1 or num_ranks % shard or shard % ulysses:
        fits = [n for n in divisors(num_ranks) if n % ulysses == 0]
        found.append(
            f"engine.shard_size: {shard} ranks do not divide the {num_ranks}, or are no multiple of engine.ulysses_size "
            f"({ulysses}) - set one of {fits}"
        )
    return found + (_model_problems(config, model) if model is not None else [])


def _model_problems(config: VeOmniConfig, model: dict) -> list[str]:
    kind, heads = model.get("model_type"), model.get("num_attention_heads", 1)
    if kind not in MODEL_TYPES:
        known = ", ".join(MODEL_TYPES)
        return [f"engine.backend: veomni trains {known}, not '{kind}' - set a model of those, or engine=fsdp"]
    if heads % config.ulysses_size:
        return [
            f"engine.ulysses_size: {config.ulysses_size} does not divide the model's {heads} heads - set one of {divisors(heads)}"
        ]
    return []


class VeOmniEngine(EagerEngine):
    def __init__(self, model_config, engine_config, optimizer_config, checkpoint_config, mesh):
        super().__init__(model_config, engine_config, optimizer_config, checkpoint_config, mesh)
        os.environ.setdefault("VEOMNI_VERBOSITY", "ERROR")  # it prints its environment and every op, on each rank
        from veomni.distributed.parallel_state import use_parallel_state
        from veomni.utils.device import get_device_type

        if get_device_type() != mesh.device.type:
            raise ValueError(f"trainer.device: veomni uses {get_device_type()} on this machine - set it, or engine=fsdp")
        register_attention()
        hf_config = AutoConfig.from_pretrained(model_config.folder, trust_remote_code=model_config.trust_remote_code)
        no_dropout(hf_config)
        num_ranks, ulysses = len(mesh.ranks), engine_config.ulysses_size
        shard = num_ranks if engine_config.shard_size is None else engine_config.shard_size
        self.state = _parallel_state(num_ranks, shard, ulysses)
        self.sequence_group, self.length_multiple = self.state.ulysses_group, ulysses
        with use_parallel_state(self.state):
            lm = _model(hf_config, model_config.folder, engine_config.ops)
            self.module = TokenModel(lm, engine_config.logprob_chunk)
            if engine_config.activation_checkpointing:
                lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            _shard(self.module, engine_config, shard > 1, pin=mesh.device.type == "cuda")
        lm.tie_weights()
        for part in self.sharded():
            part.set_gradient_divide_factor(1.0)  # our gradients are sums
            part.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum
        load_slices(lm.named_parameters(), sources, Path(model_config.folder))
        self.finish_build()


def _parallel_state(num_ranks: int, shard: int, ulysses: int) -> Any:
    """Collective over the cell: a rank is (replicate, shard, ulysses), the last fastest. Kept by VeOmni for the next engine."""
    from veomni.distributed.parallel_state import init_parallel_state

    return init_parallel_state(
        dp_size=num_ranks // ulysses,
        dp_replicate_size=num_ranks // shard,
        dp_shard_size=shard // ulysses,
        ulysses_size=ulysses,
        name=None,
    )


def _model(hf_config: PretrainedConfig, folder: str, ops: dict[str, str]) -> nn.Module:
    """VeOmni's model with our attention, float32, on no device but for its buffers."""
    from veomni.arguments import OpsImplementationConfig
    from veomni.models.auto import build_foundation_model
    from veomni.ops import apply_ops_config

    names = [f.name for f in fields(OpsImplementationConfig) if f.name.endswith("_implementation") and f.name[:3] != "qat"]
    chosen = {f"{name}_implementation": kernel for name, kernel in ops.items()}
    apply_ops_config(OpsImplementationConfig(**dict.fromkeys(names, "eager") | chosen))
    return build_foundation_model(
        hf_config, weights_path=folder, torch_dtype="float32", attn_implementation=NAME, init_device="meta"
    )


def _shard(module: TokenModel, config: VeOmniConfig, several: bool, pin: bool) -> None:
    """VeOmni's FSDP2 over the current parallel state; parameters are then on the device, and empty."""
    from veomni.arguments import MixedPrecisionConfig
    from veomni.distributed.torch_parallelize import parallelize_model_fsdp2

    parallelize_model_fsdp2(
        module,
        enable_reshard_after_forward=config.reshard_after_forward and several,
        mixed_precision=MixedPrecisionConfig(enable=config.dtype == "bfloat16", cast_forward_inputs=False),
        basic_modules=list(module.lm._no_split_modules),
        init_device="meta",
        should_skip_hf_weight_load=True,
        enable_fsdp_offload=config.offload,
        fsdp_offload_pin_memory=pin,
    )
