from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from spmd_rl.batch import Batch, TokenOutput
from spmd_rl.config import AGGREGATIONS, CORRECTIONS, AlgorithmConfig
from spmd_rl.losses import (
    correction_weights,
    denominators,
    gspo_term,
    kl_estimate,
    ppo_loss,
    ppo_term,
    sft_loss,
    token_weights,
    value_loss,
)
from spmd_rl.metrics import Max, Mean

NAN, INF = math.nan, math.inf
BAD = (NAN, INF, -INF, -1000.0)
ACTIVE = CORRECTIONS[2:]  # neither auto nor off
SAMPLED = [0.5, 1.0, 3.0]  # C22: ratio of the trainer to the rollout


def algorithm(**options) -> AlgorithmConfig:
    return AlgorithmConfig(**{"rollout_correction": "off", **options})


def make_batch(mask: Tensor, aggregation: str = "token-mean", length: int | None = None, **fields: Tensor) -> Batch:
    rows, tokens = mask.shape
    ints, grid = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, tokens, dtype=torch.int64)
    fields.setdefault("token_weights", token_weights(mask, denominators(mask), aggregation, length))
    return Batch(
        input_ids=grid, prompt_lengths=ints, lengths=ints, response_mask=mask, uid=ints, sample=ints, row=ints,
        data_source=ints, policy_version=grid.int(), truncated=ints.bool(), temperature=ints.float(), batch_size=[rows],
        **fields,
    )  # fmt: skip


def ragged(*rows: list[float], pad: float = 0.0) -> tuple[Tensor, Tensor]:
    """([B, T] values, [B, T] mask) of rows of unequal length."""
    width = max(map(len, rows))
    values = torch.tensor([row + [pad] * (width - len(row)) for row in rows])
    mask = [[True] * len(row) + [False] * (width - len(row)) for row in rows]
    return values, torch.tensor(mask, dtype=torch.bool)


def nll_loss(losses: Tensor, data: Batch) -> tuple[float, Tensor]:
    """The aggregate of given token losses, through sft_loss, and its gradient."""
    log_probs = (-losses).requires_grad_()
    loss, _ = sft_loss(algorithm(), TokenOutput(log_probs=log_probs), data)
    loss.backward()
    return loss.item(), log_probs.grad


def rich_case(rows: int = 4, tokens: int = 6) -> tuple[Batch, TokenOutput]:
    generator = torch.Generator().manual_seed(0)
    fields = ("advantages", "old_log_probs", "ref_log_probs", "rollout_log_probs", "values", "returns")
    mask = torch.rand(rows, tokens, generator=generator) > 0.4
    data = make_batch(mask, **{name: torch.randn(rows, tokens, generator=generator) for name in fields})
    output = [torch.randn(rows, tokens, generator=generator) for _ in range(3)]
    return data, TokenOutput(output[0], output[1].abs(), output[2])


RICH = algorithm(kl_coef=0.1, entropy_coef=0.01, dual_clip=3.0, rollout_correction="sequence-truncate")


def run(loss_function, config: AlgorithmConfig, output: TokenOutput, data: Batch):
    """(loss, stats, gradients of every field of the output)."""
    leaves = [x.clone().requires_grad_() for x in (output.log_probs, output.entropy, output.values)]
    loss, stats = loss_function(config, TokenOutput(*leaves), data)
    loss.backward()
    return loss.detach(), stats, [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_all_masked_is_exactly_zero(aggregation):  # C01
    data = make_batch(torch.zeros(2, 2, dtype=torch.bool), aggregation, 4)
    loss, grad = nll_loss(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), data)
    assert loss == 0.0 and torch.equal(grad, torch.zeros(2, 2))


@pytest.mark.parametrize("sequences, token_mean, token_sum", [(1, 3.0, 6.0), (2, 1.5, 3.0)])
def test_one_masked_row(sequences, token_mean, token_sum):  # C02
    losses, mask = torch.tensor([[2.0, 4.0], [9.0, 9.0]]), torch.tensor([[True, True], [False, False]])
    totals = torch.tensor([2.0, sequences], dtype=torch.float64)
    expected = {"token-mean": 3.0, "seq-mean-token-mean": token_mean, "seq-mean-token-sum": token_sum}
    for aggregation, value in expected.items():
        data = make_batch(mask, token_weights=token_weights(mask, totals, aggregation))
        assert nll_loss(losses, data)[0] == pytest.approx(value)
    assert denominators(mask).tolist() == [2.0, 1.0]


