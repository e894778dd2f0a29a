"""Token log-probs and entropy from hidden states, in chunks: `[T, V]` logits never exist whole."""

from __future__ import annotations

import torch
from torch import Tensor


class _TokenLogProb(torch.autograd.Function):
    """Logits of one chunk at a time, in float32, computed again in the backward instead of kept."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, chunk, with_entropy):
        log_probs = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        normalizer, entropy = torch.empty_like(log_probs), torch.zeros_like(log_probs)
        for part in _chunks(hidden.shape[0], chunk):
            logits = _logits(hidden[part], weight, temperature[part])
            normalizer[part] = logits.logsumexp(-1)
            log_probs[part] = logits.gather(1, targets[part, None])[:, 0] - normalizer[part]
            if with_entropy:
                entropy[part] = normalizer[part] - (torch.softmax(logits, -1) * logits).sum(-1)
        ctx.save_for_backward(hidden, weight, targets, temperature, normalizer, entropy)
        ctx.chunk, ctx.with_entropy = chunk, with_entropy
        return log_probs, entropy

    @staticmethod
    def backward(ctx, grad_log_probs, grad_entropy):
        hidden, weight, targets, temperature, normalizer, entropy = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for part in _chunks(hidden.shape[0], ctx.chunk):
            logits = _logits(hidden[part], weight, temperature[part]).sub_(normalizer[part, None])  # now log-probs
            if ctx.with_entropy:  # dH/dz = -p (log p + H); d(log p[target])/dz = onehot - p
                scale = grad_entropy[part, None] * (logits + entropy[part, None]) + grad_log_probs[part, None]
                grad = logits.exp_().mul_(scale).neg_()
            else:
                grad = logits.exp_().mul_(-grad_log_probs[part, None])
            grad.scatter_add_(1, targets[part, None], grad_log_probs[part, None])
            grad = grad.div_(temperature[part, None]).to(weight.dtype)
            grad_hidden[part] = grad @ weight
            if weight.dtype == torch.float32:
                grad_weight.addmm_(grad.t(), hidden[part])
            else:
                grad_weight += grad.t() @ hidden[part]
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None


def _chunks(total: int, size: int) -> list[slice]:
    return [slice(i, min(i + size, total)) for i in range(0, total, size)]


def _logits(hidden: Tensor, weight: Tensor, temperature: Tensor) -> Tensor:
    return (hidden @ weight.t()).float().div_(temperature[:, None])


def token_log_probs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor, chunk: int, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Log-prob of each target under softmax(hidden @ weight.T / temperature), and the entropy where asked for.

    `hidden` [N, D] and `weight` [V, D] of one dtype, `targets` [N] int64, `temperature` [N] float32. Returns [N] float32
    nats each. At most `chunk` rows of logits exist at one time, forward and backward; entropy costs nothing unless asked."""
    log_probs, entropy = _TokenLogProb.apply(hidden, weight, targets, temperature, chunk, with_entropy)
    return log_probs, entropy if with_entropy else None
