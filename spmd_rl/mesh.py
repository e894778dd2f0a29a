"""From one world of ranks to cells and role meshes. The only place that makes process groups of ours.

A cell is the set of ranks that share the same roles. Inside a cell the default process group *is* the cell, so an engine
believes that it is alone. `split_world` runs once, on every rank, before any engine library is imported.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import combinations, takewhile
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from spmd_rl.config import ConfigError, TimeoutConfig
from spmd_rl.launch import Launch
from spmd_rl.placement import Ranks, compact, placement_problems

EAGER_RANKS = 256  # a gloo group connects each pair at once: in larger worlds a rank would run out of file descriptors


class Role(NamedTuple):
    """What a role asks of the world: its ranks, and how many data-parallel replicas they form."""

    ranks: Ranks  # world ranks, replica-major: rank = ranks[replica * width + lane]
    num_replicas: int


class Bridge(NamedTuple):
    """The groups on the union of two whole cells (or on one cell). Peers are addressed by index in `ranks`."""

    ranks: Ranks  # world ranks, ascending
    control: dist.ProcessGroup  # gloo; waits for a phase
    payload: dist.ProcessGroup  # the devices' backend; waits for a collective


@dataclass(frozen=True)
class RoleMesh:
    """The ranks of one role: `num_replicas` data-parallel replicas of `width` lanes. Compares by layout, not by name."""

    ranks: Ranks
    num_replicas: int
    world_rank: int = field(compare=False)
    device: torch.device = field(compare=False)
    data_group: dist.ProcessGroup | None = field(compare=False, default=None)  # same lane of every replica
    lane_group: dist.ProcessGroup | None = field(compare=False, default=None)  # the lanes of this rank's replica
    bridges: Mapping[Ranks, Bridge] = field(compare=False, default_factory=dict, repr=False)

    @property
    def here(self) -> bool:
        """Whether this rank is in the mesh."""
        return self.world_rank in self.ranks

    @property
    def width(self) -> int:
        return len(self.ranks) // self.num_replicas

    @property
    def replica(self) -> int:
        return self.ranks.index(self.world_rank) // self.width

    @property
    def lane(self) -> int:
        return self.ranks.index(self.world_rank) % self.width

    def rank_of(self, replica: int, lane: int = 0) -> int:
        """World rank of a lane."""
        return self.ranks[replica * self.width + lane]

    def __str__(self) -> str:
        """`0-3/2`: two replicas on ranks 0 to 3."""
        return f"{compact(self.ranks)}/{self.num_replicas}"

    def bridge(self, other: RoleMesh) -> Bridge:
        return self.bridges[tuple(sorted({*self.ranks, *other.ranks}))]


@dataclass(frozen=True)
class World:
    rank: int
    size: int
    device: torch.device
    control: dist.ProcessGroup  # gloo, every rank: stop signals, metrics, checkpoint commit
    meshes: Mapping[str, RoleMesh]
    store: dist.Store  # of the job, which every rank reaches


def open_store(launch: Launch, timeouts: TimeoutConfig) -> dist.Store:
    """A connection to the job's key-value store, apart from other attempts at the same job."""
    store = dist.TCPStore(
        launch.address, launch.port, is_master=launch.hosts_store, timeout=timedelta(seconds=timeouts.collective),
        wait_for_workers=False, multi_tenant=True,
    )  # fmt: skip
    return dist.PrefixStore(f"spmd_rl/{launch.restart}", store)


