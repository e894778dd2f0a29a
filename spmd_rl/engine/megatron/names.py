"""Where the rows of Megatron's parameters stand in the tensors of a Hugging Face checkpoint. Pure: no ranks, no Megatron.

A parallel rank's parameter is cut into runs of rows, each of which is a rectangle of one checkpoint tensor:

    self_attention.linear_qkv   for each key head [its query heads | k | v]  <->  rows of q_proj, k_proj, v_proj
    mlp.linear_fc1              [gate | up]                                  <->  rows of gate_proj, up_proj
    linear_proj, linear_fc2     some columns                                 <->  columns of o_proj, down_proj
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from spmd_rl.engine.megatron.config import FAMILIES, Sizes

EMBEDDING, HEAD, NORM, VALUE_HEAD = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight", "value_head.weight"
OUTER = {
    "embedding.word_embeddings.weight": EMBEDDING,
    "output_layer.weight": HEAD,
    "decoder.final_layernorm.weight": NORM,
    "value_head.weight": VALUE_HEAD,
}
WHOLE = {  # parameters of a layer that every tensor rank holds
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "mlp.router.weight": "mlp.gate.weight",
}
LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
QKV = re.compile(r"self_attention\.linear_qkv\.(weight|bias)")
MLP = re.compile(r"mlp\.linear_fc([12])\.weight")
EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.linear_fc([12])\.weight")
GROUPED_EXPERT = re.compile(r"mlp\.experts\.linear_fc([12])\.weight(\d+)")


@dataclass(frozen=True)
class Place:
    """Which part of the tensors a rank holds."""

    tensor_rank: int
    tensor_size: int
    expert_rank: int
    expert_size: int
    expert_tensor_rank: int
    expert_tensor_size: int


class Run(NamedTuple):
    """`rows` rows of a parameter from `first` on: a rectangle of checkpoint tensor `name` whose corner is (row, column)."""

    first: int
    rows: int
    name: str
    row: int
    column: int = 0


class Piece(NamedTuple):
    """A rectangle of checkpoint tensor `name`, row-major from `start` on in a flat part of a parameter."""

    name: str
    offset: tuple[int, ...]
    size: tuple[int, ...]
    start: int


def checkpoint_shapes(sizes: Sizes, value_model: bool) -> dict[str, tuple[int, ...]]:
    """The checkpoint's tensors, in the order in which they are streamed; a value model's own head is in none."""
    bias, norms = FAMILIES[sizes.model_type]
    hidden, queries, keys = sizes.hidden, sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    found: dict[str, tuple[int, ...]] = {EMBEDDING: (sizes.vocabulary, hidden)}
    for index in range(sizes.layers):
        layer = f"model.layers.{index}."
        for part, rows in (("q", queries), ("k", keys), ("v", keys)):
            found[f"{layer}self_attn.{part}_proj.weight"] = (rows, hidden)
            found |= {f"{layer}self_attn.{part}_proj.bias": (rows,)} if bias else {}
        found[f"{layer}self_attn.o_proj.weight"] = (hidden, queries)
        found |= {f"{layer}self_attn.{part}_norm.weight": (sizes.head_dim,) for part in "qk"} if norms else {}
        inner = sizes.expert_intermediate if sizes.experts else sizes.intermediate
        for stem in [f"{layer}mlp.experts.{e}." for e in range(sizes.experts)] or [f"{layer}mlp."]:
            found |= {f"{stem}gate_proj.weight": (inner, hidden), f"{stem}up_proj.weight": (inner, hidden)}
            found[f"{stem}down_proj.weight"] = (hidden, inner)
        found |= {f"{layer}mlp.gate.weight": (sizes.experts, hidden)} if sizes.experts else {}
        found |= {f"{layer}input_layernorm.weight": (hidden,), f"{layer}post_attention_layernorm.weight": (hidden,)}
    found[NORM] = (hidden,)
    if not sizes.tied and not value_model:
        found[HEAD] = (sizes.vocabulary, hidden)
    return found


def padded_vocabulary(sizes: Sizes, tensor_size: int) -> int:
    return -(-sizes.vocabulary // tensor_size) * tensor_size


def vocabulary_part(sizes: Sizes, place: Place) -> tuple[int, int]:
    """(first token, number of tokens) of a tensor rank's rows of embedding and head; rows after that are padding."""
    rows = padded_vocabulary(sizes, place.tensor_size) // place.tensor_size
    first = place.tensor_rank * rows
    return first, max(0, min(rows, sizes.vocabulary - first))


