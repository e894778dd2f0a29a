"""Typed statistics that sum over micro-batches and ranks without knowing which, timers, and where metrics are written.

A run folder, `trainer.run_dir`:

    config.yaml               the composed configuration
    status.json               where the run is, or how it ended
    metrics.jsonl             a line a step: {"step": 3, "reward/mean": 0.51, ...}; null is NaN or infinite. Training
                              steps are 1..N, 0 before; `val/...` is of the weights after it (lookahead: a line later)
    samples.jsonl             a line a sample: {"step": 3, "prompt": ..., "response": ..., "reward": ...}
    checkpoints/step_000010/  the state after step 10
    tensorboard/ wandb/       where `logger` asks for them
    hf/                       the trained model in Hugging Face layout
    curves.png summary.json   written by `python -m spmd_rl.report RUN_DIR`
"""

from __future__ import annotations

import atexit
import importlib
import json
import math
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spmd_rl.config import LoggerConfig

VALIDATION = "validate"  # the phase whose seconds are no training time


@dataclass(frozen=True)
class Sum:
    """A total: over micro-batches and replicas it adds up."""

    value: float | Tensor


@dataclass(frozen=True)
class Mean:
    """`total / count`; both add up, so that no mean of means is ever taken."""

    total: float | Tensor
    count: float | Tensor


@dataclass(frozen=True)
class Max:
    """The largest value; `-inf` where there was none."""

    value: float | Tensor


@dataclass(frozen=True)
class Min:
    """The smallest value; `inf` where there was none."""

    value: float | Tensor


Stat = Sum | Mean | Max | Min
Stats = dict[str, Stat]
Schema = list[tuple[str, str]]  # sorted (key, name of the Stat type)
NEUTRAL: dict[str, Stat] = {"Sum": Sum(0.0), "Mean": Mean(0.0, 0.0), "Max": Max(-math.inf), "Min": Min(math.inf)}


def add_stats(a: Stats, b: Stats) -> Stats:
    """Sums two dicts key by key, in float64; tensors stay on their device. TypeError names a key of two types."""
    if clash := [key for key in a.keys() & b.keys() if type(a[key]) is not type(b[key])]:
        kinds = {key: (type(a[key]).__name__, type(b[key]).__name__) for key in sorted(clash)}
        raise TypeError(f"one key has one type, but these have two: {kinds}")
    return a | {key: _add(a[key], stat) if key in a else stat for key, stat in b.items()}


def schema(stats: Stats) -> Schema:
    """The keys and types of `stats`, sorted: what ranks must agree on before they reduce."""
    return sorted((key, type(stat).__name__) for key, stat in stats.items())


def neutral(schema: Schema) -> Stats:
    """The stats that change nothing when they are added."""
    return {key: NEUTRAL[kind] for key, kind in schema}


def pack(stats: Stats, schema: Schema) -> tuple[list[float], list[float]]:
    """`(summed, maxed)` in the order of `schema`: float64 numbers to reduce by sum and max, a Min negated. Waits for the device.

    A key of the schema that `stats` lacks counts as neutral. Raises KeyError for a key outside the schema and
    TypeError for one of another type."""
    if extra := sorted(stats.keys() - {key for key, _ in schema}):
        raise KeyError(f"stats {extra} are not in the agreed schema {[key for key, _ in schema]}")
    packed: tuple[list[float], list[float]] = ([], [])
    for key, kind in schema:
        stat = stats.get(key, NEUTRAL[kind])
        if (found := type(stat).__name__) != kind:
            raise TypeError(f"stat '{key}' is a {found} here and a {kind} in the agreed schema")
        packed[1 if kind in ("Max", "Min") else 0].extend(-n if kind == "Min" else n for n in _numbers(key, stat))
    return packed


