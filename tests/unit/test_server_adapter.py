"""ServerAdapter over a scripted backend: which prompts a step draws, kept groups in a checkpoint, and weight updates."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from spmd_rl.batch import Sampling
from spmd_rl.config import RolloutConfig
from spmd_rl.mesh import RoleMesh
from spmd_rl.metrics import Mean
from spmd_rl.placed import WeightStream
from spmd_rl.roles import server_adapter
from spmd_rl.roles.generation import RolloutModel
from spmd_rl.roles.server_adapter import ServerAdapter
from tests.unit.test_generation import HOW, SHAPES, STOP, make_prompts, rows_of, whole

CPU = torch.device("cpu")


class Ranks:
    """ServerAdapters of replicas of one rank each, driven in turn: what a collective finds is read from all of them."""

    def __init__(self, folder, num_replicas: int, monkeypatch, **limits):
        if not (folder / "config.json").exists():
            (folder / "config.json").write_text("{}")
            save_file({name: torch.zeros(shape) for name, shape in SHAPES.items()}, folder / "model.safetensors")
        config = RolloutConfig(backend="tests.unit.test_generation:Scripted", dtype="float32", **limits)
        model = RolloutModel(str(folder), (STOP,), probe=((5, 6, 7), (8, 9)))
        ranks = tuple(range(num_replicas))
        self.adapters = [ServerAdapter(config, model, 7, RoleMesh(ranks, num_replicas, rank, CPU)) for rank in ranks]
        self.monkeypatch = monkeypatch

    def together(self, values: list) -> None:
        self.monkeypatch.setattr(server_adapter, "gather_objects", lambda value, group, name: values)

    def step(self, step: int, count: int, how: Sampling = HOW) -> dict:
        """The rows of a step from all replicas."""
        self.together([len({e.uid for e in a.generator.pending}) for a in self.adapters])
        rows, prompts = {}, [a.next_prompts(make_prompts, step, count) for a in self.adapters]
        for adapter, of_rank in zip(self.adapters, prompts):
            adapter.version = step
            rows |= rows_of(adapter.generate(of_rank, how, step).local)
        return rows

    def save(self, folder) -> None:
        self.together([a.generator.state() for a in self.adapters])
        for adapter in self.adapters:
            adapter.save(folder)

    def load(self, folder) -> None:
        for adapter in self.adapters:
            adapter.load(folder)

    def kept(self) -> list[list[int]]:
        return [sorted({e.uid for e in a.generator.pending}) for a in self.adapters]


def test_prompts_of_a_step_without_limits_are_a_function_of_it(tmp_path, monkeypatch):
    ranks = Ranks(tmp_path, 2, monkeypatch)
    for step in (5, 0):
        shards = [a.next_prompts(make_prompts, step, 4).local.uid.tolist() for a in ranks.adapters]
        assert shards == [[4 * step, 4 * step + 2], [4 * step + 1, 4 * step + 3]]
    ranks.save(tmp_path)
    assert not (tmp_path / "rollout.json").exists()


def test_with_limits_each_occurrence_is_trained_once(tmp_path, monkeypatch):
    """As many groups are in flight as a step has prompts, and none is lost, repeated or passed over."""
    ranks = Ranks(tmp_path, 2, monkeypatch, max_step_tokens=3)
    trained, steps = [], 0
    while len(trained) < 40:
        before = sum(ranks.kept(), [])
        rows = ranks.step(steps, 6)
        drawn = {a.drawn for a in ranks.adapters}
        uids = sorted({uid for uid, _ in rows})
        trained += uids
        assert len(drawn) == 1 and len(rows) == 4 * len(uids)
        assert sorted(trained + sum(ranks.kept(), [])) == list(range(*drawn))
        assert len(uids) + len(sum(ranks.kept(), [])) == 6 and set(before) <= {*uids, *sum(ranks.kept(), [])}
        stats = [a.take() for a in ranks.adapters]
        kept = [len(a.generator.pending) for a in ranks.adapters]
        assert [s["rollout/kept_samples"] for s in stats] == [Mean(n, 1) for n in kept] and "rollout/asked" in stats[0]
        steps += 1
    assert steps > 40 / 6


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_kept_groups_are_saved_and_go_on_elsewhere(tmp_path, monkeypatch, num_replicas):
    """Saved on 2 replicas after three steps: what follows is what would have followed there, whatever the number."""
    two = Ranks(tmp_path, 2, monkeypatch, max_step_tokens=3)
    for step in range(3):
        two.step(step, 6)
    two.save(tmp_path)
    state = json.loads((tmp_path / "rollout.json").read_text())
    assert state["drawn"] == two.adapters[0].drawn
    others = Ranks(tmp_path, num_replicas, monkeypatch, max_step_tokens=3)
    others.load(tmp_path)
    assert sorted(sum(others.kept(), [])) == sorted(sum(two.kept(), []))
    if num_replicas == 2:  # what decodes together stays together: the same bits
        assert [a.generator.state() for a in others.adapters] == [a.generator.state() for a in two.adapters]
    else:
        assert max(map(len, others.kept())) <= min(map(len, others.kept())) + 1
    for step in range(3, 9):
        expected, found = two.step(step, 6), others.step(step, 6)
        assert found == expected
        assert {a.drawn for a in others.adapters} == {a.drawn for a in two.adapters}


def test_limits_may_begin_in_a_resumed_run(tmp_path, monkeypatch):
    """Its checkpoint knows of no kept groups: prompts go on where those of the steps before ended."""
    ranks = Ranks(tmp_path, 1, monkeypatch, max_step_seconds=100.0)
    ranks.load(tmp_path)  # no file
    assert ranks.step(3, 4).keys() == whole(make_prompts(12, 4), 3).keys()
    assert ranks.step(4, 4).keys() == whole(make_prompts(16, 4), 4).keys()
    ranks.save(tmp_path)
    assert json.loads((tmp_path / "rollout.json").read_text()) == {"drawn": 20, "replicas": [[]]}


def weights(**changed) -> dict[str, torch.Tensor]:
    return {"a": torch.ones(2, 3), "b": torch.arange(4.0)} | changed


def stream_of(adapter: ServerAdapter, named: dict, expected=((-6.0, -7.0), (-9.0,)), version: int = 5) -> WeightStream:
    return WeightStream(adapter.mesh, iter(named.items()), lambda: [list(row) for row in expected], version)


def test_an_update_gives_its_version_to_what_is_drawn_next(tmp_path, monkeypatch):
    (adapter,) = Ranks(tmp_path, 1, monkeypatch).adapters
    adapter.update_weights(stream_of(adapter, weights()), 5)
    assert adapter.backend.awake == ["weights", "kv_cache"] and adapter.backend.loaded.keys() == {"a", "b"}
    batch = adapter.generate(adapter.next_prompts(make_prompts, 0, 2), HOW, 0).local
    assert set(batch.policy_version[batch.response_mask].tolist()) == {5}
    assert adapter.take()["rollout/probe_diff_max"].value == 0


def test_a_stream_of_another_version_is_refused(tmp_path, monkeypatch):
    (adapter,) = Ranks(tmp_path, 1, monkeypatch).adapters
    with pytest.raises(RuntimeError, match="weights of version 5 came where version 6 is due"):
        adapter.update_weights(stream_of(adapter, weights()), 6)


def test_tensors_that_do_not_fit_are_all_named(tmp_path, monkeypatch):
    (adapter,) = Ranks(tmp_path, 1, monkeypatch).adapters
    wrong = weights(a=torch.zeros(3, 2), c=torch.zeros(1))
    del wrong["b"]
    named = iter(wrong.items())
    with pytest.raises(ValueError) as error:
        adapter.update_weights(WeightStream(adapter.mesh, named, version=5), 5)
    assert str(error.value).splitlines() == [
        "weights of version 5 do not fit the rollout model:",
        "a: shape (3, 2), in the model's files (2, 3)",
        "c: not in the model's files",
        "b: in the model's files, not in the stream",
    ]
    assert next(named, None) is None and adapter.version == 0  # a collective stream is exhausted by all


def test_a_probe_that_disagrees_stops_the_run(tmp_path, monkeypatch):
    (adapter,) = Ranks(tmp_path, 1, monkeypatch).adapters
    adapter.update_weights(stream_of(adapter, weights(), ((-6.001, -7.0), (-9.0,)), 1), 1)
    for off in (-8.5, float("nan")):
        with pytest.raises(RuntimeError, match=r"version 2: .* nats off .* limit 0.001.* try rollout=hf"):
            adapter.update_weights(stream_of(adapter, weights(), ((-6.0, -7.0), (off,)), 2), 2)
    assert adapter.version == 1
