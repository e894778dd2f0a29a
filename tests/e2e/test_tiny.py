"""The smoke test of a machine, as a user types it: it learns, and its run folder holds what is promised."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import mean

import pytest
from omegaconf import OmegaConf

from spmd_rl.metrics import read_jsonl
from tests.launch import ROOT

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
PHASES = {"generate", "reward", "move", "infer", "advantage", "train", "weights", "other", "step"}
KEYS = {
    *(f"{kind}/{phase}" for kind in ("time", "cpu") for phase in PHASES),
    *("reward/mean", "reward/max", "reward/failed", "reward/overlap", "reward/zero_signal_groups"),
    *("response/samples", "response/tokens", "response/length_mean", "response/length_max", "response/truncated_fraction"),
    *("actor/loss", "actor/lr", "actor/grad_norm", "actor/clip_fraction", "actor/approx_kl", "actor/ratio_max"),
    *(f"rollout/{name}" for name in ("logprob_diff_mean", "logprob_diff_max", "kl", "probe_diff_mean", "probe_diff_max")),
    *("actor/micro_batches", "actor/rows_skipped", "actor/skipped_steps", "actor/nonfinite_steps"),
    *("perf/samples_per_second", "perf/tokens_per_second", "memory/rss_gb", "memory/free_gb_min"),
    *("traffic/batch_bytes", "traffic/weights_bytes"),
}


def run(launcher: list[str], run_dir: Path, *overrides: str) -> str:
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *launcher, "-m", "spmd_rl.train", "--config-name", "tiny", f"trainer.run_dir={run_dir}", *overrides]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """(run folder, printed) of the 20 steps."""
    folder = tmp_path_factory.mktemp("tiny") / "run"
    return folder, run(TORCHRUN, folder, "trainer.device=cpu")


@pytest.mark.spmd
def test_it_learns(two_ranks):
    """Six seeds went from 0.04-0.08 in the first three steps to 0.78-0.90 in the last five."""
    rewards = [row["reward/mean"] for row in read_jsonl(two_ranks[0] / "metrics.jsonl")]
    assert len(rewards) == 20
    assert mean(rewards[:3]) < 0.2 and mean(rewards[-5:]) > 0.5


@pytest.mark.spmd
def test_run_folder(two_ranks):
    folder, printed = two_ranks
    assert sorted(path.name for path in folder.iterdir()) == [
        *("checkpoints", "config.yaml", "metrics.jsonl", "samples.jsonl", "status.json")
    ]
    assert json.loads((folder / "status.json").read_text()) == {"code": 0, "state": "done", "steps": 20}
    config = OmegaConf.load(folder / "config.yaml")
    assert config.trainer.total_steps == 20 and config.engine.dtype == "float32" and config.model.path == "tiny"
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step_000020"]
    samples = read_jsonl(folder / "samples.jsonl")
    assert len(samples) == 20 * config.trainer.sample_rows
    assert {"step", "prompt", "response", "reward"} <= samples[0].keys()
    assert "torchrun, rank 0 of 2" in printed and str(folder) in printed


@pytest.mark.spmd
def test_metrics(two_ranks):
    """The same keys in every step, nothing of a validation that is not there, and phases that add up."""
    table = read_jsonl(two_ranks[0] / "metrics.jsonl")
    assert [row["step"] for row in table] == list(range(1, 21))
    for row in table:
        assert row.keys() == KEYS | {"step"}
        assert None not in row.values()
        for kind in ("time", "cpu"):
            parts = sum(row[f"{kind}/{phase}"] for phase in PHASES - {"step"})
            assert parts == pytest.approx(row[f"{kind}/step"], abs=1e-6)
        assert row["perf/samples_per_second"] == pytest.approx(128 / row["time/step"])
        assert (
            row["actor/ratio_max"] == 1 and row["actor/clip_fraction"] == row["reward/failed"] == row["actor/nonfinite_steps"] == 0
        )
        assert row["rollout/logprob_diff_max"] < 1e-4 and row["rollout/probe_diff_max"] < 1e-4
        assert row["response/samples"] == 128 and row["response/tokens"] == pytest.approx(128 * row["response/length_mean"])


@pytest.mark.spmd
def test_plain_python(two_ranks, tmp_path):
    """One process without a launcher draws the same samples; keep=0 saves nothing."""
    printed = run([], tmp_path, "trainer.device=cpu", "trainer.total_steps=2", "trainer.keep=0")
    assert "python, rank 0 of 1" in printed
    assert json.loads((tmp_path / "status.json").read_text())["code"] == 0
    assert not (tmp_path / "checkpoints").exists()
    alone, together = read_jsonl(tmp_path / "metrics.jsonl"), read_jsonl(two_ranks[0] / "metrics.jsonl")
    assert len(alone) == 2
    for key in ("reward/mean", "response/length_mean", "actor/loss", "actor/grad_norm"):
        assert alone[0][key] == pytest.approx(together[0][key], rel=1e-5, abs=1e-6), key
