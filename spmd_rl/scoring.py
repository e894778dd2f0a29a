"""From a Batch to rewards: decodes, calls the reward pool, shapes, and keeps what the metrics and the sample table show."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from spmd_rl.advantages import overlong_penalty
from spmd_rl.batch import Batch
from spmd_rl.config import RewardConfig
from spmd_rl.data import PromptSource
from spmd_rl.metrics import Max, Mean, Stats, Sum, add_stats
from spmd_rl.rewards import RewardPool, Sample, Scores


class Scorer:
    """Scores the samples of one source of prompts on this rank. `take()` hands over what was found since the last time."""

    def __init__(
        self, config: RewardConfig, pool: RewardPool, source: PromptSource, decode: Callable[[list[int]], str], prefix: str
    ):
        self.config, self.pool, self.source, self.decode, self.prefix = config, pool, source, decode, prefix
        self.stats: Stats = {}
        self.shown: list[dict] = []

    def bind(self, step: int, max_response_tokens: int, rows_shown: int) -> Callable[[Batch], None]:
        """A function that sets `rewards` ([B] float32, NaN where scoring failed) and masks the failed rows out."""

        def score(batch: Batch) -> None:
            samples = self.samples(batch, step)
            scores = self.pool.score(samples)
            lengths = (batch.lengths - batch.prompt_lengths).float()
            batch.rewards = torch.tensor(scores.rewards, dtype=torch.float32)
            if self.config.overlong_buffer:
                c = self.config
                batch.rewards += overlong_penalty(lengths, max_response_tokens, c.overlong_buffer, c.overlong_factor)
            if batch.token_rewards is not None:
                self._add_environment(batch)
            self.stats = add_stats(self.stats, self._statistics(batch, lengths, scores))
            batch.response_mask = batch.response_mask & ~batch.rewards.isnan()[:, None]
            for message in scores.messages:
                sys.stderr.write(f"[spmd_rl] {message}\n")
            for sample, reward in list(zip(samples, scores.rewards))[:rows_shown]:
                self.shown.append(
                    {"prompt": sample.prompt, "response": sample.completion, "reward": reward, "answer": sample.answer}
                )

        return score

    def _add_environment(self, batch: Batch) -> None:
        """Each token's reward: the environment's with its weight, and at the last token what the row has besides."""
        batch.rewards = torch.where(batch.token_rewards.isnan().any(1), math.nan, batch.rewards)
        given = batch.token_rewards * self.config.functions.get("environment", 0.0)
        last = (batch.lengths - 1)[:, None]
        batch.token_rewards = given.scatter_add(1, last, (batch.rewards - given.sum(1))[:, None])

    def take(self) -> tuple[Stats, list[dict]]:
        taken = self.stats, self.shown
        self.stats, self.shown = {}, []
        return taken

    def samples(self, batch: Batch, step: int) -> list[Sample]:
        """The rows as rewards see them: texts without special tokens, ids with them."""
        found = []
        given = [0.0] * len(batch)
        if batch.token_rewards is not None:
            given = batch.token_rewards.nan_to_num().sum(1).tolist()
        rows = zip(
            given,
            batch.input_ids.tolist(),
            batch.prompt_lengths.tolist(),
            batch.lengths.tolist(),
            batch.row.tolist(),
            batch.truncated.tolist(),
        )
        for reward, ids, prompt, end, index, truncated in rows:
            row = self.source.rows[index]
            found.append(
                Sample(
                    prompt=self.decode(ids[:prompt]),
                    completion=self.decode(ids[prompt:end]),
                    answer=row.get("answer"),
                    row=row,
                    prompt_ids=ids[:prompt],
                    completion_ids=ids[prompt:end],
                    step=step,
                    truncated=truncated,
                    environment_reward=reward,
                )
            )
        return found

    def _statistics(self, batch: Batch, lengths: Tensor, scores: Scores) -> Stats:
        valid = [r for r in batch.rewards.tolist() if not math.isnan(r)]
        count, p = len(batch), self.prefix
        stats: Stats = {
            f"{p}reward/mean": Mean(sum(valid), len(valid)),
            f"{p}reward/max": Max(max(valid, default=-math.inf)),
            f"{p}response/samples": Sum(count),
            f"{p}response/tokens": Sum(float(lengths.sum())),
            f"{p}response/length_mean": Mean(float(lengths.sum()), count),
            f"{p}response/length_max": Max(float(lengths.max()) if count else -math.inf),
            f"{p}response/truncated_fraction": Mean(float(batch.truncated.sum()), count),
            f"{p}reward/failed": Sum(count - len(valid)),
        }
        stats |= {f"{p}reward/failed/{kind}": Sum(number) for kind, number in scores.failures.items()}
        groups: dict[int, set[float]] = {}
        for uid, reward in zip(batch.uid.tolist(), batch.rewards.tolist()):
            groups.setdefault(uid, set()).add(reward)
        stats[f"{p}reward/zero_signal_groups"] = Mean(sum(len(r) == 1 for r in groups.values()), len(groups))
        for key, numbers in scores.extras.items():
            known = [(n, s) for n, s in zip(numbers, batch.data_source.tolist()) if not math.isnan(n)]
            stats[p + key] = Mean(sum(n for n, _ in known), len(known))
            if key.endswith("/correct"):
                stats[f"{p}accuracy"] = stats[p + key]
                for index, name in enumerate(self.source.sources):
                    of_source = [n for n, s in known if s == index]
                    stats[f"{p}{name}/accuracy"] = Mean(sum(of_source), len(of_source))
        return stats
