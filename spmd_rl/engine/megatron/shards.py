"""The flat parts of parameters that a rank answers for, with their places in checkpoint tensors: one table from which weights
are read, streamed, saved and loaded, and gradients streamed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.optimizer.optimizer import ChainedOptimizer
from torch import Tensor, nn

from spmd_rl.engine.megatron import groups
from spmd_rl.engine.megatron.config import Sizes
from spmd_rl.engine.megatron.model import Decoder, named_parameters
from spmd_rl.engine.megatron.names import VALUE_HEAD, WHOLE, Piece, pieces, runs
from spmd_rl.engine.slices import Stored

BUCKET_BYTES = 32 << 20  # of whole tensors that are gathered together
MOMENTS = ("exp_avg", "exp_avg_sq")
Read = Callable[[Piece], Tensor | None]  # the values of a rectangle, None for zeros


@dataclass
class Shard:
    """Elements start..start + n of a flattened parameter. With an optimizer it is the part whose state this rank keeps."""

    parameter: nn.Parameter
    start: int
    pieces: list[Piece]
    owned: bool  # no other rank is asked for these values
    master: Tensor | None = None  # [n] float32 that the optimizer updates: a copy, or a view of a float32 parameter
    optimizer: torch.optim.Optimizer | None = None

    @property
    def values(self) -> Tensor:
        """[n], exact."""
        return self.parameter.data.view(-1) if self.master is None else self.master

    @property
    def has_copy(self) -> bool:
        return self.master is not None and self.master.dtype != self.parameter.dtype

    def gradient(self) -> Tensor:
        """[n] float32 of the reduced gradient."""
        return self.parameter.main_grad.view(-1)[self.start : self.start + self.values.numel()]

    def moment(self, name: str) -> Tensor:
        return self.optimizer.state[self.values][name]

    def publish(self) -> None:
        """Copies a master into its parameter; the other ranks' parts are not touched."""
        if self.has_copy:
            self.parameter.data.view(-1)[self.start : self.start + self.values.numel()].copy_(self.values.detach())


def find_shards(chunks: list[Decoder], sizes: Sizes, optimizer: ChainedOptimizer | None) -> list[Shard]:
    """Those of this rank, in the order of the model's parameters."""
    place, parts = groups.place(), _optimized(optimizer) if optimizer else None
    found = []
    for name, parameter in named_parameters(chunks):
        expert = ".experts." in name
        if parts is not None and parameter not in parts:  # other ranks keep all of it
            continue
        start, master, adam = parts[parameter] if parts is not None else (0, None, None)
        stop = start + (parameter if master is None else master).numel()
        if parameter.ndim > 2:
            raise ValueError(f"{name} has {parameter.ndim} dimensions")
        cut = runs(name, parameter.shape[0], sizes, place)
        width = parameter.shape[1] if parameter.ndim == 2 else None
        alone = parts is not None or groups.copy_index(expert) == 0
        replicated = name.partition("layers.")[2].partition(".")[2] in WHOLE or "layernorm" in name or name == VALUE_HEAD
        tied_copy = sizes.tied and name == "output_layer.weight"
        owned = alone and not tied_copy and not (replicated and place.tensor_rank)
        found.append(Shard(parameter, start, list(pieces(cut, width, start, stop)), owned, master, adam))
    return found


def _optimized(optimizer: ChainedOptimizer) -> dict[nn.Parameter, tuple[int, Tensor, torch.optim.Optimizer]]:
    """For each parameter of which this rank keeps a part: (first element, master values, the Adam that updates them)."""
    found = {}
    for one in optimizer.chained_optimizers:
        if one.is_stub_optimizer:
            continue
        for models, masters in (
            (one.model_float16_groups, one.shard_fp32_from_float16_groups),
            (one.model_fp32_groups, one.shard_fp32_groups),
        ):
            for parameter, master in ((p, m) for group in zip(models, masters) for p, m in zip(*group)):
                start = one._get_model_param_range_map(parameter)["param"].start
                found[parameter] = (start, master, one.optimizer)
    return found


