"""What can be said of a configuration before any process group or model exists: all problems at once. Imports no torch.

Each problem is one line: `field path: what is wrong (values) - what to set`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import is_dataclass
from typing import Any, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from spmd_rl.config import (
    ADVANTAGES,
    AGGREGATIONS,
    CORRECTIONS,
    DTYPES,
    POLICY_LOSSES,
    REGISTRY,
    ROLES,
    ROLLOUTS,
    SCHEDULES,
    AlgorithmConfig,
    Config,
    closest,
    resolve,
)

MISSING = "???"  # Hydra's mark of a value that the user must give


def typed(raw: dict[str, Any]) -> tuple[Config, list[str]]:
    """A composed plain dict as a Config, with every unknown key and wrong type as a problem (that key keeps its default)."""
    problems: list[str] = []
    schema = OmegaConf.structured(Config)
    engines = resolve(REGISTRY, {})
    engine = raw.get("engine", {})
    if not isinstance(engine, dict):
        problems.append(f"engine: {engine} is no section of keys - set engine.backend and what else it needs")
        raw = {key: value for key, value in raw.items() if key != "engine"}
        engine = {}
    backend = engine.get("backend", "fsdp")
    if (module := _engine_module(backend)) is not None:
        schema.engine = OmegaConf.structured(module.Config)
    else:
        problems.append(unknown("engine.backend", backend, [*engines.backends(), "module:Class"]))
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


def needed_roles(config: Config) -> list[str]:
    """actor and rollout always; ref where a KL term asks for it; critic where advantages need values."""
    needs = {"ref": config.algorithm.kl_coef != 0, "critic": config.algorithm.advantage == "gae"}
    return [role for role in ROLES if needs.get(role, True)]


def updates_per_step(algorithm: AlgorithmConfig) -> int:
    return algorithm.epochs * algorithm.num_mini_batches


def parse_ranks(spec: str, world_size: int) -> tuple[int, ...]:
    """`all`, `0-3`, `0,2,5` or mixtures `0-2,6`, as ascending ranks. Raises ValueError."""
    if spec == "all":
        return tuple(range(world_size))
    ranks: list[int] = []
    for part in str(spec).split(","):
        first, _, last = part.strip().partition("-")
        if not first.isdigit() or (last and not last.isdigit()):
            raise ValueError(f"'{spec}' is no set of ranks - set 'all', a range '0-3', a list '0,2' or a role's name")
        ranks += range(int(first), int(last or first) + 1)
    return tuple(sorted(ranks))


def parse_placement(config: Config, world_size: int) -> tuple[dict[str, tuple[int, ...]], list[str]]:
    """World ranks of every needed role, and what is wrong with `placement`."""
    placement, problems = {}, []
    for role in needed_roles(config):
        spec, seen = vars(config.placement)[role], [role]
        while spec in ROLES and spec not in seen:
            seen.append(spec)
            spec = vars(config.placement)[spec]
        if spec in ROLES:
            problems.append(
                f"placement.{role}: {' -> '.join([*seen, spec])} names no ranks - set 'all', '0-3' or '0,2' for one of them"
            )
            continue
        try:
            placement[role] = parse_ranks(spec, world_size)
        except ValueError as error:
            problems.append(f"placement.{role}: {error}")
    return placement, problems or placement_problems(placement, world_size)


def placement_problems(placement: dict[str, tuple[int, ...]], world_size: int) -> list[str]:
    """Every rank has a role; two roles share all of their ranks or none; ranks exist and are named once."""
    problems = []
    for role, ranks in placement.items():
        if outside := [r for r in ranks if r >= world_size]:
            problems.append(f"placement.{role}: ranks {outside} do not exist ({world_size} ranks) - set ranks below {world_size}")
        if len(set(ranks)) < len(ranks) or not ranks:
            problems.append(f"placement.{role}: {list(ranks)} is empty or names a rank twice - name each rank once")
    names = list(placement)
    for i, one in enumerate(names):
        for other in names[i + 1 :]:
            a, b = set(placement[one]), set(placement[other])
            if a != b and a & b:
                problems.append(
                    f"placement.{one}, placement.{other}: {sorted(a)} and {sorted(b)} share ranks {sorted(a & b)} but not all - "
                    f"give both the same ranks, or none in common"
                )
    if idle := set(range(world_size)) - {r for ranks in placement.values() for r in ranks}:
        problems.append(f"placement: ranks {sorted(idle)} have no role ({world_size} ranks) - give each a role, or start fewer")
    return problems


def _engine_module(backend: str) -> Any:
    """The module of an engine, or None for a name that leads to none."""
    try:
        return resolve(REGISTRY, {}).module(backend)
    except ValueError:
        return None


def replica_width(config: Config, role: str) -> int:
    """Ranks that work on the same rows of a role."""
    if role == "rollout":
        return config.rollout.tensor_parallel_size
    return resolve(REGISTRY, {}).module(config.engine.backend).replica_width(config.engine)


def validate(config: Config, world_size: int) -> list[str]:
    """Every problem of a resolved configuration, one line each: `field path: what is wrong (values) - what to set`.

    Needs no process group and no model."""
    placement, problems = parse_placement(config, world_size)
    if config.trainer.lookahead and placement.get("rollout") == placement.get("actor"):
        problems.append(
            "trainer.lookahead: 1 overlaps nothing where actor and rollout share their ranks - set 0, or placement=split"
        )
    problems += _value_problems(config) + _rollout_problems(config)
    if (module := _engine_module(config.engine.backend)) is not None:
        for role, ranks in placement.items():
            width = replica_width(config, role)
            if width < 1 or len(ranks) % width:
                key = "rollout.tensor_parallel_size" if role == "rollout" else f"placement.{role}"
                problems.append(f"{key}: {len(ranks)} ranks are no multiple of {width}, the ranks of a replica of {role}")
            elif role != "rollout":
                problems += [p for p in module.problems(config.engine, len(ranks)) if p not in problems]
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
    return problems + _range_problems(config) + _pair_problems(config)


def _range_problems(config: Config) -> list[str]:
    """Values that are none of those allowed, and numbers that are too small."""
    problems = []
    choices = {
        "data.over_long": ("error", "drop", "truncate"),
        "engine.dtype": DTYPES,
        "rollout.dtype": DTYPES,
        "engine.matmul_precision": ("highest", "high", "medium"),
        "optimizer.schedule": SCHEDULES,
        "critic.optimizer.schedule": SCHEDULES,
        "algorithm.aggregation": AGGREGATIONS,
        "algorithm.kl_type": ("k1", "k2", "k3"),
        "algorithm.rollout_correction": CORRECTIONS[1:],
        "trainer.device": ("cpu", "cuda"),
        "logger.wandb_mode": ("offline", "online", "disabled"),
    }
    for path, allowed in choices.items():
        if (value := _get(config, path)) not in allowed:
            problems.append(unknown(path, value, allowed))
    at_least = {
        1: "data.prompts_per_step data.max_prompt_tokens rollout.n rollout.max_response_tokens rollout.max_batch_rows "
        "rollout.tensor_parallel_size rollout.block_size algorithm.epochs algorithm.num_mini_batches "
        "trainer.total_steps trainer.val_n engine.logprob_chunk algorithm.rollout_correction_cap",
        0: "rollout.temperature rollout.min_response_tokens optimizer.warmup_steps optimizer.weight_decay "
        "optimizer.learning_rate optimizer.clip_grad_norm trainer.save_every trainer.eval_every trainer.keep trainer.seed "
        "trainer.sample_rows trainer.min_free_gb rollout.max_logprob_diff rollout.max_step_tokens rollout.max_step_seconds "
        "algorithm.kl_coef algorithm.clip_ratio critic.optimizer.learning_rate",
    }  # fmt: skip
    for least, paths in at_least.items():
        problems += [
            f"{p}: {_get(config, p)} is too small - set at least {least}" for p in paths.split() if _get(config, p) < least
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
    if config.optimizer.total_steps is None and config.optimizer.warmup_steps > (
        total := config.trainer.total_steps * updates_per_step(config.algorithm)
    ):
        problems.append(
            f"optimizer.warmup_steps: {config.optimizer.warmup_steps} is over the {total} updates of the run - lower it"
        )
    return problems


def _batch_problems(config: Config, replicas: dict[str, int]) -> list[str]:
    """The batch arithmetic, with the nearest values that work."""
    prompts, n, minis = config.data.prompts_per_step, config.rollout.n, config.algorithm.num_mini_batches
    budget, longest = config.engine.max_tokens_per_micro_batch, config.data.max_prompt_tokens + config.rollout.max_response_tokens
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
    if budget < longest:
        problems.append(
            f"engine.max_tokens_per_micro_batch: {budget} is less than data.max_prompt_tokens + rollout.max_response_tokens "
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
