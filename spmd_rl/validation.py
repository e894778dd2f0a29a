"""What can be said of a configuration before any process group or model exists: all problems at once. Imports no torch.

Each problem is one line: `field path: what is wrong (values) - what to set`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from spmd_rl.config import (
    ADVANTAGES,
    AGGREGATIONS,
    CORRECTIONS,
    DTYPES,
    MAX_ERROR,
    POLICY_LOSSES,
    REGISTRY,
    ROLLOUTS,
    SCHEDULES,
    AlgorithmConfig,
    Config,
    EngineConfig,
    closest,
    engine_of,
    resolve,
)
from spmd_rl.engines import engine_error, engine_module, engine_problems, replica_width
from spmd_rl.placement import needed_roles as needed_roles
from spmd_rl.placement import parse_placement, tensor_parallel_problems

ENGINE_PATHS = ("engine", "ref.engine", "critic.engine")
MISSING = "???"  # Hydra's mark of a value that the user must give


def typed(raw: dict[str, Any]) -> tuple[Config, list[str]]:
    """A composed plain dict as a Config, with every unknown key and wrong type as a problem (that key keeps its default)."""
    problems: list[str] = []
    schema = OmegaConf.structured(Config)
    for path in ENGINE_PATHS:
        raw = _type_engine(path, raw, schema, problems)
    for path, value in _leaves(raw, schema):
        parent, _, key = path.rpartition(".")
        node = OmegaConf.select(schema, parent) if parent else schema
        if (
            not isinstance(node, DictConfig)
            or (OmegaConf.is_struct(node) or is_dataclass(OmegaConf.get_type(node)))
            and key not in node
        ):
            known = list(node) if isinstance(node, DictConfig) else []
            problems.append(f"{path}: unknown key{closest(key, known)} - set one of {', '.join(map(str, known))}")
            continue
        if value == MISSING:
            problems.append(f"{path}: has no value ({MISSING}) - set a {_type_name(node, key)}")
            continue
        try:
            node[key] = value
        except OmegaConfBaseException as error:
            problems.append(f"{path}: {str(error).splitlines()[0]} - set a {_type_name(node, key)}")
    config: Any = OmegaConf.to_object(schema)
    return config, problems


def _type_engine(path: str, raw: dict[str, Any], schema: DictConfig, problems: list[str]) -> dict[str, Any]:
    """Gives the section at `path` the dataclass of its backend; `raw`, without the section where it is none.

    What all engines understand, a role's own section takes from the actor's where it says nothing itself."""
    *parents, key = path.split(".")
    section: Any = raw
    for parent in parents:
        section = section.get(parent) if isinstance(section.get(parent), dict) else {}
    engine = section.get(key, None if parents else {})
    if engine is None and parents:
        return raw

    def changed(section: dict[str, Any]) -> dict[str, Any]:
        return {**raw, parents[0]: section} if parents else section

    without = {name: value for name, value in section.items() if name != key}
    if not isinstance(engine, dict):
        problems.append(f"{path}: {engine} is no section of keys - set {path}.backend and what else it needs")
        return changed(without)
    if parents and isinstance(raw.get("engine"), dict):
        common = {field.name for field in fields(EngineConfig)}
        engine = {name: value for name, value in raw["engine"].items() if name in common} | engine
    backend = engine.get("backend", "fsdp")
    if wrong := engine_error(backend):
        known = [*resolve(REGISTRY, {}).backends(), "module:Class"]
        own = isinstance(backend, str) and ":" in backend
        problems.append(
            f"{path}.backend: {wrong} - set one of {', '.join(known)}" if own else unknown(f"{path}.backend", backend, known)
        )
        return changed(without)
    OmegaConf.update(schema, path, OmegaConf.structured(engine_module(backend).Config), merge=False, force_add=True)
    return changed({**section, key: engine})


def _leaves(raw: dict[str, Any], schema: DictConfig, prefix: str = ""):
    """(path, value) of every setting; a free-form dict (keyword arguments) is one setting."""
    for key, value in raw.items():
        path = f"{prefix}{key}"
        inner = OmegaConf.select(schema, path)
        if isinstance(value, dict) and isinstance(inner, DictConfig) and is_dataclass(OmegaConf.get_type(inner)):
            yield from _leaves(value, schema, path + ".")
        else:
            yield path, value


def _type_name(node: DictConfig, key: str) -> str:
    return str(get_type_hints(OmegaConf.get_type(node))[key]).replace("<class '", "").replace("'>", "")


def unknown(path: str, value: Any, allowed: Iterable[str]) -> str:
    return f"{path}: '{value}' is unknown{closest(value, allowed)} - set one of {', '.join(allowed)}"


def updates_per_step(algorithm: AlgorithmConfig) -> int:
    return algorithm.epochs * algorithm.num_mini_batches


def total_updates(config: Config, role: str) -> int:
    """Optimizer steps of a role in the whole run; the actor makes none while the critic warms up."""
    steps = config.trainer.total_steps - (config.critic.warmup_steps if role == "actor" else 0)
    return steps * updates_per_step(config.algorithm)


def validate(config: Config, world_size: int, local_world_size: int | None = None) -> list[str]:
    """Every problem of a resolved configuration, one line each: `field path: what is wrong (values) - what to set`.

    `local_world_size`: ranks of a node; None: the world is one node. Needs no process group and no model."""
    placement, problems = parse_placement(config, world_size, local_world_size)
    if config.trainer.lookahead and placement.get("rollout") == placement.get("actor"):
        problems.append(
            "trainer.lookahead: 1 overlaps nothing where actor and rollout share their ranks - set 0, or placement=split"
        )
    problems += _value_problems(config) + _rollout_problems(config)
    if all(engine_module(engine_of(config, role).backend) for role in placement):
        for role, ranks in placement.items():
            width = replica_width(config, role)
            if role == "rollout" and (width < 1 or len(ranks) % width):
                problems.append(
                    f"rollout.tensor_parallel_size: {len(ranks)} ranks are no multiple of {width}, the ranks of a replica - "
                    f"set a divisor of {len(ranks)}"
                )
            elif role == "rollout":
                problems += tensor_parallel_problems(ranks, width, local_world_size or world_size)
        problems += engine_problems(config, placement)
        problems += _batch_problems(config, {role: len(r) // max(1, replica_width(config, role)) for role, r in placement.items()})
    for family, section in (("rewards", config.reward), ("environments", config.environment)):
        problems += resolve(f"spmd_rl.{family}:problems", {})(section)
    return problems


def _rollout_problems(config: Config) -> list[str]:
    """What the rollout cannot do: of the backend, and what would bias its samples."""
    rollout, found = config.rollout, []
    if rollout.top_p != 1 or rollout.top_k != 0:
        found.append(
            f"rollout.top_p, rollout.top_k: {rollout.top_p} and {rollout.top_k} cut the distribution that is trained - set 1 and 0"
        )
    if rollout.max_logprob_diff and rollout.min_response_tokens:
        found.append(
            f"rollout.max_logprob_diff: {rollout.max_logprob_diff} with rollout.min_response_tokens={rollout.min_response_tokens}, "
            f"which takes stop ids out of the rollout's distribution only - set one of them to 0"
        )
    if "environment" in config.reward.functions and not config.environment.name:
        found.append("reward.functions.environment: there is no environment - set environment.name, or remove it")
    if config.environment.name and (rollout.max_step_tokens or rollout.max_step_seconds):
        found.append(
            "rollout.max_step_tokens, rollout.max_step_seconds: an environment's episode cannot be kept for the next step - set 0"
        )
    if rollout.max_model_len is not None and rollout.max_model_len <= rollout.max_response_tokens:
        found.append(
            f"rollout.max_model_len: {rollout.max_model_len} leaves no room for a prompt beside rollout.max_response_tokens "
            f"({rollout.max_response_tokens}) - set {config.data.max_prompt_tokens + rollout.max_response_tokens}"
        )
    if (config.engine.backend, rollout.backend) == ("veomni", "vllm"):
        found.append(
            "rollout.backend: vllm needs transformers 5.16 to 5.19, engine.backend=veomni needs 5.9: no interpreter has both - "
            "set rollout=hf, or engine=fsdp"
        )
    module = ROLLOUTS.get(rollout.backend, rollout.backend).partition(":")[0]
    try:
        found += resolve(f"{module}:problems", {})(rollout, config.trainer.device)
    except (ValueError, ImportError):
        pass  # an unknown name is reported with the other names; a backend of one's own need not have problems
    return found


def _value_problems(config: Config) -> list[str]:
    """Names, ranges of single values, and values that exclude each other."""
    problems = []
    tables = {
        "algorithm.advantage": ADVANTAGES,
        "algorithm.policy_loss": POLICY_LOSSES,
        "rollout.backend": ROLLOUTS,
    }
    for path, table in tables.items():
        name = _get(config, path)
        try:
            resolve(name, table)
        except (ValueError, ImportError) as error:
            problems.append(
                f"{path}: {error} - correct it, or put its module on PYTHONPATH"
                if ":" in name or name in table
                else unknown(path, name, [*table, "module:attribute"])
            )
    return problems + _range_problems(config) + _pair_problems(config) + _kl_problems(config) + _critic_problems(config)


def _range_problems(config: Config) -> list[str]:
    """Values that are none of those allowed, and numbers that are too small."""
    problems = []
    choices = {
        "data.over_long": ("error", "drop", "truncate"),
        "rollout.dtype": DTYPES,
        "optimizer.schedule": SCHEDULES,
        "critic.optimizer.schedule": SCHEDULES,
        "algorithm.aggregation": AGGREGATIONS,
        "algorithm.kl_type": ("auto", "k1", "k2", "k3"),
        "algorithm.rollout_correction": CORRECTIONS[1:],
        "trainer.device": ("cpu", "cuda"),
        "logger.wandb_mode": ("offline", "online", "disabled"),
    }
    engines = [path for path in ENGINE_PATHS if _get(config, path) is not None]
    choices |= {f"{path}.dtype": DTYPES for path in engines}
    choices |= {f"{path}.matmul_precision": ("highest", "high", "medium") for path in engines}
    for path, allowed in choices.items():
        if (value := _get(config, path)) not in allowed:
            problems.append(unknown(path, value, allowed))
    at_least = {
        1: "data.prompts_per_step data.max_prompt_tokens rollout.n rollout.max_response_tokens rollout.max_batch_rows "
        "rollout.tensor_parallel_size rollout.block_size algorithm.epochs algorithm.num_mini_batches "
        "trainer.total_steps trainer.val_n algorithm.rollout_correction_cap timeouts.collective "
        "timeouts.phase debug.ledger_timeout",
        0: "rollout.temperature rollout.min_response_tokens optimizer.warmup_steps optimizer.weight_decay "
        "optimizer.learning_rate optimizer.clip_grad_norm trainer.save_every trainer.eval_every trainer.keep trainer.seed "
        "trainer.sample_rows trainer.min_free_gb rollout.max_logprob_diff rollout.max_step_tokens rollout.max_step_seconds "
        "algorithm.kl_coef algorithm.clip_ratio algorithm.gamma algorithm.lam critic.warmup_steps critic.optimizer.warmup_steps "
        "critic.optimizer.learning_rate critic.optimizer.weight_decay critic.optimizer.clip_grad_norm",
    }  # fmt: skip
    chunks = [f"{path}.logprob_chunk" for path in engines]
    for least, paths in at_least.items():
        problems += [
            f"{p}: {_get(config, p)} is too small - set at least {least}"
            for p in (*paths.split(), *(chunks if least else ()))
            if _get(config, p) < least
        ]
    return problems


def _pair_problems(config: Config) -> list[str]:
    """Single values that cannot train, and values that exclude each other."""
    problems = []
    if config.rollout.temperature == 0:
        problems.append("rollout.temperature: 0 draws the same sample n times - set a positive temperature to train")
    if config.rollout.min_response_tokens > config.rollout.max_response_tokens:
        problems.append(
            f"rollout.min_response_tokens: {config.rollout.min_response_tokens} is over rollout.max_response_tokens "
            f"({config.rollout.max_response_tokens}) - lower it"
        )
    if config.algorithm.aggregation == "seq-mean-token-sum-norm" and not config.algorithm.aggregation_length:
        problems.append("algorithm.aggregation_length: seq-mean-token-sum-norm divides by it - set a length in tokens")
    if config.trainer.lookahead not in (0, 1):
        problems.append(f"trainer.lookahead: {config.trainer.lookahead} - set 0, or 1")
    roles = {"actor": ("optimizer", config.optimizer), "critic": ("critic.optimizer", config.critic.optimizer)}
    for path, optimizer, total in (
        (*found, total_updates(config, role)) for role, found in roles.items() if role in needed_roles(config)
    ):
        if optimizer.total_steps is None and optimizer.warmup_steps > max(0, total):
            problems.append(f"{path}.warmup_steps: {optimizer.warmup_steps} is over the {total} updates of the run - lower it")
    return problems


def _kl_problems(config: Config) -> list[str]:
    """KL settings that exclude each other or do nothing."""
    algorithm, problems = config.algorithm, []
    samples = config.data.prompts_per_step * config.rollout.n
    if algorithm.kl_in_reward and algorithm.kl_coef == 0:
        problems.append("algorithm.kl_in_reward: there is no KL to subtract (algorithm.kl_coef=0) - set a coefficient, or false")
    if algorithm.kl_type == "k1" and algorithm.kl_coef > 0 and not algorithm.kl_in_reward:
        problems.append(
            "algorithm.kl_type: k1 in the loss has a gradient that is 0 on average - set k2 or k3, or algorithm.kl_in_reward=true"
        )
    if config.ref.engine is not None and "ref" not in needed_roles(config):
        problems.append("ref.engine: there is no reference (algorithm.kl_coef=0) - set a coefficient, or leave it out")
    if (target := algorithm.kl_target) is None:
        return problems
    if target <= 0:
        problems.append(f"algorithm.kl_target: {target} nats a sample cannot be reached - set more than 0, or null")
    if algorithm.kl_coef == 0:
        problems.append("algorithm.kl_target: a coefficient of 0 stays 0 (algorithm.kl_coef=0) - set its first value")
    if algorithm.kl_horizon <= MAX_ERROR * samples:
        problems.append(
            f"algorithm.kl_horizon: {algorithm.kl_horizon} lets a step of {samples} samples take the coefficient to 0 or below - "
            f"set more than {MAX_ERROR * samples:g}, better {samples} or more"
        )
    return problems


def _critic_problems(config: Config) -> list[str]:
    """Settings of values and of the critic that cannot train, or that nobody reads."""
    algorithm, critic, problems = config.algorithm, config.critic, []
    for key, value in (("gamma", algorithm.gamma), ("lam", algorithm.lam)):
        if value > 1:
            problems.append(f"algorithm.{key}: {value} lets later rewards weigh more than near ones - set at most 1")
    if algorithm.value_clip is not None and algorithm.value_clip <= 0:
        problems.append(f"algorithm.value_clip: {algorithm.value_clip} keeps values where they are - set more than 0, or null")
    if "critic" not in needed_roles(config):
        unread = {"path": critic.path, "warmup_steps": critic.warmup_steps, "engine": critic.engine and critic.engine.backend}
        return problems + [
            f"critic.{key}: {value}, but there is no critic (algorithm.advantage={algorithm.advantage}) - "
            f"set algorithm=ppo, or leave it out"
            for key, value in unread.items()
            if value
        ]
    if critic.warmup_steps >= config.trainer.total_steps:
        problems.append(
            f"critic.warmup_steps: {critic.warmup_steps} of {config.trainer.total_steps} steps (trainer.total_steps) leave none in "
            f"which the actor trains - lower it"
        )
    return problems


def _batch_problems(config: Config, replicas: dict[str, int]) -> list[str]:
    """The batch arithmetic, with the nearest values that work."""
    prompts, n, minis = config.data.prompts_per_step, config.rollout.n, config.algorithm.num_mini_batches
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    shown = f"{prompts} prompts x {n} samples a step, {minis} mini-batches, {replicas.get('actor')} data-parallel replicas"
    problems = []
    if minis > 0 and prompts % minis:
        least = minis * max(replicas.values(), default=1)
        near = sorted({max(least, prompts // minis * minis), max(least, -(-prompts // minis) * minis)})
        problems.append(f"data.prompts_per_step: {shown}: {minis} does not divide {prompts} - set {' or '.join(map(str, near))}")
    for role, count in replicas.items():
        if minis > 0 and prompts // minis < count:
            problems.append(
                f"data.prompts_per_step: {shown}: a mini-batch of {prompts // minis} prompts leaves some of the {count} replicas "
                f"of {role} without work - set at least {count * minis}"
            )
    for path in ENGINE_PATHS:
        if _get(config, path) is not None and (budget := _get(config, path).max_tokens_per_micro_batch) < longest:
            problems.append(
                f"{path}.max_tokens_per_micro_batch: {budget} is less than data.max_prompt_tokens + rollout.max_response_tokens "
                f"({config.data.max_prompt_tokens} + {config.rollout.max_response_tokens}) - set at least {longest}"
            )
    if n == 1 and config.algorithm.advantage in ("grpo", "rloo"):
        problems.append(
            f"rollout.n: {config.algorithm.advantage} compares the samples of a prompt, and there is 1 - set at least 2"
        )
    return problems


def _get(config: Config, path: str) -> Any:
    value: Any = config
    for key in path.split("."):
        value = vars(value)[key]
    return value
