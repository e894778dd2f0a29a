"""Reward functions, their table check, and the pool of worker processes that calls them. Imports no torch.

Every reward is `reward(samples: list[Sample], **kwargs) -> list[float | dict]`, one entry a sample; a dict has `score`
and further numbers that become metrics. To add one: write the function here or in your own module, and name it in
`reward.functions` (ours have a row in config.REWARDS).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import logging
import math
import re
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import TimeoutError
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from pebble import ProcessFuture, ProcessPool

from spmd_rl.config import REWARDS, RewardConfig, closest, resolve
from spmd_rl.workers import WorkerContext, enter_worker, search_path

NEEDS_ANSWER = ("exact", "numeric", "overlap", "math_verify")
PACKAGES = {"math_verify": "math_verify", "reasoning_gym": "reasoning_gym"}  # of the extra `tasks`
NUMBER = re.compile(r"(?:(?<![\w.)])-)?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?")
MAX_MESSAGES = 5
_BOUND: dict[str, Callable] = {}  # in a worker: the functions with their keyword arguments


@dataclass
class Sample:
    """One completion as a reward sees it. `row` is the row of the dataset, `answer` and your own columns included."""

    prompt: str
    completion: str
    answer: Any
    row: dict[str, Any]
    prompt_ids: list[int]
    completion_ids: list[int]
    step: int
    truncated: bool  # stopped by the token limit: no end-of-sequence token was drawn
    environment_reward: float = 0.0  # what the environment gave, summed over the turns


def last_number(text: str | float) -> Decimal | None:
    """The last number written in `text` (`1,234`, `-2`, `3.50`), or None; `5-3` ends in 3, not in -3."""
    if not isinstance(text, str):
        return Decimal(repr(text))
    found = NUMBER.findall(text.replace("\N{MINUS SIGN}", "-"))
    return Decimal(found[-1].replace(",", "")) if found else None


def _answer(sample: Sample) -> Any:
    if sample.answer is None:
        raise ValueError("the data row has no answer: fill its column `answer`")
    return sample.answer


def environment(samples: list[Sample]) -> list[float]:
    """What the environment gave, summed over the turns; a failed episode is masked whatever this says."""
    return [s.environment_reward for s in samples]


def exact(samples: list[Sample]) -> list[float]:
    """1 where the completion is the answer, up to blanks around it."""
    return [float(s.completion.strip() == str(_answer(s)).strip()) for s in samples]


def numeric(samples: list[Sample], unfinished_score: float = 0.3) -> list[dict[str, float]]:
    """1 where the last number of the completion is the last number of the answer, `unfinished_score` where it is but
    the token limit cut the completion, else 0. `correct` says the same without regard to the limit.

    Raises ValueError for an answer without a number."""
    scores = []
    for s in samples:
        wanted = last_number(_answer(s))
        if wanted is None:
            raise ValueError(f"answer {s.answer!r} has no number in it: use exact, regex or a function of your own")
        correct = float(last_number(s.completion) == wanted)
        scores.append({"score": correct * (unfinished_score if s.truncated else 1.0), "correct": correct})
    return scores


def regex(samples: list[Sample], pattern: str) -> list[float]:
    """1 where `pattern` (Python syntax; `.` matches a line break too) is found in the completion."""
    compiled = re.compile(pattern, re.DOTALL)
    return [float(compiled.search(s.completion) is not None) for s in samples]


def overlap(samples: list[Sample]) -> list[float]:
    """Fraction of the completion's characters, blanks aside, that occur in the answer; 0 for an empty completion."""
    texts = ["".join(s.completion.split()) for s in samples]
    return [sum(c in str(_answer(s)) for c in text) / len(text) if text else 0.0 for s, text in zip(samples, texts, strict=True)]


def math_verify(samples: list[Sample]) -> list[float]:
    """1 where the completion's final expression equals the answer in mathematics (package math-verify).

    Raises ValueError for an answer that is no expression."""
    from math_verify import parse, verify

    # Our pool's time-out kills; its own would turn a slow expression into a silent 0, and it warns when turned off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    scores = []
    for s in samples:
        answer = str(_answer(s))
        wanted = parse(answer if "$" in answer or "\\boxed" in answer else f"${answer}$", parsing_timeout=None)
        if not wanted:
            raise ValueError(f"answer {answer!r} is not an expression that math-verify reads: use exact or regex")
        found = parse(s.completion, parsing_timeout=None)
        scores.append(float(verify(wanted, found, timeout_seconds=None)))
    return scores


