from __future__ import annotations

import os
import subprocess
import sys

import pytest

from spmd_rl.launch import AbortWatch, Launch, detect_launch

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_USE_AGENT_STORE": "True",
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "node1", "MASTER_PORT": "29500",
}  # fmt: skip
PLAIN = {name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
BATCH = {"SLURM_JOB_ID": "1234567", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODELIST": "gpu[03-04]"}
SRUN = BATCH | {
    "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "gpu03",
    "SLURM_PROCID": "3", "SLURM_LOCALID": "3",
}  # fmt: skip
TWO_NODES = SRUN | {
    "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "gpu[03-04]",
    "SLURM_PROCID": "6", "SLURM_LOCALID": "2",
}  # fmt: skip
SCONTROL = """#!/bin/sh
[ "$2" = hostnames ] && [ "$3" = "gpu[03-04]" ] && { echo gpu03; echo gpu04; exit 0; }
[ "$2" = node ] && [ "$3" = gpu03 ] && { echo "NodeName=gpu03 Arch=x86_64 %s NodeHostName=gpu03 Version=23"; exit 0; }
echo "unknown node" >&2; exit 1
"""


@pytest.fixture
def scontrol(tmp_path, monkeypatch):
    """Puts a `scontrol` that knows two nodes first on PATH; the argument is what it says of the first one's address."""

    def install(address: str) -> None:
        tool = tmp_path / "scontrol"
        tool.write_text(SCONTROL % address)
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    return install


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        (TORCHRUN, Launch("torchrun", 5, 8, 1, 4, "node1", 29500, False, 2)),
        (
            TORCHRUN | {"RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "False"},
            Launch("torchrun", 0, 8, 1, 4, "node1", 29500, True, 2),
        ),
        (TORCHRUN | SRUN | {"SLURM_STEP_NUM_TASKS": "2"}, Launch("torchrun", 5, 8, 1, 4, "node1", 29500, False, 2)),
        (PLAIN, Launch("env", 5, 8, 1, 4, "node1", 29500, False, 0)),
        (PLAIN | {"RANK": "0"}, Launch("env", 0, 8, 1, 4, "node1", 29500, True, 0)),
        (SRUN, Launch("srun", 3, 4, 3, 4, "127.0.0.1", 24567, False, 0)),
        (SRUN | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, Launch("srun", 0, 4, 0, 4, "127.0.0.1", 24567, True, 0)),
        (SRUN | {"MASTER_ADDR": "a", "MASTER_PORT": "7", "SLURM_RESTART_COUNT": "1"}, Launch("srun", 3, 4, 3, 4, "a", 7, False, 1)),
        (BATCH, Launch("python", 0, 1, 0, 1, "127.0.0.1", 0, True, 0)),
        (BATCH | {"SLURM_STEP_NUM_TASKS": "1"}, Launch("python", 0, 1, 0, 1, "127.0.0.1", 0, True, 0)),
        ({}, Launch("python", 0, 1, 0, 1, "127.0.0.1", 0, True, 0)),
        ({"RANK": "3"}, Launch("python", 0, 1, 0, 1, "127.0.0.1", 0, True, 0)),
    ],
    ids=[
        "torchrun",
        "own-store",
        "torchrun-in-srun",
        "env",
        "env-0",
        "srun",
        "srun-0",
        "srun-named",
        "sbatch",
        "srun-1",
        "python",
        "stray",
    ],
)
def test_the_launcher_is_found(env, expected):
    assert detect_launch(env) == expected


def test_two_nodes_meet_at_the_first_ones_address(scontrol):
    scontrol("NodeAddr=10.0.0.3")
    assert detect_launch(TWO_NODES) == Launch("srun", 6, 8, 2, 4, "10.0.0.3", 24567, False, 0)


@pytest.mark.parametrize(
    ("env", "address", "message"),
    [
        (TWO_NODES | {"SLURM_STEP_NUM_TASKS": "7"}, "", "7 tasks on 2 nodes - use --ntasks-per-node"),
        (TWO_NODES, "", "no address for node gpu03 - set MASTER_ADDR"),
        (TWO_NODES | {"SLURM_STEP_NODELIST": "cpu[1-2]"}, "NodeAddr=10.0.0.3", r"first of cpu\[1-2\].* - set MASTER_ADDR"),
    ],
    ids=["uneven", "no-address", "unknown-nodes"],
)
def test_what_srun_lacks_is_named(env, address, message, scontrol):
    scontrol(address)
    with pytest.raises(ValueError, match=message):
        detect_launch(env)


def test_without_scontrol_the_variable_to_set_is_named(tmp_path, monkeypatch):
    """As inside many containers."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="scontrol.* - set MASTER_ADDR"):
        detect_launch(TWO_NODES)
    assert detect_launch(TWO_NODES | {"MASTER_ADDR": "gpu03"}).address == "gpu03"


def test_it_reads_the_environment_and_says_what_it_found(monkeypatch):
    for name in [*os.environ]:
        if name in TORCHRUN or name.startswith("SLURM_"):
            monkeypatch.delenv(name)
    assert detect_launch().launcher == "python"
    for name, value in SRUN.items():
        monkeypatch.setenv(name, value)
    assert str(detect_launch()).startswith("srun, rank 3 of 4 on ")


class DictStore:
    """The part of a TCPStore that AbortWatch uses, in one process."""

    def __init__(self):
        self.values: dict[str, str] = {}

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        if self.values.get(key, "") == expected:
            self.values[key] = desired
        return self.values[key].encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)


def test_only_the_first_failure_is_shown(capsys):
    store = DictStore()
    watches = [AbortWatch(lambda: store, rank, poll_s=60.0) for rank in range(3)]
    assert [watches[rank].report(ValueError(f"bad {rank}")) for rank in (1, 0, 2)] == [True, False, False]
    shown = capsys.readouterr().err
    assert shown.count("ValueError: bad 1") == 2 and "rank 1 on" in shown  # the headline and the traceback
    assert "bad 0" not in shown and "bad 2" not in shown


def test_a_rank_whose_store_is_gone_says_nothing(capsys):
    class Gone(DictStore):
        def compare_set(self, key, expected, desired):
            raise ConnectionError

    assert AbortWatch(Gone, 1, poll_s=60.0).report(ValueError("bad")) is False
    assert capsys.readouterr().err == ""


WATCHER = """
import sys, time
from spmd_rl.launch import AbortWatch
class Store:
    def check(self, keys):
        if sys.argv[1] == "gone":
            raise ConnectionError
        return sys.argv[1] in ("failed", "closed")
watch = AbortWatch(Store, 0, poll_s=0.05)
if sys.argv[1] == "closed":
    watch.close()
time.sleep(1.0)
"""


@pytest.mark.parametrize(("state", "code"), [("failed", 1), ("gone", 1), ("fine", 0), ("closed", 0)])
def test_a_watching_rank_ends_when_another_failed(state, code):
    assert subprocess.run([sys.executable, "-c", WATCHER, state], timeout=30).returncode == code
