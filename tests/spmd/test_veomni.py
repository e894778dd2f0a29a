"""engine=veomni beyond the contract: its options, whole runs beside engine=fsdp, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.parity import Cell, make, measure, missed, prepare, share, start
from spmd_rl.config import Config, RolloutConfig
from spmd_rl.engine import veomni
from spmd_rl.mesh import close_world
from spmd_rl.train import resolve_auto
from spmd_rl.validation import validate
from tests.jobs import launch_jobs, metrics, rows
from tests.launch import spmd

needs_veomni = pytest.mark.skipif(
    find_spec("veomni") is None, reason="veomni is not installed here: bash launch/veomni.sh pytest tests/spmd/test_veomni.py"
)
KIND = "GQA + qk-norm"
OPTIONS = [
    {"activation_checkpointing": True, "shared_prompt": False, "logprob_chunk": 2, "ulysses_size": 2},
    {"offload": True, "reshard_after_forward": False},
]
THREE = ["trainer.total_steps=3", "trainer.sample_rows=64", "optimizer.learning_rate=1e-3"]
PPO = ["algorithm=ppo", "critic.engine={backend: fsdp}", "algorithm.kl_coef=0.1"]


@needs_veomni
@spmd(world_size=2)
def test_options_and_two_engines_in_a_process(folder):
    """Every option keeps the numbers; an engine of another layout, made in between, does not disturb the one before."""
    world = start({"1": 1, "2": 2}, 2)
    where, batch, expected = prepare(KIND, folder, world)
    for options in OPTIONS:
        cell = Cell("veomni", "options", 2, options, KIND)
        errors = measure(cell, where, world.meshes[str(options.get("ulysses_size", 1))], batch, expected)
        assert not missed({"cell": {"kind": KIND}, "errors": errors}), (options, errors)
    first = make("veomni", where, world.meshes["1"], trainable=False)
    make("veomni", where, world.meshes["2"], trainable=False, ulysses_size=2)
    micro = share(batch, world.meshes["1"], 4)
    with first.eval_mode():
        outputs = first.forward_backward_batch(micro, None, forward_only=True)
    for part, output in zip(micro, outputs):
        index = [int(((batch.uid == u) & (batch.sample == s)).nonzero()) for u, s in zip(part.uid, part.sample)]
        assert not index or float((output.log_probs - expected.log_probs[index]).abs().max()) < 1e-5
    close_world(world)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Folder of runs on 2 ranks: of both engines, of PPO with a critic of engine=fsdp, one stopped and resumed, and in other
    layouts."""
    folder = tmp_path_factory.mktemp("veomni")
    fsdp, ours = [*THREE, "engine=fsdp"], [*THREE, "engine=veomni"]
    half = [*ours, "trainer.save_every=1", "trainer.total_steps=2"]
    launch_jobs(folder, 2, {"fsdp": fsdp, "veomni": ours, "fsdp_ppo": [*fsdp, *PPO], "veomni_ppo": [*ours, *PPO], "resumed": half})
    launch_jobs(folder, 2, {"resumed": ours})
    launch_jobs(folder, 2, {"ulysses": [*ours, "engine.ulysses_size=2"]})
    (folder / "ulysses/rank1.pt").unlink()  # lane 1 trains on the rows of lane 0
    launch_jobs(folder, 2, {"split": [*ours, "placement=split"]})
    return folder


@needs_veomni
@pytest.mark.spmd
@pytest.mark.parametrize(
    ("ours", "other"), [("veomni", "fsdp"), ("ulysses", "fsdp"), ("split", "fsdp"), ("veomni_ppo", "fsdp_ppo")]
)
def test_a_run_is_that_of_fsdp(runs, ours, other):
    """The same samples, and metrics up to rounding."""
    for step, (got, want) in enumerate(zip(rows(runs / ours), rows(runs / other), strict=True)):
        assert got.keys() == want.keys()
        assert all(got[name]["input_ids"].tolist() == want[name]["input_ids"].tolist() for name in want), step
    for got, want in zip(metrics(runs / ours), metrics(runs / other), strict=True):
        own = {name: value for name, value in want.items() if not name.startswith("traffic/")}
        assert {name: got[name] for name in own} == pytest.approx(own, rel=1e-5, abs=1e-5)


@needs_veomni
@pytest.mark.spmd
def test_a_resumed_run_is_the_uninterrupted_one(runs):
    assert metrics(runs / "resumed") == metrics(runs / "veomni")


def configured(engine: veomni.VeOmniConfig, rollout: str = "hf") -> Config:
    config = resolve_auto(Config(engine=engine, rollout=RolloutConfig(backend=rollout)))
    return replace(config, trainer=replace(config.trainer, device="cpu"))


def test_vllm_beside_it_is_refused():
    """Both ranges of transformers are named."""
    problems = validate(configured(veomni.VeOmniConfig(backend="veomni"), "vllm"), 2)
    (line,) = (p for p in problems if p.startswith("rollout.backend: vllm needs transformers"))
    assert "5.16" in line and "5.9" in line and "rollout=hf" in line


@pytest.mark.parametrize("installed", [True, False])
def test_where_it_is_not_installed_the_script_is_named(monkeypatch, installed):
    monkeypatch.setattr(veomni, "find_spec", lambda name: installed or None)
    said = [line for line in veomni.problems(veomni.VeOmniConfig(), 2) if "launch/veomni.sh" in line]
    assert len(said) == (not installed)


@pytest.mark.parametrize(
    ("options", "model", "message"),
    [
        ({"ulysses_size": 3}, None, "engine.ulysses_size: 3 does not divide the 4 ranks - set one of [1, 2, 4]"),
        ({"shard_size": 3}, None, "set one of [1, 2, 4]"),
        ({"shard_size": 1, "ulysses_size": 2}, None, "no multiple of engine.ulysses_size (2) - set one of [2, 4]"),
        ({}, {"model_type": "gemma2"}, "not 'gemma2' - set a model of those, or engine=fsdp"),
        ({"ulysses_size": 2}, {"model_type": "llama", "num_attention_heads": 9}, "the model's 9 heads - set one of [1, 3, 9]"),
    ],
)
def test_what_it_cannot_do_is_named(monkeypatch, options, model, message):
    monkeypatch.setattr(veomni, "find_spec", lambda name: True)
    (line,) = veomni.problems(veomni.VeOmniConfig(**options), 4, model)
    assert line.startswith("engine.") and message in line


def test_its_layouts_have_no_problems(monkeypatch):
    monkeypatch.setattr(veomni, "find_spec", lambda name: True)
    for ranks, options in veomni.LAYOUTS.values():
        assert veomni.problems(veomni.VeOmniConfig(**options), ranks, {"model_type": "qwen3", "num_attention_heads": 4}) == []
