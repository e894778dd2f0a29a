"""One trajectory, whatever the number of ranks, the sharding, the micro-batches, the packing and the decoding batches."""

from __future__ import annotations

import pytest
import torch

from spmd_rl.models import resolve_model
from tests.jobs import launch_jobs, metrics, rows, state

STEPS = 3
COMMON = [f"trainer.total_steps={STEPS}", "optimizer.learning_rate=1e-5", "optimizer.weight_decay=0.01", "data.max_prompt_tokens=8"]
SMALL, LARGE = "engine.max_tokens_per_micro_batch=20", "engine.max_tokens_per_micro_batch=1024"  # a group of ours has 36 tokens
PLAIN = "engine.shared_prompt=false"
LAYOUTS = {  # name: (ranks, overrides)
    "one": (1, [LARGE]),
    "one_small": (1, [SMALL, PLAIN, "rollout.max_batch_rows=3", "engine.logprob_chunk=3"]),
    "two": (2, [LARGE, PLAIN, "engine.shard_size=1"]),
    "two_sharded": (2, [SMALL, "engine.shard_size=2"]),
    "four": (4, [LARGE, PLAIN, "engine.shard_size=1", "debug.ledger=true"]),
    "four_hsdp": (4, [SMALL, "engine.shard_size=2"]),
}
EACH = ("one", "two_sharded", "four_hsdp")
CLASSES = {  # name: (overrides, layouts that must give the same trajectory)
    "grpo": ([], tuple(LAYOUTS)),
    "kl_entropy_minibatches": (
        ["algorithm.kl_coef=0.1", "algorithm.entropy_coef=0.01", "algorithm.epochs=2", "algorithm.num_mini_batches=2"],
        (*EACH, "one_small"),
    ),
    "ppo_critic": (["algorithm=ppo", "critic.optimizer.learning_rate=1e-5"], EACH),
    "ppo_kl_in_reward": (
        [
            *("algorithm=ppo", "critic.optimizer.learning_rate=1e-5", "algorithm.kl_coef=0.01", "algorithm.kl_in_reward=true"),
            *("algorithm.kl_target=0.001", "algorithm.kl_horizon=100"),
        ],
        EACH,
    ),
    "reinforce_pp_seq_sum": (["algorithm=reinforce_plus_plus", "algorithm.aggregation=seq-mean-token-sum"], EACH[:2]),
    "gspo_seq_mean": (["algorithm=gspo", "algorithm.num_mini_batches=2"], EACH[:2]),
    "dr_grpo_constant": (["algorithm=dr_grpo", "algorithm.aggregation_length=8"], EACH[:2]),
}
COMPUTED = {"rollout_log_probs", "old_log_probs", "ref_log_probs", "values", "returns", "token_rewards"}
OF_THE_LAYOUT = ("actor/micro_batches", "critic/micro_batches", "traffic/batch_bytes", "traffic/weights_bytes")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(class, layout) -> run folder, of three launches."""
    jobs: dict[int, dict[str, list[str]]] = {}
    for name, (overrides, layouts) in CLASSES.items():
        for layout in layouts:
            ranks, more = LAYOUTS[layout]
            jobs.setdefault(ranks, {})[f"{name}-{layout}"] = [*COMMON, *overrides, *more]
    found = {}
    for ranks, of_ranks in jobs.items():
        folder = tmp_path_factory.mktemp(f"ranks{ranks}")
        launch_jobs(folder, ranks, of_ranks)
        found |= {tuple(name.split("-")): folder / name for name in of_ranks}
    return found


def parametrised():
    return [(name, other) for name, (_, layouts) in CLASSES.items() for other in layouts if other != layouts[0]]


@pytest.mark.spmd
@pytest.mark.parametrize("name,layout", parametrised())
def test_the_same_trajectory(runs, name, layout):
    expected, run = runs[name, CLASSES[name][1][0]], runs[name, layout]
    check_rows(rows(run), rows(expected))
    check_metrics(metrics(run), metrics(expected))
    for role in ("actor", "critic") if name.startswith("ppo") else ("actor",):
        check_parameters(state(run, STEPS, role), state(expected, STEPS, role))


def check_rows(found, expected):
    """Samples by name: the same tokens, since none of these draws lies within rounding of a boundary."""
    assert len(found) == len(expected) == STEPS
    for step, (got, want) in enumerate(zip(found, expected)):
        assert got.keys() == want.keys()
        assert {uid for uid, _ in got} == set(range(8 * step, 8 * step + 8))
        differing = [row for row in want if not torch.equal(got[row]["input_ids"], want[row]["input_ids"])]
        assert len(differing) == 0, f"step {step}: samples {differing} have other tokens"
        for row, fields in want.items():
            for field in ("response_mask", "prompt_lengths", "policy_version", "truncated"):
                assert torch.equal(got[row][field], fields[field]), (step, row, field)
            exact = {} if "token_rewards" in fields else {"atol": 0, "rtol": 0}  # a KL in the reward is computed
            torch.testing.assert_close(got[row]["rewards"], fields["rewards"], **({"atol": 1e-6, "rtol": 0} | exact))
            torch.testing.assert_close(got[row]["advantages"], fields["advantages"], atol=1e-6, rtol=1e-6)
            for field in fields.keys() & COMPUTED:
                torch.testing.assert_close(got[row][field], fields[field], atol=1e-5, rtol=0, msg=f"{step} {row} {field}")


def check_metrics(found, expected):
    assert len(found) == len(expected) == STEPS
    for got, want in zip(found, expected):
        assert got.keys() == want.keys()
        for key in want.keys() - set(OF_THE_LAYOUT):
            limits = {"rel": 1e-5, "abs": 0} if key.endswith("grad_norm") else {"rel": 0, "abs": 1e-5}
            assert got[key] == pytest.approx(want[key], **limits), (want["step"], key)
        assert want["actor/grad_norm"] > 0.01


def check_parameters(found, expected):
    assert found.keys() == expected.keys()
    names = [name for name in expected if name.startswith("/model/")]
    assert len(names) >= 21
    for name in names:
        assert (found[name] - expected[name]).abs().max() <= 1e-6, name


@pytest.mark.spmd
def test_the_layouts_differ_and_the_parameters_move(runs):
    """What would make the comparison empty."""
    from safetensors.torch import load_file

    micro_batches = {layout: metrics(runs["grpo", layout])[0]["actor/micro_batches"] for layout in LAYOUTS}
    assert micro_batches["one"] == 1 and micro_batches["one_small"] >= 16 and micro_batches["four_hsdp"] >= 4
    first = load_file(f"{resolve_model('tiny')}/model.safetensors")
    for name in CLASSES:
        after = state(runs[name, "one"], STEPS)
        moved = max(float((after[f"/model/lm.{key}"] - value).abs().max()) for key, value in first.items())
        assert moved > 1e-5, name
    trajectories = {tuple(row["actor/loss"] for row in metrics(runs[name, "one"])) for name in CLASSES}
    assert len(trajectories) == len(CLASSES)
