"""The entry: compose -> validate -> split_world -> assemble -> fit.

torchrun --nproc-per-node 8 -m spmd_rl.train algorithm=grpo trainer.total_steps=100
srun python -m spmd_rl.train ...        # the same, without torchrun
python -m spmd_rl.train ...             # one process
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import sys
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from transformers import AutoTokenizer, GenerationConfig
from transformers.utils import logging as transformers_logging

from spmd_rl.batch import Sampling
from spmd_rl.collectives import compare_ledgers, gather_objects
from spmd_rl.config import Config, ConfigError, TimeoutConfig, TrainerConfig
from spmd_rl.data import PromptSource, chat_tokens, observation_tokens
from spmd_rl.engine.half import cpu_has_bf16
from spmd_rl.engines import engine_problems, replica_width
from spmd_rl.launch import AbortWatch, Launch, detect_launch
from spmd_rl.mesh import Role, World, close_world, describe, open_store, split_world
from spmd_rl.metrics import make_writers
from spmd_rl.models import check_torchvision, resolve_model
from spmd_rl.placement import Ranks, parse_placement
from spmd_rl.rewards import RewardPool
from spmd_rl.rewards import problems as reward_problems
from spmd_rl.roles.actor_rollout_ref import ActorRolloutRefWorker
from spmd_rl.roles.dialogue import EnvironmentDialogue
from spmd_rl.roles.generation import RolloutModel
from spmd_rl.scoring import Scorer
from spmd_rl.trainer import RLTrainer
from spmd_rl.validation import typed, unknown, validate

FREE_FORM = ("reward.functions", "reward.kwargs", "data.train_kwargs", "data.val_kwargs", "data.chat_template_kwargs")
CONFIG_ERROR = 2  # exit code, and `code` in the run's status.json


def config_folder() -> Path:
    """`conf/`: inside an installed package, beside it in a checkout."""
    inside = Path(__file__).parent / "conf"
    return inside if inside.is_dir() else Path(__file__).parent.parent / "conf"


def groups(*folders: Path) -> dict[str, list[str]]:
    """The Hydra groups of these folders, and the choices of each."""
    found: dict[str, set[str]] = {}
    for path in (p for folder in folders for p in folder.glob("*/*.yaml")):
        found.setdefault(path.parent.name, set()).add(path.stem)
    return {name: sorted(choices) for name, choices in sorted(found.items())}


def compose_config(name: str, folder: Path | None, overrides: list[str]) -> tuple[Config, list[str]]:
    """The typed configuration with `auto` values resolved for this machine, and what is wrong with its keys and types.

    `folder`: the user's own configs; ours stay on Hydra's search path. Raises ConfigError when it cannot be composed."""
    ours = config_folder()
    known = groups(ours, *([folder] if folder else []))
    changes = [f"hydra.searchpath=[file://{ours}]"] if folder else []
    wrong, whole = [], {}
    for override in overrides:
        key, _, choice = override.partition("=")
        if key in FREE_FORM and choice.startswith("{"):  # replaced as a whole, where Hydra would merge; plain YAML
            whole[key] = choice
            continue
        if re.fullmatch(r"[\w.-]+", choice) and choice not in known.get(key, [choice]):
            wrong.append(unknown(key, choice, known[key]))
        plain = key.split("@")[0] not in known and override[:1] not in "+~"
        changes.append("++" + override if plain else override)  # an unknown key is for `typed` to name
    if wrong:
        raise ConfigError("\n".join(wrong))
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str((folder or ours).resolve()), version_base=None):
            raw = OmegaConf.to_container(compose(name, overrides=changes), resolve=True)
        for key, text in whole.items():
            section, _, field = key.partition(".")
            raw.setdefault(section, {})[field] = mapping(text)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        what = " ".join(str(error).partition("Config search path")[0].split())
        raise ConfigError(f"config: {what} - see --help for the groups and their choices") from error
    config, problems = typed(raw)
    return resolve_auto(config), problems


def mapping(text: str) -> dict[str, Any]:
    """`{name: value}` as YAML, whose names may hold a colon, or in Hydra's own spelling `{name:value}`."""
    found: Any = yaml.safe_load(text)
    if None in found.values():
        found = OverridesParser.create().parse_override(f"x={text}").value()
    return found


