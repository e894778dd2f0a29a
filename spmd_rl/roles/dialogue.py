"""Episodes of several turns: what an environment answers, as token ids. No text that the model wrote is tokenised again."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TypeVar

from spmd_rl.collectives import broadcast_object
from spmd_rl.config import EnvironmentConfig
from spmd_rl.environments import EnvironmentPool
from spmd_rl.mesh import RoleMesh
from spmd_rl.metrics import Mean, Stats, Sum
from spmd_rl.roles.generation import Dialogue, Episode

T = TypeVar("T")
FAILURES = ("timeout", "crash", "exception", "bad_result", "long_prompt")


class EnvironmentDialogue(Dialogue):
    """Lane 0 of a replica runs the environments, one process an episode; the other lanes hear what they said."""

    def __init__(
        self,
        config: EnvironmentConfig,
        mesh: RoleMesh,
        rows: Mapping[str, list[dict]],
        max_prompt_tokens: int,
        decode: Callable[[list[int]], str],
        observe: Callable[[str], list[int]],
        render: Callable[[list[dict]], list[int]],
    ):
        """`rows`: data rows by purpose of sampling. `observe`: an observation's token ids, up to where the assistant speaks
        again; `render`: a chat's."""
        self.config, self.mesh, self.rows, self.max_prompt_tokens = config, mesh, rows, max_prompt_tokens
        self.decode, self.observe, self.render = decode, observe, render
        self.at_once = config.workers
        self.pool = EnvironmentPool(config)
        self.counts: Counter[str] = Counter()

    def begin(self, episodes: list[Episode], purpose: str) -> None:
        rows = {_key(e): self.rows[purpose][e.row] for e in episodes}
        starts = self._on_lane_0(lambda: self.pool.start(rows))
        self.counts["episodes"] += len(episodes)
        for episode in episodes:
            start = starts[_key(episode)]
            if start.messages is not None:
                episode.prompt = self.render(start.messages)
            if start.failure:
                self._fail(episode, start.failure)
            elif len(episode.prompt) > self.max_prompt_tokens:
                self._fail(episode, "long_prompt")

    def advance(self, episodes: list[Episode], max_tokens: int) -> None:
        texts = {_key(e): self.decode(_last_turn(e)) for e in episodes}
        turns = self._on_lane_0(lambda: self.pool.step(texts))
        self.counts["turns"] += len(episodes)
        for episode in episodes:
            turn = turns[_key(episode)]
            if turn.failure:
                self._fail(episode, turn.failure)
                continue
            episode.rewards[-1] += turn.reward
            observed = [] if turn.done else self.observe(turn.observation)
            room = len(episode.ids) + len(observed) < max_tokens and episode.turns < self.config.max_turns
            episode.truncated = not turn.done and not room
            episode.ended = turn.done or episode.truncated
            if not episode.ended:
                episode.observe(observed)

    def end(self, episodes: list[Episode]) -> None:
        self.pool.end(_key(e) for e in episodes)
        for message in self.pool.take_messages():
            sys.stderr.write(f"[spmd_rl] {message}\n")

    def close(self) -> None:
        self.pool.close()

    def take(self) -> Stats:
        """Statistics since the last time, of lane 0."""
        counts, self.counts = self.counts, Counter()
        if self.mesh.lane:
            return {}
        failed: Stats = {f"environment/failed/{kind}": Sum(counts[kind]) for kind in FAILURES}
        return failed | {"environment/turns_mean": Mean(counts["turns"], counts["episodes"])}

    def _fail(self, episode: Episode, kind: str) -> None:
        episode.ended, episode.failed = True, True
        self.counts[kind] += 1

    def _on_lane_0(self, ask: Callable[[], T]) -> T:
        if self.mesh.width == 1:
            return ask()
        return broadcast_object(ask() if self.mesh.lane == 0 else None, 0, self.mesh.lane_group, "environment")


def _key(episode: Episode) -> tuple[int, int]:
    return episode.uid, episode.sample


def _last_turn(episode: Episode) -> list[int]:
    """The tokens that the policy chose since the last observation."""
    start = len(episode.ids)
    while start and episode.versions[start - 1] >= 0:
        start -= 1
    return episode.ids[start:]
