"""The contract of a training engine, for every backend of the registry: a new one gets these tests from its table row.

In the environment of veomni, which no other backend shares, that one alone; elsewhere all others, which must be installed."""

from __future__ import annotations

import math
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist

from benchmarks.parity import Cell, cells, make, measure, missed, prepare, share, start, weighted, width_of
from spmd_rl.collectives import all_sum, barrier
from spmd_rl.config import OptimizerConfig
from spmd_rl.engine.registry import EngineRegistry
from spmd_rl.mesh import close_world
from tests.launch import run_body, spmd

APART = "veomni"
BACKENDS = [APART] if find_spec(APART) else [b for b in EngineRegistry.backends() if b != APART]
OPTIMIZER = OptimizerConfig(learning_rate=1e-3, clip_grad_norm=0.5, weight_decay=0.01, total_steps=4)
USUAL = "GQA + qk-norm"


def layouts(backend: str, world_size: int) -> list[Cell]:
    """A cell of each layout: the usual model where the engine can run it."""
    found = [cell for cell in cells([backend])[0] if cell.ranks == world_size]
    first = {cell.layout: cell for cell in reversed(found)}
    return [next((c for c in found if (c.layout, c.kind) == (name, USUAL)), first[name]) for name in reversed(first)]


def build(cell: Cell, folder, world, **options):
    defaults = {"optimizer": OPTIMIZER} | cell.options
    return make(cell.backend, folder / cell.kind, world.meshes[cell.layout], **defaults | options)


def train(engine, mesh, batch, size: int = 3, loss=weighted) -> float:
    with engine.train_mode():
        engine.forward_backward_batch(share(batch, mesh, size, engine.count_multiple), loss)
        norm = engine.optimizer_step()
    engine.lr_scheduler_step()
    return norm


def weights(engine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.weights()}


