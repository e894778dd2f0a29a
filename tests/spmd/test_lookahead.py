"""One step off-policy: the samples of a step are drawn while the step before trains, and a resumed run is the whole one."""

from __future__ import annotations

import functools
import json
import math
import shutil
import signal
from pathlib import Path

import pytest
import torch

from spmd_rl.batch import fields_of, make_batch
from spmd_rl.checkpoint import load_samples, save_samples
from spmd_rl.mesh import RoleMesh
from spmd_rl.metrics import Max, Mean, Sum, add_stats, read_jsonl
from spmd_rl.placed import Placed
from spmd_rl.train import compose_config
from spmd_rl.validation import validate
from tests import jobs
from tests.forks import fork_ranks
from tests.helpers import make_rows
from tests.jobs import launch_jobs, metrics, rows, run_jobs
from tests.spmd.test_resume import KEPT, check_bitwise

SIX = "trainer.total_steps=6"
VALIDATED = ["data.val=letters", "data.val_kwargs={seed: 3, size: 12}", "trainer.eval_every=2"]
COMMON = [
    *("optimizer.learning_rate=1e-3", "optimizer.weight_decay=0.01", "trainer.save_every=1", "trainer.keep=6"),
    *("trainer.sample_rows=64", "trainer.lookahead=1", "placement=split", *VALIDATED),
]
LIMITED = [*COMMON, *KEPT, "trainer.keep=6"]


def cut(source: Path, target: Path, step: int) -> None:
    """A copy of the run as it was when it had saved that step."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("rank*.pt"))
    for path in (target / "checkpoints").iterdir():
        if int(path.name.removeprefix("step_")) > step:
            shutil.rmtree(path)


def run_and_stop(folder: Path) -> None:
    """The rollout's rank is told to stop while it draws the samples of the fourth step, as the third one trains."""
    sample = jobs.RecordingTrainer.sample

    def interrupted(self, step):
        if step == 3 and self.rollout.mesh.here:
            signal.raise_signal(signal.SIGTERM)
        return sample(self, step)

    jobs.RecordingTrainer.sample = interrupted
    run_jobs(folder)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lookahead")
    lockstep = [*COMMON, "trainer.lookahead=0", "trainer.total_steps=3"]
    whole = {"whole": [*COMMON, SIX], "limited6": [*LIMITED, SIX], "two": [*COMMON, "trainer.total_steps=2"], "lockstep": lockstep}
    launch_jobs(folder, 2, whole)
    (folder / "jobs.json").write_text(json.dumps({"stopped": [*COMMON, SIX, "trainer.save_every=0"]}))
    fork_ranks("tests.spmd.test_lookahead:run_and_stop", folder, 2)
    shutil.copytree(folder / "stopped", folder / "as_stopped")
    for path in (folder / "stopped").glob("rank*.pt"):
        path.unlink()
    for name in ("resumed", "wider"):
        cut(folder / "whole", folder / name, 3)
    for name in ("limited", "limited_one"):
        cut(folder / "limited6", folder / name, 3)
    cut(folder / "whole", folder / "one", 3)
    launch_jobs(folder, 2, {"resumed": [*COMMON, SIX], "stopped": [*COMMON, SIX], "limited": [*LIMITED, SIX]})
    launch_jobs(folder, 4, {"wider": [*COMMON, SIX]})
    cut(folder / "wider", folder / "narrower", 4)
    launch_jobs(folder, 2, {"narrower": [*COMMON, SIX]})
    together = ["placement=colocated", "trainer.lookahead=0", SIX]
    launch_jobs(folder, 1, {"one": [*COMMON, *together], "limited_one": [*LIMITED, *together]})
    return folder


def versions(fields: dict[str, torch.Tensor]) -> set[int]:
    return set(fields["policy_version"][fields["response_mask"]].tolist())


@pytest.mark.spmd
def test_every_token_is_one_version_old_from_the_second_step_on(runs):
    steps, lockstep = rows(runs / "whole"), rows(runs / "lockstep")
    assert len(steps) == 6
    for step, found in enumerate(steps):
        assert {uid for uid, _ in found} == set(range(8 * step, 8 * step + 8))
        assert all(versions(fields) == {max(0, step - 1)} for fields in found.values())
    assert [versions(f) for found in lockstep for f in found.values()] == [{step} for step in range(3) for _ in range(32)]
    for row, fields in lockstep[0].items():
        assert all(torch.equal(steps[0][row][field], value) for field, value in fields.items())
    assert any(not torch.equal(steps[1][row]["input_ids"], fields["input_ids"]) for row, fields in lockstep[1].items())


