"""What is TorchTitan's own: its names, its stages, gradients over calls, and checkpoints of one pipeline in another layout."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.parity import GROUPS, Cell, make, measure, missed, refer, save_model, share, start, weighted
from spmd_rl.collectives import barrier
from spmd_rl.config import OptimizerConfig
from spmd_rl.engine.hf_names import stored_shapes
from spmd_rl.engine.torchtitan.layout import LAYOUTS, Config, problems, replica_width, stage_modules
from spmd_rl.engine.torchtitan.names import sources
from spmd_rl.mesh import close_world
from tests.helpers import make_rows, randomize, tiny_config
from tests.launch import spmd

KIND = "dense untied"  # tied embeddings allow no pipeline
OPTIMIZER = OptimizerConfig(learning_rate=1e-3, clip_grad_norm=0.5, weight_decay=0.01, total_steps=4)


def said(ranks: int, kind: str = "llama", more: dict | None = None, tied: bool = False, **options) -> list[str]:
    return problems(Config(dtype="float32", **options), ranks, tiny_config(kind, tied).to_dict() | (more or {}))


def test_problems_name_what_would_work():
    assert said(4, tensor_parallel_size=2, pipeline_parallel_size=2) == []
    assert said(4, "qwen3_moe", tensor_parallel_size=2, expert_parallel_size=4) == []
    assert "product is one of [1, 2, 4]" in said(4, tensor_parallel_size=3)[0]
    assert "num_key_value_heads (2) - set a common divisor" in said(4, tensor_parallel_size=4)[0]
    assert "does not divide the 2 replicas - set one of [1, 2]" in said(4, tensor_parallel_size=2, shard_size=4)[0]
    assert "to at most 4" in said(8, pipeline_parallel_size=8)[0]
    assert "to at most 2" in said(8, pipeline_parallel_size=4, context_parallel_size=2)[0]
    assert "set 1, or a pipeline of 2 and more" in said(2, virtual_pipeline_size=2)[0]
    assert "on two ranks - set 1" in said(2, tied=True, pipeline_parallel_size=2)[0]
    assert "the 0 experts of a layer - set one of [1]" in said(2, expert_parallel_size=2)[0]
    assert (
        "the 2 ranks that share a copy of a layer - set one of [1, 2]"
        in said(4, "qwen3_moe", expert_parallel_size=4, shard_size=2)[0]
    )
    both = {"tensor_parallel_size": 2, "expert_parallel_size": 2}
    assert "is split - set true" in said(2, "qwen3_moe", sequence_parallel=False, **both)[0]
    assert "set a model of type llama, qwen2, qwen3, qwen3_moe, or engine=fsdp" in said(2, more={"model_type": "gemma3"})[0]
    assert "has no sliding window" in said(2, "qwen2", {"use_sliding_window": True})[0]
    assert "has no attention bias" in said(2, more={"attention_bias": True})[0]
    assert "is too small - set at least 1" in said(2, context_parallel_size=0)[0]
    assert "set one of default, always, never" in said(2, reshard_after_forward="sometimes")[0]


def test_every_layout_fits_its_ranks():
    for name, (ranks, options) in LAYOUTS.items():
        config = Config(**options)
        assert ranks % replica_width(config) == 0, name
        assert not problems(config, ranks, tiny_config("qwen3_moe").to_dict()), name


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_every_tensor_of_the_checkpoint_has_its_place(kind, tmp_path):
    from spmd_rl.engine.torchtitan import cpu

    cpu.prepare()
    from spmd_rl.engine.torchtitan.modules import part_config

    hf = tiny_config(kind)
    with torch.device("meta"):
        decoder = part_config(hf, Config(), value_model=False).build()
    AutoModelForCausalLM.from_config(hf).save_pretrained(tmp_path)
    found = {}
    for name, parameter in decoder.named_parameters():
        for stored, index in sources(name, parameter.shape):
            assert stored not in found
            found[stored] = tuple(parameter[index].shape)
    assert found == stored_shapes(tmp_path)


def test_stages_are_even():
    assert stage_modules(2, 1) == [["tok_embeddings", "layers.0", "layers.1", "norm", "lm_head"]]
    assert stage_modules(2, 4) == [["tok_embeddings"], ["layers.0"], ["layers.1"], ["norm", "lm_head"]]
    assert [len(part) for part in stage_modules(7, 4)] == [3, 2, 2, 3]
    assert [name for part in stage_modules(30, 8) for name in part] == stage_modules(30, 1)[0]


def trained(engine, mesh, batch):
    with engine.train_mode():
        engine.forward_backward_batch(share(batch, mesh, 3), weighted)
        norm = engine.optimizer_step()
    engine.lr_scheduler_step()
    return norm, {name: tensor.clone() for name, tensor in engine.weights()}


def check_gradients_add_up(engine, mesh, batch):
    """Any number of micro-batches, and more than one call before a step, also with a forward pass between."""

    def gradients(*parts):
        with engine.train_mode():
            for part in parts:
                stats = engine.forward_backward_batch(share(part, mesh, 2), weighted)
            found = {name: tensor.clone() for name, tensor in engine.gradients()}
            engine.optimizer.zero_grad()
        return found, stats

    whole, stats = gradients(batch)
    assert set(stats) == {"loss"}
    halves, _ = gradients(batch[:5], batch[5:])
    for name, tensor in whole.items():
        torch.testing.assert_close(halves[name], tensor, atol=1e-6, rtol=1e-5, msg=name)
    with engine.eval_mode():
        for size in (1, 20):
            micro = share(batch, mesh, size)
            outputs = engine.forward_backward_batch(micro, None, forward_only=True, with_entropy=True)
            assert [out.log_probs.shape for out in outputs] == [part.input_ids.shape for part in micro]
            assert all((out.entropy[part.response_mask] > 0).all() for out, part in zip(outputs, micro))


def check_other_models(folder, world, batch):
    """Dense layers among mixtures; Llama 3's rotary frequencies; and the padding token, whose embedding has no gradient."""
    batch.input_ids[batch.input_ids % 4 == 3] = 0
    scaled = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    models = {
        "mixed": tiny_config("qwen3_moe", num_hidden_layers=4, decoder_sparse_step=2, mlp_only_layers=[1]),
        "llama3": tiny_config("llama", rope_parameters=scaled | {"original_max_position_embeddings": 16}),
    }
    for name, config in models.items():
        if world.rank == 0:
            randomize(AutoModelForCausalLM.from_config(config), 3).save_pretrained(folder / name)
        barrier(world.control, "models")
        expected = refer(folder / name, batch, 3)
        layout = "ep2" if name == "mixed" else "cp2"
        cell = Cell("torchtitan", layout, 2, LAYOUTS[layout][1], "MoE")
        errors = measure(cell, folder / name, world.meshes["wide" if layout == "cp2" else "narrow"], batch, expected)
        assert not missed({"cell": {"kind": "MoE"}, "errors": errors}), (name, errors)


