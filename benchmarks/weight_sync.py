"""Seconds of a weight update of vLLM: ours, checked and proved, beside a plain copy of the same bytes, and beside a raw
all-gather of them with vLLM's own reload of tensors that are already here.

    python benchmarks/weight_sync.py                                        # float32 and bfloat16, 1 and 2 ranks
    python benchmarks/weight_sync.py --layouts packed plain                 # also the layout that we do not use

On 2 ranks the actor is replicated, then sharded. The parts take turns in one process a rank. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.grpo_step import launch_ranks, machine, read_jsonl  # noqa: E402
from benchmarks.rollout import KEYS, stored_tensors  # noqa: E402
from spmd_rl.roles.vllm_rollout import VLLMRollout  # noqa: E402

LAYOUTS = {"float32": "packed", "bfloat16": "plain"}  # what VLLMRollout does on a host
PROBE = tuple(tuple(range(1000 * i, 1000 * i + 24)) for i in (1, 2))


@dataclass(frozen=True)
class Job:
    """One launch: one vLLM engine a rank, whose matrices are packed for the host's kernels or plain parameters."""

    folder: str
    dtype: str
    layout: str
    ranks: int
    rounds: int
    rows: int  # generated after each update, 16 new tokens each
    threads: int = 1

    @property
    def key(self) -> str:
        return f"{KEYS[self.dtype]} {self.ranks} rank{'s' * (self.ranks > 1)} {self.layout}"


class PackedRollout(VLLMRollout):
    plain = property(lambda self: False, lambda self, value: None)


class PlainRollout(VLLMRollout):
    plain = property(lambda self: True, lambda self, value: None)


class Clock:
    """Wall and CPU seconds of functions that run inside another one."""

    def __init__(self) -> None:
        self.wall = self.cpu = 0.0

    def timed(self, function: Callable) -> Callable:
        def run(*args):
            wall, cpu = time.perf_counter(), time.process_time()
            out = function(*args)
            self.wall += time.perf_counter() - wall
            self.cpu += time.process_time() - cpu
            return out

        return run