@pytest.mark.parametrize(
    "aggregation, expected",
    [
        ("token-mean", 2.2857143),
        ("seq-mean-token-mean", 3.3333333),
        ("seq-mean-token-sum", 5.3333333),
        ("seq-mean-token-sum-norm", 1.3333333),
    ],
)
def test_aggregation_and_micro_batches(aggregation, expected):  # C03, C05
    losses, mask = ragged([2.0, 4.0], [6.0], [1.0, 1.0, 1.0, 1.0], pad=NAN)
    data = make_batch(mask, aggregation, 4)
    loss, grad = nll_loss(losses, data)
    assert loss == pytest.approx(expected, abs=1e-6)
    parts = [nll_loss(losses[i : i + 1], data[i : i + 1]) for i in range(3)]
    assert sum(part[0] for part in parts) == pytest.approx(expected, abs=1e-6)
    assert torch.equal(torch.cat([part[1] for part in parts]), grad)


@pytest.mark.parametrize(
    "ranks, aggregation, expected",
    [
        ([[[1.0] * 4], [[3.0]]], "token-mean", 1.4),
        ([[[1.0] * 4], [[]]], "token-mean", 1.0),
        ([[[1.0]] * 8] * 4, "seq-mean-token-mean", 1.0),
    ],
)
def test_data_parallel_sum(ranks, aggregation, expected):  # C04, C05
    shards = [ragged(*rows) for rows in ranks]
    totals = sum(denominators(mask) for _, mask in shards)
    weights = [token_weights(mask, totals, aggregation) for _, mask in shards]
    total = sum(nll_loss(x, make_batch(m, token_weights=w))[0] for (x, m), w in zip(shards, weights, strict=True))
    assert total == pytest.approx(expected)


def test_norm_is_the_constant_not_the_padded_width():  # C05
    narrow, wide = torch.tensor([[True, True]]), torch.tensor([[True, True] + [False] * 6])
    for mask in (narrow, wide):
        weights = token_weights(mask, denominators(mask), "seq-mean-token-sum-norm", 4)
        assert weights.dtype == torch.float32 and weights.sum().item() == pytest.approx(0.5)


def test_aggregation_errors():
    mask = torch.ones(1, 1, dtype=torch.bool)
    with pytest.raises(ValueError, match="token-mena.*did you mean 'token-mean'"):
        token_weights(mask, denominators(mask), "token-mena")
    for length in (None, 0, -1):
        with pytest.raises(ValueError, match="aggregation_length"):
            token_weights(mask, denominators(mask), "seq-mean-token-sum-norm", length)


@pytest.mark.parametrize("loss_function", [ppo_loss, value_loss, sft_loss])
@pytest.mark.parametrize("pieces", [2, 4])
def test_every_term_is_invariant_to_micro_batches(loss_function, pieces):  # C06
    data, output = rich_case()
    loss, stats, grads = run(loss_function, RICH, output, data)
    size = 4 // pieces
    cuts = [slice(i, i + size) for i in range(0, 4, size)]
    fields = output.log_probs, output.entropy, output.values
    parts = [run(loss_function, RICH, TokenOutput(*(x[cut] for x in fields)), data[cut]) for cut in cuts]
    torch.testing.assert_close(sum(part[0] for part in parts), loss)
    for i, grad in enumerate(grads):
        torch.testing.assert_close(torch.cat([part[2][i] for part in parts]), grad)
    for name, stat in stats.items():
        if isinstance(stat, Mean):
            torch.testing.assert_close(sum(part[1][name].total for part in parts), stat.total)
            assert sum(part[1][name].count for part in parts) == stat.count == data.response_mask.sum()
        elif isinstance(stat, Max):
            assert max(part[1][name].value for part in parts) == stat.value
        else:
            torch.testing.assert_close(sum(part[1][name].value for part in parts), stat.value)


@pytest.mark.parametrize("options", [
    *({"policy_loss": name} for name in ("ppo", "gspo")), *({"rollout_correction": name} for name in ACTIVE)])  # fmt: skip
