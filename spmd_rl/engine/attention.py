"""Attention over packed blocks, registered with transformers under NAME: full softmax, causal, nothing else.

On the host, blocks of like shape are padded and attended together, so that work grows with the blocks and not with T^2;
on CUDA it is FlexAttention with a block mask.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from spmd_rl.engine.exchange import to_heads, to_sequence
from spmd_rl.engine.packing import Block, Packed

NAME = "spmd_rl_blocks"
REFUSED = ("sliding_window", "softcap", "s_aux")  # keyword arguments of layers that are not plain softmax attention


class _Place(torch.autograd.Function):
    """`out[destination] = x[source]`, zeros elsewhere; indices are unique, so the backward is the same copy reversed."""

    @staticmethod
    def forward(ctx, x: Tensor, source: Tensor, destination: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(source, destination)
        ctx.size = x.shape[0]
        out = x.new_zeros(size, *x.shape[1:])
        out[destination] = x[source]
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        source, destination = ctx.saved_tensors
        out = grad.new_zeros(ctx.size, *grad.shape[1:])
        out[source] = grad[destination]
        return out, None, None, None


class _Bucket(NamedTuple):
    """Blocks of like shape, padded: g groups, S siblings, L query tokens, P prompt tokens (0 for the prompts themselves)."""

    groups: int
    siblings: int
    queries: int
    prompt: int
    query_source: Tensor  # packed positions of the queries, and their place in [g * S * L]
    query_place: Tensor
    prompt_source: Tensor  # packed positions of the prompts, and their place in [g * P]
    prompt_place: Tensor
    mask: Tensor  # [g * S, 1, L, P + L] bool: what each query sees


def _round_up(n: int) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, 16, ...: at most half of a padded side is waste."""
    power = 1 << (n - 1).bit_length()
    return 3 * power // 4 if n <= 3 * power // 4 and power >= 4 else power


def _buckets(blocks: list[Block]) -> list[_Bucket]:
    """The prompts (every block's first part) and the responses, each sorted into buckets of like shape."""
    alike = defaultdict(list)
    for block in blocks:
        alike[1, _round_up(block.prompt), 0].append((block.start, block.prompt, (block.prompt,), 0))
        if block.responses:
            shape = len(block.responses), _round_up(max(block.responses)), _round_up(block.prompt)
            alike[shape].append((block.start + block.prompt, sum(block.responses), block.responses, block.prompt))
    return [_bucket(*shape, members) for shape, members in alike.items() if shape[1]]


def _bucket(siblings: int, queries: int, prompt: int, members: list) -> _Bucket:
    lengths = torch.zeros(len(members), siblings, dtype=torch.int64)
    query_source, query_place, prompt_source, prompt_place = [], [], [], []
    for g, (start, total, parts, before) in enumerate(members):
        query_source.append(torch.arange(start, start + total))
        for s, n in enumerate(parts):
            query_place.append((g * siblings + s) * queries + torch.arange(n))
            lengths[g, s] = n
        prompt_source.append(torch.arange(start - before, start))
        prompt_place.append((g + 1) * prompt - before + torch.arange(before))  # right aligned
    before = torch.tensor([m[3] for m in members])
    seen = torch.arange(prompt) >= (prompt - before)[:, None]  # [g, P]
    causal = torch.ones(queries, queries, dtype=torch.bool).tril()
    mask = torch.cat([seen[:, None].expand(-1, queries, -1), causal.expand(len(members), -1, -1)], 2)
    return _Bucket(
        len(members), siblings, queries, prompt, torch.cat(query_source), torch.cat(query_place),
        torch.cat(prompt_source), torch.cat(prompt_place), mask.repeat_interleave(siblings, 0)[:, None],
    )  # fmt: skip


