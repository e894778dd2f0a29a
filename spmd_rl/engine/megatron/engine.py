"""Megatron-Core as an engine: its schedules run our micro-batches, its distributed optimizer steps.

Megatron is imported when an engine is made; what stands beside the class needs none of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig

from spmd_rl.batch import Batch, TokenOutput
from spmd_rl.engine.base import BaseEngine, held_bytes, lr_multiplier
from spmd_rl.engine.megatron.config import LAYOUTS as LAYOUTS
from spmd_rl.engine.megatron.config import Config as Config
from spmd_rl.engine.megatron.config import problems, sizes_of
from spmd_rl.engine.megatron.config import process_layout as process_layout
from spmd_rl.engine.megatron.config import replica_width as replica_width
from spmd_rl.engine.packing import dummy_batch, pack
from spmd_rl.metrics import Stats, add_stats

Scores = tuple[Tensor, Tensor | None]  # [N] float32 of response tokens, and their entropy


class MegatronEngine(BaseEngine):
    def __init__(self, model_config, engine_config, optimizer_config, checkpoint_config, mesh):
        super().__init__(model_config, engine_config, optimizer_config, checkpoint_config, mesh)
        torch.set_float32_matmul_precision(engine_config.matmul_precision)
        hf = AutoConfig.from_pretrained(model_config.folder, trust_remote_code=model_config.trust_remote_code)
        if found := problems(engine_config, len(mesh.ranks), hf.to_dict()):
            raise ValueError("\n".join(found))
        self.sizes, self.value = sizes_of(hf.to_dict()), model_config.model_type == "value_model"
        self.length_multiple = engine_config.context_parallel_size
        if engine_config.splits_sequence:
            self.length_multiple *= engine_config.tensor_parallel_size
        self.backend = _backend()
        self.steps = 0  # of the optimizer
        self.reduced = False  # the gradients are sums over all ranks, and take no more
        self.parts, self.optimizer = None, None
        with self.backend.model.prepare(mesh.device):
            self.layout = self.backend.groups.layout_of(engine_config, len(mesh.ranks), self.sizes.experts > 0)
            self.backend.groups.use(self.layout)
            self.chunks = self.backend.model.build(hf, engine_config, mesh.device, self.value)
            if model_config.trainable:
                self.parts, self.optimizer = self.backend.model.with_gradients(self.chunks, optimizer_config)
        self._read_model()
        if self.optimizer:
            self.set_lr(optimizer_config.learning_rate * lr_multiplier(optimizer_config, 0))
        if engine_config.offload:
            self.to(torch.device("cpu"))

    def _read_model(self) -> None:
        shards, names = self.backend.shards, self.backend.names
        self.shards = shards.find_shards(self.chunks, self.sizes, self.optimizer)
        shapes = names.checkpoint_shapes(self.sizes, self.value)
        self.saved_shapes = shards.saved_shapes(shapes, self.sizes, self.value)
        self.stream = shards.Stream(self.shards, shapes, self.mesh.device)
        shards.fill(self.shards, shards.reader(Path(self.model_config.folder), shapes))
        self._gather_parameters()

    def _gather_parameters(self) -> None:
        """From the parts that the optimizer's ranks hold."""
        for part in self.parts or ():
            part.start_param_sync()

    @contextmanager
    def _mode(self, train: bool) -> Iterator[None]:
        for chunk in self.chunks:
            chunk.train(train)
        with self._present(optimizer=train), torch.set_grad_enabled(train):
            yield

    @contextmanager
    def _present(self, optimizer: bool = True) -> Iterator[None]:
        """This engine's groups are Megatron's; what offload took to the host is on the device."""
        self.backend.groups.use(self.layout)
        if self.config.offload:
            self.to(self.mesh.device, optimizer=optimizer)
        yield
        if self.config.offload:
            self.to(torch.device("cpu"))

    def forward_backward_batch(self, micro_batches, loss_function, forward_only=False, with_entropy=False):
        if not micro_batches:
            return [] if forward_only else {}
        if self.reduced and not forward_only:
            raise RuntimeError("the gradients are reduced already: optimizer_step comes before the next backward pass")
        micro_batches, stats = list(micro_batches), {}
        extra = -len(micro_batches) % self.config.pipeline_parallel_size if self.config.virtual_pipeline_size > 1 else 0
        data = [batch if len(batch) else dummy_batch() for batch in micro_batches] + [dummy_batch()] * extra
        scores: dict[int, Scores] = {}

        def finish(index: int, found: Scores) -> tuple[Tensor, Tensor, dict]:
            """The loss of one micro-batch on the last stage, as Megatron's schedules want it: (loss, token count, more)."""
            nonlocal stats
            scores[index] = found[0].detach(), None if found[1] is None else found[1].detach()
            loss = found[0].sum() * 0
            if not forward_only and index < len(micro_batches):
                own, more = loss_function(*self._shown(micro_batches[index], found))
                loss, stats = loss + own, add_stats(stats, more)
            return loss, torch.zeros((), dtype=torch.int, device=loss.device), {}

        def step(rows: Iterator[tuple[int, Batch]], model) -> tuple[Tensor | Scores, partial]:
            index, batch = next(rows)
            packed = pack(batch, self.shared_prompt, self.length_multiple, self.mesh.device)
            return model(packed, with_entropy), partial(finish, index)

        self._run(step, data, forward_only)
        self._share(scores, data, with_entropy and not self.value)
        if not forward_only:
            return stats if self._is_last() else self._stats(scores, micro_batches, loss_function)
        return [self._shown(batch, scores[i], torch.device("cpu"))[0] for i, batch in enumerate(micro_batches)]

    def _run(self, step, data: list[Batch], forward_only: bool) -> None:
        models = self.parts or self.chunks
        rows = [iter(enumerate(data)) for _ in models]
        self.backend.get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=rows if len(rows) > 1 else rows[0],
            model=models if len(models) > 1 else models[0],
            num_microbatches=len(data),
            seq_length=1,  # stages tell each other their lengths
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _is_last(self) -> bool:
        return self.chunks[-1].post_process

    def _share(self, scores: dict[int, Scores], data: list[Batch], with_entropy: bool) -> None:
        """Collective over the pipeline: every stage gets the last one's scores."""
        group = self.backend.groups.pipeline_group()
        if group.size() == 1:
            return
        counts = [int(batch.response_mask.sum()) for batch in data]
        width = 2 if with_entropy else 1
        flat = torch.zeros(width, sum(counts), device=self.mesh.device)
        if self._is_last():
            for row in range(width):
                torch.cat([x for i in range(len(data)) if (x := scores[i][row]) is not None], out=flat[row])
        dist.broadcast(flat, group=group, group_src=group.size() - 1)
        for i, found in enumerate(zip(*(row.split(counts) for row in flat))):
            scores[i] = found if with_entropy else (found[0], None)

    def _stats(self, scores: dict[int, Scores], micro_batches: list[Batch], loss_function) -> Stats:
        """What the last stage's losses said, on the stages before it: of the same output, without gradient."""
        stats: Stats = {}
        with torch.no_grad():
            for index, batch in enumerate(micro_batches):
                stats = add_stats(stats, loss_function(*self._shown(batch, scores[index]))[1])
        return stats

    def _shown(self, batch: Batch, scores: Scores, device: torch.device | None = None) -> tuple[TokenOutput, Batch]:
        """What a loss sees of a micro-batch; a dummy, whose one token is nobody's, shows 0 rows."""
        batch = batch.to(device or self.mesh.device)
        mask = batch.response_mask

        def placed(x: Tensor) -> Tensor:
            x = x.to(mask.device)
            return x.new_zeros(mask.shape).masked_scatter(mask, x)

        tokens, entropy = placed(scores[0]), None if scores[1] is None else placed(scores[1])
        output = TokenOutput(values=tokens) if self.value else TokenOutput(log_probs=tokens, entropy=entropy)
        return output, batch

    def _reduce(self) -> None:
        """Collective over the cell: the gradients become sums over all ranks, each rank's part where its optimizer looks."""
        if not self.reduced:
            self.backend.finalize_model_grads(self.parts)
            self.reduced = True

    def optimizer_step(self) -> float:
        self._reduce()
        norm = math.sqrt(self.backend.shards.squared_norm(self.shards, self.mesh.device))
        limit = self.optimizer_config.clip_grad_norm
        if not math.isfinite(norm):
            self.nonfinite_steps += 1
        else:
            if limit and norm > limit:
                for shard in self.shards:
                    shard.gradient().mul_(limit / norm)
            self.optimizer.prepare_grads()
            self.optimizer.step_with_ready_grads()
            self.steps += 1
        self.optimizer.zero_grad()
        for part in self.parts:
            part.zero_grad_buffer()
        self.reduced = False
        return norm

    def set_lr(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        with self._present(optimizer=False):
            yield from self.stream.tensors(lambda shard: shard.values.detach(), dtype or torch.float32)

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        self.backend.groups.use(self.layout)
        self._reduce()
        yield from self.stream.tensors(lambda shard: shard.gradient())

    def to(self, device: torch.device, model: bool = True, optimizer: bool = True) -> None:
        if device.type == self.mesh.device.type == "cpu":
            return
        away = device.type == "cpu"
        if model and self.parts is None:
            for chunk in self.chunks:
                chunk.to(device)
        for part in self.parts or () if model else ():
            for buffer in part.buffers + part.expert_parallel_buffers:
                buffer.offload_to_cpu() if away else buffer.reload_from_cpu(move_grads=optimizer)
        for shard in self.shards if optimizer and self.optimizer else ():
            if shard.has_copy:
                shard.values.data = shard.values.data.to(device)
            state = shard.optimizer.state[shard.values]
            state.update({name: state[name].to(device) for name in self.backend.shards.MOMENTS if name in state})

    def memory(self) -> dict[str, int]:
        parameters = [p for chunk in self.chunks for p in chunk.parameters()]
        masters = [shard.values for shard in self.shards if shard.has_copy]
        kept = [shard.optimizer.state[shard.values] for shard in self.shards] if self.optimizer else []
        tensors = {
            "parameters": parameters,
            "gradients": [b.grad_data for part in self.parts or () for b in part.buffers + part.expert_parallel_buffers],
            "optimizer": masters + [value for state in kept for value in state.values() if isinstance(value, Tensor)],
        }
        return {part: held_bytes(held, self.mesh.device) for part, held in tensors.items()}

    def save(self, folder: Path) -> None:
        with self._present(), torch.no_grad():
            counters = torch.tensor([self.updates, self.nonfinite_steps, self.steps])
            self.backend.checkpoint.save(folder, *self._parts(owned=True), counters)

    def load(self, folder: Path) -> None:
        with self._present(), torch.no_grad():
            counters = torch.zeros(3, dtype=torch.int64)
            self.backend.checkpoint.load(folder, *self._parts(owned=False), counters)
            for shard in self.shards:
                shard.publish()
            self._gather_parameters()
        self.updates, self.nonfinite_steps, self.steps = (int(n) for n in counters)
        if self.optimizer:
            if self.checkpoint_config.optimizer:
                self.backend.shards.set_steps(self.shards, self.steps)
            self.set_lr(self.optimizer_config.learning_rate * lr_multiplier(self.optimizer_config, self.updates))

    def _parts(self, owned: bool) -> tuple[dict, dict]:
        """(this rank's rectangles of every saved tensor, the shapes of all of them whole)."""
        moments = bool(self.checkpoint_config.optimizer and self.optimizer)
        return self.backend.shards.saved_parts(self.shards, self.saved_shapes, moments, owned)


def _backend() -> ModuleType:
    """All that needs Megatron; `problems` says where it is not installed."""
    from spmd_rl.engine.megatron import backend

    return backend
