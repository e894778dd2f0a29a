"""FSDP2 on transformers models: each rank reads its own slices, shards or replicates, and reduces by plain sums.

Replicated float32 parameters stay plain tensors: FSDP would hold a second copy of weights and gradients to no end.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from spmd_rl.config import EngineConfig
from spmd_rl.engine import lora
from spmd_rl.engine.attention import NAME, register_attention
from spmd_rl.engine.eager import EagerEngine, TokenModel
from spmd_rl.engine.experts import experts_of, place_experts, rewire_experts
from spmd_rl.engine.fsdp_axes import Axes, axes_problems, shard_dim, sharding_mesh, summing_group
from spmd_rl.engine.half import float32_products, is_emulated
from spmd_rl.engine.hf_names import sources
from spmd_rl.engine.slices import load_slices
from spmd_rl.engine.tensor_parallel import place, rewire

SMALL = 1_000_000_000  # parameters: below it a host holds whole copies of weights and gradients rather than exchange them often


@dataclass
class FSDPConfig(EngineConfig):
    """`shard_size`: ranks that one copy of the parameters is sharded over (HSDP when fewer than all). None: all of them, but
    on the host 1 (replicated) in float32 below 1B parameters.
    `gather_once`: weights are gathered and gradients reduced once a step, and are whole on each rank between. None: on the
    host below 1B parameters.
    `tensor_parallel_size`: ranks that matrices and the vocabulary are split over; they work on the same rows, as do those of
    `ulysses_size`, which have a part of each packed row, and in attention of the heads. `expert_parallel_size`: ranks, each with
    rows of its own, that the experts of a mixture are divided over. `shard_size` counts the ranks of one tensor-parallel part.
    `lora_rank`: what trains is adapters of that rank, of the linear layers named in `lora_targets` (None: all but the head),
    and a critic's value head; 0: all weights. Without adapters the model is its own reference."""

    shard_size: int | None = None
    gather_once: bool | None = None
    reshard_after_forward: bool = True
    tensor_parallel_size: int = 1
    ulysses_size: int = 1
    expert_parallel_size: int = 1
    lora_rank: int = 0
    lora_alpha: float = 32.0
    lora_targets: list[str] | None = None


Config = FSDPConfig


def replica_width(config: FSDPConfig) -> int:
    """Ranks that work on the same rows: FSDP and expert parallelism give each rank rows of its own."""
    return config.tensor_parallel_size * config.ulysses_size


LAYOUTS = {
    "dp2": (2, {"shard_size": 1}),
    "fsdp2": (2, {"shard_size": 2}),
    "tp2": (2, {"tensor_parallel_size": 2, "shard_size": 1}),
    "ulysses2": (2, {"ulysses_size": 2, "shard_size": 1}),
    "ep2": (2, {"expert_parallel_size": 2, "shard_size": 1}),
    "hsdp2x2": (4, {"shard_size": 2}),
    "tp2xfsdp2": (4, {"tensor_parallel_size": 2, "shard_size": 2}),
    "tp2xulysses2": (4, {"tensor_parallel_size": 2, "ulysses_size": 2, "shard_size": 1}),
    "ulysses2xdp2": (4, {"ulysses_size": 2, "shard_size": 2}),
    "ep2xdp2": (4, {"expert_parallel_size": 2, "shard_size": 1}),
    "ep2xfsdp2": (4, {"expert_parallel_size": 2, "shard_size": 4}),
}


def process_layout(config: FSDPConfig) -> None:
    """FSDP2 keeps nothing in the process: engines of any layout live side by side."""


def problems(config: FSDPConfig, num_ranks: int, model: dict | None = None) -> list[str]:
    """What this engine cannot do with this configuration; needs no process group."""
    return axes_problems(config, num_ranks, model) + lora.lora_problems(config, model)


