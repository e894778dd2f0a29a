from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from spmd_rl.advantages import gae, gae_advantages, grpo, overlong_penalty, reinforce_plus_plus, rloo, whiten
from spmd_rl.batch import Batch
from spmd_rl.config import AlgorithmConfig

NAN = math.nan
GRPO, DR_GRPO = AlgorithmConfig(), AlgorithmConfig(normalize_std=False)
TABLE = [grpo, rloo, reinforce_plus_plus, gae]


def make_batch(uid: list[int], rewards: list[float], mask: Tensor | None = None, **fields: Tensor) -> Batch:
    """One prompt token, then two response tokens, unless a mask says otherwise."""
    rows = len(uid)
    mask = torch.tensor([False, True, True]).repeat(rows, 1) if mask is None else mask
    ints, grid = torch.zeros(rows, dtype=torch.int64), torch.zeros(mask.shape, dtype=torch.int64)
    return Batch(
        input_ids=grid, prompt_lengths=ints, lengths=ints, response_mask=mask, uid=torch.tensor(uid, dtype=torch.int64),
        sample=ints, row=ints, data_source=ints, policy_version=grid.int(), truncated=ints.bool(),
        temperature=ints.float(), rewards=torch.tensor(rewards), batch_size=[rows], **fields,
    )  # fmt: skip


def row_advantages(batch: Batch) -> list[float]:
    """One number a row, after checking that it stands at each response token and that the rest is exactly 0."""
    advantages, mask = batch.advantages, batch.response_mask
    assert advantages.dtype == torch.float32
    assert (advantages[~mask] == 0).all()
    assert torch.equal(advantages[:, 1], advantages[:, 2])
    return advantages[:, 1].tolist()


def on_ranks(shards: list, function) -> list:
    """`function(shard, all_sum)` on one thread a rank, with a real sum; a rank that skips a sum breaks the barrier."""
    barrier, slots = threading.Barrier(len(shards), timeout=10), [None] * len(shards)

    def rank(index: int):
        def all_sum(x: Tensor) -> Tensor:
            assert x.dtype == torch.float64 and x.numel() <= 8
            slots[index] = x
            barrier.wait()
            total = sum(slots)
            barrier.wait()
            return total

        return function(shards[index], all_sum)

    with ThreadPoolExecutor(len(shards)) as pool:
        return list(pool.map(rank, range(len(shards))))


def forbidden(x: Tensor) -> Tensor:
    raise AssertionError("a group function must not call a collective")


def approx(values: list[float]):
    return pytest.approx(values, abs=1e-6)


EIGHT = [1.0] * 3 + [0.0] * 5


@pytest.mark.parametrize("function, config, rewards, expected", [
    (grpo, GRPO, [1.0, 0.0, 0.0, 1.0], [0.8660239, -0.8660239, -0.8660239, 0.8660239]),
    (rloo, GRPO, [1.0, 0.0, 0.0, 1.0], [0.6666667, -0.6666667, -0.6666667, 0.6666667]),
    (grpo, DR_GRPO, [1.0, 0.0, 0.0, 1.0], [0.5, -0.5, -0.5, 0.5]),
    (grpo, GRPO, [1.0, 0.0], [0.7071058, -0.7071058]),
    (grpo, GRPO, EIGHT, [1.2076124] * 3 + [-0.7245674] * 5),
    (grpo, DR_GRPO, EIGHT, [0.625] * 3 + [-0.375] * 5),
    (rloo, GRPO, EIGHT, [0.7142857] * 3 + [-0.4285714] * 5),
    (rloo, GRPO, [0.0] + [0.95] * 7, [-0.95] + [0.1357143] * 7)])  # fmt: skip
def test_reference_values(function, config, rewards, expected):  # C12
    assert row_advantages(function(config, make_batch([7] * len(rewards), rewards), forbidden)) == approx(expected)


@pytest.mark.parametrize("function, config", [(grpo, GRPO), (grpo, DR_GRPO), (rloo, GRPO)])
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.7, 0.1, 0.35, 0.95, -1e6, 1e-6])
@pytest.mark.parametrize("size", [1, 3, 4, 7])
def test_group_without_signal_is_exactly_zero(function, config, reward, size):  # C10, C11
    batch = make_batch([3] * size, [reward] * size)
    for rewards in (batch.rewards, torch.full((size,), reward, dtype=torch.float64)):
        assert row_advantages(function(config, batch.replace(rewards=rewards))) == [0.0] * size


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0, 2], [2, 3, 1, 0], [0, 2, 1, 3]])
def test_groups_are_by_uid_in_any_order(order):  # C14; all prompts here have the same text
    uid, rewards, expected = [5, 9, 5, 9], [1.0, 5.0, 0.0, 5.0], [0.7071058, 0.0, -0.7071058, 0.0]
    batch = grpo(GRPO, make_batch([uid[i] for i in order], [rewards[i] for i in order]))
    assert row_advantages(batch) == approx([expected[i] for i in order])