@pytest.mark.parametrize("loss_function", [ppo_loss, value_loss, sft_loss])
@pytest.mark.parametrize("bad", BAD)
def test_masked_positions_have_no_effect(loss_function, options, bad):  # C09, C21, C22
    config = algorithm(kl_coef=0.1, entropy_coef=0.01, **options)
    data, output = rich_case()
    expected = run(loss_function, config, output, data)
    mask = data.response_mask
    names = ("advantages", "old_log_probs", "ref_log_probs", "rollout_log_probs", "values", "returns", "token_weights")
    poisoned = {name: torch.where(mask, data.get(name), bad) for name in names}
    fields = [torch.where(mask, x, bad) for x in (output.log_probs, output.entropy, output.values)]
    loss, stats, grads = run(loss_function, config, TokenOutput(*fields), data.replace(**poisoned))
    assert torch.equal(loss, expected[0]) and stats == expected[1]
    assert all(torch.equal(a, b) for a, b in zip(grads, expected[2], strict=True))
    assert all((grad[~mask] == 0).all() for grad in grads)


@pytest.mark.parametrize("loss_function", [ppo_loss, value_loss, sft_loss])
def test_zero_rows_keep_the_graph_and_the_keys(loss_function):
    data, output = rich_case()
    _, full, _ = run(loss_function, RICH, output, data)
    empty = TokenOutput(output.log_probs[:0], output.entropy[:0], output.values[:0])
    loss, stats, grads = run(loss_function, RICH, empty, data[:0])
    assert loss == 0 and grads[0].shape == (0, 6)
    assert list(stats) == list(full) and [type(s) for s in stats.values()] == [type(s) for s in full.values()]
    for stat in stats.values():
        if isinstance(stat, Mean):
            assert (stat.total, stat.count) == (0, 0)
        else:
            assert stat.value == (-INF if isinstance(stat, Max) else 0)


def test_ppo_keys():
    data, output = rich_case()
    actor = {f"actor/{name}" for name in "loss clip_fraction ratio_max approx_kl kl_ref entropy".split()}
    agreement = {f"rollout/{name}" for name in "logprob_diff_mean logprob_diff_max kl".split()}
    correction = {f"rollout/{name}" for name in "correction_mean correction_clipped_fraction".split()}
    assert set(ppo_loss(RICH, output, data)[1]) == actor | agreement | correction
    off = replace(RICH, rollout_correction="off")
    assert set(ppo_loss(off, output, data)[1]) == actor | agreement
    assert set(ppo_loss(off, output, data.replace(rollout_log_probs=None))[1]) == actor


@pytest.mark.parametrize("value, old, target, clip, expected", [
    (0.9, 0.5, 0.0, 0.2, 0.405), (0.9, 0.3, 1.0, 0.2, 0.125), (0.9, 0.3, 1.0, None, 0.005)])  # fmt: skip
def test_value_loss(value, old, target, clip, expected):  # C09
    data = make_batch(torch.tensor([[True]]), values=torch.tensor([[old]]), returns=torch.tensor([[target]]))
    output = TokenOutput(values=torch.tensor([[value]]))
    loss, stats = value_loss(algorithm(value_clip=clip), output, data)
    assert loss.item() == pytest.approx(expected, abs=1e-6)
    assert stats["critic/clip_fraction"].total == (1 if expected == 0.125 else 0)


@pytest.mark.parametrize("policy_loss", ["ppo", "gspo"])
def test_fresh_data_has_ratio_one_and_the_policy_gradient(policy_loss):  # C19
    data, output = rich_case()
    fresh = data.replace(old_log_probs=None, ref_log_probs=output.log_probs.clone())
    config = algorithm(policy_loss=policy_loss, aggregation="seq-mean-token-mean")
    loss, stats, grads = run(ppo_loss, config, output, fresh)
    mask = data.response_mask
    assert stats["actor/ratio_max"].value == 1
    for name in ("clip_fraction", "approx_kl", "kl_ref"):
        assert stats[f"actor/{name}"].total == 0
    torch.testing.assert_close(loss, -(data.token_weights * data.advantages)[mask].sum())
    if policy_loss == "ppo":
        torch.testing.assert_close(grads[0], torch.where(mask, -data.token_weights * data.advantages, 0.0))
    explicit = run(ppo_loss, config, output, fresh.replace(old_log_probs=output.log_probs.clone()))
    assert torch.equal(explicit[0], loss) and torch.equal(explicit[2][0], grads[0])