def squared_norm(shards: Iterable[Shard], device: torch.device) -> Tensor:
    """Collective over the cell: the sum of all squared gradients, float64, each parameter once."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for shard in shards:
        if shard.owned:
            total += shard.gradient().double().square().sum()
    dist.all_reduce(total)
    return total


@torch.no_grad()
def fill(shards: Iterable[Shard], read: Read) -> None:
    """Local: sets values from `read`, and the parameters behind masters."""
    for shard in shards:
        flat = shard.values.detach()
        for piece in shard.pieces:
            _part(flat, piece).copy_(0.0 if (found := read(piece)) is None else found)
        shard.publish()


def _part(flat: Tensor, piece: Piece) -> Tensor:
    count = piece.size[0] * (piece.size[1] if len(piece.size) == 2 else 1)
    return flat[piece.start : piece.start + count].view(piece.size)


def reader(folder: Path, shapes: dict[str, tuple[int, ...]]) -> Read:
    """Reads rectangles of a checkpoint folder. Raises ValueError as `Stored` does."""
    stored = Stored(folder, shapes)

    def read(piece: Piece) -> Tensor | None:
        if piece.name == VALUE_HEAD:
            return None  # the first values are 0 whatever the state
        return stored.read(piece.name, shapes[piece.name], [slice(o, o + n) for o, n in zip(piece.offset, piece.size)])

    return read


class Stream:
    """Whole tensors for every rank, from the pieces of their owners."""

    def __init__(self, shards: list[Shard], shapes: dict[str, tuple[int, ...]], device: torch.device):
        """Collective over the cell: ranks tell each other what they own."""
        self.shapes, self.device = shapes, device
        self.mine: dict[str, list[tuple[Shard, Piece]]] = defaultdict(list)
        for shard in shards:
            for piece in shard.pieces if shard.owned else ():
                self.mine[piece.name].append((shard, piece))
        own = {name: [piece for _, piece in found] for name, found in self.mine.items()}
        self.owners: list[dict[str, list[Piece]]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(self.owners, own)

    @torch.no_grad()
    def tensors(self, take: Callable[[Shard], Tensor], dtype: torch.dtype = torch.float32) -> Iterator[tuple[str, Tensor]]:
        """Collective over the cell: (name, whole tensor) in the order of `shapes`; `take`: a shard's values."""
        bucket: list[str] = []
        size = 0
        for name, shape in self.shapes.items():
            nbytes = 4 * torch.Size(shape).numel()
            if bucket and size + nbytes > BUCKET_BYTES:
                yield from self._gather(bucket, take, dtype)
                bucket, size = [], 0
            bucket.append(name)
            size += nbytes
        yield from self._gather(bucket, take, dtype)

    def _gather(self, names: list[str], take: Callable[[Shard], Tensor], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        me, sent = dist.get_rank(), []
        for rank, owner in enumerate(self.owners):
            counts = [torch.Size(piece.size).numel() for name in names for piece in owner.get(name, ())]
            if not counts:
                continue
            flat = torch.empty(sum(counts), dtype=dtype, device=self.device)
            if rank == me:
                held = [_part(take(shard), piece).flatten() for name in names for shard, piece in self.mine.get(name, ())]
                torch.cat([x.to(self.device, dtype) for x in held], out=flat)
            work = dist.broadcast(flat, group_src=rank, async_op=True) if len(self.owners) > 1 else None
            sent.append((owner, flat.split(counts), work))
        whole = {name: torch.empty(self.shapes[name], dtype=dtype, device=self.device) for name in names}
        for owner, parts, work in sent:
            if work:
                work.wait()
            placed = (piece for name in names for piece in owner.get(name, ()))
            for piece, part in zip(placed, parts):
                whole[piece.name][tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.size))] = part.view(piece.size)
        yield from whole.items()


def saved_shapes(shapes: dict[str, tuple[int, ...]], sizes: Sizes, value_model: bool) -> dict[str, tuple[int, ...]]:
    """What a training checkpoint holds: also the head that no model folder does."""
    return shapes | ({VALUE_HEAD: (1, sizes.hidden)} if value_model else {})


def saved_parts(shards: list[Shard], shapes: dict, moments: bool, owned: bool) -> tuple[dict, dict]:
    """The rectangles of weights, and of both moments, that this rank saves (`owned`) or loads, and all whole shapes."""
    found: dict = defaultdict(dict)
    kinds = ("model", *MOMENTS) if moments else ("model",)
    for shard in shards:
        if moments:
            _start_state(shard)
        for kind in kinds if shard.owned or not owned else ():
            flat = (shard.values if kind == "model" else shard.moment(kind)).detach()
            for piece in shard.pieces:
                found[f"{kind}.{piece.name}"][piece.offset] = _part(flat, piece)
    return dict(found), {f"{kind}.{name}": shape for kind in kinds for name, shape in shapes.items()}


def _start_state(shard: Shard) -> None:
    """What the optimizer itself would make at its first step."""
    state = shard.optimizer.state[shard.values]
    for name in MOMENTS:
        if name not in state:
            state[name] = torch.zeros_like(shard.values)
    if isinstance(shard.optimizer, torch.optim.AdamW):
        state.setdefault("step", torch.tensor(0.0))


def set_steps(shards: list[Shard], steps: int) -> None:
    """How often the optimizer has stepped, wherever its kind of Adam keeps that."""
    for shard in shards:
        if isinstance(shard.optimizer, torch.optim.AdamW):
            shard.optimizer.state[shard.values].setdefault("step", torch.tensor(0.0)).fill_(float(steps))
        else:
            for group in shard.optimizer.param_groups:
                group["step"] = steps