def reasoning_gym(samples: list[Sample]) -> list[float]:
    """The score, in [0, 1], of the task's own scorer (package reasoning-gym) for the text inside the last
    `<answer>...</answer>`, or for the whole completion. Needs the rows of the dataset `reasoning_gym`."""
    from reasoning_gym import get_score_answer_fn
    from reasoning_gym.utils import extract_answer

    scores = []
    for s in samples:
        tagged = extract_answer(s.completion)
        entry = s.row["entry"]
        score = get_score_answer_fn(entry["metadata"]["source_dataset"])
        scores.append(float(score(answer=s.completion.strip() if tagged is None else tagged, entry=entry)))
    return scores


def problems(config: RewardConfig, rows: list[dict] | tuple = ()) -> list[str]:
    """What is wrong with `config`, one line a problem; with `rows` of a dataset, also which answer is missing."""
    found = []
    if not config.functions:
        found.append("reward.functions: is empty - name at least one function, such as numeric: 1.0")
    for name, weight in config.functions.items():
        found += [f"reward.functions.{name}: {what}" for what in _function_problems(name, weight, config)]
        if name in NEEDS_ANSWER:
            missing = [n for n, row in enumerate(rows) if row.get("answer") is None]
            if missing:
                found.append(
                    f"reward.functions.{name}: compares with the answer, and {len(missing)} of {len(rows)} data rows"
                    f" have none (first: row {missing[0]}) - add the column `answer` or use another function"
                )
    found += [
        f"reward.kwargs.{name}: no such function in reward.functions{closest(name, config.functions)} - remove it"
        for name in config.kwargs
        if name not in config.functions
    ]
    if config.workers < 1:
        found.append(f"reward.workers: is {config.workers} - set 1 or more processes")
    if not 0 < config.timeout_s < math.inf:
        found.append(f"reward.timeout_s: is {config.timeout_s} - set a positive number of seconds")
    if config.on_error not in ("drop", "raise"):
        found.append(f"reward.on_error: unknown '{config.on_error}' - set drop or raise")
    if config.overlong_buffer < 0:
        found.append(f"reward.overlong_buffer: is {config.overlong_buffer} - set 0 (off) or a number of tokens")
    return found


def _function_problems(name: str, weight: Any, config: RewardConfig) -> list[str]:
    found = []
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
        found.append(f"weight is {weight!r} - set a finite number")
    if name in PACKAGES and importlib.util.find_spec(PACKAGES[name]) is None:
        return [*found, f"package '{PACKAGES[name]}' is not installed - pip install 'spmd_rl[tasks]'"]
    kwargs = config.kwargs.get(name, {})
    if not isinstance(kwargs, dict):
        return [*found, f"reward.kwargs.{name} is {kwargs!r} - set a mapping of keyword arguments"]
    try:
        function = resolve(name, REWARDS)
    except (ValueError, ImportError) as error:
        return [*found, f"{error} - correct the name, or put its module on PYTHONPATH"]
    if not callable(function) or inspect.iscoroutinefunction(function):
        return [*found, f"is {function!r} - name a plain function(samples) -> list[float | dict]"]
    signature = inspect.signature(function)
    try:
        signature.bind([], **kwargs)
    except TypeError as error:
        found.append(
            f"cannot be called as {name}(samples, **{kwargs}): {error}; its signature is {signature}"
            f" - give every further argument a default or a value in reward.kwargs.{name}"
        )
    return found


@dataclass
class Scores:
    """What a pool says of B samples, all lists in their order."""

    rewards: list[float]  # [B] weighted sum; NaN where any function failed
    extras: dict[str, list[float]]  # `reward/<name>` and `reward/<name>/<extra>`: [B], NaN where there is no value
    failures: dict[str, int] = field(default_factory=dict)  # by kind: timeout, exception, nan, wrong_count
    messages: list[str] = field(default_factory=list)  # the first few failures: function, data row, cause


@dataclass
class _Outcome:
    score: float
    extras: dict[str, float] = field(default_factory=dict)
    kind: str | None = None  # of the failure
    cause: str = ""


