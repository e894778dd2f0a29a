"""ActorRolloutRefWorker: makes the roles of a run, each on its own mesh."""

from __future__ import annotations

from dataclasses import replace

from spmd_rl.config import Config, OptimizerConfig, engine_of
from spmd_rl.engine.base import BaseEngine, EngineModel
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

        def scheduled(optimizer: OptimizerConfig, role: str) -> OptimizerConfig:
            return optimizer if optimizer.total_steps else replace(optimizer, total_steps=total_updates(config, role))

        def engine_model(folder: str, model_type: str = "language_model", trainable: bool = True) -> EngineModel:
            return EngineModel(folder, model_type, trainable, config.model.trust_remote_code, config.trainer.seed)

        def worker(role: str, reference_of: BaseEngine | None = None, **settings) -> TrainingWorker:
            made = TrainingWorkerConfig(
                name=role,
                engine=engine_of(config, role),
                aggregation=algorithm.aggregation,
                aggregation_length=algorithm.aggregation_length,
                **settings,
            )
            return TrainingWorker(made, world.meshes[role], reference_of)

        self.actor_worker = worker(
            "actor",
            model=engine_model(model.folder),
            optimizer=scheduled(config.optimizer, "actor"),
            infer_field="old_log_probs",
            probe=model.probe,
            with_entropy=algorithm.entropy_coef != 0 or algorithm.entropy_metric,
        )
        self.ref_worker = self.critic_worker = None
        if "ref" in world.meshes:
            actor = self.actor_worker.engine
            own = config.ref.engine is not None or world.meshes["ref"] != world.meshes["actor"]
            self.ref_worker = worker(
                "ref",
                actor if actor and actor.has_reference and not own else None,
                model=engine_model(model.folder, trainable=False),
                optimizer=config.optimizer,
                infer_field="ref_log_probs",
            )
        if "critic" in world.meshes:
            self.critic_worker = worker(
                "critic",
                model=engine_model(resolve_model(config.critic.path or model.folder), "value_model"),
                optimizer=scheduled(config.critic.optimizer, "critic"),
                infer_field="values",
            )
        mesh = world.meshes["rollout"]
        staged = set(mesh.ranks) == set(world.meshes["actor"].ranks)
        self.rollout = ServerAdapter(config.rollout, model, config.trainer.seed, mesh, dialogue, config.engine.dtype, staged)
        trained = [worker for worker in (self.actor_worker, self.ref_worker, self.critic_worker) if worker]
        holders = {worker.config.name: worker.engine.memory for worker in trained if worker.engine and not worker.is_view}
        if mesh.here:
            holders["rollout"] = self.rollout.backend.memory
        self.stage = Stage(config.trainer.min_free_gb, world.rank, world.device, holders)
