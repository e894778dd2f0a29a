"""Tensor parallelism of transformers models by their own plan: which matrix is split how over the ranks of a group.

Parameters are DTensors on the group's mesh, so that files, checkpoints and other ranks know what each part is; a forward pass
works on the local parts, with its own exchanges. The vocabulary is split too. Hidden states are whole on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import CONFIG_MAPPING, PretrainedConfig

from spmd_rl.engine.exchange import gather_last, split_last, sum_gradients, sum_over
from spmd_rl.engine.hf_names import FUSED_EXPERT_MODELS
from spmd_rl.engine.logprob import VocabShard

EMBEDDING, HEAD = "embedding_rowwise", "head"  # of every model here, whatever its plan says
SPLIT_DIMS = {  # style -> dim of each split parameter; the others are whole on every rank
    "colwise": {"weight": 0, "bias": 0},
    "colwise_gather_output": {"weight": 0, "bias": 0},
    "rowwise": {"weight": 1},
    "rowwise_split_input": {"weight": 1},
    "replicated_with_grad_allreduce": {},
    EMBEDDING: {"weight": 0},
    HEAD: {"weight": 0},
}


def read_config(model: dict) -> PretrainedConfig | None:
    """transformers' configuration of a parsed config.json, with its defaults; None for code of the model's own."""
    kind = model.get("model_type")
    return CONFIG_MAPPING[kind].from_dict(model).get_text_config() if kind in CONFIG_MAPPING else None


def plan_of(config: PretrainedConfig) -> dict[str, str]:
    """Module name, `*` for numbers -> style, of layers without experts, of which none is cut; empty where there is none."""
    plan = config.base_model_tp_plan or {}
    return {name: style for name, style in plan.items() if style != EMBEDDING and ".experts" not in name}


def splits_heads(plan: dict[str, str]) -> bool:
    return any(name.endswith(".q_proj") and style == "colwise" for name, style in plan.items())


def tensor_parallel_problems(size: int, config: PretrainedConfig) -> list[str]:
    """Why a model cannot be split over `size` ranks."""
    key, kind, plan = "engine.tensor_parallel_size", config.model_type, plan_of(config)
    if not plan:
        return [f"{key}: {size}, but transformers has no plan for model type '{kind}' - set 1, and shard_size or ulysses_size"]
    if unknown := sorted({style for style in plan.values() if style not in SPLIT_DIMS}):
        return [f"{key}: {size}, but the plan of model type '{kind}' asks for {', '.join(unknown)} - set 1"]
    counts = {"intermediate_size": config.intermediate_size}
    if splits_heads(plan):
        counts |= {"num_attention_heads": config.num_attention_heads, "num_key_value_heads": config.num_key_value_heads}
    if kind in FUSED_EXPERT_MODELS:
        counts |= {"num_experts": config.num_experts}
    elif any(".experts" in name for name in config.base_model_tp_plan):
        return [f"{key}: {size}, but of model type '{kind}' no experts are known - set 1"]
    if wrong := [f"{name} {n}" for name, n in counts.items() if n % size]:
        common = math.gcd(*counts.values())
        able = [n for n in range(1, common + 1) if common % n == 0]
        return [f"{key}: {size} does not divide the model's {', '.join(wrong)} - set one of {able}"]
    return []


def styled(lm: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Every module that is split, with its style. An adapter's two layers are split as the layer that it adapts."""
    plan = plan_of(lm.config)
    for name, module in lm.base_model.named_modules():
        style = plan.get(".".join("*" if part.isdigit() else part for part in name.split(".")))
        if style is not None and "base_layer" in module._modules:
            yield module.base_layer, style
            adapters = module.lora_B if style.startswith("colwise") else module.lora_A
            yield from ((adapter, style) for adapter in adapters.values())
        elif style is not None:
            yield module, style
    yield lm.get_input_embeddings(), EMBEDDING
    if (head := lm.get_output_embeddings()) is not None:
        yield head, HEAD


def place(lm: nn.Module, mesh: DeviceMesh) -> None:
    """Local: makes the parameters of a model on the meta device DTensors on the 1-D `mesh`; tied ones stay tied.

    Raises ValueError where a matrix cannot be split evenly; the vocabulary can be uneven."""
    placed: dict[nn.Parameter, nn.Parameter] = {}
    for module, style in styled(lm):
        for name, dim in SPLIT_DIMS[style].items():
            parameter = module._parameters.get(name)
            if parameter is None:
                continue
            if style not in (EMBEDDING, HEAD) and parameter.shape[dim] % mesh.size():
                raise ValueError(
                    f"engine.tensor_parallel_size: {mesh.size()} does not divide {parameter.shape[dim]}, "
                    f"a size of {type(module).__name__} ({style}) in {lm.config.model_type} - set 1, or a divisor"
                )
            if parameter not in placed:
                placed[parameter] = split(parameter, mesh, dim)
            module.register_parameter(name, placed[parameter])


