"""Differentiable exchanges inside a group of ranks. Each is collective over its group: all of it calls, in one order."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup


def _summed(x: Tensor, group: Group) -> Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=group)
    return out


def _gathered(x: Tensor, group: Group) -> Tensor:
    """Everyone's `x`, alike in shape, side by side in the last dim."""
    x = x.contiguous()
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x, group=group)
    return torch.cat(parts, -1)


def _own(x: Tensor, group: Group) -> Tensor:
    return x.chunk(group.size(), -1)[group.rank()].contiguous()


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx, group, *tensors):
        ctx.group = group
        return tensors

    @staticmethod
    def backward(ctx, *grads):
        return None, *(_summed(grad, ctx.group) for grad in grads)


class _SumOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        return _summed(x, group)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return _gathered(x, group)

    @staticmethod
    def backward(ctx, grad):
        return _own(grad, ctx.group), None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return _own(x, group)

    @staticmethod
    def backward(ctx, grad):
        return _gathered(grad, ctx.group), None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, send, receive, group):
        ctx.send, ctx.receive, ctx.group = send, receive, group
        out = x.new_empty(sum(receive), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), receive, send, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        return _AllToAll.apply(grad, ctx.receive, ctx.send, ctx.group), None, None, None


def sum_gradients(group: Group, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors alike on every rank, of which each rank uses its own part: their gradients are summed."""
    return _SumGradients.apply(group, *tensors)


def sum_over(x: Tensor, group: Group) -> Tensor:
    """The sum of every rank's `x`, with which all go on alike: the gradient is every part's own."""
    return _SumOver.apply(x, group)


def sum_placed(own: Tensor, places: Tensor, size: int, group: Group) -> Tensor:
    """[n] of each rank, at its `places` [n] of [size]: what all ranks have together, alike on each."""
    return sum_over(own.new_zeros(size).index_copy(0, places, own), group)


def gather_last(x: Tensor, group: Group) -> Tensor:
    """[..., n] of each rank as [..., n * ranks], with which all go on alike."""
    return _Gather.apply(x, group)


def split_last(x: Tensor, group: Group) -> Tensor:
    """This rank's part [..., n] of [..., n * ranks], which is alike on every rank."""
    return _Split.apply(x, group)


def all_to_all(x: Tensor, send: list[int], receive: list[int], group: Group) -> Tensor:
    """Rows: the first `send[0]` of `x` go to the group's rank 0, and so on; those of rank 0 come first, `receive[0]` of them."""
    return _AllToAll.apply(x, send, receive, group)


def to_heads(group: Group, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """From all heads of a part of the sequence, [1, H, t, D] and twice [1, K, t, D], to a part of the heads of all of it.

    Where the key heads do not divide over the ranks they are repeated until they do."""
    ranks, length = group.size(), query.shape[2]
    if repeats := ranks // math.gcd(ranks, key.shape[1]) - 1:
        key, value = key.repeat_interleave(repeats + 1, 1), value.repeat_interleave(repeats + 1, 1)
    counts = [x.shape[1] // ranks for x in (query, key, value)]
    parts = torch.cat([x[0].unflatten(0, (ranks, n)) for x, n in zip((query, key, value), counts)], 1)  # [ranks, h, t, D]
    ones = [1] * ranks
    parts = all_to_all(parts, ones, ones, group).transpose(0, 1).reshape(1, sum(counts), ranks * length, -1)
    return parts.split(counts, 1)


def to_sequence(group: Group, out: Tensor) -> Tensor:
    """The way back for [1, T, h, D]: to all heads of this rank's part of the sequence, [1, t, H, D]."""
    ranks = group.size()
    ones = [1] * ranks
    parts = all_to_all(out[0].unflatten(0, (ranks, -1)), ones, ones, group)  # [ranks, t, h, D]
    return parts.transpose(0, 1).flatten(1, 2)[None]
