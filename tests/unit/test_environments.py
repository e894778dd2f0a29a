from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from spmd_rl.config import ENVIRONMENTS, EnvironmentConfig, resolve
from spmd_rl.environments import Calculator, EnvironmentPool, Start, Turn, calculate, problems

USER_MODULE = r"""
import ctypes, os, re, signal, subprocess, sys, time

class Counter:
    def __init__(self, first=0):
        self.count = first

    def reset(self, row):
        if "hang" in row:
            time.sleep(60)
        if "messages" in row:
            return [{"role": "system", "content": "count"}, *row["messages"]]

    def step(self, text):
        self.count += 1
        return f"{text} {self.count} {os.getpid()} {'torch' in sys.modules} {os.getsid(0)}", self.count / 4, self.count > 2

class Scripted:
    def reset(self, row):
        return {"raise": lambda: 1 / 0, "text": lambda: "hello", "assistant": lambda: [{"role": "assistant", "content": ""}],
                "object": lambda: [{"role": "user", "content": "", "of": self}], "none": lambda: None,
                "exit": lambda: os._exit(3)}[row.get("reset", "none")]()

    def step(self, text):
        if text.startswith("hang"):  # with a program of its own, deaf to SIGTERM
            child = subprocess.Popen(["sleep", "60"])
            open(text.split()[1], "w").write(f"{os.getpid()} {child.pid}")
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while True:
                time.sleep(0.01)
        if text == "lock":  # holds the interpreter lock for ever
            re.match("(a|a)+$", "a" * 60 + "b")
        if text == "raise":
            raise Picky(1, 2)
        if text == "die":
            os._exit(11)
        if text == "program":
            child = subprocess.Popen(["sleep", "60"])
            child.terminate()
            return str(child.wait(5)), 0.0, False
        if text == "leave":
            sys.exit(5)
        if text == "segfault":
            ctypes.string_at(0)
        return {"pair": ("a", 0.0), "number": (1, 0.0, False), "nan": ("a", float("nan"), False), "swapped": ("a", False, 0.5),
                "one": ("a", 0.0, 1), "surrogate": ("\udc80", 0.0, False), "nothing": None}.get(text, ("fine", 1, False))

class Picky(Exception):
    def __init__(self, a, b):  # does not unpickle
        super().__init__("picky")

def counter_from(first, *, step=1):
    return Counter(first)

async def asynchronous():
    return Counter()

class Half:
    def reset(self, row):
        return None

not_callable = 3
"""


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    (tmp_path / "my_envs.py").write_text(USER_MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])  # what `python -m` and a plain `python` have
    yield
    sys.modules.pop("my_envs", None)


@pytest.fixture
def pool_of():
    pools = []

    def make(name, **settings) -> EnvironmentPool:
        pools.append(EnvironmentPool(EnvironmentConfig(name=name, **settings)))
        assert problems(pools[-1].config) == []
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def running(pid: int) -> bool:
    """Whether a process runs; one that is dead and not waited for yet does not."""
    status = Path(f"/proc/{pid}/stat")
    try:
        return status.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def ended(pids, within_s: float = 20.0) -> bool:
    deadline = time.monotonic() + within_s
    while any(map(running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(running, pids))


def rows(*keys, **columns) -> dict:
    return {key: {"row_number": 17, **columns} for key in keys}


def pids_of(pool) -> list[int]:
    return [episode.process.pid for episode in pool._episodes.values()]


@pytest.mark.parametrize(
    ("expression", "value"),
    [("1 + 2*3", "7"), (" (1+2) * -3 ", "-9"), ("7/2", "3.5"), ("6/2", "3"), ("0.1+0.2", "0.3"), ("1/3", "0.333333333333"),
     ("10000000000*10000000001", "100000000010000000000"), (".5*4.", "2"), ("9" * 200, "9" * 200), ("0*-1.", "0"),
     ("-" * 199 + "1", "-1"), ("(" * 99 + "1" + ")" * 99, "1"), ("1/" + "9" * 198, "1e-198"),
     ("1/." + "0" * 196 + "1", "1e+197")],
)  # fmt: skip
def test_calculate(expression, value):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    ["", "1/0", "1/0.", "2**3", "7//2", "1 2", "(", "()", "...", "2(3)", "1,2", "x", "1e9", "1_0", "a.b", "__import__('os')", "012",
     "\u0663", "9" * 201, "(" * 200, "-" * 200, "(" * 100 + ")" * 100, "1\n+2"],
)  # fmt: skip
def test_calculate_explains_what_it_cannot(expression):
    assert calculate(expression).startswith("error: ")


