"""Megatron-Core on the host: its modules see a `torch` whose CUDA parts fall back to it. torch itself is not changed.

Imported on a host alone, after every module of Megatron that an engine uses.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable
from types import ModuleType

import torch
from megatron.core.tensor_parallel import random
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from torch import Tensor
from torch.overrides import TorchFunctionMode

FACTORIES = ("zeros", "ones", "empty", "full", "tensor", "arange", "rand", "randn")


class _Idle:
    """A stream, an event or a profiler's range: nothing waits on a host."""

    def __init__(self, *args, **kwargs): ...
    def __enter__(self):
        return self

    def __exit__(self, *error):
        return False

    def record_event(self, *args):
        return self

    def _nothing(self, *args, **kwargs): ...

    wait_stream = wait_event = record = synchronize = range_push = range_pop = _nothing


class _Stand(ModuleType):
    """A module in another's place: its own attributes, else those of the other."""

    def __init__(self, real: ModuleType, own: dict):
        super().__init__(real.__name__)
        self._real = real
        vars(self).update(own)

    def __getattr__(self, name: str):
        return operator.attrgetter(name)(self._real)


def _on_host(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(factory)
    def make(*args, device=None, pin_memory=False, **kwargs):
        if device is not None and torch.device(device).type == "cuda":
            device = "cpu"
        return factory(*args, device=device, **kwargs)

    return make


def _nothing(*args, **kwargs) -> None: ...


def _get_state(*args, **kwargs) -> Tensor:
    return torch.get_rng_state()


def _set_state(state: Tensor, *args, **kwargs) -> None:
    torch.set_rng_state(state)


CUDA = {
    "Stream": _Idle,
    "Event": _Idle,
    "stream": _Idle,
    "nvtx": _Idle(),
    "current_stream": _Idle,
    "default_stream": _Idle,
    "current_device": lambda: torch.device("cpu"),
    "synchronize": _nothing,
    "empty_cache": _nothing,
    "get_rng_state": _get_state,
    "set_rng_state": _set_state,
    "manual_seed": torch.manual_seed,
}


def _splits(tensor: Tensor, as_numpy: bool = False, record_stream: bool = False):
    """What an all-to-all is told of its parts must be no tensor."""
    return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor


def install() -> None:
    """Local; again where more of Megatron has been imported since."""
    own = {name: _on_host(vars(torch)[name]) for name in FACTORIES}
    stand = _Stand(torch, own | {"cuda": _Stand(torch.cuda, CUDA)})
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and module is not None and vars(module).get("torch") is torch:
            vars(module)["torch"] = stand
    vars(moe_utils).setdefault("te_general_gemm", None)  # undefined in 0.16.1 without Transformer Engine
    vars(token_dispatcher)["maybe_move_tensor_to_cpu"] = _splits
    vars(random).update(_get_cuda_rng_state=_get_state, _set_cuda_rng_state=_set_state)


class CudaNames(TorchFunctionMode):
    """Around what asks tensors for the name of a CUDA type, or moves them to a device, while a model is made."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is Tensor.cuda:
            return args[0]
        found = func(*args, **(kwargs or {}))
        if func is Tensor.type and len(args) == 1 and not kwargs:
            return found.replace("torch.", "torch.cuda.", 1)
        return found
