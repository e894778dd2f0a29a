"""Which class trains what where. A row is three strings and a path, imported on use; a third party adds its own from its
package, or names it in the configuration: `engine.backend=package.module:Class` stands for every model type and device."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

MODEL_TYPES = ("language_model", "value_model")
DEVICES = ("cpu", "cuda")


class EngineRegistry:
    """The table (model_type, backend, device) -> `package.module:Class`.

    Beside the class its module holds, all importable without the backend's own package:
    `Config`, the backend's dataclass;
    `problems(config, num_ranks, model=None) -> list[str]`: what it cannot do, `model` being the parsed config.json once known;
    `replica_width(config) -> int`: ranks that work on the same rows;
    `process_layout(config)`: what two engines of this backend must have alike to live in one process (None: nothing);
    `LAYOUTS: dict[str, tuple[int, dict]]`: parallelisms that tests hold to their numbers, name -> (ranks, Config options)."""

    _rows: dict[tuple[str, str, str], str] = {}
    _installs = {  # backend, which is also the package that it needs -> how to get it
        "megatron": 'pip install "spmd_rl[megatron]"',
        "torchtitan": 'pip install "spmd_rl[torchtitan]"',
        "veomni": "start with `bash launch/veomni.sh`",
    }

    @classmethod
    def register(cls, model_type: str, backend: str, device: str, path: str) -> None:
        """Adds or replaces a row. `device`: cpu or cuda. Raises ValueError for an unknown model type or device."""
        if model_type not in MODEL_TYPES or device not in DEVICES:
            raise ValueError(f"({model_type}, {device}): model_type is one of {MODEL_TYPES}, device one of {DEVICES}")
        cls._rows[model_type, backend, device] = path

    @classmethod
    def backends(cls) -> list[str]:
        return sorted({backend for _, backend, _ in cls._rows})

    @classmethod
    def offers(cls, model_type: str, backend: str, device: str) -> bool:
        """Whether there is such a row; a `module:Class` of the user's own stands for all."""
        return (model_type, backend, device) in cls._rows or ":" in backend

    @classmethod
    def module(cls, backend: str) -> Any:
        """The module of a backend's class, for what stands beside the class. Raises ValueError when unknown."""
        path = next((path for (_, name, _), path in cls._rows.items() if name == backend), backend)
        if ":" not in path:
            raise ValueError(f"unknown engine '{backend}'; registered: {', '.join(cls.backends())}, or module:Class")
        try:
            return importlib.import_module(path.partition(":")[0])
        except ModuleNotFoundError as error:
            raise ValueError(f"engine '{backend}': no module '{error.name}'") from error

    @classmethod
    def get(cls, model_type: str, backend: str, device: str) -> type:
        """The class of a row. Raises ValueError listing the rows when unknown, ImportError saying how to install what it needs."""
        path = cls._rows.get((model_type, backend, device), backend)
        if ":" not in path:
            rows = "; ".join(" / ".join(row) for row in sorted(cls._rows))
            raise ValueError(f"no engine for {model_type} / {backend} / {device}; registered: {rows}")
        module, _, name = path.partition(":")
        hint = cls._installs.get(backend, f"install the package that provides {path}")
        try:
            found = vars(importlib.import_module(module))[name]
        except ModuleNotFoundError as error:
            raise ImportError(f"engine '{backend}' needs '{error.name}', which is not installed - {hint}") from error
        if backend in cls._installs and importlib.util.find_spec(backend) is None:
            raise ImportError(f"engine '{backend}' needs '{backend}', which is not installed - {hint}")
        return found


for _model_type in MODEL_TYPES:
    for _device in DEVICES:
        EngineRegistry.register(_model_type, "fsdp", _device, "spmd_rl.engine.fsdp:FSDPEngine")
        EngineRegistry.register(_model_type, "megatron", _device, "spmd_rl.engine.megatron.engine:MegatronEngine")
        EngineRegistry.register(_model_type, "torchtitan", _device, "spmd_rl.engine.torchtitan:TorchTitanEngine")
for _device in DEVICES:
    EngineRegistry.register("language_model", "veomni", _device, "spmd_rl.engine.veomni:VeOmniEngine")
