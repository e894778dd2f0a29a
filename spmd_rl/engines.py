"""What can be said of the engine sections of a configuration, and by the engines themselves. Imports no torch."""

from __future__ import annotations

import re
from typing import Any

from spmd_rl.config import REGISTRY, Config, engine_of, resolve
from spmd_rl.placement import Ranks


def engine_error(backend: Any) -> str:
    """Why an engine of this name cannot be used, or nothing."""
    if not isinstance(backend, str):
        return f"{backend} is no name"
    try:
        module = resolve(REGISTRY, {}).module(backend)
    except (ValueError, ImportError, SyntaxError) as error:
        return f"'{backend}': {error}"
    beside = ["Config", "problems", "replica_width", "process_layout"] + [backend.partition(":")[2]] * (":" in backend)
    missing = [name for name in beside if name not in vars(module)]
    return f"'{backend}': its module has no {', '.join(map(repr, missing))} (docs/extending.md)" if missing else ""


def engine_module(backend: str) -> Any:
    """The module of an engine, or None for a name that leads to none."""
    return None if engine_error(backend) else resolve(REGISTRY, {}).module(backend)


def replica_width(config: Config, role: str) -> int:
    """Ranks that work on the same rows of a role."""
    if role == "rollout":
        return config.rollout.tensor_parallel_size
    engine = engine_of(config, role)
    return resolve(REGISTRY, {}).module(engine.backend).replica_width(engine)


def engine_problems(config: Config, placement: dict[str, Ranks], models: dict[str, dict] | None = None) -> list[str]:
    """What the engines of the training roles cannot do; `models`: the parsed config.json of each role's model, once known."""
    registry, found = resolve(REGISTRY, {}), []
    for role, ranks in placement.items():
        if role == "rollout":
            continue
        engine, path = engine_of(config, role), "engine" if engine_of(config, role) is config.engine else f"{role}.engine"
        model_type = "value_model" if role == "critic" else "language_model"
        if not registry.offers(model_type, engine.backend, config.trainer.device):
            able = [b for b in registry.backends() if registry.offers(model_type, b, config.trainer.device)]
            found.append(
                f"{path}: {engine.backend} trains no {model_type} on {config.trainer.device} - "
                f"set {'engine' if role == 'actor' else f'{role}.engine'}.backend to one of {', '.join(able)}"
            )
            continue
        module, width = registry.module(engine.backend), replica_width(config, role)
        said = module.problems(engine, len(ranks), (models or {}).get(role))
        if not said and (width < 1 or len(ranks) % width):
            said = [f"engine: a replica of {width} ranks does not divide the {len(ranks)} of placement.{role} - set other sizes"]
        found += [_named(path, line) for line in said]
        for other in list(placement)[: list(placement).index(role)]:
            theirs = engine_of(config, other)
            alike = other != "rollout" and set(placement[other]) == set(ranks) and theirs.backend == engine.backend
            if alike and (one := module.process_layout(theirs)) != (two := module.process_layout(engine)):
                found.append(
                    f"{path}: {other} and {role} share their ranks, and {engine.backend} can be set up in one way a process "
                    f"({one}, {two}) - set the same, or placement.{role} to ranks of its own"
                )
    return list(dict.fromkeys(found))


def _named(path: str, line: str) -> str:
    """An engine's own line, whose keys begin with `engine`, for the section at `path`."""
    if path == "engine":
        return line
    return re.sub(r"\bengine([.=])", lambda found: path + (".backend=" if found[1] == "=" else "."), line)
