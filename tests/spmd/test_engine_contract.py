"""The contract of a training engine against a single-process transformers reference, on 2 and 4 ranks.

Parametrised over the registry's backends: a new engine gets these checks from its table row."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from spmd_rl.batch import TokenOutput
from spmd_rl.collectives import barrier, gather_objects
from spmd_rl.config import CheckpointConfig, OptimizerConfig, TimeoutConfig
from spmd_rl.engine.base import EngineModel
from spmd_rl.engine.eager import global_norm
from spmd_rl.engine.registry import EngineRegistry
from spmd_rl.launch import detect_launch
from spmd_rl.mesh import Role, close_world, open_store, split_world
from spmd_rl.metrics import Sum
from tests.helpers import make_rows, tiny_config
from tests.launch import spmd

BACKENDS = EngineRegistry.backends()
OPTIMIZER = OptimizerConfig(learning_rate=1e-3, clip_grad_norm=0.5, weight_decay=0.01, total_steps=4)
GROUPS = [(5, [4, 1, 7]), (9, [3, 3]), (2, [6]), (3, [2, 5, 4])]


def start(num_ranks: int):
    launch, timeouts = detect_launch(), TimeoutConfig(collective=120, phase=120)
    ranks = tuple(range(num_ranks))
    world = split_world({"actor": Role(ranks, num_ranks)}, launch, open_store(launch, timeouts), "cpu", timeouts)
    return world, world.meshes["actor"]


def save_models(world, folder: Path, kinds: dict[str, tuple[str, bool]]) -> None:
    if world.rank == 0:
        for name, (kind, tied) in kinds.items():
            torch.manual_seed(7)
            AutoModelForCausalLM.from_config(tiny_config(kind, tied)).save_pretrained(folder / name)
    barrier(world.control, "models")


def make(backend, folder, mesh, model_type="language_model", trainable=True, optimizer=OPTIMIZER, **options):
    config = EngineRegistry.module(backend).Config(**({"dtype": "float32"} | options))
    engine = EngineRegistry.get(model_type, backend, "cpu")
    return engine(EngineModel(str(folder), model_type, trainable), config, optimizer, CheckpointConfig(), mesh)


def weighted(output: TokenOutput, data):
    """A plain sum: weights are a function of the row's names, so that every layout has the same total."""
    tokens = output.log_probs if output.values is None else output.values
    scale = (data.uid[:, None] + 1.0) * (data.sample[:, None] + 0.5) * 0.01
    loss = (tokens * scale)[data.response_mask].sum() if len(data) else tokens.sum()
    return loss, {"loss": Sum(float(loss.detach()))}


