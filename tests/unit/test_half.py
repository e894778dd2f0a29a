"""Products of bfloat16 tensors where the host has no instructions for them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from spmd_rl.engine import half
from spmd_rl.engine.logprob import token_log_probs


def grads(forward, *tensors):
    given = [t.clone().requires_grad_() for t in tensors]
    out = forward(*given)
    out.backward(torch.linspace(-1, 1, out.numel()).bfloat16().view(out.shape).to(out.dtype))
    return [out.detach(), *(t.grad for t in given)]


@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_layer_is_the_float32_product_rounded_once(bias):
    torch.manual_seed(0)
    layer = nn.Linear(48, 24, bias=bias, dtype=torch.bfloat16)
    half.float32_products(layer)
    x = torch.randn(2, 5, 48).bfloat16()
    out, to_x = grads(layer, x)
    exact, exact_to_x, exact_to_weight = grads(lambda a, w: a @ w.t(), x.double(), layer.weight.detach().double())
    exact += layer.bias.double().detach() if bias else 0
    assert out.dtype == to_x.dtype == layer.weight.grad.dtype == torch.bfloat16
    for got, want in ((out, exact), (to_x, exact_to_x), (layer.weight.grad, exact_to_weight)):
        torch.testing.assert_close(got.double(), want, rtol=2**-7, atol=2e-3)


def test_frozen_weights_and_float32_inputs_are_left_alone():
    layer = nn.Linear(4, 3, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    half.float32_products(layer)
    x = torch.randn(2, 4, dtype=torch.bfloat16, requires_grad=True)
    layer(x).sum().backward()
    assert layer.weight.grad is None and x.grad is not None
    exact = nn.Linear(4, 3)
    expected = exact(x.float())
    half.float32_products(exact)
    assert torch.equal(exact(x.float()), expected)


@pytest.mark.parametrize("emulated", [False, True])
def test_log_probs_either_way(monkeypatch, emulated):
    monkeypatch.setattr(half, "cpu_has_bf16", lambda: not emulated)
    torch.manual_seed(0)
    hidden, weight = torch.randn(7, 16).bfloat16(), torch.randn(40, 16).bfloat16()
    targets, temperature = torch.randint(40, (7,)), torch.ones(7)
    got = grads(lambda h, w: token_log_probs(h, w, targets, temperature, 3)[0], hidden, weight)
    want = grads(lambda h, w: (h @ w.t()).log_softmax(-1).gather(1, targets[:, None])[:, 0], hidden.double(), weight.double())
    assert [t.dtype for t in got] == [torch.float32, torch.bfloat16, torch.bfloat16]
    torch.testing.assert_close(got[0].double(), want[0], rtol=0, atol=1e-5 if emulated else 0.1)
    for one, other in zip(got[1:], want[1:]):
        torch.testing.assert_close(one.double(), other, rtol=0.05, atol=0.03)
