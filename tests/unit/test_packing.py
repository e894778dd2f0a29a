"""Packing, block attention and chunked log-probs against a plain transformers forward of each row."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from spmd_rl.engine.attention import NAME, block_mask, blocks_attention, register_attention
from spmd_rl.engine.logprob import token_log_probs
from spmd_rl.engine.packing import Block, pack
from tests.helpers import make_rows, tiny_config

CPU = torch.device("cpu")
MODELS = ["llama", "qwen2", "qwen3", "qwen3_moe"]


def packed_log_probs(model, batch, shared, multiple=1):
    packed = pack(batch, shared, multiple, CPU)
    hidden = model.base_model(
        input_ids=packed.input_ids, position_ids=packed.position_ids, use_cache=False, packed=packed
    ).last_hidden_state[0]
    out, _ = token_log_probs(hidden[packed.source], model.lm_head.weight, packed.targets, packed.temperature, 3)
    return packed.unpack(out)


def own_log_probs(model, batch):
    """Row by row through the model's own attention and head."""
    out = torch.zeros(batch.input_ids.shape)
    for b, (ids, n) in enumerate(zip(batch.input_ids, batch.lengths.tolist())):
        logits = model(input_ids=ids[None, :n], use_cache=False).logits[0].float() / batch.temperature[b]
        out[b, 1:n] = logits.log_softmax(-1)[:-1].gather(1, ids[1:n, None])[:, 0]
    return out * batch.response_mask


@pytest.fixture(params=MODELS)
def models(request):
    register_attention()
    torch.manual_seed(0)
    own = AutoModelForCausalLM.from_config(tiny_config(request.param), attn_implementation="sdpa")
    blocks = AutoModelForCausalLM.from_config(tiny_config(request.param), attn_implementation=NAME)
    blocks.load_state_dict(own.state_dict())
    return own, blocks


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("multiple", [1, 8])
def test_packed_rows_give_the_models_own_log_probs_and_gradients(models, shared, multiple):
    own, blocks = models
    batch = make_rows([(5, [4, 1, 7]), (9, [3, 3]), (2, [6]), (1, [2, 5])], temperature=0.7)
    expected, got = own_log_probs(own, batch), packed_log_probs(blocks, batch, shared, multiple)
    assert (got - expected).abs().max() < 1e-5
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    (expected * weights).sum().backward()
    (got * weights).sum().backward()
    for (name, p), q in zip(own.named_parameters(), blocks.parameters()):
        assert (p.grad - q.grad).norm() <= 1e-4 * p.grad.norm().clamp(min=1e-6), name


def test_siblings_share_only_equal_prompts():
    batch = make_rows([(5, [4, 4])])
    assert pack(batch, True, 1, CPU).input_ids.shape == (1, 13)
    batch.input_ids[1, 0] += 1
    assert pack(batch, True, 1, CPU).input_ids.shape == (1, 18)


def test_masked_tokens_are_not_computed_and_do_not_move_the_others():
    batch = make_rows([(5, [6, 6])])
    whole = pack(batch, True, 1, CPU)
    batch.response_mask[0, 7:9] = False  # an observation inside the response
    part = pack(batch, True, 1, CPU)
    assert len(part.targets) == len(whole.targets) - 2
    kept = torch.tensor([(r, c) not in [(0, 7), (0, 8)] for r, c in zip(whole.rows.tolist(), whole.columns.tolist())])
    assert torch.equal(part.source, whole.source[kept])


def test_flex_block_mask_is_the_same_mask():
    """The mask that CUDA uses, checked densely on the host: prompt 3, responses 2 and 1, then a plain row of 2."""
    blocks = [Block(0, 3, (2, 1)), Block(6, 2, ())]
    mask = block_mask(blocks, CPU)
    dense = torch.tensor([[bool(mask.mask_mod(0, 0, torch.tensor(q), torch.tensor(k))) for k in range(8)] for q in range(8)])
    expected = torch.zeros(8, 8, dtype=torch.bool)
    for seen_by, seen in [((0, 3), (0, 3)), ((3, 5), (0, 5)), ((5, 6), (0, 3)), ((5, 6), (5, 6)), ((6, 8), (6, 8))]:
        expected[slice(*seen_by), slice(*seen)] = True
    assert torch.equal(dense, expected.tril())