def split_world(roles: Mapping[str, Role], launch: Launch, store: dist.Store, device: str, timeouts: TimeoutConfig) -> World:
    """Collective over every rank of the job. Makes the world, its cells and bridges, then re-roots to this rank's cell.

    `device`: cpu or cuda. Raises ConfigError, before any group exists, when a rank has no role, when two roles share
    some but not all of their ranks, when a cell cuts a node, or when replicas do not divide a role's ranks. A rank makes the
    groups of every cell and bridge (a function of the number of cells alone), and of the axes only its own."""
    placement = {name: role.ranks for name, role in roles.items()}
    problems = placement_problems(placement, launch.world_size, launch.local_world_size)
    problems += [
        f"placement.{name}: {role.num_replicas} replicas do not divide its {len(role.ranks)} ranks"
        for name, role in roles.items()
        if len(role.ranks) % role.num_replicas
    ]
    if problems:
        raise ConfigError("\n".join(problems))
    collective, phase = timedelta(seconds=timeouts.collective), timedelta(seconds=timeouts.phase)
    if launch.world_size > EAGER_RANKS:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    dist.init_process_group("gloo", store=store, rank=launch.rank, world_size=launch.world_size, timeout=phase)
    control = dist.group.WORLD
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    cells = sorted({role.ranks for role in roles.values()})
    bridges = {}
    for cell in cells:
        group = dist.new_group(list(cell), backend=backend, timeout=collective)
        bridges[cell] = Bridge(cell, group, group)
    for one, other in combinations(cells, 2):
        union = tuple(sorted(one + other))
        slow = dist.new_group(list(union), backend="gloo", timeout=phase)
        bridges[union] = Bridge(
            union, slow, slow if device == "cpu" else dist.new_group(list(union), backend=backend, timeout=collective)
        )
    index = next(i for i, cell in enumerate(cells) if launch.rank in cell)
    _reroot(bridges[cells[index]].payload, index, launch.rank)
    here = _enter_cell(cells[index], launch, device)
    if device == "cuda":
        _connect(bridges, launch.rank, here)
    layouts: dict[Role, tuple] = {}
    for role in roles.values():
        if role not in layouts:
            layouts[role] = _axis_groups(role, launch.rank, backend, collective)
    meshes = {
        name: RoleMesh(role.ranks, role.num_replicas, launch.rank, here, *layouts[role], bridges) for name, role in roles.items()
    }
    return World(launch.rank, launch.world_size, here, control, meshes, store)


def _reroot(group: dist.ProcessGroup, index: int, world_rank: int) -> None:
    """Makes the cell's group the default group, its ranks 0..n-1. torch privates: tests/spmd/test_rerooting.py proves each."""
    c10d._update_default_pg(group)  # libraries see only the cell
    c10d._world.pg_group_ranks[group] = {i: i for i in range(group.size())}  # src= and get_global_rank speak cell ranks
    c10d._world.group_count += 10_000 * (index + 1)  # later groups of two cells never share a name
    torch._C._distributed_c10d._set_global_rank(world_rank)  # log prefixes keep the world's rank


def _enter_cell(cell: Ranks, launch: Launch, device: str) -> torch.device:
    """Makes the environment agree with the default group; the device of this rank. Before the first CUDA call."""
    devices = None
    if device == "cuda":
        devices = visible_devices(os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.device_count())
    os.environ.update(cell_environment(cell, launch, devices))
    if devices is None:
        return torch.device("cpu")
    num_devices = os.environ["CUDA_VISIBLE_DEVICES"].count(",") + 1
    here = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % num_devices)
    torch.cuda.set_device(here)
    if torch.cuda.device_count() != num_devices:
        raise RuntimeError(
            f"this process sees {torch.cuda.device_count()} CUDA devices, its cell has {num_devices}: CUDA was initialised before "
            f"the cells were made - call nothing of torch.cuda but device_count() until then"
        )
    return here


def visible_devices(value: str | None, count: int) -> list[str]:
    """The devices that CUDA enumerates, in its order. `value`: of CUDA_VISIBLE_DEVICES, None where it is not set.

    `count`: devices of the node, where nothing is set. An entry that is no device hides those behind it, as for CUDA."""
    if value is None:
        return [str(i) for i in range(count)]
    return list(takewhile(lambda entry: entry not in ("", "-1", "NoDevFiles"), (entry.strip() for entry in value.split(","))))


