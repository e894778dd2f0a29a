from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from spmd_rl.config import RewardConfig
from spmd_rl.rewards import RewardPool, Sample, exact, last_number, numeric, overlap, problems, regex
from tests.launch import children

USER_MODULE = """
import os, signal, sys, time

def torch_loaded(samples):
    return [float("torch" in sys.modules) for s in samples]

def length(samples):
    return [{"score": len(s.completion), "words": len(s.completion.split())} for s in samples]

def by_completion(samples):
    text = samples[0].completion
    if text == "hang":
        open(samples[0].row["pid_file"], "w").write(str(os.getpid()))
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            time.sleep(0.01)
    if text == "raise":
        raise Picky(1, 2)
    if text == "die":
        os._exit(11)
    return {"nan": [float("nan")], "two": [1.0, 2.0], "none": [None]}.get(text, [1.0])

class Picky(Exception):
    def __init__(self, a, b):  # does not unpickle
        super().__init__("picky")

def two_arguments(samples, other):
    return [0.0]

async def asynchronous(samples):
    return [0.0]

not_callable = 3
"""


def sample(completion, answer="7", truncated=False, **row) -> Sample:
    return Sample("What is 3 + 4?", completion, answer, {"row_number": 17, **row}, [1], [2], 5, truncated)


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(USER_MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])  # what `python -m` and a plain `python` have
    yield
    sys.modules.pop("my_rewards", None)


@pytest.fixture
def pool_of():
    pools = []

    def make(functions, **settings) -> RewardPool:
        pools.append(RewardPool(RewardConfig(functions=functions, **settings)))
        assert problems(pools[-1].config) == []
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


@pytest.mark.parametrize(
    ("text", "number"),
    [("3 + 4 = 7.", 7), ("so -2", -2), ("5-3", 3), ("$1,234.50!", 1234.5), ("1,2,3", 3), ("x = \u22124", -4),
     ("", None), ("none", None), (12, 12), (0.5, 0.5), ("#### 72", 72)],
)  # fmt: skip
def test_last_number(text, number):
    assert last_number(text) == number


@pytest.mark.parametrize(
    ("completion", "truncated", "score", "correct"),
    [("3 + 4 = 7", False, 1.0, 1.0), ("3 + 4 = 7", True, 0.3, 1.0), ("7 or 8", False, 0.0, 0.0), ("", True, 0.0, 0.0)],
)
def test_numeric(completion, truncated, score, correct):
    assert numeric([sample(completion, truncated=truncated)]) == [{"score": score, "correct": correct}]


def test_pure_python_rewards():
    assert exact([sample(" 7\n"), sample("7!"), sample("7", answer=7)]) == [1.0, 0.0, 1.0]
    assert regex([sample("<a>\n1</a>"), sample("1")], pattern="<a>.*</a>") == [1.0, 0.0]
    assert overlap([sample("ab xx", "abc"), sample("  ", "abc"), sample("ccc", "abc")]) == [0.5, 0.0, 1.0]


@pytest.mark.parametrize("reward", [exact, numeric, overlap])
def test_missing_answer_is_an_error(reward):
    with pytest.raises(ValueError, match="no answer"):
        reward([sample("7", answer=None)])


def test_answer_without_number_is_an_error():
    with pytest.raises(ValueError, match="'seven' has no number"):
        numeric([sample("7", answer="seven")])


def test_math_verify():
    pytest.importorskip("math_verify")
    from spmd_rl.rewards import math_verify

    half = [sample(text, r"\frac{1}{2}") for text in (r"it is $\frac{2}{4}$", r"\boxed{0.5}", "$x = 3$")]
    assert math_verify(half) == [1.0, 1.0, 0.0]


def test_reasoning_gym_scores_its_own_answers():
    pytest.importorskip("reasoning_gym")
    from spmd_rl.data import reasoning_gym as rows_of
    from spmd_rl.rewards import reasoning_gym

    rows = rows_of("leg_counting", size=3, seed=1)
    right = [Sample("", f"<answer>{r['answer']}</answer>", r["answer"], r, [], [], 0, False) for r in rows]
    wrong = [Sample("", "-1", r["answer"], r, [], [], 0, False) for r in rows]
    assert reasoning_gym(right) == [1.0] * 3
    assert max(reasoning_gym(wrong)) < 0.1


def test_weights_and_extras(user_module, pool_of):
    pool = pool_of({"exact": 2.0, "my_rewards:length": -0.5}, workers=1)
    scores = pool.score([sample("7"), sample("is 7")])
    assert scores.rewards == [2.0 - 0.5, 0.0 - 0.5 * 4]
    assert scores.extras == {
        "reward/exact": [1.0, 0.0],
        "reward/my_rewards:length": [1.0, 4.0],
        "reward/my_rewards:length/words": [1.0, 2.0],
    }
    assert scores.failures == {} and scores.messages == []


def test_kwargs_are_bound(pool_of):
    pool = pool_of({"numeric": 1.0}, kwargs={"numeric": {"unfinished_score": 0.25}}, workers=1)
    assert pool.score([sample("7", truncated=True)]).rewards == [0.25]


