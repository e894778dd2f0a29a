"""Megatron's process groups are globals of one module: each engine's layout is made once, and brought back before it computes."""

from __future__ import annotations

import torch
from megatron.core import parallel_state, tensor_parallel
from torch.distributed import ProcessGroup

from spmd_rl.engine.megatron.config import MegatronConfig, replica_width
from spmd_rl.engine.megatron.names import Place

Layout = tuple[tuple[str, object], ...]

_globals: dict[Layout, dict[str, object]] = {}  # the module's globals under each layout of this process


def _held() -> dict[str, object]:
    return {name: value for name, value in vars(parallel_state).items() if name.startswith("_") and name.isupper()}


_empty = _held()


def layout_of(config: MegatronConfig, num_ranks: int, mixture: bool) -> Layout:
    """The arguments of `initialize_model_parallel`. Ranks count as in a role's mesh, replica-major.

    Megatron lays experts out over ranks of its own order, which must agree with the others' on pipeline stages."""
    tensor, pipeline, context = config.tensor_parallel_size, config.pipeline_parallel_size, config.context_parallel_size
    one_replica = num_ranks == replica_width(config)
    return tuple(
        {
            "tensor_model_parallel_size": tensor,
            "pipeline_model_parallel_size": pipeline,
            "virtual_pipeline_model_parallel_size": config.virtual_pipeline_size if config.virtual_pipeline_size > 1 else None,
            "context_parallel_size": context,
            "expert_model_parallel_size": config.expert_parallel_size if mixture else context,
            "expert_tensor_parallel_size": config.expert_tensor_size if mixture else tensor,
            "order": "tp-cp-ep-dp-pp" if one_replica else "tp-cp-ep-pp-dp",
        }.items()
    )


def use(layout: Layout) -> None:
    """Makes `layout` Megatron's. Collective over the cell the first time that a process uses it."""
    if layout not in _globals:
        vars(parallel_state).update(_empty)
        parallel_state.initialize_model_parallel(**dict(layout), create_gloo_process_groups=False)
        _globals[layout] = _held()
        with torch.random.fork_rng(devices=[]):
            tensor_parallel.model_parallel_cuda_manual_seed(1)  # states that are named even where nothing is drawn
    vars(parallel_state).update(_globals[layout])


def place() -> Place:
    """This rank's, of the layout in use."""
    return Place(
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        tensor_size=parallel_state.get_tensor_model_parallel_world_size(),
        expert_rank=parallel_state.get_expert_model_parallel_rank(),
        expert_size=parallel_state.get_expert_model_parallel_world_size(),
        expert_tensor_rank=parallel_state.get_expert_tensor_parallel_rank(),
        expert_tensor_size=parallel_state.get_expert_tensor_parallel_world_size(),
    )


def pipeline_group() -> ProcessGroup:
    return parallel_state.get_pipeline_model_parallel_group()


def copy_index(expert: bool) -> int:
    """The rank's index among those that hold the same part of a parameter and see other tokens."""
    if expert:
        return parallel_state.get_expert_data_parallel_rank()
    return parallel_state.get_data_parallel_rank(with_context_parallel=True)
