"""Checkpoints that any layout loads: pieces of tensors under the model's own names, as torch's distributed checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

Offset = tuple[int, ...]
Parts = dict[str, dict[Offset, Tensor]]  # tensor -> where its rectangles begin -> their values on this rank
Shapes = dict[str, tuple[int, ...]]


def _chunk(offset: Offset, part: Tensor) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offset), part.shape)


class _Save(dcp.DefaultSavePlanner):
    def __init__(self, parts: Parts, shapes: Shapes):
        super().__init__()
        self.parts, self.shapes = parts, shapes

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items = [
            WriteItem(
                MetadataIndex(name, torch.Size(offset)),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    _chunk(offset, part), TensorProperties.create_from_tensor(part), torch.Size(self.shapes[name])
                ),
            )
            for name, found in self.parts.items()
            for offset, part in found.items()
        ]
        self.plan = replace(plan, items=[*plan.items, *items])
        return self.plan

    def lookup_object(self, index: MetadataIndex):
        return self.parts[index.fqn][tuple(index.offset)] if index.fqn in self.parts else super().lookup_object(index)


class _Load(dcp.DefaultLoadPlanner):
    def __init__(self, parts: Parts, shapes: Shapes):
        super().__init__()
        self.parts, self.shapes = parts, shapes

    def create_local_plan(self) -> dcp.LoadPlan:
        plan, items = super().create_local_plan(), []
        for name, found in self.parts.items():
            saved = self.metadata.state_dict_metadata.get(name)
            if not isinstance(saved, TensorStorageMetadata) or tuple(saved.size) != self.shapes[name]:
                raise ValueError(f"checkpoint: {name} is not there in shape {self.shapes[name]}: it is of another model")
            items += create_read_items_for_chunk_list(name, saved, [_chunk(offset, part) for offset, part in found.items()])
        return replace(plan, items=[*plan.items, *items])

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.parts[index.fqn][tuple(index.offset)] if index.fqn in self.parts else super().lookup_tensor(index)


def save(folder: Path, parts: Parts, shapes: Shapes, counters: Tensor) -> None:
    """Collective over the cell: each rank writes its rectangles, no two the same one; `shapes`: of the whole tensors."""
    dcp.save({"counters": counters}, checkpoint_id=folder, planner=_Save(parts, shapes))


def load(folder: Path, parts: Parts, shapes: Shapes, counters: Tensor) -> None:
    """Collective over the cell: fills rectangles, however the checkpoint was cut. Raises where a tensor is not there."""
    dcp.load({"counters": counters}, checkpoint_id=folder, planner=_Load(parts, shapes))
