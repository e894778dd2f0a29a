"""HFRollout against transformers' own generate and forward, on random tiny models in float32."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Gemma2Config, MistralConfig

from spmd_rl.batch import Batch, Prompts, Sampling
from spmd_rl.config import RolloutConfig
from spmd_rl.mesh import RoleMesh
from spmd_rl.roles import hf_rollout
from spmd_rl.roles.generation import Generator, Request, RolloutModel
from spmd_rl.roles.hf_rollout import HFRollout, draw
from tests.helpers import SIZES, forward_log_probs, tiny_config

ALONE = RoleMesh((0,), 1, 0, torch.device("cpu"))
LENGTHS = (5, 11, 3, 8)
STOPS = (2, 7, 13, 21, 40)  # many, so that rows end at many lengths


def save_model(folder, config, seed=0):
    """A random model with logits far from uniform, saved in `folder`; read back with transformers' own attention."""
    torch.manual_seed(seed)
    config.initializer_range = 0.3
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def load_rollout(folder, max_batch_rows=64, dtype="float32"):
    return HFRollout(RolloutConfig(dtype=dtype, max_batch_rows=max_batch_rows), RolloutModel(str(folder), (2,)), ALONE)


def generate(rollout, prompts, how, step=0, seed=0) -> Batch:
    return Generator(rollout, seed, 0, None).generate(prompts, how, step, version=0)


def make_prompts(lengths=LENGTHS, seed=0):
    g = torch.Generator().manual_seed(seed)
    columns, lengths = torch.arange(max(lengths, default=0)), torch.tensor(lengths, dtype=torch.int64)
    ids = torch.randint(3, 64, (len(lengths), len(columns)), generator=g) * (columns < lengths[:, None])
    uid = 100 + torch.arange(len(lengths))
    return Prompts(input_ids=ids, lengths=lengths, uid=uid, row=uid + 1, data_source=uid % 2, batch_size=[len(lengths)])


def sampling(temperature=1.0, n=4, min_tokens=0, max_tokens=12, stops=STOPS, purpose="train"):
    return Sampling(temperature, n, min_tokens, max_tokens, stops, purpose)


def responses(batch):
    """(uid, sample) -> (token ids, log-probs) of the response."""
    out = {}
    for b, (uid, sample) in enumerate(zip(batch.uid.tolist(), batch.sample.tolist())):
        at = slice(batch.prompt_lengths[b], batch.lengths[b])
        out[uid, sample] = batch.input_ids[b, at].tolist(), batch.rollout_log_probs[b, at]
    return out


@torch.no_grad()
def teacher_forced(model, batch, b, temperature):
    """[response tokens, V] float32 nats of one row, alone, by the model's own attention."""
    prompt, end = int(batch.prompt_lengths[b]), int(batch.lengths[b])
    logits = model(batch.input_ids[b : b + 1, :end]).logits[0, prompt - 1 : end - 1]
    return (logits / temperature).log_softmax(-1)


@pytest.fixture(params=["llama", "qwen2", "qwen3", "qwen3_moe"])
def pair(request, tmp_path):
    return save_model(tmp_path, tiny_config(request.param)), load_rollout(tmp_path)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """The folder and the model of one Llama that several tests read."""
    folder = tmp_path_factory.mktemp("llama")
    return folder, save_model(folder, tiny_config("llama", tied=True))


