"""The scale benchmark plays ranks of real worlds, and its laws can be broken."""

from __future__ import annotations

import json
import os

import pytest
import torch.distributed as dist

from benchmarks import scale
from spmd_rl.batch import DTYPES, PER_ROW


def test_a_rank_makes_as_many_groups_in_any_world():
    found = {size: scale.set_up(size, 3, rounds=1) for size in (64, 256)}
    assert found[64]["new_group_calls"] == found[256]["new_group_calls"] == 3 + 3 + 2  # cells, bridges, the rollout's two axes
    assert found[64]["groups_joined"] == found[256]["groups_joined"] == 1 + 1 + 2 + 2  # the world, a cell, its bridges, two axes
    assert found[64]["peers"] == 63 + 31 + 47 + 47  # of an actor: the world, 32 of its own, 16 more on each bridge
    assert not dist.is_initialized()


def test_large_worlds_connect_when_they_first_talk(monkeypatch):
    monkeypatch.delenv("TORCH_GLOO_LAZY_INIT", raising=False)
    for size in (64, 512):
        with scale.fake_world(scale.layout(size, 2), 0, size):
            assert os.environ.get("TORCH_GLOO_LAZY_INIT") == (None if size == 64 else "1")


def test_the_fake_world_is_the_real_ones_shape_and_leaves_nothing():
    before = dict(os.environ)
    with scale.fake_world(scale.layout(64, 2), 63, 64) as (world, made, _):
        rollout = world.meshes["rollout"]
        assert (rollout.replica, rollout.lane, rollout.width) == (3, 7, 8)
        assert (rollout.data_group.size(), rollout.lane_group.size()) == (4, 8)
        assert (dist.get_world_size(), dist.get_rank()) == (32, 31)
        assert sorted(made.sizes) == [4, 8, 32, 64, 64]
    assert dict(os.environ) == before and not dist.is_initialized()


def test_moved_bytes_are_those_of_the_rows():
    roles = scale.layout(32, 2)
    held = scale.draw_rows(prompts=16, samples=2, tokens=8, holders=[16, 24], num_ranks=32)
    row = sum(DTYPES[name].itemsize * (1 if name in PER_ROW else 8) for name in scale.FIELDS)
    sent = [scale.move_bytes(roles, 32, held, rank, 8) for rank in (16, 24)]
    received = [scale.move_bytes(roles, 32, held, rank, 8)["received"] for rank in range(16)]
    assert [s["sent"] for s in sent] == [16 * row] * 2
    assert received == [2 * row] * 16
    assert sent[0]["names"] == 32 * 16 * 2 * 8
    assert scale.move_bytes(roles, 32, held, 17, 8)["received"] == 0  # a lane that neither sends nor trains


def test_weights_are_sent_by_turns():
    alone, many = scale.weight_bytes(1), scale.weight_bytes(8)
    assert alone["sent"] == alone["received"] == many["received"] == 2 * 8_030_261_248  # Llama 3 8B in bfloat16
    assert alone["sent"] / 8 <= many["sent"] <= alone["sent"] / 8 + many["bucket"]


def test_a_law_that_is_broken_is_found():
    figures = {size: dict.fromkeys(scale.LAWS, 1.0) | {"rows": 8, "rollout_replicas": 2, "actor_replicas": 2} for size in (32, 64)}
    figures = {size: found | {"weights_bucket_bytes": 1.0} for size, found in figures.items()}
    assert scale.check_laws(figures)["new_group_calls"] == 1
    figures[64]["new_group_calls"] = 2.0
    assert scale.check_laws(figures)["new_group_calls"] == 2


def test_the_command_ends_with_one_json_line(capsys):
    args = ["--worlds", "32", "64", "--cells", "2", "--prompts", "32", "--samples", "2", "--tokens", "8", "--rounds", "1"]
    code = scale.main(args)
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["figures"]["2 cells"].keys() == {"32", "64"}
    assert not {law for law in line["broken"] if not law.endswith("_s")}  # seconds depend on what else runs
    assert code == bool(line["broken"])
    with pytest.raises(SystemExit):
        scale.parse(["--worlds", "30", "64"])
    with pytest.raises(SystemExit):
        scale.parse(["--worlds", "64"])
