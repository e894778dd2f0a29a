"""ServerAdapter: the rollout role. Picks a backend from its table; a quiet shell on ranks outside its mesh."""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from spmd_rl.batch import Batch, Prompts, Sampling
from spmd_rl.collectives import agree, all_max, gather_objects
from spmd_rl.config import AGREEMENT, ROLLOUTS, ConfigError, RolloutConfig, resolve
from spmd_rl.engine.hf_names import stored_shapes
from spmd_rl.mesh import RoleMesh
from spmd_rl.metrics import Max, Mean, Stats, add_stats
from spmd_rl.placed import Placed, WeightStream, digest, shard_prompts
from spmd_rl.roles.generation import Dialogue, Episode, Expired, Generator, RolloutBackend, RolloutModel


@dataclass
class Watched:
    """A weight stream on its way into a backend: compared with the layout of the model's files, and summed up."""

    stream: WeightStream
    layout: dict[str, tuple[int, ...]]  # name -> shape in the files
    problems: list[str] = field(default_factory=list)
    checksum: int = 0

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        missing = set(self.layout)
        for name, tensor in self.stream:
            missing.discard(name)
            if name not in self.layout:
                self.problems.append(f"{name}: not in the model's files")
            elif tuple(tensor.shape) != self.layout[name]:
                self.problems.append(f"{name}: shape {tuple(tensor.shape)}, in the model's files {self.layout[name]}")
            if len(self.stream.mesh.ranks) > 1:  # alone there is nobody to compare with
                self.checksum = (1_000_003 * self.checksum + digest(tensor) + zlib.crc32(name.encode())) % 2**62
            yield name, tensor
        self.problems += [f"{name}: in the model's files, not in the stream" for name in sorted(missing)]


