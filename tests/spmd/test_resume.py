"""Save and resume: a resumed run is the uninterrupted one, bit for bit, and no crash costs more than the steps since a save."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from spmd_rl import checkpoint
from spmd_rl.config import AlgorithmConfig
from spmd_rl.kl import adapt_kl_coef
from spmd_rl.models import resolve_model
from spmd_rl.roles.training_worker import TrainingWorker
from tests.forks import fork_ranks
from tests.jobs import launch_jobs, metrics, rows, run_jobs, state

COMMON = ["optimizer.learning_rate=1e-3", "optimizer.weight_decay=0.01", "trainer.save_every=1", "trainer.sample_rows=64"]
SIX, THREE = "trainer.total_steps=6", "trainer.total_steps=3"
GRPO = [*COMMON, "optimizer.schedule=cosine", "optimizer.warmup_steps=2", "optimizer.total_steps=6"]
LINEAR = ("schedule=linear", "total_steps=24", "learning_rate=1e-3")  # 2 epochs of 2 mini-batches a step
PPO = [
    *(*COMMON, "algorithm=ppo", "algorithm.epochs=2", "engine.shard_size=2"),
    *(f"{optimizer}.{setting}" for optimizer in ("optimizer", "critic.optimizer") for setting in LINEAR),
]
# With so many stop ids groups end in any of three steps; without, all go on together and two steps of three train nothing
KEPT = [*COMMON, "rollout.max_step_tokens=3", f"rollout.stop_token_ids={list(range(40, 70))}"]
ADAPTIVE = ["algorithm=ppo", "algorithm.kl_coef=0.1", "algorithm.kl_in_reward=true", "algorithm.kl_target=0.01"]
LOCKSTEP = [*COMMON, *ADAPTIVE, "rollout.max_step_tokens=3"]
# The actor makes the eight updates of four steps, after two in which only the critic trains
WARM = [
    *COMMON,
    *ADAPTIVE,
    "algorithm.kl_horizon=100",
    "critic.path=tiny",
    "critic.warmup_steps=2",
    "optimizer.schedule=linear",
    "optimizer.total_steps=8",
]
INCOMPLETE = {"torn": "step_000006", "partial": "step_000006.partial", "killed": "step_000004.partial"}


def copy(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    for rows_of_rank in target.glob("rank*.pt"):
        rows_of_rank.unlink()
    return target / "checkpoints" / "step_000006"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folder of all runs, and what the launch that resumed them printed."""
    folder = tmp_path_factory.mktemp("resume")
    launch_jobs(folder, 2, {"grpo6": [*GRPO, SIX], "grpo": [*GRPO, THREE], "ppo6": [*PPO, SIX], "ppo": [*PPO, THREE]})
    for name in ("other_data", "other_seed", "one_rank"):
        copy(folder / "grpo", folder / name)
    copy(folder / "ppo", folder / "one_rank_ppo")
    copy(folder / "grpo6", folder / "afresh")
    torn = copy(folder / "grpo6", folder / "torn")
    (torn / checkpoint.STATE).unlink()
    partial = copy(folder / "grpo6", folder / "partial")
    partial.rename(partial.with_suffix(".partial"))
    (folder / "jobs.json").write_text(json.dumps({"killed": [*GRPO, SIX]}))
    fork_ranks("tests.spmd.test_resume:run_until_killed", folder, 2, codes=[1, -signal.SIGKILL])
    assert (folder / "killed" / "checkpoints" / "step_000004.partial").exists()
    fifth = folder / "grpo6" / "checkpoints" / "step_000005"
    said = launch_jobs(
        folder,
        2,
        {
            "grpo": [*GRPO, SIX],
            "ppo": [*PPO, SIX],
            "torn": [*GRPO, SIX],
            "partial": [*GRPO, SIX],
            "killed": [*GRPO, SIX],
            "elsewhere": [*GRPO, SIX, f"trainer.resume={fifth}"],
            "afresh": [*GRPO, "trainer.total_steps=1", "trainer.resume=never"],
            "other_data": [*GRPO, SIX, "data.train_kwargs={seed:1}"],
            "other_seed": [*GRPO, SIX, "trainer.seed=1"],
            "other_engine": [*GRPO, SIX, "engine=torchtitan", f"trainer.resume={fifth}"],
            "no_step": [*GRPO, SIX, f"trainer.resume={folder}"],
        },
    )
    unsharded = [*PPO, SIX, "engine.shard_size=1"]
    launch_jobs(folder, 1, {"one_rank": [*GRPO, SIX], "one_rank_ppo": unsharded})
    return folder, said


