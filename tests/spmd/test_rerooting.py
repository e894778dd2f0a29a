"""The default group is the cell: what libraries ask of it, in the second cell of a world while the first is at work too.

One launch runs every check on 6 ranks: two cells, rollout on 0-1 (one replica of two lanes) and actor on 2-5 (two of two).
Each check is a test of its own here. How jobs end is in test_faults.py.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from spmd_rl import collectives, mesh
from spmd_rl.config import TimeoutConfig
from spmd_rl.fallback import init_cell, make_bridge
from spmd_rl.launch import Launch, detect_launch
from spmd_rl.mesh import Role, cell_environment, close_world, open_store, split_world, visible_devices
from spmd_rl.placed import WeightStream
from tests.forks import VLLM, fork_ranks
from tests.launch import start_ranks, wait_ranks

pytestmark = pytest.mark.spmd
CELLS = ((0, 1), (2, 3, 4, 5))
UNION = (0, 1, 2, 3, 4, 5)
ROLES = {"rollout": Role(CELLS[0], 1), "actor": Role(CELLS[1], 2)}
TIMEOUTS = TimeoutConfig(collective=100, phase=200)


def cell_of(world):
    """(index of this rank's cell, its rank there, the cell's size)."""
    index = int(world.rank in CELLS[1])
    return index, CELLS[index].index(world.rank), len(CELLS[index])


def limit_of(group) -> float:
    """The group's time-out in seconds."""
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def with_bridge(world, control_s: float, payload_s: float, name: str):
    """(actor, rollout) with a bridge of other time-outs, where payload has a group of its own, as on CUDA."""
    store = dist.PrefixStore(name, world.store)
    groups = [
        make_bridge(UNION, world.rank, store, "gloo", timedelta(seconds=s), f"{name}.{part}")
        for part, s in (("control", control_s), ("payload", payload_s))
    ]
    bridges = {UNION: mesh.Bridge(UNION, *groups)}
    return [replace(world.meshes[role], bridges=bridges) for role in ("actor", "rollout")]


def b1_ranks_are_the_cells(world, folder):
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    index, rank, size = cell_of(world)
    assert dist.get_process_group_ranks(None) == dist.get_process_group_ranks(dist.group.WORLD) == [*range(size)]
    assert (dist.get_rank(), dist.get_world_size()) == (rank, size)
    assert dist.get_global_rank(dist.group.WORLD, rank) == dist.get_group_rank(dist.group.WORLD, rank) == rank
    assert [*DeviceMesh.from_group(dist.group.WORLD, "cpu").get_coordinate()] == [rank]
    root = dist.get_process_group_ranks(dist.group.WORLD)[1]
    tensor = torch.tensor([world.rank])
    dist.broadcast(tensor, src=root)
    assert tensor.item() == CELLS[index][1]
    mine, _ = dist.new_subgroups(2)
    total = torch.tensor([world.rank])
    dist.all_reduce(total, group=mine)
    assert total.item() == 2 * (world.rank // 2 * 2) + 1
    grid = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("replicate", "shard"))
    assert [*grid.get_coordinate()] == [rank // 2, rank % 2]
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == (str(rank), str(size))
    assert (os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]) == (str(rank), str(size))


def saved_and_loaded(folder, value, group, save) -> bool:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor

    devices = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    save({"weight": distribute_tensor(value, devices, [Shard(0)])}, folder, group)
    empty = {"weight": distribute_tensor(torch.zeros_like(value), devices, [Shard(0)])}
    dcp.load(empty, checkpoint_id=folder, process_group=group)
    return torch.equal(empty["weight"].full_tensor(), value)


