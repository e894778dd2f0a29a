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
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from spmd_rl.config import EngineConfig
from spmd_rl.engine.attention import NAME, register_attention
from spmd_rl.engine.eager import EagerEngine, TokenModel
from spmd_rl.engine.hf_names import sources, stored_files

REPLICATE_BELOW = 1_000_000_000  # parameters: on the host, sharding a smaller model costs more than it saves


@dataclass
class FSDPConfig(EngineConfig):
    """`shard_size`: ranks that one copy of the parameters is sharded over (HSDP when fewer than all). None: all of them on
    cuda; on the host 1 (replicated) below 1B parameters."""

    shard_size: int | None = None
    reshard_after_forward: bool = True


Config = FSDPConfig


def replica_width(config: FSDPConfig) -> int:
    """Ranks that work on the same rows: FSDP gives each rank rows of its own."""
    return 1


LAYOUTS = {
    "dp2": (2, {"shard_size": 1}),
    "fsdp2": (2, {"shard_size": 2}),
    "hsdp2x2": (4, {"shard_size": 2}),
}


def problems(config: FSDPConfig, num_ranks: int, model: dict | None = None) -> list[str]:
    """What this engine cannot do with this configuration; needs no process group."""
    found = []
    if config.shard_size is not None and (config.shard_size < 1 or num_ranks % config.shard_size):
        divisors = [n for n in range(1, num_ranks + 1) if num_ranks % n == 0]
        found.append(f"engine.shard_size: {config.shard_size} does not divide the {num_ranks} ranks - set one of {divisors}")
    return found