def test_calculator_is_a_tool_of_two_turns():
    environment = resolve("calculator", ENVIRONMENTS)()
    assert isinstance(environment, Calculator) and environment.reset({"prompt": "a"}) is None
    assert environment.step("I need <calc>1</calc>, no: <calc>12 * (3 + 4)\n</calc>") == ("84", 0.0, False)
    assert environment.step("<calc>2 ** 3</calc>")[0].startswith("error: ")
    assert environment.step("<calc>1 + 2") == environment.step("It is 84.") == ("", 0.0, True)


def test_an_episode_is_one_instance_in_one_process(user_module, pool_of):
    pool = pool_of("my_envs:Counter", kwargs={"first": 1})
    chat = [{"role": "user", "content": "é"}]
    starts = pool.start({"a": {"row_number": 0}, (2, 1): {"row_number": 1, "messages": chat}})
    assert starts == {"a": Start(None), (2, 1): Start([{"role": "system", "content": "count"}, *chat])}
    first = pool.step({(2, 1): "x", "a": "y"})
    second = pool.step({"a": "z\n\u2028"})
    assert list(first) == [(2, 1), "a"] and [turn.reward for turn in first.values()] == [0.5, 0.5]
    assert (second["a"].reward, second["a"].done, second["a"].failure) == (0.75, True, None)
    words = [turn.observation.split(" ") for turn in (first[2, 1], first["a"], second["a"])]
    assert [w[:2] for w in words] == [["x", "2"], ["y", "2"], ["z\n\u2028", "3"]]
    assert words[0][2] != words[1][2] == words[2][2]
    assert all(w[3] == "False" and w[4] == w[2] for w in words)  # no torch; the leader of a session of its own
    pool.end(["a"])
    assert not running(int(words[1][2])) and running(int(words[0][2]))
    pool.start(rows("a"))
    (again,) = pool.step({"a": "y"}).values()
    assert again.observation.split(" ")[1] == "2" and again.observation.split(" ")[2] != words[1][2]
    assert pool.take_messages() == []


def test_calls_run_in_parallel(user_module, pool_of, tmp_path):
    pool = pool_of("my_envs:Scripted", timeout_s=1.5)
    pool.start(rows(*range(5)))
    begin = time.monotonic()
    turns = pool.step({n: f"hang {tmp_path / str(n)}" for n in range(4)} | {4: "ok"})
    assert 1.4 < time.monotonic() - begin < 4.5  # one time-out, not four
    assert [turn.failure for turn in turns.values()] == ["timeout"] * 4 + [None]


