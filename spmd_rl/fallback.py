"""Cells without re-rooting, should a torch take mesh._reroot's privates away: each cell initialises its own default group.

Nothing spans the world but the job's store. A bridge leans on one private call, the one that init_process_group makes.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from spmd_rl.placement import Ranks, compact


def init_cell(cell: Ranks, world_rank: int, store: dist.Store, backend: str, timeout: timedelta) -> None:
    """Collective over the cell: the default group is the cell. `store`: the job's, which all cells share."""
    own = dist.PrefixStore(f"cell {compact(cell)}", store)
    dist.init_process_group(backend, store=own, rank=cell.index(world_rank), world_size=len(cell), timeout=timeout)


def make_bridge(ranks: Ranks, world_rank: int, store: dist.Store, backend: str, timeout: timedelta, name: str) -> dist.ProcessGroup:
    """Collective over `ranks` (ascending, of any cells), each in a default group. Peers are indices in `ranks`; `name`: unique."""
    index, label, own = ranks.index(world_rank), c10d.GroupName(name), dist.PrefixStore(name, store)
    # An empty list of global ranks: membership is not looked up in the default group, which is the cell
    group, _ = c10d._new_process_group_helper(len(ranks), index, [], c10d.Backend(backend), own, label, timeout=timeout)
    c10d._world.pg_group_ranks[group] = {i: i for i in range(len(ranks))}
    return group