def _attend(bucket: _Bucket, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """query [T, H, D], key and value [T, K, D] -> the bucket's outputs [g * S * L, H, D]."""
    rows, heads, kv_heads = bucket.groups * bucket.siblings, query.shape[1], key.shape[1]

    def own(x: Tensor) -> Tensor:  # [g * S, heads, L, D]
        placed = _Place.apply(x, bucket.query_source, bucket.query_place, rows * bucket.queries)
        return placed.view(rows, bucket.queries, *x.shape[1:]).transpose(1, 2)

    def seen(x: Tensor) -> Tensor:  # [g * S, K, P + L, D]
        if not bucket.prompt:
            return own(x)
        placed = _Place.apply(x, bucket.prompt_source, bucket.prompt_place, bucket.groups * bucket.prompt)
        before = placed.view(bucket.groups, 1, bucket.prompt, *x.shape[1:]).transpose(2, 3)
        before = before.expand(-1, bucket.siblings, -1, -1, -1).reshape(rows, *before.shape[2:])
        return torch.cat([before, own(x)], 2)

    # the query heads of one key head become more queries: no copies of keys
    folded = own(query).reshape(rows, kv_heads, heads // kv_heads * bucket.queries, -1)
    mask = bucket.mask.repeat(1, 1, heads // kv_heads, 1)
    out = F.scaled_dot_product_attention(folded, seen(key), seen(value), attn_mask=mask, scale=scaling)
    return out.reshape(rows, heads, bucket.queries, -1).transpose(1, 2).reshape(rows * bucket.queries, heads, -1)


def _host_attention(packed: Packed, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """[1, H, T, D] -> [1, T, H, D]. In float32: without AMX the bfloat16 backward is three times slower."""
    if "buckets" not in packed.cache:
        packed.cache["buckets"] = _buckets(packed.blocks)
    q, k, v = (x[0].transpose(0, 1).float() for x in (query, key, value))
    out = None
    for bucket in packed.cache["buckets"]:
        placed = _Place.apply(_attend(bucket, q, k, v, scaling), bucket.query_place, bucket.query_source, q.shape[0])
        out = placed if out is None else out + placed
    return out.to(query.dtype)[None]


def _segments(blocks: list[Block], device: torch.device) -> tuple[Tensor, Tensor]:
    """([T] the segment of each token, [T] the segment of its block's prompt): a token sees what comes before it in both."""
    owns: list[int] = []
    prefixes: list[int] = []
    segment = 0
    for block in blocks:
        first = segment
        for n in (block.prompt, *block.responses):
            owns += [segment] * n
            prefixes += [first] * n
            segment += 1
    return torch.tensor(owns, device=device), torch.tensor(prefixes, device=device)


def block_mask(blocks: list[Block], device: torch.device):
    """FlexAttention's mask of the blocks: causal, and the key's segment is the query's own or its prompt."""
    own, prefix = _segments(blocks, device)

    def seen(batch, head, q, k):
        return (q >= k) & ((own[k] == own[q]) | (own[k] == prefix[q]))

    return create_block_mask(seen, None, None, len(own), len(own), device=device)


_compiled_flex = torch.compile(flex_attention, dynamic=True)


def _device_attention(packed: Packed, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    if "mask" not in packed.cache:
        packed.cache["mask"] = block_mask(packed.blocks, query.device)
    gqa = query.shape[1] != key.shape[1]
    out = _compiled_flex(query, key, value, block_mask=packed.cache["mask"], scale=scaling, enable_gqa=gqa)
    return out.transpose(1, 2)


def rows_attention(packed: Packed, rows: Tensor, columns: Tensor, query: Tensor, key: Tensor, value: Tensor, scaling: float):
    """Attention of some of the tokens, where a sequence is split: query [1, H, R, D] of the packed positions `rows` [R],
    key and value [1, K, C, D] of the positions `columns` [C], in any order -> [1, R, H, D]."""
    gqa, on_host = query.shape[1] != key.shape[1], query.device.type == "cpu"
    if "rows" not in packed.cache:
        own, prefix = _segments(packed.blocks, query.device)

        def seen(batch, head, q, k):
            q, k = rows[q], columns[k]
            return (q >= k) & ((own[k] == own[q]) | (own[k] == prefix[q]))

        if on_host:
            packed.cache["rows"] = seen(None, None, torch.arange(len(rows))[:, None], torch.arange(len(columns)))
        else:
            packed.cache["rows"] = create_block_mask(seen, None, None, len(rows), len(columns), device=query.device)
    mask = packed.cache["rows"]
    if on_host:
        q, k, v = query.float(), key.float(), value.float()
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling, enable_gqa=gqa).to(query.dtype)
    else:
        out = _compiled_flex(query, key, value, block_mask=mask, scale=scaling, enable_gqa=gqa)
    return out.transpose(1, 2)


def blocks_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, *, packed: Packed, **kwargs):
    """transformers' attention interface: query [1, H, T, D], key and value [1, K, T, D] -> ([1, T, H, D], None).

    Collective over the ranks that share the row, where some do: T is then of this rank's part.
    Raises ValueError when the layer asks for more than full softmax attention."""
    if asked := [name for name in REFUSED if kwargs.get(name) is not None]:
        raise ValueError(f"{type(module).__name__} asks for {', '.join(asked)}: only full softmax attention can be packed")
    if dropout:
        raise ValueError(f"{type(module).__name__} asks for attention dropout {dropout}: set it to 0 in the model's config")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    attention = _host_attention if query.device.type == "cpu" else _device_attention
    if packed.sequence_group is None:
        return attention(packed, query, key, value, scaling), None
    parts = to_heads(packed.sequence_group, query, key, value)
    return to_sequence(packed.sequence_group, attention(packed, *parts, scaling)), None


def register_attention() -> None:
    """Makes NAME an `attn_implementation`; no dense mask is ever made for it."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, blocks_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, lambda *args, **kwargs: None)
