"""The KL in the reward, the controller of its coefficient, and what is refused of both and of the critic."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from spmd_rl.advantages import gae, grpo, kl_stats, reinforce_plus_plus, rloo, subtract_kl
from spmd_rl.config import AlgorithmConfig, Config, CriticConfig, DataConfig, OptimizerConfig, RolloutConfig, TrainerConfig
from spmd_rl.engine.fsdp import FSDPConfig
from spmd_rl.kl import adapt_kl_coef, kl_estimate, kl_kind
from spmd_rl.metrics import Max, Mean
from spmd_rl.placement import needed_roles
from spmd_rl.train import resolve_auto
from spmd_rl.validation import total_updates, validate
from tests.unit.test_advantages import approx, make_batch, on_ranks

NAN, INF = math.nan, math.inf
IN_REWARD = AlgorithmConfig(kl_in_reward=True)
ZIEGLER = AlgorithmConfig(kl_target=6.0)  # the horizon of 10,000 samples is theirs, too


@pytest.mark.parametrize("kl, samples, horizon, expected", [
    (6.0, 512, 10_000, 0.2),
    (6.6, 512, 10_000, 0.2 * (1 + 0.1 * 0.0512)),
    (6.6, 1000, 10_000, 0.2 * 1.01),  # the paper's gain of 0.1
    (12.0, 512, 10_000, 0.2 * (1 + 0.2 * 0.0512)),
    (INF, 512, 10_000, 0.2 * (1 + 0.2 * 0.0512)),
    (0.0, 512, 10_000, 0.2 * (1 - 0.2 * 0.0512)),
    (-3.0, 512, 10_000, 0.2 * (1 - 0.2 * 0.0512)),  # an estimate may be negative
    (9.0, 100, 100, 0.24), (NAN, 512, 10_000, 0.2), (12.0, 0, 10_000, 0.2), (NAN, 0, 10_000, 0.2)])  # fmt: skip
def test_controller(kl, samples, horizon, expected):
    assert adapt_kl_coef(replace(ZIEGLER, kl_horizon=horizon), 0.2, kl, samples) == pytest.approx(expected, rel=1e-12)
    assert adapt_kl_coef(AlgorithmConfig(), 0.2, kl, samples) == 0.2  # no target


@pytest.mark.parametrize("first", [1e-3, 0.1, 10.0])
def test_controller_settles_at_the_target(first):
    coef = first
    for _ in range(4000):
        coef = adapt_kl_coef(ZIEGLER, coef, 0.6 / coef, 512)  # a policy that strays less the more it costs
    assert 0.6 / coef == pytest.approx(6.0, rel=1e-6)


def test_auto_is_the_kind_of_the_place():
    assert [kl_kind(AlgorithmConfig(kl_type=kind), "k1") for kind in ("auto", "k1", "k2", "k3")] == ["k1", "k1", "k2", "k3"]


D = [[9.0, 0.5, -0.25, 1.0], [NAN, -0.5, NAN, INF]]  # old - ref; the second row has one response token
MASK = torch.tensor([[False, True, True, True], [False, True, False, False]])


def charged(rewards: list[float], config: AlgorithmConfig = IN_REWARD, rows: int = 2, **fields):
    """The batch of D with a coefficient of 0.2 applied, and its statistics."""
    old = torch.full((rows, 4), -2.0)
    fields = {"old_log_probs": old, "ref_log_probs": old - torch.tensor(D)[:rows], "values": torch.zeros(rows, 4)} | fields
    batch = make_batch([1, 1][:rows], rewards[:rows], MASK[:rows], **fields)
    return subtract_kl(config, 0.2, batch), kl_stats(config, 0.2, batch)


def test_each_token_pays_and_the_row_pays_the_sum():
    batch, stats = charged([1.0, 0.0])
    assert batch.token_rewards.dtype == batch.rewards.dtype == torch.float32
    assert batch.token_rewards[0].tolist() == approx([0.0, -0.1, 0.05, 0.8])
    assert batch.token_rewards[1, 1].item() == pytest.approx(0.1)
    assert batch.rewards.tolist() == approx([0.75, 0.1])
    torch.testing.assert_close(torch.where(MASK, batch.token_rewards, 0.0).sum(1), batch.rewards)
    assert stats.keys() == {"actor/kl_coef", "actor/kl_sample", "reward/kl_penalty_mean"} and stats["actor/kl_coef"] == Max(0.2)
    for key, total in (("actor/kl_sample", 0.75), ("reward/kl_penalty_mean", 0.15)):
        assert isinstance(stats[key], Mean) and stats[key].count == 2 and stats[key].total.item() == pytest.approx(total)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_the_kind_can_be_chosen(kind):
    batch, stats = charged([1.0, 0.0], replace(IN_REWARD, kl_type=kind))
    expected = -0.2 * kl_estimate(torch.tensor(D)[0, 1:3], kind)
    torch.testing.assert_close(batch.token_rewards[0, 1:3], expected)
    assert stats["actor/kl_sample"].total.item() == pytest.approx(0.75)  # what is steered is k1 whatever is paid
    assert stats["reward/kl_penalty_mean"].total.item() == pytest.approx(1.0 - batch.rewards.sum().item())


def test_what_the_advantages_make_of_it():
    batch, _ = charged([1.0, 0.0])
    returns = gae(AlgorithmConfig(lam=1.0), batch).returns
    assert returns.tolist() == [approx([0.0, 0.75, 0.85, 0.8]), approx([0.0, 0.1, 0.0, 0.0])]
    for function, config, expected in ((grpo, AlgorithmConfig(normalize_std=False), 0.325), (rloo, IN_REWARD, 0.65)):
        advantages = function(config, batch).advantages
        assert advantages.tolist() == [approx([0.0] + [expected] * 3), approx([0.0, -expected, 0.0, 0.0])]
    to_go = torch.tensor([0.75, 0.85, 0.8, 0.1])
    whitened = reinforce_plus_plus(AlgorithmConfig(), batch).advantages[MASK]
    torch.testing.assert_close(whitened, (to_go - to_go.mean()) / to_go.std(), atol=1e-6, rtol=0)


def test_rewards_of_an_environments_tokens_are_kept():
    given = torch.tensor([[NAN, 0.5, 0.0, 0.25], [0.0, 1.0, NAN, NAN]])
    batch, _ = charged([0.75, 1.0], token_rewards=given)
    assert batch.token_rewards[MASK].tolist() == approx([0.4, 0.05, 0.05, 1.1])
    without, _ = charged([0.75], token_rewards=given[:1], rows=1)
    assert torch.equal(without.token_rewards[0, 1:], batch.token_rewards[0, 1:])
    alone = charged([0.75, 1.0], token_rewards=given)[0].replace(rewards=None)
    assert subtract_kl(IN_REWARD, 0.2, alone).rewards is None


@pytest.mark.parametrize("function", [gae, grpo, rloo, reinforce_plus_plus])
def test_a_failed_row_pays_nothing_and_changes_no_other(function):
    (batch, stats), (alone, of_one) = charged([1.0, NAN]), charged([1.0], rows=1)
    assert batch.rewards[1].isnan() and torch.equal(batch.rewards[:1], alone.rewards)
    assert stats == of_one and stats["actor/kl_sample"].count == 1
    both, one = function(IN_REWARD, batch).advantages, function(IN_REWARD, alone).advantages
    assert torch.equal(both[:1], one) and (both[1] == 0).all()


@pytest.mark.parametrize("tokens", [0, 4])
def test_zero_rows(tokens):
    empty = torch.zeros(0, tokens)
    batch = make_batch([], [], empty.bool(), old_log_probs=empty, ref_log_probs=empty)
    shaped, stats = subtract_kl(IN_REWARD, 0.2, batch), kl_stats(IN_REWARD, 0.2, batch)
    assert shaped.token_rewards.shape == (0, tokens) and shaped.rewards.shape == (0,)
    assert stats.keys() == charged([1.0, 0.0])[1].keys() and stats["actor/kl_coef"] == Max(0.2)
    assert stats["actor/kl_sample"] == stats["reward/kl_penalty_mean"] == Mean(0, 0)


def test_the_layout_changes_nothing():
    """Also where a rank has no row, for the advantages that need every rank."""
    generator = torch.Generator().manual_seed(0)
    fields = {name: torch.randn(4, 4, generator=generator) for name in ("old_log_probs", "ref_log_probs", "values")}
    batch = make_batch([1, 1, 2, 2], [1.0, NAN, 0.0, 2.0], torch.rand(4, 4, generator=generator) > 0.3, **fields)
    whole = gae(IN_REWARD, subtract_kl(IN_REWARD, 0.2, batch))
    shards = [batch[:1], batch[1:], batch[4:]]
    out = on_ranks(shards, lambda shard, all_sum: gae(IN_REWARD, subtract_kl(IN_REWARD, 0.2, shard), all_sum))
    torch.testing.assert_close(torch.cat([shard.advantages for shard in out]), whole.advantages)


def test_off_means_off():
    batch, stats = charged([1.0, 0.0], AlgorithmConfig())
    assert batch.token_rewards is None and batch.rewards.tolist() == [1.0, 0.0]
    assert stats.keys() == {"actor/kl_coef", "actor/kl_sample"}
    once = make_batch([1], [1.0], ref_log_probs=torch.zeros(1, 3))
    assert kl_stats(AlgorithmConfig(), 0.2, once) == {"actor/kl_coef": Max(0.2)}
    for field in ("old_log_probs", "ref_log_probs"):
        with pytest.raises(ValueError, match=f"batch.{field} is None"):
            charged([1.0, 0.0], **{field: None})


def config(critic: CriticConfig | None = None, optimizer: OptimizerConfig | None = None, steps: int = 10, **algorithm) -> Config:
    return resolve_auto(
        Config(
            algorithm=AlgorithmConfig(**algorithm),
            critic=critic or CriticConfig(),
            optimizer=optimizer or OptimizerConfig(),
            engine=FSDPConfig(dtype="float32"),
            rollout=RolloutConfig(backend="hf", dtype="float32", n=8),
            data=DataConfig(prompts_per_step=16),
            trainer=TrainerConfig(device="cpu", total_steps=steps),
        )
    )


GAE, KL = {"advantage": "gae"}, {"kl_coef": 0.1}
WARM_LR = OptimizerConfig(warmup_steps=9)


@pytest.mark.parametrize("made, said", [
    (config(kl_in_reward=True), "algorithm.kl_in_reward: there is no KL to subtract (algorithm.kl_coef=0)"),
    (config(**KL, kl_type="k1"), "algorithm.kl_type: k1 in the loss has a gradient that is 0 on average"),
    (config(**KL, kl_type="k4"), "algorithm.kl_type: 'k4' is unknown"),
    (config(kl_target=6.0), "algorithm.kl_target: a coefficient of 0 stays 0"),
    (config(**KL, kl_target=0.0), "algorithm.kl_target: 0.0 nats a sample cannot be reached"),
    (config(**KL, kl_target=6.0, kl_horizon=25.6), "algorithm.kl_horizon: 25.6 lets a step of 128 samples"),
    (config(**GAE, lam=1.5), "algorithm.lam: 1.5"), (config(**GAE, gamma=-0.5), "algorithm.gamma: -0.5 is too small"),
    (config(**GAE, value_clip=0.0), "algorithm.value_clip: 0.0 keeps values where they are"),
    (config(CriticConfig(warmup_steps=2)), "critic.warmup_steps: 2, but there is no critic (algorithm.advantage=grpo)"),
    (config(CriticConfig(path="tiny")), "critic.path: tiny, but there is no critic"),
    (config(CriticConfig(warmup_steps=10), **GAE), "critic.warmup_steps: 10 of 10 steps (trainer.total_steps) leave none"),
    (config(CriticConfig(warmup_steps=-1), **GAE), "critic.warmup_steps: -1 is too small"),
    (config(CriticConfig(warmup_steps=2), WARM_LR, **GAE), "optimizer.warmup_steps: 9 is over the 8 updates"),
    (config(CriticConfig(optimizer=WARM_LR), steps=8, **GAE), "critic.optimizer.warmup_steps: 9 is over the 8")])  # fmt: skip
def test_what_contradicts_itself_is_refused(made, said):
    (problem,) = validate(made, 1)
    assert problem.startswith(said) and " - " in problem


@pytest.mark.parametrize("made", [
    config(**KL, kl_in_reward=True, kl_type="k1"), config(**KL, kl_target=6.0, kl_horizon=128), config(**KL, kl_type="k2"),
    config(CriticConfig(path="tiny", warmup_steps=9), **GAE, value_clip=None), config(optimizer=WARM_LR),
    config(CriticConfig(optimizer=OptimizerConfig(warmup_steps=99)))])  # fmt: skip
def test_what_does_not_is_fine(made):
    assert validate(made, 1) == []


def test_updates_of_each_role():
    made = config(CriticConfig(warmup_steps=4), **GAE, **KL, epochs=3, num_mini_batches=2)
    assert [total_updates(made, role) for role in needed_roles(made) if role != "rollout"] == [36, 60, 60]
