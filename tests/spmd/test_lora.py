"""LoRA on fsdp: against peft and transformers in one process, and whole runs whose reference is the actor without adapters."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoModelForCausalLM

from spmd_rl.batch import TokenOutput
from spmd_rl.collectives import barrier, gather_objects
from spmd_rl.config import CheckpointConfig, ConfigError, OptimizerConfig, TimeoutConfig
from spmd_rl.engine.base import EngineModel
from spmd_rl.engine.fsdp import FSDPConfig, FSDPEngine, problems, replica_width
from spmd_rl.launch import detect_launch
from spmd_rl.mesh import Role, RoleMesh, World, close_world, open_store, split_world
from spmd_rl.metrics import Sum
from tests.forks import fork_ranks
from tests.helpers import make_rows, tiny_config
from tests.jobs import launch_jobs, metrics, rows, run_jobs, state
from tests.spmd.test_vllm_jobs import Job

OPTIMIZER = OptimizerConfig(learning_rate=1e-3, clip_grad_norm=0.5, weight_decay=0.01, total_steps=4)
GROUPS = [(5, [4, 1, 7]), (9, [3, 3]), (2, [6]), (3, [2, 5, 4])]
KINDS = {"llama": ("llama", True), "qwen2": ("qwen2", False), "qwen3": ("qwen3", True), "moe": ("qwen3_moe", False)}
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS = (".lora_A.", ".lora_B.")


def make(world: World, folder: Path, model_type="language_model", trainable=True, seed=0, optimizer=OPTIMIZER, **options):
    config = FSDPConfig(**({"dtype": "float32", "lora_rank": 4, "lora_alpha": 6.0} | options))
    model = EngineModel(str(folder), model_type, trainable, seed=seed)
    mesh = world.meshes["lanes" if replica_width(config) > 1 else "actor"]
    return FSDPEngine(model, config, optimizer, CheckpointConfig(), mesh)


def weighted(output: TokenOutput, data):
    """A plain sum whose weights are a function of the row's names."""
    tokens = output.log_probs if output.values is None else output.values
    scale = (data.uid[:, None] + 1.0) * (data.sample[:, None] + 0.5) * 0.01
    loss = (tokens * scale)[data.response_mask].sum() if len(data) else tokens.sum()
    return loss, {"loss": Sum(float(loss.detach()))}


