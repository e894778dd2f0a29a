"""From what the configuration says of ranks to the ranks of each role, and the map that is printed at start."""

from __future__ import annotations

import re

import pytest
import torch

from spmd_rl.config import AlgorithmConfig, Config, PlacementConfig
from spmd_rl.mesh import RoleMesh, describe
from spmd_rl.placement import compact, parse_count, parse_placement, pick_ranks, placement_problems
from spmd_rl.train import compose_config

LINE = re.compile(r"[a-z]\w*([.,] ?\w+)*: .+ - \S.*")
PPO = AlgorithmConfig(advantage="gae", kl_coef=0.1)  # all four roles


def placed(world_size: int, local_world_size: int | None = None, algorithm=PPO, **spec) -> tuple[dict[str, str], list[str]]:
    """The ranks of each role, written compactly, and the problems."""
    config = Config(placement=PlacementConfig(**spec), algorithm=algorithm)
    placement, problems = parse_placement(config, world_size, local_world_size)
    assert all(LINE.fullmatch(line) for line in problems), problems
    return {role: compact(ranks) for role, ranks in placement.items()}, problems


@pytest.mark.parametrize(
    ("ranks", "text"), [([], "none"), ([3], "3"), ([0, 1], "0-1"), ([8, 0, 1, 2], "0-2,8"), (range(512), "0-511"), ([1, 1], "1")]
)
def test_compact(ranks, text):
    assert compact(ranks) == text


@pytest.mark.parametrize(
    ("spec", "count"),
    [("1/2", 4), ("3/4", 6), ("2/4", 4), ("1/1", 8), ("4ranks", 4), ("4 ranks", 4), ("1rank", 1),
     ("4", None), ("0-3", None), ("all", None)],
)  # fmt: skip
def test_parse_count(spec, count):
    assert parse_count(spec, 8) == count


