"""The plans: pure functions of names and lengths."""

from __future__ import annotations

import random

import pytest
import torch

from spmd_rl.batch import (
    EQUAL_TERMS_LENGTH,
    Route,
    Sampling,
    pick_mini_batch,
    plan_balance,
    plan_micro_batches,
    plan_routes,
    row_cost,
    sample_seed,
    sort_rows,
)
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


def test_balance_deals_the_costliest_to_the_least_loaded():
    """The heap's choice is the least (load, groups, replica), as a search over all replicas would find it."""
    draw = random.Random(2)
    for replicas in (1, 3, 8):
        groups = [(uid, draw.choice([0, 1, 5, 5, 9])) for uid in draw.sample(range(100), 30)]
        loads, searched = [0] * replicas, [[] for _ in range(replicas)]
        for uid, cost in sorted(groups, key=lambda g: (-g[1], g[0])):
            to = min(range(replicas), key=lambda r: (loads[r], len(searched[r]), r))
            loads[to] += cost
            searched[to].append(uid)
        assert plan_balance(groups, replicas) == [sorted(uids) for uids in searched]


@pytest.mark.parametrize("hidden", [4096])
@pytest.mark.parametrize("length", [1, 100, 4096, 24576, 131072])
def test_the_cost_of_a_row_is_that_of_a_layer(hidden, length):
    flops = 24 * length * hidden**2 + 4 * length**2 * hidden
    assert flops == row_cost(length) * 4 * hidden
    assert row_cost(EQUAL_TERMS_LENGTH) == 2 * EQUAL_TERMS_LENGTH**2


def test_long_rows_are_balanced_by_their_squares_and_short_ones_by_tokens():
    def replica_of_the_long_row(scale):
        rows = [(0, [8 * scale]), (1, [scale] * 8), (2, [scale] * 4), (3, [scale] * 4)]  # as many tokens in 0, 1, and 2 + 3
        plan = plan_balance([(uid, sum(map(row_cost, lengths))) for uid, lengths in rows], 2)
        return next(set(uids) for uids in plan if 0 in uids)

    assert replica_of_the_long_row(100) == {0, 3}  # 800 + 400 tokens against 800 + 400
    assert replica_of_the_long_row(30_000) == {0}


def test_routes_agree_on_both_sides_and_bring_every_row_to_every_lane():
    draw = random.Random(3)
    for width in (1, 2):
        ranks, groups = 6, list(range(10))
        owner = {uid: draw.randrange(3) for uid in groups}
        held = [[uid for uid in groups if owner[uid] == rank for _ in range(draw.randint(1, 3))] for rank in range(ranks)]
        lanes = [list(range(i, i + width)) for i in range(2, 6, width)]  # ranks 0 and 1 only send, 2 does both
        plan = plan_balance([(uid, 1 + uid % 4) for uid in groups], len(lanes))
        mine = [plan_routes(held, plan, lanes, rank) for rank in range(ranks)]
        for rank, routes in enumerate(mine):
            assert all(rank in (route.source, route.target) for route in routes)
            for route in routes:
                assert route in mine[route.source] and route in mine[route.target]
        for replica, members in enumerate(lanes):
            for rank in members:
                got = [held[route.source][row] for route in mine[rank] if route.target == rank for row in route.rows]
                assert sorted(got) == sorted(uid for rows in held for uid in rows if uid in plan[replica])
    assert plan_routes([[7, 7], []], [[7]], [[0]], 0) == [Route(0, 0, (0, 1))]  # a row that stays has a route to itself
    assert plan_routes([[7, 7], []], [[7]], [[0]], 1) == []


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