def share(mesh: RoleMesh, batch, size: int):
    """This replica's micro-batches of `size` rows, as many as every other's."""
    parts = [batch[batch.uid % mesh.num_replicas == r] for r in range(mesh.num_replicas)]
    count = max(-(-len(part) // size) for part in parts)
    return [parts[mesh.replica][i * size : (i + 1) * size] for i in range(count)]


def log_probs(engine, batch, reference=False) -> torch.Tensor:
    with engine.reference() if reference else engine.eval_mode():
        outputs = engine.forward_backward_batch(share(engine.mesh, batch, 4), None, forward_only=True)
    return torch.cat([output.log_probs for output in outputs])


def train(engine, batch, size: int = 3) -> float:
    with engine.train_mode():
        engine.forward_backward_batch(share(engine.mesh, batch, size), weighted)
        norm = engine.optimizer_step()
    engine.lr_scheduler_step()
    return norm


def whole(tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def trained(engine) -> dict[str, torch.Tensor]:
    return {name.removeprefix("lm."): whole(p) for name, p in engine.module.named_parameters() if p.requires_grad}


@torch.no_grad()
def scramble(engine) -> None:
    """Other adapters, so that B has values and A a gradient."""
    generator = torch.Generator().manual_seed(3)
    for parameter in engine.module.parameters():
        if parameter.requires_grad:
            value = torch.randn(parameter.shape, generator=generator) * 0.1
            if isinstance(parameter, DTensor):
                value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
            parameter.copy_(value)


def peft_model(folder: Path, adapters: dict[str, torch.Tensor], targets: list[str], rank: int = 4, alpha: float = 6.0):
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), config)
    own = {n.removeprefix("base_model.model."): p for n, p in model.named_parameters() if p.requires_grad}
    assert own.keys() == adapters.keys()
    with torch.no_grad():
        for name, value in adapters.items():
            own[name].copy_(value)
    return model, own


def own_log_probs(model, batch) -> torch.Tensor:
    out = torch.zeros(batch.input_ids.shape)
    for b, (ids, n) in enumerate(zip(batch.input_ids, batch.lengths.tolist())):
        logits = model(input_ids=ids[None, :n], use_cache=False).logits[0].float()
        out[b, 1:n] = logits.log_softmax(-1)[:-1].gather(1, ids[1:n, None])[:, 0]
    return out


def check_training(world: World, folder: Path, batch, targets=ALL, **options) -> None:
    """Gradients, norms, and adapters after 3 clipped AdamW steps are those of peft; then the merged weights too."""
    optimizer = replace(OPTIMIZER, learning_rate=1e-5)
    engine = make(world, folder, optimizer=optimizer, **options)
    scramble(engine)
    model, adapters = peft_model(folder, trained(engine), targets)
    adam = torch.optim.AdamW(adapters.values(), 1e-5, optimizer.betas, optimizer.eps, optimizer.weight_decay)
    for step, size in enumerate((2, 5, 3)):
        weighted(TokenOutput(log_probs=own_log_probs(model, batch)), batch)[0].backward()
        with engine.train_mode():
            engine.forward_backward_batch(share(engine.mesh, batch, size), weighted)
            if step == 0:
                found = dict(engine.gradients())
                assert found.keys() == adapters.keys()
                for name, parameter in adapters.items():
                    assert (found[name] - parameter.grad).norm() <= 1e-4 * parameter.grad.norm(), name
            norm = engine.optimizer_step()
        engine.lr_scheduler_step()
        assert norm == pytest.approx(float(torch.nn.utils.clip_grad_norm_(adapters.values(), 0.5)), rel=1e-4)
        adam.step()
        adam.zero_grad()
    assert all((value - adapters[name]).abs().max() < 1e-6 for name, value in trained(engine).items())
    streamed, merged = dict(engine.weights()), model.merge_and_unload().state_dict()
    stored = load_file(folder / "model.safetensors")
    assert streamed.keys() == stored.keys()
    for name in stored.keys() & merged.keys():
        assert (streamed[name] - merged[name]).abs().max() < 1e-6, name
        adapted = name.removesuffix(".weight").rpartition(".")[2] in targets and ".experts." not in name
        assert torch.equal(streamed[name], stored[name]) == (not adapted), name


def check_start(world: World, folder: Path, batch, **options) -> None:
    """Only adapters train; they are alike everywhere and a function of the seed; the first model is its base, bit for bit."""
    engine, base = make(world, folder, **options), make(world, folder, trainable=False, **options)
    assert all(any(part in name for part in ADAPTERS) for name in trained(engine))
    held = {id(p) for group in engine.optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in engine.module.parameters() if p.requires_grad}
    assert not base.has_reference and base.optimizer is None
    sums = gather_objects(sum(float(v.double().sum()) for v in trained(engine).values()), world.control, "adapters")
    assert len(set(sums)) == 1
    other, again = make(world, folder, seed=1, **options), make(world, folder)
    for name, value in trained(engine).items():
        assert torch.equal(value, trained(again)[name])
        if ".lora_A." in name:
            bound = value.shape[1] ** -0.5
            assert not torch.equal(value, trained(other)[name]) and 0.5 * bound < value.abs().max() <= bound
        else:
            assert not value.any()
    stored, streamed = load_file(folder / "model.safetensors"), dict(engine.weights())
    assert streamed.keys() == stored.keys() and all(torch.equal(streamed[name], stored[name]) for name in stored)
    expected = log_probs(base, batch)
    assert torch.equal(log_probs(engine, batch), expected)
    assert torch.equal(log_probs(engine, batch, reference=True), expected)
    for _ in range(3):
        assert train(engine, batch) > 0
        assert torch.equal(log_probs(engine, batch, reference=True), expected)
        assert not torch.equal(log_probs(engine, batch), expected)
    held = {name.removeprefix("lm.").replace(".base_layer.", "."): whole(p) for name, p in engine.module.named_parameters()}
    assert all(torch.equal(held[name], stored[name]) for name in stored if name in held)
    assert all(p.grad is None for p in engine.module.parameters() if not p.requires_grad)


def check_checkpoint(world: World, folder: Path, batch, path: Path, elsewhere: dict, **options) -> None:
    """Adapters alone are stored; a fresh engine goes on alike, bit for bit, and one of another layout nearly so."""
    engine = make(world, folder, **options)
    train(engine, batch)
    engine.save(path)
    barrier(world.control, "saved")
    keys = FileSystemReader(path).read_metadata().state_dict_metadata
    assert {key for key in keys if key.startswith("model.")} == {f"model.lm.{name}" for name in trained(engine)}
    saved = trained(engine)
    norm = train(engine, batch)
    fresh = make(world, folder, seed=5, **options)
    fresh.load(path)
    assert train(fresh, batch) == norm and fresh.updates == engine.updates
    assert all(torch.equal(value, trained(engine)[name]) for name, value in trained(fresh).items())
    other = make(world, folder, seed=5, **elsewhere)
    other.load(path)
    assert all(torch.equal(value, saved[name]) for name, value in trained(other).items())
    assert train(other, batch) == pytest.approx(norm, rel=1e-5)
    for changed, said in (
        ({"lora_rank": 8}, "this run trains adapters of 14 layers (rank 8, alpha 6)"),
        ({"lora_alpha": 7.0}, "holds adapters of 14 layers (rank 4, alpha 6), this run"),
        ({"lora_targets": ["q_proj"]}, "trains adapters of 2 layers"),
        ({"lora_rank": 0}, "trains all weights"),
    ):
        with pytest.raises(ConfigError) as error:
            make(world, folder, **options | changed).load(path)
        assert said in str(error.value)


def check_value_model(world: World, folder: Path, batch, path: Path, **options) -> None:
    """A critic trains adapters and its whole head."""
    engine = make(world, folder, model_type="value_model", **options)
    assert {name for name in trained(engine) if not any(part in name for part in ADAPTERS)} == {"value_head.weight"}
    before = trained(engine)
    for _ in range(2):  # the head is 0 at first, and the adapters get no gradient through it
        assert train(engine, batch) > 0
    after = trained(engine)
    assert all(not torch.equal(after[name], before[name]) for name in after)
    engine.save(path)
    barrier(world.control, "saved")
    fresh = make(world, folder, model_type="value_model", seed=5, **options)
    fresh.load(path)
    assert all(torch.equal(value, after[name]) for name, value in trained(fresh).items())


def check_bf16(world: World, folder: Path, batch, **options) -> None:
    exact, engine = make(world, folder, shard_size=1), make(world, folder, dtype="bfloat16", **options)
    base = make(world, folder, dtype="bfloat16", trainable=False, **options)
    scramble(exact)
    scramble(engine)
    expected = log_probs(base, batch)
    assert (log_probs(engine, batch) - log_probs(exact, batch)).abs().max() < 0.1
    norm = train(exact, batch)
    with engine.train_mode():
        engine.forward_backward_batch(share(engine.mesh, batch, 3), weighted)
        assert all(p.grad.dtype == torch.float32 for p in engine.module.parameters() if p.requires_grad)
        assert engine.optimizer_step() == pytest.approx(norm, rel=0.1)
    assert all(p.dtype == torch.float32 for p in engine.module.parameters())
    assert torch.equal(log_probs(engine, batch, reference=True), expected)


def check_targets(world: World, folder: Path) -> None:
    with pytest.raises(ValueError, match=r"engine.lora_targets: no linear layer .* 'q_prj' \(did you mean 'q_proj'\?\)"):
        make(world, folder, lora_targets=["q_prj", "v_proj"])
    with pytest.raises(ValueError, match="called 'lm_head'"):
        make(world, folder, lora_targets=["lm_head"])


def engine_checks(folder: Path) -> None:
    launch, timeouts = detect_launch(), TimeoutConfig(collective=60, phase=60)
    ranks = tuple(range(launch.world_size))
    roles = {"actor": Role(ranks, len(ranks)), "lanes": Role(ranks, 1)}
    world = split_world(roles, launch, open_store(launch, timeouts), "cpu", timeouts)
    if world.rank == 0:
        for name, (kind, tied) in KINDS.items():
            torch.manual_seed(7)
            AutoModelForCausalLM.from_config(tiny_config(kind, tied)).save_pretrained(folder / name)
    barrier(world.control, "models")
    batch = make_rows(GROUPS)
    for shard_size, names, elsewhere in (
        (1, ("qwen2", "qwen3"), {"shard_size": 2}),
        (2, ("llama", "moe"), {"tensor_parallel_size": 2}),
    ):
        for name in names:
            check_training(world, folder / name, batch, ALL[:4] if name == "moe" else ALL, shard_size=shard_size)
        check_start(world, folder / name, batch, shard_size=shard_size)
        check_checkpoint(world, folder / "qwen2", batch, folder / f"checkpoint{shard_size}", elsewhere, shard_size=shard_size)
        check_value_model(world, folder / "llama", batch, folder / f"critic{shard_size}", shard_size=shard_size)
        check_bf16(world, folder / "llama", batch, shard_size=shard_size)
    check_training(world, folder / "qwen3", batch, activation_checkpointing=True, shard_size=2)
    check_training(world, folder / "qwen3", batch, shard_size=2, gather_once=False)
    check_training(world, folder / "qwen3", batch, shared_prompt=False, logprob_chunk=2)
    check_training(world, folder / "qwen3", batch, offload=True, shard_size=2)
    check_training(world, folder / "qwen3", batch, ["v_proj", "down_proj"], lora_targets=["v_proj", "mlp.down_proj"])
    for split in ({"tensor_parallel_size": 2}, {"ulysses_size": 2}, {"ulysses_size": 2, "shard_size": 2}):
        check_training(world, folder / "qwen2", batch, **split)
    check_start(world, folder / "qwen2", batch, tensor_parallel_size=2)
    for split in ({"expert_parallel_size": 2}, {"expert_parallel_size": 2, "shard_size": 2}, {"tensor_parallel_size": 2}):
        check_training(world, folder / "moe", batch, ALL[:4], **split)
    check_targets(world, folder / "qwen3")
    close_world(world)


@pytest.mark.spmd
def test_engine_on_two_ranks(tmp_path):
    fork_ranks("tests.spmd.test_lora:engine_checks", tmp_path, 2)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lora_rank": -1}, "engine.lora_rank: -1 is no rank - set 0"),
        ({"lora_rank": 8, "lora_alpha": 0.0}, "engine.lora_alpha: 0.0 switches"),
        ({"lora_rank": 8, "lora_targets": []}, "engine.lora_targets: names no layer"),
        ({"lora_targets": ["q_proj"]}, "engine.lora_targets: ['q_proj'], but there are no adapters"),
        ({"lora_rank": 8, "lora_targets": ["qproj"]}, "'qproj' (did you mean 'q_proj'?) - set some of [q_proj,k_proj"),
        ({"lora_rank": 8, "lora_targets": ["experts"]}, "called 'experts'"),
    ],
)
def test_problems(options, said):
    found = problems(FSDPConfig(**options), 2, tiny_config("llama").to_dict())
    assert len(found) == 1 and said in found[0]