@pytest.mark.parametrize(
    ("spec", "world_size", "said"),
    [
        ("1/2", 1, "'1/2' of 1 rank is no whole number of ranks - start a multiple of 2 ranks"),
        ("1/2", 5, "'1/2' of 5 ranks is no whole number of ranks"),
        ("2/6", 4, "start a multiple of 3 ranks"),
        ("3/2", 4, "is no share of the world"),
        ("0/2", 4, "is no share of the world"),
        ("1/0", 4, "is no share of the world"),
    ],
)
def test_a_share_that_cannot_be(spec, world_size, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        parse_count(spec, world_size)


@pytest.mark.parametrize("world_size", [2, 4, 8, 512])
def test_split_is_two_halves(world_size):
    config, problems = compose_config("tiny", None, ["placement=split"])
    placement, found = parse_placement(config, world_size, min(world_size, 8))
    half = world_size // 2
    assert (problems, found) == ([], [])
    assert placement == {"actor": tuple(range(half)), "rollout": tuple(range(half, world_size))}


def test_split_of_one_rank_says_what_to_do():
    config, _ = compose_config("tiny", None, ["placement=split"])
    _, problems = parse_placement(config, 1)
    assert [line.partition(":")[0] for line in problems] == ["placement.actor", "placement.rollout"]
    assert all("1 rank is no whole number" in line and "placement=colocated" in line for line in problems)


@pytest.mark.parametrize(
    ("world_size", "local", "spec", "expected"),
    [
        # the order is actor, critic, ref, rollout
        (8, None, {"actor": "2ranks", "critic": "1ranks", "ref": "1/8", "rollout": "1/2"}, ("0-1", "2", "3", "4-7")),
        # the rest goes round what is named
        (8, None, {"actor": "2-3", "critic": "actor", "ref": "1/4", "rollout": "1/2"}, ("2-3", "2-3", "0-1", "4-7")),
        # others follow a count
        (4, None, {"actor": "rollout", "rollout": "1/2", "critic": "1/2", "ref": "critic"}, ("2-3", "0-1", "0-1", "2-3")),
        # whole nodes where possible: the critic skips the node that the actor cuts, and the rollout fills it
        (16, 8, {"actor": "4ranks", "critic": "8ranks", "ref": "actor", "rollout": "4ranks"}, ("0-3", "8-15", "0-3", "4-7")),
        # inside one node where possible: 3 do not fit beside 2 on a node of 4
        (8, 4, {"actor": "2ranks", "critic": "3ranks", "ref": "1ranks", "rollout": "2ranks"}, ("0-1", "4-6", "7", "2-3")),
    ],
)
def test_shares_and_counts_are_dealt(world_size, local, spec, expected):
    placement, problems = placed(world_size, local, **spec)
    assert problems == []
    assert placement == dict(zip(("actor", "critic", "ref", "rollout"), expected))


@pytest.mark.parametrize(
    ("world_size", "local", "spec", "said"),
    [
        (4, None, {"actor": "3ranks", "rollout": "2ranks"}, "placement.rollout: '2ranks' is 2 ranks, but 1 of 4 are left (3)"),
        (4, None, {"actor": "all", "rollout": "1/2"}, "placement.rollout: '1/2' is 2 ranks, but 0 of 4 are left (none)"),
        (4, None, {"actor": "1/4", "rollout": "1/4"}, "placement: ranks 2-3 have no role (4 ranks)"),
        (4, None, {"actor": "0ranks", "rollout": "all"}, "placement.actor: none is empty"),
        (4, None, {"actor": "four ranks"}, "placement.actor: 'four ranks' is no set of ranks"),
        (8, 4, {"actor": "0-5", "rollout": "6-7"}, "placement.ref, placement.critic: ranks 0-5 cut the nodes of ranks 4-7 "),
        (8, 4, {"actor": "0-2", "rollout": "3-7"}, "placement.rollout: ranks 3-7 cut the nodes of ranks 0-3 and lie on 2 nodes"),
        (6, 4, {"actor": "0-3", "rollout": "4-5"}, "placement: 2 cells need as many ranks on every node (6 ranks, 4 on this node)"),
    ],
)  # fmt: skip
def test_what_cannot_be_dealt_or_cuts_a_node_is_explained(world_size, local, spec, said):
    _, problems = placed(world_size, local, **spec)
    assert any(said in line for line in problems), problems


def test_one_cell_may_lie_on_any_nodes():
    assert placed(6, 4) == (dict.fromkeys(("actor", "rollout", "ref", "critic"), "0-5"), [])
    assert placement_problems({"actor": (0, 1, 2, 3), "rollout": (4, 5, 6, 7)}, 8, 4) == []
    assert placement_problems({"actor": (0, 2), "rollout": (1, 3)}, 4) == []


def test_pick_ranks_prefers_the_fullest_node_with_room():
    assert pick_ranks(2, [0, 1, 2, 3, 6, 7], 4) == (6, 7)
    assert pick_ranks(4, [0, 2, 3, 4, 5, 6, 7], 4) == (4, 5, 6, 7)
    assert pick_ranks(5, [0, 1, 2, 5, 6], 4) == (0, 1, 2, 5, 6)


def test_the_map_has_a_line_a_host_also_of_512_ranks():
    def mesh(ranks, replicas):
        return RoleMesh(tuple(ranks), replicas, 0, torch.device("cpu"))

    meshes = {"actor": mesh(range(260), 260), "ref": mesh(range(260), 260), "rollout": mesh(range(260, 512), 63)}
    hosts = [f"node{rank // 8}" for rank in range(512)]
    lines = describe(meshes, hosts)
    assert len(lines) == 64 + 3
    assert lines[0] == "node0: ranks 0-7 actor, ref"
    assert lines[32] == "node32: ranks 256-259 actor, ref; ranks 260-263 rollout"
    assert lines[-1] == "rollout: ranks 260-511 as 63 replicas of 4"
    assert max(map(len, lines)) < 80