def test_entropy_and_rollout_difference():  # C19
    mask = torch.tensor([[False, True, True]])
    log_probs = torch.tensor([[0.0, -0.4076060, -0.1429316]])
    data = make_batch(mask, advantages=torch.zeros(1, 3), rollout_log_probs=torch.tensor([[5.0, -0.5, -0.1429316]]))
    entropy = torch.tensor([[9.0, 0.8323956, 1.3862944]])
    loss, stats = ppo_loss(algorithm(entropy_coef=0.5), TokenOutput(log_probs, entropy), data)
    assert loss.item() == pytest.approx(-0.5 * (0.8323956 + 1.3862944) / 2, abs=1e-6)
    assert stats["actor/entropy"].total.item() == pytest.approx(2.21869, abs=1e-6)
    assert stats["rollout/logprob_diff_mean"].total.item() == pytest.approx(0.092394, abs=1e-6)
    assert stats["rollout/logprob_diff_max"].value.item() == pytest.approx(0.092394, abs=1e-6)


@pytest.mark.parametrize("kind, d, expected", [
    ("k1", 0.5, 0.5), ("k2", 0.5, 0.125), ("k3", 0.5, 0.1065307), ("k3", -0.5, 0.1487213), ("k3", 1.0, 0.3678794),
    ("k3", -1.0, 0.7182818), ("k1", 0.0, 0.0), ("k2", 0.0, 0.0), ("k3", 0.0, 0.0)])  # fmt: skip
def test_kl_values(kind, d, expected):  # C21
    assert kl_estimate(torch.tensor(d), kind).item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("kind", ["k2", "k3"])
@pytest.mark.parametrize("d", [100.0, -100.0, 1000.0, -1000.0])
def test_kl_is_finite_far_away(kind, d):  # C21
    x = torch.tensor(d, requires_grad=True)
    value = kl_estimate(x, kind)
    value.backward()
    assert 0 <= value.item() < INF and math.isfinite(x.grad)
    assert x.grad * d >= 0, "the gradient must not push further away"


def test_k3_has_no_gradient_at_zero_and_unknown_kind_is_named():  # C21
    x = torch.zeros((), requires_grad=True)
    kl_estimate(x, "k3").backward()
    assert x.grad == 0
    with pytest.raises(ValueError, match="kl_type: unknown 'k4'"):
        kl_estimate(x, "k4")


def test_a_kl_in_the_reward_is_not_in_the_loss():
    data, output = rich_case()
    expected = run(ppo_loss, algorithm(), output, data)
    for kl_coef in (None, 0.3):
        loss, stats, grads = run(partial(ppo_loss, kl_coef=kl_coef), algorithm(kl_coef=0.1, kl_in_reward=True), output, data)
        assert torch.equal(loss, expected[0]) and torch.equal(grads[0], expected[2][0])
        assert stats["actor/kl_ref"].total > 0  # still measured
    both = run(ppo_loss, algorithm(kl_coef=0.1), output, data)
    assert not torch.equal(both[0], expected[0])
    explicit = run(ppo_loss, algorithm(kl_coef=0.1, kl_type="k3"), output, data)
    assert torch.equal(both[0], explicit[0])  # auto


def test_approx_kl_is_that_of_old_to_new():
    data = make_batch(torch.tensor([[True]]), advantages=torch.ones(1, 1), old_log_probs=torch.tensor([[-1.5]]))
    _, stats = ppo_loss(algorithm(), TokenOutput(torch.tensor([[-1.0]])), data)
    assert stats["actor/approx_kl"].total.item() == pytest.approx(math.exp(0.5) - 1.5, abs=1e-6)


def test_kl_coefficient_argument_overrides_config():
    mask = torch.tensor([[True]])
    data = make_batch(mask, advantages=torch.zeros(1, 1), ref_log_probs=torch.tensor([[-1.5]]))
    output = TokenOutput(torch.tensor([[-1.0]]))
    loss = lambda config, **kw: ppo_loss(config, output, data, **kw)[0].item()  # noqa: E731
    assert loss(algorithm()) == 0
    assert loss(algorithm(kl_coef=2.0)) == pytest.approx(2 * 0.1065307, abs=1e-6)
    assert loss(algorithm(kl_coef=2.0, kl_type="k2")) == pytest.approx(0.25)
    assert loss(algorithm(kl_coef=2.0), kl_coef=0.0) == 0
    assert loss(algorithm(), kl_coef=1.0) == pytest.approx(0.1065307, abs=1e-6)