def test_greedy_equals_transformers_generate(pair):
    model, rollout = pair
    prompts = make_prompts()
    width = prompts.input_ids.shape[1]
    left = torch.stack([row.roll(width - n) for row, n in zip(prompts.input_ids, prompts.lengths.tolist())])
    how = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": list(STOPS), "pad_token_id": 0}
    theirs = model.generate(left, attention_mask=(left != 0).long(), **how)[:, width:]
    batch = generate(rollout, prompts, sampling(temperature=0.0, n=1))
    assert batch.temperature.tolist() == [1.0] * 4
    for (ids, _), row in zip(responses(batch).values(), theirs.tolist()):
        assert ids + [0] * (len(row) - len(ids)) == row


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_log_probs_equal_a_teacher_forced_forward(pair, temperature):
    model, rollout = pair
    batch = generate(rollout, make_prompts(), sampling(temperature))
    assert batch.rollout_log_probs.dtype == torch.float32
    assert not batch.rollout_log_probs.is_inference() and not batch.input_ids.is_inference()  # autograd may save them
    if temperature:
        assert len(set(batch.lengths.tolist())) > 4  # rows did leave the batch at many moments
    for b in range(len(batch.uid)):
        prompt, end = int(batch.prompt_lengths[b]), int(batch.lengths[b])
        expected = torch.zeros(batch.input_ids.shape[1])
        target = batch.input_ids[b, prompt:end, None]
        expected[prompt:end] = teacher_forced(model, batch, b, temperature or 1.0).gather(1, target)[:, 0]
        torch.testing.assert_close(batch.rollout_log_probs[b], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("max_batch_rows", [1, 3, 10])
def test_samples_do_not_depend_on_the_batch(llama, max_batch_rows):
    prompts = make_prompts()
    whole = responses(generate(load_rollout(llama[0]), prompts, sampling(), 3))
    rollout = load_rollout(llama[0], max_batch_rows)
    shuffled = responses(generate(rollout, prompts[torch.tensor([2, 0, 3, 1])], sampling(), 3))
    first, second = (responses(generate(rollout, shard, sampling(), 3)) for shard in (prompts[:1], prompts[1:]))
    for other in (shuffled, first | second):
        assert other.keys() == whole.keys()
        for name, (ids, log_probs) in whole.items():
            assert other[name][0] == ids
            torch.testing.assert_close(other[name][1], log_probs, rtol=0, atol=1e-5)


def test_samples_differ_by_name_and_repeat(llama):
    rollout = load_rollout(llama[0])
    free = sampling(n=8, stops=())
    first = [ids for ids, _ in responses(generate(rollout, make_prompts(), free)).values()]
    assert len({tuple(ids) for ids in first}) == 32
    assert first == [ids for ids, _ in responses(generate(rollout, make_prompts(), free)).values()]
    others = ((free, 1, 0), (free, 0, 1), (sampling(n=8, stops=(), purpose="validation"), 0, 0))
    for how, step, seed in others:
        drawn = [ids for ids, _ in responses(generate(rollout, make_prompts(), how, step, seed)).values()]
        assert all(a != b for a, b in zip(first, drawn))


def test_a_request_is_completed_alike_beside_any_other(llama):
    """Also where those beside it may grow longer, start with stop ids forbidden, or have no sibling."""
    rollout = load_rollout(llama[0], max_batch_rows=5)
    prompts = ([5, 6, 7], [9] * 11, [5, 6, 7], [30, 31], [5, 6, 7])
    requests = [
        Request(ids, 10 + i, least, most) for i, (ids, least, most) in enumerate(zip(prompts, (0, 6, 3, 0, 0), (4, 40, 12, 1, 25)))
    ]
    for temperature in (0.0, 1.0):
        together = rollout.complete(requests, sampling(temperature))
        for request, reply in zip(requests, together, strict=True):
            (alone,) = rollout.complete([request], sampling(temperature))
            assert (alone.ids, alone.stopped) == (reply.ids, reply.stopped)
            assert alone.log_probs == pytest.approx(reply.log_probs, abs=1e-5)
            assert len(reply.ids) <= request.max_tokens and len(reply.ids) == len(reply.log_probs)
            assert not set(reply.ids[: request.min_tokens]) & set(STOPS) and (reply.ids[-1] in STOPS) == reply.stopped
            assert reply.stopped or len(reply.ids) == request.max_tokens
    assert rollout.complete([], sampling()) == []


def test_at_the_deadline_replies_are_what_is_there(llama):
    """Every row has one token at least: a step that keeps all of its groups goes on."""
    asked = iter([False, False, True])
    free = sampling(stops=())
    rollout = load_rollout(llama[0], max_batch_rows=2)
    requests = [Request([3, 4, 5], seed, 0, 12) for seed in range(3)]
    whole = rollout.complete(requests, free)
    cut = rollout.complete(requests, free, lambda: next(asked, True))
    assert [len(reply.ids) for reply in cut] == [3, 3, 1]
    for reply, other in zip(cut, whole):
        assert not reply.stopped and other.ids[: len(reply.ids)] == reply.ids


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_frequencies_are_those_of_the_model(llama, temperature):
    """Pearson's chi-square of 4,000 first tokens; below the 99.9 % quantile (Wilson-Hilferty)."""
    folder, model = llama
    rollout = load_rollout(folder, max_batch_rows=4000)
    batch = generate(rollout, make_prompts((6,)), sampling(temperature, n=4000, max_tokens=1))
    expected = teacher_forced(model, batch, 0, temperature)[0].exp() * 4000
    seen = torch.bincount(batch.input_ids[:, 6], minlength=64).float()
    common = expected >= 5
    expected, seen = (torch.cat([x[common], x[~common].sum()[None]]) for x in (expected, seen))
    df = len(expected) - 1
    assert df > 10
    assert ((seen - expected) ** 2 / expected).sum() < df * (1 - 2 / (9 * df) + 3.09 * (2 / (9 * df)) ** 0.5) ** 3


@pytest.mark.parametrize("vocabulary", [7, 128, 300])
def test_draw_inverts_the_distribution(vocabulary):
    """Evenly spaced uniforms hit each token p * num times, off by at most one; ids without probability never."""
    num = 20_000
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(0)) * 2
    logits[[0, 3, vocabulary - 1]] = -torch.inf
    p = logits.double().div(0.5).softmax(-1)
    uniforms = (torch.arange(num, dtype=torch.float64) + 0.5) / num
    tokens, log_probs = draw(logits.repeat(num, 1), 0.5, uniforms)
    assert (torch.bincount(tokens, minlength=vocabulary) - p * num).abs().max() <= 1.01
    torch.testing.assert_close(log_probs, p.log()[tokens].float(), rtol=0, atol=2e-6)
    ends = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    assert draw(logits.repeat(2, 1), 0.5, ends)[0].tolist() == [1, vocabulary - 2]


