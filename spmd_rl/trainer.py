"""RLTrainer: every rank runs every line; a role acts only on its own mesh."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from spmd_rl.advantages import kl_stats, subtract_kl
from spmd_rl.batch import Batch, Sampling
from spmd_rl.checkpoint import export_hf, find_resume, load_samples, save_samples, save_step
from spmd_rl.collectives import agree, barrier, gather_objects, reduce_stats
from spmd_rl.config import ADVANTAGES, Config, ConfigError, engine_of, resolve
from spmd_rl.data import PromptSource
from spmd_rl.kl import adapt_kl_coef
from spmd_rl.losses import ppo_loss, value_loss
from spmd_rl.mesh import World
from spmd_rl.metrics import Max, Mean, Phases, Stats, Sum, Writer, add_stats
from spmd_rl.placed import Placed, shard_prompts, traffic
from spmd_rl.roles.actor_rollout_ref import ActorRolloutRefWorker
from spmd_rl.scoring import Scorer


def has_advantage(batch: Batch):
    """[B] bool: rows that can have a gradient when neither KL nor entropy is part of the loss."""
    return (batch.advantages != 0).any(1)


@dataclass
class Sampled:
    """The scored samples of a step, and what this rank has to say of them."""

    batch: Placed[Batch]
    stats: Stats
    shown: list[dict]


class RLTrainer:
    """Samples, scores and trains for `trainer.total_steps` steps, from the newest checkpoint on."""

    def __init__(
        self,
        config: Config,
        world: World,
        roles: ActorRolloutRefWorker,
        source: PromptSource,
        scorer: Scorer,
        validation: tuple[PromptSource, Scorer] | None,
        sampling: Sampling,
    ):
        self.config, self.world = config, world
        self.actor, self.rollout = roles.actor_worker, roles.rollout
        self.ref, self.critic = roles.ref_worker, roles.critic_worker
        self.model_folder = Path(roles.model.folder)
        self.source, self.scorer, self.validation, self.sampling = source, scorer, validation, sampling
        self.stage, self.stopping = roles.stage, False
        self.phases = Phases(self.stage.watch)
        algorithm = config.algorithm
        self.advantage = partial(resolve(algorithm.advantage, ADVANTAGES), algorithm, all_sum=self.actor.all_sum)
        self.policy_loss, self.value_loss = partial(ppo_loss, algorithm), partial(value_loss, algorithm)
        kl_in_loss = algorithm.kl_coef != 0 and not algorithm.kl_in_reward
        self.keep = None if kl_in_loss or algorithm.entropy_coef != 0 else has_advantage
        self.kl_coef = algorithm.kl_coef
        limit = config.rollout.max_logprob_diff
        self.limits = {"rollout/logprob_diff_max": limit} if limit else None
        trained_once = algorithm.epochs == algorithm.num_mini_batches == 1  # then the loss knows the old log-probs itself
        self.infers_old = not trained_once or algorithm.kl_in_reward or algorithm.kl_target is not None
        self.inflight: Sampled | None = None  # the next step's samples, drawn while this step trains

    def fit(self, open_writers: Callable[[int], list[Writer]]) -> int:
        """Collective over the world; the steps done, fewer than all after a stop signal.

        `open_writers(start)`: this rank's writers, given the steps already done."""
        config = self.config.trainer
        signal.signal(signal.SIGTERM, self._stop)
        start = done = self.load()
        self.writers = open_writers(start)
        barrier(self.world.control, "start")  # a rank that fails from here on has the last word in status.json
        if config.val_before and start == 0:
            self.log(0, self.evaluate(0), [])
        for step in range(start, config.total_steps):
            stats, shown = self.train_step(step)
            if self._due(step + 1) and not config.lookahead or step + 1 == config.total_steps:
                stats = add_stats(stats, self.evaluate(step + 1))
            values = self.log(step + 1, stats, shown)
            self.kl_coef = self.next_kl_coef(step, values)
            stop = agree(self.stopping, self.world.control, "stop")
            if config.save_every and (step + 1) % config.save_every == 0 or stop or step + 1 == config.total_steps:
                self.save(step + 1)
            done = step + 1
            if stop:
                break
        else:
            if config.export_hf:
                export_hf(self.actor.weights(done), self.model_folder, Path(config.run_dir) / "hf", self.config.engine.dtype)
        for writer in self.writers:
            writer.close()
        return done

    def train_step(self, step: int) -> tuple[Stats, list[dict]]:
        """Collective over the world: one step of RL. Its statistics and some of its samples, of this rank."""
        actor, phases, config, ahead = self.actor, self.phases, self.config.algorithm, self.config.trainer.lookahead
        samples, self.inflight = self.inflight or self.sample(step), None
        stats = samples.stats
        with phases("move"):
            self.rollout.sleep()
            batch = samples.batch.to(actor.mesh)
        if ahead and step + 1 < self.config.trainer.total_steps:  # the rollout's ranks go on while the others train
            if self._due(step):
                stats = add_stats(stats, self.evaluate(step))
            self.inflight = self.sample(step + 1)
        with phases("infer"):
            if self.ref:
                batch = self.ref.infer_batch(batch.to(self.ref.mesh)).to(actor.mesh)
            if self.critic:
                stats = add_stats(stats, {"critic/warmup_steps": Max(float(self._warms_up(step)))})
                batch = self.critic.infer_batch(batch.to(self.critic.mesh)).to(actor.mesh)
            if self.infers_old:
                batch = actor.infer_batch(batch)
        with phases("advantage"):
            if self.ref:
                stats = add_stats(stats, batch.map(partial(kl_stats, config, self.kl_coef)).local or {})
                batch = batch.map(partial(subtract_kl, config, self.kl_coef))
            batch = batch.map(self.advantage)
        policy_loss = partial(self.policy_loss, version=step, kl_coef=self.kl_coef)
        with phases("train"):
            for mini in batch.mini_batches(config.epochs, config.num_mini_batches, f"{self.config.trainer.seed}/{step}"):
                if self.critic:
                    stats = add_stats(stats, self.critic.train_batch(mini.to(self.critic.mesh), self.value_loss))
                if not self._warms_up(step):
                    stats = add_stats(stats, actor.train_batch(mini, policy_loss, self.keep, self.limits))
        with phases("weights"):
            self.update_rollout(step + 1)
        return stats, samples.shown

    def update_rollout(self, version: int) -> None:
        """Collective over both: the rollout gets the actor's weights, which `version` steps have made."""
        self.rollout.update_weights(self.actor.weights(version, self.rollout.dtype).to(self.rollout.mesh), version)

    def sample(self, step: int) -> Sampled:
        """Collective over the rollout mesh: the scored samples of a step."""
        with self.phases("generate"):
            prompts = self.rollout.next_prompts(self.source.prompts, step, self.config.data.prompts_per_step)
            samples = self.rollout.generate(prompts, self.sampling, step)
        with self.phases("reward"):
            samples = samples.score(self.scorer.bind(step, self.sampling.max_tokens, self.config.trainer.sample_rows))
        stats, shown = self.scorer.take()
        return Sampled(samples, add_stats(stats, self.rollout.take()), shown)

    def evaluate(self, step: int) -> Stats:
        """Collective over the rollout mesh: statistics of the validation prompts, greedy unless `val_n` is more than 1."""
        if not self.validation:
            return {}
        source, scorer = self.validation
        config = self.config.trainer
        sampling = replace(
            self.sampling, n=config.val_n, temperature=config.val_temperature if config.val_n > 1 else 0.0, purpose="validation"
        )
        with self.phases("validate"):
            samples = self.rollout.generate(shard_prompts(source.validation(), self.rollout.mesh), sampling, 0)
            samples.score(scorer.bind(step, sampling.max_tokens, 0))
        return scorer.take()[0]

    def next_kl_coef(self, step: int, values: dict[str, float]) -> float:
        """Local: the KL coefficient after a step, from its reduced statistics, which are the same on every rank."""
        if self.config.algorithm.kl_target is None or self._warms_up(step):
            return self.kl_coef
        scored = values["response/samples"] - values["reward/failed"]
        return adapt_kl_coef(self.config.algorithm, self.kl_coef, values["actor/kl_sample"], scored)

    def log(self, step: int, stats: Stats, shown: list[dict]) -> dict[str, float]:
        """Collective over the world: reduces the step's statistics once and writes them where there are writers."""
        stats = stats | {key: Mean(seconds, 1) for key, seconds in self.phases.step().items()}
        stats |= self.stage.step()
        stats |= {f"traffic/{kind}_bytes": Sum(traffic[kind]) for kind in ("batch", "weights")}
        traffic.clear()
        values = reduce_stats(stats, self.world.control, "log")
        if step:
            seconds = values["time/step"] - values.get("time/validate", 0.0)
            values["perf/samples_per_second"] = values["response/samples"] / seconds
            values["perf/tokens_per_second"] = values["response/tokens"] / seconds
        table = [row for part in gather_objects(shown, self.world.control, "log.samples") for row in part]
        for writer in self.writers:
            writer.write(step, values)
            writer.samples(step, table[: self.config.trainer.sample_rows])
        return values

    def save(self, step: int) -> None:
        """Collective over the world."""
        if self.config.trainer.keep:
            root = Path(self.config.trainer.run_dir) / "checkpoints"
            state = {"data": self.source.fingerprint, "seed": self.config.trainer.seed, "config": asdict(self.config)}
            state |= {"kl_coef": self.kl_coef, "engine": self._engines()}
            save_step(self.world, root, step, self._save_roles, state, self.config.trainer.keep)

    def load(self) -> int:
        """Collective over the world: restores the newest checkpoint where there is one; returns the first step to run.

        Raises ConfigError where it was made from other data or another seed."""
        found = find_resume(self.world, Path(self.config.trainer.run_dir) / "checkpoints", self.config.trainer.resume)
        start = 0
        if found:
            folder, state = found
            for field, now in (
                ("data", self.source.fingerprint),
                ("seed", self.config.trainer.seed),
                ("engine", self._engines()),
            ):
                if state.get(field) != now:
                    raise ConfigError(
                        f"trainer.resume: {folder} has another {field} ({state.get(field)}, now {now}) - set trainer.resume=never"
                    )
            start = state["step"]
            if self.config.algorithm.kl_target is not None:
                self.kl_coef = state["kl_coef"]
            for role in self._stored():
                role.load(folder)
            inflight = folder / "inflight"  # without lookahead drawn anew, unless prompts that went on in it would be lost
            if inflight.exists() and (self.config.trainer.lookahead or self.rollout.limited):
                self.inflight = Sampled(*load_samples(self.rollout.mesh, folder / "inflight"))
        self.update_rollout(start)
        traffic.clear()  # no step's
        return start

    def _save_roles(self, folder: Path) -> None:
        for role in self._stored():
            role.save(folder)
        if self.inflight is not None:
            save_samples(self.inflight.batch, self.inflight.stats, self.inflight.shown, folder / "inflight")

    def _due(self, step: int) -> bool:
        """Whether the weights of `step` updates are to be validated."""
        every = self.config.trainer.eval_every
        return bool(every) and step > 0 and step % every == 0

    def _warms_up(self, step: int) -> bool:
        """Whether only the critic trains."""
        return step < self.config.critic.warmup_steps

    def _stored(self) -> list:
        return [role for role in (self.actor, self.critic, self.rollout) if role]

    def _engines(self) -> dict[str, str]:
        """What wrote, or may read, each trained role's part of a checkpoint."""
        return {role: engine_of(self.config, role).backend for role in ("actor", *(["critic"] if self.critic else []))}

    def _stop(self, signum, frame) -> None:
        self.stopping = True
