"""Environments of episodes with several turns, and the pool that runs each episode in a process of its own. Imports no torch.

An environment is a class, or a function that returns an object, called with `environment.kwargs`; an instance is one episode:

    reset(row) -> None | list[{role, content}]    a chat that replaces the row's prompt; None keeps it
    step(text) -> (observation, reward, done)     text: the assistant's turn; what it is told, a number, whether this was all

To add one: write it here or in your own module, and name it in `environment.name` (ours have a row in config.ENVIRONMENTS).
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import inspect
import json
import math
import numbers
import operator
import os
import pickle
import re
import signal
import time
import traceback
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from spmd_rl.config import ENVIRONMENTS, EnvironmentConfig, closest, resolve
from spmd_rl.workers import WorkerContext, WorkerProcess, enter_worker, search_path

OBSERVATION_ROLES = ("tool", "user")
MAX_MESSAGES = 5
IMPORT_TIMEOUT_S = 300.0  # for the start of a worker and the import of the user's module, which no call's time-out pays for
JOIN_S = 5.0  # for a killed process to be gone

CALL = re.compile(r"<calc>(.*?)</calc>", re.DOTALL)
EXPRESSION = re.compile(r"[0-9+\-*/(). ]{1,200}")
OPERATORS: dict[type, Callable] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.UAdd: operator.pos, ast.USub: operator.neg,
}  # fmt: skip


class Calculator:
    """A tool: `<calc>EXPR</calc>` in the assistant's turn is answered with the value of EXPR, the last one where there are
    several; a turn without a call ends the episode. Every reward is 0: the reward functions score the answer."""

    def reset(self, row: dict[str, Any]) -> None:
        return None

    def step(self, text: str) -> tuple[str, float, bool]:
        calls = CALL.findall(text)
        return (calculate(calls[-1]), 0.0, False) if calls else ("", 0.0, True)


TOOL = "You have a calculator: write <calc>EXPRESSION</calc> and you are told its value. Then say the answer."


def products(split: str = "train") -> list[dict[str, Any]]:
    """Products of a number in 11..99 and one in 3..9, with the calculator explained; each tenth one is in `val` only."""
    if split not in ("train", "val"):
        raise ValueError(f"calculator: unknown split '{split}' - set train or val")
    pairs = [(a, b) for a in range(11, 100) for b in range(3, 10)]
    return [
        {
            "messages": [{"role": "system", "content": TOOL}, {"role": "user", "content": f"What is {a} * {b}?"}],
            "answer": str(a * b),
        }
        for i, (a, b) in enumerate(pairs)
        if (i % 10 == 0) == (split == "val")
    ]


def calculate(expression: str) -> str:
    """The value of an expression of digits, `+ - * / ( ) .` and blanks, to 12 digits where it is no whole number; what is
    wrong with it where it has none."""
    expression = expression.strip()
    if not EXPRESSION.fullmatch(expression):
        return "error: write 1 to 200 of the characters 0-9 + - * / ( ) . and blanks"
    try:
        value = _evaluate(ast.parse(expression, mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError) as error:
        return f"error: {error.msg if isinstance(error, SyntaxError) else error}"
    whole = isinstance(value, int) or (value.is_integer() and abs(value) < 1e15)
    return str(int(value)) if whole else f"{value:.12g}"


def _evaluate(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.UnaryOp(op=op, operand=operand) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_evaluate(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_evaluate(left), _evaluate(right))
    raise ValueError("only numbers, + - * / and parentheses are understood")


def problems(config: EnvironmentConfig) -> list[str]:
    """What is wrong with `config`, one line a problem; nothing where there is no environment."""
    if config.name is None:
        return []
    found = _name_problems(config)
    if config.role not in OBSERVATION_ROLES:
        found.append(f"environment.role: unknown '{config.role}'{closest(config.role, OBSERVATION_ROLES)} - set tool or user")
    if config.max_turns < 1:
        found.append(f"environment.max_turns: is {config.max_turns} - set 1 or more turns of the assistant")
    if not 0 < config.timeout_s < math.inf:
        found.append(f"environment.timeout_s: is {config.timeout_s} - set a positive number of seconds")
    if config.workers < 1:
        found.append(f"environment.workers: is {config.workers} - set 1 or more processes")
    return found


def _name_problems(config: EnvironmentConfig) -> list[str]:
    try:
        make = resolve(config.name, ENVIRONMENTS)
    except (ValueError, ImportError) as error:
        return [f"environment.name: {error} - correct the name, or put its module on PYTHONPATH"]
    if not callable(make) or inspect.iscoroutinefunction(make):
        return [f"environment.name: '{config.name}' is {make!r:.100} - name a class, or a plain function that returns an object"]
    found = []
    missing = [name for name in ("reset", "step") if inspect.isclass(make) and name not in dir(make)]
    if missing:
        methods = "reset(row) and step(text) -> (observation, reward, done)"
        found.append(f"environment.name: class '{config.name}' has no {' and no '.join(missing)} - give it {methods}")
    if not isinstance(config.kwargs, dict):
        return [*found, f"environment.kwargs: is {config.kwargs!r} - set a mapping of keyword arguments"]
    signature = inspect.signature(make)
    try:
        signature.bind(**config.kwargs)
    except TypeError as error:
        found.append(
            f"environment.kwargs: '{config.name}' cannot be called with {config.kwargs}: {error}; its signature is {signature}"
            " - give every argument a default or a value in environment.kwargs"
        )
    return found


@dataclass
class Turn:
    """What an environment says of one turn of the assistant."""

    observation: str
    reward: float
    done: bool
    failure: str | None = None  # kind: timeout, crash, exception or bad_result; then done is True and reward NaN


@dataclass
class Start:
    """How an episode begins."""

    messages: list[dict] | None  # a chat in place of the row's prompt
    failure: str | None = None  # as in Turn; then there is no episode


@dataclass
class _Episode:
    process: WorkerProcess
    connection: Connection
    row_number: Any
    turns: int = 0


class EnvironmentPool:
    """Episodes, each in a worker process of its own from `start` to `end`. Local to a rank, no collective inside.

    A call that does not return within `environment.timeout_s`, crashes, raises or returns something else than it should ends
    its own episode alone: the process is killed with all that it started, and `messages` names data row, call and cause."""

    def __init__(self, config: EnvironmentConfig):
        self.config = config
        self.messages: list[str] = []  # the first few failures since `take_messages`
        self._episodes: dict[Hashable, _Episode] = {}
        atexit.register(self.close)  # before multiprocessing's own, which would wait for the workers

    def start(self, rows: dict[Hashable, dict]) -> dict[Hashable, Start]:
        """One episode a key, in parallel, each in a fresh process; at most `environment.workers` at a time."""
        assert not rows.keys() & self._episodes.keys(), "an episode of this key is live"
        live = len(rows) + len(self._episodes)
        assert live <= self.config.workers, f"{live} live episodes, environment.workers={self.config.workers}"
        path = search_path()
        for key, row in rows.items():
            self._episodes[key] = _start_episode(self.config, path, row.get("row_number", "?"))
        replies = self._ask("import", dict.fromkeys(rows), IMPORT_TIMEOUT_S)
        loaded = {key: row for key, row in rows.items() if "kind" not in replies[key]}
        replies |= self._ask("reset", loaded, self.config.timeout_s)
        return {key: Start(replies[key].get("value"), replies[key].get("kind")) for key in rows}

    def step(self, texts: dict[Hashable, str]) -> dict[Hashable, Turn]:
        """One turn of each of these episodes, in parallel."""
        for key in texts:
            self._episodes[key].turns += 1
        replies = self._ask("step", texts, self.config.timeout_s)
        failed = {key: Turn("", math.nan, True, replies[key]["kind"]) for key in texts if "kind" in replies[key]}
        return {key: failed[key] if key in failed else Turn(*replies[key]["value"]) for key in texts}

    def end(self, keys: Iterable[Hashable]) -> None:
        """Ends these episodes' processes; a key without an episode, such as one that failed, is left out."""
        _kill([self._episodes.pop(key) for key in list(keys) if key in self._episodes])

    def take_messages(self) -> list[str]:
        """The first few failures since the last call."""
        taken, self.messages = self.messages, []
        return taken

    def close(self) -> None:
        """Ends every episode at once, also those inside a call."""
        atexit.unregister(self.close)
        self.end(list(self._episodes))

    def _ask(self, call: str, arguments: dict[Hashable, Any], limit: float) -> dict[Hashable, dict]:
        """The replies: `value` of the call, or `kind` of its failure. `limit`: seconds of each call."""
        replies, deadlines = {}, {}
        for key, argument in arguments.items():
            with contextlib.suppress(ConnectionError):  # a dead worker: there is no reply, as of one that dies in the call
                self._episodes[key].connection.send((call, argument))
            deadlines[key] = time.monotonic() + limit
        while deadlines:
            workers = [(key, self._episodes[key]) for key in deadlines]
            handles = {handle: key for key, e in workers for handle in (e.connection, e.process.sentinel)}
            ready = {handles[handle] for handle in wait(list(handles), max(0.0, min(deadlines.values()) - time.monotonic()))}
            now = time.monotonic()
            for key in [key for key, deadline in deadlines.items() if key in ready or deadline <= now]:
                del deadlines[key]
                replies[key] = _receive(self._episodes[key]) if key in ready else _timeout(call, limit)
                if "kind" in replies[key]:
                    self._fail(key, call, **replies[key])
        return replies

    def _fail(self, key: Hashable, call: str, kind: str, cause: str) -> None:
        episode = self._episodes.pop(key)
        _kill([episode])
        if len(self.messages) < MAX_MESSAGES:
            where = f"{call} {episode.turns}" if call == "step" else call
            self.messages.append(
                f"environment.name={self.config.name}: {kind} on data row {episode.row_number} in {where}: {cause}"
            )


