"""What the contract of engines does not ask: odd sizes and plans under tensor, sequence and expert parallelism of fsdp."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, Olmo2Config, Phi3Config, Qwen2MoeConfig

from benchmarks.parity import Cell, make, measure, missed, refer, share, start, weighted, width_of
from spmd_rl.collectives import barrier
from spmd_rl.config import OptimizerConfig
from spmd_rl.engine.fsdp import FSDPConfig, problems
from spmd_rl.mesh import close_world
from tests.helpers import SIZES, make_rows, randomize, tiny_config
from tests.launch import spmd

GROUPS = [(5, [4, 1, 7]), (9, [3, 3]), (2, [6]), (3, [2, 5, 4])]
TP, ULYSSES, EP = ({name: 2, "shard_size": 1} for name in ("tensor_parallel_size", "ulysses_size", "expert_parallel_size"))
CONFIGS = {
    "uneven vocabulary, tied": tiny_config("llama", True, vocab_size=97, pad_token_id=50),
    "uneven vocabulary, untied": tiny_config("qwen3", False, vocab_size=97),
    "one key head": tiny_config("qwen3", True, num_key_value_heads=1),
    "bias after a sum": tiny_config("llama", False, attention_bias=True, mlp_bias=True),
    "norm of all heads": Olmo2Config(**SIZES),
    "joined projections": Phi3Config(**SIZES),
    "experts of one rank": tiny_config("qwen3_moe"),
    "shared expert": Qwen2MoeConfig(
        **SIZES, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=32
    ),
}


def save(world, folder, kind: str):
    """A model of that kind, the same on every rank."""
    if world.rank == 0:
        model = randomize(AutoModelForCausalLM.from_config(CONFIGS[kind]), 7)
        for layer in model.model.layers if kind == "experts of one rank" else ():
            gate = layer.mlp.gate.weight.data  # two of the first four experts have a logit above 0, those of the others are 0
            gate[4:] = 0
            gate[1], gate[3] = -gate[0], -gate[2]
        model.save_pretrained(folder / kind)
    barrier(world.control, "model")
    return folder / kind


def check(world, folder, kind: str, *options: dict):
    """All figures of the parity matrix are within their targets."""
    where, batch = save(world, folder, kind), make_rows(GROUPS, vocabulary=CONFIGS[kind].vocab_size)
    expected = refer(where, batch, 3)
    for chosen in options:
        cell = Cell("fsdp", f"{width_of(Cell('fsdp', '', 0, chosen, kind))}", len(world.meshes["1"].ranks), chosen, kind)
        errors = measure(cell, where, world.meshes[cell.layout], batch, expected)
        print(kind, chosen, errors, flush=True)
        assert not missed({"cell": {"kind": kind}, "errors": errors}), (kind, chosen, errors)


@spmd(2)
def test_odd_sizes_and_plans_on_two_ranks(folder):
    world = start({"1": 1, "2": 2}, 2)
    more = {"activation_checkpointing": True, "logprob_chunk": 2}
    check(world, folder, "uneven vocabulary, tied", TP, ULYSSES | more)
    check(world, folder, "uneven vocabulary, untied", TP | more)
    check(world, folder, "one key head", ULYSSES, ULYSSES | {"shared_prompt": False, "shard_size": 2})
    check(world, folder, "bias after a sum", TP)
    check(world, folder, "norm of all heads", TP, TP | more)
    check(world, folder, "joined projections", TP)
    check(world, folder, "experts of one rank", TP | more, EP, EP | more, EP | {"shard_size": 2})
    check(world, folder, "shared expert", TP, EP)
    close_world(world)


@pytest.mark.slow
@spmd(4)
def test_odd_sizes_on_four_ranks(folder):
    world = start({"1": 1, "2": 2, "4": 4}, 4)
    check(world, folder, "uneven vocabulary, tied", TP | {"shard_size": 2}, TP | {"ulysses_size": 2, "shard_size": 2})
    check(world, folder, "one key head", {"ulysses_size": 4, "shard_size": 4})
    check(world, folder, "experts of one rank", EP | {"shard_size": 4, "ulysses_size": 2}, TP | {"shard_size": 2})
    close_world(world)


@spmd(2)
def test_no_rank_holds_the_head_of_all_the_vocabulary(folder):
    """Nor its embedding, gradients or moments, whatever is sharded besides."""
    world = start({"2": 2}, 2)
    where, batch, mesh = save(world, folder, "uneven vocabulary, untied"), make_rows(GROUPS), world.meshes["2"]
    for dtype in ("float32", "bfloat16"):
        engine = make("fsdp", where, mesh, dtype=dtype, **TP)
        with engine.train_mode():
            engine.forward_backward_batch(share(batch, mesh, 3), weighted)
            engine.optimizer_step()
        for name, parameter in engine.module.named_parameters():
            rows = parameter.to_local().shape[0] if parameter.shape[0] == 97 else 0
            assert rows <= 49, name
        assert engine.module.vocab.rows == (49, 48)[world.rank]
    close_world(world)


@spmd(2)
def test_adapters_are_split_as_their_layers(folder):
    """Two steps of LoRA under tensor and sequence parallelism are those of data parallelism."""
    pytest.importorskip("peft")
    world = start({"1": 1, "2": 2}, 2)
    where, batch, found = save(world, folder, "bias after a sum"), make_rows(GROUPS), []
    optimizer = OptimizerConfig(learning_rate=1e-2, clip_grad_norm=1.0, total_steps=4)
    for width, options in (("1", {"shard_size": 1}), ("2", TP), ("2", ULYSSES)):
        mesh, norms = world.meshes[width], []
        engine = make("fsdp", where, mesh, optimizer=optimizer, lora_rank=4, **options)
        for _ in range(2):
            with engine.train_mode():
                engine.forward_backward_batch(share(batch, mesh, 3), weighted)
                norms.append(engine.optimizer_step())
        found.append((norms, {name: tensor.clone() for name, tensor in engine.weights()}))
    (norms, weights), *others = found
    for other_norms, other_weights in others:
        assert other_norms == pytest.approx(norms, rel=1e-4)
        for name, tensor in weights.items():
            torch.testing.assert_close(other_weights[name], tensor, atol=1e-5, rtol=1e-4)
    close_world(world)


REFUSED = [
    ({"tensor_parallel_size": 3}, 6, "llama", "num_attention_heads 4, num_key_value_heads 2 - set one of [1, 2]"),
    ({"tensor_parallel_size": 2}, 3, "llama", "does not divide the 3 ranks - set a product of [1, 3]"),
    ({"ulysses_size": 3}, 3, "llama", "ulysses_size: 3 does not divide the model's 4 heads - set one of [1, 2, 4]"),
    ({"ulysses_size": 4, "tensor_parallel_size": 2}, 8, "llama", "2 heads on each of 2 ranks of tensor_parallel_size"),
    ({"expert_parallel_size": 2}, 2, "llama", "no experts are known"),
    ({"expert_parallel_size": 3}, 3, "qwen3_moe", "does not divide the model's 8 experts - set one of [1, 2, 4, 8]"),
    ({"expert_parallel_size": 2, "tensor_parallel_size": 2}, 4, "qwen3_moe", "set one to 1"),
    ({"expert_parallel_size": 4}, 2, "qwen3_moe", "does not divide the 2 ranks - set one of [1, 2]"),
    ({"shard_size": 4, "tensor_parallel_size": 2}, 4, "llama", "2 ranks that each part of tensor_parallel_size=2 has"),
    ({"ulysses_size": 0}, 2, "llama", "set at least 1"),
]


@pytest.mark.parametrize("options,ranks,kind,said", REFUSED)
def test_what_cannot_be_is_refused_with_what_can(options, ranks, kind, said):
    found = problems(FSDPConfig(**options), ranks, tiny_config(kind).to_dict())
    assert len(found) == 1 and said in found[0], found


def test_a_model_without_a_plan_is_refused():
    found = problems(FSDPConfig(tensor_parallel_size=2), 2, {"model_type": "gpt2"})
    assert len(found) == 1 and "no plan for model type 'gpt2'" in found[0]
    found = problems(FSDPConfig(ulysses_size=2), 2, {"model_type": "of_its_own"})
    assert len(found) == 1 and "does not know model type 'of_its_own'" in found[0]
