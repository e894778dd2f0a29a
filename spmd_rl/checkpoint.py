"""Step folders: `checkpoints/step_000010/{actor, critic, state.json}`, complete or absent, never torn.

A step is written beside its name and renamed once every rank has written; `state.json` is what makes it complete.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from spmd_rl.batch import PER_ROW, Batch, fields_of, make_batch, pad_to
from spmd_rl.collectives import barrier, broadcast_object
from spmd_rl.config import ConfigError
from spmd_rl.mesh import RoleMesh, World
from spmd_rl.metrics import Stats, add_stats, pack, schema, unpack
from spmd_rl.placed import Placed, WeightStream

STEP = re.compile(r"step_(\d{6,})(\.partial)?")
STATE = "state.json"
SHARD_BYTES = 2 << 30


def step_folders(root: Path) -> list[tuple[int, Path]]:
    """Step folders under `root`, oldest first, complete or not."""
    return sorted((int(m[1]), path) for path in root.glob("step_*") if (m := STEP.fullmatch(path.name)) and path.is_dir())


def is_complete(folder: Path) -> bool:
    """Whether it can be loaded: written by every rank, committed, and not half removed."""
    return folder.suffix != ".partial" and (folder / STATE).exists()


def save_step(world: World, root: Path, step: int, save: Callable[[Path], None], state: dict[str, Any], keep: int) -> None:
    """Collective over the world: every role saves into a fresh folder; rank 0 commits it and removes all but the last.

    `keep`: complete steps that stay, at least one. Later ones are of an earlier run in this folder, and go too."""
    target, partial = root / f"step_{step:06d}", root / f"step_{step:06d}.partial"
    on_first(world, lambda: (shutil.rmtree(partial, ignore_errors=True), partial.mkdir(parents=True)), "checkpoint.open")
    save(partial)
    barrier(world.control, "checkpoint.written")

    def commit() -> None:
        (partial / STATE).write_text(json.dumps({"step": step, **state}, indent=1))
        for path in partial.rglob("*"):
            _sync(path)
        if target.exists():
            _remove(target)
        partial.rename(target)
        _sync(root)
        mine = [path for at, path in step_folders(root) if at <= step and is_complete(path)]
        for _, path in step_folders(root):
            if path not in mine[-max(keep, 1) :]:
                _remove(path)

    on_first(world, commit, "checkpoint.commit")


def find_resume(world: World, root: Path, resume: str) -> tuple[Path, dict[str, Any]] | None:
    """Collective over the world: the step to go on from, and its state; None to start afresh.

    `resume`: auto (the newest complete step under `root`, saying so when a newer one is not), never, or a step folder.
    Raises ConfigError when the named folder is no complete step."""

    def choose():
        if resume == "never":
            return None
        if resume != "auto":
            if not is_complete(Path(resume)):
                return ConfigError(
                    f"trainer.resume: '{resume}' is no complete step folder (it lacks {STATE}) - name one, or 'auto'"
                )
            return _say(Path(resume))
        for _, path in reversed(step_folders(root)):
            if is_complete(path):
                return _say(path)
            sys.stderr.write(f"[spmd_rl] {path} is incomplete: going on from an earlier step\n")
        return None

    chosen = on_first(world, choose, "checkpoint.find")
    if isinstance(chosen, ConfigError):
        raise chosen
    return None if chosen is None else (chosen, json.loads((chosen / STATE).read_text()))


def _say(path: Path) -> Path:
    sys.stderr.write(f"[spmd_rl] going on from {path} (trainer.resume=never starts afresh)\n")
    return path


def export_hf(stream: WeightStream, source: Path, target: Path, dtype: str) -> None:
    """Collective over the stream's mesh: a Hugging Face folder of the weights, with the config and tokenizer of `source`.

    Written beside its name, one shard of SHARD_BYTES in memory at a time, by the mesh's first rank, and then renamed."""
    if not stream.mesh.here or stream.mesh.ranks[0] != stream.mesh.world_rank:
        for _ in stream:
            pass
        return
    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for path in source.iterdir():
        if path.is_file() and ".safetensors" not in path.name:
            shutil.copy(path, partial)
    config = json.loads((source / "config.json").read_text())
    (partial / "config.json").write_text(json.dumps(config | {"dtype": dtype}, indent=2))
    where: dict[str, str] = {}
    shard: dict[str, Tensor] = {}
    size = total = 0

    def flush() -> None:
        name = f"model-{len(set(where.values())) + 1:05d}.safetensors"
        save_file(shard, partial / name, metadata={"format": "pt"})
        where.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, tensor in stream:
        if size and size + tensor.nbytes > SHARD_BYTES:
            flush()
            size = 0
        shard[name] = tensor.to("cpu", vars(torch)[dtype], copy=True).contiguous()
        size += tensor.nbytes
        total += shard[name].nbytes
    flush()
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (partial / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)


def save_samples(batch: Placed[Batch], stats: Stats, shown: list[dict], folder: Path) -> None:
    """Local: the samples in flight, a file of each replica by its lane 0, and what each rank has to say of them."""
    mesh = batch.mesh
    if not mesh.here:
        return
    folder.mkdir(exist_ok=True)
    if mesh.lane == 0:
        fields = {name: value.contiguous() for name, value in fields_of(batch.local).items()}
        save_file(fields, folder / f"{mesh.replica:05d}.safetensors")
    said = {"schema": schema(stats), "numbers": pack(stats, schema(stats)), "shown": shown}
    (folder / f"{mesh.ranks.index(mesh.world_rank):05d}.json").write_text(json.dumps(said, default=str))


def load_samples(mesh: RoleMesh, folder: Path) -> tuple[Placed[Batch], Stats, list[dict]]:
    """Local: every replica takes its share of the files, of which there may be more or fewer than replicas."""
    if not mesh.here:
        return Placed(mesh, None), {}, []
    paths = sorted(folder.glob("*.safetensors"))
    mine = paths[mesh.replica :: mesh.num_replicas]
    tensors = [load_file(path) for path in mine] or [{name: value[:0] for name, value in load_file(paths[0]).items()}]
    width = max(part["input_ids"].shape[1] for part in tensors)
    fields = {
        name: torch.cat([part[name] if name in PER_ROW else pad_to(part[name], width) for part in tensors]) for name in tensors[0]
    }
    stats: Stats = {}
    shown: list[dict] = []
    for path in sorted(folder.glob("*.json"))[mesh.ranks.index(mesh.world_rank) :: len(mesh.ranks)]:
        said = json.loads(path.read_text())
        stats = add_stats(stats, unpack(tuple(said["numbers"]), [tuple(entry) for entry in said["schema"]]))
        shown += said["shown"]
    return Placed(mesh, make_batch(fields)), stats, shown


def on_first(world: World, function: Callable[[], Any], name: str) -> Any:
    """Collective over the world: what `function` returns on rank 0, on every rank."""
    return broadcast_object(function() if world.rank == 0 else None, 0, world.control, name)


def _remove(folder: Path) -> None:
    (folder / STATE).unlink(missing_ok=True)  # first: what is half removed must not look complete
    shutil.rmtree(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