def test_no_problems():
    assert problems(FSDPConfig(lora_rank=8), 2, tiny_config("qwen3_moe").to_dict()) == []
    assert problems(FSDPConfig(lora_rank=8, lora_targets=["q_proj", "self_attn.o_proj"]), 2, tiny_config("llama").to_dict()) == []
    assert problems(FSDPConfig(lora_rank=8, lora_targets=["query"]), 2, {"model_type": "of_ones_own"}) == []


def test_missing_peft_is_named(monkeypatch):
    monkeypatch.setattr("spmd_rl.engine.lora.find_spec", lambda name: None)
    assert 'pip install "spmd_rl[lora]"' in problems(FSDPConfig(lora_rank=8), 1)[0]


LORA = [
    *("engine.lora_rank=4", "algorithm.kl_coef=0.1", "algorithm.epochs=2", "algorithm.num_mini_batches=2"),
    *("optimizer.learning_rate=1e-2", "trainer.save_every=1", "trainer.keep=4", "trainer.sample_rows=64"),
]
PPO = ["algorithm=ppo", "engine.lora_rank=4", "algorithm.kl_coef=0.1", "algorithm.kl_in_reward=true", "trainer.total_steps=2"]
FOUR, TWO = "trainer.total_steps=4", "trainer.total_steps=2"


