"""How a job ends when one of its ranks fails, is killed, or all are asked to stop. Ranks are processes as a user starts them."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from spmd_rl.metrics import read_jsonl
from tests.launch import ROOT, start_ranks, wait_ranks

pytestmark = pytest.mark.spmd
SMALL = ["data.prompts_per_step=6", "rollout.n=2", "rollout.max_response_tokens=4", "reward.workers=1"]
USER = """
import os, signal, time
from itertools import count
from pathlib import Path
from spmd_rl.advantages import grpo

calls = count(1)

def note():
    Path(os.environ["FOLDER"], "when").write_text(str(time.time()))

def raising(config, batch, all_sum=None):
    if next(calls) == 2 and os.environ["RANK"] == "1":
        note()
        raise ArithmeticError("one rank only")
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
