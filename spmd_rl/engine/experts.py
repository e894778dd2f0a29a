"""Experts of a mixture divided over ranks: E experts, each whole on one rank, k of them for each of N tokens of width H.

Under tensor parallelism every rank has the same tokens, computes what is its experts' and the sum is exchanged. Under expert
parallelism ranks have other tokens, and send each to its experts and back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from transformers import PretrainedConfig

from spmd_rl.engine.exchange import all_to_all, sum_gradients, sum_over
from spmd_rl.engine.hf_names import FUSED_EXPERT_MODELS
from spmd_rl.engine.tensor_parallel import rewrite, split


def expert_problems(size: int, config: PretrainedConfig) -> list[str]:
    """Why a model's experts cannot be divided over `size` ranks."""
    key, kind = "engine.expert_parallel_size", config.model_type
    if kind not in FUSED_EXPERT_MODELS:
        known = ", ".join(FUSED_EXPERT_MODELS)
        return [f"{key}: {size}, but of model type '{kind}' no experts are known (of {known} they are) - set 1"]
    if config.num_experts % size:
        able = [n for n in range(1, config.num_experts + 1) if config.num_experts % n == 0]
        return [f"{key}: {size} does not divide the model's {config.num_experts} experts - set one of {able}"]
    return []


def experts_of(lm: nn.Module) -> Iterator[nn.Module]:
    """Modules with the fused experts of one layer: forward(hidden [N, H], experts [N, k], their weights [N, k])."""
    if lm.config.model_type in FUSED_EXPERT_MODELS:
        yield from (module for name, module in lm.base_model.named_modules() if name.endswith(".mlp.experts"))


def place_experts(lm: nn.Module, mesh: DeviceMesh) -> None:
    """Local: makes the experts of a model on the meta device DTensors, an equal part of them on each rank of the 1-D `mesh`."""
    for module in experts_of(lm):
        for name, parameter in list(module.named_parameters()):
            module.register_parameter(name, split(parameter, mesh, 0))


def rewire_experts(lm: nn.Module, group: ProcessGroup, same_tokens: bool) -> None:
    """Local: the forward passes of divided experts, once weights are loaded. `same_tokens`: on all ranks of the group."""
    for module in experts_of(lm):
        here = module.gate_up_proj.shape[0] // group.size()
        vars(module)["num_experts"] = here
        rewrite(module, partial(_with_same_tokens if same_tokens else _with_other_tokens, group, here))


def _compute(own: Callable, tokens: Tensor, experts: Tensor) -> Tensor:
    """[M, H] tokens and [M] ids among this rank's experts -> [M, H]. Without tokens a zero keeps the backward pass whole."""
    count = len(tokens)
    if not count:
        tokens, experts = torch.cat([tokens, tokens.new_zeros(1, tokens.shape[1])]), experts.new_zeros(1)
    return own(tokens, experts[:, None], tokens.new_ones(len(tokens), 1))[:count]


def _combine(each: Tensor, weights: Tensor) -> Tensor:
    """[N * k, H] outputs of each choice, [N, k] weights -> [N, H]."""
    return (each.view(*weights.shape, -1) * weights[..., None]).sum(1)


def _with_same_tokens(group, num_experts, own: Callable, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    hidden, weights = sum_gradients(group, hidden, weights)
    experts = chosen.flatten() - group.rank() * num_experts
    mine = ((experts >= 0) & (experts < num_experts)).nonzero()[:, 0]
    out = _compute(own, hidden[mine // chosen.shape[1]], experts[mine])
    each = out.new_zeros(chosen.numel(), hidden.shape[1]).index_copy(0, mine, out)
    return sum_over(_combine(each, weights), group)


def _with_other_tokens(group, num_experts, own: Callable, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    ranks, order = group.size(), chosen.flatten().argsort(stable=True)
    counts = chosen.flatten().bincount(minlength=ranks * num_experts)
    theirs = torch.empty_like(counts)  # what each rank sends to each expert of this one
    dist.all_to_all_single(theirs, counts, group=group)
    send, receive = (n.view(ranks, -1).sum(1).tolist() for n in (counts, theirs))
    tokens = all_to_all(hidden[order // chosen.shape[1]], send, receive, group)
    experts = torch.arange(num_experts, device=hidden.device).repeat(ranks).repeat_interleave(theirs)
    out = all_to_all(_compute(own, tokens, experts), receive, send, group)
    return _combine(out[order.argsort()], weights)
