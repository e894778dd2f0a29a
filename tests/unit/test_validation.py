from __future__ import annotations

import re
from dataclasses import replace

import pytest

from spmd_rl.config import (
    AlgorithmConfig,
    Config,
    CriticConfig,
    DataConfig,
    EngineConfig,
    EnvironmentConfig,
    PlacementConfig,
    RefConfig,
    RolloutConfig,
)
from spmd_rl.engine import veomni
from spmd_rl.engine.fsdp import FSDPConfig
from spmd_rl.placement import needed_roles, parse_placement, parse_ranks
from spmd_rl.train import compose_config, config_folder, groups, resolve_auto
from spmd_rl.validation import typed, validate

LINE = re.compile(r"[a-z]\w*([.,] ?\w+)*: .+ - \S.*")  # field path: what is wrong - what to set
READY = {"engine": FSDPConfig(dtype="float32"), "rollout": RolloutConfig(dtype="float32")}


def ready(**sections) -> Config:
    """The default configuration as it is once `auto` is resolved; `hf` is there on every machine."""
    config = Config(**READY | sections)
    rollout = replace(config.rollout, backend="hf") if config.rollout.backend == "vllm" else config.rollout
    return resolve_auto(replace(config, rollout=rollout, trainer=replace(config.trainer, device="cpu")))


def batch(prompts: int, mini_batches: int) -> dict:
    return {"data": DataConfig(prompts_per_step=prompts), "algorithm": AlgorithmConfig(num_mini_batches=mini_batches)}


def found(problems: list[str], *fragments: str) -> list[str]:
    return [line for line in problems if all(fragment in line for fragment in fragments)]


@pytest.mark.parametrize(
    ("raw", "fragments"),
    [
        ({"trainer": {"total_step": 3}}, ["trainer.total_step: unknown key", "did you mean 'total_steps'?", "run_dir"]),
        ({"critic": {"optimizer": {"learning_rat": 1}}}, ["critic.optimizer.learning_rat: unknown key", "'learning_rate'"]),
        ({"engine": {"shard_sise": 1}}, ["engine.shard_sise: unknown key", "'shard_size'"]),
        ({"algorithn": {"kl_coef": 1}}, ["algorithn: unknown key", "'algorithm'"]),
        ({"foo": 1}, ["foo: unknown key - set one of model, data"]),
        ({"trainer": {"total_steps": "many"}}, ["trainer.total_steps: ", "'many'", "set a int"]),
        ({"trainer": {"total_steps": 2.5}}, ["trainer.total_steps: ", "'2.5'"]),
        ({"trainer": {"total_steps": None}}, ["trainer.total_steps: "]),
        ({"trainer": {"run_dir": "???"}}, ["trainer.run_dir: has no value", "set a str"]),
        ({"trainer": 3}, ["trainer: ", "3"]),
        ({"optimizer": {"betas": ["a", 1]}}, ["optimizer.betas: ", "'a'", "list[float]"]),
        ({"rollout": {"stop_token_ids": [1, "x"]}}, ["rollout.stop_token_ids: ", "'x'"]),
        ({"reward": {"functions": {"exact": "x"}}}, ["reward.functions: ", "'x'"]),
        ({"reward": {"functions": {3: 1.0}}}, ["reward.functions: ", "3 (int)"]),
        ({"model": {"path": {"a": 1}}}, ["model.path: "]),
        ({"engine": {"backend": "fsdpp"}}, ["engine.backend: 'fsdpp' is unknown", "did you mean 'fsdp'?", "set one of fsdp"]),
        ({"engine": None}, ["engine: None", "engine.backend"]),
        ({"engine": {"backend": None}}, ["engine.backend: 'None' is unknown", "set one of fsdp"]),
        ({"ref": {"engine": {"backend": "fsdpp", "shard_size": 2}}}, ["ref.engine.backend: 'fsdpp'", "did you mean 'fsdp'?"]),
        ({"critic": {"engine": "fsdp"}}, ["critic.engine: fsdp is no section", "critic.engine.backend"]),
        ({"engine": {"backend": "spmd_rl.engine.fsdp:Nope"}}, ["engine.backend: ", "its module has no 'Nope'"]),
        ({"engine": {"backend": "spmd_rl.launch:Launch"}}, ["engine.backend: ", "no 'Config', 'problems', 'replica_width'"]),
        ({"engine": {"backend": "not_there:Engine"}}, ["engine.backend: 'not_there:Engine'", "no module 'not_there'"]),
    ],
)  # fmt: skip
def test_typed_names_a_wrong_key_or_type(raw, fragments):
    config, (line,) = typed(raw)
    assert isinstance(config, Config) and LINE.fullmatch(line), line
    assert found([line], *fragments), line