class FSDPEngine(EagerEngine):
    def __init__(self, model_config, engine_config, optimizer_config, checkpoint_config, mesh):
        super().__init__(model_config, engine_config, optimizer_config, checkpoint_config, mesh)
        register_attention()
        hf_config = AutoConfig.from_pretrained(model_config.folder, trust_remote_code=model_config.trust_remote_code)
        _no_dropout(hf_config)
        with torch.device("meta"):
            lm = AutoModelForCausalLM.from_config(
                hf_config, attn_implementation=NAME, dtype=torch.float32, trust_remote_code=model_config.trust_remote_code
            )
            head = None
            if model_config.model_type == "value_model":
                head = nn.Linear(hf_config.hidden_size, 1, bias=False, dtype=torch.float32)
                if not hf_config.tie_word_embeddings:
                    lm.set_output_embeddings(None)
            self.module = TokenModel(lm, engine_config.logprob_chunk, head)
        if engine_config.activation_checkpointing:
            lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self._shard()
        self.module.to_empty(device="cpu" if engine_config.offload else mesh.device)
        lm.tie_weights()
        _load_slices(self.module, Path(model_config.folder))
        _fill_buffers(lm)
        self.finish_build()

    def _shard(self) -> None:
        num_ranks = len(self.mesh.ranks)
        shard = self.config.shard_size
        if shard is None:
            small = sum(p.numel() for p in self.module.parameters()) < REPLICATE_BELOW
            shard = 1 if small and self.mesh.device.type == "cpu" else num_ranks
        self.replicated = shard == 1
        self.plain = self.replicated and self.config.dtype == "float32" and not self.config.offload
        if self.plain:
            return
        shape = (num_ranks,) if shard == num_ranks else (num_ranks // shard, shard)
        names = ("shard",) if shard == num_ranks else ("replicate", "shard")
        options = {
            "mesh": init_device_mesh(self.mesh.device.type, shape, mesh_dim_names=names),
            "reshard_after_forward": self.config.reshard_after_forward and not self.replicated,
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=None if self.config.dtype == "float32" else torch.bfloat16,
                reduce_dtype=torch.float32,
                cast_forward_inputs=False,
            ),
            "offload_policy": CPUOffloadPolicy(pin_memory=self.mesh.device.type == "cuda")
            if self.config.offload
            else OffloadPolicy(),
        }
        for layer in self.module.lm.base_model.layers:
            fully_shard(layer, **options)
        fully_shard(self.module, **options)
        for part in self._parts():
            part.set_gradient_divide_factor(1.0)  # our gradients are sums
            part.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum

    def _parts(self) -> list[FSDPModule]:
        return [m for m in self.module.modules() if isinstance(m, FSDPModule)]

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Replicas add up their micro-batches and reduce once; shards reduce each, since a whole gradient may not fit."""
        if not self.plain:
            self.module.set_requires_gradient_sync(last or not self.replicated)
            self.module.set_reshard_after_backward(last or not self.replicated)
            self.module.set_is_last_backward(last)
        yield
        if self.plain and last:
            self._sum_gradients()

    def _sum_gradients(self) -> None:
        for parameter in self.module.parameters():
            if parameter.grad is None:  # every rank takes part, also for an expert that saw no token here
                parameter.grad = torch.zeros_like(parameter)
        work = [dist.all_reduce(p.grad, group=self.mesh.data_group, async_op=True) for p in self.module.parameters()]
        for handle in work:
            handle.wait()

    def release(self) -> None:
        """Gathered weights left by a forward pass would be what `parameters()` yields, and go stale."""
        for part in self._parts():
            part.reshard()


def _no_dropout(config: PretrainedConfig) -> None:
    """The ratio of the first update is exactly 1 only when both passes see the same network."""
    for name, value in config.to_dict().items():
        if ("dropout" in name or name.endswith("pdrop")) and isinstance(value, float):
            setattr(config, name, 0.0)


def _load_slices(module: TokenModel, folder: Path) -> None:
    """Copies into each parameter the part of the safetensors files that this rank holds.

    Raises ValueError naming what the files lack, and where shapes differ."""
    where = stored_files(folder)
    files = {path: safe_open(path, "pt") for path in set(where.values())}
    missing = []
    with torch.no_grad():
        for name, parameter in module.lm.named_parameters():
            local, region = _local_region(parameter)
            for hf_name, place in sources(name, tuple(parameter.shape)):
                if hf_name not in where:
                    missing.append(hf_name)
                elif local.numel():
                    _copy_overlap(local, region, files[where[hf_name]].get_slice(hf_name), place, parameter.shape, hf_name)
        if module.value_head is not None:
            module.value_head.weight.zero_()  # the first values are 0 whatever the state
    if missing:
        raise ValueError(f"model.path: {folder} lacks {len(missing)} tensors of its architecture: {', '.join(missing[:5])}")


def _local_region(parameter: nn.Parameter) -> tuple[Tensor, list[slice]]:
    """(this rank's part, where it lies in the whole)."""
    if not isinstance(parameter, DTensor):
        return parameter.data, [slice(0, n) for n in parameter.shape]
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return parameter.to_local(), [slice(o, o + n) for o, n in zip(offset, shape)]


def _copy_overlap(local: Tensor, region: list[slice], stored, place: tuple, shape: torch.Size, name: str) -> None:
    """Copies the overlap of a stored tensor, which fills `place` (one int or slice a dim) of a parameter, with `region`."""
    into, out_of, sizes = [], [], []
    for dim, held in enumerate(region):
        part = place[dim] if dim < len(place) else slice(None)
        if isinstance(part, int):
            if not held.start <= part < held.stop:
                return
            into.append(part - held.start)
            continue
        begin, end, _ = part.indices(shape[dim])
        low, high = max(begin, held.start), min(end, held.stop)
        if low >= high:
            return
        into.append(slice(low - held.start, high - held.start))
        out_of.append(slice(low - begin, high - begin))
        sizes.append(end - begin)
    if list(stored.get_shape()) != sizes:
        raise ValueError(f"model.path: tensor {name} has shape {stored.get_shape()}, its architecture wants {sizes}")
    local[tuple(into)].copy_(stored[tuple(out_of)])


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