@pytest.mark.parametrize(
    "stops, script, mask, truncated",
    [
        ((2,), [5, 7, 2], [1, 1, 1, 0, 0], False),
        ((0,), [5, 7, 0], [1, 1, 1, 0, 0], False),  # padding is the stop id
        ((2,), [5, 7, 8, 6, 4], [1, 1, 1, 1, 1], True),  # no stop id is added
        ((2,), [5, 7, 8, 6, 2], [1, 1, 1, 1, 1], False),
        ((2, 3), [5, 3], [1, 1, 0, 0, 0], False),
        ((0,), [0], [1, 0, 0, 0, 0], False),
    ],
)
def test_stop_padding_and_truncation(llama, monkeypatch, stops, script, mask, truncated):
    """Sample 0 draws `script`, sample 1 never stops (TRL issues 1623, 6357, 6800; OpenRLHF 217; verl 5797)."""
    left = [iter(script), iter([5, 7, 8, 6, 4])]

    def scripted(logits, temperature, uniforms):
        tokens = [next(row) for row in left]
        left[:] = [row for row, token in zip(left, tokens) if token not in stops]
        return torch.tensor(tokens), torch.full((len(tokens),), -0.5)

    monkeypatch.setattr(hf_rollout, "draw", scripted)
    batch = generate(load_rollout(llama[0]), make_prompts((4,)), sampling(n=2, max_tokens=5, stops=stops))
    assert batch.input_ids[0, 4:].tolist() == script + [0] * (5 - len(script))
    assert batch.response_mask.int().tolist() == [[0] * 4 + mask, [0] * 4 + [1] * 5]
    assert batch.lengths.tolist() == [4 + len(script), 9]
    assert batch.truncated.tolist() == [truncated, True]
    assert batch.rollout_log_probs[0].tolist() == [0] * 4 + [-0.5 * m for m in mask]
    assert batch.policy_version.dtype == torch.int32
    assert batch.policy_version[0].tolist() == [-1] * 4 + [m - 1 for m in mask]  # version 0


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_min_tokens_take_the_probability_of_stop_ids(llama, temperature):
    folder, model = llama
    stops = tuple(range(32))
    batch = generate(load_rollout(folder), make_prompts(), sampling(temperature, n=8, min_tokens=3, stops=stops))
    counts = batch.lengths - batch.prompt_lengths
    assert counts.min() >= 3
    assert not temperature or (counts == 4).any()
    for b, (ids, log_probs) in enumerate(responses(batch).values()):
        assert min(ids[:3]) >= 32
        expected = teacher_forced(model, batch, b, 1.0)
        expected[:3, :32] = -torch.inf
        expected = expected.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
        torch.testing.assert_close(log_probs, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "max_batch_rows, prefill",
    [(64, [(4, 11)]), (8, [(2, 11), (2, 5)]), (4, [(1, 11), (1, 8), (1, 5), (1, 3)]), (6, [(2, 11), (2, 8), (1, 3)])],
)
def test_a_prompt_is_computed_once_in_each_batch(llama, max_batch_rows, prefill):
    """Where whole groups fit into a batch: once."""
    rollout = load_rollout(llama[0], max_batch_rows)
    shapes = []
    embed = rollout.model.get_input_embeddings()
    embed.register_forward_hook(lambda module, args, out: shapes.append(tuple(args[0].shape)))
    generate(rollout, make_prompts(), sampling(n=4))
    assert [shape for shape in shapes if shape[1] > 1] == prefill
    assert max(rows for rows, tokens in shapes if tokens == 1) <= max_batch_rows


