"""The parts of the engine that need Megatron, under one name."""

from megatron.core.distributed import finalize_model_grads as finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func as get_forward_backward_func

from spmd_rl.engine.megatron import checkpoint as checkpoint
from spmd_rl.engine.megatron import groups as groups
from spmd_rl.engine.megatron import model as model
from spmd_rl.engine.megatron import names as names
from spmd_rl.engine.megatron import shards as shards