def test_a_roles_own_engine_starts_from_what_all_engines_have_in_common():
    raw = {"engine": {"backend": "megatron", "max_tokens_per_micro_batch": 512, "tensor_parallel_size": 2}}
    config, problems = typed(raw | {"ref": {"engine": {"logprob_chunk": 7}}, "critic": {"engine": {"backend": "fsdp"}}})
    assert problems == []
    ref, critic = config.ref.engine, config.critic.engine
    assert (ref.backend, ref.max_tokens_per_micro_batch, ref.tensor_parallel_size, ref.logprob_chunk) == ("megatron", 512, 1, 7)
    assert isinstance(critic, FSDPConfig) and critic.max_tokens_per_micro_batch == 512


def test_lines_of_a_roles_own_engine_name_its_section():
    own = CriticConfig(engine=FSDPConfig(dtype="float32", shard_size=3))
    config = ready(critic=own, algorithm=AlgorithmConfig(advantage="gae"))
    assert found(validate(config, 4), "critic.engine.shard_size: 3", "4 ranks")
    unread = validate(replace(config, algorithm=AlgorithmConfig(), ref=RefConfig(FSDPConfig(dtype="float32"))), 4)
    assert found(unread, "critic.engine: fsdp, but there is no critic") and found(unread, "ref.engine: there is no reference")
    value = replace(config, critic=CriticConfig(engine=veomni.Config(backend="veomni", dtype="float32")))
    assert found(validate(value, 4), "critic.engine: veomni trains no value_model on cpu", "critic.engine.backend", "fsdp")


def test_typed_finds_several_at_once_and_keeps_the_rest():
    config, problems = typed({"trainer": {"total_step": 3, "seed": "x", "keep": 5}, "rollouts": {}, "rollout": {"n": "4"}})
    assert [line.partition(":")[0] for line in problems] == ["trainer.total_step", "trainer.seed", "rollouts"]
    assert (config.trainer.keep, config.trainer.seed, config.rollout.n) == (5, 0, 4)


@pytest.mark.parametrize("world_size", [1, 2])
def test_one_changed_value_is_fine(world_size):
    config, problems = typed({"algorithm": {"clip_ratio": 0.1}})
    assert (config.algorithm, problems) == (AlgorithmConfig(clip_ratio=0.1), [])
    assert validate(ready(algorithm=config.algorithm), world_size) == []


def test_free_form_arguments_are_taken_as_they_are():
    config, problems = typed({"data": {"train_kwargs": {"a": {"b": [1, 2]}}}, "algorithm": {"clip_ratio_high": None}})
    assert problems == [] and config.data.train_kwargs == {"a": {"b": [1, 2]}}


def test_the_engine_section_is_of_the_backends_own_class():
    config, problems = typed({"engine": {"backend": "fsdp", "shard_size": 2}})
    assert problems == [] and config.engine == FSDPConfig(shard_size=2)


def test_validate_reports_every_problem_in_one_call():
    config = ready(
        algorithm=AlgorithmConfig(advantage="grop", aggregation="token_mean", num_mini_batches=3),
        rollout=RolloutConfig(dtype="float16", temperature=0.0),
        placement=PlacementConfig(actor="0-1", rollout="1-2"),
        engine=FSDPConfig(dtype="float32", max_tokens_per_micro_batch=100),
    )
    problems = validate(config, 3)
    assert len(problems) == 7 and all(LINE.fullmatch(line) for line in problems), problems
    assert found(problems, "algorithm.advantage: 'grop' is unknown (did you mean 'grpo'?)", "rloo", "module:attribute")
    assert found(problems, "algorithm.aggregation: 'token_mean'", "did you mean 'token-mean'?")
    assert found(problems, "rollout.dtype: 'float16'", "float32, bfloat16")
    assert found(problems, "rollout.temperature: 0")
    assert found(problems, "placement.actor, placement.rollout: ranks 0-1 and 1-2 share ranks 1 but")
    assert found(problems, "data.prompts_per_step: 16 prompts x 8 samples", "3 mini-batches", "2 data-parallel", "set 15 or 18")
    assert found(problems, "engine.max_tokens_per_micro_batch: 100", "512 + 64", "set at least 576")


