"""ActorRolloutRefWorker: makes the roles of a run, each on its own mesh."""

from __future__ import annotations

from dataclasses import replace

from spmd_rl.config import Config, OptimizerConfig, engine_of
from spmd_rl.engine.base import EngineModel
from spmd_rl.mesh import World
from spmd_rl.models import resolve_model
from spmd_rl.roles.generation import Dialogue, RolloutModel
from spmd_rl.roles.server_adapter import ServerAdapter
from spmd_rl.roles.stage import Stage
from spmd_rl.roles.training_worker import TrainingWorker, TrainingWorkerConfig
from spmd_rl.validation import total_updates


class ActorRolloutRefWorker:
    """`.actor_worker`, `.rollout`, `.ref_worker` (only where a KL term asks for it), `.critic_worker` (only for gae), `.stage`."""

    def __init__(self, config: Config, world: World, model: RolloutModel, dialogue: Dialogue | None = None):
        self.model = model
        algorithm = config.algorithm
        common = {
            "aggregation": algorithm.aggregation,
            "aggregation_length": algorithm.aggregation_length,
        }

        def scheduled(optimizer: OptimizerConfig, role: str) -> OptimizerConfig:
            return optimizer if optimizer.total_steps else replace(optimizer, total_steps=total_updates(config, role))

        def engine_model(folder: str, model_type: str = "language_model", trainable: bool = True) -> EngineModel:
            return EngineModel(folder, model_type, trainable, config.model.trust_remote_code, config.trainer.seed)

        self.actor_worker = TrainingWorker(
            TrainingWorkerConfig(
                name="actor",
                engine=engine_of(config, "actor"),
                model=engine_model(model.folder),
                optimizer=scheduled(config.optimizer, "actor"),
                infer_field="old_log_probs",
                probe=model.probe,
                with_entropy=algorithm.entropy_coef != 0 or algorithm.entropy_metric,
                **common,
            ),
            world.meshes["actor"],
        )
        self.ref_worker = self.critic_worker = None
        if "ref" in world.meshes:
            actor, mesh = self.actor_worker.engine, world.meshes["ref"]
            at_hand = actor is not None and actor.has_reference and config.ref.engine is None and mesh == world.meshes["actor"]
            self.ref_worker = TrainingWorker(
                TrainingWorkerConfig(
                    name="ref",
                    engine=engine_of(config, "ref"),
                    model=engine_model(model.folder, trainable=False),
                    optimizer=config.optimizer,
                    infer_field="ref_log_probs",
                    **common,
                ),
                mesh,
                actor if at_hand else None,
            )
        if "critic" in world.meshes:
            self.critic_worker = TrainingWorker(
                TrainingWorkerConfig(
                    name="critic",
                    engine=engine_of(config, "critic"),
                    model=engine_model(resolve_model(config.critic.path or model.folder), "value_model"),
                    optimizer=scheduled(config.critic.optimizer, "critic"),
                    infer_field="values",
                    **common,
                ),
                world.meshes["critic"],
            )
        mesh = world.meshes["rollout"]
        staged = set(mesh.ranks) == set(world.meshes["actor"].ranks)
        self.rollout = ServerAdapter(config.rollout, model, config.trainer.seed, mesh, dialogue, config.engine.dtype, staged)
        trained = [worker for worker in (self.actor_worker, self.ref_worker, self.critic_worker) if worker]
        holders = {worker.config.name: worker.engine.memory for worker in trained if worker.engine and not worker.is_view}
        if mesh.here:
            holders["rollout"] = self.rollout.backend.memory
        self.stage = Stage(config.trainer.min_free_gb, world.rank, world.device, holders)