def test_finished_rows_leave_the_batch(llama):
    rollout = load_rollout(llama[0])
    rows = []
    rollout.model.get_input_embeddings().register_forward_hook(lambda module, args, out: rows.append(len(args[0])))
    batch = generate(rollout, make_prompts(), sampling(n=4))
    counts = batch.lengths - batch.prompt_lengths
    assert sum(rows[1:]) == int((counts - 1).sum())  # no token is computed for a row that has ended


def test_score_is_the_models_own(pair):
    """Log-probs at temperature 1 of each row's tokens after the first, rows of unlike length."""
    model, rollout = pair
    rows = [[5, 9, 11, 2, 7], [3], [8, 8], list(range(3, 40))]
    found = rollout.score(rows)
    assert [len(row) for row in found] == [4, 0, 1, 36]
    for row, log_probs in zip(rows, found):
        expected = forward_log_probs(model, row)[torch.arange(len(row) - 1), row[1:]]
        torch.testing.assert_close(torch.tensor(log_probs), expected, rtol=0, atol=1e-5)


def test_update_weights(tmp_path, pair):
    model, rollout = pair
    other = save_model(tmp_path / "other", tiny_config(model.config.model_type), seed=1)
    expected = generate(load_rollout(tmp_path / "other"), make_prompts(), sampling())
    before = generate(rollout, make_prompts(), sampling())
    tensors = load_file(tmp_path / "other/model.safetensors")
    rollout.update_weights((name, tensor.double()) for name, tensor in tensors.items())
    after = generate(rollout, make_prompts(), sampling())
    assert not torch.equal(before.lengths, after.lengths)
    for name in ("input_ids", "rollout_log_probs", "lengths"):
        assert torch.equal(after.get(name), expected.get(name))
    assert rollout.model.dtype == other.dtype == torch.float32


def test_parameters_that_got_nothing_are_named(llama):
    """After the whole stream: a collective one must be exhausted by all."""
    rollout = load_rollout(llama[0])
    tensors = load_file(llama[0] / "model.safetensors")
    del tensors["model.norm.weight"], tensors["model.embed_tokens.weight"]
    stream = iter(tensors.items())
    with pytest.raises(ValueError, match="got no weights: model.embed_tokens.weight, model.norm.weight$"):
        rollout.update_weights(stream)
    assert next(stream, None) is None


@pytest.mark.parametrize(
    "config, what",
    [
        (MistralConfig(**SIZES, sliding_window=4), "'mistral' has sliding_window=4"),
        (Gemma2Config(**SIZES, head_dim=8), "'gemma2' has .*sliding_attention"),
        (Gemma2Config(**SIZES, head_dim=8, layer_types=["full_attention"] * 2), "'gemma2' has .*softcap=50"),
    ],
    ids=["mistral", "gemma2", "gemma2-full"],
)
def test_other_attention_is_refused(tmp_path, config, what):
    save_model(tmp_path, config)
    with pytest.raises(ValueError, match=what):
        load_rollout(tmp_path)


def test_logits_that_are_not_finite_are_named(llama):
    rollout = load_rollout(llama[0])
    rollout.model.lm_head.weight.fill_(torch.nan)
    for temperature in (1.0, 0.0):
        with pytest.raises(ValueError, match="uid 100, sample 0 are not finite: .* lower optimizer.learning_rate"):
            generate(rollout, make_prompts((5, 3)), sampling(temperature))


@pytest.mark.parametrize(("given", "expected"), [(None, 256), (40, 40)])
def test_the_context_is_that_of_the_model_unless_given(llama, given, expected):
    config = RolloutConfig(dtype="float32", max_model_len=given)
    assert HFRollout(config, RolloutModel(str(llama[0]), (2,)), ALONE).max_model_len == expected


def test_bfloat16_samples_with_float32_log_probs(llama):
    rollout = load_rollout(llama[0], dtype="bfloat16")
    held = rollout.memory()["weights"]
    rollout.sleep()
    assert rollout.memory()["weights"] == 0 < held
    rollout.wake_up("weights")
    rollout.update_weights(llama[1].named_parameters())
    rollout.wake_up("kv_cache")
    assert rollout.memory()["weights"] == held
    batch = generate(rollout, make_prompts(), sampling())
    assert rollout.model.dtype == torch.bfloat16
    assert batch.rollout_log_probs.dtype == torch.float32
    for b, (ids, log_probs) in enumerate(responses(batch).values()):
        expected = teacher_forced(llama[1], batch, b, 1.0).gather(1, torch.tensor(ids)[:, None])[:, 0]
        assert (log_probs - expected).abs().mean() < 0.2  # rounding of the activations, not an offset
    rollout.shutdown()
