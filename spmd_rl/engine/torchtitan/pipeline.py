"""A pipeline over the ranks of a replica, by torch's schedules: 1F1B, or interleaved where a rank has several stages.

Stages exchange hidden states of one shape, so micro-batches are padded to the longest of a call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from spmd_rl.engine.packing import Block, Packed
from spmd_rl.engine.torchtitan.modules import Local, Part, Scheduled


@dataclass(frozen=True)
class Pipeline:
    parts: list[Part]  # of this rank
    stages: list[int]  # theirs
    num_stages: int
    group: dist.ProcessGroup
    hidden_size: int
    dtype: torch.dtype  # of hidden states
    sequence_ranks: int  # that a row's tokens are split over between stages
    device: torch.device

    @property
    def has_last(self) -> bool:
        return self.stages[-1] == self.num_stages - 1

    def count(self, num_micro_batches: int) -> int:
        """How many micro-batches a schedule can run: no fewer than ranks, interleaved a multiple of them."""
        ranks = self.group.size()
        if len(self.parts) == 1:
            return max(num_micro_batches, ranks)
        return -(-num_micro_batches // ranks) * ranks

    def run(self, locals_: Sequence[Local], with_entropy: bool, finish: Callable, forward_only: bool) -> None:
        """Collective over the replica. Adds to the gradients unless `forward_only`; `finish` is called on the last stage."""
        length = locals_[0].packed.input_ids.shape[1] // self.sequence_ranks
        for part in self.parts:
            part.scheduled = Scheduled(list(locals_), with_entropy, finish)
        stages = [self._stage(part, index, length) for part, index in zip(self.parts, self.stages)]
        options: dict[str, Any] = {"n_microbatches": len(locals_), "loss_fn": _itself, "scale_grads": False}
        schedule = ScheduleInterleaved1F1B(stages, **options) if len(stages) > 1 else Schedule1F1B(stages[0], **options)
        index = torch.arange(len(locals_), device=self.device)
        before = self._take_gradients()  # a schedule drops what it finds
        run = schedule.eval if forward_only else schedule.step
        run(*([index] if self.stages[0] == 0 else []), target=index if self.has_last else None, return_outputs=False, index=index)
        for parameter, gradient in before:
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        for part in self.parts:
            part.scheduled = None

    def _stage(self, part: Part, index: int, length: int) -> PipelineStage:
        hidden = torch.empty(1, length, self.hidden_size, dtype=self.dtype, device="meta", requires_grad=True)
        first = torch.empty(1, dtype=torch.int64, device="meta") if index == 0 else hidden
        last = torch.empty((), device="meta", requires_grad=True) if index == self.num_stages - 1 else hidden
        return PipelineStage(part, index, self.num_stages, self.device, input_args=(first,), output_args=(last,), group=self.group)

    def _take_gradients(self) -> list[tuple[Tensor, Tensor]]:
        parameters = [parameter for part in self.parts for parameter in part.parameters()]
        return [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]

    def share(self, tensor: Tensor) -> Tensor:
        """Collective over the pipeline, in place: what the last stage has."""
        dist.broadcast(tensor, group=self.group, group_src=self.group.size() - 1)
        return tensor

    def share_object(self, value: Any) -> Any:
        """Collective over the pipeline: a small picklable value of the last stage."""
        box = [value]
        dist.broadcast_object_list(box, group=self.group, group_src=self.group.size() - 1)
        return box[0]


def _itself(loss: Tensor, target: Tensor) -> Tensor:
    return loss


def padded(packed: Packed, length: int) -> Packed:
    """A packed row with tokens at its end that nothing attends to."""
    size = packed.input_ids.shape[1]
    if size == length:
        return packed
    positions = torch.arange(length - size, device=packed.position_ids.device)
    return replace(
        packed,
        input_ids=F.pad(packed.input_ids, (0, length - size)),
        position_ids=torch.cat([packed.position_ids, positions[None]], 1),
        blocks=[*packed.blocks, Block(size, length - size, ())],
        cache={},
    )
