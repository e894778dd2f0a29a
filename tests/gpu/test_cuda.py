"""What only a CUDA device can say. Run with `pytest -m gpu`."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from spmd_rl.engine.attention import NAME, register_attention
from spmd_rl.engine.packing import pack
from tests.helpers import make_rows, tiny_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_flex_attention_equals_the_host_path_forward_and_backward():
    register_attention()
    torch.manual_seed(0)
    host = AutoModelForCausalLM.from_config(tiny_config("qwen3"), attn_implementation=NAME)
    device = AutoModelForCausalLM.from_config(tiny_config("qwen3"), attn_implementation=NAME).cuda()
    device.load_state_dict(host.state_dict())
    batch = make_rows([(50, [40, 10, 70]), (90, [30, 30]), (2, [6])])
    outputs = []
    for model, where in ((host, "cpu"), (device, "cuda")):
        packed = pack(batch, True, 1, torch.device(where))
        hidden = model.base_model(
            input_ids=packed.input_ids, position_ids=packed.position_ids, use_cache=False, packed=packed
        ).last_hidden_state
        hidden.square().sum().backward()
        outputs.append(hidden.detach().cpu())
    assert (outputs[0] - outputs[1]).abs().max() < 1e-3
    for p, q in zip(host.parameters(), device.parameters()):
        if p.grad is not None:
            assert (p.grad - q.grad.cpu()).norm() < 1e-2 * p.grad.norm().clamp(min=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tiny_run_learns(tmp_path, dtype):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={min(2, torch.cuda.device_count())}",
    ]
    command += [
        "-m",
        "spmd_rl.train",
        "--config-name",
        "tiny",
        f"engine.dtype={dtype}",
        f"trainer.run_dir={tmp_path}",
        "trainer.device=cuda",
    ]
    subprocess.run(command, check=True, timeout=900)
    rewards = [json.loads(line)["reward/mean"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rewards[-1] > rewards[0] + 0.1
