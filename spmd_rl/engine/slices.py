"""Each rank reads its own slices of the safetensors files of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from spmd_rl.engine.hf_names import Index, stored_files

Sources = Callable[[str, Sequence[int]], list[tuple[str, Index]]]


@torch.no_grad()
def load_slices(named: Iterable[tuple[str, Tensor]], sources: Sources, folder: Path) -> None:
    """Local: copies into each parameter the part of the files that this rank holds.

    `sources`: the stored tensors that make up a parameter of a name and shape, each with the place that it fills.
    Raises ValueError naming what the files lack, and where shapes differ."""
    wanted = [(parameter, *source) for name, parameter in named for source in sources(name, tuple(parameter.shape))]
    stored = Stored(folder, [hf_name for _, hf_name, _ in wanted])
    for parameter, hf_name, place in wanted:
        local, region = local_region(parameter)
        if local.numel():
            _copy_overlap(local, region, stored, hf_name, place, parameter.shape)


class Stored:
    """Tensors of a checkpoint folder, of which no more is read than is asked for."""

    def __init__(self, folder: Path, names: Iterable[str]):
        """Raises ValueError naming what the files lack."""
        where = stored_files(folder)
        if missing := [name for name in names if name not in where]:
            raise ValueError(f"model.path: {folder} lacks {len(missing)} tensors of its architecture: {', '.join(missing[:5])}")
        files = {path: safe_open(path, "pt") for path in set(where.values())}
        self.files = {name: files[path] for name, path in where.items()}

    def read(self, name: str, shape: Sequence[int], part: Sequence[slice]) -> Tensor:
        """Raises ValueError where the tensor's shape is not `shape`."""
        stored = self.files[name].get_slice(name)
        if list(stored.get_shape()) != list(shape):
            raise ValueError(f"model.path: tensor {name} has shape {stored.get_shape()}, its architecture wants {list(shape)}")
        return stored[tuple(part)]


def local_region(parameter: Tensor) -> tuple[Tensor, list[slice]]:
    """(this rank's part, where it lies in the whole)."""
    if not isinstance(parameter, DTensor):
        return parameter.data, [slice(0, n) for n in parameter.shape]
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return parameter.to_local(), [slice(o, o + n) for o, n in zip(offset, shape)]


def _copy_overlap(local: Tensor, region: list[slice], stored: Stored, name: str, place: Index, shape: Sequence[int]) -> None:
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
    local[tuple(into)].copy_(stored.read(name, sizes, out_of))