@pytest.mark.spmd
def test_statistics_stand_with_the_step_that_trains_on_the_samples(runs):
    run = runs / "whole"
    shown = read_jsonl(run / "samples.jsonl")
    for step, (found, told) in enumerate(zip(rows(run), metrics(run), strict=True)):
        rewards = sorted(float(fields["rewards"]) for fields in found.values())
        assert told["reward/mean"] == pytest.approx(sum(rewards) / 32, abs=1e-6) and told["response/samples"] == 32
        assert told["response/tokens"] == sum(int(f["lengths"] - f["prompt_lengths"]) for f in found.values())
        assert sorted(row["reward"] for row in shown if row["step"] == step + 1) == pytest.approx(rewards, abs=1e-6)
        assert (told["rollout/logprob_diff_max"] is None) == (step > 0)  # no token of the present weights
        assert told["traffic/weights_bytes"] == metrics(run)[0]["traffic/weights_bytes"] > 0
    assert len({tuple(row["reward"] for row in shown if row["step"] == step) for step in range(1, 7)}) == 6


@pytest.mark.spmd
@pytest.mark.parametrize("name,whole", [("resumed", "whole"), ("stopped", "whole"), ("limited", "limited6")])
def test_a_resumed_run_is_the_whole_one(runs, name, whole):
    """`stopped` had to stop while a batch was in flight; `limited` has groups that go on besides."""
    num_rows = sum(map(len, rows(runs / whole)))
    check_bitwise(runs / name, runs / whole, 4, num_rows=num_rows)


@pytest.mark.spmd
def test_a_stop_signal_saves_the_samples_in_flight(runs):
    run = runs / "as_stopped"
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_000003"]
    assert len(metrics(run)) == 3 and (run / "checkpoints" / "step_000003" / "inflight" / "00000.safetensors").exists()
    assert metrics(run) == metrics(runs / "whole")[:3]


@pytest.mark.spmd
@pytest.mark.parametrize("name,first", [("wider", 3), ("narrower", 4)])
def test_resumes_on_another_number_of_ranks(runs, name, first):
    """Two replicas of the rollout take up what one had in flight, and one what two had."""
    resumed, expected = rows(runs / name), rows(runs / "whole")[first:]
    for got, want in zip(resumed, expected, strict=True):
        assert got.keys() == want.keys()
        for row, fields in want.items():
            for field in ("input_ids", "policy_version", "rewards", "response_mask"):
                assert torch.equal(got[row][field], fields[field]), (row, field)
    for got, want in zip(metrics(runs / name), metrics(runs / "whole"), strict=True):
        for key in ("reward/mean", "response/tokens", "response/samples", "val/reward/mean"):
            assert got.get(key) == pytest.approx(want.get(key), abs=1e-6), (want["step"], key)
    files = [len([*(path / "inflight").glob("*.safetensors")]) for path in sorted((runs / name / "checkpoints").iterdir())]
    assert files == [1, 1, 1, 2, 2, 0] if name == "wider" else [1, 1, 1, 2, 1, 0]


@pytest.mark.spmd
def test_without_lookahead_a_resumed_run_draws_anew_unless_prompts_would_be_lost(runs):
    assert all(versions(fields) == {3} for fields in rows(runs / "one")[0].values())
    assert {uid for found in rows(runs / "one") for uid, _ in found} == set(range(24, 48))
    before = [uid for found in rows(runs / "limited6")[:3] for uid in {uid for uid, _ in found}]
    after = [uid for found in rows(runs / "limited_one") for uid in {uid for uid, _ in found}]
    saved = json.loads((runs / "limited_one" / "checkpoints" / "step_000006" / "rollout.json").read_text())
    going_on = {episode["uid"] for part in saved["replicas"] for episode in part}
    assert sorted([*before, *after, *going_on]) == list(range(saved["drawn"]))  # each once
    inflight = {uid for uid, _ in rows(runs / "limited6")[3]}
    assert inflight and inflight == {uid for uid, _ in rows(runs / "limited_one")[0]}


