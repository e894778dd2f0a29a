"""Every bare collective of ours, each with a name in the ledger. What decides control flow is agreed here.

The ledger is a ring of names a group. With `debug.ledger=true` the ring is compared before each collective and the rank
that differs is named at once; without it, its tail is shown when a collective fails.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from spmd_rl.metrics import Stats, add_stats, neutral, pack, schema, unpack, values

Group = dist.ProcessGroup
_rings: dict[str, deque[str]] = defaultdict(lambda: deque(maxlen=32))
_compare = False


def compare_ledgers(on: bool) -> None:
    """Whether every collective first compares its name on all ranks (`debug.ledger`). Set alike on every rank."""
    global _compare
    _compare = on


@contextmanager
def recorded(name: str, group: Group) -> Iterator[None]:
    """Enters `name` in the group's ring around a collective.

    Raises RuntimeError naming the first rank that entered another collective, or with the ring's tail on a failure."""
    ring = _rings[group.group_name]
    ring.append(name)
    if _compare:
        names: list = [None] * group.size()
        dist.all_gather_object(names, name, group=group)
        if other := next((i for i, n in enumerate(names) if n != names[0]), None):
            raise RuntimeError(
                f"ranks diverged: rank 0 of the group entered '{names[0]}', rank {other} entered '{names[other]}'; "
                f"before it: {', '.join(list(ring)[-6:-1])}"
            )
    try:
        yield
    except RuntimeError as error:
        error.add_note(f"[spmd_rl] last collectives of this group: {', '.join(list(ring)[-8:])}")
        raise


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


def all_sum(tensor: Tensor, group: Group, name: str) -> Tensor:
    """Collective: the elementwise sum over ranks, as a new tensor."""
    total = tensor.detach().clone()
    with recorded(name, group):
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
    with recorded(name, group):
        dist.all_gather(out, tensor.contiguous(), group=group)
    return out


def start_broadcasts(tensors: Sequence[Tensor], source: int, group: Group, name: str) -> Callable[[], None]:
    """Collective, in place: the tensors of rank `source` of the group. They are there once what is returned was called."""
    with recorded(name, group):
        works = [dist.broadcast(tensor, group=group, group_src=source, async_op=True) for tensor in tensors]

    def arrived() -> None:
        while works:
            works.pop().wait()

    return arrived


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