@pytest.mark.parametrize(
    ("sections", "world_size", "fragments"),
    [
        (batch(2, 1), 4, ["data.prompts_per_step: ", "2 prompts", "4 replicas of actor", "at least 4"]),
        (batch(16, 8), 3, ["2 prompts", "at least 24"]),
        (batch(10, 4), 1, ["10 prompts", "set 8 or 12"]),
        (batch(3, 4), 1, ["does not divide 3", "set 4"]),
        (batch(10, 4), 3, ["does not divide", "set 12"]),
        ({"rollout": RolloutConfig(n=1, dtype="float32")}, 1, ["rollout.n: grpo", "set at least 2"]),
        ({"engine": FSDPConfig(dtype="float32", shard_size=3)}, 4, ["engine.shard_size: 3", "4 ranks", "[1, 2, 4]"]),
        ({"algorithm": AlgorithmConfig(advantage="nowhere:f")}, 1, ["algorithm.advantage: no module 'nowhere'", "PYTHONPATH"]),
        ({"algorithm": AlgorithmConfig(policy_loss="spmd_rl.losses:ppo_terms")}, 1, ["has no 'ppo_terms'", "'ppo_term'"]),
        ({"algorithm": AlgorithmConfig(aggregation="seq-mean-token-sum-norm")}, 1, ["algorithm.aggregation_length: "]),
        ({"rollout": RolloutConfig(min_response_tokens=65, dtype="float32")}, 1, ["rollout.min_response_tokens: 65", "(64)"]),
        ({"rollout": RolloutConfig(min_response_tokens=2, max_logprob_diff=0.1)}, 1, ["rollout.max_logprob_diff: 0.1", "to 0"]),
        ({"rollout": RolloutConfig(top_p=0.9)}, 1, ["rollout.top_p, rollout.top_k: 0.9 and 0", "set 1 and 0"]),
        ({"rollout": RolloutConfig(max_model_len=64)}, 1, ["rollout.max_model_len: 64 leaves no room", "(64)", "set 576"]),
        ({"rollout": RolloutConfig(tensor_parallel_size=2)}, 2, ["rollout.tensor_parallel_size: 2 with rollout.backend=hf"]),
        ({"rollout": RolloutConfig(max_step_seconds=-1.0)}, 1, ["rollout.max_step_seconds: -1.0 is too small", "at least 0"]),
        (
            {"rollout": RolloutConfig(max_step_tokens=4), "environment": EnvironmentConfig("calculator")},
            1,
            ["rollout.max_step_tokens, rollout.max_step_seconds: ", "set 0"],
        ),
        ({"algorithm": AlgorithmConfig(rollout_correction="tokens-mask")}, 1, ["'tokens-mask'", "did you mean 'token-mask'?"]),
        ({"algorithm": AlgorithmConfig(rollout_correction_cap=0.5)}, 1, ["algorithm.rollout_correction_cap: 0.5", "at least 1"]),
        ({"engine": replace(EngineConfig(), dtype="float32", backend="fsdpp")}, 1, []),  # `typed` has named it
    ],
)  # fmt: skip
def test_validate_shows_the_arithmetic_and_what_to_set(sections, world_size, fragments):
    problems = validate(ready(**sections), world_size)
    assert all(LINE.fullmatch(line) for line in problems), problems
    assert found(problems, *fragments) if fragments else problems == []


def test_a_replica_of_the_rollout_lies_inside_one_node():
    config = ready(rollout=RolloutConfig(backend="spmd_rl.roles.hf_rollout:HFRollout", tensor_parallel_size=3, dtype="float32"))
    said = "rollout.tensor_parallel_size: the group of ranks 3-5 crosses the nodes of ranks 0-3, 4-7 (3 ranks a group)"
    assert found(validate(config, 12, 4), said, "set a divisor of 4")
    assert not found(validate(config, 12), "crosses")
    assert not found(validate(replace(config, rollout=replace(config.rollout, tensor_parallel_size=2)), 12, 4), "crosses")


@pytest.mark.parametrize(
    ("spec", "ranks"),
    [("all", (0, 1, 2, 3)), ("0-2", (0, 1, 2)), ("0,3", (0, 3)), ("3,0-1", (0, 1, 3)), (" 1 - 2 ", None), ("2", (2,))],
)
def test_parse_ranks(spec, ranks):
    if ranks is None:
        with pytest.raises(ValueError, match="no set of ranks - set 'all'"):
            parse_ranks(spec, 4)
    else:
        assert parse_ranks(spec, 4) == ranks


