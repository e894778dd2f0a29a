"""What split placement costs and gains on the host: training and generation in cells of their own that overlap, and the
transfer of weights from one cell to the other.

    python benchmarks/placement.py                                          # both parts, 2 and 3 ranks
    python benchmarks/placement.py --parts overlap --batch-rows 8           # until `balance` is about 1

The overlap is that of the product: torchrun and the trainer itself, with a clock around what each rank does. The last line is
one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.grpo_step import QUESTION_TOKENS, launch_ranks, machine, read_jsonl  # noqa: E402
from benchmarks.placement_weights import medians, transfers  # noqa: E402
from spmd_rl import collectives, placed, train  # noqa: E402
from spmd_rl.trainer import RLTrainer  # noqa: E402

TARGETS = {"step_over_max": 1.15, "overhead": 0.03, "ratio_vs_broadcast": 0.5}
TRANSFERS = ("move", "weights")  # phases of the trainer whose time is that of a transfer, except where a rank waits
WORK = ("generate", "forward_backward", "optimizer", "transfer", "wait")  # kinds that are not the trainer's own overhead


@dataclass(frozen=True)
class Overlap:
    """One run of the product: rank 0 trains, rank 1 generates."""

    model: str
    rollout: str
    lookahead: int
    steps: int
    prompts_per_step: int
    group: int
    prompt_tokens: int
    tokens: int
    batch_rows: int
    rows_per_micro_batch: int
    ranks: int = 2
    threads: int = 1

    def config(self, run_dir: Path) -> dict[str, Any]:
        length = self.prompt_tokens + self.tokens
        return {
            "defaults": ["train", {"override data": "files"}, "_self_"],
            "model": {"path": self.model},
            "placement": {"actor": "0", "rollout": "1"},
            "data": {
                "train": "benchmarks.grpo_step:prompts",
                "train_kwargs": {"tokens": self.prompt_tokens},
                "prompts_per_step": self.prompts_per_step,
                "max_prompt_tokens": self.prompt_tokens,
            },
            "reward": {"functions": {"benchmarks.grpo_step:reward": 1.0}},
            "rollout": {
                "backend": self.rollout,
                "n": self.group,
                "max_batch_rows": self.batch_rows,
                "min_response_tokens": self.tokens,
                "max_response_tokens": self.tokens,
            },
            "engine": {"dtype": "float32", "max_tokens_per_micro_batch": self.rows_per_micro_batch * length},
            "optimizer": {"learning_rate": 1e-6},
            "trainer": {
                "total_steps": self.steps,
                "lookahead": self.lookahead,
                "device": "cpu",
                "keep": 0,
                "resume": "never",
                "run_dir": str(run_dir),
            },
        }


class Span(NamedTuple):
    """What a rank did from `start` to `end`, in seconds of the machine's monotonic clock. Spans of a rank nest.

    Of a collective (`kind` is empty), `group` and `turn` say which: alike on all ranks that take part."""

    kind: str
    start: float
    end: float
    group: str = ""
    turn: int = 0


class Recorder:
    """The spans and steps of this rank."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.steps: list[dict[str, float]] = []
        self.turns: Counter[str] = Counter()
        self.since = time.perf_counter()

    @contextmanager
    def span(self, kind: str, group: str = "") -> Iterator[None]:
        turn = self.turns[group]
        self.turns[group] += bool(group)
        start = time.perf_counter()
        try:
            yield
        finally:
            self.spans.append(Span(kind, start, time.perf_counter(), group, turn))

    def around(self, kind: str, function: Callable) -> Callable:
        def run(*args, **kwargs):
            with self.span(kind):
                return function(*args, **kwargs)

        return run

    def collectives(self, recorded: Callable) -> Callable:
        """In place of `collectives.recorded`."""

        @contextmanager
        def run(name, group):
            with recorded(name, group), self.span("", group.group_name):
                yield

        return run

    def phases(self, phases: Any) -> Any:
        """In place of a trainer's `phases`: the same, with a span of each."""
        recorder = self

        class Recorded:
            @contextmanager
            def __call__(self, phase: str) -> Iterator[None]:
                with phases(phase), recorder.span("transfer" if phase in TRANSFERS else phase + "_own"):
                    yield

            def step(self) -> dict[str, float]:
                found, now = phases.step(), time.perf_counter()
                recorder.steps.append(found | {"start": recorder.since, "end": now})
                recorder.since = now
                return found

        return Recorded()