def resolve_auto(config: Config) -> Config:
    """`auto` replaced by what this machine has."""
    device = config.trainer.device
    if device == "auto":
        device = "cuda" if torch.cuda.device_count() else "cpu"  # is_available() would fix which devices CUDA shows

    def chosen(engine: Any) -> Any:
        auto = engine is not None and engine.dtype == "auto"
        return replace(engine, dtype="bfloat16" if device == "cuda" else "float32") if auto else engine

    dtype = chosen(config.engine).dtype
    given = config.rollout
    sampled = dtype if given.dtype == "auto" else given.dtype
    exact = device == "cpu" and dtype == sampled == "float32" and not given.min_response_tokens
    rollout = replace(
        given,
        dtype=sampled,
        max_model_len=given.max_model_len or config.data.max_prompt_tokens + given.max_response_tokens,
        max_logprob_diff=(1e-3 if exact else 0.0) if given.max_logprob_diff is None else given.max_logprob_diff,
    )
    correction = config.algorithm.rollout_correction
    if correction == "auto":
        stale = config.trainer.lookahead or given.max_step_tokens or given.max_step_seconds
        correction = "off" if sampled == "float32" and not stale else "token-truncate"
    return replace(
        config,
        trainer=replace(config.trainer, device=device),
        engine=chosen(config.engine),
        ref=replace(config.ref, engine=chosen(config.ref.engine)),
        critic=replace(config.critic, engine=chosen(config.critic.engine)),
        rollout=rollout,
        algorithm=replace(config.algorithm, rollout_correction=correction),
    )


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser("spmd_rl.train", description="RL post-training in one SPMD program.", add_help=False)
    out.add_argument("overrides", nargs="*", help="key=value, or group=choice")
    out.add_argument("--config-name", default="train", help="a file of the config folder, without .yaml")
    out.add_argument("--config-dir", type=Path, help="your own config folder; ours stays available behind it")
    out.add_argument("--cfg", choices=["job"], help="print the composed configuration and exit")
    out.add_argument("--help", "-h", action="store_true", help="print this, the groups and every key, and exit")
    return out


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        launch = detect_launch()
    except ValueError as error:
        if os.environ.get("SLURM_PROCID", "0") == "0":
            sys.stderr.write(f"[spmd_rl] {error}\n")
        return CONFIG_ERROR
    try:
        config, problems = compose_config(args.config_name, args.config_dir, args.overrides)
    except ConfigError as error:
        named = [o.removeprefix("trainer.run_dir=") for o in args.overrides if o.startswith("trainer.run_dir=")]
        return refuse(Path([TrainerConfig().run_dir, *named][-1]), launch, [str(error)])
    if args.help or args.cfg:
        show(args, config, launch)
        return 0
    run_dir = Path(config.trainer.run_dir)
    problems += validate(config, launch.world_size, launch.local_world_size)
    if message := check_torchvision():
        problems.append(message)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problems.append(f"trainer.run_dir: cannot be made ({error}) - set a folder that can be written")
    if problems:
        return refuse(run_dir, launch, problems)
    transformers_logging.disable_progress_bar()
    return run(config, launch, run_dir)


def show(args: argparse.Namespace, config: Config, launch: Launch) -> None:
    if launch.rank:
        return
    if args.help:
        print(parser().format_help())
        print("groups (group=choice):")
        for name, choices in groups(config_folder(), *([args.config_dir] if args.config_dir else [])).items():
            print(f"  {name}: {', '.join(choices)}")
        print("\nevery key, as composed (key=value; docs/configuration.md says what each means):\n")
    print(OmegaConf.to_yaml(OmegaConf.create(asdict(config))))


def refuse(run_dir: Path, launch: Launch, problems: list[str]) -> int:
    """Shows every problem once for the whole job; every rank ends with the same code."""
    lines = "\n".join(f"  {line}" for problem in problems for line in problem.splitlines())
    text = f"[spmd_rl] the configuration cannot run ({launch}):\n{lines}\n"
    if launch.rank == 0:
        sys.stderr.write(text)
        with suppress(OSError):  # the folder may be the problem
            write_status(run_dir, CONFIG_ERROR, "configuration", problems=problems)
    if not all_refuse(launch) and launch.rank:
        sys.stderr.write(text)  # rank 0 does not know
    return CONFIG_ERROR


