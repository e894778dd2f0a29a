"""Values that live on a mesh, and the only traffic that crosses meshes: `batch.to(mesh)` and `weights.to(mesh)`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from spmd_rl.batch import (
    DTYPES,
    PER_ROW,
    Batch,
    Prompts,
    fields_of,
    make_batch,
    pad_to,
    pick_mini_batch,
    plan_balance,
    plan_routes,
    row_cost,
    sort_rows,
)
from spmd_rl.collectives import all_max, barrier, broadcast_object, exchange, gather_rows, start_broadcast
from spmd_rl.mesh import Bridge, RoleMesh

T = TypeVar("T")
U = TypeVar("U")
BUCKET_BYTES = 64 << 20
ALIGNMENT = 64  # bytes, of tensors in a bucket
traffic: Counter[str] = Counter()  # bytes that this rank sent, by kind; the trainer reads it as a metric


@dataclass(frozen=True)
class Placed(Generic[T]):
    """A T that lives on a mesh: each replica's ranks hold its shard, ranks outside hold None."""

    mesh: RoleMesh
    local: T | None

    def __bool__(self) -> bool:
        raise TypeError("a Placed has no truth value that all ranks share - compare with `is None`")

    def map(self, function: Callable[[T], U]) -> Placed[U]:
        """Local: applies a pure function where the value lives."""
        return Placed(self.mesh, function(self.local) if self.mesh.here else None)

    def to(self: Placed[Batch], mesh: RoleMesh) -> Placed[Batch]:
        """Collective over source and destination, no one else: whole groups, balanced by `row_cost` over `mesh`'s replicas.

        The plan does not depend on where rows are now: a second move to the same layout sends nothing."""
        if not self.mesh.here and not mesh.here:
            return Placed(mesh, None)
        return Placed(mesh, _move(self, mesh))

    def mini_batches(self: Placed[Batch], epochs: int, num_mini_batches: int, seed: str) -> Iterator[Placed[Batch]]:
        """Collective over the mesh: mini-batches of whole groups, each balanced over the replicas."""
        if epochs == num_mini_batches == 1:
            yield self
            return
        uids: list[int] = []
        if self.mesh.here:
            bridge = self.mesh.bridge(self.mesh)
            uids = torch.cat(gather_rows(self.local.uid[:, None], bridge.control, "mini_batches.uids")).flatten().tolist()
        for epoch in range(epochs):
            for chosen in pick_mini_batch(uids, num_mini_batches, f"{seed}/{epoch}"):
                yield self.map(partial(_rows_of, chosen)).to(self.mesh)

    def score(self: Placed[Batch], scorer: Callable[[Batch], None]) -> Placed[Batch]:
        """Collective over a replica: lane 0 runs `scorer`, which sets `rewards` and may change `token_rewards` and narrow
        `response_mask`."""
        if self.mesh.here and self.mesh.lane == 0:
            scorer(self.local)
        if self.mesh.here and self.mesh.width > 1:
            found = (self.local.rewards, self.local.response_mask, self.local.token_rewards)
            found = broadcast_object(found, 0, self.mesh.lane_group, "score")
            self.local.rewards, self.local.response_mask, self.local.token_rewards = found
        return self


def _rows_of(uids: set[int], batch: Batch) -> Batch:
    return batch[torch.tensor([uid in uids for uid in batch.uid.tolist()], dtype=torch.bool)]


def shard_prompts(prompts: Prompts, mesh: RoleMesh) -> Placed[Prompts]:
    """Local: every replica takes its share of prompts that all ranks know."""
    share = torch.arange(len(prompts))[mesh.replica :: mesh.num_replicas] if mesh.here else None
    return Placed(mesh, None if share is None else prompts[share])


def _move(placed: Placed[Batch], mesh: RoleMesh) -> Batch | None:
    source, local, bridge = placed.mesh, placed.local, mesh.bridge(placed.mesh)
    index = {rank: i for i, rank in enumerate(bridge.ranks)}
    me, holds = index[mesh.world_rank], source.here and source.lane == 0
    what = f"move[{source} -> {mesh}]"
    names, width = _agree_schema(local if holds else None, bridge, what)
    named = torch.stack([local.uid, local.lengths], 1) if holds else torch.zeros(0, 2, dtype=torch.int64)
    held = [rows.tolist() for rows in gather_rows(named, bridge.control, f"{what}.rows")]  # by index in the bridge
    costs: Counter[int] = Counter()
    for uid, length in (row for rows in held for row in rows):
        costs[uid] += row_cost(length)
    plan = plan_balance(list(costs.items()), mesh.num_replicas)
    if source == mesh and all({u for u, _ in held[index[mesh.rank_of(i)]]} == {*uids} for i, uids in enumerate(plan)):
        return sort_rows(local)
    lanes = [[index[mesh.rank_of(replica, lane)] for lane in range(mesh.width)] for replica in range(mesh.num_replicas)]
    sends, receives, parts = [], [], []
    for route in plan_routes([[uid for uid, _ in rows] for rows in held], plan, lanes, me):
        if route.source == me:
            buffer = _encode(local[torch.tensor(route.rows)], names, width)
        else:
            buffer = torch.empty(len(route.rows) * _row_bytes(names, width), dtype=torch.uint8)
            receives.append((route.source, buffer))
        if route.target == me:
            parts.append(_Part(buffer, len(route.rows)))
        else:
            sends.append((route.target, buffer))
    traffic["batch"] += sum(buffer.numel() for _, buffer in sends)
    exchange(sends, receives, bridge.control, f"{what}.payload")
    if not mesh.here:
        return None
    shards = [_decode(part, names, width) for part in parts] or [_decode(_Part(torch.empty(0, dtype=torch.uint8), 0), names, width)]
    return sort_rows(torch.cat(shards))


