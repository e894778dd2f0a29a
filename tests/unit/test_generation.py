"""Generator over a scripted backend: seeds, limits, and groups that go on in a later step."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from spmd_rl.batch import Prompts, Sampling, fields_of, sample_seed
from spmd_rl.roles.generation import MAX_SEED, Generator, Reply, RolloutBackend

STOP = 2
HOW = Sampling(1.0, 4, 0, 12, (STOP,))
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