def cell_environment(cell: Ranks, launch: Launch, devices: list[str] | None) -> dict[str, str]:
    """What a library inside the cell reads, as if a torchrun had started the cell alone.

    `devices`: as this process sees them, None on a host. The cell keeps its own on this node, in its order, so that
    rank % device_count is the local rank. Ranks that share too few devices keep all of them. One that sees a single device,
    also of those that MIG made, of which CUDA shows only the first, has LOCAL_RANK 0."""
    first = launch.rank - launch.local_rank
    local = [rank - first for rank in cell if first <= rank < first + launch.local_world_size]
    found = {
        "RANK": cell.index(launch.rank),
        "WORLD_SIZE": len(cell),
        "LOCAL_RANK": local.index(launch.local_rank),
        "LOCAL_WORLD_SIZE": len(local),
        "MASTER_ADDR": launch.address,
        "MASTER_PORT": launch.port,
    }
    if devices is not None:
        mine = [devices[i] for i in local] if len(devices) >= launch.local_world_size else devices
        if len(devices) > launch.local_rank and devices[launch.local_rank].startswith("MIG-"):
            mine = [devices[launch.local_rank]]
        if len(mine) == 1:
            found["LOCAL_RANK"] = 0
        found["CUDA_VISIBLE_DEVICES"] = ",".join(mine)
    return {name: str(value) for name, value in found.items()}


def _connect(bridges: Mapping[Ranks, Bridge], rank: int, device: torch.device) -> None:
    """Collective over every rank: one tiny all-reduce on each payload group, since NCCL connects a group by its first call."""
    for ranks, bridge in bridges.items():
        if rank in ranks:
            ready = torch.zeros(1, device=device)
            dist.all_reduce(ready, group=bridge.payload)
            ready.item()  # one communicator at a time


def _axis_groups(role: Role, rank: int, backend: str, timeout: timedelta) -> tuple:
    """(data group, lane group) of this rank, made inside the cell; (None, None) outside the role.

    Only its members make a group, so that a rank makes two at most, however many replicas there are. torch derives such a
    group's name from its ranks and from how many groups this rank is in, which is alike on all ranks of a cell."""
    if rank not in role.ranks:
        return None, None
    width, cell = len(role.ranks) // role.num_replicas, sorted(role.ranks)
    replica, lane = divmod(role.ranks.index(rank), width)

    def axis(ranks: Ranks) -> dist.ProcessGroup:
        inside = [cell.index(r) for r in ranks]
        return dist.new_group(inside, backend=backend, timeout=timeout, use_local_synchronization=True)

    data = axis(role.ranks[lane::width]) if width > 1 else dist.group.WORLD
    lanes = dist.group.WORLD
    if role.num_replicas > 1:
        lanes = axis(role.ranks[replica * width : (replica + 1) * width]) if width > 1 else None
    return data, lanes


def describe(meshes: Mapping[str, RoleMesh], hosts: list[str]) -> list[str]:
    """The map rank -> host -> roles, a line a host, then a line a role. `hosts`: the host of every rank of the world."""
    cells: dict[Ranks, list[str]] = {}
    for name, mesh in meshes.items():
        cells.setdefault(tuple(sorted(mesh.ranks)), []).append(name)
    lines = []
    for host in dict.fromkeys(hosts):
        here = {rank for rank, other in enumerate(hosts) if other == host}
        parts = [f"ranks {compact(shared)} {', '.join(names)}" for ranks, names in cells.items() if (shared := here & {*ranks})]
        lines.append(f"{host}: {'; '.join(parts)}")
    for name, mesh in meshes.items():
        lines.append(f"{name}: ranks {compact(mesh.ranks)} as {mesh.num_replicas} replicas of {mesh.width}")
    return lines


def close_world(world: World) -> None:
    """Collective over every rank. A cell that leaves early would kill the others, and gloo aborts without the barrier."""
    dist.barrier(group=world.control)
    dist.destroy_process_group()
