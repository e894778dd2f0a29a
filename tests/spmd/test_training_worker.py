"""TrainingWorker on 2 and 3 ranks against one process of plain transformers, also where a rank has no rows."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from spmd_rl.batch import fields_of, make_batch
from spmd_rl.collectives import barrier, gather_objects, reduce_stats
from spmd_rl.config import AGGREGATIONS, AlgorithmConfig, OptimizerConfig, TimeoutConfig
from spmd_rl.engine.base import EngineModel
from spmd_rl.engine.fsdp import FSDPConfig
from spmd_rl.launch import detect_launch
from spmd_rl.losses import ppo_loss, sft_loss, value_loss
from spmd_rl.mesh import Role, World, close_world, open_store, split_world
from spmd_rl.metrics import Max, Mean, Sum
from spmd_rl.placed import Placed
from spmd_rl.roles.training_worker import TrainingWorker, TrainingWorkerConfig
from spmd_rl.trainer import has_advantage
from tests.forks import fork_ranks
from tests.helpers import make_rows, tiny_config

OPTIMIZER = OptimizerConfig(learning_rate=1e-3, weight_decay=0.1, clip_grad_norm=0.0, schedule="linear", total_steps=10)
STILL = replace(OPTIMIZER, learning_rate=0.0)  # its parameters stay, so that one worker serves many layouts
GROUPS = [(5, [4, 1, 7, 2]), (9, [3, 3]), (2, [6, 5, 1]), (3, [2, 5, 4])]
BUDGETS = (16, 31, 4096)  # tokens: about one row, a few, all


@pytest.mark.spmd
def test_on_two_ranks(tmp_path):
    fork_ranks("tests.spmd.test_training_worker:checks", tmp_path, 2)


@pytest.mark.spmd
def test_on_three_ranks(tmp_path):
    """Rank 2 never has a row."""
    fork_ranks("tests.spmd.test_training_worker:checks", tmp_path, 3)


def checks(folder: Path) -> None:
    launch, timeouts = detect_launch(), TimeoutConfig(collective=40, phase=40)
    ranks = tuple(range(launch.world_size))
    roles = {"actor": Role(ranks, len(ranks)), "lanes": Role(ranks, 1)}
    world = split_world(roles, launch, open_store(launch, timeouts), "cpu", timeouts)
    if world.rank == 0:
        torch.manual_seed(7)
        AutoModelForCausalLM.from_config(tiny_config("llama")).save_pretrained(folder)
    barrier(world.control, "model")
    for check in CHECKS:
        check(world, folder)
        barrier(world.control, check.__name__)
    close_world(world)


def algorithm_of(**options) -> AlgorithmConfig:
    return AlgorithmConfig(rollout_correction="off", **options)


def make(world: World, folder: Path, budget: int = 4096, mesh: str = "actor", **options) -> TrainingWorker:
    engine = FSDPConfig(dtype="float32", max_tokens_per_micro_batch=budget)
    model = EngineModel(str(folder), options.pop("model_type", "language_model"))
    config = {"name": "actor", "model": model, "engine": engine, "optimizer": OPTIMIZER, "infer_field": "old_log_probs"} | options
    return TrainingWorker(TrainingWorkerConfig(**config), world.meshes[mesh])


def adjust(worker: TrainingWorker, budget: int, **options) -> TrainingWorker:
    engine = replace(worker.config.engine, max_tokens_per_micro_batch=budget)
    worker.config = replace(worker.config, engine=engine, **options)
    return worker


def dealt(batch, world, owners=None):
    """Whole groups, group i on rank i % owners; further ranks have none."""
    mesh = world.meshes["actor"]
    owners = owners or min(2, world.size)
    return Placed(mesh, batch[batch.uid % owners == world.rank] if world.rank < owners else batch[:0])


def parameters(worker):
    return {name: full(p).clone() for name, p in worker.engine.module.named_parameters()}


def full(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def train(worker, batch, loss, keep=None):
    """(metrics of all ranks, {name: gradient}) of one real train_batch; no gradients where it took no step."""
    gradients, step = {}, worker.engine.optimizer_step

    def look_first():
        worker.engine.reduce_gradients()
        gradients.update({n: full(p.grad).clone() for n, p in worker.engine.module.named_parameters() if p.grad is not None})
        return step()

    worker.engine.optimizer_step = look_first
    stats = worker.train_batch(batch, loss, keep)
    worker.engine.optimizer_step = step
    return reduce_stats(stats, worker.mesh.data_group, "test"), gradients


def close(got, want, limit=1e-5):
    assert got.keys() == want.keys()
    for name, expected in want.items():
        error = float((got[name] - expected).norm() / expected.norm().clamp(min=1e-8))
        assert error <= limit, (name, error)


def reference(folder, batch, coefficients=None):
    """(log-probs [B, T], {name: gradient of sum(coefficients * log-probs)}) of each row alone in plain transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    out = torch.zeros(batch.input_ids.shape)
    for b, (ids, n) in enumerate(zip(batch.input_ids, batch.lengths.tolist())):
        logits = model(input_ids=ids[None, :n], use_cache=False).logits[0]
        out[b, 1:n] = logits.log_softmax(-1)[:-1].gather(1, ids[1:n, None])[:, 0]
    out = torch.where(batch.response_mask, out, 0.0)
    gradients = {}
    if coefficients is not None:
        (coefficients * out).sum().backward()
        gradients = {f"lm.{name}": p.grad for name, p in model.named_parameters()}
    return out.detach(), gradients