def test_failures_lose_only_their_own_sample(user_module, pool_of, tmp_path):
    pool = pool_of({"my_rewards:by_completion": 1.0, "exact": 1.0}, workers=2, timeout_s=0.5)
    texts = ["ok", "hang", "raise", "nan", "two", "none", "die", "ok"]
    scores = pool.score([sample(text, pid_file=str(tmp_path / "pid")) for text in texts])
    assert [text for text, reward in zip(texts, scores.rewards, strict=True) if not math.isnan(reward)] == ["ok", "ok"]
    assert scores.failures == {"timeout": 1, "exception": 3, "nan": 1, "wrong_count": 1}
    assert not any(map(math.isnan, scores.extras["reward/exact"]))
    assert scores.messages[0].startswith("reward.functions.my_rewards:by_completion: timeout on data row 17 at step 5")
    assert "Picky: picky" in scores.messages[1] and "my_rewards.py:" in scores.messages[1]
    assert len(scores.messages) == 5
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)  # the hung process is gone, though it ignores SIGTERM
    assert pool.score([sample("ok", answer="ok")]).rewards == [2.0]


def test_on_error_raise(user_module, pool_of):
    pool = pool_of({"my_rewards:by_completion": 1.0}, workers=1, on_error="raise")
    with pytest.raises(RuntimeError, match="by_completion: nan on data row 17"):
        pool.score([sample("ok"), sample("nan")])


def test_workers_never_import_torch_and_end_with_their_parent(user_module, tmp_path):
    """As a module run with `python -m`, whose own top imports torch and which then is killed."""
    (tmp_path / "entry.py").write_text(
        textwrap.dedent("""
        import os, signal, torch
        from spmd_rl.config import RewardConfig
        from spmd_rl.rewards import RewardPool, Sample

        if __name__ == "__main__":
            pool = RewardPool(RewardConfig(functions={"my_rewards:torch_loaded": 1.0}, workers=1))
            print(pool.score([Sample("", "", None, {}, [], [], 0, False)]).rewards, flush=True)
            print(*pool._pool._pool_manager.worker_manager.workers, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        """)
    )
    output = subprocess.run([sys.executable, "-m", "entry"], stdout=subprocess.PIPE, text=True, timeout=60).stdout
    rewards, pid = output.splitlines()
    assert rewards == "[0.0]"
    deadline = time.monotonic() + 10
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{pid}")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_signal_to_every_process_of_the_job_is_the_parents_to_answer(pool_of):
    pool = pool_of({"exact": 1.0})
    assert pool.score([sample("7", "7")]).rewards == [1.0]
    workers = children(os.getpid())
    for pid in workers:
        os.kill(pid, signal.SIGTERM)
    time.sleep(0.2)
    assert pool.score([sample("7", "7")] * 8).rewards == [1.0] * 8
    assert {*workers} <= {*children(os.getpid())}


def test_overhead_of_a_step(pool_of):
    pool = pool_of({"numeric": 1.0}, workers=2)
    samples = [sample("3 + 4 = 7" * 10) for _ in range(128)]
    pool.score(samples[:8])
    start = time.perf_counter()
    assert pool.score(samples).rewards == [1.0] * 128
    assert time.perf_counter() - start < 1.0  # about 0.05 s on an idle core; the bound allows for a busy machine


@pytest.mark.parametrize(
    ("config", "field", "words"),
    [
        (RewardConfig(functions={}), "reward.functions:", "is empty"),
        (RewardConfig(functions={"numerc": 1.0}), "reward.functions.numerc:", "did you mean 'numeric'"),
        (RewardConfig(functions={"no_such:f": 1.0}), "reward.functions.no_such:f:", "no module 'no_such'"),
        (RewardConfig(functions={"my_rewards:lenght": 1.0}), "reward.functions.my_rewards:lenght:", "mean 'length'"),
        (RewardConfig(functions={"exact": math.nan}), "reward.functions.exact:", "weight is nan"),
        (RewardConfig(functions={"exact": "1"}), "reward.functions.exact:", "weight is '1'"),
        (RewardConfig(functions={"regex": 1.0}), "reward.functions.regex:", "'pattern'"),
        (RewardConfig(kwargs={"numeric": {"unfinished": 1}}), "reward.functions.numeric:", "unfinished"),
        (RewardConfig(kwargs={"numeric": 3}), "reward.functions.numeric:", "mapping"),
        (RewardConfig(kwargs={"numeri": {}}), "reward.kwargs.numeri:", "did you mean 'numeric'"),
        (RewardConfig(functions={"my_rewards:two_arguments": 1.0}), "reward.functions.my_rewards:two", "'other'"),
        (RewardConfig(functions={"my_rewards:asynchronous": 1.0}), "reward.functions.my_rewards:", "plain function"),
        (RewardConfig(functions={"my_rewards:not_callable": 1.0}), "reward.functions.my_rewards:", "plain function"),
        (RewardConfig(workers=0), "reward.workers:", "is 0"),
        (RewardConfig(timeout_s=0.0), "reward.timeout_s:", "is 0.0"),
        (RewardConfig(on_error="ignore"), "reward.on_error:", "'ignore'"),
        (RewardConfig(overlong_buffer=-1), "reward.overlong_buffer:", "is -1"),
    ],
)  # fmt: skip
def test_problems(user_module, config, field, words):
    (line,) = problems(config)
    assert line.startswith(field) and words in line and " - " in line


def test_problems_names_every_one_and_a_missing_answer(user_module):
    found = problems(RewardConfig(functions={"exct": 1.0, "exact": math.inf}, workers=0), [{"answer": "1"}, {}])
    assert [line.split(" ")[0] for line in found] == [
        "reward.functions.exct:", "reward.functions.exact:", "reward.functions.exact:", "reward.workers:"
    ]  # fmt: skip
    assert "1 of 2 data rows have none (first: row 1)" in found[2]
    assert problems(RewardConfig(functions={"my_rewards:length": 1.0}), [{}]) == []
