"""How a job ends when one of its ranks fails, is killed, or all are asked to stop. Ranks are processes as a user starts them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spmd_rl.metrics import read_jsonl
from tests.launch import ROOT, free_port, start_ranks, wait_ranks

pytestmark = pytest.mark.spmd
SMALL = ["data.prompts_per_step=6", "rollout.n=2", "rollout.max_response_tokens=4", "reward.workers=1"]
USER = """
import os, signal, time
from itertools import count
from pathlib import Path
import torch
from spmd_rl.advantages import grpo

calls = count(1)

def note():
    Path(os.environ["FOLDER"], "when").write_text(str(time.time()))

def raising(config, batch, all_sum=None):
    if next(calls) == 2 and os.environ["RANK"] == "1":
        note()
        raise ArithmeticError("one rank only")
    return grpo(config, batch, all_sum=all_sum)

def skipping(config, batch, all_sum=None):
    if next(calls) == 2 and os.environ["RANK"] != "1":
        note()
        all_sum(torch.zeros(1))
    return grpo(config, batch, all_sum=all_sum)

def dying(config, batch, all_sum=None):
    if next(calls) == 2 and os.environ["RANK"] == "2":
        note()
        os.kill(os.getpid(), signal.SIGKILL)
    return grpo(config, batch, all_sum=all_sum)

def rows(**kwargs):
    if os.environ["RANK"] == "1":
        raise OSError("no such file on this node")
    return [{"prompt": "ab", "answer": "ab"}] * 6
