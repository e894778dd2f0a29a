"""Generator and ServerAdapter over a scripted backend: seeds, limits, and groups that go on in a later step."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from spmd_rl.batch import Prompts, Sampling, fields_of, sample_seed
from spmd_rl.config import RolloutConfig
from spmd_rl.mesh import RoleMesh
from spmd_rl.metrics import Mean
from spmd_rl.placed import WeightStream
from spmd_rl.roles import server_adapter
from spmd_rl.roles.generation import MAX_SEED, Generator, Reply, RolloutBackend, RolloutModel
from spmd_rl.roles.server_adapter import ServerAdapter

STOP = 2
HOW = Sampling(1.0, 4, 0, 12, (STOP,))
CPU = torch.device("cpu")
SHAPES = {"a": (2, 3), "b": (4,)}


def scripted_token(seed: int, forbidden: bool) -> int:
    """One in ten ends a sample. `seed` + the tokens before it names a token, so that a cut sample is the whole one."""
    number = seed * 0x9E3779B97F4A7C15 % 2**64 >> 40
    return STOP if number % 10 == 0 and not forbidden else 3 + number % 59


class Scripted(RolloutBackend):
    """Tokens from the request's seed alone; `expired` is asked after each one of all requests."""

    max_model_len = 64

    def __init__(self, config=None, model=None, mesh=None):
        self.requests, self.loaded, self.awake = [], {}, []

    def complete(self, requests, sampling, expired):
        self.requests += requests
        replies = [Reply([], [], False) for _ in requests]
        for place in range(max((r.max_tokens for r in requests), default=0)):
            for request, reply in zip(requests, replies):
                if place < request.max_tokens and not reply.stopped:
                    token = scripted_token(request.seed + place, place < request.min_tokens)
                    reply.ids.append(token)
                    reply.log_probs.append(-1 / token)
                    reply.stopped = token in sampling.stop_token_ids
            if expired is not None and expired():
                break
        return replies

    def score(self, rows):
        return [[-float(token) for token in row[1:]] for row in rows]

    def update_weights(self, named):
        """Fails in its own words, at once, as loaders do."""
        for name, tensor in named:
            self.loaded[name] = torch.zeros(SHAPES[name]).copy_(tensor)
        assert self.loaded.keys() == SHAPES.keys()

    def sleep(self): ...

    def wake_up(self, what):
        self.awake.append(what)

    def memory(self):
        return {"weights": 0, "kv_cache": 0}

    def shutdown(self): ...

    def take_counts(self):
        return {"rollout/asked": (len(self.requests), 1)}


def make_prompts(first: int, count: int) -> Prompts:
    """Prompt occurrences as a source gives them: row and length depend on the occurrence."""
    uid = torch.arange(first, first + count)
    lengths = 1 + uid % 4
    columns = torch.arange(int(lengths.max()) if count else 0)
    ids = (10 + uid[:, None] + columns) * (columns < lengths[:, None])
    return Prompts(input_ids=ids, lengths=lengths, uid=uid, row=uid % 7, data_source=uid % 2, batch_size=[count])


def rows_of(batch) -> dict[tuple[int, int], SimpleNamespace]:
    """(uid, sample) -> prompt, response, versions, log-probs, truncated."""
    found = {}
    for b, name in enumerate(zip(batch.uid.tolist(), batch.sample.tolist())):
        prompt, end = int(batch.prompt_lengths[b]), int(batch.lengths[b])
        assert name not in found
        found[name] = SimpleNamespace(
            prompt=batch.input_ids[b, :prompt].tolist(),
            ids=batch.input_ids[b, prompt:end].tolist(),
            versions=batch.policy_version[b, prompt:end].tolist(),
            log_probs=batch.rollout_log_probs[b, prompt:end].tolist(),
            truncated=bool(batch.truncated[b]),
        )
    return found


def whole(prompts: Prompts, step: int, how: Sampling = HOW, seed: int = 7) -> dict:
    """The same samples, each drawn in one piece in the step of its prompt."""
    return rows_of(Generator(Scripted(), seed, 0, None).generate(prompts, how, step, step))


