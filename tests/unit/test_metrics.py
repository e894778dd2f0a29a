from __future__ import annotations

import io
import itertools
import json
import math
import statistics
import sys
from types import SimpleNamespace

import pytest
import torch
from rich.text import Text

from spmd_rl import metrics
from spmd_rl.config import LoggerConfig
from spmd_rl.metrics import Max, Mean, Min, Sum, add_stats, neutral, pack, schema, unpack, values

A = {"loss": Sum(1.5), "kl": Mean(2.0, 4.0), "ratio": Max(1.25)}
B = {"loss": Sum(0.25), "kl": Mean(7.0, 2.0), "ratio": Max(3.0), "extra": Sum(1.0)}


def test_add_stats_adds_totals_and_counts_and_keeps_the_larger():
    assert add_stats(A, B) == {"loss": Sum(1.75), "kl": Mean(9.0, 6.0), "ratio": Max(3.0), "extra": Sum(1.0)}
    assert add_stats(B, A) == add_stats(A, B)


def test_a_mean_over_uneven_parts_is_the_mean_of_all():
    parts = [[1.0, 2.0, 3.0], [10.0], [0.5, 0.5]]
    total: metrics.Stats = {}
    for part in parts:
        total = add_stats(total, {"x": Mean(sum(part), len(part))})
    assert values(total)["x"] == pytest.approx(statistics.mean(sum(parts, [])))


def test_tensors_and_floats_mix_in_float64():
    mixed = add_stats({"x": Sum(torch.tensor(2.0**24)), "m": Max(-math.inf)}, {"x": Sum(1.0), "m": Max(torch.tensor(3))})
    assert values(mixed) == {"x": 2.0**24 + 1, "m": 3.0}  # float32 would drop the 1


@pytest.mark.parametrize("as_type", [float, torch.tensor])
@pytest.mark.parametrize(("a", "b"), [(math.nan, 1.0), (1.0, math.nan)])
def test_nan_survives_a_maximum(a, b, as_type):
    assert math.isnan(values(add_stats({"m": Max(as_type(a))}, {"m": Max(as_type(b))}))["m"])


def test_a_key_of_two_types_is_named():
    with pytest.raises(TypeError, match="'kl': .*Mean.*Sum"):
        add_stats(A, {"kl": Sum(1.0)})
    with pytest.raises(TypeError, match="'kl' is a Mean here and a Sum"):
        pack(A, [("kl", "Sum"), ("loss", "Sum"), ("ratio", "Max")])


def test_packed_ranks_reduce_to_the_same_stats():
    agreed = sorted(set(schema(A)) | set(schema(B)))
    assert agreed == [("extra", "Sum"), ("kl", "Mean"), ("loss", "Sum"), ("ratio", "Max")]
    packed = [pack(stats, agreed) for stats in (A, B, {})]  # the third rank has nothing
    summed = torch.tensor([p[0] for p in packed], dtype=torch.float64).sum(0).tolist()
    maxed = torch.tensor([p[1] for p in packed], dtype=torch.float64).amax(0).tolist()
    assert unpack((summed, maxed), agreed) == add_stats(A, B)
    assert add_stats(neutral(agreed), B) == neutral(agreed) | B
    with pytest.raises(ValueError, match=r"\[3, 1\] packed numbers .* \[4, 1\]"):
        unpack((summed[:-1], maxed), agreed)


def test_a_key_outside_the_schema_and_a_vector_are_refused():
    with pytest.raises(KeyError, match="extra"):
        pack(B, schema(A))
    with pytest.raises(ValueError, match=r"value of stat 'v' has shape \(2,\)"):
        values({"v": Sum(torch.zeros(2))})


def test_values_of_nothing_are_nan():
    result = values({"mean": Mean(0.0, 0), "max": Max(-math.inf), "sum": Sum(torch.tensor(2, requires_grad=False))})
    assert math.isnan(result["mean"]) and math.isnan(result["max"]) and result["sum"] == 2.0


def test_a_minimum_over_parts_and_ranks():
    mixed = add_stats({"m": Min(2.0)}, {"m": Min(torch.tensor(0.5))})
    assert values(mixed) == {"m": 0.5} and math.isnan(values(add_stats(mixed, {"m": Min(math.nan)}))["m"])
    assert math.isnan(values(neutral([("m", "Min")]))["m"])
    ranks = [pack(stats, [("m", "Min")]) for stats in ({"m": Min(3.0)}, {}, {"m": Min(-2.0)})]
    assert unpack(([], torch.tensor([maxed for _, maxed in ranks]).amax(0).tolist()), [("m", "Min")]) == {"m": Min(-2.0)}