def share(batch, mesh, size: int):
    """This rank's micro-batches of `size` rows; the last rank has none, and runs dummies."""
    owners = max(1, len(mesh.ranks) - 1)
    parts = {r: batch[batch.uid % owners == r] for r in range(owners)}
    count = max(-(-len(p) // size) for p in parts.values())
    mine = parts.get(mesh.replica, batch[:0])
    return [mine[i * size : (i + 1) * size] for i in range(count)]


def reference(folder, batch, steps: int, optimizer=OPTIMIZER):
    """(log-probs [B, T], gradients of the first step, parameters after the steps, norms) of plain transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    adam = torch.optim.AdamW(
        model.parameters(),
        lr=optimizer.learning_rate,
        betas=optimizer.betas,
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
    )
    norms, first, gradients = [], None, None
    for _ in range(steps):
        out = torch.zeros(batch.input_ids.shape)
        for b, (ids, n) in enumerate(zip(batch.input_ids, batch.lengths.tolist())):
            logits = model(input_ids=ids[None, :n], use_cache=False).logits[0].float()
            out[b, 1:n] = logits.log_softmax(-1)[:-1].gather(1, ids[1:n, None])[:, 0]
        weighted(TokenOutput(log_probs=out), batch)[0].backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf)))
        if first is None:
            first = (out * batch.response_mask).detach()
            gradients = {k: p.grad.clone() for k, p in model.named_parameters()}
        torch.nn.utils.clip_grad_norm_(model.parameters(), optimizer.clip_grad_norm)
        adam.step()
        adam.zero_grad()
    return first, gradients, {k: p.detach() for k, p in model.named_parameters()}, norms


def full(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def close(got: dict, want: dict, limit: float, relative: bool):
    for name, expected in want.items():
        error = (got[name] - expected).norm() / expected.norm().clamp(min=1e-8) if relative else (got[name] - expected).abs().max()
        assert error <= limit, (name, float(error))


def check_training(backend, folder, mesh, batch, **options):
    """Log-probs, gradients, norms and parameters after 3 clipped AdamW steps are those of the reference."""
    optimizer = replace(OPTIMIZER, learning_rate=1e-5)
    log_probs, gradients, parameters, norms = reference(folder, batch, 3, optimizer)
    engine = make(backend, folder, mesh, optimizer=optimizer, **options)
    for size in (2, 5):
        micro = share(batch, mesh, size)
        with engine.eval_mode():
            outputs = engine.forward_backward_batch(micro, None, forward_only=True)
        for rows, output in zip(micro, outputs):
            if not len(rows):
                assert output.log_probs.shape == (0, batch.input_ids.shape[1])
                continue
            index = [int(((batch.uid == u) & (batch.sample == s)).nonzero()) for u, s in zip(rows.uid, rows.sample)]
            assert (output.log_probs - log_probs[index]).abs().max() < 1e-5
    for step, size in enumerate((2, 5, 3)):
        with engine.train_mode():
            stats = engine.forward_backward_batch(share(batch, mesh, size), weighted)
            if step == 0:
                grads = {n.removeprefix("lm."): full(p.grad) for n, p in engine.module.named_parameters()}
                close(grads, gradients, 1e-4, relative=True)
            norm = engine.optimizer_step()
        assert norm == pytest.approx(norms[step], rel=1e-4)
        assert stats.keys() == {"loss"}
        engine.lr_scheduler_step()
    close({n.removeprefix("lm."): full(p) for n, p in engine.module.named_parameters()}, parameters, 1e-6, relative=False)
    return engine


def check_weights(engine, folder):
    """The stream has the checkpoint's names, order alike on every rank, and untouched weights come out bitwise."""
    from safetensors.torch import load_file

    stored = load_file(Path(folder) / "model.safetensors")
    streamed = dict(engine.weights())
    assert streamed.keys() == stored.keys()
    assert all(torch.equal(streamed[n], stored[n]) for n in stored)


def check_nonfinite(engine, mesh, batch):
    """One rank's NaN: no rank steps, parameters stay bitwise, and it is counted."""
    before = {n: full(p).clone() for n, p in engine.module.named_parameters()}

    def broken(output, data):
        loss, stats = weighted(output, data)
        return loss * (math.nan if mesh.replica == 0 else 1.0), stats

    with engine.train_mode():
        engine.forward_backward_batch(share(batch, mesh, 4), broken)
        assert not math.isfinite(engine.optimizer_step())
    assert engine.nonfinite_steps == 1
    assert all(torch.equal(full(p), before[n]) for n, p in engine.module.named_parameters())


def check_checkpoint(backend, engine, folder, mesh, batch, path, **options):
    """Save, go on, load into a fresh engine, go on alike: bitwise."""
    engine.save(path)
    barrier(dist.group.WORLD, "saved")

    def go_on(one):
        with one.train_mode():
            one.forward_backward_batch(share(batch, mesh, 3), weighted)
            norm = one.optimizer_step()
        one.lr_scheduler_step()
        return norm, {n: full(p).clone() for n, p in one.module.named_parameters()}

    norm, after = go_on(engine)
    fresh = make(backend, folder, mesh, optimizer=engine.optimizer_config, **options)
    fresh.load(path)
    again_norm, again = go_on(fresh)
    assert again_norm == norm
    assert all(torch.equal(again[n], after[n]) for n in after)
    assert fresh.updates == engine.updates


def check_no_stale_weights(engine, mesh, batch):
    """After a forward pass `parameters()` are the sharded ones, and what the optimizer moves is what the forward uses."""
    with engine.eval_mode():
        before = engine.forward_backward_batch(share(batch, mesh, 4), None, forward_only=True)
    assert all(isinstance(p, DTensor) for p in engine.module.parameters()) or engine.plain
    held = {id(p) for group in engine.optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in engine.module.parameters()}
    with engine.train_mode():
        engine.forward_backward_batch(share(batch, mesh, 4), weighted)
        engine.optimizer_step()
    with engine.eval_mode():
        after = engine.forward_backward_batch(share(batch, mesh, 4), None, forward_only=True)
    moved = [not torch.equal(a.log_probs, b.log_probs) for a, b in zip(before, after) if len(a.log_probs)]
    assert all(moved)


def check_value_model(backend, folder, mesh, batch, **options):
    """Values start at 0, are those of the state before each token, and siblings share their first one."""
    engine = make(backend, folder, mesh, model_type="value_model", **options)
    with engine.train_mode():
        engine.forward_backward_batch(share(batch, mesh, 3), weighted)
        assert engine.optimizer_step() > 0
    with engine.eval_mode():
        micro = share(batch, mesh, 20)
        outputs = engine.forward_backward_batch(micro, None, forward_only=True)
    for rows, output in zip(micro, outputs):
        if len(rows):
            assert (output.values[rows.response_mask] != 0).all()
            assert (output.values[~rows.response_mask] == 0).all()
            first = output.values[torch.arange(len(rows)), rows.prompt_lengths]
            for uid in rows.uid.unique():
                same = first[rows.uid == uid]
                torch.testing.assert_close(same, same[:1].expand_as(same), atol=1e-6, rtol=1e-5)


def check_bf16(backend, folder, mesh, batch, **options):
    """bfloat16 compute, float32 master weights, gradients and reduction; a small update is not lost in rounding."""
    engine = make(backend, folder, mesh, dtype="bfloat16", optimizer=replace(OPTIMIZER, learning_rate=1e-6), **options)
    exact, gradients, _, norms = reference(folder, batch, 1)
    before = {n: full(p).clone() for n, p in engine.module.named_parameters()}
    with engine.train_mode():
        engine.forward_backward_batch(share(batch, mesh, 4), weighted)
        assert all(p.dtype == p.grad.dtype == torch.float32 for p in engine.module.parameters())
        assert engine.optimizer_step() == pytest.approx(norms[0], rel=0.05)
    assert all(not torch.equal(full(p), before[n]) for n, p in engine.module.named_parameters())


@spmd(world_size=2)
def test_engine_on_two_ranks(folder):
    world, mesh = start(2)
    kinds = {"llama": ("llama", True), "qwen2": ("qwen2", False), "qwen3": ("qwen3", True), "moe": ("qwen3_moe", False)}
    save_models(world, folder, kinds)
    batch = make_rows(GROUPS)
    for backend in BACKENDS:
        for name in kinds:
            for shard_size in (1, 2):
                engine = check_training(backend, folder / name, mesh, batch, shard_size=shard_size)
            check_weights(make(backend, folder / name, mesh, trainable=False, shard_size=2), folder / name)
        for shard_size in (1, 2):
            engine = make(backend, folder / "qwen3", mesh, shard_size=shard_size)
            check_no_stale_weights(engine, mesh, batch)
            check_nonfinite(engine, mesh, batch)
            check_checkpoint(backend, engine, folder / "qwen3", mesh, batch, folder / f"ckpt{shard_size}", shard_size=shard_size)
            check_value_model(backend, folder / "llama", mesh, batch, shard_size=shard_size)
            check_bf16(backend, folder / "llama", mesh, batch, shard_size=shard_size)
        check_training(backend, folder / "qwen3", mesh, batch, activation_checkpointing=True)
        check_training(backend, folder / "qwen3", mesh, batch, shared_prompt=False, logprob_chunk=2)
        check_training(backend, folder / "qwen3", mesh, batch, offload=True, shard_size=2)
    close_world(world)


@spmd(world_size=4)
def test_engine_on_four_ranks(folder):
    """HSDP, and a checkpoint of one sharding loaded into another."""
    world, mesh = start(4)
    save_models(world, folder, {"qwen3": ("qwen3", True)})
    batch = make_rows(GROUPS)
    for backend in BACKENDS:
        engine = check_training(backend, folder / "qwen3", mesh, batch, shard_size=2)
        engine.save(folder / "two")
        barrier(world.control, "saved")
        for shard_size in (1, 4):
            other = make(backend, folder / "qwen3", mesh, shard_size=shard_size)
            other.load(folder / "two")
            assert other.updates == engine.updates
            for (name, p), q in zip(engine.module.named_parameters(), other.module.parameters()):
                assert torch.equal(full(p), full(q)), name
                for key, state in engine.optimizer.state[p].items():
                    assert torch.equal(full(state), full(other.optimizer.state[q][key])), (name, key)
        assert len({str(n) for n in gather_objects(engine.updates, world.control, "u")}) == 1
    close_world(world)


@spmd(world_size=2)
def test_global_norm_over_unlike_meshes(folder):
    """Plain tensors beside sharded ones, where torch's own clipping raises."""
    world, mesh = start(2)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    device_mesh = init_device_mesh("cpu", (2,))
    sharded = torch.nn.Parameter(distribute_tensor(torch.zeros(4), device_mesh, [Shard(0)]))
    sharded.grad = distribute_tensor(torch.tensor([1.0, 2.0, 3.0, 4.0]), device_mesh, [Shard(0)])
    plain = torch.nn.Parameter(torch.zeros(2))
    plain.grad = torch.tensor([5.0, 6.0])
    assert global_norm([sharded, plain]) == pytest.approx(math.sqrt(91))
    close_world(world)