def _start_episode(config: EnvironmentConfig, path: list[str], row_number: Any) -> _Episode:
    context = WorkerContext()
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, config, path))
    process.start()
    theirs.close()
    return _Episode(process, ours, row_number)


def _timeout(call: str, limit: float) -> dict[str, str]:
    name = "the start's limit of " if call == "import" else "environment.timeout_s="
    return {"kind": "timeout", "cause": f"no result within {name}{limit}; its process was killed"}


def _receive(episode: _Episode) -> dict[str, Any]:
    """The reply of a worker that has one or has ended."""
    try:
        if episode.connection.poll():
            return json.loads(episode.connection.recv_bytes())
    except (EOFError, ConnectionError):
        pass
    episode.process.join(JOIN_S)
    code = episode.process.exitcode
    how = "closed its connection" if code is None else f"ended with exit code {code}"
    if code is not None and code < 0:
        how = f"was ended by {signal.Signals(-code).name}"
    return {"kind": "crash", "cause": f"its process {how}"}


def _kill(episodes: list[_Episode]) -> None:
    for episode in episodes:
        try:
            os.killpg(episode.process.pid, signal.SIGKILL)
        except ProcessLookupError:  # it is dead, or has no session of its own yet
            episode.process.kill()
        episode.connection.close()
    for episode in episodes:
        episode.process.join(JOIN_S)