@pytest.mark.parametrize("function, expected", [(grpo, 0.7071058), (rloo, 1.0)])
def test_failed_and_empty_rows_leave_the_group(function, expected):
    mask = torch.tensor([False, True, True]).repeat(4, 1)
    mask[2] = False
    batch = function(GRPO, make_batch([1] * 4, [1.0, NAN, 100.0, 0.0], mask))
    assert row_advantages(batch) == approx([expected, 0.0, 0.0, -expected])


@pytest.mark.parametrize("function", TABLE)
def test_failed_row_does_not_change_the_others(function):
    rewards, values = [1.0, 0.0, 3.0, NAN], torch.arange(12.0).reshape(4, 3)
    batch = make_batch([1] * 4, rewards, values=values)
    with_failed, without = function(GRPO, batch), function(GRPO, batch[:3])
    assert torch.equal(with_failed.advantages[:3], without.advantages)
    assert (with_failed.advantages[3] == 0).all()


@pytest.mark.parametrize("function", TABLE)
@pytest.mark.parametrize("tokens", [0, 3])
def test_zero_rows(function, tokens):
    empty = torch.zeros(0, tokens)
    batch = function(GRPO, make_batch([], [], empty.bool(), values=empty))
    assert batch.advantages.shape == (0, tokens) and batch.advantages.dtype == torch.float32


@pytest.mark.parametrize("function", TABLE)
def test_input_batch_is_left_alone(function):
    batch = make_batch([1, 1], [1.0, 0.0], values=torch.zeros(2, 3))
    assert function(GRPO, batch).advantages is not None and batch.advantages is None


def test_whitening_is_global():  # C15
    shards = [torch.tensor([[1.0, NAN, 2.0]]), torch.tensor([[3.0, 10.0, math.inf]]), torch.zeros(0, 3)]
    masks = [torch.tensor([[True, False, True]]), torch.tensor([[True, True, False]]), torch.zeros(0, 3).bool()]
    pairs = list(zip(shards, masks, strict=True))
    out = on_ranks(pairs, lambda pair, all_sum: whiten(*pair, all_sum))
    assert out[0].tolist() == [approx([-0.7348469, 0.0, -0.4898979])]
    assert out[1].tolist() == [approx([-0.2449490, 1.4696938, 0.0])]
    assert out[0][0, 1] == 0 and out[1][0, 2] == 0 and out[2].shape == (0, 3)
    kept = on_ranks(pairs, lambda pair, all_sum: whiten(*pair, all_sum, shift_mean=False))
    total = sum(x.sum() for x in kept).item()
    assert total / 4 == pytest.approx(4 / math.sqrt(50 / 3), abs=1e-6)
    assert all((x[~mask] == 0).all() for x, mask in zip(kept, masks, strict=True))


@pytest.mark.parametrize("shift_mean", [True, False])
@pytest.mark.parametrize("valid", [0, 1])
def test_whitening_of_less_than_two_tokens_is_zero(valid, shift_mean):  # C15
    mask = torch.arange(3)[None] < valid
    assert whiten(torch.tensor([[5.0, NAN, 7.0]]), mask, shift_mean=shift_mean).tolist() == [[0.0] * 3]


def test_whitening_keeps_small_variances():  # C12: no E[x^2] - mean^2
    x = torch.tensor([[1e6, 1e6 + 0.125]])
    assert whiten(x, torch.ones(1, 2).bool()).tolist() == [approx([-0.7071063, 0.7071063])]


@pytest.mark.parametrize("rewards, values, mask, lam, expected", [
    ([0.0, 1.0, 0.0], [0.0, 0.0, 100.0], [1, 1, 0], 0.95, [0.95, 1.0, 0.0]),
    ([0.0, 1.0, NAN], [0.0, 0.0, NAN], [1, 1, 0], 0.95, [0.95, 1.0, 0.0]),
    ([0.0, 0.0, 0.0, 1.0], [0.5, 9.0, 9.0, 0.25], [1, 0, 0, 1], 0.9, [0.425, 0.0, 0.0, 0.75]),
    ([0.0, NAN, NAN, 1.0], [0.5, NAN, NAN, 0.25], [1, 0, 0, 1], 0.9, [0.425, 0.0, 0.0, 0.75])])  # fmt: skip
def test_gae_skips_gaps(rewards, values, mask, lam, expected):  # C17
    arguments = torch.tensor([rewards]), torch.tensor([values]), torch.tensor([mask]).bool()
    assert gae_advantages(*arguments, 1.0, lam).tolist() == [approx(expected)]