def all_refuse(launch: Launch, seconds: float = 60.0) -> bool:
    """Whether every rank comes here in time: a launcher ends the others once one has left, also rank 0 before it spoke."""
    if launch.world_size == 1:
        return True
    try:
        store = open_store(launch, TimeoutConfig(collective=seconds))
        if store.add("refused", 1) == launch.world_size:
            store.set("refused/all", "")
        store.wait(["refused/all"])
    except RuntimeError:
        return False
    return True


def write_status(run_dir: Path, code: int, state: str, **more: Any) -> None:
    """`status.json`: torchrun loses exit codes, this file keeps the last one."""
    run_dir.mkdir(parents=True, exist_ok=True)
    partial = run_dir / f"status.json.{os.getpid()}"
    partial.write_text(json.dumps({"code": code, "state": state, **more}, indent=1))
    partial.rename(run_dir / "status.json")


class Parts:
    """What every rank makes alike: model files, tokenizer, data.

    Raises ValueError, ImportError or OSError: what the user has to mend."""

    def __init__(self, config: Config, placement: dict[str, Ranks]):
        folder = resolve_model(config.model.path)
        self.tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=config.model.trust_remote_code)
        eos = GenerationConfig.from_pretrained(folder).eos_token_id if (Path(folder) / "generation_config.json").exists() else None
        ids = {self.tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])} - {None}
        folders = {role: resolve_model(config.critic.path or folder) if role == "critic" else folder for role in placement}
        models = {role: json.loads((Path(where) / "config.json").read_text()) for role, where in folders.items()}
        if found := engine_problems(config, placement, models):
            raise ValueError("\n".join(found))
        heads = models["rollout"].get("num_attention_heads", 1)
        if heads % config.rollout.tensor_parallel_size:
            fits = [n for n in range(1, heads + 1) if heads % n == 0]
            raise ValueError(
                f"rollout.tensor_parallel_size: {config.rollout.tensor_parallel_size} does not divide the model's {heads} "
                f"attention heads - set one of {fits}"
            )
        data, seed = config.data, config.trainer.seed
        self.train = PromptSource(data, data.train, data.train_kwargs, self.tokenizer, seed)
        self.model = RolloutModel(folder, tuple(sorted(ids)), config.model.trust_remote_code, self.train.probe())
        self.val = PromptSource(data, data.val, data.val_kwargs, self.tokenizer, seed) if data.val else None
        template = config.data.chat_template_kwargs
        self.render = partial(chat_tokens, self.tokenizer, template)
        self.observe = None
        if config.environment.name:
            stops = {*ids, *config.rollout.stop_token_ids}
            self.observe = observation_tokens(self.tokenizer, config.environment.role, template, stops)
        sources = {"data.train": self.train, "data.val": self.val}
        found = [f"{p} ({key})" for key, source in sources.items() if source for p in reward_problems(config.reward, source.rows)]
        if found:
            raise ValueError("\n".join(found))

    def decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def dialogue(self, config: Config, world: World) -> EnvironmentDialogue | None:
        mesh = world.meshes["rollout"]
        if not self.observe or not mesh.here:
            return None
        rows = {"train": self.train.rows, "validation": self.val.rows if self.val else []}
        longest = config.data.max_prompt_tokens
        return EnvironmentDialogue(config.environment, mesh, rows, longest, self.decode, self.observe, self.render)


def run(config: Config, launch: Launch, run_dir: Path) -> int:
    """Collective over every rank; the exit code. Where a rank fails, the processes of all end here."""
    store = open_store(launch, config.timeouts)
    watch = AbortWatch(lambda: open_store(launch, config.timeouts), launch.rank) if launch.world_size > 1 else None
    try:
        code = job(config, launch, store, run_dir)
    except BaseException as error:
        first = watch.report(error) if watch else True
        if first:
            write_status(run_dir, 1, "failed", rank=launch.rank, error=f"{type(error).__name__}: {error}")
        if not watch:
            raise
        watch.leave(first)
    if watch:
        watch.close()
    return code