def clock(*ticks):
    return iter(ticks).__next__


def test_phases_add_up_exactly(monkeypatch):
    wall = clock(100.1, 100.2, 101.3, 101.7, 102.9, 103.0, 103.1, 104.4, 110.0)
    cpu = clock(5.0, 5.0, 6.0, 6.0, 6.5, 6.5, 7.0, 8.0, 9.0)
    monkeypatch.setattr(metrics, "time", SimpleNamespace(perf_counter=wall, process_time=cpu))
    phases = metrics.Phases()
    for name in ("generate", "train", "generate"):
        with phases(name):
            pass
    step = phases.step()
    assert step["time/step"] == pytest.approx(4.3, abs=1e-5)
    assert step["time/generate"] == pytest.approx(1.2, abs=1e-5)
    assert step["time/train"] == pytest.approx(1.2, abs=1e-5)
    assert (step["cpu/generate"], step["cpu/train"], step["cpu/other"], step["cpu/step"]) == (1.5, 0.5, 1.0, 3.0)
    second = phases.step()
    assert second == {
        "time/other": second["time/step"],
        "time/step": second["time/step"],
        "cpu/other": 1.0,
        "cpu/step": 1.0,
    }
    assert second["time/step"] == pytest.approx(5.6, abs=1e-5)


def test_seconds_sum_exactly_in_any_order(monkeypatch):
    ticks = [1.7**i / 3 for i in range(12)]  # their plain differences do not add up
    monkeypatch.setattr(metrics, "time", SimpleNamespace(perf_counter=clock(*ticks), process_time=clock(*ticks)))
    phases = metrics.Phases()
    for name in "abcde":
        with phases(name):
            pass
    step = phases.step()
    for order in itertools.permutations([*"abcde", "other"]):
        assert sum(step[f"time/{name}"] for name in order) == step["time/step"]


def test_phases_are_flat_and_close_on_an_exception():
    phases = metrics.Phases()
    with (
        pytest.raises(RuntimeError, match="'train' starts inside phase 'generate'"),
        phases("generate"),
        phases("train"),
    ):
        pass
    assert {"time/generate", "time/other", "time/step"} < phases.step().keys()
    with pytest.raises(ValueError, match="'other' is reserved"), phases("other"):
        pass
    with phases("train"), pytest.raises(RuntimeError, match="'train' is still open"):
        phases.step()


def lines(path):
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_jsonl_is_flushed_and_writes_null_for_what_json_lacks(tmp_path):
    writer = metrics.JSONLWriter(tmp_path / "run" / "metrics.jsonl")
    writer.write(1, {"a": math.nan, "b": -math.inf, "c": 0.5})
    assert lines(tmp_path / "run" / "metrics.jsonl") == [{"step": 1, "a": None, "b": None, "c": 0.5}]


def test_resume_drops_the_steps_that_run_again_and_a_torn_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 4, "x": 0.')
    writer = metrics.JSONLWriter(path, resume_step=3)
    writer.write(3, {"again": 1.0})
    writer.close()
    assert lines(path) == [{"step": 0}, {"step": 1}, {"step": 2}, {"step": 3, "again": 1.0}]
    metrics.JSONLWriter(path).close()
    assert path.read_text() == ""
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_resume_names_a_broken_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\nnot json\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 2 is not JSON: 'not json'"):
        metrics.JSONLWriter(path, resume_step=2)
    assert path.read_text().count("\n") == 3


def test_samples_are_one_line_a_row_and_survive_any_text(tmp_path):
    writer = metrics.SampleWriter(tmp_path / "samples.jsonl")
    rows = [
        {"prompt": "a\nb\u2028", "response": "\ud800[/]", "reward": math.nan, "ids": [1, math.inf]},
        {"prompt": "c"},
    ]
    writer.samples(2, rows)
    writer.write(2, {"reward/mean": 1.0})
    text = (tmp_path / "samples.jsonl").read_text()
    first, second = map(json.loads, text.splitlines())
    assert first == {"step": 2, "prompt": "a\nb\u2028", "response": "\ud800[/]", "reward": None, "ids": [1, None]}
    assert second == {"step": 2, "prompt": "c"}


class Terminal(io.StringIO):
    def isatty(self):
        return True


ROWS = [{"prompt": "system text " * 30 + "What is 2+3?\n", "response": "[bold]5[/nope]\x1b[31m " + "y" * 400, "reward": 1}]
STEP = {"reward/mean": 0.51234, "response/length_mean": 24.0, "response/truncated_fraction": 0.25, "time/step": 2.0}