def test_rows_follow_the_prompts():
    prompts = make_prompts(5, 6)
    batch = Generator(Scripted(), 7, 0, None).generate(prompts, replace(HOW, n=3), 2, 9)
    for name in ("uid", "row", "data_source"):
        assert batch.get(name).tolist() == prompts.get(name).repeat_interleave(3).tolist()
    assert batch.sample.tolist() == [0, 1, 2] * 6
    assert batch.prompt_lengths.tolist() == prompts.lengths.repeat_interleave(3).tolist()
    places = torch.arange(batch.input_ids.shape[1])
    responses = (places >= batch.prompt_lengths[:, None]) & (places < batch.lengths[:, None])
    assert torch.equal(batch.response_mask, responses)
    assert torch.equal(batch.policy_version, torch.where(responses, 9, -1).int())
    assert (batch.rollout_log_probs[~responses] == 0).all() and (batch.input_ids[places >= batch.lengths[:, None]] == 0).all()
    for b in range(18):
        n = int(prompts.lengths[b // 3])
        assert batch.input_ids[b, :n].tolist() == prompts.input_ids[b // 3, :n].tolist()
    assert batch.token_rewards is None and batch.temperature.tolist() == [1.0] * 18
    assert Generator(Scripted(), 7, 0, None).generate(prompts, replace(HOW, temperature=0.0), 0, 0).temperature[0] == 1


def test_seeds_are_functions_of_names():
    """Run seed, purpose, step, uid and sample; never the order or the company of prompts."""
    backend = Scripted()
    Generator(backend, 7, 0, None).generate(make_prompts(0, 3), HOW, 4, 4)
    seeds = [request.seed for request in backend.requests]
    assert seeds == [sample_seed(7, HOW, 4, uid, sample) for uid in range(3) for sample in range(4)]
    assert len(set(seeds)) == 12 and all(0 <= seed <= MAX_SEED for seed in seeds)
    long = replace(HOW, min_tokens=6)
    together, shuffled = whole(make_prompts(0, 3), 4, long), whole(make_prompts(0, 3)[torch.tensor([2, 0, 1])], 4, long)
    assert shuffled == together == whole(make_prompts(0, 1), 4, long) | whole(make_prompts(1, 2), 4, long)
    for step, how, seed in ((5, long, 7), (4, long, 8), (4, replace(long, purpose="validation"), 7)):
        other = whole(make_prompts(0, 3), step, how, seed)
        assert all(other[name].ids != row.ids for name, row in together.items())


@pytest.mark.parametrize(("min_tokens", "max_tokens"), [(0, 12), (3, 12), (0, 1), (5, 5)])
def test_limits_of_a_sample(min_tokens, max_tokens):
    rows = whole(make_prompts(0, 20), 0, replace(HOW, min_tokens=min_tokens, max_tokens=max_tokens))
    for row in rows.values():
        assert STOP not in row.ids[:-1] and STOP not in row.ids[:min_tokens]
        assert row.truncated == (row.ids[-1] != STOP) and (not row.truncated or len(row.ids) == max_tokens)
        assert max(1, min_tokens) <= len(row.ids) <= max_tokens
    assert {row.truncated for row in rows.values()} == ({True, False} if max_tokens != 5 else {True})


def test_a_stop_at_the_last_token_is_no_truncation():
    rows = whole(make_prompts(0, 40), 0)
    assert any(len(row.ids) == 12 and row.ids[-1] == STOP and not row.truncated for row in rows.values())


@pytest.mark.parametrize("min_tokens", [0, 4, 7])
@pytest.mark.parametrize("piece", [1, 3, 12, 50])
def test_a_cut_sample_is_the_whole_one(piece, min_tokens):
    """Its seed, limits, names and tokens; each piece has the version of the step that drew it, and groups stay whole."""
    how, backend = replace(HOW, min_tokens=min_tokens), Scripted()
    generator = Generator(backend, 7, piece, None)
    expected, found, unfinished = {}, {}, set()
    for step in range(20):
        prompts = make_prompts(3 * step, 3) if step < 4 else make_prompts(0, 0)
        expected |= whole(prompts, step, how) if len(prompts) else {}
        unfinished |= set(prompts.uid.tolist())
        backend.requests.clear()
        batch = generator.generate(prompts, how, step, 100 + step)
        assert all(1 <= request.max_tokens <= min(piece, 12) for request in backend.requests)
        kept = {episode.uid for episode in generator.pending}
        finished = unfinished - kept
        assert Counter(batch.uid.tolist()) == dict.fromkeys(finished, 4)
        assert batch.uid.tolist() == [uid for uid in dict.fromkeys(batch.uid.tolist()) for _ in range(4)]
        assert Counter(episode.uid for episode in generator.pending) == dict.fromkeys(kept, 4)
        for row in (rows := rows_of(batch)).values():
            first = row.versions[0]
            assert row.versions == [first + place // piece for place in range(len(row.ids))]
        for uid in finished:  # a group leaves in the step in which its last sample ends
            assert max(row.versions[-1] for (of, _), row in rows.items() if of == uid) == 100 + step
        found |= rows
        unfinished = kept
    assert not generator.pending and found.keys() == expected.keys()
    for name, row in expected.items():
        assert (found[name].ids, found[name].prompt, found[name].log_probs) == (row.ids, row.prompt, row.log_probs)
        assert found[name].truncated == row.truncated
    assert piece >= 12 or max(len(set(row.versions)) for row in found.values()) == -(-12 // piece)


def test_a_continuation_asks_with_the_tokens_so_far():
    """Finished siblings wait and are not asked again."""
    backend = Scripted()
    generator = Generator(backend, 7, 5, None)
    how = replace(HOW, min_tokens=7)
    generator.generate(make_prompts(0, 2), how, 0, 0)
    first = backend.requests[:]
    assert [(r.min_tokens, r.max_tokens) for r in first] == [(7, 5)] * 8
    generator.generate(make_prompts(2, 0), how, 1, 1)
    second = backend.requests[8:]
    for before, request in zip(first, second, strict=True):
        assert request.ids[: len(before.ids)] == before.ids and len(request.ids) == len(before.ids) + 5
        assert (request.seed, request.min_tokens, request.max_tokens) == ((before.seed + 5) & MAX_SEED, 2, 5)
    going_on = [e for e in generator.pending if not e.ended]
    assert 0 < len(going_on) < len(generator.pending)
    backend.requests.clear()
    generator.generate(make_prompts(2, 0), how, 2, 2)
    assert [(len(r.ids), r.min_tokens, r.max_tokens) for r in backend.requests] == [(len(e.prompt) + 10, 0, 2) for e in going_on]
    assert generator.pending == []


def test_the_largest_seed_goes_on_at_zero():
    generator = Generator(Scripted(), 7, 1, None)
    generator.generate(make_prompts(0, 1), replace(HOW, n=1, min_tokens=12), 0, 0)
    (episode,) = generator.pending
    episode.seed = MAX_SEED
    assert episode.request(HOW, 1).seed == 0


def test_validation_has_no_step_limits_and_leaves_kept_groups_alone():
    generator = Generator(Scripted(), 7, 2, None)
    generator.generate(make_prompts(0, 3), HOW, 0, 0)
    kept = generator.state()
    assert kept
    how = replace(HOW, purpose="validation", n=1)
    batch = generator.generate(make_prompts(0, 5), how, 0, 3, expired=lambda: True)
    assert rows_of(batch) == rows_of(Generator(Scripted(), 7, 0, None).generate(make_prompts(0, 5), how, 0, 3))
    assert len(batch) == 5 and generator.state() == kept


def test_a_deadline_keeps_what_is_not_finished():
    """Asked after every token; the step ends with what is there, and the samples go on from it."""
    generator, left = Generator(Scripted(), 7, 0, None), iter([False, False, True])
    batch = generator.generate(make_prompts(0, 6), HOW, 0, 0, lambda: next(left))
    assert next(left, "asked 3 times") == "asked 3 times"
    assert max(len(e.ids) for e in generator.pending) == 3 and {e.uid for e in generator.pending}.isdisjoint(batch.uid.tolist())
    rest = generator.generate(make_prompts(6, 0), HOW, 1, 1, lambda: False)
    rows, expected = rows_of(batch) | rows_of(rest), whole(make_prompts(0, 6), 0)
    assert rows.keys() == expected.keys() and not generator.pending
    for name, row in rows.items():
        assert row.ids == expected[name].ids and row.versions == [0] * 3 + [1] * (len(row.ids) - 3) or len(row.ids) <= 3


def test_no_rows_have_the_fields_of_some():
    """Nothing was asked for, or everything is kept."""
    generator = Generator(Scripted(), 7, 1, None)
    none, kept = (
        generator.generate(make_prompts(0, 0), HOW, 0, 0),
        generator.generate(make_prompts(0, 3), replace(HOW, min_tokens=4), 0, 0),
    )
    some = Generator(Scripted(), 7, 0, None).generate(make_prompts(0, 3), HOW, 0, 0)
    assert len(generator.pending) == 12
    for batch in (none, kept):
        assert batch.batch_size == (0,) and batch.input_ids.shape == batch.response_mask.shape == (0, 0)
        assert {name: (t.dtype, t.ndim) for name, t in fields_of(batch).items()} == {
            name: (t.dtype, t.ndim) for name, t in fields_of(some).items()
        }


def test_bad_prompts_are_named():
    backend = Scripted()
    backend.max_model_len = 14
    generator = Generator(backend, 7, 0, None)
    with pytest.raises(ValueError, match="uid 2 has 3 tokens; 1 to 2 fit beside 12 .* lower rollout.max_response_tokens or raise"):
        generator.generate(make_prompts(0, 4), HOW, 0, 0)
    empty = make_prompts(0, 2)
    empty.lengths[1] = 0
    with pytest.raises(ValueError, match="uid 1 has 0 tokens"):
        generator.generate(empty, HOW, 0, 0)
    assert backend.requests == []  # before anything is drawn


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_log_probs_that_are_not_finite_are_named(bad):
    class Diverged(Scripted):
        def complete(self, requests, sampling, expired):
            replies = super().complete(requests, sampling, expired)
            replies[6].log_probs[0] = bad
            return replies

    with pytest.raises(ValueError, match="uid 1, sample 2 are not finite: .* lower optimizer.learning_rate"):
        Generator(Diverged(), 7, 0, None).generate(make_prompts(0, 3), HOW, 0, 0)


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


def stream_of(adapter: ServerAdapter, named: dict, expected=((-6.0, -7.0), (-9.0,))) -> WeightStream:
    return WeightStream(adapter.mesh, iter(named.items()), lambda: [list(row) for row in expected])


def test_an_update_gives_its_version_to_what_is_drawn_next(tmp_path, monkeypatch):
    (adapter,) = Ranks(tmp_path, 1, monkeypatch).adapters
    adapter.update_weights(stream_of(adapter, weights()), 5)
    assert adapter.backend.awake == ["weights", "kv_cache"] and adapter.backend.loaded.keys() == {"a", "b"}
    batch = adapter.generate(adapter.next_prompts(make_prompts, 0, 2), HOW, 0).local
    assert set(batch.policy_version[batch.response_mask].tolist()) == {5}
    assert adapter.take()["rollout/probe_diff_max"].value == 0


def test_tensors_that_do_not_fit_are_all_named(tmp_path, monkeypatch):
    (adapter,) = Ranks(tmp_path, 1, monkeypatch).adapters
    wrong = weights(a=torch.zeros(3, 2), c=torch.zeros(1))
    del wrong["b"]
    named = iter(wrong.items())
    with pytest.raises(ValueError) as error:
        adapter.update_weights(WeightStream(adapter.mesh, named), 5)
    assert str(error.value).splitlines() == [
        "weights of version 5 do not fit the rollout model:",
        "a: shape (3, 2), in the model's files (2, 3)",
        "c: not in the model's files",
        "b: in the model's files, not in the stream",
    ]
    assert next(named, None) is None and adapter.version == 0  # a collective stream is exhausted by all


def test_a_probe_that_disagrees_stops_the_run(tmp_path, monkeypatch):
    (adapter,) = Ranks(tmp_path, 1, monkeypatch).adapters
    adapter.update_weights(stream_of(adapter, weights(), ((-6.001, -7.0), (-9.0,))), 1)
    for off in (-8.5, float("nan")):
        with pytest.raises(RuntimeError, match=r"version 2: .* nats off .* limit 0.001.* try rollout=hf"):
            adapter.update_weights(stream_of(adapter, weights(), ((-6.0, -7.0), (off,))), 2)
    assert adapter.version == 1