class Bench:
    """The parts, on one rank. Every part is called on all ranks."""

    def __init__(self, job: Job):
        import torch

        from spmd_rl.config import RolloutConfig, TimeoutConfig
        from spmd_rl.launch import detect_launch
        from spmd_rl.mesh import Role, open_store, split_world
        from spmd_rl.roles import server_adapter
        from spmd_rl.roles.generation import Request, RolloutModel

        self.job, self.proof = job, Clock()
        launch, ranks = detect_launch(), tuple(range(job.ranks))
        roles = {name: Role(ranks, job.ranks) for name in ("actor", "rollout")}
        self.world = split_world(roles, launch, open_store(launch, TimeoutConfig()), "cpu", TimeoutConfig())
        self.local = list(stored_tensors(job.folder))
        self.copies = [torch.zeros_like(tensor) for _, tensor in self.local]
        self.converted = [torch.zeros_like(tensor, dtype=torch.bfloat16) for _, tensor in self.local]
        self.bytes = sum(tensor.nbytes for tensor in self.copies)
        self.shard = torch.zeros(self.bytes // 4 // job.ranks)
        self.whole = torch.zeros(job.ranks * len(self.shard))
        backend = f"benchmarks.weight_sync:{job.layout.title()}Rollout"
        config = RolloutConfig(backend=backend, dtype=job.dtype, max_model_len=64, max_batch_rows=max(1, job.rows))
        server_adapter.digest = self.proof.timed(server_adapter.digest)
        model = RolloutModel(job.folder, (), probe=PROBE)
        self.adapter = server_adapter.ServerAdapter(config, model, 0, self.world.meshes["rollout"], engine_dtype=job.dtype)
        self.adapter._same_everywhere = self.proof.timed(self.adapter._same_everywhere)
        self.adapter._prove = self.proof.timed(self.adapter._prove)
        self.actors = {size: self.make_actor(size) for size in sorted({1, job.ranks})}
        self.requests = [Request([3 + i % 7 for i in range(26)], seed, 0, 16) for seed in range(job.rows)]

    def make_actor(self, shard_size: int):
        from spmd_rl.config import OptimizerConfig
        from spmd_rl.engine.base import EngineModel
        from spmd_rl.engine.fsdp import FSDPConfig
        from spmd_rl.roles.training_worker import TrainingWorker, TrainingWorkerConfig

        config = TrainingWorkerConfig(
            name="actor",
            model=EngineModel(self.job.folder, "language_model", trainable=False),
            engine=FSDPConfig(dtype=self.job.dtype, shard_size=shard_size),
            optimizer=OptimizerConfig(),
            infer_field="old_log_probs",
            probe=PROBE,
        )
        return TrainingWorker(config, self.world.meshes["actor"])

    def copy(self, targets: list) -> None:
        for target, (_, tensor) in zip(targets, self.local):
            target.copy_(tensor)

    def gather(self) -> None:
        import torch.distributed as dist

        dist.all_gather_single(self.whole, self.shard)

    def update(self, shard_size: int) -> None:
        stream = self.actors[shard_size].weights(self.adapter.version + 1, self.adapter.dtype).to(self.adapter.mesh)
        self.adapter.update_weights(replace(stream, expected=self.proof.timed(stream.expected)), stream.version)

    def generate(self) -> None:
        from spmd_rl.batch import Sampling

        self.adapter.backend.complete(self.requests, Sampling(1.0, 1, 0, 16, ()), None)

    def parts(self) -> dict[str, Callable[[], None]]:
        found = {"copy": lambda: self.copy(self.copies)}
        if self.job.dtype == "bfloat16":
            found["convert"] = lambda: self.copy(self.converted)
        if self.job.ranks > 1:
            found["gather"] = self.gather
        found["reload"] = lambda: self.adapter.backend.update_weights(self.local)
        found["update"] = lambda: self.update(1)
        if self.job.ranks > 1:
            found["update sharded"] = lambda: self.update(self.job.ranks)
        if self.job.rows:
            found["generate"] = self.generate
        return found

    def turn(self) -> dict[str, dict[str, float]]:
        """Part -> wall seconds until the last rank is done, CPU seconds of this rank, and the proof's share of both."""
        from spmd_rl.collectives import barrier

        out = {}
        for name, run in self.parts().items():
            barrier(self.world.control, name)
            self.proof.wall = self.proof.cpu = 0.0
            wall, cpu = time.perf_counter(), time.process_time()
            run()
            cpu = time.process_time() - cpu
            barrier(self.world.control, name)
            out[name] = {"wall": time.perf_counter() - wall, "cpu": cpu, "proof wall": self.proof.wall, "proof cpu": self.proof.cpu}
        return out


def work(job: Job, out: Path) -> None:
    """One rank. The first turn is warm-up."""
    from spmd_rl.mesh import close_world

    bench = Bench(job)
    turns = [bench.turn() for _ in range(job.rounds + 1)][1:]
    if bench.world.rank == 0:
        out.write_text(json.dumps({"bytes": bench.bytes, "turns": turns}) + "\n")
    bench.adapter.shutdown()
    close_world(bench.world)


def run(job: Job) -> dict[str, Any]:
    """One launch: the bytes of the model, and the turns of rank 0."""
    with tempfile.TemporaryDirectory(prefix="weight_sync-") as folder:
        out = Path(folder) / "out.jsonl"
        launch_ranks(job, sys.executable, [__file__, "--work", json.dumps(asdict(job)), "--out", str(out)], Path(folder))
        return read_jsonl(out)[0]


def summarise(turns: list[dict[str, dict[str, float]]], num_bytes: int, update: str, clock: str = "wall") -> dict[str, float]:
    """Medians over rounds of one kind of update and of what it is compared with, in seconds of `clock`: wall | cpu.

    `load`: the update without its proof (checksums, and the probe scored by both sides). Ratios above 1: ours is faster."""
    rows = []
    for turn in turns:
        row = {name: figures[clock] for name, figures in turn.items() if not name.startswith("update")}
        row["update"], row["proof"] = turn[update][clock], turn[update][f"proof {clock}"]
        row["load"] = row["update"] - row["proof"]
        both = row.get("gather", 0.0) + row["reload"]
        for part, suffix in (("update", ""), ("load", "_load")):
            row |= {f"ratio_vs_copy{suffix}": row["copy"] / row[part], f"ratio_vs_gather_plus_reload{suffix}": both / row[part]}
        rows.append(row | {"bytes_per_second": num_bytes / row["update"]})
    return {name: round(statistics.median(row[name] for row in rows), 3) for name in rows[0]}


def show(results: dict[str, dict[str, float]], clock: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"one weight update: {clock} seconds, median of the rounds")
    names = ("copy", "convert", "gather", "reload", "load", "proof", "update", "generate")
    for column in ("work", *names, "vs copy", "vs gather + reload"):
        table.add_column(column, justify="left" if column == "work" else "right")
    for key, r in results.items():
        ratios = (f"{r[n]:.2f} ({r[f'{n}_load']:.2f})" for n in ("ratio_vs_copy", "ratio_vs_gather_plus_reload"))
        table.add_row(key, *(f"{r[n]:.3f}" if n in r else "" for n in names), *ratios)
    Console(width=160).print(table)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", choices=list(KEYS), default=list(KEYS))
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--layouts", nargs="+", choices=["packed", "plain"], default=[], help="none: ours for the dtype")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each part, after one of warm-up")
    parser.add_argument("--rows", type=int, default=0, help="also generate 16 tokens in so many rows: the rest of a step")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main() -> None:
    args = parse()
    if args.work:
        work(Job(**json.loads(args.work)), args.out)
        return
    from spmd_rl.models import resolve_model

    folder, results, cpu = resolve_model(args.model), {}, {}
    for dtype in args.dtypes:
        for layout in args.layouts or [LAYOUTS[dtype]]:
            for ranks in args.ranks:
                job = Job(folder, dtype, layout, ranks, args.rounds, args.rows)
                found = run(job)
                for update in [name for name in found["turns"][0] if name.startswith("update")]:
                    key = job.key + update.removeprefix("update")
                    results[key] = summarise(found["turns"], found["bytes"], update)
                    cpu[key] = summarise(found["turns"], found["bytes"], update, "cpu")
                    print(f"{key}: {json.dumps(results[key])} (load {os.getloadavg()[0]:.1f})", flush=True)
    show(results, "wall")
    show(cpu, "CPU")
    print("ratios: of the whole update, and in brackets of the load without the proof; above 1, ours is faster")
    line = {
        "benchmark": "weight_sync",
        "machine": machine(),
        "work": {k: v for k, v in vars(args).items() if isinstance(v, int | list)},
        "bytes": found["bytes"],
        "seconds": results,
        "cpu_seconds": cpu,
    }
    for ratio in ("ratio_vs_copy", "ratio_vs_copy_load", "ratio_vs_gather_plus_reload", "ratio_vs_gather_plus_reload_load"):
        line[ratio] = {key: figures[ratio] for key, figures in results.items()}
    print(json.dumps(line))


if __name__ == "__main__":
    main()
