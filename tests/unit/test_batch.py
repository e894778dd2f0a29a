"""The plans: pure functions of names and lengths."""

from __future__ import annotations

import random

import pytest
import torch

from spmd_rl.batch import Sampling, pick_mini_batch, plan_balance, plan_micro_batches, sample_seed, sort_rows
from tests.helpers import make_rows


def rows(*lengths):
    """Rows that share nothing, of these total lengths."""
    return [(uid, 1, n - 1) for uid, n in enumerate(lengths)]


@pytest.mark.parametrize(
    ("lengths", "budget", "count"),
    [((95,) * 5, 100, 5), ((20,) * 5, 100, 1), ((7,) * 8, 8, 8), ((95,) * 4, 100, 4), ((20,), 100, 1), ((), 100, 0)],
)
def test_plan_keeps_the_budget(lengths, budget, count):
    plan = plan_micro_batches(rows(*lengths), budget, shared_prompt=False)
    assert len(plan) == count
    assert sorted(i for part in plan for i in part) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in part) <= budget for part in plan)


def test_a_row_over_the_budget_names_its_length_the_budget_and_the_key():
    with pytest.raises(ValueError, match=r"max_tokens_per_micro_batch.* 101 .*100 - set at least 101"):
        plan_micro_batches(rows(101), 100, shared_prompt=False)


def test_alignment_counts_against_the_budget():
    assert len(plan_micro_batches(rows(5, 5), 15, False)) == 1
    assert len(plan_micro_batches(rows(5, 5), 15, False, length_multiple=8)) == 2
    with pytest.raises(ValueError, match="set at least 16"):
        plan_micro_batches(rows(15), 15, False, length_multiple=8)


def test_count_multiple_adds_empty_micro_batches():
    plan = plan_micro_batches(rows(9, 9, 9), 10, False, count_multiple=4)
    assert len(plan) == 4
    assert plan[-1] == []


def test_shared_prompt_is_paid_once_and_again_when_a_group_is_split():
    group = [(7, 50, 10)] * 8
    assert plan_micro_batches(group, 130, True) == [list(range(8))]
    assert plan_micro_batches(group, 129, True) == [list(range(7)), [7]]
    assert len(plan_micro_batches(group, 130, False)) == 4


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("multiple", [1, 8])
def test_random_plans_lose_nothing_and_keep_siblings_adjacent(shared, multiple):
    draw = random.Random(0)
    for _ in range(200):
        items = []
        for uid in range(draw.randint(0, 6)):
            prompt = draw.randint(1, 30)
            items += [(uid, prompt, draw.randint(1, 30)) for _ in range(draw.randint(1, 6))]
        budget = draw.randint(64, 200)
        plan = plan_micro_batches(items, budget, shared, 1, multiple)
        assert sorted(i for part in plan for i in part) == list(range(len(items)))
        for part in plan:
            cost = last = 0
            previous = None
            for uid, prompt, response in (items[i] for i in part):
                add = response if shared and previous == (uid, prompt) else prompt + response
                if add == response and shared:
                    last += add
                else:
                    cost += -(-last // multiple) * multiple
                    last = add
                previous = (uid, prompt)
            assert cost + -(-last // multiple) * multiple <= budget


def test_balance_is_blind_to_order_and_to_where_groups_are():
    groups = [(uid, (uid * 37) % 100 + 1) for uid in range(40)]
    plan = plan_balance(groups, 4)
    draw = random.Random(1)
    for _ in range(5):
        draw.shuffle(groups)
        assert plan_balance(groups, 4) == plan
    loads = [sum((uid * 37) % 100 + 1 for uid in part) for part in plan]
    assert max(loads) - min(loads) <= 100
    assert plan_balance([(3, 10)], 3) == [[3], [], []]


def test_mini_batches_are_a_function_of_names():
    uids = [u for u in range(12) for _ in range(4)]
    parts = pick_mini_batch(uids, 3, "0/5/0")
    assert [len(p) for p in parts] == [4, 4, 4]
    assert set().union(*parts) == set(range(12))
    assert pick_mini_batch(uids[::-1], 3, "0/5/0") == parts
    assert pick_mini_batch(uids, 3, "0/5/1") != parts


def test_seeds_differ_by_every_part_of_the_name():
    train, val = (Sampling(1.0, 2, 0, 8, (2,), purpose) for purpose in ("train", "validation"))
    names = [(r, s, step, uid, i) for r in (0, 1) for s in (train, val) for step in (0, 1) for uid in (0, 1) for i in (0, 1)]
    seeds = {sample_seed(*name) for name in names}
    assert len(seeds) == len(names)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_sort_rows_orders_by_prompt_and_sample():
    batch = make_rows([(2, [3, 1]), (3, [2, 2])])
    shuffled = batch[torch.tensor([3, 0, 2, 1])]
    assert torch.equal(sort_rows(shuffled).input_ids, batch.input_ids)