def given(output, data):
    """Each token's loss is given in `advantages`; its gradient is that of `advantages * log-prob`."""
    token_loss = data.advantages * (1 + output.log_probs - output.log_probs.detach())
    loss = torch.where(data.response_mask, data.token_weights * token_loss, 0.0).sum()
    return loss, {"given/loss": Sum(loss.detach()), "given/rows": Sum(len(data)), "given/tokens": Sum(data.response_mask.sum())}


def batch_of(groups, losses=None, seed=0):
    """Rows with `advantages`: the given losses of each row's response tokens, or random ones."""
    batch = make_rows(groups, seed)
    advantages = torch.randn(batch.input_ids.shape, generator=torch.Generator().manual_seed(seed + 1))
    if losses:
        advantages[batch.response_mask] = torch.tensor(sum(losses, [])).float()
    batch.advantages = torch.where(batch.response_mask, advantages, 0.0)
    return batch


def check_everything_masked(world, folder):
    """C01: loss 0, no step, parameters and optimizer bitwise as before in spite of weight decay; counted."""
    for aggregation in AGGREGATIONS:
        worker = make(world, folder, aggregation=aggregation, aggregation_length=4)
        batch = batch_of(GROUPS)
        train(worker, dealt(batch, world), given)
        before, moments = parameters(worker), [s["exp_avg"].clone() for s in worker.engine.optimizer.state.values()]
        batch.response_mask = torch.zeros_like(batch.response_mask)
        values, gradients = train(worker, dealt(batch, world), given)
        assert values["actor/skipped_steps"] == 1 and values["actor/rows_skipped"] == len(batch)
        assert values.get("given/loss", 0.0) == 0 and not gradients
        assert all(math.isfinite(value) for value in values.values())
        after = parameters(worker)
        assert all(torch.equal(after[name], value) for name, value in before.items())
        assert all(torch.equal(s["exp_avg"], m) for s, m in zip(worker.engine.optimizer.state.values(), moments))
        values, _ = train(worker, dealt(batch_of(GROUPS), world), given)
        assert values["actor/skipped_steps"] == 0 and math.isfinite(values["actor/grad_norm"])


