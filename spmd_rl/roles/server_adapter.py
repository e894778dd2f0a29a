"""ServerAdapter: the rollout role. Picks a backend from its table; a quiet shell on ranks outside its mesh."""

from __future__ import annotations

from dataclasses import dataclass

from spmd_rl.batch import Batch, Prompts, Sampling
from spmd_rl.config import ROLLOUTS, RolloutConfig, resolve
from spmd_rl.mesh import RoleMesh
from spmd_rl.placed import Placed, WeightStream


@dataclass(frozen=True)
class RolloutModel:
    """What a rollout backend needs of the model."""

    folder: str  # Hugging Face layout
    eos_ids: tuple[int, ...]
    pad_id: int
    trust_remote_code: bool = False


class ServerAdapter:
    """Generates where the rollout mesh is. `version` is that of the weights it samples with."""

    def __init__(self, rollout_config: RolloutConfig, model_config: RolloutModel, seed: int, mesh: RoleMesh):
        self.mesh = mesh
        self.backend = None
        if mesh.here:
            backend = resolve(rollout_config.backend, ROLLOUTS)
            self.backend = backend(
                rollout_config, model_config.folder, model_config.eos_ids, model_config.pad_id, seed, mesh.device,
                trust_remote_code=model_config.trust_remote_code,
            )  # fmt: skip

    def generate(self, prompts: Placed[Prompts], sampling: Sampling, step: int) -> Placed[Batch]:
        """Collective over the rollout mesh: `sampling.n` samples of each prompt, siblings adjacent, on the host."""
        return prompts.map(lambda local: self.backend.generate(local, sampling, step).to("cpu"))

    def update_weights(self, stream: WeightStream, version: int) -> None:
        """Collective over the source and the rollout mesh: both exhaust the stream."""
        if self.mesh.here:
            self.backend.update_weights(stream, version)
        for _ in stream:
            pass

    def sleep(self) -> None:
        """Frees the device for training, where the backend can."""
        if self.mesh.here:
            self.backend.sleep()

    def wake_up(self) -> None:
        """Takes the device back."""
        if self.mesh.here:
            self.backend.wake_up()

    def shutdown(self) -> None:
        if self.mesh.here:
            self.backend.shutdown()