@pytest.mark.parametrize("refused", [{"sliding_window": 4}, {"softcap": 30.0}, {"dropout": 0.1}])
def test_layers_that_are_not_full_softmax_are_refused(refused):
    packed = pack(make_rows([(2, [2])]), True, 1, CPU)
    x = torch.zeros(1, 2, 4, 8)
    with pytest.raises(ValueError, match="softmax|dropout"):
        blocks_attention(torch.nn.Identity(), x, x, x, None, packed=packed, **refused)


def test_transformers_ignores_packing_unless_asked_the_right_way(models):
    """Why the engine passes use_cache=False and no mask: with its default cache transformers attends across rows."""
    own, _ = models
    rows = [torch.randint(50, (1, n)) for n in (7, 5)]
    apart = torch.cat([own(input_ids=r, use_cache=False).logits for r in rows], 1)
    ids, positions = torch.cat(rows, 1), torch.cat([torch.arange(7), torch.arange(5)])[None]
    packed = own(input_ids=ids, position_ids=positions, use_cache=False).logits
    cached = own(input_ids=ids, position_ids=positions).logits
    assert (packed - apart).abs().max() < 1e-5
    assert (cached - apart).abs().max() > 1e-2


@pytest.mark.parametrize("chunk", [1, 3, 64])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_log_probs_and_entropy_equal_autograd_of_the_plain_formula(chunk, with_entropy):
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(7, 5, generator=g, requires_grad=True)
    weight = torch.randn(11, 5, generator=g, requires_grad=True)
    targets, temperature = torch.randint(11, (7,), generator=g), torch.rand(7, generator=g) + 0.5
    log_probs, entropy = token_log_probs(hidden, weight, targets, temperature, chunk, with_entropy)
    plain = (hidden @ weight.t() / temperature[:, None]).log_softmax(-1)
    outputs, expected = [log_probs], [plain.gather(1, targets[:, None])[:, 0]]
    if with_entropy:
        outputs.append(entropy)
        expected.append(-(plain.exp() * plain).sum(-1))
    else:
        assert entropy is None
    factors = torch.randn(len(outputs), 7, generator=g)
    got = torch.autograd.grad(sum((o * f).sum() for o, f in zip(outputs, factors)), [hidden, weight])
    want = torch.autograd.grad(sum((o * f).sum() for o, f in zip(expected, factors)), [hidden, weight])
    for a, b in zip(outputs + list(got), expected + list(want)):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_log_prob_and_entropy_reference_values():
    """Logits [2, 1, 0], token 0: -0.4076060 at T=1, -0.1429316 at T=.5, -0.6802697 at T=2; entropy 0.8323956 at T=1."""
    hidden, weight = torch.ones(4, 1), torch.tensor([[2.0], [1.0], [0.0]])
    temperature = torch.tensor([1.0, 0.5, 2.0, 1.0])
    log_probs, entropy = token_log_probs(hidden, weight, torch.zeros(4, dtype=torch.int64), temperature, 2, True)
    torch.testing.assert_close(log_probs[:3], torch.tensor([-0.4076060, -0.1429316, -0.6802697]), atol=1e-6, rtol=0)
    assert entropy[0].item() == pytest.approx(0.8323956, abs=1e-6)
    uniform = token_log_probs(hidden[:1], torch.ones(4, 1), torch.zeros(1, dtype=torch.int64), torch.ones(1), 2, True)[1]
    assert uniform.item() == pytest.approx(1.3862944, abs=1e-6)


def test_whole_logits_never_exist():
    """The largest tensor of a forward and backward has `chunk` rows of the vocabulary."""
    sizes = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            sizes.extend(t.numel() for t in (out if isinstance(out, tuple | list) else [out]) if isinstance(t, torch.Tensor))
            return out

    hidden, weight = torch.randn(64, 4, requires_grad=True), torch.randn(500, 4, requires_grad=True)
    with Watch():
        token_log_probs(hidden, weight, torch.zeros(64, dtype=torch.int64), torch.ones(64), 8)[0].sum().backward()
    assert max(sizes) == 8 * 500