def check_masked_rows(world, folder):
    """C02: a masked row, NaN in all that is masked, is no sequence and no token; also where it is all that a rank has."""
    batch = batch_of([(3, [2]), (4, [2])], [[2.0, 4.0], [9.0, 9.0]])
    batch.response_mask[1] = False
    batch.advantages[1] = math.nan
    worker = make(world, folder, optimizer=STILL)
    for aggregation, expected in (("token-mean", 3.0), ("seq-mean-token-mean", 3.0), ("seq-mean-token-sum", 6.0)):
        values, gradients = train(adjust(worker, 4096, aggregation=aggregation), dealt(batch, world), given)
        assert values["given/loss"] == pytest.approx(expected, abs=1e-6)
        assert values["given/tokens"] == 2 and all(g.isfinite().all() for g in gradients.values())


def check_one_normaliser(world, folder):
    """C03, C05, C08: any micro-batches, any ranks, one loss and one gradient."""
    batch = batch_of([(4, [2]), (3, [1]), (4, [4])], [[2.0, 4.0], [6.0], [1.0, 1.0, 1.0, 1.0]])
    lengths = batch.response_mask.sum(1, keepdim=True)
    expected = {
        "token-mean": (16 / 7, 1 / 7 + 0 * lengths),
        "seq-mean-token-mean": (10 / 3, 1 / 3 / lengths),
        "seq-mean-token-sum": (16 / 3, 1 / 3 + 0 * lengths),
        "seq-mean-token-sum-norm": (4 / 3, 1 / 12 + 0 * lengths),
    }
    assert expected.keys() == set(AGGREGATIONS)
    worker = make(world, folder, aggregation_length=4, optimizer=STILL)
    for aggregation, (loss, weights) in expected.items():
        _, gradients = reference(folder, batch, weights * batch.advantages)
        for budget in (8, 14, 4096):  # on one rank 3, 2 and 1 micro-batches
            for owners in (1, 2):
                updates = worker.engine.updates
                values, found = train(adjust(worker, budget, aggregation=aggregation), dealt(batch, world, owners), given)
                assert values["given/loss"] == pytest.approx(loss, abs=1e-6)
                close(found, gradients)
                norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))
                assert values["actor/grad_norm"] == pytest.approx(norm, rel=1e-5)
                if owners == 1:
                    assert values["actor/micro_batches"] == {8: 3, 14: 2, 4096: 1}[budget]
                assert worker.engine.updates == updates + 1  # not one a micro-batch


def check_ranks_of_unlike_size(world, folder):
    """C04: the mean over all tokens, and a rank without any."""
    worker = make(world, folder)
    batch = batch_of([(3, [4]), (2, [1])], [[1.0] * 4, [3.0]])
    values, _ = train(worker, dealt(batch, world), given)
    assert values["given/loss"] == pytest.approx(1.4, abs=1e-6)
    values, _ = train(worker, dealt(batch[:1], world), given)
    assert values["given/loss"] == pytest.approx(1.0, abs=1e-6)
    assert values["given/rows"] == 1 and values["given/tokens"] == 4
    assert values["actor/lr"] == pytest.approx(1e-3 * 0.9)  # the second update of linear decay over 10