def split(parameter: nn.Parameter, mesh: DeviceMesh, dim: int) -> nn.Parameter:
    part = distribute_tensor(parameter.detach(), mesh, [Shard(dim)], src_data_rank=None)
    return nn.Parameter(part, requires_grad=parameter.requires_grad)


def local_part(parameter: Tensor | None) -> Tensor | None:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


@contextmanager
def _parts_of(module: nn.Module, read: Callable, others: dict[str, Tensor | None]) -> Iterator[None]:
    held = dict(module._parameters)
    module._parameters.update({name: read(parameter) for name, parameter in held.items()} | others)
    try:
        yield
    finally:  # also where activation checkpointing ends a forward pass early
        module._parameters.update(held)


def rewrite(module: nn.Module, forward: Callable, read: Callable = local_part, **others: Tensor | None) -> None:
    """Local: gives a module the forward pass `forward(own, ...)`; in `own`, its present one, parameters are this rank's parts."""
    present = module.forward

    def own(*args: Tensor) -> Tensor:
        with _parts_of(module, read, others):
            return present(*args)

    module.forward = partial(forward, own)


class _Entry:
    """The input of layers that each rank has other rows of: its gradients are summed, once for siblings with one input."""

    def __init__(self, group: ProcessGroup):
        self.group = group
        self.last: tuple[Tensor, Tensor] | None = None  # an input, and what the layers see of it

    def __call__(self, x: Tensor) -> Tensor:
        if self.last is None or self.last[0] is not x:
            self.last = x, sum_gradients(self.group, x)[0]
        return self.last[1]

    def leave(self) -> None:
        self.last = None


def rewire(lm: nn.Module, group: ProcessGroup) -> VocabShard | None:
    """Local: the forward passes of all that `place` split, once weights are loaded and tied; not for experts.

    Returns this rank's part of the head, None where the model has none."""
    entry = _Entry(group)
    for module, style in styled(lm):
        if style.startswith("colwise"):
            _columns(module, entry, gathers=style == "colwise_gather_output")
        elif style.startswith("rowwise"):
            _rows(module, entry, splits=style == "rowwise_split_input")
        elif style == EMBEDDING:
            _embedding(module, group)
        elif style == HEAD:
            _head(module, group)
        else:
            rewrite(module, lambda own, x: own(x), lambda parameter: sum_gradients(group, parameter)[0])
    head = lm.get_output_embeddings()
    return None if head is None else VocabShard(group, *_vocabulary(head.weight, group))


def _vocabulary(weight: DTensor, group: ProcessGroup) -> tuple[int, int]:
    """(first row, number of rows) of this rank."""
    rows = -(-weight.shape[0] // group.size())
    start = min(rows * group.rank(), weight.shape[0])
    return start, min(rows, weight.shape[0] - start)


def _columns(module: nn.Module, entry: _Entry, gathers: bool) -> None:
    def forward(own: Callable, x: Tensor) -> Tensor:
        out = own(entry(x))
        return gather_last(out, entry.group) if gathers else out

    rewrite(module, forward)


def _rows(module: nn.Module, entry: _Entry, splits: bool) -> None:
    def forward(own: Callable, x: Tensor) -> Tensor:
        entry.leave()
        out = sum_over(own(split_last(x, entry.group) if splits else x), entry.group)
        return out if module.bias is None else out + module.bias

    rewrite(module, forward, bias=None)  # added once, to the sum


def _embedding(module: nn.Embedding, group: ProcessGroup) -> None:
    start, rows = _vocabulary(module.weight, group)
    if module.padding_idx is not None:
        module.padding_idx = module.padding_idx - start if 0 <= module.padding_idx - start < rows else None

    def forward(own: Callable, ids: Tensor) -> Tensor:
        mine = (ids >= start) & (ids < start + rows)
        return sum_over(own((ids - start).where(mine, 0)).where(mine[..., None], 0.0), group)

    rewrite(module, forward)


def _head(module: nn.Module, group: ProcessGroup) -> None:
    """Its weight is read by `token_log_probs`; its forward pass, whole, by the self-check of a few tokens."""
    whole = module.weight.shape[0]
    rows = -(-whole // group.size())

    def forward(own: Callable, x: Tensor) -> Tensor:
        out = own(x)
        return gather_last(torch.nn.functional.pad(out, (0, rows - out.shape[-1])), group)[..., :whole]

    rewrite(module, forward)
