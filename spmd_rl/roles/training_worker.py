"""TrainingWorker: actor, ref and critic are three instances of it. It knows batches and losses, not backends."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from spmd_rl.batch import Batch, fields_of, make_batch, plan_micro_batches, text_batch
from spmd_rl.collectives import all_max, all_max_float, all_sum
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
    probe: tuple[tuple[int, ...], ...] = ()  # rows of token ids whose log-probs prove what became of the weights elsewhere
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)


class TrainingWorker:
    """Every method may be called by every rank; outside the mesh it returns at once."""

    def __init__(self, config: TrainingWorkerConfig, mesh: RoleMesh, reference_of: BaseEngine | None = None):
        """`reference_of`: an engine on this mesh, of which this worker infers with the model before training, and has no own."""
        self.config, self.mesh, self.is_view = config, mesh, reference_of is not None
        self.engine: BaseEngine | None = reference_of
        if mesh.here and not self.is_view:
            engine = EngineRegistry.get(config.model.model_type, config.engine.backend, mesh.device.type)
            self.engine = engine(config.model, config.engine, config.optimizer, config.checkpoint, mesh)

    def train_batch(
        self,
        batch: Placed[Batch],
        loss_function: LossFunction,
        keep: Callable[[Batch], Tensor] | None = None,
        limits: Mapping[str, float] | None = None,
    ) -> Stats:
        """Collective over the mesh: one optimizer step on the whole batch; returns this replica's statistics.

        `keep` ([B] bool of a Batch) tells which rows can have a gradient; the others still count in the denominators.
        Where no row of any rank has one, the step is skipped and counted. `limits`: the largest value allowed of the
        loss's Max statistics, by name, alike on every rank. Raises RuntimeError on every rank where one is exceeded on
        any, before the optimizer's step; KeyError for a name that the loss does not report."""
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
                if limits:
                    self._check(stats, limits)
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
        with self.engine.reference() if self.is_view else self.engine.eval_mode():
            outputs = self.engine.forward_backward_batch(_split(local, plan), None, forward_only=True)
        for rows, output in zip(plan, outputs):
            out[torch.tensor(rows, dtype=torch.int64)] = output.log_probs if output.values is None else output.values
        return Placed(self.mesh, make_batch({**fields_of(local), self.config.infer_field: out}))

    def weights(self, version: int, dtype: torch.dtype | None = None) -> WeightStream:
        """`version`: the steps that made these weights; it travels with them. `dtype`: what they may be cast to, early."""
        if not self.mesh.here:
            return WeightStream(self.mesh, None, version=version)
        return WeightStream(self.mesh, self.engine.weights(dtype), self._score_probe, version, dtype)

    def _score_probe(self) -> list[list[float]]:
        """Collective over the mesh: log-probs of the probe's tokens after the first, by the present weights."""
        rows = probe_batch(self.config.probe)
        if not len(rows):
            return []
        with self.engine.eval_mode():
            found = self.engine.forward_backward_batch([rows], None, forward_only=True)[0].log_probs
        return [row[1 : len(ids)] for row, ids in zip(found.tolist(), self.config.probe)]

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
        totals = all_sum(denominators(local.response_mask), self.mesh.data_group, f"{self.config.name}.denominators")
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

    def _check(self, stats: Stats, limits: Mapping[str, float]) -> None:
        """Collective over the mesh: raises RuntimeError on every rank where a maximum is over its limit, or NaN."""
        largest = [float(stats[name].value) for name in limits]
        agreed = all_max_float(largest, self.mesh.bridge(self.mesh).payload, f"{self.config.name}.limits")
        over = [f"{n} is {value:.4g}, over {limit:g}" for (n, limit), value in zip(limits.items(), agreed) if not value <= limit]
        if over:
            raise RuntimeError(
                f"{'; '.join(over)}: the rollout and the trainer disagree on the tokens of the same weights; no step was taken - "
                "rollout.max_logprob_diff sets the limit in nats, 0 turns it off"
            )

    def _metric(self, key: str) -> str:
        return key if "/" in key else f"{self.config.name}/{key}"


def probe_batch(probe: Sequence[Sequence[int]]) -> Batch:
    """Rows of one prompt token each, the rest being responses."""
    ids = pad_sequence([torch.tensor(row) for row in probe], batch_first=True) if probe else torch.zeros(0, 0, dtype=torch.int64)
    lengths, uid = torch.tensor([len(row) for row in probe], dtype=torch.int64), torch.arange(len(probe))
    return text_batch(ids, torch.ones_like(uid), lengths, uid, torch.zeros_like(uid))


def _split(batch: Batch, plan: list[list[int]]) -> list[Batch]:
    """The micro-batches of a plan; an empty one has 0 rows and the fields of the others."""
    return [batch[torch.tensor(rows, dtype=torch.int64)] for rows in plan]
