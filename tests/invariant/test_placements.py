"""One trajectory, wherever the roles live: on one rank, together on several, in two cells, three, or the critic in its own."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from spmd_rl.batch import Sampling, sample_seed
from spmd_rl.metrics import read_jsonl
from spmd_rl.models import resolve_model
from tests.invariant.test_layouts import COMMON, STEPS, check_metrics, check_parameters, check_rows
from tests.jobs import launch_jobs, metrics, rows, state
from tests.launch import ROOT, free_port, start_ranks, wait_ranks

SAVED = [*COMMON, "trainer.save_every=1", "trainer.keep=3"]  # so that each draw can be looked into
CLASSES = {
    "grpo": ["algorithm.kl_coef=0.1"],
    "ppo": [
        *("algorithm=ppo", "critic.optimizer.learning_rate=1e-5", "algorithm.kl_coef=0.01", "algorithm.kl_in_reward=true"),
        *("algorithm.kl_target=0.001", "algorithm.kl_horizon=100", "algorithm.epochs=2", "algorithm.num_mini_batches=2"),
    ],
}
PLACEMENTS = {  # name: (ranks, overrides, classes)
    "one": (1, [], ("grpo", "ppo")),
    "colocated2": (2, ["engine.shard_size=2"], ("grpo", "ppo")),
    "split22": (4, ["placement=split", "engine.shard_size=2", "debug.ledger=true"], ("grpo", "ppo")),
    "split112": (4, ["placement.actor=0", "placement.critic=1", "placement.rollout=2-3"], ("ppo",)),
    "three": (4, ["placement.actor=1/2", "placement.ref=1ranks", "placement.rollout=1ranks", "engine.shard_size=1"], ("grpo",)),
    "rollout_first": (3, ["placement.actor=2", "placement.ref=1", "placement.rollout=0"], ("grpo",)),
    "critic_between": (4, ["placement.actor=3", "placement.critic=1-2", "placement.ref=critic", "placement.rollout=0"], ("ppo",)),
}
PAIRS = [(name, place) for place, (_, _, names) in PLACEMENTS.items() for name in names if place != "one"]
ROUNDING = 1e-5  # a cumulative probability of two layouts may differ by this
HOW = Sampling(1.0, 4, 0, 8, ())


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(class, placement) -> run folder, of a launch each placement."""
    found = {}
    for place, (ranks, overrides, names) in PLACEMENTS.items():
        folder = tmp_path_factory.mktemp(place)
        said = launch_jobs(folder, ranks, {name: [*SAVED, *CLASSES[name], *overrides] for name in names})
        found |= {(name, place): folder / name for name in names}
        found["said", place] = said
    return found


def policy(run, step: int):
    """The model whose draws step `step` trains on."""
    model = AutoModelForCausalLM.from_pretrained(resolve_model("tiny"), dtype=torch.float32).eval()
    if step:
        saved = state(run, step)
        model.load_state_dict({name: saved[f"/model/lm.{name}"] for name, _ in model.named_parameters()}, strict=False)
    return model


@torch.no_grad()
def draws(model, step: int, row: tuple[int, int], fields: dict[str, torch.Tensor]) -> list[tuple[int, float]]:
    """Of each response token: what the sampler's number picks from the model's distribution, computed here by itself, and how
    far that number lies from where it would pick a neighbour, as a probability."""
    ids, prompt = fields["input_ids"], int(fields["prompt_lengths"])
    cumulative = model(ids[None]).logits[0, prompt - 1 : -1].double().softmax(-1).cumsum(-1)
    generator = torch.Generator().manual_seed(sample_seed(0, HOW, step, *row))
    uniforms = torch.zeros(HOW.max_tokens, dtype=torch.float64).uniform_(generator=generator)
    found = []
    for edges, u in zip(cumulative, uniforms):
        token = int((edges <= u).sum())
        inner = edges[:-1]  # the last one is 1, which no number reaches
        found.append((token, float((inner - u).abs().min())))
    return found


def boundary_draws(got_steps, want_steps, run, rounding: float = ROUNDING) -> list[tuple[int, tuple[int, int]]]:
    """(step, row) of the samples with other tokens. Asserts that the first other draw of each lies on a boundary."""
    near = []
    for step, (got, want) in enumerate(zip(got_steps, want_steps, strict=True)):
        differing = [row for row in want if not torch.equal(got[row]["input_ids"], want[row]["input_ids"])]
        model = policy(run, step) if differing else None
        for row in differing:
            prompt = int(want[row]["prompt_lengths"])
            pairs = zip(got[row]["input_ids"].tolist()[prompt:], want[row]["input_ids"].tolist()[prompt:])
            first = next(i for i, (a, b) in enumerate(pairs) if a != b)
            margin = draws(model, step, row, want[row])[first][1]
            assert margin <= rounding, f"step {step}, sample {row}: another token {first}, and its draw is {margin} from a boundary"
            near.append((step, row))
        if near:
            break  # what follows is trained on other samples
    return near


def check_others(got_steps, want_steps, near) -> None:
    """Up to the step of a draw on a boundary, and there without its group: tokens, rewards and advantages."""
    step, groups = near[0][0], {uid for _, (uid, _) in near}
    for at, (got, want) in enumerate(zip(got_steps[: step + 1], want_steps)):
        for row in want.keys() - ({r for r in want if r[0] in groups} if at == step else set()):
            assert torch.equal(got[row]["input_ids"], want[row]["input_ids"])
            for field in ("rewards", "advantages"):
                torch.testing.assert_close(got[row][field], want[row][field], atol=1e-6, rtol=1e-6)