def _start_worker(config: RewardConfig, path: list[str]) -> None:
    """In a worker: import the functions from the parent's `path`, so that no call's time-out pays for it."""
    enter_worker(path)
    for name in config.functions:
        if name in PACKAGES:
            importlib.import_module(PACKAGES[name])
        _BOUND[name] = functools.partial(resolve(name, REWARDS), **config.kwargs.get(name, {}))


def _call(name: str, sample: Sample) -> _Outcome:
    """In a worker: one function on one sample. Failures come back as plain text: not every exception unpickles."""
    try:
        returned = _BOUND[name]([sample])
        if not isinstance(returned, list) or len(returned) != 1:
            return _Outcome(
                math.nan,
                kind="wrong_count",
                cause=f"returned {returned!r:.200} for a list of 1 sample: return a list, one entry a sample",
            )
        entry = returned[0] if isinstance(returned[0], dict) else {"score": returned[0]}
        extras = {key: float(value) for key, value in entry.items() if key != "score"}
        score = float(entry["score"])
    except Exception as error:  # noqa: BLE001
        where = traceback.extract_tb(error.__traceback__)[-1]
        cause = f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})"
        return _Outcome(math.nan, kind="exception", cause=cause)
    if not math.isfinite(score):
        return _Outcome(math.nan, extras, kind="nan", cause=f"returned the score {score}")
    return _Outcome(score, extras)


class RewardPool:
    """Worker processes that score samples; they start at the first `score`. Local to a rank, no collective inside.

    Each call of one function on one sample is a task of its own with a time-out of its own, so that one that hangs is
    killed with its process and loses nothing but its own sample."""

    def __init__(self, config: RewardConfig):
        self.config = config
        initargs = (config, search_path())
        self._pool = ProcessPool(config.workers, initializer=_start_worker, initargs=initargs, context=WorkerContext())

    def score(self, samples: list[Sample]) -> Scores:
        """Raises RuntimeError with the first failure where `reward.on_error` is raise."""
        names = list(self.config.functions)
        futures = [[self._pool.schedule(_call, (n, s), timeout=self.config.timeout_s) for n in names] for s in samples]
        outcomes = [[self._wait(future) for future in row] for row in futures]
        scores = _combine(self.config, samples, outcomes)
        if scores.messages and self.config.on_error == "raise":
            raise RuntimeError(scores.messages[0])
        return scores

    def close(self) -> None:
        """Stops the workers at once, also those inside a call."""
        self._pool.stop()
        self._pool.join()

    def _wait(self, future: ProcessFuture) -> _Outcome:
        match future.exception():
            case None:
                return future.result()
            case BrokenProcessPool() as error:
                raise RuntimeError("the reward workers cannot start; the worker's traceback is above") from error
            case TimeoutError():
                cause = f"no result within reward.timeout_s={self.config.timeout_s}; its process was killed"
                return _Outcome(math.nan, kind="timeout", cause=cause)
            case error:
                return _Outcome(math.nan, kind="exception", cause=f"{type(error).__name__}: {error}")


def _combine(config: RewardConfig, samples: list[Sample], outcomes: list[list[_Outcome]]) -> Scores:
    """`outcomes`: [B][functions]."""
    extras: dict[str, list[float]] = {f"reward/{name}": [math.nan] * len(samples) for name in config.functions}
    rewards, failures, messages = [], Counter(), []
    for b, row in enumerate(outcomes):
        rewards.append(sum(w * o.score for w, o in zip(config.functions.values(), row, strict=True)))
        for name, outcome in zip(config.functions, row, strict=True):
            extras[f"reward/{name}"][b] = outcome.score
            for key, value in outcome.extras.items():
                extras.setdefault(f"reward/{name}/{key}", [math.nan] * len(samples))[b] = value
            if outcome.kind is not None:
                failures[outcome.kind] += 1
                if len(messages) < MAX_MESSAGES:
                    messages.append(f"reward.functions.{name}: {outcome.kind} on {_place(samples[b])}: {outcome.cause}")
    return Scores(rewards, extras, dict(failures), messages)


def _place(sample: Sample) -> str:
    return f"data row {sample.row.get('row_number', '?')} at step {sample.step} (prompt {sample.prompt[-60:]!r})"