def unpack(packed: tuple[list[float], list[float]], schema: Schema) -> Stats:
    """The inverse of `pack`. Raises ValueError where there are more or fewer numbers than the schema says."""
    expected = [len(part) for part in pack({}, schema)]
    if expected != (lengths := [len(part) for part in packed]):
        raise ValueError(f"{lengths} packed numbers (summed, maxed) for a schema of {expected}: {schema}")
    summed, maxed = map(iter, packed)
    take = {"Sum": (Sum, summed), "Mean": (Mean, summed, summed), "Max": (Max, maxed), "Min": (lambda x: Min(-x), maxed)}
    return {key: take[kind][0](*map(next, take[kind][1:])) for key, kind in schema}


def values(stats: Stats) -> dict[str, float]:
    """One number a key; NaN for a mean, a maximum or a minimum over nothing. Waits for the device."""
    result: dict[str, float] = {}
    for key, stat in stats.items():
        match type(stat)(*_numbers(key, stat)):
            case Mean(total, count):
                result[key] = float(total) / float(count) if count else math.nan
            case Max(value) | Min(value):
                result[key] = math.nan if stat == NEUTRAL[type(stat).__name__] else float(value)
            case Sum(value):
                result[key] = float(value)
    return result


def _add(a: Stat, b: Stat) -> Stat:
    join = {Max: _larger, Min: lambda x, y: -_larger(-x, -y)}.get(type(a), lambda x, y: x + y)
    return type(a)(*(join(_double(x), _double(y)) for x, y in zip(vars(a).values(), vars(b).values(), strict=True)))


def _double(value: float | Tensor) -> float | Tensor:
    return value.double() if isinstance(value, Tensor) else float(value)


def _larger(a: float | Tensor, b: float | Tensor) -> float | Tensor:
    """The maximum; NaN if either is, as in `torch.maximum`."""
    if isinstance(b, Tensor):
        a, b = b, a
    if isinstance(a, Tensor):
        return torch.maximum(a, torch.as_tensor(b, dtype=a.dtype, device=a.device))
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)


def _numbers(key: str, stat: Stat) -> list[float]:
    for name, value in vars(stat).items():
        if isinstance(value, Tensor) and value.dim():
            raise ValueError(f"{name} of stat '{key}' has shape {tuple(value.shape)}; make it one number first")
    return [value.item() if isinstance(value, Tensor) else float(value) for value in vars(stat).values()]


class Phases:
    """Wall and CPU seconds of the flat phases of a step: `with phases("generate"): ...`. Device work counts where the
    host waits for it; CPU seconds are those of all threads and no child. All lie on a grid of 2^-20, so that sums are
    exact in any order. `watch` is told when a phase begins and when one has ended without an error."""

    def __init__(self, watch: Callable[[str], None] = lambda when: None) -> None:
        self._watch = watch
        self._open: str | None = None
        self._start, self._spent = self._now(), {"time": {}, "cpu": {}}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Adds what runs inside to `phase`. RuntimeError inside another phase, ValueError for a reserved name."""
        if self._open is not None:
            raise RuntimeError(f"phase '{phase}' starts inside phase '{self._open}'; phases do not nest")
        if phase in ("step", "other"):
            raise ValueError(f"phase name '{phase}' is reserved: time/{phase} is computed")
        self._watch(f"before phase '{phase}'")
        start, self._open = self._now(), phase
        try:
            yield
        finally:
            self._open = None
            for kind, now in self._now().items():
                self._spent[kind][phase] = self._spent[kind].get(phase, 0.0) + now - start[kind]
        self._watch(f"after phase '{phase}'")

    def step(self) -> dict[str, float]:
        """`time/<phase>` and `cpu/<phase>` since the last call, with `other` and their exact total `step`."""
        if self._open is not None:
            raise RuntimeError(f"phase '{self._open}' is still open at the end of the step")
        now, result = self._now(), {}
        for kind, spent in self._spent.items():
            whole = now[kind] - self._start[kind]
            parts = spent | {"other": whole - sum(spent.values()), "step": whole}
            result |= {f"{kind}/{phase}": seconds for phase, seconds in parts.items()}
        self._start, self._spent = now, {"time": {}, "cpu": {}}
        return result

    def _now(self) -> dict[str, float]:
        seconds = {"time": time.perf_counter(), "cpu": time.process_time()}
        return {kind: round(value * 2**20) / 2**20 for kind, value in seconds.items()}


def require(module: str, extra: str) -> Any:
    """Imports an optional package. Raises ImportError that names the extra to install."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ImportError(f'{error.name} is not installed: pip install "spmd_rl[{extra}]"', name=error.name) from error