class FSDPEngine(EagerEngine):
    def __init__(self, model_config, engine_config, optimizer_config, checkpoint_config, mesh):
        super().__init__(model_config, engine_config, optimizer_config, checkpoint_config, mesh)
        register_attention()
        self.reduced = False  # plain gradients, over the ranks
        self.has_reference = bool(engine_config.lora_rank) and model_config.trainable
        hf_config = AutoConfig.from_pretrained(model_config.folder, trust_remote_code=model_config.trust_remote_code)
        no_dropout(hf_config)
        with torch.device("meta"):
            lm = AutoModelForCausalLM.from_config(
                hf_config, attn_implementation=NAME, dtype=torch.float32, trust_remote_code=model_config.trust_remote_code
            )
            head = None
            if model_config.model_type == "value_model":
                head = nn.Linear(hf_config.hidden_size, 1, bias=False, dtype=torch.float32)
                if not hf_config.tie_word_embeddings:
                    lm.set_output_embeddings(None)
            if self.has_reference:
                lora.add_adapters(lm, engine_config)
            self.module = TokenModel(lm, engine_config.logprob_chunk, head)
        if engine_config.activation_checkpointing:
            lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if engine_config.dtype == "bfloat16" and is_emulated(torch.bfloat16, mesh.device):
            float32_products(lm)
        self._shard()
        self.module.to_empty(device="cpu" if engine_config.offload else mesh.device)
        lm.tie_weights()
        load_slices(lora.base_parameters(lm), sources, Path(model_config.folder))
        if head is not None:
            head.weight.detach().zero_()  # the first values are 0 whatever the state
        lora.draw_adapters(lm, model_config.seed)
        _fill_buffers(lm)
        self._rewire()
        self.finish_build()

    def _shard(self) -> None:
        config, device, exact = self.config, self.mesh.device.type, self.config.dtype == "float32"
        num_ranks, lm = len(self.mesh.ranks), self.module.lm
        small = device == "cpu" and sum(p.numel() for p in self.module.parameters()) < SMALL
        shard = config.shard_size or (1 if small and exact else num_ranks // config.tensor_parallel_size)
        self.once = (small or shard == 1) if config.gather_once is None else config.gather_once
        self.plain = shard == 1 and exact and not config.offload
        self.axes = Axes(config, num_ranks, None if self.plain else shard, device)
        self.sequence_group, self.length_multiple = self.axes.sequence_group, config.ulysses_size
        if config.tensor_parallel_size > 1:
            place(lm, self.axes.dense["tp"])
            place_experts(lm, self.axes.dense["tp"])
        if self.axes.experts is not None:
            place_experts(lm, self.axes.experts["ep"])
        if not self.plain:
            self._fully_shard(exact)

    def _fully_shard(self, exact: bool) -> None:
        lm, device = self.module.lm, self.mesh.device.type
        options = {
            "reshard_after_forward": self.config.reshard_after_forward and not self.once,
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=None if exact else torch.bfloat16,
                reduce_dtype=torch.float32,
                cast_forward_inputs=False,
            ),
            "offload_policy": CPUOffloadPolicy(pin_memory=device == "cuda") if self.config.offload else OffloadPolicy(),
        }

        def shard(module: nn.Module, whole: DeviceMesh) -> None:
            mesh = sharding_mesh(whole)
            fully_shard(module, mesh=mesh, shard_placement_fn=lambda p: shard_dim(p, mesh.size(-1)), **options)

        for module in experts_of(lm) if self.axes.experts is not None else ():
            shard(module, self.axes.experts)
        for layer in lm.base_model.layers:
            shard(layer, self.axes.dense)
        shard(self.module, self.axes.dense)
        for part in self.sharded():
            part.set_gradient_divide_factor(1.0)  # our gradients are sums
            part.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum

    def _rewire(self) -> None:
        """What makes split modules work together: after tying, which reads whole parameters."""
        if self.config.tensor_parallel_size > 1:
            mesh = self.axes.dense["tp"]
            self.module.vocab = rewire(self.module.lm, mesh.get_group())
            rewire_experts(self.module.lm, mesh.get_group(), same_tokens=True)
        if self.axes.experts is not None:
            rewire_experts(self.module.lm, self.axes.experts.get_group("ep"), same_tokens=False)

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Reduces the gradients of each, or once where a whole gradient fits; over copies of the parameters once."""
        if self.reduced:
            raise RuntimeError("the gradients are reduced already: optimizer_step comes before the next backward pass")
        if not self.plain:
            self.module.set_requires_gradient_sync(last or not self.once)
            self.module.set_requires_all_reduce(last)
            self.module.set_reshard_after_backward(last or not self.once)
            self.module.set_is_last_backward(last)
        yield

    def reduce_gradients(self) -> None:
        if self.plain and not self.reduced:
            self._sum_gradients()
            self.reduced = True

    def optimizer_step(self) -> float:
        norm = super().optimizer_step()
        self.reduced = False
        return norm

    def _sum_gradients(self) -> None:
        groups = {None: summing_group(self.axes.dense)}
        if self.axes.experts is not None:
            groups["ep"] = summing_group(self.axes.experts)
        work = []
        for p in self._trained():
            if p.grad is None:  # every rank takes part, also for an expert that saw no token here
                p.grad = torch.zeros_like(p)
            split = isinstance(p, DTensor)
            group = groups["ep" if split and "ep" in p.device_mesh.mesh_dim_names else None]
            if group is not None:
                work.append(dist.all_reduce(p.grad.to_local() if split else p.grad, group=group, async_op=True))
        for handle in work:
            handle.wait()

    @contextmanager
    def reference(self) -> Iterator[None]:
        with lora.adapters_off(self.module.lm), self.eval_mode():
            yield

    def weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        return lora.merged(super().weights(), self.config) if self.has_reference else super().weights(dtype)

    def load(self, folder: Path) -> None:
        lora.check_stored(folder, self.module, self.config if self.has_reference else None)
        super().load(folder)

    def _state(self) -> dict:
        return lora.adapter_state(super()._state(), self.module, self.config) if self.has_reference else super()._state()


def no_dropout(config: PretrainedConfig) -> None:
    """The ratio of the first update is exactly 1 only when both passes see the same network."""
    for name, value in config.to_dict().items():
        if ("dropout" in name or name.endswith("pdrop")) and isinstance(value, float):
            setattr(config, name, 0.0)


def _fill_buffers(lm: nn.Module) -> None:
    """Non-persistent buffers (rotary frequencies) are lost by meta initialisation: computed again.

    Raises ValueError for a module that cannot be made again from the config alone."""
    for name, part in lm.named_modules():
        if lost := part._non_persistent_buffers_set:
            try:
                fresh = type(part)(lm.config)
            except TypeError as error:
                raise ValueError(
                    f"model.path: buffers {sorted(lost)} of {name} ({type(part).__name__}) cannot be rebuilt"
                ) from error
            for buffer in lost:
                vars(part)["_buffers"][buffer].copy_(vars(fresh)["_buffers"][buffer])
