"""Parameters gathered from their shards, whatever the number of rows: what the weight stream is made of."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from spmd_rl.config import TimeoutConfig
from spmd_rl.engine import eager
from spmd_rl.launch import detect_launch
from spmd_rl.mesh import Role, close_world, open_store, split_world
from tests.launch import spmd

SHAPES = [(8, 3), (7, 5), (2, 4), (1,), (5,), (6, 2, 3), (9, 16)]


@spmd(world_size=4)
def test_full_tensors(folder):
    """Both ways to gather, HSDP beside FSDP, uneven and empty shards, plain tensors between; buckets of any size."""
    launch, timeouts = detect_launch(), TimeoutConfig(collective=60, phase=60)
    world = split_world({"actor": Role((0, 1, 2, 3), 4)}, launch, open_store(launch, timeouts), "cpu", timeouts)
    generator = torch.Generator().manual_seed(3)
    whole = {f"{kind}.{i}": torch.randn(s, generator=generator) for kind in ("fsdp", "hsdp", "plain") for i, s in enumerate(SHAPES)}
    whole["half"] = torch.randn(5, 2, generator=generator).bfloat16()
    whole["columns"] = torch.randn(4, 4, generator=generator)
    flat = init_device_mesh("cpu", (4,))
    layouts = {
        "fsdp": (flat, [Shard(0)]),
        "hsdp": (init_device_mesh("cpu", (2, 2)), [Replicate(), Shard(0)]),
        "half": (flat, [Shard(0)]),
        "columns": (flat, [Shard(1)]),
    }
    held = {n: distribute_tensor(t, *layouts[k]) if (k := n.split(".")[0]) in layouts else t for n, t in whole.items()}
    in_place = eager.gather_in_place
    for gather in (in_place, eager.gather_flat):
        eager.gather_in_place = gather
        for limit in (1, 200, 1 << 20):
            eager.GATHER_BYTES = limit
            got = list(eager.full_tensors(held.items()))
            assert [name for name, _ in got] == list(whole)
            for name, tensor in got:
                assert tensor.dtype == whole[name].dtype and torch.equal(tensor, whole[name]), (gather, limit, name)
    check_global_norm(init_device_mesh("cpu", (4,)))
    close_world(world)


def check_global_norm(device_mesh):
    """Plain tensors beside sharded ones, where torch's own clipping raises."""
    sharded = torch.nn.Parameter(distribute_tensor(torch.zeros(4), device_mesh, [Shard(0)]))
    sharded.grad = distribute_tensor(torch.tensor([1.0, 2.0, 3.0, 4.0]), device_mesh, [Shard(0)])
    plain = torch.nn.Parameter(torch.zeros(2))
    plain.grad = torch.tensor([5.0, 6.0])
    assert eager.global_norm([sharded, plain]) == pytest.approx(math.sqrt(91))
