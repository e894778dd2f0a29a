"""The README's main command, shortened: real weights, two ranks, a summary and a picture."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.network
def test_quickstart_shortened(tmp_path):
    env = os.environ | {"SPMD_RL_VENV": "none", "RUN_DIR": str(tmp_path / "run"), "SEED": "3"}
    short = ["trainer.total_steps=2", "data.prompts_per_step=4", "rollout.n=4", "data.val_kwargs.size=12", "trainer.export_hf=true"]
    done = subprocess.run(["bash", "launch/quickstart.sh", *short], cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert str(tmp_path / "run" / "curves.png") in done.stdout.replace("\n", "")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert {"accuracy_before", "accuracy_after", "seconds_train", "steps", "samples_per_second"} <= summary.keys()
    assert summary["steps"] == 2
    assert 0 <= summary["accuracy_before"] <= 1
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(row["rollout/logprob_diff_max"] < 1e-3 for row in rows[1:])
    assert rows[1]["actor/ratio_max"] == 1.0
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "hf")
    assert model.num_parameters() == 134_515_008
    assert AutoTokenizer.from_pretrained(tmp_path / "run" / "hf").eos_token == "<|im_end|>"
