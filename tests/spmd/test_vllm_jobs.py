"""Whole jobs with vLLM, as a user starts them: the same on any number of ranks, no drift, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from spmd_rl.metrics import read_jsonl
from tests.launch import ROOT, start_ranks, wait_ranks

pytestmark = pytest.mark.spmd
SMALL = [
    "rollout=vllm", "data.prompts_per_step=8", "rollout.n=4", "rollout.max_response_tokens=8", "reward.workers=1",
    "trainer.keep=0", "logger.console=false", "trainer.device=cpu",
]  # fmt: skip
TRAINING = ["trainer.total_steps=3", "algorithm.epochs=2", "algorithm.num_mini_batches=2"]  # so that ratios leave 1
COMPARED = ("reward/mean", "response/length_mean", "actor/loss", "actor/grad_norm", "response/truncated_fraction")
USER = """
import os
from itertools import count
from pathlib import Path
from spmd_rl.advantages import grpo

calls = count(1)

def failing(completion, answer=None, **kwargs):
    raise ArithmeticError("no reward today")

def raising(config, batch, all_sum=None):
    if next(calls) == 2 and os.environ["RANK"] == "1":
        raise ArithmeticError("one lane only")
    return grpo(config, batch, all_sum=all_sum)
"""


class Job:
    """Ranks with a folder of their own for everything temporary."""

    def __init__(self, folder: Path, world_size: int, *overrides: str):
        self.folder, self.temporary = folder, folder / "tmp"
        self.temporary.mkdir(parents=True)
        (folder / "user_code.py").write_text(USER)
        self.before = {path.name for path in Path("/dev/shm").iterdir()}
        command = ["-m", "spmd_rl.train", "--config-name", "tiny", *SMALL, f"trainer.run_dir={folder}/run", *overrides]
        env = {"PYTHONPATH": f"{ROOT}:{folder}", "TMPDIR": str(self.temporary), "JOB": str(folder)}
        self.ranks = start_ranks(command, world_size, folder, **env)

    def wait(self, timeout: float = 240) -> list[int | None]:
        codes = wait_ranks(self.ranks, timeout)
        print(codes, *(out.read_text()[-6000:] for _, out in self.ranks), sep="\n")
        return codes

    def metrics(self) -> list[dict[str, float]]:
        return read_jsonl(self.folder / "run" / "metrics.jsonl")

    def until_step(self, step: int, timeout: float = 200) -> None:
        path, end = self.folder / "run" / "metrics.jsonl", time.monotonic() + timeout
        while not (path.exists() and len(path.read_text().splitlines()) >= step):
            assert time.monotonic() < end and all(p.poll() is None for p, _ in self.ranks), self.wait(0)
            time.sleep(0.05)

    def descendants(self) -> list[str]:
        """Command lines of the living processes that this job started: its environment is in theirs."""
        mark, found = f"JOB={self.folder}".encode(), []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (process / "environ").read_bytes().split(b"\0"):
                    found.append((process / "cmdline").read_text().replace("\0", " "))
            except OSError:  # ended meanwhile, or not ours to read
                continue
        return found

    def leftovers(self) -> dict[str, list[str]]:
        """After the end. Helpers of Python end a moment after the rank that started them."""
        end = time.monotonic() + 10
        while (processes := self.descendants()) and time.monotonic() < end:
            time.sleep(0.1)
        pids = [str(process.pid) for process, _ in self.ranks]
        segments = [p.name for p in Path("/dev/shm").iterdir() if p.name not in self.before]
        found = {
            "processes": processes,
            "shared memory": [name for name in segments if any(pid in name for pid in pids) or not in_use(name)],
            "files": sorted(str(path) for path in self.temporary.rglob("*") if not path.is_dir()),  # torch makes an empty folder
        }
        return {kind: what for kind, what in found.items() if what}


def in_use(segment: str) -> bool:
    """Whether a living process has mapped it: another job's."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if f"/dev/shm/{segment}" in maps.read_text():
                return True
        except OSError:
            continue
    return False