@pytest.mark.parametrize("policy_loss", ["ppo", "gspo"])
@pytest.mark.parametrize("new", [-1000.0, -INF, NAN])
def test_zero_advantage_has_no_effect(policy_loss, new):  # C21, C22
    data = make_batch(
        torch.ones(2, 2, dtype=torch.bool),
        advantages=torch.tensor([[1.0, 1.0], [0.0, 0.0]]),
        old_log_probs=torch.tensor([[-1.0, -2.0], [-1.0, -100.0]]),
    )
    config = algorithm(policy_loss=policy_loss)
    results = []
    for log_probs in ([[-1.1, -2.0], [-1.0, -1.0]], [[-1.1, -2.0], [-1.0, new]]):
        leaf = torch.tensor(log_probs, requires_grad=True)
        loss, _ = ppo_loss(config, TokenOutput(leaf), data)
        loss.backward()
        results.append((loss, leaf.grad))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
    assert (results[1][1][1] == 0).all() and (results[1][1][0] != 0).all()


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("distance", [99.0, 1000.0, -1000.0, -INF])
def test_huge_ratio_stays_finite(advantage, distance):  # C22
    leaf = torch.tensor([[distance]], requires_grad=True)
    mask = torch.tensor([[True]])
    token_loss, stats = ppo_term(algorithm(), leaf, torch.tensor([[advantage]]), mask)
    token_loss.sum().backward()
    assert token_loss.isfinite().all() and leaf.grad.isfinite().all()
    assert math.isfinite(stats["actor/ratio_max"].value)


@pytest.mark.parametrize("advantage, ratio, overrides, expected", [
    (1.0, 1.5, {}, -1.28), (1.0, 1.25, {}, -1.25), (1.0, 0.5, {}, -0.5), (-1.0, 0.7, {}, 0.8), (-1.0, 0.85, {}, 0.85),
    (1.0, 1.25, {"clip_ratio_high": None}, -1.2), (-1.0, 5.0, {"dual_clip": 3.0}, 3.0), (-1.0, 5.0, {}, 5.0),
    (1.0, 5.0, {"dual_clip": 1.1}, -1.28), (1.0, 1.25, {"clip_ratio": 0.1, "clip_ratio_high": None}, -1.1),
    (-1.0, 0.85, {"clip_ratio": 0.1}, 0.9)])  # fmt: skip
def test_clipped_surrogate(advantage, ratio, overrides, expected):  # C22
    config = algorithm(**{"clip_ratio": 0.2, "clip_ratio_high": 0.28, **overrides})
    leaf = torch.tensor([[math.log(ratio)]], requires_grad=True)
    token_loss, stats = ppo_term(config, leaf, torch.tensor([[advantage]]), torch.tensor([[True]]))
    token_loss.sum().backward()
    clipped = not math.isclose(expected, -advantage * ratio)
    assert token_loss.item() == pytest.approx(expected, abs=1e-6)
    assert leaf.grad.item() == pytest.approx(0.0 if clipped else -advantage * ratio, abs=1e-6)
    assert stats["actor/clip_fraction"] == Mean(clipped, 1)
    assert stats["actor/ratio_max"].value.item() == pytest.approx(ratio, abs=1e-6)


@pytest.mark.parametrize("masked", [0.4, NAN, INF])
def test_gspo_is_the_masked_mean_broadcast(masked):  # C22
    leaf = torch.tensor([[0.3, -0.1, masked]], requires_grad=True)
    mask = torch.tensor([[True, True, False]])
    config = algorithm(clip_ratio=0.2)
    token_loss, stats = gspo_term(config, leaf, torch.tensor([[1.0, 1.0, NAN]]), mask)
    assert token_loss.tolist() == [pytest.approx([-1.1051709, -1.1051709, 0.0], abs=1e-6)]
    assert stats["actor/ratio_max"].value.item() == pytest.approx(1.1051709, abs=1e-6)
    token_loss.sum().backward()
    assert leaf.grad.tolist() == [pytest.approx([-1.1051709, -1.1051709, 0.0], abs=1e-6)]


def unclipped_term(config, log_ratio, advantages, mask):
    return -advantages * log_ratio.exp(), {}