class _BadResult(Exception):
    """What an environment returned is not what the contract says."""


class _Worker:
    """In a worker: the calls of one episode."""

    def __init__(self, config: EnvironmentConfig):
        self.config = config

    def load(self, _: None) -> None:
        self.make = resolve(self.config.name, ENVIRONMENTS)

    def reset(self, row: dict[str, Any]) -> list[dict] | None:
        self.environment = self.make(**self.config.kwargs)
        return _checked_messages(self.environment.reset(row))

    def step(self, text: str) -> tuple[str, float, bool]:
        return _checked_turn(self.environment.step(text))


def _serve(connection: Connection, config: EnvironmentConfig, path: list[str]) -> None:
    """In a worker: one episode. Replies are JSON, so that nothing of the user's is unpickled in the parent."""
    enter_worker(path)
    worker = _Worker(config)
    calls = {"import": worker.load, "reset": worker.reset, "step": worker.step}
    with contextlib.suppress(EOFError, ConnectionError):  # the parent is gone
        while True:
            request = connection.recv_bytes()
            connection.send_bytes(json.dumps(_reply(calls, request)).encode())


def _reply(calls: dict[str, Callable], request: bytes) -> dict[str, Any]:
    try:
        call, argument = pickle.loads(request)
        return {"value": calls[call](argument)}
    except _BadResult as error:
        return {"kind": "bad_result", "cause": str(error)}
    except Exception as error:  # noqa: BLE001
        where = traceback.extract_tb(error.__traceback__)[-1]
        return {"kind": "exception", "cause": f"{type(error).__name__}: {error!s:.500} ({where.filename}:{where.lineno})"}


def _checked_messages(messages: Any) -> list[dict] | None:
    if messages is None:
        return None
    fix = "return None, or a list of {role: text, content: text} that does not end with the assistant's turn"
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise _BadResult(f"returned {messages!r:.200}: {fix}")
    if not all(_is_text(m.get("role")) and _is_text(m.get("content")) for m in messages) or messages[-1]["role"] == "assistant":
        raise _BadResult(f"returned {messages!r:.200}: {fix}")
    try:
        json.dumps(messages)
    except (TypeError, ValueError) as error:
        raise _BadResult(f"returned messages with more than plain data ({error}): {fix}") from error
    return messages


def _checked_turn(returned: Any) -> tuple[str, float, bool]:
    fix = "return (observation text, reward number, done bool)"
    if not isinstance(returned, tuple | list) or len(returned) != 3:
        raise _BadResult(f"returned {returned!r:.200}: {fix}")
    observation, reward, done = returned
    if not _is_text(observation):
        raise _BadResult(f"returned the observation {observation!r:.200}, which is not a text of Unicode characters: {fix}")
    if isinstance(reward, bool) or not isinstance(reward, numbers.Real) or not math.isfinite(reward):
        raise _BadResult(f"returned the reward {reward!r:.200}, which is not a finite number: {fix}")
    if not isinstance(done, bool):
        raise _BadResult(f"returned done={done!r:.200} of type {type(done).__name__}, not bool: {fix}")
    return str(observation), float(reward), done


def _is_text(value: Any) -> bool:
    """Whether it is a text that a tokenizer takes: half a surrogate pair, which undecodable bytes may leave, is none."""
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)
