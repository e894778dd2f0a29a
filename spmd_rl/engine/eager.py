"""The one loop for engines whose model is an nn.Module: packing, forward, loss, backward, clipping, AdamW, DCP."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from spmd_rl.batch import Batch, TokenOutput, text_batch
from spmd_rl.config import AGREEMENT
from spmd_rl.engine.attention import NAME
from spmd_rl.engine.base import BaseEngine, held_bytes, lr_multiplier
from spmd_rl.engine.exchange import sum_placed
from spmd_rl.engine.hf_names import to_checkpoint
from spmd_rl.engine.logprob import VocabShard, token_log_probs
from spmd_rl.engine.packing import Packed, dummy_batch, pack, part_of
from spmd_rl.metrics import Stats, add_stats

GATHER_BYTES = 32 << 20  # of whole tensors that are gathered together


class TokenModel(nn.Module):
    """A transformers decoder and its head under one root, so that sharding hooks see both.

    Without a value head: log-probs (and entropy) of response tokens; with one: the scalar value of the state before each."""

    def __init__(self, lm: nn.Module, chunk: int, value_head: nn.Linear | None = None):
        super().__init__()
        self.lm, self.chunk, self.value_head = lm, chunk, value_head
        self.vocab: VocabShard | None = None  # this rank's part of the head, where it is split

    def forward(self, packed: Packed, with_entropy: bool = False, own_logits: bool = False) -> tuple[Tensor, Tensor | None]:
        """[N] float32 for the packed response tokens, and their entropy [N].

        `own_logits`: what the model says of one unpacked row by its own attention and head, for the self-check."""
        if own_logits:
            return self._own(packed), None
        hidden = self.lm.base_model(
            input_ids=packed.input_ids, position_ids=packed.position_ids, use_cache=False, packed=packed
        ).last_hidden_state[0]
        hidden = hidden.index_select(0, packed.source)
        if self.value_head is not None:
            return self.value_head(hidden).float().flatten().clone(), None  # sharding hooks want no view
        head = self.lm.get_output_embeddings().weight
        head = head.to_local() if isinstance(head, DTensor) else head
        return token_log_probs(hidden, head, packed.targets, packed.temperature, self.chunk, with_entropy, self.vocab)

    def _own(self, packed: Packed) -> Tensor:
        self.lm.set_attn_implementation("sdpa")
        if self.value_head is not None:
            hidden = self.lm.base_model(input_ids=packed.input_ids, use_cache=False).last_hidden_state[0]
            out = self.value_head(hidden[packed.source]).float()[:, 0]
        else:
            logits = self.lm(input_ids=packed.input_ids, use_cache=False).logits[0, packed.source].float()
            out = logits.log_softmax(-1).gather(1, packed.targets[:, None])[:, 0]
        self.lm.set_attn_implementation(NAME)
        return out


def global_norm(parameters: list[nn.Parameter]) -> float:
    """Collective: the L2 norm of all gradients over all ranks, also of parameters on unlike meshes or plain tensors."""
    alike: dict[tuple, list[Tensor]] = {}  # by what they are split over
    for grad in (p.grad for p in parameters if p.grad is not None):
        if isinstance(grad, DTensor):
            axes = (i for i, placement in enumerate(grad.placements) if not placement.is_replicate())
            alike.setdefault((grad.device_mesh, *axes), []).append(grad.to_local())
        else:
            alike.setdefault((), []).append(grad)
    total = 0.0
    for split, grads in alike.items():
        square = torch.nn.utils.get_total_norm(grads).float().square()
        for axis in split[1:]:
            dist.all_reduce(square, group=split[0].get_group(axis))
        total += float(square)
    return math.sqrt(total)


def full_tensors(named: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Collective over the ranks that hold shards: parameters whole, in order, about GATHER_BYTES of them at a time.

    A plain tensor is no copy; a DTensor comes as `dtype`, where given, and is cast before it travels."""
    for bucket in _buckets(named):
        names, parameters = zip(*bucket)
        yield from zip(names, _gather(parameters, dtype))