@pytest.mark.parametrize("bad", [NAN, -1000.0])
def test_a_policy_loss_of_the_users_own(bad):
    data, output = rich_case()
    mask = data.response_mask
    poisoned = data.replace(old_log_probs=torch.where(mask, data.old_log_probs, bad))
    loss, _, grads = run(ppo_loss, algorithm(policy_loss=f"{__name__}:unclipped_term"), output, poisoned)
    ratio = (output.log_probs - data.old_log_probs).exp()
    expected = torch.where(mask, -data.token_weights * data.advantages * ratio, 0.0)
    torch.testing.assert_close(loss, expected.sum())
    torch.testing.assert_close(grads[0], expected)


@pytest.mark.parametrize("loss_function, field", [
    (ppo_loss, "advantages"), (ppo_loss, "token_weights"), (ppo_loss, "ref_log_probs"), (ppo_loss, "rollout_log_probs"),
    (value_loss, "returns"), (value_loss, "values"), (sft_loss, "token_weights")])  # fmt: skip
def test_absent_field_is_named(loss_function, field):
    data, output = rich_case()
    with pytest.raises(ValueError, match=f"{field} is None"):
        loss_function(RICH, output, data.replace(**{field: None}))


def test_absent_entropy_is_named():
    data, output = rich_case()
    with pytest.raises(ValueError, match="entropy is None"):
        ppo_loss(RICH, TokenOutput(output.log_probs), data)


def sampled(padding: float = 0.0) -> tuple[Batch, Tensor]:
    """The tokens of C22 with a masked one between them, rollout log-prob 0, and the old log-probs that make the ratios."""
    mask = torch.tensor([[True, True, False, True]])
    old = torch.tensor([[*torch.tensor(SAMPLED[:2]).log(), padding, math.log(3)]])
    rollout = torch.tensor([[0.0, 0.0, padding, 0.0]])
    return make_batch(mask, advantages=torch.tensor([[1.0, -2.0, padding, 3.0]]), rollout_log_probs=rollout), old


@pytest.mark.parametrize("kind, cap, weights, cut", [
    ("token-truncate", 2.0, [0.5, 1.0, 2.0], [0, 0, 1]), ("token-mask", 2.0, [0.5, 1.0, 0.0], [0, 0, 1]),
    ("token-mask", 1.9, [0.0, 1.0, 0.0], [1, 0, 1]), ("token-truncate", 4.0, SAMPLED, [0, 0, 0]),
    ("sequence-truncate", 2.0, [1.5] * 3, [0] * 3), ("sequence-truncate", 1.2, [1.2] * 3, [1] * 3),
    ("sequence-mask", 2.0, [1.5] * 3, [0] * 3), ("sequence-mask", 1.2, [0.0] * 3, [1] * 3)])  # fmt: skip
@pytest.mark.parametrize("padding", [0.4, NAN, INF, -INF])
@pytest.mark.parametrize("trained_once", [True, False])
def test_rollout_correction(kind, cap, weights, cut, padding, trained_once):  # C22
    data, old = sampled(padding)
    mask, config = data.response_mask, algorithm(rollout_correction=kind, rollout_correction_cap=cap)
    found, where = correction_weights(config, old - data.rollout_log_probs, mask)
    assert found[mask].tolist() == pytest.approx(weights, abs=1e-6) and where[mask].tolist() == cut
    if not trained_once:
        data = data.replace(old_log_probs=old)
    leaf = old.clone().requires_grad_()
    loss, stats = ppo_loss(config, TokenOutput(leaf), data)
    loss.backward()
    expected = [-a * w / 3 for a, w in zip((1.0, -2.0, 3.0), weights, strict=True)]  # a weight with a gradient would add to it
    assert loss.item() == pytest.approx(sum(expected), abs=1e-6)
    assert leaf.grad[mask].tolist() == pytest.approx(expected, abs=1e-6) and leaf.grad[~mask] == 0
    assert stats["rollout/correction_mean"].total.item() == pytest.approx(sum(weights), abs=1e-6)
    assert stats["rollout/correction_clipped_fraction"] == Mean(sum(cut), 3)


def test_correction_weights_carry_no_gradient():  # C22
    log_ratio = torch.tensor([SAMPLED]).log().requires_grad_()
    for kind in ACTIVE:
        weights, _ = correction_weights(algorithm(rollout_correction=kind), log_ratio, torch.ones(1, 3, dtype=torch.bool))
        assert not weights.requires_grad