def run_counting(folder: Path) -> None:
    """Writes the model types and trainability of every engine that is built on rank 0."""
    made, build = [], FSDPEngine.__init__

    def counted(self, model, *args):
        made.append([model.model_type, model.trainable])
        build(self, model, *args)

    FSDPEngine.__init__ = counted
    run_jobs(folder)
    (folder / f"engines{detect_launch().rank}.json").write_text(json.dumps(made))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora")
    first = {"four": [*LORA, FOUR, "trainer.export_hf=true"], "two": [*LORA, TWO], "sharded": [*LORA, FOUR, "engine.shard_size=2"]}
    (folder / "jobs.json").write_text(json.dumps(first | {"ppo": PPO}))
    fork_ranks("tests.spmd.test_lora:run_counting", folder, 2)
    shutil.copytree(folder / "two", folder / "on_one")
    for path in (folder / "on_one").glob("rank*.pt"):
        path.unlink()
    launch_jobs(folder, 2, {"two": [*LORA, FOUR], "other": [*LORA, FOUR, "engine.lora_rank=2", f"trainer.resume={step(folder)}"]})
    launch_jobs(folder, 1, {"on_one": [*LORA, FOUR], "one": [*LORA, TWO, "engine.shard_size=1"]})
    apart = ["placement.actor=0", "placement.rollout=actor", "placement.ref=1", "engine.shard_size=1"]
    launch_jobs(folder, 2, {"apart": [*LORA, TWO, *apart]})
    return folder