def check_auxiliary_terms(world, folder):
    """C06: KL, entropy, negative log-likelihood and value loss do not know micro-batches; the gradient of all is one."""
    batch = batch_of(GROUPS)
    g = torch.Generator().manual_seed(5)
    log_probs, _ = reference(folder, batch)

    def near():
        return torch.where(batch.response_mask, log_probs + 0.3 * torch.randn(log_probs.shape, generator=g), 0.0)

    batch.old_log_probs, batch.ref_log_probs = near(), near()
    batch.values, batch.returns = torch.randn(log_probs.shape, generator=g), torch.randn(log_probs.shape, generator=g)
    algorithm = algorithm_of(kl_coef=0.1, entropy_coef=0.01)
    for loss, options in (
        (partial(ppo_loss, algorithm), {"with_entropy": True}),
        (partial(sft_loss, algorithm), {}),
        (partial(value_loss, algorithm), {"model_type": "value_model", "name": "critic"}),
    ):
        runs = []
        for budget in BUDGETS:
            worker = make(world, folder, budget, **options)
            if "model_type" in options:  # a head of zeros sends no gradient below it
                with torch.no_grad():
                    worker.engine.module.value_head.weight.fill_(0.1)
            runs.append((*train(worker, dealt(batch, world), loss), parameters(worker)))
        counts = [values.pop(next(k for k in values if k.endswith("micro_batches"))) for values, *_ in runs]
        assert counts[0] > counts[1] > counts[2]
        for values, gradients, after in runs[1:]:
            assert values == pytest.approx(runs[0][0], rel=1e-5, abs=1e-6)
            close(gradients, runs[0][1])
            assert all((after[name] - value).abs().max() < 1e-4 for name, value in runs[0][2].items())
    nll = torch.where(batch.response_mask, -log_probs, 0.0).sum() / batch.response_mask.sum()
    values, gradients = train(make(world, folder, 31), dealt(batch, world), partial(sft_loss, algorithm))
    assert values["sft/loss"] == pytest.approx(float(nll), rel=1e-5) == values["sft/nll"]
    close(gradients, reference(folder, batch, -batch.response_mask.float() / batch.response_mask.sum())[1])


def check_rows_skipped(world, folder):
    """Rows without an advantage count in the denominators and nowhere else; a rank of nothing else runs dummies."""
    batch = batch_of(GROUPS)
    loss = partial(ppo_loss, algorithm_of())
    worker = make(world, folder, 31, optimizer=STILL)
    for useless in (torch.tensor([0, 3]), torch.tensor([0]), torch.tensor([1, 3])):
        some = make_batch(fields_of(batch))
        some.advantages = torch.where(torch.isin(batch.uid, useless)[:, None], 0.0, batch.advantages)
        whole, gradients = train(worker, dealt(some, world), loss)
        values, found = train(worker, dealt(some, world), loss, has_advantage)
        assert whole["actor/rows_skipped"] == 0
        assert values["actor/rows_skipped"] == int(torch.isin(batch.uid, useless).sum())
        assert values["actor/loss"] == pytest.approx(whole["actor/loss"], abs=1e-6)
        close(found, gradients)
    some.advantages = torch.zeros_like(batch.advantages)
    worker = make(world, folder)
    before = parameters(worker)
    values, gradients = train(worker, dealt(some, world), loss, has_advantage)
    assert values["actor/skipped_steps"] == 1 and values["actor/rows_skipped"] == len(batch) and not gradients
    after = parameters(worker)
    assert all(torch.equal(after[name], value) for name, value in before.items())


def check_inference_order(world, folder):
    """Rows come back in the order they came, whatever was packed with what."""
    batch = batch_of(GROUPS)
    shuffled = batch[torch.randperm(len(batch), generator=torch.Generator().manual_seed(3))]
    worker = make(world, folder)
    for rows in (batch, shuffled):
        for budget in BUDGETS:
            placed = dealt(rows, world)
            out = adjust(worker, budget).infer_batch(placed).local
            assert torch.equal(out.input_ids, placed.local.input_ids) and torch.equal(out.sample, placed.local.sample)
            assert out.old_log_probs.shape == placed.local.input_ids.shape
            assert (out.old_log_probs - reference(folder, placed.local)[0]).abs().sum() < 1e-4
            assert len(out) or world.rank == 2


def check_first_ratio(world, folder):
    """C19: on fresh data the ratio is 1 and nothing is clipped; weights move from one pass of this loop to the next."""
    batch, worker = batch_of(GROUPS), make(world, folder)
    for budget in BUDGETS:
        for inferred in (False, True):
            adjust(worker, budget)
            placed = worker.infer_batch(dealt(batch, world)) if inferred else dealt(batch, world)
            values, _ = train(worker, placed, partial(ppo_loss, algorithm_of(clip_ratio=1e-4)))
            assert values["actor/ratio_max"] == pytest.approx(1.0, abs=1e-5 if inferred else 0.0)
            assert values["actor/clip_fraction"] == 0
            assert values["actor/approx_kl"] == pytest.approx(0.0, abs=1e-10 if inferred else 0.0)


