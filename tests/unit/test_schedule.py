"""The learning-rate schedule against the numbers of a reference and torch's own schedulers."""

from __future__ import annotations

import math

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR

from spmd_rl.config import OptimizerConfig
from spmd_rl.engine.base import lr_multiplier

COSINE = [1, 0.9619398, 0.8535534, 0.6913417, 0.5, 0.3086583, 0.1464466, 0.0380602, 0]  # warm-up 2, total 10: steps 2..10


def multipliers(count: int, **options) -> list[float]:
    return [lr_multiplier(OptimizerConfig(**options), step) for step in range(count)]


def of_torch(count: int, make) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler, found = make(optimizer), []
    for _ in range(count):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def test_warm_up_and_cosine():
    """After the warm-up exactly the cosine of the reference; before it no update is void (the reference starts at 0)."""
    found = multipliers(14, schedule="cosine", warmup_steps=2, total_steps=10)
    assert found[:2] == pytest.approx([1 / 3, 2 / 3])
    assert found[2:11] == pytest.approx(COSINE, abs=1e-7)
    assert found[11:] == [0.0] * 3


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 1, 5])
def test_no_update_is_void_and_the_top_is_reached(schedule, warmup):
    found = multipliers(10, schedule=schedule, warmup_steps=warmup, total_steps=10)
    assert min(found) > 0
    assert found[: warmup + 1] == pytest.approx([(k + 1) / (warmup + 1) for k in range(warmup + 1)])
    assert max(found) == found[warmup] == 1.0
    assert found[:warmup] == sorted(found[:warmup]) and found[warmup:] == sorted(found[warmup:], reverse=True)


@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_torch_has_the_same_decay(floor):
    options = {"warmup_steps": 0, "total_steps": 8, "min_lr_ratio": floor}
    cosine = of_torch(9, lambda optimizer: CosineAnnealingLR(optimizer, 8, eta_min=floor))
    assert multipliers(9, schedule="cosine", **options) == pytest.approx(cosine, abs=1e-9)
    linear = of_torch(12, lambda optimizer: LinearLR(optimizer, 1.0, max(floor, 1e-12), 8))
    assert multipliers(12, schedule="linear", **options) == pytest.approx(linear, abs=1e-9)


def test_torch_has_the_same_warm_up():
    expected = of_torch(6, lambda optimizer: LinearLR(optimizer, 1 / 4, 1.0, 3))
    assert multipliers(6, schedule="constant", warmup_steps=3) == pytest.approx(expected)


def test_the_floor_stays():
    for schedule in ("linear", "cosine"):
        found = multipliers(30, schedule=schedule, warmup_steps=2, total_steps=10, min_lr_ratio=0.1)
        assert found[9] > 0.1 and found[10:] == pytest.approx([0.1] * 20)


def test_transformers_agrees_after_the_warm_up():
    """An independent implementation (its warm-up starts at 0)."""
    from transformers import get_cosine_schedule_with_warmup

    expected = of_torch(12, lambda optimizer: get_cosine_schedule_with_warmup(optimizer, 3, 11))
    found = multipliers(12, schedule="cosine", warmup_steps=3, total_steps=11)
    assert found[3:] == pytest.approx(expected[3:], abs=1e-9)
    assert all(0 < f for f in found[:3]) and expected[0] == 0


def test_a_warm_up_of_the_whole_run():
    found = multipliers(6, schedule="cosine", warmup_steps=4, total_steps=4)
    assert found[:4] == pytest.approx([0.2, 0.4, 0.6, 0.8]) and all(math.isfinite(value) for value in found)


def test_a_scheduler_of_torch_can_use_it():
    """The multiplier is what LambdaLR asks for: the same steps, counted from 0."""
    config = OptimizerConfig(schedule="cosine", warmup_steps=2, total_steps=10)
    assert of_torch(10, lambda optimizer: LambdaLR(optimizer, lambda step: lr_multiplier(config, step))) == multipliers(
        10, schedule="cosine", warmup_steps=2, total_steps=10
    )
