"""Between the parameters of a transformers 5 module and the names of its safetensors checkpoint.

Every parameter has its own name in the file, but for the experts of a mixture: the module holds them fused, the file
one by one. E experts, I intermediate size, H hidden size:

    mlp.experts.gate_up_proj [E, 2I, H]  <->  mlp.experts.{e}.gate_proj.weight, mlp.experts.{e}.up_proj.weight [I, H]
    mlp.experts.down_proj    [E, H, I]   <->  mlp.experts.{e}.down_proj.weight [H, I]

A tied parameter (`lm_head.weight` under `tie_word_embeddings`) has no entry: `named_parameters()` gives it once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

Index = tuple[int | slice, ...]

FUSED_EXPERT_MODELS = ("qwen2_moe", "qwen3_moe")  # another family may fuse, order or name its experts in its own way
GATE_UP = ".mlp.experts.gate_up_proj"
DOWN = ".mlp.experts.down_proj"


def check_model_type(model_type: str, names: Iterable[str]) -> None:
    """Raises ValueError where the parameters `names` hold fused experts whose checkpoint layout is not known here."""
    fused = next((name for name in names if ".experts." in name), None)
    if fused and model_type not in FUSED_EXPERT_MODELS:
        raise ValueError(f"model type '{model_type}': the checkpoint layout of '{fused}' is not known; "
                         f"mixtures of experts that are: {', '.join(FUSED_EXPERT_MODELS)}")  # fmt: skip


def sources(name: str, shape: Sequence[int]) -> list[tuple[str, Index]]:
    """The checkpoint tensors that make up the parameter `name` of shape `shape`, each with the place that it fills."""
    if name.endswith(GATE_UP):
        stem, half = name.removesuffix("gate_up_proj"), shape[1] // 2
        halves = (("gate_proj", slice(0, half)), ("up_proj", slice(half, 2 * half)))
        return [(f"{stem}{e}.{part}.weight", (e, rows)) for e in range(shape[0]) for part, rows in halves]
    if name.endswith(DOWN):
        stem = name.removesuffix("down_proj")
        return [(f"{stem}{e}.down_proj.weight", (e,)) for e in range(shape[0])]
    return [(name, ())]


def to_checkpoint(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The full parameter `name` as (checkpoint name, view of `tensor`)."""
    for hf_name, index in sources(name, tensor.shape):
        yield hf_name, tensor[index]


def from_checkpoint(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """For each checkpoint name the view, without gradient, of the parameter that it fills: `copy_` into it to load."""
    return {hf_name: view for name, param in params.items() for hf_name, view in to_checkpoint(name, param.detach())}


def stored_files(folder: Path | str) -> dict[str, Path]:
    """The safetensors file that holds each tensor of a checkpoint folder."""
    index = Path(folder) / "model.safetensors.index.json"
    if index.exists():
        return {name: Path(folder) / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    single = Path(folder) / "model.safetensors"
    with safe_open(single, "pt") as file:
        return dict.fromkeys(file.keys(), single)


def stored_shapes(folder: Path | str) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of a checkpoint folder, from the headers of its files; a tied head is not listed."""
    found = {}
    files = stored_files(folder)
    for path in sorted(set(files.values())):
        with safe_open(path, "pt") as file:
            found |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    if json.loads((Path(folder) / "config.json").read_text()).get("tie_word_embeddings"):
        found.pop("lm_head.weight", None)
    return found