"""


def start(folder: Path, world_size: int, *overrides: str):
    (folder / "user_code.py").write_text(USER)
    command = ["-m", "spmd_rl.train", "--config-name", "tiny", *SMALL, f"trainer.run_dir={folder}/run", *overrides]
    return start_ranks(command, world_size, folder, PYTHONPATH=f"{ROOT}:{folder}", FOLDER=str(folder))


def ended(ranks, folder: Path, timeout: float = 120) -> tuple[list[int | None], str, dict]:
    """(exit codes, what all printed, status.json)."""
    codes = wait_ranks(ranks, timeout)
    shown = "\n".join(out.read_text() for _, out in ranks)
    print(codes, shown)
    return codes, shown, json.loads((folder / "run" / "status.json").read_text())


def seconds_since(folder: Path) -> float:
    return time.time() - float((folder / "when").read_text())


def test_an_exception_on_one_rank_ends_all(tmp_path):
    codes, shown, status = ended(start(tmp_path, 3, "algorithm.advantage=user_code:raising"), tmp_path)
    assert codes == [1, 1, 1] and seconds_since(tmp_path) < 15
    assert shown.count("Traceback (most recent call last)") == 1 and shown.count("in raising") == 1
    assert shown.count("[spmd_rl] rank 1 on ") == 1
    assert status == {"code": 1, "state": "failed", "rank": 1, "error": "ArithmeticError: one rank only"}
    assert [row["step"] for row in read_jsonl(tmp_path / "run" / "metrics.jsonl")] == [1]


def test_a_rank_that_skips_a_collective_is_named(tmp_path):
    """By the ledger, in a job: its next collective is another than that of the other ranks."""
    ledger = ["debug.ledger=true", "debug.ledger_timeout=10", "algorithm.advantage=user_code:skipping"]
    codes, shown, status = ended(start(tmp_path, 3, *ledger), tmp_path)
    assert codes == [1, 1, 1] and seconds_since(tmp_path) < 20
    assert shown.count("Traceback (most recent call last)") == 1
    called = "ranks 0,2 entered 'actor.all_sum[1] float32' of ranks 0-2; rank 1 entered 'actor.denominators"
    assert called in status["error"]


@pytest.mark.parametrize("failing", ["second", "first"])
def test_an_exception_ends_all_cells_on_all_nodes(tmp_path, failing):
    """Two torchrun agents, a cell each: whichever fails, also the one whose agent holds the store, both end in seconds."""
    (tmp_path / "user_code.py").write_text(USER)
    actor, rollout = ("2-3", "0-1") if failing == "second" else ("0-1", "2-3")
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", "--master-addr=127.0.0.1",
        f"--master-port={free_port()}", "--redirects=3", "-m", "spmd_rl.train", "--config-name", "tiny", *SMALL,
        "placement=split", f"placement.actor={actor}", f"placement.rollout={rollout}", "trainer.lookahead=1",
        "algorithm.advantage=user_code:raising", f"trainer.run_dir={tmp_path}/run",
    ]  # fmt: skip
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{tmp_path}", "FOLDER": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    agents = []
    for node in range(2):
        own = [*command[:3], f"--node-rank={node}", f"--log-dir={tmp_path}/node{node}", *command[3:]]
        with (tmp_path / f"agent{node}.out").open("w") as out:
            agents.append((subprocess.Popen(own, env=env, stdout=out, stderr=out, cwd=ROOT), tmp_path / f"agent{node}.out"))
    ranks_left = None
    end = time.monotonic() + 150
    while time.monotonic() < end and any(agent.poll() is None for agent, _ in agents):
        if (tmp_path / "when").exists() and ranks_left is None and seconds_since(tmp_path) > 8:
            ranks_left = trainers(tmp_path)
        time.sleep(0.1)
    took = seconds_since(tmp_path)
    codes = wait_ranks(agents, 1)
    logs = [path.read_text() for path in tmp_path.glob("node*/**/std*.log")]
    print(codes, took, *(out.read_text() for _, out in agents), *logs, sep="\n")
    assert took < 10 and not ranks_left and trainers(tmp_path) == []
    assert all(code and code > 0 for code in codes)
    ranks = "\n".join(logs)
    assert ranks.count("Traceback (most recent call last)") == ranks.count("in raising") == 1
    assert ranks.count(f"[spmd_rl] rank {actor[-1]} on ") == 1
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status == {"code": 1, "state": "failed", "rank": int(actor[-1]), "error": "ArithmeticError: one rank only"}


def trainers(folder: Path) -> list[str]:
    """Living processes of the job in this folder that are ranks: its environment is in theirs."""
    mark, found = f"FOLDER={folder}".encode(), []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            variables = (process / "environ").read_bytes().split(b"\0")
        except OSError:  # ended meanwhile, or not ours to read
            continue
        if mark in variables and any(v.startswith(b"TORCHELASTIC_RUN_ID=") for v in variables):
            found.append(process.name)
    return found


def test_a_killed_rank_ends_the_others(tmp_path):
    codes, shown, status = ended(start(tmp_path, 3, "algorithm.advantage=user_code:dying"), tmp_path)
    assert codes == [1, 1, -signal.SIGKILL] and seconds_since(tmp_path) < 20
    assert shown.count("Traceback (most recent call last)") == 1
    assert (status["code"], status["state"]) == (1, "failed") and status["rank"] in (0, 1)


def test_what_one_rank_lacks_is_told_before_the_run(tmp_path):
    codes, shown, status = ended(start(tmp_path, 2, "data.train=user_code:rows"), tmp_path)
    assert codes == [2, 2] and shown.count("rank 1: ") == shown.count("no such file on this node") == 1
    assert (status["code"], status["state"]) == (2, "configuration") and "Traceback" not in shown


def test_a_terminated_job_saves_and_goes_on_later(tmp_path):
    metrics = tmp_path / "run" / "metrics.jsonl"
    ranks = start(tmp_path, 2, "trainer.total_steps=100000")
    end = time.monotonic() + 120
    while not (metrics.exists() and metrics.read_text()) and time.monotonic() < end:
        time.sleep(0.1)
    for process, _ in ranks:
        process.send_signal(signal.SIGTERM)
    codes, shown, status = ended(ranks, tmp_path, 30)
    assert codes == [0, 0] and status["code"] == 0 and "Traceback" not in shown
    done = read_jsonl(metrics)[-1]["step"]
    (saved,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert saved.name == f"step_{done:06d}" and json.loads((saved / "state.json").read_text())["step"] == done

    codes, shown, status = ended(start(tmp_path, 1, f"trainer.total_steps={done + 2}"), tmp_path)
    assert codes == [0] and status["code"] == 0
    assert [row["step"] for row in read_jsonl(metrics)] == list(range(1, done + 3))