def alike(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def check_nonfinite(engine, mesh, batch):
    """One rank's NaN: no rank steps, parameters stay bitwise, and it is counted."""
    before = weights(engine)

    def broken(output, data):
        loss, stats = weighted(output, data)
        return loss * (math.nan if mesh.replica == 0 else 1.0), stats

    assert not math.isfinite(train(engine, mesh, batch, 4, broken))
    assert engine.nonfinite_steps == 1
    assert alike(weights(engine), before)


def check_calls_add_up(cell: Cell, folder, world, batch):
    """Two backward passes before a step: the gradient is their sum."""
    engine, mesh = build(cell, folder, world, optimizer=replace(OPTIMIZER, learning_rate=0.0)), world.meshes[cell.layout]
    once = train(engine, mesh, batch)
    with engine.train_mode():
        engine.forward_backward_batch(share(batch, mesh, 4, engine.count_multiple), weighted)
    assert train(engine, mesh, batch) == pytest.approx(2 * once, rel=1e-5)


def check_forward_then_train(engine, mesh, batch):
    """What the optimizer moves is what the next forward pass uses, also after passes without gradients."""

    def forward():
        with engine.eval_mode():
            return engine.forward_backward_batch(share(batch, mesh, 4, engine.count_multiple), None, forward_only=True)

    before = forward()
    assert train(engine, mesh, batch) > 0
    assert all(not torch.equal(a.log_probs, b.log_probs) for a, b in zip(before, forward()) if len(a.log_probs))


def check_checkpoint(cell: Cell, engine, folder, world, batch):
    """Save, go on, load into a fresh engine, go on alike: bitwise."""
    path, mesh = folder / f"ckpt-{cell.layout}", world.meshes[cell.layout]
    engine.save(path)
    barrier(dist.group.WORLD, "saved")
    norm, after = train(engine, mesh, batch), weights(engine)
    fresh = build(cell, folder, world)
    fresh.load(path)
    assert fresh.nonfinite_steps == engine.nonfinite_steps
    assert train(fresh, mesh, batch) == norm
    assert alike(weights(fresh), after)
    assert fresh.updates == engine.updates


def check_value_model(cell: Cell, folder, world, batch, **options):
    """Values start at 0, are those of the state before each token, and siblings share their first one."""
    engine, mesh = build(cell, folder, world, model_type="value_model", **options), world.meshes[cell.layout]
    for _ in range(2):
        assert train(engine, mesh, batch) > 0
    with engine.eval_mode():
        micro = share(batch, mesh, 20, engine.count_multiple)
        outputs = engine.forward_backward_batch(micro, None, forward_only=True)
    for rows, output in zip(micro, outputs):
        if len(rows):
            assert (output.values[rows.response_mask] != 0).all()
            assert (output.values[~rows.response_mask] == 0).all()
            first = output.values[torch.arange(len(rows)), rows.prompt_lengths]
            for uid in rows.uid.unique():
                same = first[rows.uid == uid]
                torch.testing.assert_close(same, same[:1].expand_as(same), atol=1e-6, rtol=1e-5)
    total = torch.stack([output.values.double().sum() for output in outputs]).sum()
    return float(all_sum(total, mesh.data_group, "values"))


def check_bf16(cell: Cell, folder, world, batch, norm: float):
    """bfloat16 compute, float32 master weights, gradients and reduction; a small update is not lost in rounding."""
    engine = build(cell, folder, world, dtype="bfloat16", optimizer=replace(OPTIMIZER, learning_rate=1e-6))
    before = weights(engine)
    assert all(tensor.dtype == torch.float32 for tensor in before.values())
    assert train(engine, world.meshes[cell.layout], batch) == pytest.approx(norm, rel=0.05)
    after = weights(engine)
    unmoved = [name for name in before if torch.equal(before[name], after[name])]
    assert all(".experts." in name for name in unmoved), unmoved  # an expert may see no token
    cast = {name: tensor.bfloat16() for name, tensor in engine.weights(torch.bfloat16)}  # before or after it is gathered
    assert alike(cast, {name: tensor.bfloat16() for name, tensor in after.items()})


def contract(backend: str, world_size: int):
    def body(folder):
        own = layouts(backend, world_size)
        world = start({cell.layout: width_of(cell) for cell in own}, world_size)
        prepared = {kind: prepare(kind, folder, world) for kind in {cell.kind: None for cell in own}}
        values = {}
        for i, cell in enumerate(own):
            mesh, (_, batch, expected) = world.meshes[cell.layout], prepared[cell.kind]
            engine = build(cell, folder, world)
            engine.save(folder / f"new-{cell.layout}")  # before any update: what critic warm-up does
            check_forward_then_train(engine, mesh, batch)
            check_nonfinite(engine, mesh, batch)
            check_checkpoint(cell, engine, folder, world, batch)
            if i % 2:
                check_calls_add_up(cell, folder, world, batch)
            else:
                check_bf16(cell, folder, world, batch, expected.norms[0])
            if EngineRegistry.offers("value_model", backend, mesh.device.type):
                values[cell.layout, cell.kind] = check_value_model(cell, folder, world, batch)
        usual = [value for (_, kind), value in values.items() if kind == USUAL]
        assert usual == pytest.approx(usual[:1] * len(usual), rel=1e-3)
        close_world(world)

    return body


def parity(backend: str, world_size: int):
    def body(folder):
        todo = [cell for cell in cells([backend], quick=True)[0] if cell.ranks == world_size]
        world = start({cell.layout: width_of(cell) for cell in todo}, world_size)
        references = {}
        for cell in todo:
            if cell.kind not in references:
                references[cell.kind] = prepare(cell.kind, folder, world)
            errors = measure(cell, references[cell.kind][0], world.meshes[cell.layout], *references[cell.kind][1:])
            print(cell, errors)
            assert not missed({"cell": {"kind": cell.kind}, "errors": errors}), (cell, errors)
        close_world(world)

    return body


def reshard(backend: str, world_size: int):
    """Loads what the launch before saved, in every layout of this size; the last one saves for the next launch."""

    def body(folder):
        own = [cell for cell in layouts(backend, world_size) if cell.kind == USUAL] or [Cell(backend, "one", 1, {}, USUAL)]
        world = start({cell.layout: width_of(cell) for cell in own}, world_size)
        stored = folder / "after.pt"
        _, batch, _ = prepare(USUAL, folder, world)
        again = torch.load(stored) if stored.exists() else None
        for cell in own:
            engine, mesh = build(cell, folder, world), world.meshes[cell.layout]
            if again is None:
                train(engine, mesh, batch)
            else:
                engine.load(folder / again["path"])
                assert engine.updates == 1
                assert alike(weights(engine), again["saved"]), cell.layout
            saved = weights(engine)
            if cell is own[-1]:
                engine.save(folder / f"ckpt{world_size}")
            norm, after = train(engine, mesh, batch), weights(engine)
            if again is not None:
                assert norm == pytest.approx(again["norm"], rel=1e-4)
                for name, tensor in again["after"].items():  # a lost moment would show at this learning rate
                    torch.testing.assert_close(after[name], tensor, atol=1e-5, rtol=1e-4, msg=f"{cell.layout} {name}")
        barrier(world.control, "saved")
        if world.rank == 0:
            torch.save({"saved": saved, "norm": norm, "after": after, "path": f"ckpt{world_size}"}, stored)
        close_world(world)

    return body


def named(body, name: str):
    body.__name__ = body.__qualname__ = name
    return body


SIZES_OF = {b: sorted({ranks for ranks, _ in EngineRegistry.module(b).LAYOUTS.values()} - {1}) for b in BACKENDS}
BODIES = {
    f"test_{family.__name__}_of_{backend}_on_{ranks}_ranks": spmd(ranks, timeout=540)(
        named(family(backend, ranks), f"test_{family.__name__}_of_{backend}_on_{ranks}_ranks")
    )
    for family in (contract, parity)
    for backend in BACKENDS
    for ranks in SIZES_OF[backend]
}
SLOW = [name for name in BODIES if name.startswith("test_contract") and "_on_2_" not in name]  # parity and resharding go there
globals().update(BODIES | {name: pytest.mark.slow(BODIES[name]) for name in SLOW})
RESHARDS = {(backend, n): named(reshard(backend, n), f"reshard_{backend}_{n}") for backend in BACKENDS for n in (1, 2, 4)}


class Body:
    """What `tests.launch` runs in each rank."""

    def __init__(self, body):
        self.body = body


globals().update({body.__name__: Body(body) for body in RESHARDS.values()})


@pytest.mark.spmd
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_checkpoint_reshards(backend, tmp_path):
    """Saved on 2 ranks, loaded in every layout of 4, saved there, loaded on 1: the next step is the same each time."""
    for world_size in (2, *(n for n in (4,) if n in SIZES_OF[backend]), 1):
        run_body(RESHARDS[backend, world_size], world_size, tmp_path)
