"""Whole runs with each engine as actor, reference and critic: the trajectory of one rank of engine=fsdp, whatever trains."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from spmd_rl.metrics import read_jsonl
from tests.invariant.test_layouts import COMMON, STEPS, check_metrics, check_rows
from tests.jobs import launch_jobs, metrics, rows
from tests.launch import ROOT, free_port, start_ranks, wait_ranks
from tests.spmd.test_engine_contract import APART, BACKENDS

CLASSES = {
    "grpo": ["algorithm.kl_coef=0.1", "algorithm.entropy_coef=0.01", "algorithm.epochs=2", "algorithm.num_mini_batches=2"],
    "ppo": [
        *("algorithm=ppo", "critic.optimizer.learning_rate=1e-5", "algorithm.kl_coef=0.01", "algorithm.kl_in_reward=true"),
        *("critic.engine.backend=fsdp", "critic.engine.max_tokens_per_micro_batch=1024"),
    ],
    "ppo_own": ["algorithm=ppo", "critic.optimizer.learning_rate=1e-5"],  # the critic's engine is the actor's
}
TWO = {  # name: overrides, on 2 ranks that all roles share
    "fsdp": {"tp2": ["engine.tensor_parallel_size=2"], "ulysses2": ["engine.ulysses_size=2"]},
    "megatron": {
        "dp2": [],
        "tp2": ["engine.tensor_parallel_size=2", "engine.sequence_parallel=true"],
        "pp2": ["engine.pipeline_parallel_size=2"],
    },
    "torchtitan": {"fsdp2": [], "tp2": ["engine.tensor_parallel_size=2"], "pp2": ["engine.pipeline_parallel_size=2"]},
    "veomni": {"fsdp2": [], "ulysses2": ["engine.ulysses_size=2"]},
}
SPLIT = ["placement.actor=0-1", "placement.ref=2", "placement.rollout=2", "ref.engine.backend=fsdp"]
EXPORT = ["trainer.export_hf=true", "trainer.save_every=1", "trainer.keep=9"]
OTHERS = {b: TWO[b] for b in BACKENDS if b in TWO}


def classes(backend: str, layout: str) -> list[str]:
    """A critic of the actor's own engine once for each that trains one."""
    own = ["ppo_own"] if backend not in (APART, "fsdp") and layout in ("dp2", "tp2") else []
    return ["grpo", *own, *(["ppo"] if layout == next(iter(TWO[backend])) else [])]


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """class -> run folder, on one rank; "converted" goes on from the export of "grpo"."""
    folder = tmp_path_factory.mktemp("one")
    jobs = {name: [*COMMON, *EXPORT, *overrides] for name, overrides in CLASSES.items()}
    jobs["converted"] = converted(folder / "grpo")
    launch_jobs(folder, 1, jobs)
    return {name: folder / name for name in jobs}


def converted(run) -> list[str]:
    """A job of engine=fsdp whose model is what a run has exported."""
    return [*COMMON, "trainer.total_steps=1", f"model.path={run}/hf"]


@pytest.fixture(scope="module", params=OTHERS)
def runs(request, tmp_path_factory):
    """(class, layout) -> run folder of a backend, in one launch of 2 ranks; "resumed" goes on from a step of "grpo", "converted"
    from its export."""
    backend, jobs = request.param, {}
    folder = tmp_path_factory.mktemp(backend)
    for layout, overrides in TWO[backend].items():
        for name in classes(backend, layout):
            jobs[f"{name}-{layout}"] = [*COMMON, *EXPORT, *CLASSES[name], f"engine={backend}", *overrides]
        step = f"trainer.resume={folder}/grpo-{layout}/checkpoints/step_000002"
        jobs[f"resumed-{layout}"] = [*jobs[f"grpo-{layout}"], step]
        jobs[f"converted-{layout}"] = converted(folder / f"grpo-{layout}")
    launch_jobs(folder, 2, jobs)
    return {tuple(name.split("-")): folder / name for name in jobs}


def check_same(run, one) -> None:
    check_rows(rows(run), rows(one))
    check_metrics(metrics(run), metrics(one))
    check_export(run, one)


def exported(run) -> dict[str, torch.Tensor]:
    return {name: tensor for path in (run / "hf").glob("*.safetensors") for name, tensor in load_file(path).items()}