@pytest.mark.spmd
def test_none_are_in_flight_after_the_last_step(runs):
    steps = sorted((runs / "whole" / "checkpoints").iterdir())
    assert [(path / "inflight").exists() for path in steps] == [True] * 5 + [False]
    for path in steps[:-1]:
        said = json.loads((path / "inflight" / "00000.json").read_text())
        assert ["reward/mean", "Mean"] in said["schema"] and len(said["shown"]) == 32


@pytest.mark.spmd
def test_validations_stand_one_line_later_and_the_last_is_of_the_last_weights(runs):
    def validated(run):
        return {row["step"]: row for row in metrics(run) if "val/reward/mean" in row}

    whole, two = validated(runs / "whole"), validated(runs / "two")
    assert [*whole] == [3, 5, 6] and [*two] == [2] and [*validated(runs / "lockstep")] == [2, 3]
    keys = [key for key in two[2] if key.startswith("val/")]
    assert len(keys) >= 5 and {key: whole[3][key] for key in keys} == {key: two[2][key] for key in keys}
    assert len({tuple(row[key] for key in keys) for row in whole.values()}) > 1


def test_refused_in_one_cell():
    for ranks, overrides, number in ((2, [], 1), (2, ["placement=split"], 0), (1, ["rollout=hf"], 1)):
        config, problems = compose_config("tiny", None, ["trainer.lookahead=1", *overrides])
        assert not problems
        found = [line for line in validate(config, ranks) if line.startswith("trainer.lookahead: 1 overlaps nothing")]
        assert len(found) == number


@pytest.mark.parametrize("replicas,width", [(2, 2), (1, 1), (1, 4), (3, 2)])
def test_samples_in_flight_are_dealt_to_any_number_of_replicas(tmp_path, replicas, width):
    """Saved by two replicas of two lanes, one with fewer and longer rows: each row and statistic comes back once, bit for bit."""
    whole = make_rows([(5, [4, 1, 7]), (9, [3, 3]), (2, [6])])
    whole.rewards = torch.tensor([0.1, math.nan, 0.3, -1.0, 0.0, 0.5])
    whole.token_rewards = torch.randn(whole.input_ids.shape)
    short = int(whole.lengths[3:5].max())
    narrow = {name: value if value.ndim == 1 else value[:, :short] for name, value in fields_of(whole[3:5]).items()}
    shards = [make_batch(narrow), whole[torch.tensor([0, 1, 2, 5])]]
    for rank in range(4):
        stats = {"mean": Mean(0.1 + rank, 1), "sum": Sum(3), "max": Max(-math.inf if rank else 0.7)}
        shown = [] if rank % 2 else [{"prompt": "p", "reward": 0.1 * rank}]
        save_samples(Placed(mesh_of(2, 2, rank), shards[rank // 2]), stats, shown, tmp_path)
    loaded = [load_samples(mesh_of(replicas, width, rank), tmp_path) for rank in range(replicas * width)]
    found = {}
    for rank, (batch, _, _) in enumerate(loaded):
        assert fields_of(batch.local).keys() == fields_of(whole).keys()
        for b, name in enumerate(zip(batch.local.uid.tolist(), batch.local.sample.tolist())):
            assert rank % width or name not in found
            found[name] = {k: v[b] for k, v in fields_of(batch.local).items()}
    assert len(found) == 6
    for b, name in enumerate(zip(whole.uid.tolist(), whole.sample.tolist())):
        for field, value in fields_of(whole).items():
            want, got = (v[: int(whole.lengths[b])] if v.ndim else v for v in (value[b], found[name][field]))
            assert want.dtype == got.dtype and torch.equal(want.nan_to_num(7), got.nan_to_num(7)), (name, field)
    total = functools.reduce(add_stats, (stats for _, stats, _ in loaded))
    assert total == {"mean": Mean(pytest.approx(6.4), 4), "sum": Sum(12), "max": Max(0.7)}
    assert sorted(row["reward"] for _, _, shown in loaded for row in shown) == [0.0, 0.2]
    if (replicas, width) == (2, 2):  # the same layout: the same on every rank
        assert [stats["mean"] for _, stats, _ in loaded] == [Mean(0.1 + rank, 1) for rank in range(4)]
    outside = load_samples(RoleMesh((1,), 1, 0, torch.device("cpu")), tmp_path)
    assert outside[0].local is None and outside[1:] == ({}, [])


def mesh_of(replicas: int, width: int, rank: int) -> RoleMesh:
    return RoleMesh(tuple(range(replicas * width)), replicas, rank, torch.device("cpu"))