def test_failures_end_only_their_own_episode(user_module, pool_of, tmp_path):
    pool = pool_of("my_envs:Scripted", timeout_s=3.0)
    texts = ["ok", f"hang {tmp_path / 'pids'}", "lock", "raise", "die", "leave", "segfault", "pair", "number", "nan", "swapped",
             "one", "surrogate", "nothing", "ok"]  # fmt: skip
    keys = range(len(texts))
    assert set(map(str, pool.start(rows(*keys)).values())) == {str(Start(None))}
    pids = pids_of(pool)
    pool.step({0: "ok"})
    turns = pool.step(dict(zip(keys, texts, strict=True)))
    kinds = [None, *["timeout"] * 2, "exception", *["crash"] * 3, *["bad_result"] * 7, None]
    assert [turn.failure for turn in turns.values()] == kinds
    failed = [turn for turn in turns.values() if turn.failure is not None]
    assert all((turn.observation, turn.done) == ("", True) and math.isnan(turn.reward) for turn in failed)
    assert turns[0] == turns[14] == Turn("fine", 1.0, False)
    assert ended([*pids[1:14], *map(int, (tmp_path / "pids").read_text().split())])  # what a worker started ends with it
    assert running(pids[0]) and running(pids[14])
    assert pool.step({0: "ok", 14: "ok"}) == {0: turns[0], 14: turns[0]}
    messages = pool.take_messages()
    assert len(messages) == 5 and pool.take_messages() == []
    assert all(m.startswith("environment.name=my_envs:Scripted: ") and " on data row 17 in step 1: " in m for m in messages)
    pool.end(keys)
    assert not any(map(running, pids))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("raise", "exception on data row 17 in step 2: Picky: picky ("),
        ("die", "crash on data row 17 in step 2: its process ended with exit code 11"),
        ("leave", "crash on data row 17 in step 2: its process ended with exit code 5"),
        ("segfault", "its process was ended by SIGSEGV"),
        ("lock", "timeout on data row 17 in step 2: no result within environment.timeout_s=1.0; its process was killed"),
        ("pair", "bad_result on data row 17 in step 2: returned ('a', 0.0): return (observation"),
        ("swapped", "the reward False, which is not a finite"),
        ("one", "done=1 of type int, not bool"),
        ("surrogate", "not a text of Unicode"),
    ],
)
def test_a_failure_is_explained(user_module, pool_of, text, words):
    pool = pool_of("my_envs:Scripted", timeout_s=1.0)
    pool.start(rows("a"))
    pool.step({"a": "ok"})
    pool.step({"a": text})
    (message,) = pool.take_messages()
    assert words in message
    if text == "raise":
        assert "my_envs.py:" in message


@pytest.mark.parametrize(
    ("reset", "kind"), [("raise", "exception"), ("text", "bad_result"), ("assistant", "bad_result"), ("object", "bad_result"),
                        ("exit", "crash")]
)  # fmt: skip
def test_a_reset_that_fails(user_module, pool_of, reset, kind):
    pool = pool_of("my_envs:Scripted")
    starts = pool.start({"bad": {"row_number": 3, "reset": reset}, "good": {"row_number": 4}})
    assert starts == {"bad": Start(None, kind), "good": Start(None)}
    assert f"{kind} on data row 3 in reset: " in pool.take_messages()[0]
    assert len(pids_of(pool)) == 1
    pool.end(["bad", "good", "never"])


def test_a_reset_that_hangs_has_the_time_out_of_a_call(user_module, pool_of):
    pool = pool_of("my_envs:Counter", timeout_s=0.5)
    assert pool.start(rows("a", hang=True)) == {"a": Start(None, "timeout")}
    assert "timeout on data row 17 in reset: no result within environment.timeout_s=0.5" in pool.take_messages()[0]


def test_a_module_that_breaks_in_the_worker(user_module, pool_of, tmp_path):
    pool = pool_of("my_envs:Counter")
    (tmp_path / "my_envs.py").write_text("raise RuntimeError('no licence')")
    assert pool.start(rows("a", "b")) == {"a": Start(None, "exception"), "b": Start(None, "exception")}
    assert "in import: RuntimeError: no licence" in pool.take_messages()[0]


def test_a_worker_that_died_between_two_turns(user_module, pool_of):
    pool = pool_of("my_envs:Scripted")
    pool.start(rows("a", "b"))
    pid = pids_of(pool)[0]
    os.kill(pid, signal.SIGKILL)
    assert ended([pid])
    turns = pool.step({"a": "ok", "b": "ok"})
    assert (turns["a"].failure, turns["b"].failure) == ("crash", None)
    assert "its process was ended by SIGKILL" in pool.take_messages()[0]


def test_close_leaves_no_process(user_module, pool_of):
    pool = pool_of("my_envs:Scripted", workers=3)
    pool.start(rows("a", "b", "c"))
    with pytest.raises(AssertionError, match="4 live episodes, environment.workers=3"):
        pool.start(rows("d"))
    pids = pids_of(pool)
    assert all(map(running, pids))
    pool.close()
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)  # not even one that is not waited for
    pool.close()


ENTRY = """
import os, signal, sys, threading, torch
from spmd_rl.config import EnvironmentConfig
from spmd_rl.environments import EnvironmentPool

if __name__ == "__main__":
    pool = EnvironmentPool(EnvironmentConfig(name="my_envs:Scripted"))
    counters = EnvironmentPool(EnvironmentConfig(name="my_envs:Counter"))
    pool.start({n: {} for n in range(3)})
    counters.start({0: {}})
    print(counters.step({0: ""})[0].observation, *[e.process.pid for e in pool._episodes.values()], flush=True)
    if sys.argv[1] == "kill":
        threading.Timer(2, os.kill, (os.getpid(), signal.SIGKILL)).start()
        pool.step({0: "lock", 1: "hang pids"})
    if sys.argv[1] == "raise":
        raise SystemExit(3)
"""


