"""Real SLURM daemons: launch/slurm.sbatch and plain srun, on two nodes of this machine."""

from __future__ import annotations

import json
import sys
import time

import pytest

from spmd_rl.checkpoint import is_complete, step_folders
from spmd_rl.metrics import read_jsonl
from tests.slurm import missing, slurm_cluster

pytestmark = [pytest.mark.spmd, pytest.mark.skipif(bool(missing()), reason=missing())]
TINY = ("--config-name", "tiny", "trainer.device=cpu")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as found:
        found.env |= {"SPMD_RL_VENV": sys.prefix, "OMP_NUM_THREADS": "1"}
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            found.env.pop(name, None)
        yield found


def test_a_batch_job_splits_its_roles_over_two_nodes(cluster, tmp_path):
    run = tmp_path / "run"
    split = ("placement=split", "placement.actor=0-1", "placement.rollout=2-3")
    job = cluster.submit(
        f"--output={tmp_path}/out", "launch/slurm.sbatch", *TINY, f"trainer.run_dir={run}", "trainer.total_steps=3", *split
    )
    ended, printed = cluster.wait(job), (tmp_path / "out").read_text()
    assert ended == ("COMPLETED", "0:0"), printed
    assert "torchrun, rank 0 of 4" in printed
    assert len(read_jsonl(run / "metrics.jsonl")) == 3
    assert json.loads((run / "status.json").read_text())["state"] == "done"


def test_srun_without_torchrun_keeps_the_exit_code(cluster, tmp_path):
    def srun(*overrides: str):
        train = (sys.executable, "-m", "spmd_rl.train", *TINY, "trainer.total_steps=1", *overrides)
        return cluster.run("srun", "--nodes=2", "--ntasks-per-node=1", "--label", *train)

    done = srun(f"trainer.run_dir={tmp_path}/run")
    assert done.returncode == 0 and "srun" in done.stdout, done.stdout + done.stderr
    assert len(read_jsonl(tmp_path / "run/metrics.jsonl")) == 1
    wrong = srun(f"trainer.run_dir={tmp_path}/wrong", "rollout.n=0")
    assert wrong.returncode == 2, wrong.stderr
    assert (wrong.stdout + wrong.stderr).count("rollout.n: ") == 1


def test_a_job_that_is_told_to_end_goes_on_from_where_it_was(cluster, tmp_path):
    run = tmp_path / "run"

    def submit(steps: int) -> str:
        arguments = (*TINY, f"trainer.run_dir={run}", f"trainer.total_steps={steps}", "optimizer.schedule=constant")
        return cluster.submit(f"--output={tmp_path}/out", "--open-mode=append", "launch/slurm.sbatch", *arguments)

    def steps_done() -> int:
        return len(read_jsonl(run / "metrics.jsonl")) if (run / "metrics.jsonl").exists() else 0

    job = submit(100_000)
    end = time.monotonic() + 120
    while not steps_done() and time.monotonic() < end:
        time.sleep(0.2)
    cluster.run("scancel", "--signal=TERM", job)
    state, printed = cluster.wait(job), (tmp_path / "out").read_text()
    assert state[0] != "RUNNING" and json.loads((run / "status.json").read_text())["state"] == "stopped", printed
    (reached, folder), *_ = reversed(step_folders(run / "checkpoints"))
    assert is_complete(folder) and reached == steps_done(), printed
    assert cluster.wait(submit(reached + 2)) == ("COMPLETED", "0:0"), (tmp_path / "out").read_text()
    assert [row["step"] for row in read_jsonl(run / "metrics.jsonl")] == [*range(1, reached + 3)]
