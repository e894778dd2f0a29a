"""Log-probs over a vocabulary that is split over ranks, unevenly and padded, against the whole one."""

from __future__ import annotations

import torch
import torch.distributed as dist

from benchmarks.parity import start
from spmd_rl.engine.logprob import VocabShard, token_log_probs
from spmd_rl.mesh import close_world
from tests.launch import spmd


@spmd(world_size=2)
def test_split_vocabulary(folder):
    world = start({"actor": 1}, 2)
    torch.manual_seed(0)
    hidden, weight = torch.randn(7, 8, dtype=torch.float32), torch.randn(11, 8)
    targets, temperature = torch.tensor([0, 10, 5, 6, 3, 7, 2]), torch.linspace(0.5, 2, 7)
    first, rows = ((0, 6), (6, 5))[world.rank]
    part = torch.nn.functional.pad(weight[first : first + rows], (0, 0, 0, 6 - rows), value=3.0).requires_grad_()
    vocab = VocabShard(dist.group.WORLD, first, rows)
    mine, whole = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    all_rows = weight.clone().requires_grad_()
    for with_entropy in (False, True):
        got = token_log_probs(mine, part, targets, temperature, 3, with_entropy, vocab)
        logits = (whole @ all_rows.t()) / temperature[:, None]
        log_probs = logits.log_softmax(-1)
        want = log_probs.gather(1, targets[:, None])[:, 0], -(log_probs.exp() * log_probs).sum(-1)
        torch.testing.assert_close(got[0], want[0])
        scale = torch.arange(1.0, 8)
        loss, expected = (got[0] * scale).sum(), (want[0] * scale).sum()
        if with_entropy:
            torch.testing.assert_close(got[1], want[1])
            loss, expected = loss + (got[1] * scale**2).sum(), expected + (want[1] * scale**2).sum()
        loss.backward()
        expected.backward()
        torch.testing.assert_close(mine.grad, whole.grad, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(part.grad[:rows], all_rows.grad[first : first + rows], atol=1e-5, rtol=1e-5)
        assert (part.grad[rows:] == 0).all()
        for tensor in (mine, whole, part, all_rows):
            tensor.grad = None
    close_world(world)