def test_console_in_a_log_is_one_plain_line_a_step(monkeypatch):
    monkeypatch.setattr(sys, "stdout", out := io.StringIO())
    console = metrics.Console(total_steps=10, resume_step=6)
    console.write(6, STEP | {"val/accuracy": 0.5, "perf/samples_per_second": 100.0, "actor/grad_norm": math.nan})
    console.samples(6, ROWS)
    console.samples(6, [])
    console.close()
    line, *table = out.getvalue().splitlines()
    assert line.startswith("step 6/10  reward 0.512  length 24.0  cut 25%  grad nan  s/step 2.00  samp/s 100.0  val 50.0%")
    assert line.endswith("eta 0:00:00")
    assert "\x1b" not in out.getvalue()
    assert {len(row) for row in table[1:]} == {120} and table[-2].endswith("│      1 │")
    assert "What is 2+3?" in out.getvalue() and r"[bold]5[/nope]\x1b[31m yyy" in out.getvalue()


def test_console_on_a_terminal_fits_its_width(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "stdout", out := Terminal())
    console = metrics.Console(total_steps=10)
    console.write(0, {"val/accuracy": 0.125})
    console.write(1, STEP)
    console.samples(1, ROWS)
    console.close()
    plain = [Text.from_ansi(line).plain for line in out.getvalue().replace("\r", "\n").splitlines()]
    assert max(map(len, plain)) <= 80
    titles = next(line for line in plain if line.startswith("  step")).split()
    row = next(line for line in plain if line.startswith("     1 ")).split()
    assert dict(zip(titles, row, strict=True)) == {
        "step": "1", "reward": "0.512", "length": "24.0", "cut": "25%", "grad": "-", "entropy": "-", "s/step": "2.00",
        "samp/s": "-", "val": "-"}  # fmt: skip
    assert any("step 1/10" in line and "reward 0.512" in line for line in plain)
    assert any("[bold]5[/nope]" in line and "2+3?" in line for line in plain)


def test_tensorboard_keeps_one_value_a_step_over_a_resume(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for resume_step, steps, value in ((0, (1, 2, 3), 1.0), (3, (3, 4), 2.0)):
        writer = metrics.TensorBoardWriter(tmp_path, resume_step)
        for step in steps:
            writer.write(step, {"reward/mean": value})
        writer.close()
    events = accumulator.EventAccumulator(str(tmp_path)).Reload().Scalars("reward/mean")
    assert [(event.step, event.value) for event in events] == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)]


def test_wandb_writes_into_the_run_folder_and_resumes_its_id(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    writer = metrics.WandbWriter("spmd_rl", "offline", tmp_path, {"seed": 1})
    writer.write(1, {"reward/mean": 0.5})
    writer.samples(1, [{"prompt": "p", "response": "r", "reward": 1.0, "more": 2}])
    writer.close()
    (run,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    assert run.stat().st_size > 0
    asked, fake = [], SimpleNamespace(define_metric=lambda *args, **kwargs: None)
    monkeypatch.setattr(wandb, "init", lambda **kwargs: asked.append(kwargs["id"]) or fake)
    for resume_step in (2, 0):
        metrics.WandbWriter("spmd_rl", "offline", tmp_path, {}, resume_step)
    assert run.name == f"run-{asked[0]}.wandb"
    assert asked[1] != asked[0]


@pytest.mark.parametrize(("package", "flag"), [("wandb", "wandb"), ("tensorboard", "tensorboard")])
def test_a_missing_package_names_its_extra(tmp_path, monkeypatch, package, flag):
    for name in [n for n in sys.modules if n == "torch.utils.tensorboard" or n.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf'{package} is not installed: pip install "spmd_rl\[{flag}\]"'):
        metrics.make_writers(LoggerConfig(console=False, **{flag: True}), tmp_path, 10, 0, {})


def test_make_writers_follows_the_config(tmp_path):
    writers = metrics.make_writers(LoggerConfig(tensorboard=True), tmp_path, total_steps=10, resume_step=0, config_dict={})
    for writer in writers:
        writer.write(1, STEP)
        writer.samples(1, ROWS)
        writer.close()
    assert [type(w).__name__ for w in writers] == ["JSONLWriter", "SampleWriter", "TensorBoardWriter", "Console"]
    assert {p.name for p in tmp_path.iterdir()} == {"metrics.jsonl", "samples.jsonl", "tensorboard"}