def record(config_folder: str, out: Path) -> int:
    """One rank of the product, with a clock around what it does; the exit code."""
    recorder = Recorder()

    class RecordedTrainer(RLTrainer):
        def __init__(self, config, world, roles, *others):
            super().__init__(config, world, roles, *others)
            self.phases = recorder.phases(self.phases)
            recorder.rank = world.rank
            if engine := self.actor.engine:
                engine.forward_backward_batch = recorder.around("forward_backward", engine.forward_backward_batch)
                engine.optimizer_step = recorder.around("optimizer", engine.optimizer_step)
            if self.rollout.mesh.here:
                self.rollout.backend.complete = recorder.around("generate", self.rollout.backend.complete)

    collectives.recorded = recorder.collectives(collectives.recorded)
    train.RLTrainer = RecordedTrainer
    code = train.main(["--config-dir", config_folder, "--config-name", "bench"])
    if code == 0:
        (out / f"rank{recorder.rank}.jsonl").write_text(json.dumps({"steps": recorder.steps, "spans": recorder.spans}) + "\n")
    return code


def with_waits(ranks: Sequence[Iterable[Span]]) -> list[list[Span]]:
    """Collectives replaced by how long a rank waited in each: until the last rank had come. The rest of one belongs to
    what it is part of."""
    last: dict[tuple[str, int], float] = defaultdict(float)
    for span in (s for spans in ranks for s in spans if s.group):
        last[span.group, span.turn] = max(last[span.group, span.turn], span.start)

    def wait(span: Span) -> Span:
        return Span("wait", span.start, min(span.end, last[span.group, span.turn])) if span.group else span

    return [[wait(span) for span in spans] for spans in ranks]


def seconds_by_kind(spans: Iterable[Span], start: float, end: float) -> dict[str, float]:
    """Seconds of a window in which each kind was the innermost one; `other_own`: in none."""
    found: dict[str, float] = defaultdict(float, {"other_own": end - start})
    around: list[Span] = []
    for span in sorted(spans, key=lambda s: (s.start, -s.end)):
        while around and around[-1].end <= span.start:
            around.pop()
        inside = max(0.0, min(span.end, end) - max(span.start, start))
        found[around[-1].kind if around else "other_own"] -= inside
        found[span.kind] += inside
        around.append(span)
    return dict(found)


def step_figures(ranks: Sequence[dict[str, Any]], index: int) -> dict[str, float]:
    """Of one step, with rank 0 training and rank 1 generating: seconds, and the ratios to be reached.

    `overhead`: of the rank that has most, what is left of the step without generation, forward, backward, optimizer,
    transfers and waiting for the other rank."""
    actor, rollout = (rank["steps"][index] for rank in ranks)
    step = max(actor["time/step"], rollout["time/step"])
    generate, train_ = rollout["time/generate"], actor["time/train"]
    out = {"generate": generate, "train": train_, "step": step}
    spans = with_waits([[Span(*span) for span in rank["spans"]] for rank in ranks])
    for name, mine, timed in zip(("actor", "rollout"), spans, (actor, rollout)):
        kinds = seconds_by_kind(mine, timed["start"], timed["end"])
        own = {kind: seconds for kind, seconds in kinds.items() if kind not in WORK}
        out |= {f"{name}/{kind}": seconds for kind, seconds in kinds.items()} | {f"{name}/overhead": sum(own.values()) / step}
    out["overhead"] = max(out["actor/overhead"], out["rollout/overhead"])
    return out | {
        "balance": generate / train_,
        "step_over_max": step / max(generate, train_),
        "step_over_sum": step / (generate + train_),
    }


