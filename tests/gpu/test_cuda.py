"""What only a CUDA device can say. Run with `pytest -m gpu`."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from spmd_rl.batch import Sampling
from spmd_rl.config import ROLLOUTS, RolloutConfig, TimeoutConfig, resolve
from spmd_rl.engine.attention import NAME, register_attention
from spmd_rl.engine.packing import pack
from spmd_rl.launch import detect_launch
from spmd_rl.mesh import Role, close_world, open_store, split_world
from spmd_rl.roles.generation import Request, RolloutModel
from spmd_rl.roles.stage import Stage
from tests.helpers import make_rows, tiny_config, wide_model
from tests.launch import ROOT, spmd

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.device_count(), reason="needs a CUDA device")]


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


def check_sleep(name: str, folder: Path) -> None:
    """Asleep, its weights and cache leave the device; after a wake in two parts and an update it draws what it drew."""
    launch, timeouts = detect_launch(), TimeoutConfig()
    world = split_world({"rollout": Role((0,), 1)}, launch, open_store(launch, timeouts), "cuda", timeouts)
    model = wide_model("llama", False, folder)
    config = RolloutConfig(dtype="bfloat16", max_model_len=128, max_batch_rows=8, kv_cache_gb=1.0)
    backend = resolve(name, ROLLOUTS)(config, RolloutModel(str(folder), (2,)), world.meshes["rollout"])
    requests = [Request([5, 9, 33, 4, 60], seed, 0, 16) for seed in range(4)]

    def draw() -> list[list[int]]:
        backend.update_weights((n, p.detach().cuda()) for n, p in model.named_parameters())
        backend.wake_up("kv_cache")
        return [reply.ids for reply in backend.complete(requests, Sampling(0.0, 1, 0, 16, (2,)), None)]

    def taken() -> int:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return total - free

    awake = draw(), backend.memory(), taken()
    assert awake[1]["weights"] > 0 and awake[1]["kv_cache"] > (0.9e9 if name == "vllm" else -1)
    backend.sleep()
    assert backend.memory() == {"weights": 0, "kv_cache": 0}
    asleep = taken()
    assert asleep <= awake[2] - 0.9 * awake[1]["kv_cache"]
    backend.wake_up("weights")
    assert backend.memory() == {"weights": awake[1]["weights"], "kv_cache": 0}
    assert taken() < asleep + 0.5 * max(awake[1]["kv_cache"], 1e8)
    assert draw() == awake[0] and backend.memory() == awake[1]
    stage = Stage(1e6, 0, world.device, {"rollout": backend.memory})
    with pytest.raises(
        MemoryError, match=r"of cuda:0 are free(.|\n)*gpu_memory_utilization(.|\n)*rollout kv_cache(.|\n)*torch reserved"
    ):
        stage.watch("before phase 'generate'")
    assert 0 < stage.least < 1e4
    backend.shutdown()
    close_world(world)


@spmd(1)
def test_hf_sleeps_and_wakes(folder):
    check_sleep("hf", folder)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM")
@spmd(1)
def test_vllm_sleeps_and_wakes(folder):
    check_sleep("vllm", folder)


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs 4 CUDA devices")
def test_every_engine_is_at_parity_on_devices(tmp_path):
    options = ["--device", "cuda", "--quick", "--check", "--out", str(tmp_path / "parity")]
    command = [sys.executable, "-m", "benchmarks.parity", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