@spmd(world_size=2)
def test_pipelines_and_their_checkpoints(folder):
    world = start({"wide": 2, "narrow": 1}, 2)
    wide, batch, path = world.meshes["wide"], make_rows(GROUPS), folder / "saved"
    if world.rank == 0:
        save_model(KIND, folder / "model")
    barrier(world.control, "model")

    def engine_of(layout, mesh=wide, **options):
        return make("torchtitan", folder / "model", mesh, optimizer=OPTIMIZER, **LAYOUTS[layout][1] | options)

    engine = engine_of("pp2", activation_checkpointing=True)
    check_gradients_add_up(engine, wide, batch)
    trained(engine, wide, batch)
    saved = {name: tensor.clone() for name, tensor in engine.weights()}
    engine.save(path)
    barrier(world.control, "saved")
    norm, after = trained(engine, wide, batch)
    for layout, mesh in (("pp2-vpp2", wide), ("tp2", wide), ("fsdp2", world.meshes["narrow"])):
        other = engine_of(layout, mesh)
        if layout == "pp2-vpp2":
            check_gradients_add_up(other, mesh, batch)
        other.load(path)
        assert other.updates == 1
        assert all(torch.equal(tensor, saved[name]) for name, tensor in other.weights()), layout
        other_norm, other_after = trained(other, mesh, batch)
        assert other_norm == pytest.approx(norm, rel=1e-5), layout
        for name, tensor in after.items():  # a lost moment would show at this learning rate
            torch.testing.assert_close(other_after[name], tensor, atol=1e-5, rtol=1e-4, msg=f"{layout} {name}")
    check_other_models(folder, world, batch)
    close_world(world)