class _Part(NamedTuple):
    buffer: Tensor  # uint8
    rows: int


def _agree_schema(local: Batch | None, bridge: Bridge, what: str) -> tuple[list[str], int]:
    """(fields present on any rank, the largest T of those with rows): the same on every rank, also where none has rows."""
    present = fields_of(local) if local is not None else {}
    width = local.input_ids.shape[1] if present and len(local) else 0
    width, *there = all_max([width, *(int(name in present) for name in DTYPES)], bridge.control, f"{what}.schema")
    return [name for name, yes in zip(DTYPES, there) if yes], width


def _columns(name: str, width: int) -> int:
    return 1 if name in PER_ROW else width


def _row_bytes(names: list[str], width: int) -> int:
    return sum(DTYPES[name].itemsize * _columns(name, width) for name in names)


def _encode(batch: Batch, names: list[str], width: int) -> Tensor:
    """The rows as one uint8 buffer, field after field."""
    tensors = fields_of(batch)
    flat = (t if t.ndim == 1 else pad_to(t, width) for t in (tensors[n].to(DTYPES[n]) for n in names))
    return torch.cat([t.contiguous().view(-1).view(torch.uint8) for t in flat])


def _decode(part: _Part, names: list[str], width: int) -> Batch:
    sizes = [part.rows * DTYPES[name].itemsize * _columns(name, width) for name in names]
    tensors = {}
    for name, piece in zip(names, part.buffer.split(sizes)):
        flat = piece.clone().view(DTYPES[name])  # clone: a slice need not be aligned
        tensors[name] = flat if name in PER_ROW else flat.view(part.rows, width)
    return make_batch(tensors)