def run_overlap(job: Overlap) -> list[dict[str, float]]:
    """Figures of each step but the first, which samples before it trains, and the last, which has nothing to sample."""
    with tempfile.TemporaryDirectory(prefix="placement-") as name:
        folder = Path(name)
        (folder / "bench.yaml").write_text(json.dumps(job.config(folder / "run")))  # JSON is YAML
        launch_ranks(job, sys.executable, [__file__, "--record", name, "--out", name], folder)
        ranks = [read_jsonl(folder / f"rank{rank}.jsonl")[0] for rank in range(job.ranks)]
    return [step_figures(ranks, index) for index in range(1, job.steps - 1)]


def overlap(args: argparse.Namespace, model: str) -> dict[str, Any]:
    """Lockstep and lookahead by turns, so that a disturbance of the machine meets both."""
    common = (args.prompts_per_step, args.group, args.prompt_tokens, args.tokens, args.batch_rows, args.rows_per_micro_batch)
    found: dict[str, list] = {"lockstep": [], "lookahead": []}
    for _ in range(args.rounds):
        for lookahead, (name, steps) in enumerate(found.items()):
            new = run_overlap(Overlap(model, args.rollout, lookahead, args.steps, *common))
            steps += new
            seconds = ", ".join(f"{s['generate']:.2f} + {s['train']:.2f} in {s['step']:.2f}" for s in new)
            print(f"{name}: generate + train in step, seconds: {seconds} (load {os.getloadavg()[0]:.1f})", flush=True)
    lockstep, ahead = (medians(steps) for steps in found.values())
    return {
        "lockstep": lockstep,
        "lookahead": ahead,
        "balance": ahead["balance"],
        "step_over_max": ahead["step_over_max"],
        "lockstep_over_sum": lockstep["step_over_sum"],
        "speedup": round(lockstep["step"] / ahead["step"], 3),
        "overhead": ahead["overhead"],
    }


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=["overlap", "weights"], default=["overlap", "weights"])
    parser.add_argument("--rollout", choices=["vllm", "hf"], default="vllm")
    parser.add_argument("--rounds", type=int, default=2, help="runs of lockstep and of lookahead, by turns")
    parser.add_argument("--steps", type=int, default=5, help="steps a run; the first and the last are not measured")
    parser.add_argument("--prompts-per-step", type=int, default=8)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=26)
    parser.add_argument("--tokens", type=int, default=32, help="new tokens of a response")
    parser.add_argument("--batch-rows", type=int, default=16, help="rows that are generated together: fewer take longer")
    parser.add_argument("--rows-per-micro-batch", type=int, default=16)
    parser.add_argument("--actors", nargs="+", type=int, default=[1, 2], help="ranks of the actor cell that sends weights")
    parser.add_argument("--buckets-mb", nargs="+", type=int, default=[placed.BUCKET_BYTES >> 20], help="of the weights, MiB")
    parser.add_argument("--transfer-rounds", type=int, default=5, help="after one of warm-up")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    for hidden in ("--record", "--out"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.steps < 3:
        parser.error(f"--steps: {args.steps} leaves nothing between the first and the last - set at least 3")
    if args.prompt_tokens < QUESTION_TOKENS:
        parser.error(f"--prompt-tokens: {args.prompt_tokens} do not hold the question - set at least {QUESTION_TOKENS}")
    return args


def main() -> int:
    args = parse()
    if args.record:
        return record(args.record, Path(args.out))
    from spmd_rl.models import resolve_model

    model = resolve_model(args.model)
    line = {"benchmark": "placement", "machine": machine(), "targets": TARGETS}
    line["work"] = {name: value for name, value in vars(args).items() if isinstance(value, int | list)} | {"rollout": args.rollout}
    if "overlap" in args.parts:
        line |= overlap(args, model)
    if "weights" in args.parts:
        line |= transfers(model, args.actors, args.buckets_mb, args.transfer_rounds)
    print(json.dumps(line))
    return 0


if __name__ == "__main__":
    sys.exit(main())
