"""From a Hugging Face config to the parallel decoder of one rank, its parameters on the device but not yet filled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models.qwen3.parallelize import parallelize_qwen3
from transformers import PretrainedConfig

from spmd_rl.engine.torchtitan.layout import Config, replica_width, shard_size, stage_modules
from spmd_rl.engine.torchtitan.modules import Part, part_config

BACKEND = "partial_dtensor"  # the default of TorchTitan 0.3.0 fails with torch 2.13 on more than one rank


class Dims(ParallelDims):
    """TorchTitan's meshes, for ranks whose order is replica, pipeline, context, tensor: its own has the pipeline outermost."""

    def build_mesh(self) -> DeviceMesh:
        with _ranks_in_order(self.dp_replicate * self.dp_shard, self.pp):
            return super().build_mesh()


@contextmanager
def _ranks_in_order(replicas: int, stages: int) -> Iterator[None]:
    """Its world mesh lists the ranks by stage, then by replica."""
    usual = parallel_dims.init_device_mesh

    def world(device_type: str, shape: tuple[int], *, mesh_dim_names: tuple[str]) -> DeviceMesh:
        ranks = torch.arange(shape[0]).view(replicas, stages, -1).transpose(0, 1).flatten()
        return DeviceMesh(device_type, ranks, mesh_dim_names=mesh_dim_names)

    parallel_dims.init_device_mesh = usual if 1 in (replicas, stages) else world
    try:
        yield
    finally:
        parallel_dims.init_device_mesh = usual


@dataclass
class Built:
    """What a rank holds: a part for each of its pipeline stages, lowest first."""

    parts: list[Part]
    dims: ParallelDims
    shapes: list[list[tuple[str, torch.Size]]]  # (name, shape) of the parameters of every stage
    stages: list[int]  # those of the parts


def build(hf: PretrainedConfig, options: Config, num_ranks: int, device: torch.device, value_model: bool) -> Built:
    """Collective over the role's mesh."""
    sharded, width = shard_size(options, num_ranks), replica_width(options)
    num_stages = options.pipeline_parallel_size * options.virtual_pipeline_size
    modules = stage_modules(hf.num_hidden_layers, num_stages)
    parallelism = ParallelismConfig(
        spmd_backend=BACKEND,
        data_parallel_replicate_degree=num_ranks // width // sharded,
        data_parallel_shard_degree=sharded,
        fsdp_reshard_after_forward=options.reshard_after_forward,
        tensor_parallel_degree=options.tensor_parallel_size,
        enable_sequence_parallel=options.sequence_parallel,
        pipeline_parallel_degree=options.pipeline_parallel_size,
        pipeline_parallel_schedule="Interleaved1F1B" if options.virtual_pipeline_size > 1 else "1F1B",
        module_fqns_per_model_part=modules,
        context_parallel_degree=options.context_parallel_size,
        context_parallel_load_balancer=None,
        expert_parallel_degree=options.expert_parallel_size,
    )
    set_spmd_backend(BACKEND)
    dims = Dims.from_config(parallelism, num_ranks)
    dims.build_mesh()
    config = part_config(hf, options, value_model)
    with torch.device("meta"):
        whole = config.build()
    shapes = [[(n, p.shape) for n, p in whole.named_parameters() if _inside(n, names)] for names in modules]
    given = {
        "parallel_dims": dims,
        "parallelism": parallelism,
        "training": TrainingConfig(
            local_batch_size=num_stages,
            mixed_precision_param=options.dtype,
            mixed_precision_reduce="float32",
            enable_cpu_offload=options.offload and device.type == "cuda",
        ),
        "compile_config": CompileConfig(),
        "ac_config": FullAC.Config() if options.activation_checkpointing else None,
        "dump_folder": "",
    }
    if options.pipeline_parallel_size > 1:
        _, parts, _, _ = pipeline_llm(
            whole, device=device, model_config=config, parallelize_fn=parallelize_qwen3, loss_fn=_no_loss, **given
        )
        first = dims.get_mesh("pp").get_local_rank()
        stages = list(range(first, num_stages, options.pipeline_parallel_size))
    else:
        parts, stages = [parallelize_qwen3(whole, **given)], [0]
    for part in parts:
        part.to_empty(device="cpu" if options.offload else device)
        part.tie()
        part.context_mesh = dims.get_optional_mesh("cp")
        for module in sharded_modules(part):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum
        for buffer in part.buffers():
            buffer.zero_()
    return Built(parts, dims, shapes, stages)


def _inside(name: str, modules: list[str]) -> bool:
    return any(name.startswith(module + ".") for module in modules)


def _no_loss(output: torch.Tensor, target: torch.Tensor):
    raise AssertionError("the schedule that TorchTitan made is not run")


def sharded_modules(part: nn.Module) -> list[FSDPModule]:
    return [module for module in part.modules() if isinstance(module, FSDPModule)]