def check_export(run, one) -> None:
    got, want = exported(run), exported(one)
    assert got.keys() == want.keys() and len(got) > 10
    assert max(float((got[name] - want[name]).abs().max()) for name in want) <= 1e-6


@pytest.mark.spmd
def test_the_same_trajectory(runs, expected):
    for (name, layout), run in runs.items():
        if name in CLASSES:
            print(name, layout)
            check_same(run, expected[name])


@pytest.mark.spmd
def test_another_engine_goes_on_from_an_export(runs, expected):
    (want,) = metrics(expected["converted"])
    for (name, layout), run in runs.items():
        if name == "converted":
            (got,) = metrics(run)
            for key in ("reward/mean", "actor/loss", "actor/grad_norm"):
                assert got[key] == pytest.approx(want[key], rel=1e-4, abs=1e-5), (layout, key)


@pytest.mark.spmd
def test_a_resumed_run_goes_on_bitwise(runs):
    for (name, layout), run in runs.items():
        if name == "resumed":
            print(layout)
            whole = runs["grpo", layout]
            assert metrics(run) == metrics(whole)[2:]
            got, want = exported(run), exported(whole)
            assert all(torch.equal(got[key], want[key]) for key in want)


@pytest.mark.spmd
@pytest.mark.parametrize(
    "backend", [b if b == "megatron" else pytest.param(b, marks=pytest.mark.slow) for b in OTHERS if b != APART]
)
def test_two_ranks_train_and_vllm_samples_beside_them(backend, tmp_path):
    """Split: the actor in parallel on two ranks, reference and vLLM on a third; the proofs of each update hold."""
    layout, overrides = list(TWO[backend].items())[-1]
    job = [*COMMON, *EXPORT, *CLASSES["grpo"], f"engine={backend}", *overrides, *SPLIT, "rollout=vllm"]
    (tmp_path / "jobs.json").write_text(json.dumps({"job": job}))
    started = start_ranks(["-m", "tests.jobs", str(tmp_path)], 3, tmp_path)
    codes = wait_ranks(started, 300)
    assert codes == [0] * 3, "\n".join(out.read_text()[-6000:] for _, out in started)
    told = read_jsonl(tmp_path / "job" / "metrics.jsonl")
    assert len(told) == STEPS and all(row["actor/grad_norm"] > 0.01 for row in told)
    assert all(0 < row["rollout/probe_diff_max"] < 1e-4 and row["traffic/weights_bytes"] > 0 for row in told)
    assert all(row["rollout/logprob_diff_max"] < 1e-4 for row in told)


PRETRAINED = {
    "fsdp": ["engine=fsdp"],
    "megatron-dp2": ["engine=megatron"],
    "megatron-pp2": ["engine=megatron", "engine.pipeline_parallel_size=2"],
    "torchtitan-dp2": ["engine=torchtitan", "engine.shard_size=1"],
}


@pytest.mark.slow
@pytest.mark.spmd
@pytest.mark.network
def test_the_pretrained_model_by_each_engine(tmp_path):
    """As a user types it, with vLLM: the same samples and rewards as engine=fsdp, and what they train to."""
    told = {}
    for name, overrides in PRETRAINED.items():
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())),
            *("-m", "spmd_rl.train", "--config-name", "quickstart", "rollout.n=4", "rollout.max_response_tokens=8"),
            *("trainer.total_steps=2", "trainer.keep=0", "trainer.val_before=false", "trainer.eval_every=0", "data.val=null"),
            *("trainer.device=cpu", f"trainer.run_dir={tmp_path / name}", "algorithm.entropy_coef=0.001", *overrides),
        ]
        done = subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
        told[name] = metrics(tmp_path / name)
        print(name, [(row["reward/mean"], row["actor/grad_norm"], row["rollout/logprob_diff_max"]) for row in told[name]])
    for name, found in told.items():
        for got, want in zip(found, told["fsdp"], strict=True):
            assert got["reward/mean"] == pytest.approx(want["reward/mean"], abs=1e-6), name
            assert got["actor/grad_norm"] == pytest.approx(want["actor/grad_norm"], rel=1e-3), name
            assert got["rollout/logprob_diff_max"] < 1e-3
