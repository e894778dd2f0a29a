from __future__ import annotations

import json
import sys

import pytest

from spmd_rl import metrics, report

pytest.importorskip("matplotlib")
Image = pytest.importorskip("PIL.Image")

STEPS = [
    {"reward/mean": 0.25, "time/step": 3.0, "time/generate": 2.0, "time/train": 1.0, "perf/samples_per_second": 10.0},
    {
        "reward/mean": float("nan"),
        "time/step": 3.5,
        "time/generate": 2.0,
        "time/other": 1.5,
        "perf/samples_per_second": 20.0,
    },
    {
        "reward/mean": 0.75,
        "time/step": 12.0,
        "time/generate": 2.0,
        "time/validate": 10.0,
        "perf/samples_per_second": 60.0,
    },
]
BEFORE = {"val/accuracy": 0.2, "val/add/accuracy": 0.3, "val/a/b/accuracy": 0.1, "time/step": 9.0}
AFTER = {"val/accuracy": 0.7, "val/add/accuracy": 0.8, "val/a/b/accuracy": 0.6, "val/new/accuracy": 0.5}


def run_folder(folder, before=BEFORE, after=AFTER, steps=STEPS):
    writer = metrics.JSONLWriter(folder / "metrics.jsonl")
    if before is not None:
        writer.write(0, before)
    for step, row in enumerate(steps, start=1):
        writer.write(step, row | (after if step == len(steps) else {}))
    writer.close()
    return folder


def test_report_writes_summary_and_curves(tmp_path, capsys):
    report.main([str(run_folder(tmp_path))])
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary == {
        "steps": 3,
        "accuracy_before": 0.2,
        "accuracy_after": 0.7,
        "sources": {
            "a/b": {"before": 0.1, "after": 0.6},
            "add": {"before": 0.3, "after": 0.8},
            "new": {"before": None, "after": 0.5},
        },
        "seconds_train": 8.5,  # 3 + 3.5 + 12, less 10 of validation; step 0 is no training
        "samples_per_second": 30.0,
    }
    out = capsys.readouterr().out
    assert str(tmp_path / "curves.png") in out
    table = {cells[0]: cells[1:] for line in out.splitlines() if (cells := line.replace("│", " ").split())}
    assert table["all"] == ["20.0%", "70.0%", "+50.0", "points"]
    assert table["new"] == ["-", "50.0%", "-"]


@pytest.mark.parametrize("num_steps", [1, 2, 100])
def test_curves_of_any_length_show_something(tmp_path, num_steps):
    rows = report.load(run_folder(tmp_path, steps=(STEPS * num_steps)[:num_steps]))
    report.draw(rows, tmp_path / "curves.png", title="run")
    with Image.open(tmp_path / "curves.png") as image:
        width, height = image.size
        assert width > height > 600
        for box in ((0, 0, width // 2, height // 2), (width // 2, height // 2, width, height)):  # reward, seconds
            colours = image.convert("RGB").crop(box).getcolors(maxcolors=1 << 20)
            blue = sum(count for count, (r, _, b) in colours if b > r + 80)
            assert blue > (20 if box[0] == 0 else 0.1 * width * height / 4)  # a point or a line, and a filled area


def test_a_folder_without_metrics_is_named(tmp_path):
    with pytest.raises(SystemExit, match=f"no metrics.jsonl in run folder {tmp_path}"):
        report.main([str(tmp_path)])


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"before": None}, "'val/accuracy' is missing at step 0"),
        ({"before": {"other": 1.0}}, "'val/accuracy' is missing at step 0 .*trainer.val_before=true"),
        ({"after": {}}, "'val/accuracy' is missing at step 3 .*trainer.eval_every"),
        ({"after": AFTER | {"time/step": float("nan")}}, "'time/step' is missing at step 3"),
        ({"steps": []}, "no training step"),
    ],
)
def test_what_is_missing_is_named(tmp_path, parts, message):
    with pytest.raises(SystemExit, match=f"run folder {tmp_path}: .*{message}"):
        report.main([str(run_folder(tmp_path, **parts))])
    assert not (tmp_path / "summary.json").exists()


def test_a_missing_matplotlib_names_its_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit, match=r'pip install "spmd_rl\[plots\]"'):
        report.main([str(run_folder(tmp_path))])
