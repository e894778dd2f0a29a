"""From prompts to samples, whatever completes them: seeds, limits, turns, what is kept for the next step, and the Batch.

A backend only completes token ids. Every lane of a replica runs this with the same episodes in the same order.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor

from spmd_rl.batch import Batch, Prompts, Sampling, make_batch, sample_seed
from spmd_rl.metrics import Stats

MAX_SEED = 2**63 - 1
Expired = Callable[[], bool]


@dataclass(frozen=True)
class RolloutModel:
    """What a rollout backend needs of the model."""

    folder: str  # Hugging Face layout
    eos_ids: tuple[int, ...]
    trust_remote_code: bool = False
    probe: tuple[tuple[int, ...], ...] = ()  # short rows of token ids that prove an update: scored by both sides


@dataclass(frozen=True)
class Request:
    """What a backend completes. The draw depends on `seed` only, never on what is decoded beside it."""

    ids: list[int]  # the prompt, and what follows it so far
    seed: int
    min_tokens: int  # before them no stop id has any probability
    max_tokens: int


@dataclass
class Reply:
    ids: list[int]  # new tokens, the stop id included
    log_probs: list[float]  # nats, of the distribution drawn from
    stopped: bool  # by a stop id, else by `max_tokens` or the deadline


class RolloutBackend(ABC):
    """A model that completes token ids on the ranks of one replica: every lane makes the same calls in one order."""

    max_model_len: int  # tokens of prompt and response together

    @abstractmethod
    def complete(self, requests: Sequence[Request], sampling: Sampling, expired: Expired | None) -> list[Reply]:
        """One reply a request, in order. `expired` is asked now and then; once it says yes, replies are what is there."""

    @abstractmethod
    def score(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        """Teacher-forced log-probs in nats, at temperature 1, of each row's tokens after the first."""

    @abstractmethod
    def update_weights(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Takes full tensors under their checkpoint names. Raises ValueError for parameters that got nothing."""

    @abstractmethod
    def sleep(self) -> None:
        """Frees the device, where it can; weights need not survive, since an update follows."""

    @abstractmethod
    def wake_up(self, what: str) -> None:
        """`what`: weights, then kv_cache: memory for weights is taken first, so that both are never asked for at once."""

    @abstractmethod
    def memory(self) -> dict[str, int]:
        """Bytes on this rank's device of `weights` and `kv_cache`."""

    @abstractmethod
    def shutdown(self) -> None: ...

    def take_counts(self) -> dict[str, tuple[float, float]]:
        """Further (sum, count) statistics since the last time."""
        return {}


@dataclass
class Episode:
    """One sample, from its prompt to its end. Plain values: a checkpoint holds those that go on in the next step."""

    uid: int
    sample: int
    row: int
    data_source: int
    seed: int  # a continuation adds the number of tokens so far
    prompt: list[int]
    ids: list[int] = field(default_factory=list)  # the response so far, observations included
    log_probs: list[float] = field(default_factory=list)  # 0 at observations
    versions: list[int] = field(default_factory=list)  # the weights that sampled the token; -1: an observation
    rewards: list[float] = field(default_factory=list)  # of an environment, at the last token of a turn
    turns: int = 0
    ended: bool = False
    truncated: bool = False
    failed: bool = False  # its environment did: no token of it counts

    def request(self, sampling: Sampling, allowance: int) -> Request:
        have = len(self.ids)
        room = min(sampling.max_tokens - have, allowance)
        return Request(self.prompt + self.ids, (self.seed + have) & MAX_SEED, max(0, sampling.min_tokens - have), room)

    def extend(self, reply: Reply, version: int) -> None:
        self.ids += reply.ids
        self.log_probs += reply.log_probs
        self.versions += [version] * len(reply.ids)
        self.rewards += [0.0] * len(reply.ids)

    def observe(self, ids: list[int]) -> None:
        """Appends tokens that the policy did not choose."""
        self.extend(Reply(ids, [0.0] * len(ids), False), -1)


class Dialogue(ABC):
    """What answers an assistant's turn. Collective over a replica's lanes."""

    at_once: int  # episodes that may be live together

    @abstractmethod
    def begin(self, episodes: list[Episode], purpose: str) -> None:
        """May replace prompts; ends those that cannot start."""

    @abstractmethod
    def advance(self, episodes: list[Episode], max_tokens: int) -> None:
        """After a turn of each that ended in a stop id: appends the observation and the reward, or ends the episode."""

    @abstractmethod
    def end(self, episodes: list[Episode]) -> None: ...

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def take(self) -> Stats:
        """Statistics since the last time."""


class Generator:
    """The samples of one replica. `pending`: groups that a step limit left unfinished, to go on in the next step."""

    def __init__(self, backend: RolloutBackend, seed: int, max_step_tokens: int, dialogue: Dialogue | None):
        self.backend, self.seed, self.max_step_tokens, self.dialogue = backend, seed, max_step_tokens, dialogue
        self.pending: list[Episode] = []

    def generate(self, prompts: Prompts, sampling: Sampling, step: int, version: int, expired: Expired | None = None) -> Batch:
        """`sampling.n` samples of each prompt, siblings adjacent, and of groups kept before; unfinished groups are kept.

        Step limits are those of training; validation always runs to the end."""
        training = sampling.purpose == "train"
        episodes = (self.pending if training else []) + self._new(prompts, sampling, step)
        allowance = self.max_step_tokens if training and self.max_step_tokens else sampling.max_tokens
        at_once = self.dialogue.at_once if self.dialogue else max(1, len(episodes))
        for i in range(0, len(episodes), at_once):
            self._run(episodes[i : i + at_once], sampling, version, allowance, expired if training else None)
        unfinished = {e.uid for e in episodes if not e.ended}
        if training:
            self.pending = [e for e in episodes if e.uid in unfinished]
        return to_batch([e for e in episodes if e.uid not in unfinished], sampling.temperature, self.dialogue is not None)

    def _new(self, prompts: Prompts, sampling: Sampling, step: int) -> list[Episode]:
        """Raises ValueError for an empty prompt and for one that leaves no room in the context."""
        room = self.backend.max_model_len - sampling.max_tokens
        for uid, length in zip(prompts.uid.tolist(), prompts.lengths.tolist()):
            if not 1 <= length <= room:
                raise ValueError(
                    f"prompt uid {uid} has {length} tokens; 1 to {room} fit beside {sampling.max_tokens} response tokens - "
                    f"shorten it, lower rollout.max_response_tokens or raise rollout.max_model_len"
                )
        columns = (prompts.uid, prompts.row, prompts.data_source, prompts.lengths, prompts.input_ids)
        return [
            Episode(uid, sample, row, source, sample_seed(self.seed, sampling, step, uid, sample), ids[:length])
            for uid, row, source, length, ids in zip(*(column.tolist() for column in columns))
            for sample in range(sampling.n)
        ]

    def _run(self, episodes: list[Episode], sampling: Sampling, version: int, allowance: int, expired: Expired | None) -> None:
        """Rounds of one turn each, until every episode has ended or used up its allowance of this step."""
        limit = {id(e): len(e.ids) + allowance for e in episodes}
        live = [e for e in episodes if not e.ended]
        if self.dialogue:
            self.dialogue.begin(live, sampling.purpose)
            live = [e for e in live if not e.ended]
        while live:
            requests = [e.request(sampling, limit[id(e)] - len(e.ids)) for e in live]
            stopped = []
            for episode, reply in zip(live, self.backend.complete(requests, sampling, expired), strict=True):
                if not all(map(math.isfinite, reply.log_probs)):
                    raise ValueError(
                        f"logits of prompt uid {episode.uid}, sample {episode.sample} are not finite: the policy diverged - "
                        f"lower optimizer.learning_rate"
                    )
                episode.extend(reply, version)
                episode.turns += reply.stopped
                episode.truncated = not reply.stopped and len(episode.ids) >= sampling.max_tokens
                episode.ended = episode.truncated or reply.stopped and self.dialogue is None
                if reply.stopped and self.dialogue:
                    stopped.append(episode)
            if self.dialogue:
                self.dialogue.advance(stopped, sampling.max_tokens)
            live = [e for e in stopped if not e.ended]
        if self.dialogue:
            self.dialogue.end(episodes)

    def state(self) -> list[dict]:
        return [asdict(episode) for episode in self.pending]


def to_batch(episodes: list[Episode], temperature: float, with_rewards: bool) -> Batch:
    """One row an episode, on the host; `token_rewards` where an environment gave them. 0 episodes give 0 rows."""
    width = max((len(e.prompt) + len(e.ids) for e in episodes), default=0)

    def rows(values: Iterable[list], dtype: torch.dtype) -> Tensor:
        padded = [row + [0] * (width - len(row)) for row in values]
        return torch.tensor(padded, dtype=dtype).reshape(len(episodes), width)

    def column(values: Iterable, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(list(values), dtype=dtype)

    prompt_lengths = column(len(e.prompt) for e in episodes)
    lengths = column(len(e.prompt) + len(e.ids) for e in episodes)
    # One more than the version, so that padding and prompts become -1
    versions = rows(([0] * len(e.prompt) + [v + 1 for v in e.versions] for e in episodes), torch.int32) - 1
    fields = {
        "input_ids": rows((e.prompt + e.ids for e in episodes), torch.int64),
        "prompt_lengths": prompt_lengths,
        "lengths": lengths,
        "response_mask": versions >= 0,
        "uid": column(e.uid for e in episodes),
        "sample": column(e.sample for e in episodes),
        "row": column(e.row for e in episodes),
        "data_source": column(e.data_source for e in episodes),
        "policy_version": versions,
        "truncated": column((e.truncated for e in episodes), torch.bool),
        "temperature": torch.full((len(episodes),), temperature or 1.0),
        "rollout_log_probs": rows(([0.0] * len(e.prompt) + e.log_probs for e in episodes), torch.float32),
    }
    if with_rewards:
        # NaN marks a row whose reward is not known
        given = ([math.nan if e.failed else 0.0] + [0.0] * (len(e.prompt) - 1) + e.rewards for e in episodes)
        fields["token_rewards"] = rows(given, torch.float32)
    return make_batch(fields)