def check_over_long_row(world, folder):
    """The error names the length, the budget and the key, before anything is computed."""
    worker = make(world, folder, budget=15)
    for act in (lambda b: worker.infer_batch(b), lambda b: worker.train_batch(b, given)):
        long = batch_of(GROUPS)[8:]  # on every rank, so that none waits for another
        long.lengths, long.prompt_lengths = long.lengths + 9, long.prompt_lengths + 9
        said = r"engine.max_tokens_per_micro_batch: .* over the budget of 15 - set at least 1[67]"
        with pytest.raises(ValueError, match=said):
            act(Placed(worker.mesh, long))


def check_counted_once_a_replica(world, folder):
    """Lanes of a replica see the same rows: one of them reports."""
    worker = make(world, folder, mesh="lanes")
    batch = batch_of(GROUPS)
    stats = worker.train_batch(Placed(worker.mesh, batch), given)
    assert bool(stats) == (world.rank == 0)
    values = reduce_stats(stats, world.control, "test")
    assert values["given/rows"] == len(batch) and values["given/tokens"] == int(batch.response_mask.sum())
    kinds = {key: type(stat) for key, stat in stats.items()}
    if stats:
        assert kinds["actor/grad_norm"] is kinds["actor/lr"] is Mean and kinds["actor/micro_batches"] is Max


def check_limits(world, folder):
    """A maximum over its limit on one rank, or NaN there: every rank raises the same, and nothing moved."""
    batch = batch_of(GROUPS)
    batch.rollout_log_probs = reference(folder, batch)[0]
    loss, name = partial(ppo_loss, algorithm_of()), "rollout/logprob_diff_max"
    worker = make(world, folder, 31)
    before = parameters(worker)
    for bad, found in ((0.25, r"0\.25"), (math.nan, "nan")):
        local = dealt(batch, world)
        if world.rank == 1:
            first = local.local.response_mask.nonzero()[0]
            local.local.rollout_log_probs[tuple(first)] += bad
        said = rf"{name} is {found}.*, over 0\.001: .*rollout\.max_logprob_diff .* 0 turns it off"
        with pytest.raises(RuntimeError, match=said) as error:
            worker.train_batch(local, loss, limits={name: 1e-3})
        assert len(set(gather_objects(str(error.value), worker.mesh.data_group, "test"))) == 1
        after = parameters(worker)
        assert all(torch.equal(after[key], value) for key, value in before.items())
        assert worker.engine.updates == 0 and not worker.engine.optimizer.state
    worker = make(world, folder, 31)
    stats = worker.train_batch(dealt(batch, world), loss, limits={name: 1e-3})
    assert 0 <= reduce_stats(stats, worker.mesh.data_group, "test")[name] < 1e-4 and worker.engine.updates == 1


def check_limits_reach_every_lane(world, folder):
    """The ranks of one replica agree too."""
    worker, batch = make(world, folder, mesh="lanes"), batch_of(GROUPS)
    batch.rollout_log_probs = reference(folder, batch)[0] + (0.5 if world.rank == 0 else 0.0)
    with pytest.raises(RuntimeError, match="over 0.1"):
        worker.train_batch(Placed(worker.mesh, batch), partial(ppo_loss, algorithm_of()), limits={"rollout/logprob_diff_max": 0.1})


CHECKS = [
    check_everything_masked,
    check_masked_rows,
    check_one_normaliser,
    check_ranks_of_unlike_size,
    check_auxiliary_terms,
    check_rows_skipped,
    check_limits,
    check_limits_reach_every_lane,
    check_inference_order,
    check_first_ratio,
    check_over_long_row,
    check_counted_once_a_replica,
]