def step(folder: Path) -> Path:
    return folder / "four" / "checkpoints" / "step_000002"


@pytest.mark.spmd
def test_the_reference_is_no_second_model(runs):
    """One engine a run, and the critic of the last."""
    made = json.loads((runs / "engines0.json").read_text())
    assert made == [["language_model", True]] * 4 + [["value_model", True]]


@pytest.mark.spmd
def test_a_reference_of_its_own_says_the_same(runs):
    """On a rank of its own it is the plain base model; rows, KL and all that follows are those of the run without it."""
    found, expected = metrics(runs / "apart"), metrics(runs / "one")
    for got, want in zip(found, expected, strict=True):
        assert got.keys() == want.keys()
        assert {key for key in want if got[key] != want[key]} <= {"traffic/batch_bytes"}
    for got, want in zip(rows(runs / "apart"), rows(runs / "one"), strict=True):
        assert got.keys() == want.keys()
        assert all(torch.equal(got[row]["ref_log_probs"], want[row]["ref_log_probs"]) for row in want)


@pytest.mark.spmd
def test_training(runs):
    """The KL leaves 0 and stays finite; what the rollout samples with is what was trained; sharding changes nothing."""
    told = metrics(runs / "four")
    assert 0 < told[0]["actor/kl_ref"] < told[-1]["actor/kl_ref"] < 1  # a step's first mini-batch alone has KL 0
    for row in (*told, *metrics(runs / "ppo")):
        assert all(math.isfinite(value) for value in row.values() if value is not None)
        assert row["rollout/logprob_diff_max"] < 1e-4 and row["rollout/probe_diff_max"] < 1e-4
        assert row["actor/grad_norm"] > 0 and row["actor/nonfinite_steps"] == 0
    for got, want in zip(metrics(runs / "sharded"), told, strict=True):
        for key in ("reward/mean", "actor/kl_ref", "actor/grad_norm", "actor/loss", "response/length_mean"):
            assert got[key] == pytest.approx(want[key], rel=1e-4, abs=1e-6), key
    exported = AutoModelForCausalLM.from_pretrained(runs / "four" / "hf", dtype=torch.float32)
    adapters = {n.removeprefix("/model/lm."): v for n, v in state(runs / "four", 4).items() if n.startswith("/model/")}
    assert len(adapters) == 2 * 14
    from spmd_rl.models import resolve_model

    model, _ = peft_model(Path(resolve_model("tiny")), adapters, ALL, alpha=32.0)
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        assert (model(ids).logits - exported(ids).logits).abs().max() < 1e-4


@pytest.mark.spmd
def test_resume_is_bitwise(runs):
    assert metrics(runs / "two") == metrics(runs / "four")
    found, expected = state(runs / "two", 4), state(runs / "four", 4)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value) if isinstance(value, torch.Tensor) else found[key] == value, key
    for got, want in zip(metrics(runs / "on_one"), metrics(runs / "four"), strict=True):
        for key in ("reward/mean", "actor/kl_ref", "actor/grad_norm", "actor/loss"):
            assert got[key] == pytest.approx(want[key], rel=1e-4, abs=1e-6), key


@pytest.mark.spmd
def test_other_adapters_do_not_resume(runs):
    for rank in (0, 1):
        said = (runs / "other" / f"error{rank}.txt").read_text()
        assert said.startswith("trainer.resume: ") and "(rank 4, alpha 32), this run trains adapters of 14 layers (rank 2" in said


@pytest.mark.slow
@pytest.mark.spmd
def test_vllm_samples_with_merged_weights(tmp_path):
    job = Job(tmp_path, 1, "engine.lora_rank=4", "algorithm.kl_coef=0.1", "trainer.total_steps=3")
    assert job.wait() == [0]
    told = job.metrics()
    assert len(told) == 3 and told[-1]["actor/kl_ref"] != 0
    assert all(row["rollout/logprob_diff_max"] < 1e-4 and row["rollout/probe_diff_max"] < 1e-4 for row in told)