class ServerAdapter:
    """Generates where the rollout mesh is. `version` is that of the weights it samples with."""

    def __init__(
        self,
        rollout_config: RolloutConfig,
        model_config: RolloutModel,
        seed: int,
        mesh: RoleMesh,
        dialogue: Dialogue | None = None,
        engine_dtype: str = "float32",
        staged: bool = True,
    ):
        """`staged`: the actor trains on the same ranks, so the rollout leaves the device to it meanwhile."""
        self.config, self.model, self.mesh, self.version = rollout_config, model_config, mesh, 0
        self.tolerance = max(AGREEMENT[rollout_config.dtype], AGREEMENT[engine_dtype])
        self.dtype = vars(torch)[rollout_config.dtype]
        self.staged = staged
        self.limited = bool(rollout_config.max_step_tokens or rollout_config.max_step_seconds)
        self.drawn: int | None = None  # prompt occurrences so far, where steps are limited; None: as many as without limits
        self.stats: Stats = {}
        if mesh.here:
            self.layout = stored_shapes(model_config.folder)
            self.backend: RolloutBackend = resolve(rollout_config.backend, ROLLOUTS)(rollout_config, model_config, mesh)
            self.dialogue = dialogue
            self.generator = Generator(self.backend, seed, rollout_config.max_step_tokens, dialogue)

    def next_prompts(self, source: Callable[[int, int], Prompts], step: int, count: int) -> Placed[Prompts]:
        """Collective over the rollout mesh: this step's prompts, as many as `count` leaves beside the groups kept.

        `source(first, count)`: prompt occurrences from number `first` on."""
        if not self.limited:
            return shard_prompts(source(step * count, count), self.mesh)
        if not self.mesh.here:
            return Placed(self.mesh, None)
        kept = sum(gather_objects(len({e.uid for e in self.generator.pending}), self.mesh.data_group, "rollout.kept"))
        first = step * count if self.drawn is None else self.drawn
        self.drawn = first + max(0, count - kept)
        return shard_prompts(source(first, self.drawn - first), self.mesh)

    def generate(self, prompts: Placed[Prompts], sampling: Sampling, step: int) -> Placed[Batch]:
        """Collective over the rollout mesh: `sampling.n` samples of each prompt, siblings adjacent, on the host."""
        return prompts.map(lambda local: self._generate(local, sampling, step))

    def update_weights(self, stream: WeightStream, version: int) -> None:
        """Collective over the source and the rollout mesh: both exhaust the stream.

        Raises ValueError that names every tensor that does not fit, RuntimeError where the stream is of another version, where
        lanes were handed different tensors, or where the probe's log-probs are not those of the source."""
        if stream.version != version:
            raise RuntimeError(f"weights of version {stream.version} came where version {version} is due")
        if not self.mesh.here:
            for _ in stream:
                pass
            stream.expected()
            return
        self.backend.wake_up("weights")
        watched = Watched(stream, self.layout)
        on_its_way = iter(watched)
        refused = None
        try:
            self.backend.update_weights(on_its_way)
        except Exception as error:
            if not watched.problems:
                raise
            refused = error  # a loader does not always say which tensor it could not take
        for _ in on_its_way:  # a loader may stop early; the source does not
            pass
        if watched.problems:
            raise ValueError(
                f"weights of version {version} do not fit the rollout model:\n" + "\n".join(watched.problems)
            ) from refused
        self._same_everywhere(watched.checksum, version)
        self.backend.wake_up("kv_cache")
        self._prove(stream.expected(), version)
        self.version = version

    def sleep(self) -> None:
        """Frees the device for training until the next update, where the actor needs it and the backend can."""
        if self.mesh.here and self.staged:
            self.backend.sleep()

    def shutdown(self) -> None:
        if self.mesh.here:
            self.backend.shutdown()
            if self.dialogue:
                self.dialogue.close()

    def take(self) -> Stats:
        """Statistics since the last time."""
        taken, self.stats = self.stats, {}
        return taken

    def save(self, folder: Path) -> None:
        """Collective over the rollout mesh: groups that go on in the next step."""
        if self.mesh.here and self.limited:
            kept = gather_objects(self.generator.state(), self.mesh.data_group, "rollout.save")
            if self.mesh.rank_of(0) == self.mesh.world_rank:
                state = {"drawn": self.drawn, "replicas": kept}
                (folder / "rollout.json").write_text(json.dumps(state))

    def load(self, folder: Path) -> None:
        """Collective over the world: every replica takes its own groups, or its share where their number is another.

        Raises ConfigError, on every rank, where groups were kept and steps are not limited any more."""
        path = folder / "rollout.json"
        state = json.loads(path.read_text()) if path.exists() else {}
        if any(state.get("replicas", ())) and not self.limited:
            raise ConfigError(
                f"rollout.max_step_tokens, rollout.max_step_seconds: {folder} holds groups that go on under a limit, and there is "
                f"none - set one of them, or trainer.resume=never"
            )
        if self.mesh.here and state:
            self.drawn = state["drawn"]
            parts, mesh = state["replicas"], self.mesh
            if len(parts) != mesh.num_replicas:
                every = sorted((episode for part in parts for episode in part), key=lambda e: (e["uid"], e["sample"]))
                uids = list(dict.fromkeys(episode["uid"] for episode in every))
                owner = {uid: i % mesh.num_replicas for i, uid in enumerate(uids)}
                parts = [[e for e in every if owner[e["uid"]] == replica] for replica in range(mesh.num_replicas)]
            self.generator.pending = [Episode(**episode) for episode in parts[mesh.replica]]

    def _generate(self, prompts: Prompts, sampling: Sampling, step: int) -> Batch:
        batch = self.generator.generate(prompts, sampling, step, self.version, self._deadline())
        if self.mesh.width > 1:
            ids = zlib.crc32(batch.input_ids.numpy().tobytes())
            if all_max([ids, -ids], self.mesh.lane_group, "generate.same") != [ids, -ids]:
                raise RuntimeError("the lanes of a rollout replica drew different tokens")
        counts = self.backend.take_counts()
        if sampling.purpose == "train":
            self.stats = add_stats(self.stats, {key: Mean(total, count) for key, (total, count) in counts.items()})
            if self.dialogue:
                self.stats = add_stats(self.stats, self.dialogue.take())
            if self.limited and self.mesh.lane == 0:
                self.stats["rollout/kept_samples"] = Mean(len(self.generator.pending), 1)
        return batch

    def _deadline(self) -> Expired | None:
        """Whether the step's time is up: lanes agree, since they decode together."""
        if not self.config.max_step_seconds:
            return None
        end = time.monotonic() + self.config.max_step_seconds
        if self.mesh.width == 1:
            return lambda: time.monotonic() > end
        return lambda: agree(time.monotonic() > end, self.mesh.lane_group, "generate.deadline")

    def _same_everywhere(self, checksum: int, version: int) -> None:
        if len(self.mesh.ranks) > 1:
            sums = gather_objects(checksum, self.mesh.bridge(self.mesh).control, "weights.checksum")
            if other := next((rank for rank, found in zip(sorted(self.mesh.ranks), sums) if found != sums[0]), None):
                raise RuntimeError(
                    f"weights of version {version}: rank {other} was handed other tensors than rank {min(self.mesh.ranks)} "
                    f"(checksums {sums})"
                )

    def _prove(self, expected: list[list[float]], version: int) -> None:
        """Two short rows, scored by both sides: says what the backend made of the tensors that it was handed."""
        found = self.backend.score(self.model.probe)
        differences = [abs(a - b) for row in zip(found, expected, strict=True) for a, b in zip(*row, strict=True)]
        if not differences:
            return
        mean, largest = sum(differences) / len(differences), max(differences)
        if not mean <= self.tolerance:
            raise RuntimeError(
                f"weights of version {version}: the rollout's log-probs of the probe are {mean:.3g} nats off the trainer's on "
                f"average (largest {largest:.3g}, limit {self.tolerance}): tensors were lost, mixed up or changed on the way, or "
                f"rollout.backend={self.config.backend} computes this model differently - try rollout=hf"
            )
        self.stats |= {"rollout/probe_diff_mean": Mean(mean, 1), "rollout/probe_diff_max": Max(largest)}
