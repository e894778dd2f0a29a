"""Token log-probs and entropy from hidden states, in chunks, over a vocabulary that may be split over ranks: `[T, V]` logits
never exist whole."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from spmd_rl.engine.half import computable

PADDING = -1e30  # the logit of a row that is no token: no probability, and no NaN where it is multiplied by that


@dataclass(frozen=True)
class VocabShard:
    """The part of the vocabulary that this rank's rows of the head are: `start : start + rows`; rows after that are padding."""

    group: dist.ProcessGroup
    start: int
    rows: int


class _TokenLogProb(torch.autograd.Function):
    """Logits of one chunk at a time, in float32, computed again in the backward instead of kept."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, chunk, with_entropy, vocab):
        log_probs = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        normalizer, entropy = torch.empty_like(log_probs), torch.zeros_like(log_probs)
        mine, targets = _mine(targets, vocab)
        given = hidden, weight
        hidden, weight = computable(hidden), computable(weight)
        for part in _chunks(hidden.shape[0], chunk):
            logits = _logits(hidden[part], weight, temperature[part], vocab)
            normalizer[part] = _logsumexp(logits, vocab)
            chosen = logits.gather(1, targets[part, None])[:, 0]
            log_probs[part] = _sum(chosen if mine is None else chosen.where(mine[part], 0.0), vocab) - normalizer[part]
            if with_entropy:
                expected = logits.sub(normalizer[part, None]).exp_().mul_(logits).sum(-1)
                entropy[part] = normalizer[part] - _sum(expected, vocab)
        ctx.save_for_backward(*given, targets, temperature, normalizer, entropy, mine)
        ctx.chunk, ctx.with_entropy, ctx.vocab = chunk, with_entropy, vocab
        return log_probs, entropy

    @staticmethod
    def backward(ctx, grad_log_probs, grad_entropy):
        hidden, weight, targets, temperature, normalizer, entropy, mine = ctx.saved_tensors
        dtype, hidden, weight = weight.dtype, computable(hidden), computable(weight)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if ctx.needs_input_grad[1] else None
        for part in _chunks(hidden.shape[0], ctx.chunk):
            logits = _logits(hidden[part], weight, temperature[part], ctx.vocab).sub_(normalizer[part, None])  # now log-probs
            if ctx.with_entropy:  # dH/dz = -p (log p + H); d(log p[target])/dz = onehot - p
                scale = grad_entropy[part, None] * (logits + entropy[part, None]) + grad_log_probs[part, None]
                grad = logits.exp_().mul_(scale).neg_()
            else:
                grad = logits.exp_().mul_(-grad_log_probs[part, None])
            chosen = grad_log_probs[part] if mine is None else grad_log_probs[part].where(mine[part], 0.0)
            grad.scatter_add_(1, targets[part, None], chosen[:, None])
            grad = grad.div_(temperature[part, None]).to(weight.dtype)
            grad_hidden[part] = grad @ weight
            if grad_weight is None:
                continue
            if weight.dtype == torch.float32:
                grad_weight.addmm_(grad.t(), hidden[part])
            else:
                grad_weight += grad.t() @ hidden[part]
        grad_weight = None if grad_weight is None else grad_weight.to(dtype)
        return _sum(grad_hidden.to(dtype), ctx.vocab), grad_weight, None, None, None, None, None


def _chunks(total: int, size: int) -> list[slice]:
    return [slice(i, min(i + size, total)) for i in range(0, total, size)]


def _logits(hidden: Tensor, weight: Tensor, temperature: Tensor, vocab: VocabShard | None) -> Tensor:
    logits = (hidden @ weight.t()).float().div_(temperature[:, None])
    if vocab and vocab.rows < weight.shape[0]:
        logits[:, vocab.rows :] = PADDING
    return logits


def _mine(targets: Tensor, vocab: VocabShard | None) -> tuple[Tensor | None, Tensor]:
    """([N] bool: the target is in this rank's part, or None where there is one part; [N] its row there, 0 where it is not)."""
    if vocab is None:
        return None, targets
    rows = targets - vocab.start
    mine = (rows >= 0) & (rows < vocab.rows)
    return mine, rows.where(mine, 0)


def _sum(x: Tensor, vocab: VocabShard | None) -> Tensor:
    if vocab:
        dist.all_reduce(x, group=vocab.group)
    return x


def _logsumexp(logits: Tensor, vocab: VocabShard | None) -> Tensor:
    if vocab is None:
        return logits.logsumexp(-1)
    top = logits.amax(-1)
    dist.all_reduce(top, dist.ReduceOp.MAX, group=vocab.group)
    return _sum(logits.sub(top[:, None]).exp_().sum(-1), vocab).log_().add_(top)


def token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: Tensor,
    chunk: int,
    with_entropy: bool = False,
    vocab: VocabShard | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-prob of each target under softmax(hidden @ weight.T / temperature), and the entropy where asked for.

    `hidden` [N, D] and `weight` [V, D] of one dtype, `targets` [N] int64, `temperature` [N] float32. Returns [N] float32
    nats each. At most `chunk` rows of logits exist at one time, forward and backward; entropy costs nothing unless asked.
    With `vocab`, collective over its group: `weight` is this rank's part of the head, all else is alike on the group's ranks,
    and so are the results; the gradient of `hidden` is whole on each, that of `weight` is its part's."""
    log_probs, entropy = _TokenLogProb.apply(hidden, weight, targets, temperature, chunk, with_entropy, vocab)
    return log_probs, entropy if with_entropy else None