@pytest.fixture(scope="module")
def steady(tmp_path_factory):
    """Ranks -> the metrics of 3 steps, which train."""
    found = {}
    for ranks in (1, 2, 4):
        job = Job(tmp_path_factory.mktemp(f"steady{ranks}"), ranks, "optimizer.learning_rate=1e-4", *TRAINING)
        assert job.wait() == [0] * ranks and job.leftovers() == {}
        found[ranks] = job.metrics()
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_same_run_on_more_ranks(steady, ranks):
    assert len(steady[1]) == len(steady[ranks]) == 3
    assert all(abs(row["actor/loss"]) > 1e-4 and row["actor/grad_norm"] > 0.01 for row in steady[1])
    for one, many in zip(steady[1], steady[ranks]):
        for key in COMPARED:
            assert many[key] == pytest.approx(one[key], rel=1e-4, abs=1e-6), (one["step"], key)
        assert many["rollout/logprob_diff_max"] < 1e-4 and many["rollout/probe_diff_max"] < 1e-4


def test_no_drift_at_learning_rate_0(tmp_path):
    job = Job(tmp_path, 1, "trainer.total_steps=5", "optimizer.learning_rate=0.0")
    assert job.wait() == [0]
    rows = job.metrics()
    assert len(rows) == 5
    for key in ("rollout/probe_diff_mean", "rollout/logprob_diff_mean", "rollout/logprob_diff_max"):
        assert all(0 < row[key] < 1e-5 * (10 if key.endswith("max") else 1) for row in rows), (key, [row[key] for row in rows])
        assert max(row[key] for row in rows) < 3 * rows[0][key] + 1e-6
    assert max(abs(row["rollout/kl"]) for row in rows) < 1e-5 and min(row["rollout/kl"] for row in rows) > -1e-5
    assert len({row["rollout/probe_diff_mean"] for row in rows[1:]}) == 1  # the same weights, scored anew


def test_two_jobs_of_two_lanes_at_once(tmp_path):
    """Both at work at the same time: neither takes the other's shared memory, and both give what one alone gives."""
    common = ["rollout.tensor_parallel_size=2", "trainer.total_steps=4", "optimizer.learning_rate=1e-4"]
    jobs = [Job(tmp_path / name, 2, *common) for name in ("one", "other")]
    for job in jobs:
        job.until_step(1)
    assert [job.wait() for job in jobs] == [[0, 0], [0, 0]]
    one, other = ([[row[key] for key in COMPARED] for row in job.metrics()] for job in jobs)
    assert len(one) == 4 and one == other
    assert [job.leftovers() for job in jobs] == [{}, {}]


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_terminated_job_leaves_nothing(tmp_path, lanes):
    job = Job(tmp_path, 2, f"rollout.tensor_parallel_size={lanes}", "trainer.total_steps=100000")
    job.until_step(1)
    assert job.descendants()
    for process, _ in job.ranks:
        process.send_signal(signal.SIGTERM)
    assert job.wait(60) == [0, 0] and job.leftovers() == {}


@pytest.mark.parametrize("how", ["reward", "lane"])
def test_a_failed_job_leaves_nothing(tmp_path, how):
    """A reward that raises, and one lane of two that fails while the other waits for it."""
    failing = ["algorithm.advantage=user_code:raising"]
    if how == "reward":
        failing = ["reward.functions={user_code:failing: 1.0}", "reward.on_error=raise"]
    job = Job(tmp_path, 2, "rollout.tensor_parallel_size=2", "trainer.total_steps=100", *failing)
    assert job.wait(120) == [1, 1] and job.leftovers() == {}
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["code"] == 1 and ("no reward today" if how == "reward" else "one lane only") in status["error"]


def test_a_killed_lane_ends_the_other(tmp_path):
    """It waits inside vLLM's shared memory, where nothing of torch's would time out. A killed job leaves no segment either."""
    job = Job(tmp_path, 2, "rollout.tensor_parallel_size=2", "trainer.total_steps=100000")
    job.until_step(1)
    os.kill(job.ranks[1][0].pid, signal.SIGKILL)
    assert job.wait(60) == [1, -signal.SIGKILL]
    found = job.leftovers()
    found.pop("files", None)  # what a killed process has open cannot be removed by it
    assert found == {}
