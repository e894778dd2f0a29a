"""Whole training runs, many in one launch. A job is `--config-name tiny` with its overrides; it leaves its run folder
FOLDER/name, and there `rank0.pt`, ...: of every step the rows that this rank trained on, advantages included.

The world is split once a launch: its jobs place the roles that they have in common alike.
"""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from spmd_rl import train
from spmd_rl.batch import fields_of
from spmd_rl.config import Config, TimeoutConfig
from spmd_rl.engines import replica_width
from spmd_rl.launch import Launch, detect_launch
from spmd_rl.mesh import Role, close_world, open_store, split_world
from spmd_rl.metrics import read_jsonl
from spmd_rl.placement import parse_placement
from spmd_rl.rewards import RewardPool
from spmd_rl.trainer import RLTrainer
from spmd_rl.validation import validate
from tests.forks import fork_ranks

# Ranks are forked, which vLLM does not take
BASE = ["rollout=hf", "logger.console=false", "reward.workers=1", "data.prompts_per_step=8", "rollout.n=4"]
TIMED = ("time/", "cpu/", "perf/", "memory/")


class RecordingTrainer(RLTrainer):
    """Keeps each step's rows, with their advantages, on the rank that trains on them."""

    def __init__(self, *args):
        super().__init__(*args)
        self.rows, advantage = [], self.advantage

        def recorded(batch):
            out = advantage(batch)
            self.rows.append({name: value.clone() for name, value in fields_of(out).items()})
            return out

        self.advantage = recorded

    def fit(self, open_writers):
        super().fit(open_writers)
        own = self.rows if self.actor.mesh.here and self.actor.mesh.lane == 0 else []  # lanes have the same rows
        torch.save(own, Path(self.config.trainer.run_dir) / f"rank{self.world.rank}.pt")


def run_jobs(folder: Path) -> None:
    """Runs FOLDER/jobs.json, {name: [override, ...]}, in this order, on every rank."""
    launch, timeouts = detect_launch(), TimeoutConfig(collective=40, phase=40)
    jobs = json.loads((folder / "jobs.json").read_text())
    configs = {name: composed(folder / name, overrides, launch) for name, overrides in jobs.items()}
    world = split_world(shared_roles(configs, launch), launch, open_store(launch, timeouts), "cpu", timeouts)
    pools: list[RewardPool] = []
    train.RLTrainer, train.RewardPool = RecordingTrainer, lambda config: _shared_pool(config, pools)
    for name, config in configs.items():
        (folder / name).mkdir(exist_ok=True)
        needed = replace(world, meshes={role: world.meshes[key] for role, key in job_roles(config, launch).items()})
        try:
            parts = train.Parts(config, {role: mesh.ranks for role, mesh in needed.meshes.items()})
            train.fit(config, launch, needed, parts, folder / name)
        except ValueError as error:
            (folder / name / f"error{launch.rank}.txt").write_text(str(error))
    for pool in pools:
        RewardPool.close(pool)
    close_world(world)


def composed(run: Path, overrides: list[str], launch: Launch) -> Config:
    """A later choice of a group stands in for an earlier one."""
    chosen = {override.partition("=")[0]: override for override in (*BASE, f"trainer.run_dir={run}", *overrides)}
    config, problems = train.compose_config("tiny", None, list(chosen.values()))
    problems += validate(config, launch.world_size)
    assert not problems, problems
    return config


def shared_roles(configs: dict[str, Config], launch: Launch) -> dict[str, Role]:
    """Every role in every layout that any job needs; all jobs place a role on the same ranks."""
    found: dict[str, Role] = {}
    for config in configs.values():
        ranks = parse_placement(config, launch.world_size)[0]
        for role, key in job_roles(config, launch).items():
            found[key] = Role(ranks[role], len(ranks[role]) // replica_width(config, role))
    return found


def job_roles(config: Config, launch: Launch) -> dict[str, str]:
    """What `shared_roles` calls the roles of a job."""
    return {role: f"{role}/{replica_width(config, role)}" for role in parse_placement(config, launch.world_size)[0]}


def _shared_pool(config, pools: list[RewardPool]) -> RewardPool:
    """All jobs score alike: their worker processes are started once."""
    if not pools:
        pools.append(RewardPool(config))
        pools[0].close = contextlib.nullcontext
    return pools[0]


def launch_jobs(folder: Path, world_size: int, jobs: dict[str, list[str]], codes: list[int] | None = None) -> str:
    """Runs the jobs in one launch of that many ranks; returns what rank 0 printed. Asserts the exit codes."""
    (folder / "jobs.json").write_text(json.dumps(jobs))
    return fork_ranks("tests.jobs:run_jobs", folder, world_size, codes)[0]


def metrics(run: Path) -> list[dict[str, float]]:
    """One dict a step, without what depends on the machine."""
    return [{k: v for k, v in row.items() if not k.startswith(TIMED)} for row in read_jsonl(run / "metrics.jsonl")]


def rows(run: Path) -> list[dict[tuple[int, int], dict[str, torch.Tensor]]]:
    """One dict a step: (uid, sample) -> its fields, per-token fields cut to the row's own tokens, from all ranks together."""
    ranks = [found for path in sorted(run.glob("rank*.pt")) if (found := torch.load(path))]  # of the ranks with an actor
    steps = []
    for shards in zip(*ranks, strict=True):
        found = {}
        for shard in shards:
            for b, name in enumerate(zip(shard["uid"].tolist(), shard["sample"].tolist())):
                assert name not in found, f"row {name} is on two ranks"
                length = int(shard["lengths"][b])
                found[name] = {k: v[b, :length] if v.ndim == 2 else v[b] for k, v in shard.items()}
        steps.append(found)
    return steps


def state(run: Path, step: int, role: str = "actor") -> dict[str, Any]:
    """What a checkpoint holds, by path: whole parameters and optimizer state, counters, optimizer settings."""
    folder = run / "checkpoints" / f"step_{step:06d}"
    whole = folder / f"{role}.pt"
    dcp_to_torch_save(folder / role, whole)
    loaded = torch.load(whole)
    whole.unlink()
    return dict(_flat("", loaded))


def _flat(path: str, value):
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(f"{path}/{key}", inner)
    elif isinstance(value, list | tuple):
        yield from _flat(path, dict(enumerate(value)))
    else:
        yield path, value


if __name__ == "__main__":
    run_jobs(Path(sys.argv[1]))