def digest(tensor: Tensor) -> int:
    """A checksum of the tensor's bits: their sum as integers, which costs little more than reading them once."""
    flat = tensor.detach().contiguous().flatten().view(torch.uint8)
    words = flat[: flat.numel() // 8 * 8].view(torch.int64)
    return int(words.sum()) + int(flat[words.numel() * 8 :].sum())


@dataclass(frozen=True)
class WeightStream:
    """Lazy (HF name, full tensor) pairs of a mesh; None outside it. Consumed once, before any other traffic.

    `expected`, called after the last pair: what the source itself makes of these weights (log-probs of the probe).
    `version`: how many steps made these weights; it travels with them, and must be that of the receiver's stream.
    `dtype`: what floating tensors are cast to before they travel, that of the receiver; None: as they are."""

    mesh: RoleMesh
    named: Iterable[tuple[str, Tensor]] | None
    expected: Callable[[], list[list[float]]] = list
    version: int = 0
    dtype: torch.dtype | None = None

    def to(self, mesh: RoleMesh) -> WeightStream:
        """Local now, collective over source and destination when consumed. Within one cell it is handed over in place.

        Across cells the ranks of the source take turns as senders of a bucket, so that no single link is the limit."""
        if {*self.mesh.ranks} == {*mesh.ranks}:
            return replace(self, mesh=mesh)
        if not self.mesh.here and not mesh.here:
            return WeightStream(mesh, None, version=self.version)
        return replace(self, mesh=mesh, named=_send_buckets(self, mesh), expected=partial(_send_expected, self, mesh))

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.named or ()


class _Head(NamedTuple):
    """A tensor on its way, as a part of its bucket's memory."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    checksum: int = 0

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    @property
    def room(self) -> int:
        return -(-self.nbytes // ALIGNMENT) * ALIGNMENT


class _Bucket(NamedTuple):
    """What one rank sends in one message; no heads: there is no more, or another rank sends."""

    heads: list[_Head]
    memory: Tensor  # uint8, the tensors one after the other


def _send_buckets(stream: WeightStream, mesh: RoleMesh) -> Iterator[tuple[str, Tensor]]:
    """At most two buckets exist: on the host the next one is gathered and cast by its sender, and the one before is checked and
    used by its receiver, while this one is on its way. On CUDA two communicators in flight on one device may hang
    (NVIDIA/nccl#195), so there both wait for it."""
    bridge = mesh.bridge(stream.mesh)
    senders = [bridge.ranks.index(rank) for rank in stream.mesh.ranks]
    buckets = _buckets(stream, stream.dtype)
    nothing = torch.empty(0, dtype=torch.uint8, device=mesh.device)
    kept = [nothing, nothing]
    barrier(bridge.control, "weights.ready")  # a phase may pass until both sides are here; a payload waits for less

    def room(turn: int, size: int) -> Tensor:
        """The source's ranks write again where they have sent from; what a receiver hands on is never written again."""
        if mesh.here or size > 2 * BUCKET_BYTES:
            return torch.empty(size, dtype=torch.uint8, device=mesh.device)
        if kept[turn % 2].numel() < size:
            kept[turn % 2] = torch.empty(size, dtype=torch.uint8, device=mesh.device)
        return kept[turn % 2][:size]

    def prepare(turn: int) -> _Bucket:
        bucket = next(buckets, [])  # on every rank of the source: it may have to be gathered
        sends = bridge.ranks[senders[turn % len(senders)]] == mesh.world_rank
        return _pack(bucket, stream.dtype, partial(room, turn)) if bucket and sends else _Bucket([], nothing)

    mine, before, origin = prepare(0), _Bucket([], nothing), 0
    for turn in count():
        sender = senders[turn % len(senders)]
        version, heads = broadcast_object((stream.version, mine.heads), sender, bridge.control, "weights.header")
        if version != stream.version:
            raise RuntimeError(
                f"weights: rank {bridge.ranks[sender]} sent version {version}, "
                f"rank {mesh.world_rank} is at version {stream.version}"
            )
        if not heads:
            yield from _checked(before, origin)
            return
        memory = mine.memory if mine.heads else room(turn, _size(heads))
        arrived = start_broadcast(memory, sender, bridge.payload, f"weights[{heads[0].name}...]")
        if mesh.device.type == "cuda":
            arrived()
        traffic["weights"] += sum(head.nbytes for head in mine.heads)
        mine = prepare(turn + 1)
        yield from _checked(before, origin)
        arrived()
        before, origin = _Bucket(heads, memory) if mesh.here else _Bucket([], nothing), bridge.ranks[sender]


def _size(heads: list[_Head]) -> int:
    return sum(head.room for head in heads[:-1]) + heads[-1].nbytes


def _parts(heads: Iterable[_Head], memory: Tensor) -> Iterator[Tensor]:
    """Views of a bucket's tensors."""
    for head in heads:
        yield memory[: head.nbytes].view(head.dtype).view(head.shape)
        memory = memory[head.room :]


def _pack(bucket: list[tuple[str, Tensor]], dtype: torch.dtype | None, room: Callable[[int], Tensor]) -> _Bucket:
    """Casts tensors into memory of this size; one that travels alone and as it is stays where it is."""
    heads = [_Head(name, tuple(tensor.shape), _sent_dtype(tensor, dtype)) for name, tensor in bucket]
    first = bucket[0][1].detach()
    if len(bucket) == 1 and first.dtype == heads[0].dtype and first.is_contiguous():
        memory = first.view(-1).view(torch.uint8)
        return _Bucket([heads[0]._replace(checksum=digest(first))], memory)
    memory = room(_size(heads))
    for i, ((_, tensor), part) in enumerate(zip(bucket, _parts(heads, memory))):
        part.copy_(tensor)
        heads[i] = heads[i]._replace(checksum=digest(part))
    return _Bucket(heads, memory)


def _checked(bucket: _Bucket, origin: int) -> Iterator[tuple[str, Tensor]]:
    """What a receiver got. Raises RuntimeError that names the tensor where it is not what was sent."""
    for head, tensor in zip(bucket.heads, _parts(bucket.heads, bucket.memory)):
        if digest(tensor) != head.checksum:
            raise RuntimeError(f"weights: {head.name} is not what rank {origin} sent (checksums differ)")
        yield head.name, tensor


def _send_expected(stream: WeightStream, mesh: RoleMesh) -> list[list[float]]:
    bridge = mesh.bridge(stream.mesh)
    found = stream.expected() if stream.mesh.here else None
    return broadcast_object(found, bridge.ranks.index(stream.mesh.ranks[0]), bridge.control, "weights.expected")


def _sent_dtype(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype and tensor.is_floating_point() else tensor.dtype


def _buckets(stream: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None) -> Iterator[list[tuple[str, Tensor]]]:
    """Of BUCKET_BYTES on their way, the tensor that fills one included; one that is larger is a bucket of its own."""
    bucket, size = [], 0
    for name, tensor in stream:
        nbytes = tensor.numel() * _sent_dtype(tensor, dtype).itemsize
        if bucket and nbytes >= BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += nbytes
        if size >= BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket
