"""Cells, moves between them, and the ledger, on 4 ranks of one job."""

from __future__ import annotations

import os
import re
import time

import pytest
import torch
import torch.distributed as dist

from spmd_rl import collectives, placed
from spmd_rl.batch import fields_of
from spmd_rl.config import ConfigError, TimeoutConfig
from spmd_rl.launch import detect_launch
from spmd_rl.mesh import Role, close_world, open_store, split_world
from spmd_rl.metrics import Max, Mean, Sum
from spmd_rl.placed import Placed, WeightStream, shard_prompts, traffic
from tests.helpers import make_rows
from tests.launch import spmd

GROUPS = [(5, [4, 1, 7]), (9, [3, 3]), (2, [6]), (1, [2, 5]), (4, [9, 9, 9])]


def world_of(roles, timeout=60.0):
    launch, timeouts = detect_launch(), TimeoutConfig(collective=timeout, phase=timeout)
    return split_world(roles, launch, open_store(launch, timeouts), "cpu", timeouts)


def whole():
    batch = make_rows(GROUPS)
    batch.rewards = torch.arange(len(batch)).float()
    batch.rollout_log_probs = torch.randn(batch.input_ids.shape, generator=torch.Generator().manual_seed(3))
    return batch


def dealt(batch, mesh):
    """Whole groups, group i on replica i % n."""
    keep = batch.uid % mesh.num_replicas == mesh.replica if mesh.here else None
    return Placed(mesh, batch[keep] if mesh.here else None)


def check_complete(placed, batch):
    """All rows of the mesh together are the batch, bit for bit, and groups are whole."""
    if not placed.mesh.here:
        assert placed.local is None
        return
    shards = collectives.gather_objects(fields_of(placed.local), placed.mesh.bridge(placed.mesh).control, "check")
    lanes = shards[:: placed.mesh.width]
    assert sum(len(s["uid"]) for s in lanes) == len(batch)
    seen = [set(s["uid"].tolist()) for s in lanes]
    assert sum(map(len, seen)) == len(set().union(*seen))
    for i, shard in enumerate(shards):
        assert torch.equal(shard["uid"], lanes[i // placed.mesh.width]["uid"])
        assert shard.keys() == fields_of(batch).keys()
        for j, (uid, sample) in enumerate(zip(shard["uid"].tolist(), shard["sample"].tolist())):
            row = int(((batch.uid == uid) & (batch.sample == sample)).nonzero())
            for name, value in fields_of(batch).items():
                n = int(batch.lengths[row])
                got, want = shard[name][j], value[row]
                same = (got[:n], want[:n]) if value.ndim == 2 else (got, want)
                assert torch.equal(*same), name


def check_empty(placed, batch):
    """A step may have no rows: the fields that every later role reads are there all the same."""
    if placed.mesh.here:
        assert len(placed.local) == 0
        assert {name: (t.dtype, t.ndim) for name, t in fields_of(placed.local).items()} == {
            name: (t.dtype, t.ndim) for name, t in fields_of(batch).items()
        }


@spmd(world_size=4)
def test_colocated(folder):
    world = world_of({"actor": Role((0, 1, 2, 3), 4), "rollout": Role((0, 1, 2, 3), 2)})
    actor, rollout = world.meshes["actor"], world.meshes["rollout"]
    assert (actor.width, rollout.width, rollout.replica, rollout.lane) == (1, 2, world.rank // 2, world.rank % 2)
    batch = whole()
    moved = dealt(batch, rollout).to(actor)
    check_complete(moved, batch)
    traffic.clear()
    again = moved.to(actor)
    assert traffic["batch"] == 0
    assert torch.equal(again.local.input_ids, moved.local.input_ids)
    check_complete(moved.to(rollout), batch)
    minis = list(moved.mini_batches(2, 2, "0/0"))
    assert len(minis) == 4
    uids = [set(torch.cat(collectives.gather_rows(m.local.uid[:, None], actor.data_group, "u")).flatten().tolist()) for m in minis]
    assert uids[0] | uids[1] == uids[2] | uids[3] == set(range(len(GROUPS)))
    assert not uids[0] & uids[1]
    with pytest.raises(TypeError, match="truth value"):
        bool(moved)
    with pytest.raises(TypeError):
        len(moved)
    few = batch[:3]  # one group on four ranks: three of them hold nothing
    check_complete(Placed(actor, few if world.rank == 3 else few[:0]).to(actor), few)
    check_empty(Placed(rollout, batch[:0]).to(actor), batch)
    check_empty(Placed(actor, batch[:0]).to(actor), batch)
    assert [len(m.local) for m in Placed(actor, batch[:0]).mini_batches(2, 2, "0/0")] == [0] * 4
    assert [len(shard_prompts(batch[:n], actor).local) for n in (0, 2, 5)] == [0, int(world.rank < 2), 2 - (world.rank > 0)]
    close_world(world)


@spmd(world_size=4)
def test_split(folder):
    """In the second cell as in the first: the default group is the cell, and rows and weights cross between cells."""
    world = world_of({"actor": Role((0, 1), 2), "rollout": Role((2, 3), 1)})
    actor, rollout = world.meshes["actor"], world.meshes["rollout"]
    assert dist.get_world_size() == 2
    assert dist.get_rank() == world.rank % 2
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"]) == (
        str(world.rank % 2),
        "2",
        str(world.rank % 2),
    )
    assert dist.get_process_group_ranks(None) == [0, 1]
    t = torch.tensor([float(world.rank)])
    dist.broadcast(t, src=1)
    assert t.item() == 1 + 2 * (world.rank // 2)
    mesh = torch.distributed.device_mesh.DeviceMesh.from_group(dist.group.WORLD, "cpu")
    assert mesh.get_coordinate() == (world.rank % 2,) or mesh.get_coordinate() == [world.rank % 2]
    for i in range(3 if actor.here else 1):  # cells may make unlike numbers of groups
        x = torch.ones(1) * (i + 1)
        dist.all_reduce(x, group=dist.new_group([0, 1]))
        assert x.item() == 2 * (i + 1)
    batch = whole()
    on_rollout = dealt(batch, rollout)
    on_actor = on_rollout.to(actor)
    check_complete(on_actor, batch)
    check_complete(on_actor.to(rollout), batch)
    check_empty(Placed(rollout, batch[:0] if rollout.here else None).to(actor), batch)
    sent = {f"w{i}": torch.full((3, 2), float(i)) for i in range(5)}
    sent |= {"scalar": torch.tensor(2.5), "empty": torch.ones(0, 3), "turned": torch.arange(6.0).view(2, 3).T}
    sent |= {"flags": torch.tensor([True, False, True]), "last": torch.ones(1)}
    for dtype in (None, torch.bfloat16):
        stream = WeightStream(actor, sent.items() if actor.here else None, lambda: [[-1.5, 0.1 + 0.2]], 0, dtype).to(rollout)
        got = list(stream)
        assert stream.expected() == [[-1.5, 0.1 + 0.2]]  # after the last pair, on both sides
        assert [n for n, _ in got] == [*sent] * rollout.here
        for name, tensor in got:
            assert tensor.dtype == (torch.bool if name == "flags" else dtype or torch.float32)
            assert torch.equal(tensor, sent[name].to(tensor.dtype))
    prompts = shard_prompts(batch, rollout)
    assert (prompts.local is None) != rollout.here
    close_world(world)


def weights_of(mesh, events):
    """Seven float32 tensors of 64 bytes and one of integers, on the ranks of the mesh."""
    for i in range(7 if mesh.here else 0):
        events.append(f"gather {i}")
        yield f"w{i}", torch.full((4, 4), i + 1 / 3)
    if mesh.here:
        yield "count", torch.tensor([2**40 + 1])


@spmd(world_size=4)
def test_weights_cross_in_buckets_of_two_senders_while_the_next_is_gathered(folder):
    world = world_of({"actor": Role((0, 1), 2), "rollout": Role((2, 3), 1)})
    actor, rollout = world.meshes["actor"], world.meshes["rollout"]
    events, start = [], placed.start_broadcast

    def watched(memory, source, group, name):
        events.append(f"start {name}")
        arrived = start(memory, source, group, name)
        return lambda: (events.append("arrived"), arrived())

    placed.start_broadcast = watched
    for dtype, per_bucket in ((torch.bfloat16, 2), (None, 1)):
        placed.BUCKET_BYTES = 64
        events.clear()
        traffic.clear()
        got = list(WeightStream(actor, weights_of(actor, events) if actor.here else None, dtype=dtype).to(rollout))
        sent = collectives.gather_objects(traffic["weights"], world.control, "sent")
        if dtype:  # [0 1] [2 3] [4 5] [6, count]: what travels is half as large
            assert sent == [2 * 64, 64 + 32 + 8, 0, 0]
        else:  # [0] ... [6] [count]
            assert sent == [4 * 64, 3 * 64 + 8, 0, 0]
        if rollout.here:
            assert [name for name, _ in got] == [*(f"w{i}" for i in range(7)), "count"]
            assert all(t.dtype == (dtype or torch.float32) for _, t in got[:-1])
            assert all(torch.equal(t, torch.full((4, 4), i + 1 / 3).to(t.dtype)) for i, (_, t) in enumerate(got[:-1]))
            assert torch.equal(got[-1][1], torch.tensor([2**40 + 1]))
        else:  # bucket i + 1 is gathered while bucket i is on its way, and none beyond
            starts = [at for at, event in enumerate(events) if event.startswith("start")]
            for i, at in enumerate(starts):
                arrived = at + events[at:].index("arrived")
                between, expected = events[at + 1 : arrived], range(per_bucket * (i + 1), min(7, per_bucket * (i + 2)))
                assert between == [f"gather {k}" for k in expected], (dtype, i, events)
            assert len(starts) == 4 if dtype else 8
            assert events[:per_bucket] == [f"gather {i}" for i in range(per_bucket)]

    def tampered(memory, source, group, name):
        arrived = start(memory, source, group, name)

        def changed():
            arrived()
            if world.rank == 3 and name == "weights[w4...]":
                memory[placed.ALIGNMENT] ^= 1  # of w5

        return changed

    placed.start_broadcast = tampered
    on_its_way = iter(WeightStream(actor, weights_of(actor, []) if actor.here else None, dtype=torch.bfloat16).to(rollout))
    if world.rank == 3:
        with pytest.raises(RuntimeError, match="weights: w5 is not what rank 0 sent .checksums differ."):
            list(on_its_way)
        bridge = rollout.bridge(actor)  # it joins what the others still do; the last bucket is on its way
        assert collectives.broadcast_object("", 0, bridge.control, "weights.header") == (0, [])
    else:
        assert len(list(on_its_way)) == 8 * rollout.here
    check_version(actor, rollout, start)
    close_world(world)


def check_version(actor, rollout, start):
    """A header of another version than this rank's is refused, the last one here, after which nobody waits."""
    placed.start_broadcast, broadcast = start, placed.broadcast_object

    def of_another(value, sender, group, name):
        version, header = broadcast(value, sender, group, name)
        return version - (not header and rollout.world_rank == 3), header

    placed.broadcast_object = of_another
    stream = WeightStream(actor, weights_of(actor, []) if actor.here else None, version=4).to(rollout)
    if rollout.world_rank == 3:
        with pytest.raises(RuntimeError, match="sent version 3, rank 3 is at version 4"):
            list(stream)
    else:
        list(stream)
    placed.broadcast_object = broadcast


@spmd(world_size=4)
def test_collectives(folder):
    world = world_of({"actor": Role((0, 1, 2, 3), 4)}, timeout=20.0)
    group, rank = world.control, world.rank
    assert collectives.agree(rank == 2, group, "flag")
    assert not collectives.agree(False, group, "flag")
    rows = collectives.gather_rows(torch.full((rank, 2), rank), group, "rows")
    assert [len(r) for r in rows] == [0, 1, 2, 3]
    stats = {"sum": Sum(rank), "mean": Mean(rank, 1 if rank else 0), "max": Max(float(rank))}
    if rank == 1:
        stats["rare"] = Sum(5.0)
    values = collectives.reduce_stats(stats, group, "stats")
    assert values == {"sum": 6.0, "mean": 2.0, "max": 3.0, "rare": 5.0}
    close_world(world)


@spmd(world_size=4)
def test_the_ledger_names_who_diverged(folder):
    """A rank that calls another collective is named at once, one that does not come within `debug.ledger_timeout`."""
    world = world_of({"actor": Role((0, 1), 2), "ref": Role((0, 1), 1), "rollout": Role((2, 3), 1)})
    actor, ref, rollout = (world.meshes[name] for name in ("actor", "ref", "rollout"))
    group, rank, batch = world.control, world.rank, whole()
    collectives.compare_ledgers(world, 10)
    start = time.monotonic()
    collectives.barrier(group, "together")
    check_complete(dealt(batch, rollout).to(actor), batch)
    called_another = "ranks 0-1,3 entered 'train' of ranks 0-3; rank 2 entered 'save' of ranks 0-3. Before it: .*together"
    with pytest.raises(RuntimeError, match=called_another):
        collectives.barrier(group, "save" if rank == 2 else "train")
    onto = re.escape("rank 0 entered 'move[0-1/2 -> 0-1/2].schema' of ranks 0-1; rank 1 entered 'move[0-1/2 -> 0-1/1].schema'")
    if actor.here:  # the same ranks, another layout
        with pytest.raises(RuntimeError, match=onto):
            dealt(batch, actor).to(ref if rank == 1 else actor)
    lost = len(collectives._turns)
    collectives.barrier(group, "together again")
    assert len(collectives._turns) == lost and time.monotonic() - start < 9

    start = time.monotonic()  # rank 0 moves within its cell, the others to the other one
    within, across = "'move[0-1/2 -> 0-1/2].schema' of ranks 0-1", "'move[0-1/2 -> 2-3/1].schema' of ranks 0-3"
    said = f"rank 0 did not within 10 s (debug.ledger_timeout), its last collective: {within}"
    if rank == 0:
        said = f"rank 0 entered {within}; rank 1 did not within 10 s (debug.ledger_timeout), its last collective: {across}"
    with pytest.raises(RuntimeError, match=re.escape(said)):
        dealt(batch, actor).to(actor if rank == 0 else rollout)
    assert 9 < time.monotonic() - start < 14
    dist.barrier(group=group)

    start = time.monotonic()  # rank 3 does not stop, and goes on to its next call
    stop, same = "'stop' of ranks 0-3", "'generate.same' of ranks 2-3"
    said = f"ranks 0-2 entered {stop}; rank 3 did not within 10 s (debug.ledger_timeout), its last collective: {same}"
    if rank == 3:
        said = f"rank 3 entered {same}; rank 2 did not within 10 s (debug.ledger_timeout), its last collective: {stop}"
    with pytest.raises(RuntimeError, match=re.escape(said)):
        collectives.all_max([1], *((rollout.lane_group, "generate.same") if rank == 3 else (group, "stop")))
    assert 9 < time.monotonic() - start < 14
    dist.barrier(group=group)
    collectives.compare_ledgers(None)
    close_world(world)


@spmd(world_size=2)
def test_bad_placement_is_refused_before_any_group_exists(folder):
    launch = detect_launch()
    for roles, said in [
        ({"actor": Role((0, 1), 2), "rollout": Role((1,), 1)}, "share ranks"),
        ({"actor": Role((0,), 1), "rollout": Role((0,), 1)}, "no role"),
        ({"actor": Role((0, 1), 2), "rollout": Role((0, 1, 2), 3)}, "do not exist"),
        ({"actor": Role((0, 1), 3)}, "do not divide"),
    ]:
        with pytest.raises(ConfigError, match=said):
            split_world(roles, launch, None, "cpu", TimeoutConfig())
        assert not dist.is_initialized()
