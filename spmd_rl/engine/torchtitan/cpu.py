"""What TorchTitan needs where there is no CUDA. Not imported elsewhere."""

from __future__ import annotations

import sys
import types
import warnings
from importlib.util import find_spec

import torch

KERNELS = "torchtitan.distributed.minimal_async_ep.kernels"


def prepare() -> None:
    """Before anything else of TorchTitan is imported."""
    from torchtitan.tools import utils

    utils.device_type, utils.device_module = "cpu", torch.cpu  # it takes CUDA for the device where it finds none
    if find_spec("triton") is None and KERNELS not in sys.modules:
        sys.modules[KERNELS] = _Missing(KERNELS)  # one of its expert dispatchers, which is imported with every model
    warnings.filterwarnings("ignore", message="In CPU autocast, but the target dtype is not supported")  # the router's, each pass


class _Missing(types.ModuleType):
    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return _needs_triton


def _needs_triton(*args, **kwargs):
    raise ImportError("this expert dispatcher of TorchTitan needs triton")