def b2_groups_for_libraries_are_the_cells_own(world, folder):
    import torch.distributed.checkpoint as dcp

    index, rank, size = cell_of(world)
    own = world.meshes["actor" if index else "rollout"]
    data, lanes = (dist.get_process_group_ranks(group) for group in (own.data_group, own.lane_group))
    assert data == [*range(rank % 2, size, 2)] and lanes == [rank // 2 * 2, rank // 2 * 2 + 1]
    value = torch.arange(8.0) + index

    def save(state, where, group):
        dcp.save(state, checkpoint_id=where, process_group=group)

    assert saved_and_loaded(folder / f"default{index}", value, None, save)
    assert saved_and_loaded(folder / f"own{index}", value, dist.new_group(backend="gloo"), save)


def b3_asynchronous_checkpoints_have_their_own_group(world, folder):
    import torch.distributed.checkpoint as dcp

    index, _, size = cell_of(world)

    def save(state, where, group):
        saving = dcp.async_save(state, checkpoint_id=where, process_group=group)
        for _ in range(100):  # the trainer goes on
            ones = torch.ones(1000)
            dist.all_reduce(ones)
            assert ones[0] == size
        saving.result()

    value = torch.arange(80_000.0) + index
    assert saved_and_loaded(folder / f"async{index}", value, dist.new_group(backend="gloo"), save)


def b5_a_stream_that_nobody_drains_ends(world, folder):
    """A wait for the other cell has the time-out of a phase, and names what it was waiting in."""
    union = world.meshes["actor"].bridge(world.meshes["rollout"])
    assert limit_of(union.control) == limit_of(world.control) == TIMEOUTS.phase
    assert limit_of(dist.group.WORLD) == TIMEOUTS.collective
    actor, rollout = with_bridge(world, 3, 3, "b5")
    start = time.monotonic()
    if rollout.here:
        with pytest.raises(RuntimeError) as found:
            list(WeightStream(actor, None).to(rollout))
        assert any("weights.ready" in note for note in found.value.__notes__)
        assert 2.5 < time.monotonic() - start < 30
    dist.barrier(group=world.control)


def b6_a_bridge_waits_for_a_phase(world, folder):
    """Generation may take longer than a collective may: a payload starts when all are there.

    One rank is late, which the sender of the header does not wait for by itself: gloo broadcasts along a tree."""
    actor, rollout = with_bridge(world, 100, 2, "b6")
    named = ((f"w{i}", torch.full((1 << 20,), float(i))) for i in range(4)) if actor.here else None
    stream = WeightStream(actor, named).to(rollout)
    if world.rank == 1:
        time.sleep(4)
    got = [(name, float(tensor.mean())) for name, tensor in stream]
    assert got == ([(f"w{i}", float(i)) for i in range(4)] if rollout.here else [])


def b10_groups_are_of_whole_cells(world, folder):
    """Ranks of a cell are in equally many groups, by whose number torch names those that only their members make."""
    index, rank, size = cell_of(world)
    bridges = world.meshes["actor"].bridges
    assert bridges.keys() == {*CELLS, UNION}
    before = len(c10d._world.pg_names)
    counts = [None] * size
    dist.all_gather_object(counts, before)
    assert counts == [before] * size
    half = [*range(rank % 2, size, 2)]
    members = dist.new_group(half, use_local_synchronization=True)
    total = torch.tensor([rank])
    dist.all_reduce(total, group=members)
    assert total.item() == sum(half)
    assert collectives._world_ranks(members, world) == [CELLS[index][i] for i in half]
    assert collectives._world_ranks(bridges[UNION].control, world) == UNION
    assert [*collectives._world_ranks(world.control, world)] == [*UNION]


def every_bridge_is_connected_at_start(world, folder):
    mesh._connect(world.meshes["actor"].bridges, world.rank, world.device)


def b8_a_cell_may_end_early(world, folder):
    if world.meshes["actor"].here:
        time.sleep(3)
        dist.all_reduce(torch.ones(1))
    close_world(world)
    assert not dist.is_initialized()


def cells_without_rerooting(world, folder):
    """spmd_rl/fallback.py: the same cells and a bridge between them, in a world that has no group of all ranks."""
    index, rank, size = cell_of(world)
    limit, store = timedelta(seconds=100), dist.PrefixStore("fallback", world.store)
    init_cell(CELLS[index], world.rank, store, "gloo", limit)
    b1_ranks_are_the_cells(world, folder)
    bridge = make_bridge(UNION, world.rank, store, "gloo", limit, "bridge")
    tensor = torch.tensor([float(world.rank)])
    dist.broadcast(tensor, group=bridge, group_src=4)
    assert tensor.item() == 4 and bridge.size() == 6
    sent, received = torch.tensor([world.rank]), torch.zeros(1, dtype=torch.int64)
    work = [
        dist.isend(sent, group=bridge, group_dst=(world.rank + 1) % 6),
        dist.irecv(received, group=bridge, group_src=(world.rank - 1) % 6),
    ]
    for handle in work:
        handle.wait()
    assert received.item() == (world.rank - 1) % 6
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == size
    dist.barrier(group=bridge)
    dist.destroy_process_group()


CHECKS = [
    b1_ranks_are_the_cells, b2_groups_for_libraries_are_the_cells_own, b3_asynchronous_checkpoints_have_their_own_group,
    b5_a_stream_that_nobody_drains_ends, b6_a_bridge_waits_for_a_phase, b10_groups_are_of_whole_cells,
    every_bridge_is_connected_at_start, b8_a_cell_may_end_early, cells_without_rerooting,
]  # fmt: skip


def run_checks(folder: Path) -> None:
    """On every rank; leaves what each check said in a file of the rank."""
    launch, found, started = detect_launch(), {}, time.time()
    world = split_world(ROLES, launch, open_store(launch, TIMEOUTS), "cpu", TIMEOUTS)
    for check in CHECKS:
        print(f"{time.time() - started:.1f} s: {check.__name__}", flush=True)
        try:
            check(world, folder)
            found[check.__name__] = "passed"
        except Exception:
            found[check.__name__] = traceback.format_exc()
        (folder / f"found{launch.rank}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """(exit codes, [{check: what it said} of each rank])."""
    folder = tmp_path_factory.mktemp("cells")
    ranks = start_ranks(["-m", "tests.spmd.test_rerooting", str(folder)], 6, folder)
    codes = wait_ranks(ranks, 400)
    print(codes, *(out.read_text()[-3000:] for _, out in ranks), sep="\n")
    files = [folder / f"found{rank}.json" for rank in range(6)]
    return codes, [json.loads(path.read_text()) if path.exists() else {} for path in files]


@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
def test_in_two_cells_at_once(found, check):
    said = {rank: results.get(check, "did not come so far") for rank, results in enumerate(found[1])}
    wrong = {rank: text for rank, text in said.items() if text != "passed"}
    assert not wrong, "\n".join(f"--- rank {rank}\n{text}" for rank, text in wrong.items())


def test_every_rank_ends_in_order(found):
    assert found[0] == [0] * 6


def run_engines(folder: Path) -> None:
    """On 4 ranks: a rollout of two lanes in either cell at once, with other weights in each."""
    from transformers import AutoModelForCausalLM

    from spmd_rl.roles.generation import RolloutModel
    from spmd_rl.roles.vllm_rollout import VLLMRollout
    from tests.helpers import randomize
    from tests.spmd.test_vllm import CONFIG, check_greedy

    launch = detect_launch()
    roles = {"rollout": Role((0, 1), 1), "ref": Role((2, 3), 1)}
    world = split_world(roles, launch, open_store(launch, TIMEOUTS), "cpu", TIMEOUTS)
    own = next(mesh for mesh in world.meshes.values() if mesh.here)
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    backend = VLLMRollout(CONFIG, RolloutModel(str(folder / "model"), (2,)), own)
    dist.barrier(group=world.control)  # both engines are there
    backend.update_weights(randomize(model, 1 + own.ranks[0]).named_parameters())
    check_greedy(backend, model)
    backend.shutdown()
    close_world(world)


def test_b9_two_cells_with_two_lanes_each(tmp_path):
    """vLLM names its shared memory by ranks inside the cell: both cells' are 0 and 1. None of it is left."""
    from tests.helpers import wide_model

    before = {path.name for path in Path("/dev/shm").iterdir()}
    wide_model("llama", False, tmp_path / "model")
    fork_ranks("tests.spmd.test_rerooting:run_engines", tmp_path, 4, preload=VLLM)
    left = {path.name for path in Path("/dev/shm").iterdir()} - before
    assert not [name for name in left if name.startswith("spmd_rl")], left


PRIVATES = [
    (c10d, "_update_default_pg", "makes a group the default group"),
    (c10d._world, "pg_group_ranks", "maps a group to {global rank: rank in the group}, which every rank translation reads"),
    (c10d._world, "group_count", "is the name of the next group that all ranks make"),
    (torch._C._distributed_c10d, "_set_global_rank", "is the rank in the prefix of log lines"),
]


def test_what_rerooting_asks_of_torch(capfd, monkeypatch):
    """The four private lines of mesh._reroot: that they exist, and that each does what it is used for."""
    changed = f"torch {torch.__version__} changed it: revise mesh._reroot, or build the cells with spmd_rl/fallback.py"
    for owner, name, purpose in PRIVATES:
        assert name in dir(owner), f"{name} {purpose}. {changed}"
    purposes = {name: f"{name} {purpose}. {changed}" for _, name, purpose in PRIVATES}
    assert not dist.is_initialized()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        cell = dist.new_group([0])
        c10d._update_default_pg(cell)
        assert dist.group.WORLD is cell, purposes["_update_default_pg"]
        c10d._world.pg_group_ranks[cell] = {7: 0}
        assert dist.get_process_group_ranks(None) == [7], purposes["pg_group_ranks"]
        mesh._reroot(cell, 3, 5)
        assert dist.get_process_group_ranks(None) == [0] and dist.get_rank() == 0, purposes["pg_group_ranks"]
        count = c10d._world.group_count
        assert count > 40_000 and dist.new_group([0]).group_name == str(count), purposes["group_count"]
        capfd.readouterr()
        torch._C._distributed_c10d._set_global_rank(5)
        with pytest.raises(dist.DistNetworkError):
            dist.TCPStore("127.0.0.1", 1, is_master=False, timeout=timedelta(milliseconds=10))
        assert "[rank5]" in capfd.readouterr().err, purposes["_set_global_rank"]
    finally:
        dist.destroy_process_group()
        torch._C._distributed_c10d._set_global_rank(-1)


@pytest.mark.parametrize(
    ("value", "count", "devices"),
    [
        (None, 3, ["0", "1", "2"]),
        (None, 0, []),
        ("", 8, []),
        ("0,1,2,3", 8, ["0", "1", "2", "3"]),
        (" 6, 4 ,5", 8, ["6", "4", "5"]),
        ("0,1,-1,2", 8, ["0", "1"]),
        ("NoDevFiles", 8, []),
        ("GPU-8932f937,GPU-1a2b3c4d", 8, ["GPU-8932f937", "GPU-1a2b3c4d"]),
    ],
)
def test_devices_that_cuda_enumerates(value, count, devices):
    assert visible_devices(value, count) == devices


EIGHT = [str(i) for i in range(8)]
ONE_NODE, TWO_NODES, CROSSED = (4, 5, 6, 7), (8, 9, 10, 11, 12, 13, 14, 15), (1, 3, 5, 7)


@pytest.mark.parametrize(
    ("cell", "rank", "devices", "local", "kept"),
    [
        (ONE_NODE, 6, EIGHT, (2, 4), "4,5,6,7"),
        (ONE_NODE, 4, ["7", "6", "5", "4", "3", "2", "1", "0"], (0, 4), "3,2,1,0"),
        (ONE_NODE, 5, [f"GPU-{i}" for i in range(8)], (1, 4), "GPU-4,GPU-5,GPU-6,GPU-7"),
        (ONE_NODE, 5, [f"MIG-{i}" for i in range(8)], (0, 4), "MIG-5"),
        (ONE_NODE, 5, ["3"], (0, 4), "3"),
        (ONE_NODE, 7, ["0", "1"], (3, 4), "0,1"),
        (CROSSED, 5, EIGHT, (2, 4), "1,3,5,7"),
        (tuple(range(8)), 5, EIGHT, (5, 8), ",".join(EIGHT)),
        (TWO_NODES, 13, EIGHT, (5, 8), ",".join(EIGHT)),
        ((12, 13), 13, EIGHT, (1, 2), "4,5"),
        ((3,), 3, EIGHT, (0, 1), "3"),
        (ONE_NODE, 6, [], (2, 4), ""),
    ],
)
def test_b4_a_cell_sees_its_own_devices(cell, rank, devices, local, kept):
    """rank % device_count, which libraries compute, is then the local rank."""
    launch = Launch("torchrun", rank, 16, rank % 8, 8, "node0", 29500, False, 0)
    found = cell_environment(cell, launch, devices)
    assert (int(found["LOCAL_RANK"]), int(found["LOCAL_WORLD_SIZE"])) == local
    assert (int(found["RANK"]), int(found["WORLD_SIZE"])) == (cell.index(rank), len(cell))
    assert found["CUDA_VISIBLE_DEVICES"] == kept
    if len(kept.split(",")) == local[1]:
        assert cell.index(rank) % local[1] == local[0]
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("node0", "29500")


def test_a_cell_on_hosts_leaves_the_devices_alone():
    launch = Launch("srun", 5, 8, 1, 4, "node0", 29500, False, 0)
    assert "CUDA_VISIBLE_DEVICES" not in cell_environment((4, 5, 6, 7), launch, None)


if __name__ == "__main__":
    run_checks(Path(sys.argv[1]))
