"""How the ranks of an FSDP engine are divided. A rank is (data, tensor), the last fastest; data is (replica, sequence part).

Dense parameters are sharded and replicated over the data ranks, experts over those that expert parallelism leaves.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from spmd_rl.config import divisors
from spmd_rl.engine.experts import expert_problems
from spmd_rl.engine.tensor_parallel import plan_of, read_config, splits_heads, tensor_parallel_problems


class AxesOptions(Protocol):
    shard_size: int | None
    tensor_parallel_size: int
    ulysses_size: int
    expert_parallel_size: int


def axes_problems(config: AxesOptions, num_ranks: int, model: dict | None) -> list[str]:
    """What is wrong with the sizes. `model`: its parsed config.json, or None where it is not known yet."""
    tp, ulysses, ep = config.tensor_parallel_size, config.ulysses_size, config.expert_parallel_size
    sizes = {"tensor_parallel_size": tp, "ulysses_size": ulysses, "expert_parallel_size": ep}
    if small := [f"engine.{name}: {n} is too small - set at least 1" for name, n in sizes.items() if n < 1]:
        return small
    if num_ranks % (tp * ulysses):
        return [
            f"engine.tensor_parallel_size x engine.ulysses_size: {tp} x {ulysses} does not divide the {num_ranks} ranks - "
            f"set a product of {divisors(num_ranks)}"
        ]
    found, data = [], num_ranks // tp
    if config.shard_size is not None and (config.shard_size < 1 or data % config.shard_size):
        ranks = f"{data} ranks" if tp == 1 else f"{data} ranks that each part of tensor_parallel_size={tp} has"
        found.append(f"engine.shard_size: {config.shard_size} does not divide the {ranks} - set one of {divisors(data)}")
    if ep > 1 and tp > 1:
        found.append(
            f"engine.expert_parallel_size: {ep} with tensor_parallel_size={tp}, which already divides the experts - set one to 1"
        )
    elif data % ep:
        found.append(f"engine.expert_parallel_size: {ep} does not divide the {data} ranks - set one of {divisors(data)}")
    return found + (_model_problems(config, model) if model else [])


def _model_problems(config: AxesOptions, model: dict) -> list[str]:
    tp, ulysses, ep = config.tensor_parallel_size, config.ulysses_size, config.expert_parallel_size
    if tp * ulysses * ep == 1:
        return []
    known = read_config(model)
    if known is None:
        return [
            f"engine.{name}: {n}, but transformers does not know model type '{model.get('model_type')}' - set 1"
            for name, n in (("tensor_parallel_size", tp), ("ulysses_size", ulysses), ("expert_parallel_size", ep))
            if n > 1
        ]
    found = tensor_parallel_problems(tp, known) if tp > 1 else []
    heads = known.num_attention_heads // (tp if splits_heads(plan_of(known)) else 1)
    if heads % ulysses:
        each = f" on each of {tp} ranks of tensor_parallel_size" if heads < known.num_attention_heads else ""
        found.append(
            f"engine.ulysses_size: {ulysses} does not divide the model's {heads} heads{each} - set one of {divisors(heads)}"
        )
    return found + (expert_problems(ep, known) if ep > 1 else [])


class Axes:
    """The meshes of this rank. `dense`: replicate x shard x tp; `experts`: replicate x shard x ep. Axes of one rank are left
    out, but `shard` where FSDP is at work."""

    def __init__(self, config: AxesOptions, num_ranks: int, shard: int | None, device: str):
        """Collective over the cell. `shard`: None where there is no FSDP."""
        tp, ep, ulysses = config.tensor_parallel_size, config.expert_parallel_size, config.ulysses_size
        data = num_ranks // tp
        self.dense = _mesh(device, replicate=data // (shard or 1), shard=shard, tp=tp)
        self.experts: DeviceMesh | None = None
        self.sequence_group: dist.ProcessGroup | None = None
        if ep > 1:
            rest = shard // ep if shard and shard % ep == 0 else 1
            self.experts = _mesh(device, replicate=data // ep // rest, shard=rest if shard else None, ep=ep)
        if ulysses > 1:
            self.sequence_group = _mesh(device, replica=data // ulysses, ulysses=ulysses, tp=tp).get_group("ulysses")


def _mesh(device: str, **sizes: int | None) -> DeviceMesh:
    kept = {name: n for name, n in sizes.items() if n and (n > 1 or name == "shard")} or {"replicate": 1}
    return init_device_mesh(device, tuple(kept.values()), mesh_dim_names=tuple(kept))


def sharding_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The axes that FSDP works on."""
    return mesh[tuple(name for name in mesh.mesh_dim_names if name in ("replicate", "shard"))]


def summing_group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """The ranks that hold copies of a parameter; None where there is one."""
    return mesh.get_group("replicate") if "replicate" in mesh.mesh_dim_names else None


def shard_dim(parameter: nn.Parameter, size: int) -> Shard | None:
    """Where FSDP cuts: dim 0, but an uneven vocabulary, already cut there, in the other dim.

    Raises ValueError where that would be uneven too."""
    if size == 1 or not isinstance(parameter, DTensor):
        return None
    parts = math.prod(n for n, p in zip(parameter.device_mesh.shape, parameter.placements) if p.is_shard(0))
    if parameter.shape[0] % parts == 0:
        return None
    if parameter.shape[1] % size:
        raise ValueError(
            f"engine.shard_size: {size} does not divide the hidden size {parameter.shape[1]}, nor tensor_parallel_size={parts} "
            f"the vocabulary of {parameter.shape[0]} - set shard_size to one of {divisors(parameter.shape[1])}"
        )
    return Shard(1)
