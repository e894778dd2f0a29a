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
    where = stored_files(folder)
    files = {path: safe_open(path, "pt") for path in set(where.values())}
    missing = []
    for name, parameter in named:
        local, region = local_region(parameter)
        for hf_name, place in sources(name, tuple(parameter.shape)):
            if hf_name not in where:
                missing.append(hf_name)
            elif local.numel():
                _copy_overlap(local, region, files[where[hf_name]].get_slice(hf_name), place, parameter.shape, hf_name)
    if missing:
        raise ValueError(f"model.path: {folder} lacks {len(missing)} tensors of its architecture: {', '.join(missing[:5])}")


def local_region(parameter: Tensor) -> tuple[Tensor, list[slice]]:
    """(this rank's part, where it lies in the whole)."""
    if not isinstance(parameter, DTensor):
        return parameter.data, [slice(0, n) for n in parameter.shape]
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return parameter.to_local(), [slice(o, o + n) for o, n in zip(offset, shape)]


def _copy_overlap(local: Tensor, region: list[slice], stored, place: Index, shape: Sequence[int], name: str) -> None:
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