def _buckets(named: Iterable[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """Neighbours of one layout and dtype."""
    bucket, size, held = [], 0, None
    for name, p in named:
        layout = (p.device_mesh, p.placements, p.dtype) if isinstance(p, DTensor) else None
        if bucket and (layout != held or size + p.nbytes > GATHER_BYTES):
            yield bucket
            bucket, size = [], 0
        bucket.append((name, p))
        size, held = size + p.nbytes, layout
    if bucket:
        yield bucket


def _gather(parameters: Sequence[Tensor], dtype: torch.dtype | None) -> list[Tensor]:
    """One axis of the mesh after the other: what was cut last is joined first."""
    first = parameters[0]
    if not isinstance(first, DTensor):
        return [p.detach() for p in parameters]
    mesh, cuts, parts = first.device_mesh, first.placements, [p.to_local().detach().to(dtype or p.dtype) for p in parameters]
    axes = [i for i, cut in enumerate(cuts) if not cut.is_replicate() and mesh.size(i) > 1]
    axes.sort(key=lambda i: (type(cuts[i]) is Shard, -i))  # FSDP's strided cut is within a part of tensor parallelism
    gather = gather_in_place if mesh.device_type == "cpu" else gather_flat
    while axes:
        axis, dim = axes[0], cuts[axes[0]].dim
        axes = axes[1:]
        outer = [i for i in reversed(axes) if cuts[i].dim == dim]
        rows = [part.movedim(dim, 0) for part in parts]
        shapes = [torch.Size((_held_rows(p, outer, dim), *r.shape[1:])) for p, r in zip(parameters, rows)]
        whole = gather(rows, shapes, mesh.get_group(axis), torch.device(mesh.device_type))
        parts = [w.movedim(0, dim).contiguous() for w in whole]
    return [part.to(mesh.device_type) for part in parts]  # offload keeps those that nothing cuts on the host


def _held_rows(parameter: DTensor, axes: Sequence[int], dim: int) -> int:
    """Rows in `dim` of this rank's part, were the parameter cut along these axes alone, the first one first."""
    rows, mesh = parameter.shape[dim], parameter.device_mesh
    for axis in axes:
        most = -(-rows // mesh.size(axis))
        rows = min(most, max(0, rows - most * mesh.get_local_rank(axis)))
    return rows


def gather_in_place(shards: Sequence[Tensor], shapes: Sequence[torch.Size], group: dist.ProcessGroup, device) -> list[Tensor]:
    """Collective: each rank broadcasts its rows (those of `chunk`) into the whole tensors.

    For gloo, whose own all-gather copies everything twice more; many small messages would not suit a device."""
    found, work = [], []
    for shard, shape in zip(shards, shapes):
        found.append(torch.empty(shape, dtype=shard.dtype, device=device))
        for i, rows in enumerate(found[-1].chunk(group.size())):
            if i == group.rank():
                rows.copy_(shard)
            work.append(dist.broadcast(rows, group=group, group_src=i, async_op=True))
    for handle in work:
        handle.wait()
    return found


def gather_flat(shards: Sequence[Tensor], shapes: Sequence[torch.Size], group: dist.ProcessGroup, device) -> list[Tensor]:
    """Collective: the same by one all-gather of everything, rows padded to as many on each rank."""
    size = group.size()
    rows = [-(-shape[0] // size) for shape in shapes]
    counts = [n * shape[1:].numel() for n, shape in zip(rows, shapes)]
    flat = torch.empty(size, sum(counts), dtype=shards[0].dtype, device=device)
    mine = flat[group.rank()]
    for place, shard in zip(mine.split(counts), shards):
        place[: shard.numel()].copy_(shard.flatten())
    dist.all_gather_single(flat.view(-1), mine, group=group)
    parts = flat.split(counts, 1)
    return [part.reshape(size * n, *shape[1:])[: shape[0]] for part, n, shape in zip(parts, rows, shapes)]


class EagerEngine(BaseEngine):
    """A subclass builds `self.module` (a TokenModel, parallelised, weights loaded) and ends with `finish_build`."""

    module: TokenModel
    optimizer: torch.optim.Optimizer | None = None
    sequence_group: dist.ProcessGroup | None = None  # ranks that hold a part of each packed row

    def finish_build(self) -> None:
        """Collective: makes the optimizer, before any forward pass, and checks packing against the model's own logits."""
        torch.set_float32_matmul_precision(self.config.matmul_precision)
        if self.model_config.trainable:
            c = self.optimizer_config
            alike: dict = {}  # one fused step takes tensors of one mesh
            for p in self._trained():
                alike.setdefault(p.device_mesh if isinstance(p, DTensor) else None, []).append(p)
            groups = [{"params": parameters} for parameters in alike.values()]
            self.optimizer = torch.optim.AdamW(groups, betas=tuple(c.betas), eps=c.eps, weight_decay=c.weight_decay, fused=True)
            self.set_lr(c.learning_rate * lr_multiplier(c, 0))
        self._check_packing()

    def _trained(self) -> list[nn.Parameter]:
        return [p for p in self.module.parameters() if p.requires_grad]

    def sharded(self) -> list[FSDPModule]:
        return [m for m in self.module.modules() if isinstance(m, FSDPModule)]

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Around a micro-batch of a backward pass: copies of the parameters add theirs up and reduce over one another once."""
        for part in self.sharded():
            part.set_requires_all_reduce(last, recurse=False)
        yield

    def release(self) -> None:
        """Gathered weights left by a forward pass would be what `parameters()` yields, and go stale."""
        for part in self.sharded():
            part.reshard()

    @contextmanager
    def _mode(self, train: bool) -> Iterator[None]:
        self.module.train(train)
        with torch.set_grad_enabled(train):
            yield
        self.release()

    def forward_backward_batch(self, micro_batches, loss_function, forward_only=False, with_entropy=False):
        outputs: list[TokenOutput] = []
        stats: Stats = {}
        for i, batch in enumerate(micro_batches):
            data = batch if len(batch) else dummy_batch()
            with nullcontext() if forward_only else self.micro_batch(last=i == len(micro_batches) - 1):
                packed = pack(data, self.shared_prompt, self.length_multiple, self.mesh.device)
                tokens, entropy = self._tokens(packed, with_entropy)
                output = self._output(packed, tokens, entropy) if len(batch) else self._no_output(tokens, batch, with_entropy)
                if forward_only:
                    outputs.append(TokenOutput(**{k: v if v is None else v.cpu() for k, v in vars(output).items()}))
                    continue
                loss, more = loss_function(output, batch.to(self.mesh.device))
                (loss + tokens.sum() * 0).backward()
                stats = add_stats(stats, more)
        return outputs if forward_only else stats

    def _tokens(self, packed: Packed, with_entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        """[N] of the packed response tokens, and their entropy; alike on all lanes."""
        if self.sequence_group is None:
            return self.module(packed, with_entropy)
        part, mine = part_of(packed, self.sequence_group)
        tokens, entropy = self.module(part, with_entropy)
        whole = partial(sum_placed, places=mine, size=len(packed.targets), group=self.sequence_group)
        return whole(tokens), None if entropy is None else whole(entropy)

    def _output(self, packed: Packed, tokens: Tensor, entropy: Tensor | None) -> TokenOutput:
        if self.model_config.model_type == "value_model":
            return TokenOutput(values=packed.unpack(tokens))
        return TokenOutput(log_probs=packed.unpack(tokens), entropy=None if entropy is None else packed.unpack(entropy))

    def _no_output(self, tokens: Tensor, batch: Batch, with_entropy: bool) -> TokenOutput:
        """[0, T]: what a dummy shows its loss."""
        none = tokens.new_zeros(batch.input_ids.shape)
        if self.model_config.model_type == "value_model":
            return TokenOutput(values=none)
        return TokenOutput(log_probs=none, entropy=none if with_entropy else None)

    def reduce_gradients(self) -> None:
        """Collective, before gradients are read: what a subclass has not summed over the ranks yet."""

    def gradient_norm(self, parameters: list[nn.Parameter]) -> float:
        """Collective: over all ranks. A subclass adds what other ranks hold other parameters of."""
        return global_norm(parameters)

    def optimizer_step(self) -> float:
        self.reduce_gradients()
        parameters = self._trained()
        norm, limit = self.gradient_norm(parameters), self.optimizer_config.clip_grad_norm
        if not math.isfinite(norm):
            self.nonfinite_steps += 1
        else:
            if limit and norm > limit:
                for grad in (p.grad for p in parameters if p.grad is not None):
                    (grad.to_local() if isinstance(grad, DTensor) else grad).mul_(limit / norm)
            self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def set_lr(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        return self._stream(((name, p) for name, p in self.module.lm.named_parameters()), dtype)

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        self.reduce_gradients()
        return self._stream((name, p.grad) for name, p in self.module.lm.named_parameters() if p.requires_grad)

    @torch.no_grad()
    def _stream(self, named: Iterable[tuple[str, Any]], dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in full_tensors(named, dtype):
            yield from to_checkpoint(name, tensor)

    def to(self, device: torch.device, model: bool = True, optimizer: bool = True) -> None:
        if model:
            self.module.to(device)
        for state in self.optimizer.state.values() if optimizer and self.optimizer else ():
            for name, value in state.items():
                if isinstance(value, Tensor) and value.ndim:
                    state[name] = value.to(device)

    def memory(self) -> dict[str, int]:
        parameters = list(self.module.parameters())
        states = self.optimizer.state.values() if self.optimizer else ()
        tensors = {
            "parameters": parameters,
            "gradients": [p.grad for p in parameters if p.grad is not None],
            "optimizer": [value for state in states for value in state.values() if isinstance(value, Tensor)],
        }
        return {part: held_bytes(held, self.mesh.device) for part, held in tensors.items()}

    def save(self, folder: Path) -> None:
        dcp.save(self._state(), checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        state = self._state()
        dcp.load(state, checkpoint_id=folder)
        set_model_state_dict(self.module, state["model"], options=StateDictOptions(strict=False))  # all of `state` was there
        self.updates, self.nonfinite_steps = (int(n) for n in state["counters"])
        if self.optimizer:
            self.set_lr(self.optimizer_config.learning_rate * lr_multiplier(self.optimizer_config, self.updates))

    def _state(self) -> dict:
        state = {"model": get_model_state_dict(self.module), "counters": torch.tensor([self.updates, self.nonfinite_steps])}
        if self.checkpoint_config.optimizer and self.optimizer:
            self._fill_optimizer()
            named = ((name, p) for name, p in self.module.named_parameters() if p.requires_grad)
            state["optimizer"] = {name: self.optimizer.state[p] for name, p in named}  # loaded in place
        return state

    def _fill_optimizer(self) -> None:
        """Makes the state of parameters that had no update yet: by one of gradients 0 at rate 0, which does not count."""
        fresh = [p for p in self._trained() if p not in self.optimizer.state]
        rates = [group["lr"] for group in self.optimizer.param_groups]
        self.set_lr(0.0)
        for p in fresh:
            p.grad = torch.zeros_like(p)
        self.optimizer.step()
        self.optimizer.zero_grad()
        for p in fresh:
            self.optimizer.state[p]["step"].zero_()
        for group, rate in zip(self.optimizer.param_groups, rates):
            group["lr"] = rate

    def _check_packing(self) -> None:
        """Raises ValueError when packed log-probs are not the model's own; gives up sharing prompts when only that fails."""
        rows = _check_rows(self.module.lm.config.vocab_size)
        tolerance = AGREEMENT[self.config.dtype]
        with self.eval_mode():
            own = [self.module(pack(rows[i : i + 1], False, 1, self.mesh.device), own_logits=True)[0] for i in range(len(rows))]

            def difference(shared: bool) -> float:
                packed = pack(rows, shared, self.length_multiple, self.mesh.device)
                largest = (self._tokens(packed)[0] - torch.cat(own)).abs().mean()
                dist.all_reduce(largest, dist.ReduceOp.MAX)  # all ranks go on alike
                return float(largest)

            plain = difference(shared=False)
            if not plain <= tolerance:
                raise ValueError(
                    f"model.path: packed log-probs of this {self.module.lm.config.model_type} model are {plain:.2g} nats off "
                    f"its own logits (limit {tolerance}): its attention or head is not one that can be packed - use another model"
                )
            if self.shared_prompt and not difference(shared=True) <= tolerance:
                self.shared_prompt = False
                sys.stderr.write("[spmd_rl] engine.shared_prompt: this model cannot share prompts; every row carries its own\n")


def _check_rows(vocabulary: int):
    """Two siblings of a 5-token prompt with responses of 4 and 3 tokens."""
    ids = torch.randint(vocabulary, (2, 9), generator=torch.Generator().manual_seed(0))
    ids[1, :5] = ids[0, :5]
    two = torch.tensor([0, 1])
    return text_batch(ids, torch.full((2,), 5), 9 - two, 0 * two, two)