SIGNALLED = """
import os, signal, time
from spmd_rl.config import EnvironmentConfig
from spmd_rl.environments import EnvironmentPool
from tests.launch import children

if __name__ == "__main__":
    pool = EnvironmentPool(EnvironmentConfig(name="my_envs:Scripted"))
    pool.start({0: {}})
    for pid in children(os.getpid()):
        os.kill(pid, signal.SIGTERM)
    time.sleep(0.2)
    pool.start({1: {}})
    turns = pool.step({0: "program", 1: "ok"})
    print(turns[0].observation, turns[1].observation)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_signal_to_every_process_of_the_job_is_the_parents_to_answer(user_module, tmp_path):
    """In a process that has started nothing before; a program that a worker starts still ends by the signal."""
    (tmp_path / "entry.py").write_text(SIGNALLED)
    env = os.environ | {"PYTHONPATH": f"{Path(__file__).parents[2]}:{tmp_path}"}
    done = subprocess.run([sys.executable, "-m", "entry"], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["-15", "fine"], done.stderr


@pytest.mark.parametrize(("how", "code"), [("kill", -signal.SIGKILL), ("raise", 3), ("return", 0)])
def test_workers_never_import_torch_and_end_with_their_parent(user_module, tmp_path, how, code):
    """As a module run with `python -m`, whose own top imports torch; killed while a worker keeps the interpreter lock."""
    (tmp_path / "entry.py").write_text(textwrap.dedent(ENTRY))
    done = subprocess.run([sys.executable, "-m", "entry", how], stdout=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == code
    count, pid, torch_loaded, _, *pids = done.stdout.split()
    assert (count, torch_loaded, len(pids)) == ("1", "False", 3)
    if how == "kill":
        pids += (tmp_path / "pids").read_text().split()
    assert ended(map(int, [pid, *pids])) if how == "kill" else not any(map(running, map(int, [pid, *pids])))


@pytest.mark.parametrize(
    ("settings", "field", "words"),
    [
        ({"name": "calculater"}, "environment.name:", "did you mean 'calculator'"),
        ({"name": "no_such:Env"}, "environment.name:", "no module 'no_such'"),
        ({"name": "my_envs:Countr"}, "environment.name:", "did you mean 'Counter'"),
        ({"name": "my_envs:not_callable"}, "environment.name:", "is 3 - name a class"),
        ({"name": "my_envs:asynchronous"}, "environment.name:", "plain function"),
        ({"name": "my_envs:Half"}, "environment.name:", "has no step"),
        ({"name": "my_envs:Counter", "kwargs": {"frst": 1}}, "environment.kwargs:", "frst"),
        ({"name": "my_envs:counter_from"}, "environment.kwargs:", "'first'"),
        ({"name": "my_envs:Counter", "kwargs": 3}, "environment.kwargs:", "mapping"),
        ({"role": "toll"}, "environment.role:", "did you mean 'tool'"),
        ({"max_turns": 0}, "environment.max_turns:", "is 0"),
        ({"timeout_s": 0.0}, "environment.timeout_s:", "is 0.0"),
        ({"timeout_s": math.inf}, "environment.timeout_s:", "is inf"),
        ({"workers": 0}, "environment.workers:", "is 0"),
    ],
)  # fmt: skip
def test_problems(user_module, settings, field, words):
    (line,) = problems(EnvironmentConfig(**{"name": "calculator", **settings}))
    assert line.startswith(field) and words in line and " - " in line


def test_problems_of_none_and_of_all(user_module):
    assert problems(EnvironmentConfig(workers=0)) == []
    assert problems(EnvironmentConfig(name="my_envs:counter_from", kwargs={"first": 2})) == []
    assert len(problems(EnvironmentConfig(name="x", role="x", max_turns=-1, timeout_s=math.nan, workers=-1))) == 5
