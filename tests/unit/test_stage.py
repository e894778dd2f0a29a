"""Free memory of hosts and control groups that are folders here, the stage's table, and who sleeps."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from spmd_rl.engine.base import held_bytes
from spmd_rl.engine.eager import EagerEngine
from spmd_rl.metrics import Max, Min, Phases
from spmd_rl.roles import stage
from spmd_rl.roles.server_adapter import ServerAdapter
from spmd_rl.roles.stage import Free, Stage, control_groups, host_free
from tests.launch import ROOT

CPU = torch.device("cpu")
GIB = 2**30
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def machine(tmp_path: Path, own: str, groups: dict[str, dict[str, str]], available_gib: int = 20) -> Free:
    """What is free on a host of 32 GiB: `own` is /proc/self/cgroup, `groups` {folder under /sys/fs/cgroup: {file: text}}."""
    for folder, files in groups.items():
        (tmp_path / "cgroup" / folder).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (tmp_path / "cgroup" / folder / name).write_text(text)
    (tmp_path / "own").write_text(own)
    meminfo = f"MemTotal:       {32 * 2**20} kB\nMemFree:         1048576 kB\nMemAvailable:   {available_gib * 2**20} kB\n"
    (tmp_path / "meminfo").write_text(meminfo + "HugePages_Total:       0\n")
    return host_free(control_groups(tmp_path / "own", tmp_path / "cgroup"), tmp_path / "meminfo")


def v2(limit: str, current: int, cache: int) -> dict[str, str]:
    stat = f"anon 5\nworkingset_inactive_file 77\ninactive_file {cache}\nactive_file 9\n"
    return {"memory.max": limit + "\n", "memory.current": f"{current}\n", "memory.stat": stat}


def v1(limit: int, usage: int, cache: int) -> dict[str, str]:
    stat = f"inactive_file 3\ntotal_inactive_file {cache}\n"
    return {"memory.limit_in_bytes": f"{limit}\n", "memory.usage_in_bytes": f"{usage}\n", "memory.stat": stat}


def test_a_host_without_limits(tmp_path):
    assert machine(tmp_path, "", {}) == Free(20 * GIB, 32 * GIB, "the host")
    unlimited = machine(tmp_path, "0::/a/b\n", {"a/b": v2("max", GIB, 0), "a": {}})
    assert unlimited == Free(20 * GIB, 32 * GIB, "the host")


def test_v2_the_tightest_group_on_the_way_up_bounds_and_page_cache_is_free(tmp_path):
    job = "slurmstepd.scope/job_7"
    groups = {
        f"{job}/step_0/user/task_0": v2("max", 3 * GIB, GIB),
        f"{job}/step_0": v2(str(12 * GIB), 7 * GIB, 0),
        job: v2(str(10 * GIB), 8 * GIB, 2 * GIB),
        "slurmstepd.scope/job_8": v2(str(GIB), GIB, 0),  # another job's
    }
    found = machine(tmp_path, f"0::/{job}/step_0/user/task_0\n", groups)
    assert found == Free(4 * GIB, 10 * GIB, f"the memory limit of {tmp_path}/cgroup/{job}")
    assert machine(tmp_path, f"0::/{job}/step_0\n", groups, available_gib=3).where == "the host"


def test_v1_and_a_container_whose_path_is_the_hosts(tmp_path):
    own = "9:name=systemd:/x\n8:cpu,cpuacct:/slurm\n4:hugetlb,memory:/slurm/uid_1/job_2\n0::/\n"
    groups = {"memory": v1(9223372036854771712, 30 * GIB, 0), "memory/slurm/uid_1": v1(6 * GIB, 5 * GIB, GIB // 2)}
    found = machine(tmp_path, own, groups)
    assert found == Free(GIB + GIB // 2, 6 * GIB, f"the memory limit of {tmp_path}/cgroup/memory/slurm/uid_1")
    inside = machine(tmp_path, "0::/docker/0123\n", {".": v2(str(2 * GIB), GIB, 0)})
    assert inside.free == GIB


def test_page_cache_is_looked_up_only_where_it_could_matter(tmp_path):
    files = v2(str(64 * GIB), GIB, 0)
    del files["memory.stat"]  # reading it would fail
    assert machine(tmp_path, "0::/a\n", {"a": files}).where == "the host"


def test_a_group_over_its_limit_has_nothing_left(tmp_path):
    assert machine(tmp_path, "0::/a\n", {"a": v2(str(GIB), 2 * GIB, 0)}).free == 0


def test_a_system_without_proc_has_no_bound(tmp_path):
    assert control_groups(tmp_path / "nothing", tmp_path) == []
    assert host_free([], tmp_path / "nothing").free == math.inf


def make_stage(free: list[float], threshold: float = 0.5) -> Stage:
    """A stage that finds so many GB free, one after the other."""
    holders = {
        "actor": lambda: {"parameters": 2_000_000_000, "gradients": 0, "optimizer": 4_000_000_000},
        "rollout": lambda: {"weights": 1_000_000_000, "kv_cache": 3_500_000_000},
    }
    found = iter(free)
    return Stage(threshold, 3, CPU, holders, lambda: Free(next(found) * 1e9, 16e9, "the memory limit of /job"))


@linux
def test_every_phase_is_measured_before_and_after_and_the_least_is_reported():
    watched = make_stage([9, 4, 7, 3, 8, 6])
    phases = Phases(watched.watch)
    for phase in ("generate", "train"):
        with phases(phase):
            pass
    stats = watched.step()
    assert stats["memory/free_gb_min"] == Min(3.0) and type(stats["memory/rss_gb"]) is Max
    with phases("generate"):
        pass
    assert watched.step()["memory/free_gb_min"] == Min(6.0)


@linux
@pytest.mark.parametrize(("free", "when"), [([0.4], "before phase 'train'"), ([9, 0.4], "after phase 'train'")])
def test_too_little_stops_with_who_holds_what(free, when, monkeypatch):
    monkeypatch.setattr(stage, "resident", lambda: 12_000_000_000)
    phases = Phases(make_stage(free).watch)
    with pytest.raises(MemoryError) as caught, phases("train"):
        pass
    first, *table = str(caught.value).splitlines()
    assert first.startswith(f"trainer.min_free_gb: {when}, 0.400 GB of the memory limit of /job are free on rank 3, less than 0.5 ")
    for key in (
        "rollout.kv_cache_gb",
        "rollout.max_batch_rows",
        "engine.max_tokens_per_micro_batch",
        "or lower trainer.min_free_gb",
    ):
        assert key in first
    rows = {name.strip(): float(size) for name, size in (line.rsplit(maxsplit=1) for line in table)}
    assert rows == {
        "actor parameters": 2.0,
        "actor gradients": 0.0,
        "actor optimizer": 4.0,
        "rollout weights": 1.0,
        "rollout kv_cache": 3.5,
        "rest of this process: activations, caches, libraries": 1.5,
        "this process (RSS)": 12.0,
        "other processes": 3.6,
        "free": 0.4,
        "total": 16.0,
    }


def test_an_error_inside_a_phase_is_not_hidden_by_a_full_device():
    phases = Phases(make_stage([9, 0.1]).watch)
    with pytest.raises(KeyError), phases("train"):
        raise KeyError("x")


def test_zero_never_stops():
    make_stage([0.0], threshold=0.0).watch("before phase 'train'")


@linux
def test_this_machine_is_measured_in_less_than_a_millisecond():
    watched = Stage(1e-6, 0, CPU, {})
    seconds = []
    for _ in range(50):
        start = time.perf_counter()
        watched.watch("before phase 'train'")
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 1e-3
    assert 0 < watched.least < 1e5


@linux
def test_peaks_and_residence_are_those_of_the_kernel():
    status = Path("/proc/self/status").read_text()
    peak, now = (int(re.search(rf"{name}:\s+(\d+) kB", status)[1]) * 1024 for name in ("VmHWM", "VmRSS"))
    assert stage.peaks()["memory/rss_gb"] == pytest.approx(peak / 1e9, rel=0.01)
    assert stage.resident() == pytest.approx(now, rel=0.05)


@pytest.mark.parametrize(("here", "staged", "slept"), [(True, True, 1), (True, False, 0), (False, True, 0)])
def test_only_a_rollout_beside_the_actor_sleeps(here, staged, slept):
    calls = []
    adapter = SimpleNamespace(
        mesh=SimpleNamespace(here=here), staged=staged, backend=SimpleNamespace(sleep=partial(calls.append, 1))
    )
    ServerAdapter.sleep(adapter)
    assert len(calls) == slept


def fake_device(monkeypatch, cached: float) -> Stage:
    """A cuda device with 0.1 GB free, and what torch would give back."""
    free = [0.1e9]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[0], 80e9))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: free.append(free.pop() + cached))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 5e9)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 6e9)
    holders = {"actor": lambda: {"parameters": 2_000_000_000}, "rollout": lambda: {"weights": 0, "kv_cache": 0}}
    return Stage(0.5, 0, torch.device("cuda", 1), holders)


def test_what_torch_keeps_on_a_device_is_given_back_first(monkeypatch):
    watched = fake_device(monkeypatch, cached=30e9)
    watched.watch("before phase 'weights'")
    assert watched.least == pytest.approx(30.1)


def test_the_table_of_a_device(monkeypatch):
    with pytest.raises(MemoryError) as caught:
        fake_device(monkeypatch, cached=0.2e9).watch("after phase 'train'")
    text = str(caught.value)
    assert "0.300 GB of cuda:1 are free on rank 0" in text
    assert "rollout.gpu_memory_utilization" in text and "engine.offload=true" in text
    rows = {name.strip(): float(size) for name, size in (line.rsplit(maxsplit=1) for line in text.splitlines()[1:])}
    assert rows["rest: activations, caches, contexts, other processes"] == pytest.approx(80 - 0.3 - 2)
    assert (rows["torch allocated"], rows["torch reserved"], rows["total"]) == (5, 6, 80)


def test_bytes_held_are_those_of_storages_on_the_device():
    base = torch.zeros(100)
    assert held_bytes([base, base[:10], base.view(10, 10), torch.zeros(7, dtype=torch.int16)], CPU) == 414
    assert held_bytes([base, torch.zeros(50, device="meta")], torch.device("meta")) == 200


def test_an_engine_says_what_it_holds():
    module = torch.nn.Linear(20, 10, bias=False)
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    engine = SimpleNamespace(module=module, optimizer=optimizer, mesh=SimpleNamespace(device=CPU))
    assert EagerEngine.memory(engine) == {"parameters": 800, "gradients": 0, "optimizer": 0}
    module(torch.ones(1, 20)).sum().backward()
    optimizer.step()
    held = EagerEngine.memory(engine)
    assert held["gradients"] == 800 and 1600 <= held["optimizer"] <= 1700  # two moments and a counter
    optimizer.zero_grad()
    assert EagerEngine.memory(engine)["gradients"] == 0


@linux
@pytest.mark.spmd
@pytest.mark.parametrize("rollout", ["hf", "vllm"])
def test_a_run_that_starts_on_a_full_machine(rollout, tmp_path):
    if importlib.util.find_spec("vllm") is None and rollout == "vllm":
        pytest.skip("needs vLLM")
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "spmd_rl.train", "--config-name", "tiny", f"rollout={rollout}", "trainer.device=cpu"]
    command += ["trainer.min_free_gb=100000", f"trainer.run_dir={tmp_path}"]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stderr
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["code"], status["state"], status["rank"]) == (1, "failed", 0)
    first, *table = status["error"].splitlines()
    assert first.startswith("MemoryError: trainer.min_free_gb: before phase 'generate', ") and "less than 100000" in first
    rows = {name.strip(): float(size) for name, size in (line.rsplit(maxsplit=1) for line in table)}
    roles = {f"actor {part}" for part in ("parameters", "gradients", "optimizer")} | {"rollout weights", "rollout kv_cache"}
    assert roles < rows.keys()
    assert (rows["rollout kv_cache"] > 0) == (rollout == "vllm") and rows["this process (RSS)"] > 0.1
    assert "MemoryError: trainer.min_free_gb" in done.stderr and "rollout kv_cache" in done.stderr