def run_until_killed(folder: Path) -> None:
    """Rank 1 dies while the fourth step is written."""
    save = TrainingWorker.save

    def killed(self, target):
        if target.name == "step_000004.partial" and self.mesh.world_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        save(self, target)

    TrainingWorker.save = killed
    run_jobs(folder)


def check_bitwise(run: Path, whole: Path, first: int, roles: tuple[str, ...] = ("actor",), num_rows: int = 6 * 32) -> None:
    """Steps `first`.. of the resumed run are those of the whole one, and so is all that a later run would start from."""
    assert metrics(run) == metrics(whole)
    samples = [(path / "samples.jsonl").read_text() for path in (run, whole)]
    assert samples[0] == samples[1] and samples[0].count("\n") == num_rows
    resumed, expected = rows(run), rows(whole)[first - 1 :]
    assert len(resumed) == len(expected) == 7 - first
    for got, want in zip(resumed, expected):
        assert got.keys() == want.keys()
        for row, fields in want.items():
            assert all(torch.equal(got[row][field], value) for field, value in fields.items()), row
    for role in roles:
        check_states(state(run, 6, role), state(whole, 6, role))


def check_states(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    for kind in ("/model/", "/optimizer/", "/counters"):
        assert any(key.startswith(kind) for key in expected)
    for key, value in expected.items():
        same = torch.equal(found[key], value) if isinstance(value, torch.Tensor) else found[key] == value
        assert same, key


@pytest.mark.spmd
@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_six_steps_are_three_and_three(runs, name):
    check_bitwise(runs[0] / name, runs[0] / f"{name}6", 4, ("actor", "critic") if name == "ppo" else ("actor",))
    learning_rates = [row["actor/lr"] for row in metrics(runs[0] / name)]
    assert len(set(learning_rates)) > 3  # the schedule went on, too


@pytest.mark.spmd
@pytest.mark.parametrize("name", INCOMPLETE)
def test_goes_on_from_the_last_complete_step(runs, name):
    folder, said = runs
    path = folder / name / "checkpoints" / INCOMPLETE[name]
    assert f"{path} is incomplete" in said
    assert path.exists() == (name == "torn")  # written again
    check_bitwise(folder / name, folder / "grpo6", 4 if name == "killed" else 6)


@pytest.mark.spmd
def test_explicit_step_of_another_run(runs):
    folder, _ = runs
    run, whole = folder / "elsewhere", folder / "grpo6"
    assert metrics(run) == metrics(whole)[5:]
    check_states(state(run, 6), state(whole, 6))


@pytest.mark.spmd
def test_never_starts_afresh(runs):
    """What the run before left is no part of this one: neither its metrics nor its later steps."""
    folder, _ = runs
    assert metrics(folder / "afresh") == metrics(folder / "grpo6")[:1]
    assert kept(folder / "afresh") == ["step_000001"]


@pytest.mark.spmd
def test_rotation(runs):
    assert kept(runs[0] / "grpo6") == kept(runs[0] / "grpo") == ["step_000005", "step_000006"]


def kept(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


@pytest.mark.spmd
@pytest.mark.parametrize(
    "name,said",
    [
        ("other_data", "another data"),
        ("other_seed", "another seed (0, now 1)"),
        ("no_step", "no complete step folder"),
        ("other_engine", "another engine ({'actor': 'fsdp'}, now {'actor': 'torchtitan'})"),
    ],
)
def test_refused(runs, name, said):
    for rank in (0, 1):
        error = (runs[0] / name / f"error{rank}.txt").read_text()
        assert error.startswith("trainer.resume: ") and said in error


@pytest.mark.spmd
@pytest.mark.parametrize("name,whole", [("one_rank", "grpo6"), ("one_rank_ppo", "ppo6")])
def test_resumes_on_another_number_of_ranks(runs, name, whole):
    found, expected = metrics(runs[0] / name), metrics(runs[0] / whole)
    assert len(found) == 6
    of_the_layout = {"actor/micro_batches", "critic/micro_batches", "traffic/batch_bytes", "rollout/logprob_diff_max"}
    for got, want in zip(found, expected):
        assert got.keys() == want.keys()
        for key in want.keys() - of_the_layout:
            assert got[key] == pytest.approx(want[key], rel=1e-5, abs=1e-5), (want["step"], key)


@pytest.fixture(scope="module")
def kept_runs(tmp_path_factory):
    """Folder of runs whose groups go on in later steps."""
    folder = tmp_path_factory.mktemp("kept")
    launch_jobs(folder, 2, {"kept6": [*KEPT, SIX], "kept": [*KEPT, THREE], "lockstep": [*LOCKSTEP, "trainer.total_steps=4"]})
    copy(folder / "kept", folder / "one_rank")
    launch_jobs(folder, 2, {"kept": [*KEPT, SIX]})
    launch_jobs(folder, 1, {"one_rank": [*KEPT, SIX]})
    return folder


def kept_groups(run: Path, step: int) -> tuple[int, set[int]]:
    """(prompt occurrences drawn, uids of the groups that go on after the step)."""
    saved = json.loads((run / "checkpoints" / f"step_{step:06d}" / "rollout.json").read_text())
    return saved["drawn"], {episode["uid"] for part in saved["replicas"] for episode in part}


@pytest.mark.spmd
def test_each_prompt_occurrence_is_trained_once_when_it_is_complete(kept_runs):
    run = kept_runs / "kept6"
    steps, trained, drawn, spread = rows(run), [], 0, set()
    for step, (found, told) in enumerate(zip(steps, metrics(run), strict=True)):
        drawn += 8 - (drawn - len(trained))  # eight groups are in flight in every step
        uids = {uid for uid, _ in found}
        assert found.keys() == {(uid, sample) for uid in uids for sample in range(4)} and max(uids) < drawn
        for uid in uids:
            assert max(int(found[uid, sample]["policy_version"].max()) for sample in range(4)) == step
        for fields in found.values():
            versions = fields["policy_version"][fields["prompt_lengths"] :].tolist()
            assert versions == sorted(versions) and all(versions.count(v) <= 3 for v in versions)
            assert set(versions[:-1]) <= set(range(versions[0], step + 1)) and len(versions) == min(8, len(versions))
            spread.add(len(set(versions)))
        trained += uids
        assert told["response/length_mean"] == pytest.approx(
            sum(int(f["lengths"] - f["prompt_lengths"]) for f in found.values()) / len(found)
        )
        assert told["rollout/kept_samples"] == 4 * (drawn - len(trained)) / 2  # a mean over two replicas
        assert told["rollout/logprob_diff_max"] < 1e-4  # of tokens of the present weights
    assert spread == {1, 2, 3}
    assert kept_groups(run, 6)[0] == drawn and sorted(trained + [*kept_groups(run, 6)[1]]) == list(range(drawn))
    assert trained != sorted(trained)  # some were passed by later ones


@pytest.mark.spmd
def test_kept_groups_go_on_after_a_resume(kept_runs):
    num_rows = sum(map(len, rows(kept_runs / "kept6")))
    check_bitwise(kept_runs / "kept", kept_runs / "kept6", 4, num_rows=num_rows)
    assert kept_groups(kept_runs / "kept", 6) == kept_groups(kept_runs / "kept6", 6)
    resumed, expected = rows(kept_runs / "one_rank"), rows(kept_runs / "kept6")[3:]
    for got, want in zip(resumed, expected, strict=True):
        assert got.keys() == want.keys()
        for row, fields in want.items():
            for field in ("input_ids", "policy_version", "rewards"):
                assert torch.equal(got[row][field], fields[field]), (row, field)


@pytest.mark.spmd
def test_a_step_may_train_nothing(kept_runs):
    """Every group goes on: roles see 0 rows, no weight moves, and the metrics say so."""
    run = kept_runs / "lockstep"
    assert [len(found) for found in rows(run)] == [0, 0, 32, 0]
    told = metrics(run)
    assert [row["actor/skipped_steps"] for row in told] == [row["critic/skipped_steps"] for row in told] == [1, 1, 0, 1]
    assert [row["rollout/kept_samples"] for row in told] == [16, 16, 0, 16]
    assert told[0]["reward/mean"] is None and told[2]["reward/mean"] is not None
    assert [row["actor/kl_sample"] is None for row in told] == [True, True, False, True]
    assert [row["actor/kl_coef"] for row in told[:3]] == [0.1] * 3 and told[3]["actor/kl_coef"] != 0.1
    versions = [f["policy_version"][f["prompt_lengths"] :].tolist() for f in rows(run)[2].values()]
    assert all(found == [0, 0, 0, 1, 1, 1, 2, 2][: len(found)] for found in versions)
    assert [0, 0, 0, 1, 1, 1, 2, 2] in versions


@pytest.fixture(scope="module")
def warm_runs(tmp_path_factory):
    """Folder of PPO runs with a critic that warms up and a KL in the reward that is steered, saved in and after the warm-up."""
    folder = tmp_path_factory.mktemp("warm")
    warm = [*WARM, "trainer.keep=6"]
    launch_jobs(
        folder,
        2,
        {
            "warm6": [*warm, SIX],
            "unsaved6": [*warm, SIX, "trainer.save_every=6"],
            "one": [*warm, "trainer.total_steps=3", "trainer.save_every=1"],
            "four": [*warm, "trainer.total_steps=4"],
        },
    )
    for step in (2, 3):  # what a run that ended after its first steps leaves
        shutil.rmtree(folder / "one" / "checkpoints" / f"step_{step:06d}")
    launch_jobs(folder, 2, {"one": [*warm, SIX], "four": [*warm, SIX]})
    return folder


@pytest.mark.spmd
@pytest.mark.parametrize("name,first", [("one", 2), ("four", 5)])
def test_kl_coefficient_and_warm_up_go_on_after_a_resume(warm_runs, name, first):
    check_bitwise(warm_runs / name, warm_runs / "warm6", first, ("actor", "critic"))
    assert kl_coefs(warm_runs / name) == kl_coefs(warm_runs / "warm6")


def kl_coefs(run: Path) -> list[float]:
    """The coefficient of the step after each checkpoint."""
    return [json.loads((path / checkpoint.STATE).read_text())["kl_coef"] for path in sorted((run / "checkpoints").iterdir())]


@pytest.mark.spmd
def test_a_save_changes_nothing(warm_runs):
    """Also one before the first update, when the optimizer has no state yet."""
    run, whole = warm_runs / "unsaved6", warm_runs / "warm6"
    assert metrics(run) == metrics(whole) and kept(run) == ["step_000006"]
    for role in ("actor", "critic"):
        check_states(state(run, 6, role), state(whole, 6, role))


@pytest.mark.spmd
def test_while_the_critic_warms_up_the_actor_stays_as_it_is(warm_runs):
    run = warm_runs / "warm6"
    told = metrics(run)
    assert [row["critic/warmup_steps"] for row in told] == [1, 1, 0, 0, 0, 0]
    assert ["actor/lr" in row for row in told] == [False, False, True, True, True, True]
    assert [row["actor/lr"] for row in told[2:]] == pytest.approx([1e-3 * (15 - 4 * k) / 16 for k in range(4)])
    first = load_file(f"{resolve_model('tiny')}/model.safetensors")
    for step, moves in ((1, False), (2, False), (3, True)):
        actor, critic = (state(run, step, role) for role in ("actor", "critic"))
        assert actor["/counters"].tolist() == [2 * (step - 2) if moves else 0, 0] and critic["/counters"].tolist() == [2 * step, 0]
        assert moves != all(torch.equal(actor[f"/model/lm.{name}"], value) for name, value in first.items())
        assert critic["/model/value_head.weight"].abs().max() > 0
    assert all(row["critic/grad_norm"] > 0 for row in told)


@pytest.mark.spmd
def test_the_coefficient_follows_the_kl_and_is_that_of_every_token(warm_runs):
    run = warm_runs / "warm6"
    told = metrics(run)
    config = AlgorithmConfig(kl_target=0.01, kl_horizon=100)
    expected = [0.1, 0.1, 0.1]  # it rests while the critic warms up
    for row in told[2:]:
        expected.append(adapt_kl_coef(config, expected[-1], row["actor/kl_sample"], 32))
    assert [row["actor/kl_coef"] for row in told] == expected[:-1] and kl_coefs(run) == expected[1:]
    assert len(set(expected)) == 5 and [abs(row["actor/kl_sample"]) < 1e-5 for row in told] == [True] * 3 + [False] * 3
    for row, found in zip(told, rows(run), strict=True):
        charged = 0.0
        for fields in found.values():
            mask = fields["response_mask"]
            penalty = row["actor/kl_coef"] * (fields["old_log_probs"] - fields["ref_log_probs"])[mask]
            torch.testing.assert_close(-penalty[:-1], fields["token_rewards"][mask][:-1], atol=1e-7, rtol=1e-5)
            torch.testing.assert_close(fields["token_rewards"][mask].sum(), fields["rewards"], atol=1e-6, rtol=1e-6)
            charged += float(penalty.sum())
        assert row["reward/kl_penalty_mean"] == pytest.approx(charged / len(found), abs=1e-7)


class Crash(BaseException):
    """What no handler catches."""


@pytest.fixture
def crash_at(monkeypatch):
    """`crash_at(root, n)`: the n-th change of a file or folder under `root` from now on does not happen; None: all do."""
    monkeypatch.setattr(checkpoint, "on_first", lambda world, function, name: function())
    monkeypatch.setattr(checkpoint, "barrier", lambda group, name: None)
    monkeypatch.setattr(checkpoint.shutil, "rmtree", remove_state_last)
    watched = SimpleNamespace(root=None, left=0)

    def hook(event, args):
        if watched.root is None or event not in ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "open"):
            return
        if event == "open" and (not isinstance(args[1], str) or args[1][0] == "r"):
            return
        if event == "open" and not str(args[0]).startswith(watched.root):
            return
        watched.left -= 1
        if watched.left < 0:
            watched.root = None
            raise Crash

    def arm(root, left):
        watched.root, watched.left = None if left is None else str(root), left

    sys.addaudithook(hook)
    yield arm
    watched.root = None


def remove_state_last(folder: Path, ignore_errors: bool = False) -> None:
    """The worst order in which a file system may list a folder."""
    if folder.exists() or not ignore_errors:
        for path in sorted(folder.iterdir(), key=lambda path: path.name == checkpoint.STATE):
            remove_state_last(path) if path.is_dir() else path.unlink()
        folder.rmdir()


def save_one(root: Path, step: int, keep: int) -> None:
    def roles(folder: Path) -> None:
        for role in ("actor", "critic"):
            (folder / role).mkdir()
            (folder / role / "data").write_text(f"{role} {step}")

    checkpoint.save_step(SimpleNamespace(control=None), root, step, roles, {}, keep)


@pytest.mark.parametrize("before,step,keep", [([1], 2, 1), ([1, 2, 3], 4, 2), ([1, 2], 2, 2), ([7, 8], 1, 1)])
def test_a_crash_at_any_change_leaves_a_whole_step(tmp_path, crash_at, before, step, keep):
    """Also where the step exists already, or later ones of an earlier run do."""
    for number in range(100):
        root = tmp_path / str(number)
        for earlier in before:
            save_one(root, earlier, len(before))
        crash_at(root, number)
        try:
            save_one(root, step, keep)
        except Crash:
            pass
        else:
            break
        found, state_of = checkpoint.find_resume(None, root, "auto")
        assert state_of["step"] in {*before, step}
        for role in ("actor", "critic"):
            assert (found / role / "data").read_text() == f"{role} {state_of['step']}"
        save_one(root, step, keep)
    assert number > 8
    crash_at(root, None)
    names = [path.name for path in sorted(root.iterdir())]
    assert names == [f"step_{kept_step:06d}" for kept_step in sorted({*(b for b in before if b < step), step})[-keep:]]