ALL = (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("placement", "expected"),
    [
        ({}, {"actor": ALL, "rollout": ALL, "ref": ALL, "critic": ALL}),
        ({"actor": "0-1", "rollout": "2-3"}, {"actor": (0, 1), "rollout": (2, 3), "ref": (0, 1), "critic": (0, 1)}),
        (
            {"actor": "0,2", "rollout": "1,3", "ref": "rollout"},
            {"actor": (0, 2), "rollout": (1, 3), "ref": (1, 3), "critic": (0, 2)},
        ),
        ({"actor": "rollout", "rollout": "critic", "critic": "3,2,1,0"}, {"actor": ALL, "rollout": ALL, "ref": ALL, "critic": ALL}),
        ({"actor": "0", "rollout": "1", "ref": "2", "critic": "3"}, {"actor": (0,), "rollout": (1,), "ref": (2,), "critic": (3,)}),
    ],
)
def test_a_placement_gives_each_role_its_ranks(placement, expected):
    config = ready(placement=PlacementConfig(**placement), algorithm=AlgorithmConfig(advantage="gae", kl_coef=0.1))
    assert parse_placement(config, 4) == (expected, [])


@pytest.mark.parametrize(
    ("placement", "fragments"),
    [
        ({"actor": "0-5"}, ["placement.actor: ranks 4-5 do not exist (4 ranks)"]),
        ({"actor": "0-1", "rollout": "1-3"}, ["placement.actor, placement.rollout: ranks 0-1 and 1-3 share ranks 1 but not all"]),
        ({"actor": "0-2", "rollout": "0-3"}, ["share ranks 0-2 but not all"]),
        ({"actor": "0", "rollout": "2"}, ["placement: ranks 1,3 have no role (4 ranks)"]),
        ({"actor": "0-3,2"}, ["placement.actor: 0,1,2,2,3 ", "names a rank twice"]),
        ({"actor": "3-1", "rollout": "0-3"}, ["placement.actor: none is empty"]),
        ({"actor": "x"}, ["placement.actor: 'x' is no set of ranks"]),
        ({"actor": "rollout", "rollout": "actor"}, ["placement.actor: actor -> rollout -> actor names no ranks"]),
        ({"actor": "actor"}, ["placement.rollout: rollout -> actor -> actor names no ranks"]),
    ],
)
def test_a_placement_that_cannot_be_is_explained(placement, fragments):
    problems = validate(ready(placement=PlacementConfig(**placement)), 4)
    assert found(problems, *fragments), problems
    assert all(LINE.fullmatch(line) for line in problems), problems


def test_roles_exist_only_where_they_are_needed():
    assert needed_roles(ready()) == ["actor", "rollout"]
    assert needed_roles(ready(algorithm=AlgorithmConfig(kl_coef=0.1))) == ["actor", "rollout", "ref"]
    assert needed_roles(ready(algorithm=AlgorithmConfig(advantage="gae"))) == ["actor", "rollout", "critic"]
    assert validate(ready(placement=PlacementConfig(ref="9")), 1) == []  # no KL: nobody asks where


SHIPPED = sorted(path.stem for path in config_folder().glob("*.yaml"))
CHOICES = [f"{group}={choice}" for group, choices in groups(config_folder()).items() for choice in choices]


@pytest.mark.parametrize(("name", "overrides"), [*((name, []) for name in SHIPPED), *(("train", [choice]) for choice in CHOICES)])
def test_every_shipped_configuration_is_valid(monkeypatch, name, overrides):
    if "engine=veomni" in overrides:  # it has an environment of its own, without vLLM
        monkeypatch.setattr(veomni, "find_spec", lambda package: True)
        overrides = [*overrides, "rollout=hf"]
    config, problems = compose_config(name, None, overrides)
    sizes = (2, 4) if "placement=split" in overrides else (1, 2)
    assert problems == [] and [validate(config, world_size) for world_size in sizes] == [[], []]


def test_what_ships_is_found():
    assert {"train", "tiny", "quickstart"} <= set(SHIPPED) and {"algorithm=dapo", "placement=colocated", "placement=split"} <= set(
        CHOICES
    )
