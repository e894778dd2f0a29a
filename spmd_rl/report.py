"""`python -m spmd_rl.report RUN_DIR`: what a run learned, as a table, `curves.png` and `summary.json`."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spmd_rl.metrics import VALIDATION, read_jsonl, require

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Rows = list[dict[str, Any]]  # the lines of metrics.jsonl: step, then key -> number or None

BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#8A8A8A"
PHASES = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#F0E442",
    "#D55E00",
    "#000000",
)  # Okabe & Ito: readable when colour-blind


def load(run_dir: Path) -> Rows:
    """The lines of `metrics.jsonl`. Raises FileNotFoundError where there is none, ValueError where it has no line."""
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        raise FileNotFoundError(f"no metrics.jsonl in run folder {run_dir}: name the folder given as trainer.run_dir")
    rows = read_jsonl(path)
    if not any(row["step"] > 0 for row in rows):
        raise ValueError(f"run folder {run_dir}: metrics.jsonl has no training step (`step` of 1 or more) yet")
    return rows


def summarize(rows: Rows, run_dir: Path) -> dict[str, Any]:
    """Accuracy before and after (overall, and per source), training seconds without validation, samples per second.

    Raises ValueError that names the run folder, the key and the step where a number is missing."""
    train = [row for row in rows if row["step"] > 0]
    first, last = rows[0], rows[-1]

    def number(row: dict[str, Any], key: str, hint: str = "") -> float:
        if row.get(key) is None:
            raise ValueError(f"run folder {run_dir}: '{key}' is missing at step {row['step']} of metrics.jsonl{hint}")
        return row[key]

    if first["step"] != 0:
        raise ValueError(f"run folder {run_dir}: 'val/accuracy' is missing at step 0: set trainer.val_before=true")
    before = number(first, "val/accuracy", ": set data.val and trainer.val_before=true")
    after = number(last, "val/accuracy", ": set data.val and trainer.eval_every, and let the run end")
    keys = {match[1]: key for key in sorted(last) if (match := re.fullmatch(r"val/(.+)/accuracy", key))}
    return {
        "steps": len(train),
        "accuracy_before": before,
        "accuracy_after": after,
        "sources": {name: {"before": first.get(key), "after": last[key]} for name, key in keys.items()},
        "seconds_train": sum(number(row, "time/step") - row.get(f"time/{VALIDATION}", 0.0) for row in train),
        "samples_per_second": sum(number(row, "perf/samples_per_second") for row in train) / len(train),
    }


def draw(rows: Rows, path: Path, title: str) -> None:
    """Writes the four panels as a PNG. Keys that the run did not log leave their curve out."""
    figure = require("matplotlib.figure", "plots").Figure(figsize=(11, 7), dpi=150, layout="constrained")
    axes = figure.subplots(2, 2)
    train = [row for row in rows if row["step"] > 0]
    _reward(axes[0, 0], rows, train)
    _pair(axes[0, 1], train, ("response/length_mean", "response length (tokens)", BLUE),
          ("response/truncated_fraction", "truncated share", ORANGE), top=1.0)  # fmt: skip
    _pair(axes[1, 0], train, ("actor/grad_norm", "gradient norm", BLUE), ("actor/entropy", "entropy (nats)", ORANGE))
    _seconds(axes[1, 1], train)
    for axis in axes.flat:
        axis.set_xlabel("step")
        axis.set_xlim(-0.02 * train[-1]["step"] - 0.3, 1.02 * train[-1]["step"] + 0.5)
        axis.xaxis.get_major_locator().set_params(integer=True)
    figure.suptitle(title, fontsize=13, fontweight="bold")
    figure.savefig(path)


def _column(rows: Rows, key: str) -> tuple[list[int], list[float]]:
    """Steps and values of `key` where it was logged; a null becomes NaN, a gap in the line."""
    found = [(row["step"], math.nan if row[key] is None else row[key]) for row in rows if key in row]
    return [step for step, _ in found], [value for _, value in found]


def _line(axis: Axes, steps: list[int], series: list[float], colour: str, label: str) -> None:
    """The raw curve, and over a long run its running mean in front of it."""
    window = len(series) // 20
    smooth = window > 1
    marker = "o" if len(series) <= 20 else None
    axis.plot(steps, series, color=colour, alpha=0.3 if smooth else 1.0, lw=1.0 if smooth else 1.6, marker=marker,
              markersize=3, label=None if smooth else label)  # fmt: skip
    if smooth:
        spans = [[v for v in series[max(0, i - window + 1) : i + 1] if not math.isnan(v)] for i in range(len(series))]
        means = [sum(span) / len(span) if span else math.nan for span in spans]
        axis.plot(steps, means, color=colour, lw=1.8, label=f"{label}, mean of {window} steps")


def _style(axis: Axes, title: str) -> None:
    axis.set_title(title, loc="left", fontsize=11)
    axis.grid(axis="y", color="#E6E6E6", lw=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def _reward(axis: Axes, rows: Rows, train: Rows) -> None:
    _style(axis, "reward and validation accuracy")
    steps, rewards = _column(train, "reward/mean")
    _line(axis, steps, rewards, BLUE, "training reward")
    points, accuracy = _column(rows, "val/accuracy")
    if points:
        axis.plot(points, accuracy, color=ORANGE, marker="D", ms=6, lw=1.2, ls="--", label="validation accuracy")
        for end, offset, side in ((0, (8, -10), "left"), (-1, (4, 9), "right")):
            axis.annotate(f"{accuracy[end]:.1%}", (points[end], accuracy[end]), offset, textcoords="offset points",
                          color=ORANGE, fontsize=9, ha=side)  # fmt: skip
    axis.margins(y=0.15)
    axis.legend(frameon=False, fontsize=9)


def _pair(axis: Axes, rows: Rows, left: tuple[str, str, str], right: tuple[str, str, str], top: float | None = None):
    """One curve on the left scale and one, from 0 to `top`, on the right; each (key, label, colour)."""
    logged = [curve for curve in (left, right) if any(curve[0] in row for row in rows)]
    _style(axis, " and ".join(label for _, label, _ in logged) or f"{left[1]}: not logged")
    for place, (key, label, colour) in zip((axis, axis.twinx() if len(logged) == 2 else axis), logged, strict=False):
        _line(place, *_column(rows, key), colour, label)
        place.set_ylim(bottom=0, top=top if key == right[0] else None)
        place.set_ylabel(label, color=colour)
        place.tick_params(axis="y", colors=colour)
        place.spines["top"].set_visible(False)


def _seconds(axis: Axes, rows: Rows) -> None:
    """Stacked seconds of each phase but validation; the largest total at the bottom."""
    _style(axis, "seconds a training step, by phase")
    skip = ("time/step", f"time/{VALIDATION}")
    found = {key for row in rows for key in row if key.startswith("time/") and key not in skip}
    totals = {key: sum(row.get(key, 0.0) for row in rows) for key in found}
    keys = sorted(found - {"time/other"}, key=totals.get, reverse=True) + sorted(found & {"time/other"})
    edges = [rows[0]["step"] - 0.5] + [row["step"] + 0.5 for row in rows]
    base = [0.0] * len(rows)
    for i, key in enumerate(keys):
        top = [low + row.get(key, 0.0) for low, row in zip(base, rows, strict=True)]
        colour = GREY if key == "time/other" else PHASES[i % len(PHASES)]
        axis.stairs(top, edges, baseline=base, fill=True, color=colour, alpha=0.85, label=key.removeprefix("time/"))
        base = top
    axis.set_ylabel("seconds")
    axis.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.0), reverse=True)


def show(summary: dict[str, Any]) -> None:
    """Prints accuracy before and after, and how long it took."""
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    table = Table("validation", *(Column(header, justify="right") for header in ("before", "after", "change")))
    everything = {"before": summary["accuracy_before"], "after": summary["accuracy_after"]}
    for name, pair in {"all": everything, **summary["sources"]}.items():
        known = None not in pair.values()
        cells = ["-" if value is None else f"{value:.1%}" for value in (pair["before"], pair["after"])]
        table.add_row(Text(name), *cells, f"{100 * (pair['after'] - pair['before']):+.1f} points" if known else "-")
    Console().print(table)
    speed = f"{summary['samples_per_second']:.1f} samples/s"
    print(f"{summary['steps']} training steps in {summary['seconds_train']:.0f} s, {speed}")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m spmd_rl.report", description=__doc__)
    parser.add_argument("run_dir", type=Path, help="the run folder: trainer.run_dir")
    run_dir = parser.parse_args(argv).run_dir
    try:
        rows = load(run_dir)
        draw(rows, run_dir / "curves.png", title=run_dir.resolve().name)
        print(f"curves: {run_dir / 'curves.png'}")
        summary = summarize(rows, run_dir)
    except (FileNotFoundError, ImportError, ValueError) as error:
        sys.exit(f"error: {error}")
    (run_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    show(summary)


if __name__ == "__main__":
    main()
