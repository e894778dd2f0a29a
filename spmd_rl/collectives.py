"""Every bare collective of ours, each with a name in the ledger. What decides control flow is agreed here.

The ledger is a ring of names a group. With `debug.ledger=true` the names are compared in the job's store before each
collective: a rank that differs, or does not come, is named with what it does instead. Without it, the ring's tail is shown
when a collective fails.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from spmd_rl.mesh import World
from spmd_rl.metrics import Stats, add_stats, neutral, pack, schema, unpack, values
from spmd_rl.placement import compact

Group = dist.ProcessGroup
_rings: dict[str, deque[str]] = defaultdict(lambda: deque(maxlen=32))
_turns: Counter[str] = Counter()  # collectives compared so far, by group
_meeting: tuple[World, float] | None = None  # where names are compared, and how long a rank waits for another's, in seconds


def compare_ledgers(world: World | None, timeout: float = 300.0) -> None:
    """Every collective first compares its name on all ranks (`debug.ledger`); not any more for None. Alike on every rank.

    `timeout`: seconds that a rank waits for the others to enter the collective that it is in."""
    global _meeting
    _meeting = None if world is None else (world, timeout)


@contextmanager
def recorded(name: str, group: Group) -> Iterator[None]:
    """Enters `name` in the group's ring around a collective.

    Raises RuntimeError naming the ranks that entered another collective, or none in time; or with the ring's tail on a
    failure."""
    ring = _rings[group.group_name]
    ring.append(name)
    if _meeting is not None:
        _compare(name, group, list(ring)[-6:-1], *_meeting)
    try:
        yield
    except RuntimeError as error:
        error.add_note(f"[spmd_rl] last collectives of this group: {', '.join(list(ring)[-8:])}")
        raise


def _compare(name: str, group: Group, before: list[str], world: World, timeout: float) -> None:
    """Collective: every rank leaves its name in the store, waits for those of the others, and raises where they differ."""
    store, ranks = world.store, _world_ranks(group, world)
    where = f"ranks {compact(ranks)}"
    ring = f"ledger/{where}/{group.group_name}"
    turn = _turns[ring]
    _turns[ring] += 1
    store.set(f"ledger/last/{world.rank}", f"'{name}' of {where}")
    keys = {rank: f"{ring}/{turn}/{rank}" for rank in ranks}
    store.set(keys[world.rank], name)
    end, pause = time.monotonic() + timeout, 0.0005
    while not (complete := store.check([*keys.values()])) and time.monotonic() < end:
        time.sleep(pause)  # and no wait inside the store, which would keep this connection from other threads
        pause = min(2 * pause, 0.05)
    came = [rank for rank in ranks if complete or store.check([keys[rank]])]
    entered: dict[str, list[int]] = {}
    for rank, found in zip(came, store.multi_get([keys[rank] for rank in came])):
        entered.setdefault(found.decode(), []).append(rank)
    missing = [rank for rank in ranks if rank not in came]
    said = [f"{_who(them)} entered '{what}' of {where}" for what, them in entered.items()]
    for rank in missing:
        last = f"ledger/last/{rank}"
        elsewhere = store.get(last).decode() if store.check([last]) else "none"
        said.append(f"rank {rank} did not within {timeout:g} s (debug.ledger_timeout), its last collective: {elsewhere}")
    if len(said) > 1:
        raise RuntimeError(f"ranks diverged: {'; '.join(said)}. Before it: {', '.join(before) or 'nothing'}")
    if turn:  # all are here, so none has still to read its turn before
        store.delete_key(f"{ring}/{turn - 1}/{world.rank}")


def _who(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {compact(ranks)}"


def _world_ranks(group: Group, world: World) -> Sequence[int]:
    """The group's ranks in the world, in the group's order: torch numbers groups made inside a cell by the cell."""
    if group is world.control:
        return range(world.size)
    bridges = next(iter(world.meshes.values())).bridges
    for ranks, bridge in bridges.items():
        if group is bridge.control or group is bridge.payload:
            return ranks
    cell = next(ranks for ranks, bridge in bridges.items() if bridge.control is dist.group.WORLD)
    return [cell[rank] for rank in dist.get_process_group_ranks(group)]


def agree(flag: bool, group: Group, name: str) -> bool:
    """Collective: whether any rank says so."""
    return all_max([int(flag)], group, name)[0] > 0


def all_max(numbers: Sequence[int], group: Group, name: str) -> list[int]:
    """Collective: the elementwise maximum over ranks."""
    tensor = torch.tensor(numbers, dtype=torch.int64)
    with recorded(name, group):
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
    return tensor.tolist()


def all_max_float(numbers: Sequence[float], group: Group, name: str) -> list[float]:
    """Collective: the elementwise maximum over ranks; NaN where it is on any, which a reduce by MAX may lose."""
    return torch.stack(all_gather_even(torch.tensor(numbers, dtype=torch.float64), group, name)).amax(0).tolist()


def _shaped(name: str, tensor: Tensor) -> str:
    """`name[2, 3] float64`: ranks whose shapes differ have diverged as well."""
    return f"{name}{[*tensor.shape]} {str(tensor.dtype).removeprefix('torch.')}"


def all_sum(tensor: Tensor, group: Group, name: str) -> Tensor:
    """Collective: the elementwise sum over ranks, as a new tensor."""
    total = tensor.detach().clone()
    with recorded(_shaped(name, tensor), group):
        dist.all_reduce(total, group=group)
    return total


def gather_rows(rows: Tensor, group: Group, name: str) -> list[Tensor]:
    """Collective: `rows` [n, k] int64 of every rank, with n its own on each."""
    count = all_gather_even(torch.tensor([rows.shape[0]]), group, f"{name}.count")
    padded = rows.new_zeros(int(max(count)), rows.shape[1])
    padded[: rows.shape[0]] = rows
    return [t[: int(n)] for t, n in zip(all_gather_even(padded, group, name), count)]


def all_gather_even(tensor: Tensor, group: Group, name: str) -> list[Tensor]:
    """Collective: a tensor of one shape from every rank."""
    out = [torch.empty_like(tensor) for _ in range(group.size())]
    with recorded(_shaped(name, tensor), group):
        dist.all_gather(out, tensor.contiguous(), group=group)
    return out


def start_broadcast(tensor: Tensor, source: int, group: Group, name: str) -> Callable[[], object]:
    """Collective, in place: the tensor of rank `source` of the group. It is there once what is returned was called."""
    with recorded(name, group):
        return dist.broadcast(tensor, group=group, group_src=source, async_op=True).wait


def broadcast_object(value, source: int, group: Group, name: str):
    """Collective: a small picklable value of rank `source` of the group."""
    box = [value]
    with recorded(name, group):
        dist.broadcast_object_list(box, group=group, group_src=source)
    return box[0]


def gather_objects(value, group: Group, name: str) -> list:
    """Collective: a small picklable value of every rank."""
    values: list = [None] * group.size()
    with recorded(name, group):
        dist.all_gather_object(values, value, group=group)
    return values


def exchange(sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], group: Group, name: str) -> None:
    """Point to point: sends tensors to, and fills tensors from, ranks of the group; both sides know the whole plan."""
    with recorded(name, group):
        work = [dist.isend(t, group=group, group_dst=peer) for peer, t in sends]
        work += [dist.irecv(t, group=group, group_src=peer) for peer, t in receives]
        for handle in work:
            handle.wait()


def barrier(group: Group, name: str) -> None:
    """Collective: returns once every rank has called it."""
    with recorded(name, group):
        dist.barrier(group=group)


def reduce_stats(stats: Stats, group: Group, name: str) -> dict[str, float]:
    """Collective: the statistics of all ranks as plain numbers. A key that some ranks lack adds nothing there."""
    schemas = gather_objects(schema(stats), group, f"{name}.keys")
    agreed = sorted({tuple(entry) for one in schemas for entry in one})
    summed, maxed = pack(add_stats(neutral(agreed), stats), agreed)
    with recorded(name, group):
        total, largest = torch.tensor(summed, dtype=torch.float64), torch.tensor(maxed, dtype=torch.float64)
        dist.all_reduce(total, group=group)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return values(unpack((total.tolist(), largest.tolist()), agreed))
