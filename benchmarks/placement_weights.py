"""Seconds of the weights' way from one cell to another: `WeightStream.to`, and torch's own broadcast of as many bytes over the
same group. A part of `placement.py`, which starts it under torchrun and reports it.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.grpo_step import launch_ranks, read_jsonl  # noqa: E402
from benchmarks.rollout import stored_tensors  # noqa: E402
from spmd_rl import collectives, placed  # noqa: E402


def medians(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of each figure; one that a row lacks counts as 0 there."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: round(statistics.median(row.get(name, 0.0) for row in rows), 4) for name in names}


@dataclass(frozen=True)
class Transfer:
    """One launch: an actor cell of `actors` ranks and a rollout cell of one."""

    folder: str
    actors: int
    rounds: int
    bucket_mb: int
    threads: int = 1

    @property
    def ranks(self) -> int:
        return self.actors + 1


class Bench:
    """The transfers, on one rank. Every method is called on all ranks."""

    def __init__(self, job: Transfer):
        import torch

        from spmd_rl.config import TimeoutConfig
        from spmd_rl.launch import detect_launch
        from spmd_rl.mesh import Role, open_store, split_world

        launch = detect_launch()
        roles = {"actor": Role(tuple(range(job.actors)), job.actors), "rollout": Role((job.actors,), 1)}
        self.world = split_world(roles, launch, open_store(launch, TimeoutConfig()), "cpu", TimeoutConfig())
        self.target, self.job = self.world.meshes["rollout"], job
        self.bridge = self.target.bridge(self.world.meshes["actor"])
        self.actors = {size: self.make_actor(size) for size in sorted({1, job.actors})}
        placed.BUCKET_BYTES = job.bucket_mb << 20
        self.dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
        self.counts = [(name, tensor.numel()) for name, tensor in stored_tensors(job.folder)]

    def make_actor(self, shard_size: int):
        from spmd_rl.config import OptimizerConfig
        from spmd_rl.engine.base import EngineModel
        from spmd_rl.engine.fsdp import FSDPConfig
        from spmd_rl.roles.training_worker import TrainingWorker, TrainingWorkerConfig

        config = TrainingWorkerConfig(
            name="actor",
            model=EngineModel(self.job.folder, "language_model", trainable=False),
            engine=FSDPConfig(dtype="float32", shard_size=shard_size),
            optimizer=OptimizerConfig(),
            infer_field="old_log_probs",
        )
        return TrainingWorker(config, self.world.meshes["actor"])

    def wall(self, run: Callable[[], Any]) -> float:
        """Seconds until the last rank is done."""
        collectives.barrier(self.world.control, "before")
        start = time.perf_counter()
        run()
        collectives.barrier(self.world.control, "after")
        return time.perf_counter() - start

    def stream(self, shard_size: int, dtype) -> int:
        """Bytes that arrived here, where nothing keeps them."""
        return sum(tensor.nbytes for _, tensor in self.actors[shard_size].weights(0, dtype).to(self.target))

    def prepare(self, dtype) -> None:
        """What the actor does to a stream besides sending it: casts, and sums up."""
        for _, tensor in self.actors[1].weights(0):
            placed.digest(tensor.to(dtype))

    def broadcasts(self, dtype) -> dict[str, Callable[[], None]]:
        """The same bytes by torch alone, out of and into memory that is there: as one tensor, and as those of the model."""
        import torch
        import torch.distributed as dist

        flat = torch.zeros(sum(count for _, count in self.counts), dtype=dtype)
        parts = flat.split([count for _, count in self.counts])

        def each() -> None:
            for work in [dist.broadcast(part, group=self.bridge.payload, group_src=0, async_op=True) for part in parts]:
                work.wait()

        ways = {"broadcast": lambda: dist.broadcast(flat, group=self.bridge.payload, group_src=0), "broadcast_each": each}
        if (actors := self.job.actors) > 1:
            cell, whole = self.world.meshes["actor"], flat[: len(flat) // actors * actors]
            own = whole.chunk(actors)[cell.replica if cell.here else 0]
            gather = partial(dist.all_gather_into_tensor, whole, own, group=cell.bridge(cell).payload)
            ways["gather"] = gather if cell.here else lambda: None
        return ways

    def turn(self) -> dict[str, dict[str, float]]:
        """By dtype and layout: seconds of the broadcasts, of what the actor does besides, and of the stream."""
        out = {}
        for name, dtype in self.dtypes.items():
            raw = {way: self.wall(run) for way, run in self.broadcasts(dtype).items()}
            raw["prepare"] = self.wall(partial(self.prepare, dtype))
            for size in self.actors:
                out[self.key(name, size)] = raw | {"stream": self.wall(partial(self.stream, size, dtype))}
        return out

    def key(self, dtype: str, shard_size: int) -> str:
        return dtype if self.job.actors == 1 else f"{dtype} {'replicated' if shard_size == 1 else 'sharded'}"

    def sizes(self) -> dict[str, dict[str, float]]:
        """The same keys: bytes of the model and of its largest bucket, and the peak of memory over what was held before."""
        out = {}
        for name, dtype in self.dtypes.items():
            for size in self.actors:
                risen, arrived = memory_rise(partial(self.stream, size, dtype))
                ranks = collectives.gather_objects((risen, arrived), self.world.control, "sizes")
                out[self.key(name, size)] = {
                    "bytes": ranks[-1][1],
                    "bucket_bytes": largest_bucket(self.counts, dtype),
                    "actor_rise_bytes": max(risen for risen, _ in ranks[:-1]),
                    "rollout_rise_bytes": ranks[-1][0],
                }
        return out


def largest_bucket(counts: Iterable[tuple[str, int]], dtype) -> int:
    import torch

    shapes = ((name, torch.empty(count, dtype=dtype, device="meta")) for name, count in counts)
    return max(sum(tensor.nbytes for _, tensor in bucket) for bucket in placed._buckets(shapes, dtype))


def memory_rise(run: Callable[[], int]) -> tuple[int, int]:
    """(bytes by which this process's peak of resident memory exceeds what it held before, what `run` returned). Linux."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what was freed before is not a rise later
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew

    def held(field: str) -> int:
        return int(re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

    before = held("VmRSS")
    found = run()
    return max(0, held("VmHWM") - before), found


def work(job: Transfer, out: Path) -> None:
    """One rank. The first turn is warm-up."""
    from spmd_rl.mesh import close_world

    bench = Bench(job)
    turns = [bench.turn() for _ in range(job.rounds + 1)][1:]
    sizes = bench.sizes()
    if bench.world.rank == 0:
        out.write_text(json.dumps({"turns": turns, "sizes": sizes}) + "\n")
    close_world(bench.world)


def transfer_figures(turns: Sequence[dict[str, float]], sizes: dict[str, float]) -> dict[str, float]:
    """Medians of the rounds. `ratio_vs_broadcast`: seconds of the broadcast over those of the stream, in the same round;
    `ratio_vs_gather_and_broadcast`: of an all-gather in the actor's cell and a broadcast, which sharded weights need."""
    out = medians(turns) | {
        "ratio_vs_broadcast": round(statistics.median(turn["broadcast"] / turn["stream"] for turn in turns), 3),
        "ratio_vs_broadcast_each": round(statistics.median(turn["broadcast_each"] / turn["stream"] for turn in turns), 3),
    }
    if "gather" in turns[0]:
        ratios = ((turn["gather"] + turn["broadcast"]) / turn["stream"] for turn in turns)
        out["ratio_vs_gather_and_broadcast"] = round(statistics.median(ratios), 3)
    for way in ("stream", "broadcast"):
        out[f"{way}_bytes_per_second"] = round(sizes["bytes"] / statistics.median(turn[way] for turn in turns))
    for cell in ("actor", "rollout"):
        out[f"{cell}_rise_buckets"] = round(sizes[f"{cell}_rise_bytes"] / sizes["bucket_bytes"], 2)
    return out | sizes


def transfers(folder: str, actors_each: Sequence[int], buckets_mb: Sequence[int], rounds: int) -> dict[str, Any]:
    """Figures by cell of actors, bucket, dtype and layout; one launch for each of the first two."""
    found = {}
    for actors, bucket_mb in product(actors_each, buckets_mb):
        job = Transfer(folder, actors, rounds, bucket_mb)
        with tempfile.TemporaryDirectory(prefix="placement-") as name:
            out = Path(name) / "out.jsonl"
            launch_ranks(job, sys.executable, [__file__, json.dumps(asdict(job)), str(out)], Path(name))
            result = read_jsonl(out)[0]
        for key, sizes in result["sizes"].items():
            label = f"{actors} actor{'s' * (actors > 1)} {key}" + f" {bucket_mb} MB" * (len(buckets_mb) > 1)
            found[label] = transfer_figures([turn[key] for turn in result["turns"]], sizes)
            print(f"{label}: {json.dumps(found[label])} (load {os.getloadavg()[0]:.1f})", flush=True)
    return {"transfers": found, "ratio_vs_broadcast": {key: figures["ratio_vs_broadcast"] for key, figures in found.items()}}


if __name__ == "__main__":
    work(Transfer(**json.loads(sys.argv[1])), Path(sys.argv[2]))
