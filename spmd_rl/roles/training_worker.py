"""TrainingWorker: actor, ref and critic are three instances of it. It knows batches and losses, not backends."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from spmd_rl.batch import Batch, fields_of, make_batch, plan_micro_batches
from spmd_rl.collectives import all_max, all_sum
from spmd_rl.config import CheckpointConfig, EngineConfig, OptimizerConfig
from spmd_rl.engine.base import BaseEngine, EngineModel, LossFunction
from spmd_rl.engine.registry import EngineRegistry
from spmd_rl.losses import denominators, token_weights
from spmd_rl.mesh import RoleMesh
from spmd_rl.metrics import Max, Mean, Stats, Sum
from spmd_rl.placed import Placed, WeightStream


@dataclass(frozen=True)
class TrainingWorkerConfig:
    name: str  # actor | ref | critic: in metrics, the ledger and checkpoints
    model: EngineModel
    engine: EngineConfig
    optimizer: OptimizerConfig
    infer_field: str  # what infer_batch fills: old_log_probs | ref_log_probs | values
    aggregation: str = "token-mean"
    aggregation_length: int | None = None
    with_entropy: bool = False
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)


class TrainingWorker:
    """Every method may be called by every rank; outside the mesh it returns at once."""

    def __init__(self, config: TrainingWorkerConfig, mesh: RoleMesh):
        self.config, self.mesh = config, mesh
        self.engine: BaseEngine | None = None
        if mesh.here:
            engine = EngineRegistry.get(config.model.model_type, config.engine.backend, mesh.device.type)
            self.engine = engine(config.model, config.engine, config.optimizer, config.checkpoint, mesh)

    def train_batch(
        self, batch: Placed[Batch], loss_function: LossFunction, keep: Callable[[Batch], Tensor] | None = None
    ) -> Stats:
        """Collective over the mesh: one optimizer step on the whole batch; returns this replica's statistics.

        `keep` ([B] bool of a Batch) tells which rows can have a gradient; the others still count in the denominators.
        Where no row of any rank has one, the step is skipped and counted."""
        if not self.mesh.here:
            return {}
        local = self._weigh(batch.local)
        useful = (local.token_weights != 0).any(1)
        if keep is not None:
            useful &= keep(local)
        rows = useful.nonzero().flatten()
        plan = self._plan(local, rows)
        stats: Stats = {"rows_skipped": Sum(len(local) - len(rows))}
        if plan:
            with self.engine.train_mode():
                stats |= self.engine.forward_backward_batch(
                    _split(local, plan), loss_function, with_entropy=self.config.with_entropy
                )
                norm = self.engine.optimizer_step()
            stats |= {"grad_norm": Mean(norm, 1), "nonfinite_steps": Max(float(not math.isfinite(norm)))}
        stats |= {
            "lr": Mean(self.engine.lr_scheduler_step(), 1),
            "skipped_steps": Max(float(not plan)),
            "micro_batches": Max(len(plan)),
        }
        return {self._metric(key): value for key, value in stats.items()} if self.mesh.lane == 0 else {}

    def infer_batch(self, batch: Placed[Batch]) -> Placed[Batch]:
        """Collective over the mesh: the batch with `infer_field` filled by a forward pass, rows in their order."""
        if not self.mesh.here:
            return batch
        local = batch.local
        plan = self._plan(local, torch.arange(len(local)))
        out = torch.zeros(local.input_ids.shape, dtype=torch.float32)
        with self.engine.eval_mode():
            outputs = self.engine.forward_backward_batch(_split(local, plan), None, forward_only=True)
        for rows, output in zip(plan, outputs):
            out[torch.tensor(rows, dtype=torch.int64)] = output.log_probs if output.values is None else output.values
        return Placed(self.mesh, make_batch({**fields_of(local), self.config.infer_field: out}))

    def weights(self) -> WeightStream:
        return WeightStream(self.mesh, self.engine.weights() if self.mesh.here else None)

    def all_sum(self, tensor: Tensor) -> Tensor:
        """Collective over the mesh: a sum over replicas, for advantages that need global moments."""
        return all_sum(tensor, self.mesh.data_group, f"{self.config.name}.all_sum")

    def save(self, folder: Path) -> None:
        """Collective over the mesh."""
        if self.mesh.here:
            self.engine.save(folder / self.config.name)

    def load(self, folder: Path) -> None:
        """Collective over the mesh."""
        if self.mesh.here:
            self.engine.load(folder / self.config.name)

    def _weigh(self, local: Batch) -> Batch:
        """The one normaliser: found over the whole batch before micro-batching."""
        totals = self.all_sum(denominators(local.response_mask))
        weights = token_weights(local.response_mask, totals, self.config.aggregation, self.config.aggregation_length)
        return make_batch({**fields_of(local), "token_weights": weights})

    def _plan(self, local: Batch, rows: Tensor) -> list[list[int]]:
        """Row indices of each micro-batch, as many on every rank: a short rank gets empty ones."""
        items = list(zip(local.uid.tolist(), local.prompt_lengths.tolist(), (local.lengths - local.prompt_lengths).tolist()))
        chosen = rows.tolist()
        engine, budget = self.engine, self.config.engine.max_tokens_per_micro_batch
        plan = plan_micro_batches(
            [items[i] for i in chosen], budget, engine.shared_prompt, engine.count_multiple, engine.length_multiple
        )
        count = all_max([len(plan)], self.mesh.data_group, f"{self.config.name}.micro_batches")[0]
        return [[chosen[i] for i in part] for part in plan] + [[] for _ in range(count - len(plan))]

    def _metric(self, key: str) -> str:
        return key if "/" in key else f"{self.config.name}/{key}"


def _split(batch: Batch, plan: list[list[int]]) -> list[Batch]:
    """The micro-batches of a plan; an empty one has 0 rows and the fields of the others."""
    return [batch[torch.tensor(rows, dtype=torch.int64)] for rows in plan]