def test_gae_equals_the_double_sum():
    rewards, values = torch.randn(2, 2, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    gamma, lam = 0.9, 0.8
    following = torch.cat([values[:, 1:], torch.zeros(2, 1)], dim=1)
    deltas = rewards + gamma * following - values
    expected = torch.zeros(2, 7, dtype=torch.float64)
    for t in range(7):
        for later in range(t, 7):
            expected[:, t] += (gamma * lam) ** (later - t) * deltas[:, later]
    torch.testing.assert_close(gae_advantages(rewards, values, torch.ones(2, 7).bool(), gamma, lam), expected)


@pytest.mark.parametrize("per_token", [False, True])
def test_gae_returns_and_whitening(per_token):  # C17, C23: the reward sits on the last valid token
    mask = torch.tensor([[1, 0, 0, 1, 0]]).bool()
    values = torch.tensor([[0.5, NAN, 9.0, 0.25, NAN]])
    batch = make_batch([1], [1.0], mask, values=values)
    if per_token:
        batch = batch.replace(token_rewards=torch.tensor([[0.0, NAN, 5.0, 1.0, NAN]]), rewards=None)
    batch = gae(AlgorithmConfig(lam=0.9), batch)
    assert batch.returns.dtype == torch.float32
    assert batch.returns.tolist() == [approx([0.925, 0.0, 0.0, 1.0, 0.0])]
    assert batch.advantages.tolist() == [approx([-0.7071067, 0.0, 0.0, 0.7071067, 0.0])]


def test_gae_of_a_failed_row_teaches_the_critic_nothing():
    values = torch.tensor([[0.0, 0.5, 0.25]] * 2)
    batch = gae(GRPO, make_batch([1, 1], [NAN, 1.0], values=values))
    assert torch.equal(batch.returns[0], values[0]) and batch.returns[1, 2] == 1


def test_reinforce_plus_plus_is_global_over_tokens():
    long, short = torch.tensor([[True] * 4]), torch.tensor([[True, False, False, False]])
    shards = [make_batch([1], [0.0], long), make_batch([2], [1.0], short), make_batch([], [], torch.zeros(0, 4).bool())]
    out = on_ranks(shards, lambda batch, all_sum: reinforce_plus_plus(GRPO, batch, all_sum).advantages)
    # Five tokens, rewards 0 0 0 0 1: mean 0.2, unbiased std sqrt(0.2).
    assert out[0].tolist() == [approx([-0.4472136] * 4)]
    assert out[1].tolist() == [approx([1.7888543, 0.0, 0.0, 0.0])]


def test_reinforce_plus_plus_discounts():
    batch = make_batch([1, 2], [1.0, 0.0])
    advantages = reinforce_plus_plus(AlgorithmConfig(gamma=0.5), batch).advantages
    raw = torch.tensor([0.5, 1.0, 0.0, 0.0])
    expected = (raw - raw.mean()) / raw.std()
    torch.testing.assert_close(advantages[:, 1:].flatten(), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("function", [reinforce_plus_plus, gae])
def test_global_functions_do_not_depend_on_the_layout(function):
    generator = torch.Generator().manual_seed(1)
    mask = torch.rand(6, 5, generator=generator) > 0.3
    batch = make_batch([1, 1, 2, 2, 3, 3], [1.0, 0.0, NAN, 2.0, 0.5, 0.25], mask, values=torch.randn(6, 5))
    whole = function(GRPO, batch)
    shards = [batch[:1], batch[1:6], batch[6:]]
    out = on_ranks(shards, lambda shard, all_sum: function(GRPO, shard, all_sum))
    torch.testing.assert_close(torch.cat([shard.advantages for shard in out]), whole.advantages)


def test_overlong_penalty():  # C23
    penalty = overlong_penalty(torch.tensor([96, 100, 104, 112, 120, 150]), 120, 24, 1.0)
    assert penalty.dtype == torch.float32
    assert penalty.tolist() == approx([0.0, -0.1666667, -0.3333333, -0.6666667, -1.0, -1.0])
    assert overlong_penalty(torch.tensor([96, 150]), 120, 24, 0.5).tolist() == [0.0, -0.5]
    assert overlong_penalty(torch.tensor([96, 150]), 120, 0, 1.0).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("function, field", [(grpo, "rewards"), (rloo, "rewards"), (reinforce_plus_plus, "rewards"),
                                             (gae, "rewards"), (gae, "values")])  # fmt: skip
def test_absent_field_is_named(function, field):
    batch = make_batch([1, 1], [1.0, 0.0], values=torch.zeros(2, 3))
    with pytest.raises(ValueError, match=f"batch.{field} is None"):
        function(GRPO, batch.replace(**{field: None}))