def job(config: Config, launch: Launch, store: Any, run_dir: Path) -> int:
    """Collective over every rank; the exit code."""
    parts, problem = None, None
    placement, _ = parse_placement(config, launch.world_size, launch.local_world_size)
    try:
        parts = Parts(config, placement)
    except (ValueError, ImportError, OSError) as error:
        problem = str(error)
    if problems := shared_problems(problem, launch, store):
        return refuse(run_dir, launch, problems)
    roles = {name: Role(ranks, len(ranks) // replica_width(config, name)) for name, ranks in placement.items()}
    world = split_world(roles, launch, store, config.trainer.device, config.timeouts)
    try:
        steps = fit(config, launch, world, parts, run_dir)
    except ConfigError as error:  # every rank raises it: what cannot be resumed
        problems = [str(error)]
    close_world(world)
    if problems:
        return refuse(run_dir, launch, problems)
    if launch.rank == 0:
        write_status(run_dir, 0, "done" if steps == config.trainer.total_steps else "stopped", steps=steps)
    return 0


def shared_problems(problem: str | None, launch: Launch, store: Any) -> list[str]:
    """Collective over every rank, before any process group exists: what any rank lacks, each thing once.

    Where not all ranks lack it, the first that does is named."""
    if problem is not None:
        store.set(f"prepare/{store.add('prepare/failed', 1)}", json.dumps([launch.rank, problem]))
    if store.add("prepare/done", 1) == launch.world_size:
        store.set("prepare/all", "")
    store.wait(["prepare/all"])
    ranks: dict[str, list[int]] = {}
    for rank, text in sorted(json.loads(store.get(f"prepare/{i + 1}")) for i in range(store.add("prepare/failed", 0))):
        ranks.setdefault(text, []).append(rank)
    return [text if len(who) == launch.world_size else f"rank {who[0]}: {text}" for text, who in ranks.items()]


def fit(config: Config, launch: Launch, world: World, parts: Parts, run_dir: Path) -> int:
    """Collective over the world: makes the roles and trains; the number of steps done."""
    compare_ledgers(world if config.debug.ledger else None, config.debug.ledger_timeout)
    introduce(config, launch, world, parts, run_dir)
    roles = ActorRolloutRefWorker(config, world, parts.model, parts.dialogue(config, world))
    pool, decode = RewardPool(config.reward), parts.decode
    rollout = config.rollout
    sampling = Sampling(
        rollout.temperature,
        rollout.n,
        rollout.min_response_tokens,
        rollout.max_response_tokens,
        tuple(sorted({*parts.model.eos_ids, *rollout.stop_token_ids})),
    )
    trainer = RLTrainer(
        config,
        world,
        roles,
        parts.train,
        Scorer(config.reward, pool, parts.train, decode, ""),
        parts.val and (parts.val, Scorer(config.reward, pool, parts.val, decode, "val/")),
        sampling,
    )
    try:
        steps = trainer.fit(lambda start: writers(config, launch, run_dir, start))
        roles.rollout.shutdown()
        return steps
    finally:
        pool.close()


def writers(config: Config, launch: Launch, run_dir: Path, start: int) -> list:
    """Rank 0 writes, from here on; the others have no writers. `start`: steps already in the files."""
    if launch.rank:
        return []
    (run_dir / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(asdict(config))))
    write_status(run_dir, -1, "running")
    return make_writers(config.logger, run_dir, config.trainer.total_steps, start + 1 if start else 0, asdict(config))


def introduce(config: Config, launch: Launch, world: World, parts: Parts, run_dir: Path) -> None:
    """Collective over the world: what starts where, printed once."""
    hosts = gather_objects(socket.gethostname(), world.control, "hosts")
    if launch.rank:
        return
    print(f"[spmd_rl] {launch}; {config.trainer.device}, {config.engine.backend} in {config.engine.dtype}; run folder {run_dir}")
    if config.trainer.device == "cpu" and "bfloat16" in (config.engine.dtype, config.rollout.dtype) and not cpu_has_bf16():
        print("[spmd_rl] this CPU has no bfloat16 instructions: float32 is faster here (engine.dtype=float32)")
    for line in describe(world.meshes, hosts):
        print(f"[spmd_rl] {line}")
    for source in filter(None, (parts.train, parts.val)):
        print(f"[spmd_rl] {source.describe()}")
    print(f"[spmd_rl] reward: {' + '.join(f'{weight} x {name}' for name, weight in config.reward.functions.items())}")


if __name__ == "__main__":
    sys.exit(main())