@pytest.mark.spmd
@pytest.mark.parametrize("name,place", PAIRS)
def test_the_same_trajectory(runs, name, place):
    expected, run = runs[name, "one"], runs[name, place]
    found, wanted = rows(run), rows(expected)
    near = boundary_draws(found, wanted, expected)
    if near:
        assert len(near) == 1  # expected: none
        return check_others(found, wanted, near)
    check_rows(found, wanted)
    check_metrics(metrics(run), metrics(expected))
    for role in ("actor", "critic") if name == "ppo" else ("actor",):
        check_parameters(state(run, STEPS, role), state(expected, STEPS, role))


@pytest.mark.spmd
def test_draws_on_a_boundary_are_told_from_others(runs):
    """All draws of a run, computed anew: where a token could be another by rounding is known, and is rare."""
    run, near = runs["grpo", "one"], 0
    wanted = rows(run)
    for step, found in enumerate(wanted):
        model = policy(run, step)
        for row, fields in found.items():
            response = fields["input_ids"].tolist()[int(fields["prompt_lengths"]) :]
            for drawn, (token, margin) in zip(response, draws(model, step, row, fields), strict=True):
                near += margin <= ROUNDING
                assert drawn == token or margin <= ROUNDING, (step, row)
    assert near <= 8
    planted, row = copy.deepcopy(wanted), (17, 2)
    planted[2][row]["input_ids"][-1] += 1
    with pytest.raises(AssertionError, match=r"step 2, sample \(17, 2\): another token"):
        boundary_draws(planted, wanted, run)
    assert boundary_draws(planted, wanted, run, rounding=1.0) == [(2, row)]
    planted[2][17, 1]["rewards"] += 1  # of the same group
    check_others(planted, wanted, [(2, row)])
    planted[1][9, 0]["rewards"] += 1
    with pytest.raises(AssertionError):
        check_others(planted, wanted, [(2, row)])


@pytest.mark.spmd
def test_the_placements_differ_and_both_models_move(runs):
    """What would make the comparison empty."""
    for name, place in PAIRS:
        assert (metrics(runs[name, place])[-1]["traffic/weights_bytes"] > 0) == (place != "colocated2"), place
        trained = sum(1 for path in runs[name, place].glob("rank*.pt") if torch.load(path))
        assert trained == {"colocated2": 2, "split22": 2, "three": 2}.get(place, 1)
    assert "ranks 0 actor, ref; ranks 2-3 rollout; ranks 1 critic" in runs["said", "split112"].replace("\n", " ")
    first = load_file(f"{resolve_model('tiny')}/model.safetensors")
    for role in ("actor", "critic"):
        after = state(runs["ppo", "one"], STEPS, role)
        found = {key: after[f"/model/lm.{key}"] for key in first if key != "lm_head.weight"}  # the critic has none
        assert max(float((value - first[key]).abs().max()) for key, value in found.items()) > 1e-5


@pytest.mark.spmd
def test_the_same_trajectory_with_vllm(tmp_path):
    """One rank for all, against the actor on one rank and vLLM on the other."""
    for place, ranks, overrides in (("colocated", 1, []), ("split", 2, ["placement.actor=0", "placement.rollout=1"])):
        folder = tmp_path / place
        folder.mkdir()
        (folder / "jobs.json").write_text(json.dumps({"job": [*COMMON, "rollout=vllm", *overrides]}))
        started = start_ranks(["-m", "tests.jobs", str(folder)], ranks, folder)
        codes = wait_ranks(started, 300)
        assert codes == [0] * ranks, "\n".join(out.read_text()[-6000:] for _, out in started)
    one, two = tmp_path / "colocated" / "job", tmp_path / "split" / "job"
    check_rows(rows(two), rows(one))
    check_metrics(metrics(two), metrics(one))
    check_parameters(state(two, STEPS), state(one, STEPS))
    told = read_jsonl(two / "metrics.jsonl")
    assert all(0 < row["rollout/probe_diff_max"] < 1e-4 and row["traffic/weights_bytes"] > 0 for row in told)


@pytest.mark.spmd
@pytest.mark.network
def test_torchrun_with_the_pretrained_model_and_vllm_in_its_own_cell(tmp_path):
    """As a user types it: two replicas train, two sample a step ahead."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", "--master-port", str(free_port())),
        *("-m", "spmd_rl.train", "--config-name", "quickstart", "placement=split", "trainer.lookahead=1"),
        *("data.prompts_per_step=4", "rollout.n=4", "rollout.max_response_tokens=8", "trainer.total_steps=2", "trainer.keep=0"),
        *("trainer.val_before=false", "data.val_kwargs={split: val, size: 4}", "trainer.device=cpu", f"trainer.run_dir={tmp_path}"),
        "algorithm.entropy_coef=0.001",  # has a gradient also where no sample has a reward
    ]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    assert "ranks 0-1 actor; ranks 2-3 rollout" in done.stdout
    told = read_jsonl(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in told] == [1, 2] and json.loads((tmp_path / "status.json").read_text())["state"] == "done"
    assert all(row["actor/grad_norm"] > 0 and row["traffic/weights_bytes"] > 134e6 * 4 for row in told)
    assert told[0]["rollout/logprob_diff_max"] < 1e-3 and told[1]["rollout/logprob_diff_max"] is None
    assert told[1]["val/response/samples"] == 4