class Writer:
    """Where metrics go. World rank 0 only. `resume_step` of a writer is the first step that it will be given:
    what an earlier run wrote from that step on is dropped; 0 starts afresh."""

    def write(self, step: int, values: dict[str, float]) -> None: ...  # once a step, steps ascending
    def samples(self, step: int, rows: list[dict[str, Any]]) -> None: ...  # prompt, response, reward and more
    def close(self) -> None: ...


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The lines of a JSONL file; a last line without its newline was cut by a kill and is left out.
    Raises ValueError that names the file and the line that is not JSON."""
    rows = []
    for number, line in enumerate(path.read_text().split("\n")[:-1], start=1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number} is not JSON: {line[:80]!r}; remove the line") from error
    return rows


def _finite(value: Any) -> Any:
    """`value` with None for every NaN and infinity in it: JSON knows neither."""
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


class JSONLWriter(Writer):
    """One line a step, flushed."""

    def __init__(self, path: str | Path, resume_step: int = 0):
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [row for row in read_jsonl(path) if row["step"] < resume_step] if path.exists() and resume_step else []
        partial = path.with_name(path.name + ".partial")
        partial.write_text("".join(json.dumps(row) + "\n" for row in kept))
        partial.replace(path)
        self._file = path.open("a")

    def write(self, step: int, values: dict[str, float]) -> None:
        self._append(step, [values])

    def _append(self, step: int, rows: list[dict[str, Any]]) -> None:
        self._file.write("".join(json.dumps({"step": step} | _finite(row), allow_nan=False) + "\n" for row in rows))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class SampleWriter(JSONLWriter):
    """One line a sample, flushed."""

    def write(self, step: int, values: dict[str, float]) -> None: ...
    def samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        self._append(step, rows)


class TensorBoardWriter(Writer):
    """Scalars in `folder`."""

    def __init__(self, folder: str | Path, resume_step: int = 0):
        summary = require("torch.utils.tensorboard", "tensorboard").SummaryWriter
        self._writer = summary(str(folder), purge_step=resume_step)

    def write(self, step: int, values: dict[str, float]) -> None:
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbWriter(Writer):
    """A Weights & Biases run in `folder/wandb`; a resumed run goes on under the id of the first.

    `step` is an ordinary metric: wandb refuses to go back in its own step counter, which a resumed run must."""

    def __init__(self, project: str, mode: str, folder: str | Path, config: dict[str, Any], resume_step: int = 0):
        self._wandb = require("wandb", "wandb")
        folder = Path(folder).absolute()
        name = folder / "wandb" / "run_id"
        name.parent.mkdir(parents=True, exist_ok=True)
        if not (resume_step and name.exists()):
            name.write_text(uuid.uuid4().hex[:8])
        self._run = self._wandb.init(
            project=project, mode=mode, dir=str(folder), name=folder.name, id=name.read_text(), config=config,
            resume="allow" if mode == "online" else None, settings=self._wandb.Settings(console="off"),
        )  # fmt: skip
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: dict[str, float]) -> None:
        self._run.log({"step": step} | values)

    def samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        columns = ["prompt", "response", "reward"]
        data = [[row[key] for key in columns] for row in rows]
        self._run.log({"step": step, "samples": self._wandb.Table(columns=columns, data=data)})

    def close(self) -> None:
        self._run.finish()


COLUMNS = (  # title, key, format
    ("reward", "reward/mean", ".3f"), ("length", "response/length_mean", ".1f"),
    ("cut", "response/truncated_fraction", ".0%"), ("grad", "actor/grad_norm", ".3g"),
    ("entropy", "actor/entropy", ".3f"), ("s/step", "time/step", ".2f"),
    ("samp/s", "perf/samples_per_second", ".1f"), ("val", "val/accuracy", ".1%"),
)  # fmt: skip


class Console(Writer):
    """On a terminal a progress bar under one table row a step; elsewhere (batch logs) one plain line a step."""

    def __init__(self, total_steps: int, resume_step: int = 0):
        from rich import console, progress

        tty = sys.stdout.isatty()
        width = None if tty else 120
        self._console = console.Console(force_terminal=tty, width=width, markup=False, highlight=False)
        self._total, self._done, self._start = total_steps, max(resume_step - 1, 0), time.monotonic()
        self._bar: progress.Progress | None = None
        if not self._console.is_interactive:
            return
        state = "reward {task.fields[reward]}  eta {task.fields[eta]}"
        columns = "step {task.completed}/{task.total}", progress.BarColumn(None), state
        self._bar = progress.Progress(*columns, console=self._console, expand=True, redirect_stderr=sys.stderr.isatty())
        self._task = self._bar.add_task("", total=total_steps, completed=self._done, reward="-", eta="-")
        self._bar.start()
        atexit.register(self._bar.stop)  # a crash must give the cursor back
        self._console.print("  step" + "".join(f"{title:>9}" for title, _, _ in COLUMNS), no_wrap=True)

    def write(self, step: int, values: dict[str, float]) -> None:
        cells = {title: format(values[key], spec) for title, key, spec in COLUMNS if key in values}
        if self._bar is None:
            line = "  ".join(f"{title} {cell}" for title, cell in cells.items())
            self._console.out(f"step {step}/{self._total}  {line}  eta {self._eta(step)}")
            return
        row = f"{step:>6}" + "".join(f"{cells.get(title, '-'):>9}" for title, _, _ in COLUMNS)
        self._console.print(row, no_wrap=True)
        self._bar.update(self._task, completed=step, reward=cells.get("reward", "-"), eta=self._eta(step))

    def samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        from rich import table, text

        grid = table.Table(title=f"samples of step {step}", title_justify="left", expand=True)
        for name, ratio in (("prompt", 2), ("response", 3)):
            grid.add_column(name, ratio=ratio, no_wrap=True, overflow="ellipsis")
        grid.add_column("reward", justify="right")
        room = (self._console.width - 16) * 2 // 5  # for the end of the prompt: the question stands there
        for row in rows:
            cells = _one_line(row["prompt"])[-room:], _one_line(row["response"])
            grid.add_row(*map(text.Text, cells), f"{row['reward']:.3g}")
        if rows:
            self._console.print(grid)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _eta(self, step: int) -> str:
        if step <= self._done:
            return "-"
        rate = (time.monotonic() - self._start) / (step - self._done)  # seconds a step
        return str(timedelta(seconds=round(rate * (self._total - step))))


def _one_line(text: str) -> str:
    """`text` with control characters spelled out: a model may emit newlines and terminal escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text.strip())


def make_writers(
    config: LoggerConfig, run_dir: str | Path, total_steps: int, resume_step: int, config_dict: dict[str, Any]
) -> list[Writer]:
    """The writers of a run. World rank 0 only. `resume_step`: the first step that will be written (see `Writer`)."""
    run_dir = Path(run_dir)
    metrics, samples = run_dir / "metrics.jsonl", run_dir / "samples.jsonl"
    writers: list[Writer] = [JSONLWriter(metrics, resume_step), SampleWriter(samples, resume_step)]
    if config.tensorboard:
        writers.append(TensorBoardWriter(run_dir / "tensorboard", resume_step))
    if config.wandb:
        writers.append(WandbWriter(config.wandb_project, config.wandb_mode, run_dir, config_dict, resume_step))
    if config.console:
        writers.append(Console(total_steps, resume_step))
    return writers
