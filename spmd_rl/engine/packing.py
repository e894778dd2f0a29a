"""Batch <-> packed rows [1, T]: positions restart, a prompt that siblings share is laid out once.

A block is `[prompt | r1 | ... | rG]`: every response's positions continue the prompt's, and attends to the prompt and to
itself. A row that shares nothing is a block of its own with no responses. The token that predicts a response's first
token is the prompt's last.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from spmd_rl.batch import Batch, make_batch


class Block(NamedTuple):
    """The mask description: tokens `start : start + prompt` see each other causally; each response, in the order of
    `responses` (their lengths), sees them all and itself causally. Nothing else is seen."""

    start: int
    prompt: int
    responses: tuple[int, ...]


@dataclass
class Packed:
    """A micro-batch as the model sees it. N is the number of response tokens chosen by the policy."""

    input_ids: Tensor  # [1, T] int64
    position_ids: Tensor  # [1, T] int64, restart at 0 with each block
    blocks: list[Block]
    source: Tensor  # [N] int64: the packed position whose output predicts the token
    targets: Tensor  # [N] int64 token ids
    temperature: Tensor  # [N] float32
    rows: Tensor  # [N] int64: where the token stands in the batch
    columns: Tensor  # [N] int64
    shape: tuple[int, int]  # the batch's [B, T]
    cache: dict[str, Any] = field(default_factory=dict)  # what an attention computes once for all layers
    sequence_group: dist.ProcessGroup | None = None  # ranks that hold a part of the row each; `blocks` are of the whole row

    def unpack(self, tokens: Tensor) -> Tensor:
        """[N] values of response tokens as [B, T], 0 elsewhere; differentiable."""
        return tokens.new_zeros(self.shape).index_put((self.rows, self.columns), tokens)


def pack(batch: Batch, shared_prompt: bool, length_multiple: int, device: torch.device) -> Packed:
    """Lays out the rows of a micro-batch (at least one). Siblings share their prompt when it is equal, id by id.

    `length_multiple`: each block is padded to it with a repeated token that nothing attends to."""
    prompts, lengths = batch.prompt_lengths.tolist(), batch.lengths.tolist()
    uids, ids = batch.uid.tolist(), batch.input_ids
    pieces, positions, blocks = [], [], []
    starts: list[tuple[int, int]] = []  # of each row: (packed position of the prompt's last token, of the response)
    end, row = 0, 0
    while row < len(uids):
        last = row + 1
        while shared_prompt and last < len(uids) and _same_prompt(ids, uids, prompts, row, last):
            last += 1
        prompt = prompts[row]
        if last == row + 1:
            blocks.append(Block(end, lengths[row], ()))
            starts.append((end + prompt - 1, end + prompt))
            pieces.append(ids[row, : lengths[row]])
            positions.append(torch.arange(lengths[row]))
            size = lengths[row]
        else:
            responses = tuple(length - prompt for length in lengths[row:last])
            blocks.append(Block(end, prompt, responses))
            pieces += [ids[row, :prompt], *(ids[r, prompt : lengths[r]] for r in range(row, last))]
            positions += [torch.arange(prompt), *(prompt + torch.arange(n) for n in responses)]
            size = prompt
            for n in responses:
                starts.append((end + prompt - 1, end + size))
                size += n
        if padding := -size % length_multiple:
            blocks.append(Block(end + size, padding, ()))
            pieces.append(ids[row, :1].expand(padding))
            positions.append(torch.arange(padding))
        end += size + padding
        row = last
    rows, columns = batch.response_mask.nonzero(as_tuple=True)
    first, begin = (torch.tensor(column)[rows] for column in zip(*starts))
    offset = columns - batch.prompt_lengths[rows]
    packed = Packed(
        input_ids=torch.cat(pieces)[None],
        position_ids=torch.cat(positions)[None],
        blocks=blocks,
        source=torch.where(offset == 0, first, begin + offset - 1),
        targets=ids[rows, columns],
        temperature=batch.temperature[rows],
        rows=rows,
        columns=columns,
        shape=tuple(ids.shape),
    )
    if device.type != "cpu":
        for name, value in vars(packed).items():
            if isinstance(value, Tensor):
                setattr(packed, name, value.to(device, non_blocking=True))
    return packed


def part_of(packed: Packed, group: dist.ProcessGroup) -> tuple[Packed, Tensor]:
    """(this rank's equal part of the row, [n] int64: which of the N tokens it predicts). T is a multiple of the group's size."""
    size = packed.input_ids.shape[1] // group.size()
    start = group.rank() * size
    mine = ((packed.source >= start) & (packed.source < start + size)).nonzero()[:, 0]
    part = replace(
        packed,
        input_ids=packed.input_ids[:, start : start + size],
        position_ids=packed.position_ids[:, start : start + size],
        source=packed.source[mine] - start,
        targets=packed.targets[mine],
        temperature=packed.temperature[mine],
        rows=packed.rows[mine],
        columns=packed.columns[mine],
        sequence_group=group,
    )
    return part, mine


def _same_prompt(ids: Tensor, uids: list[int], prompts: list[int], one: int, other: int) -> bool:
    n = prompts[one]
    return uids[one] == uids[other] and n == prompts[other] and torch.equal(ids[one, :n], ids[other, :n])


def dummy_batch() -> Batch:
    """The smallest legal row: a prompt token and a response token. Run by a rank that has no micro-batch left."""
    ones = torch.ones(1, dtype=torch.int64)
    return make_batch(
        {
            "input_ids": torch.zeros(1, 2, dtype=torch.int64),
            "prompt_lengths": ones,
            "lengths": 2 * ones,
            "response_mask": torch.tensor([[False, True]]),
            "uid": 0 * ones,
            "sample": 0 * ones,
            "row": 0 * ones,
            "data_source": 0 * ones,
            "policy_version": torch.zeros(1, 2, dtype=torch.int32),
            "truncated": torch.zeros(1, dtype=torch.bool),
            "temperature": torch.ones(1),
        }
    )
