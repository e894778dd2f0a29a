"""The contract of a training engine: a model, its optimizer and its parallelism over the ranks of one role."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from spmd_rl.batch import Batch, TokenOutput
from spmd_rl.config import CheckpointConfig, EngineConfig, OptimizerConfig
from spmd_rl.mesh import RoleMesh
from spmd_rl.metrics import Stats

LossFunction = Callable[[TokenOutput, Batch], tuple[Tensor, Stats]]


@dataclass(frozen=True)
class EngineModel:
    """Which model an engine holds. `trainable` False: no optimizer, forward passes only."""

    folder: str  # Hugging Face layout
    model_type: str  # language_model | value_model
    trainable: bool = True
    trust_remote_code: bool = False
    seed: int = 0  # of weights that are in no file


def lr_multiplier(config: OptimizerConfig, step: int) -> float:
    """The factor on the learning rate of update `step` (0-based): warm-up (k + 1) / (w + 1), so that no update is void,
    then constant, linear or cosine decay over the remaining steps to `min_lr_ratio`, where it stays."""
    if step < config.warmup_steps:
        return (step + 1) / (config.warmup_steps + 1)
    if config.schedule == "constant":
        return 1.0
    done = min(1.0, (step - config.warmup_steps) / max(1, config.total_steps - config.warmup_steps))
    shape = 1 - done if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * shape


def held_bytes(tensors: Iterable[Tensor], device: torch.device) -> int:
    """Bytes of memory behind this rank's part of `tensors`, as far as it is on such a device; what they share counts once."""
    local = (t.to_local() if isinstance(t, DTensor) else t for t in tensors)
    storages = (t.untyped_storage() for t in local if t.device.type == device.type)
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


class BaseEngine(ABC):
    """Every method is collective over the role's ranks: all call it, in one order, with as many micro-batches each."""

    def __init__(
        self,
        model_config: EngineModel,
        engine_config: EngineConfig,
        optimizer_config: OptimizerConfig,
        checkpoint_config: CheckpointConfig,
        mesh: RoleMesh,
    ):
        self.model_config, self.config, self.optimizer_config = model_config, engine_config, optimizer_config
        self.checkpoint_config, self.mesh = checkpoint_config, mesh
        self.shared_prompt = engine_config.shared_prompt  # an engine that cannot share prompts sets it to False
        self.length_multiple = 1  # to which a packed block is padded
        self.count_multiple = 1  # of which the number of micro-batches must be
        self.has_reference = False  # the model before training is at hand: only adapters train
        self.updates = 0  # steps of the schedule
        self.nonfinite_steps = 0  # updates refused because of the gradient

    def train_mode(self) -> AbstractContextManager:
        """Gradients on; weights and optimizer on the device, taken back at the end where offload is on."""
        return self._mode(train=True)

    def eval_mode(self) -> AbstractContextManager:
        """Gradients off; weights on the device, taken back at the end where offload is on."""
        return self._mode(train=False)

    @abstractmethod
    def _mode(self, train: bool) -> AbstractContextManager:
        """Either of the two."""

    def reference(self) -> AbstractContextManager:
        """As `eval_mode`, with the model as it was before training; only where `has_reference`."""
        raise NotImplementedError

    @abstractmethod
    def forward_backward_batch(
        self,
        micro_batches: Sequence[Batch],
        loss_function: LossFunction | None,
        forward_only: bool = False,
        with_entropy: bool = False,
    ) -> list[TokenOutput] | Stats:
        """Runs micro-batches; one of 0 rows is a dummy that adds exactly 0 to everything.

        `forward_only`: one TokenOutput ([B, T], on the host) each, with 0 rows for a dummy. Else adds to the gradient, which
        is the **sum** over all micro-batches and data-parallel ranks, and returns this replica's summed statistics."""

    @abstractmethod
    def optimizer_step(self) -> float:
        """Clips, steps and clears. Returns the global gradient norm before clipping. A non-finite gradient on any rank:
        no rank steps, parameters stay bitwise, `nonfinite_steps` goes up."""

    @abstractmethod
    def weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Streams (HF name, full tensor) to every rank, one at a time, in one order.

        `dtype`: what the receiver keeps; an engine that gathers may cast to it before, so that less travels."""

    @abstractmethod
    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """As `weights`, the gradient that the next `optimizer_step` would use, before clipping."""

    @abstractmethod
    def to(self, device: torch.device, model: bool = True, optimizer: bool = True) -> None:
        """Moves parameters and optimizer state."""

    @abstractmethod
    def memory(self) -> dict[str, int]:
        """Local: the bytes on this rank's device of `parameters`, `gradients` and `optimizer`."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Writes a sharded checkpoint that another number of ranks can load."""

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Reads what `save` wrote."""

    @abstractmethod
    def set_lr(self, lr: float) -> None:
        """The learning rate of the next update."""

    def lr_scheduler_step(self) -> float:
        """Ends an update of the schedule; returns its learning rate."""
        lr = self.optimizer_config.learning_rate * lr_multiplier(self.optimizer_config, self.updates)
        self.updates += 1
        self.set_lr(self.optimizer_config.learning_rate * lr_multiplier(self.optimizer_config, self.updates))
        return lr