def runs(name: str, rows: int, sizes: Sizes, place: Place) -> list[Run]:
    """The runs of the parameter `name` of `rows` rows; layers in its name are counted over the whole model.

    Raises KeyError for a parameter that no checkpoint tensor fills."""
    if name in OUTER:
        target = OUTER[name]
        if target in (NORM, VALUE_HEAD):
            return [Run(0, rows, target, 0)]
        first, count = vocabulary_part(sizes, place)
        return [Run(0, count, EMBEDDING if sizes.tied else target, first)]
    if not (match := LAYER.fullmatch(name)):
        raise KeyError(name)
    layer, part = f"model.layers.{match[1]}.", match[2]
    if part in WHOLE:
        return [Run(0, rows, layer + WHOLE[part], 0)]
    if found := QKV.fullmatch(part):
        return _qkv(f"{layer}self_attn.", found[1], sizes, place)
    if part == "self_attention.linear_proj.weight":
        return [Run(0, rows, f"{layer}self_attn.o_proj.weight", 0, place.tensor_rank * _heads(sizes, place) * sizes.head_dim)]
    if found := MLP.fullmatch(part):
        inner = sizes.intermediate // place.tensor_size
        return _mlp(f"{layer}mlp.", found[1], rows, inner, place.tensor_rank)
    index, matrix = _expert(part)
    expert = place.expert_rank * (sizes.experts // place.expert_size) + index
    inner = sizes.expert_intermediate // place.expert_tensor_size
    return _mlp(f"{layer}mlp.experts.{expert}.", matrix, rows, inner, place.expert_tensor_rank)


def _heads(sizes: Sizes, place: Place) -> int:
    return sizes.heads // place.tensor_size


def _expert(part: str) -> tuple[int, str]:
    """(index on its rank, which matrix) of an expert's parameter."""
    if found := EXPERT.fullmatch(part):
        return int(found[1]), found[2]
    if found := GROUPED_EXPERT.fullmatch(part):
        return int(found[2]), found[1]
    raise KeyError(part)


def _qkv(stem: str, kind: str, sizes: Sizes, place: Place) -> list[Run]:
    groups, dim = sizes.kv_heads // place.tensor_size, sizes.head_dim
    queries = sizes.heads // sizes.kv_heads * dim
    found, first = [], 0
    for group in range(place.tensor_rank * groups, (place.tensor_rank + 1) * groups):
        for part, count in (("q", queries), ("k", dim), ("v", dim)):
            found.append(Run(first, count, f"{stem}{part}_proj.{kind}", group * count))
            first += count
    return found


def _mlp(stem: str, matrix: str, rows: int, inner: int, rank: int) -> list[Run]:
    """`inner`: intermediate units of a rank."""
    if matrix == "2":
        return [Run(0, rows, f"{stem}down_proj.weight", 0, rank * inner)]
    return [Run(i * inner, inner, f"{stem}{part}_proj.weight", rank * inner) for i, part in enumerate(("gate", "up"))]


def pieces(found: list[Run], width: int | None, start: int, stop: int) -> Iterator[Piece]:
    """The rectangles of elements start..stop of a flattened parameter. `width`: its row length, None for a vector.

    A range that begins or ends inside a row gives that row a rectangle of its own."""
    row_size = width or 1
    for run in found:
        low, high = max(start, run.first * row_size), min(stop, (run.first + run.rows) * row_size)
        while low < high:
            row, column = divmod(low, row_size)
            whole = 0 if column else (high - low) // row_size
            size = (whole, row_size) if whole else (1, min(high - low, row_size - column))
            offset = (run.row + row - run.first, run.column + column)
            yield Piece(run.name, offset if width else offset[:1], size if width else size[:1], low - start)
            low += size[0] * size[1]