@pytest.mark.parametrize("kind", ACTIVE)
def test_only_the_policy_term_is_corrected(kind):  # C22
    data, output = rich_case()
    extra = {"kl_coef": 0.1, "entropy_coef": 0.01}
    base, corrected = algorithm(), algorithm(rollout_correction=kind)
    policy, both = run(ppo_loss, corrected, output, data), run(ppo_loss, replace(corrected, **extra), output, data)
    plain, rest = run(ppo_loss, base, output, data), run(ppo_loss, replace(base, **extra), output, data)
    assert policy[0] != plain[0]
    torch.testing.assert_close(both[0] - policy[0], rest[0] - plain[0])
    for i in range(2):
        torch.testing.assert_close(both[2][i] - policy[2][i], rest[2][i] - plain[2][i])


@pytest.mark.parametrize("log_ratio, truncated, masked", [
    (1000.0, 2.0, 0.0), (INF, 2.0, 0.0), (-1000.0, 0.0, 0.0), (-INF, 0.0, 0.0), (NAN, NAN, NAN)])  # fmt: skip
def test_correction_far_away(log_ratio, truncated, masked):
    for kind in ACTIVE:
        weights, _ = correction_weights(algorithm(rollout_correction=kind), torch.tensor([[log_ratio]]), torch.tensor([[True]]))
        assert weights.item() == pytest.approx(masked if "mask" in kind else truncated, nan_ok=True), kind


@pytest.mark.parametrize("options, said", [
    ({"rollout_correction": "auto"}, "'auto' is no correction .* resolved before"),
    ({"rollout_correction": "token"}, "rollout_correction: 'token' .* token-truncate, token-mask"),
    ({"rollout_correction": "token-mask", "rollout_correction_cap": 0.5}, "rollout_correction_cap: 0.5")])  # fmt: skip
def test_correction_errors(options, said):
    data, output = rich_case()
    with pytest.raises(ValueError, match=said):
        ppo_loss(algorithm(**options), output, data)


@pytest.mark.parametrize("version, rows", [(None, [0, 1, 2]), (7, [0, 2]), (6, [1]), (8, [])])
@pytest.mark.parametrize("trained_once", [True, False])
@pytest.mark.parametrize("padding", [7.0, NAN])
def test_agreement_counts_tokens_of_one_version(version, rows, trained_once, padding):
    """Log-probs of the rollout minus the old ones are 0.5, -1.5 and 0; one masked token has every version in turn."""
    d = [0.5, -1.5, 0.0]
    rollout = torch.tensor([[-1.0, -2.5, -0.5, padding]])
    old = torch.tensor([[-1.5, -1.0, -0.5, padding]])
    mask = torch.tensor([[True, True, True, False]])
    data = make_batch(mask, advantages=torch.ones(1, 4), rollout_log_probs=rollout)
    data = data.replace(policy_version=torch.tensor([[7, 6, 7, version or 0]], dtype=torch.int32))
    new = old if trained_once else old - 3
    if not trained_once:
        data = data.replace(old_log_probs=old)
    _, stats = ppo_loss(algorithm(), TokenOutput(new), data, version=version)
    mean, largest, kl = (stats[f"rollout/{name}"] for name in ("logprob_diff_mean", "logprob_diff_max", "kl"))
    assert isinstance(largest, Max) and largest.value == max((abs(d[i]) for i in rows), default=-INF)
    assert mean == Mean(sum(abs(d[i]) for i in rows), len(rows)) and kl.count == len(rows)
    assert kl.total.item() == pytest.approx(sum(math.exp(-d[i]) - 1 + d[i] for i in rows), abs=1e-6)


def test_rollout_kl_is_that_of_the_rollout_to_the_trainer():
    """Tokens in the proportions of the rollout give the exact divergence."""
    rollout, trainer = torch.tensor([0.75, 0.25]), torch.tensor([0.5, 0.5])
    tokens = torch.tensor([[0, 0, 0, 1]])
    data = make_batch(tokens >= 0, advantages=torch.ones(1, 4), rollout_log_probs=rollout.log()[tokens])
    _, stats = ppo_loss(algorithm(), TokenOutput(trainer.log()[tokens]), data)
    assert stats["rollout/kl"].total.item() / 4 == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5), abs=1e-6)


def test_a_nan_where_rollout_and_trainer_are_compared_is_kept():
    data, old = sampled()
    _, stats = ppo_loss(algorithm(), TokenOutput(old), data.replace(rollout_log_probs=torch.tensor([[NAN, 0.0, 0.0, 0.0]])))
    assert stats["rollout/logprob_diff_max"].value.isnan()
