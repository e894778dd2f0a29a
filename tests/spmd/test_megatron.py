"""What is Megatron's own: its names, the interleaved pipeline, and the distributed optimizer in another layout."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from benchmarks.parity import make, save_model, share, start, weighted
from spmd_rl.collectives import barrier
from spmd_rl.config import OptimizerConfig
from spmd_rl.engine.megatron.config import LAYOUTS, MegatronConfig, Sizes, problems, replica_width
from spmd_rl.engine.megatron.names import VALUE_HEAD, WHOLE, Place, checkpoint_shapes, pieces, runs
from spmd_rl.mesh import close_world
from tests.helpers import make_rows, tiny_config
from tests.launch import spmd

KIND = "GQA + qk-norm"
GROUPS = [(5, [4, 1, 7]), (9, [3, 3]), (2, [6]), (3, [2, 5, 4])]
DENSE = Sizes("qwen3", 2, 8, 4, 2, 4, 12, 7, 0, 0, False)
MIXTURE = replace(DENSE, model_type="qwen3_moe", experts=4, expert_intermediate=6, tied=True)


def local_shapes(sizes: Sizes, place: Place) -> dict[str, tuple[int, ...]]:
    """Megatron's parameters on a rank of a single pipeline stage."""
    hidden, dim, tp, etp = sizes.hidden, sizes.head_dim, place.tensor_size, place.expert_tensor_size
    rows = -(-sizes.vocabulary // tp)
    found = {"embedding.word_embeddings.weight": (rows, hidden), "decoder.final_layernorm.weight": (hidden,)}
    found |= {} if sizes.tied else {"output_layer.weight": (rows, hidden)}
    for layer in range(sizes.layers):
        mlp = {
            "mlp.linear_fc1.weight": (2 * sizes.intermediate // tp, hidden),
            "mlp.linear_fc2.weight": (hidden, sizes.intermediate // tp),
        }
        if sizes.experts:
            inner = sizes.expert_intermediate // etp
            mlp = {"mlp.router.weight": (sizes.experts, hidden)}
            for e in range(sizes.experts // place.expert_size):
                mlp[f"mlp.experts.local_experts.{e}.linear_fc1.weight"] = (2 * inner, hidden)
                mlp[f"mlp.experts.local_experts.{e}.linear_fc2.weight"] = (hidden, inner)
        parts = {
            "input_layernorm.weight": (hidden,),
            "pre_mlp_layernorm.weight": (hidden,),
            "self_attention.linear_qkv.weight": ((sizes.heads + 2 * sizes.kv_heads) * dim // tp, hidden),
            "self_attention.linear_proj.weight": (hidden, sizes.heads * dim // tp),
            "self_attention.q_layernorm.weight": (dim,),
            "self_attention.k_layernorm.weight": (dim,),
        }
        found |= {f"decoder.layers.{layer}.{name}": shape for name, shape in (parts | mlp).items()}
    return found


@pytest.mark.parametrize("sizes", [DENSE, MIXTURE], ids=["dense", "mixture"])
@pytest.mark.parametrize(("tensor", "expert", "expert_tensor"), [(1, 1, 1), (2, 1, 2), (2, 2, 1), (1, 4, 1)])
def test_every_element_of_the_checkpoint_stands_in_one_place(sizes, tensor, expert, expert_tensor):
    """However the flattened parameters are cut, as the distributed optimizer cuts them."""
    shapes = checkpoint_shapes(sizes, value_model=False)
    for cuts in ((), (1, 5, 17), (16,)):
        seen = {name: torch.zeros(shape, dtype=torch.int64) for name, shape in shapes.items()}
        for t, e, et in product(range(tensor), range(expert), range(expert_tensor)):
            place = Place(t, tensor, e, expert, et, expert_tensor)
            for name, shape in local_shapes(sizes, place).items():
                part = name.partition("layers.")[2].partition(".")[2]
                in_experts, whole = ".experts." in name, part in WHOLE or "final_layernorm" in name
                if (in_experts and t != et * (expert_tensor > 1)) or (not in_experts and (e or et != t * (expert_tensor > 1))):
                    continue
                if whole and t:
                    continue
                found, size = runs(name, shape[0], sizes, place), torch.Size(shape).numel()
                bounds = [0, *(cut for cut in cuts if cut < size), size]
                for low, high in zip(bounds, bounds[1:]):
                    for piece in pieces(found, shape[1] if len(shape) == 2 else None, low, high):
                        assert 0 <= piece.start < high - low
                        seen[piece.name][tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.size))] += 1
        assert all((count == 1).all() for count in seen.values()), {n: c for n, c in seen.items() if (c != 1).any()}


def test_a_fused_parameter_is_cut_where_its_tensors_meet():
    """Two key heads, each with its queries above it, on one of two tensor ranks."""
    sizes, place = replace(DENSE, kv_heads=4), Place(1, 2, 0, 1, 0, 1)
    found = runs("decoder.layers.3.self_attention.linear_qkv.weight", 24, sizes, place)
    stem = "model.layers.3.self_attn."
    assert [(run.first, run.name.removeprefix(stem), run.row) for run in found] == [
        (0, "q_proj.weight", 8), (4, "k_proj.weight", 8), (8, "v_proj.weight", 8),
        (12, "q_proj.weight", 12), (16, "k_proj.weight", 12), (20, "v_proj.weight", 12),
    ]  # fmt: skip
    inside = list(pieces(found, 8, 3 * 8 + 2, 5 * 8))
    assert [(piece.name.removeprefix(stem), piece.offset, piece.size, piece.start) for piece in inside] == [
        ("q_proj.weight", (11, 2), (1, 6), 0),
        ("k_proj.weight", (8, 0), (1, 8), 6),
    ]
    with pytest.raises(KeyError):
        runs("decoder.layers.0.self_attention.linear_q_down_proj.weight", 4, sizes, place)


def said(ranks: int, kind: str = "llama", more: dict | None = None, **options) -> list[str]:
    return problems(MegatronConfig(dtype="float32", **options), ranks, tiny_config(kind).to_dict() | (more or {}))


def test_problems_name_what_would_work():
    assert said(4, tensor_parallel_size=2, pipeline_parallel_size=2) == []
    assert "set sizes whose product does" in said(4, tensor_parallel_size=3)[0]
    assert "set one of [1, 2]" in said(4, tensor_parallel_size=4)[0]
    assert "do not divide 2 layers - set pipeline x virtual to one of [1, 2]" in said(4, pipeline_parallel_size=4)[0]
    assert "set 1, or engine.pipeline_parallel_size over 1" in said(2, virtual_pipeline_size=2)[0]
    assert "this model has no experts - set 1" in said(2, expert_parallel_size=2)[0]
    assert "set true" in said(2, "qwen3_moe", tensor_parallel_size=2, sequence_parallel=False)[0]
    assert "are split over the 1 ranks" in said(4, "qwen3_moe", pipeline_parallel_size=2, expert_parallel_size=2)[0]
    assert "not 'gemma' - set engine=fsdp" in said(2, more={"model_type": "gemma"})[0]
    assert "rope of type yarn" in said(2, more={"rope_parameters": {"rope_type": "yarn"}})[0]
    assert "is too small - set at least 1" in said(2, context_parallel_size=0)[0]


@spmd(world_size=2)
def test_an_interleaved_pipeline_takes_any_number_of_micro_batches(folder):
    """Fewer than stages, or no multiple of them: it adds dummies of its own, which nobody sees."""
    world = start({"pipeline": 2}, 2)
    mesh, batch = world.meshes["pipeline"], make_rows(GROUPS)
    if world.rank == 0:
        save_model(KIND, folder / "model")
    barrier(world.control, "model")
    engine = make("megatron", folder / "model", mesh, pipeline_parallel_size=2, virtual_pipeline_size=2)
    norms, seen = [], []
    for size in (20, 3, 2):
        with engine.train_mode():
            stats = engine.forward_backward_batch(
                share(batch, mesh, size), lambda output, data: (seen.append(len(data)), weighted(output, data))[1]
            )
            engine.set_lr(0.0)
            norms.append(engine.optimizer_step())
        assert sum(seen) == len(batch)
        assert set(stats) == {"loss"}
        seen.clear()
        with engine.eval_mode():
            outputs = engine.forward_backward_batch(share(batch, mesh, size), None, forward_only=True, with_entropy=True)
        assert len(outputs) == len(share(batch, mesh, size))
        assert all(output.log_probs.shape == output.entropy.shape for output in outputs)
    assert norms == pytest.approx(norms[:1] * 3, rel=1e-5)
    close_world(world)


def moments(engine) -> dict[str, torch.Tensor]:
    found = {}
    for kind in ("exp_avg", "exp_avg_sq"):
        found |= {(kind, name): tensor.clone() for name, tensor in engine.stream.tensors(lambda shard, k=kind: shard.moment(k))}
    return found


@pytest.mark.slow
@spmd(world_size=4)
def test_the_optimizer_moves_to_other_layouts(folder):
    """Bitwise, with the number of its steps, from two tensor ranks of a pipeline of two to replicas and back."""
    names = ("tp2pp2", "tp2dp2", "cp2dp2")
    widths = {name: replica_width(MegatronConfig(**LAYOUTS[name][1])) for name in names}
    world = start(widths, 4)
    batch = make_rows(GROUPS)
    for model_type, kind in (("language_model", KIND), ("value_model", KIND), ("language_model", "MoE")):
        path = Path(folder) / kind
        if world.rank == 0:
            save_model(kind, path)
        barrier(world.control, "model")
        saved, expected = None, {}
        for step, name in enumerate((*names, names[0])):
            optimizer = OptimizerConfig(learning_rate=1e-3, total_steps=8)
            engine = make("megatron", path, world.meshes[name], model_type=model_type, optimizer=optimizer, **LAYOUTS[name][1])
            if saved is not None:
                engine.load(saved)
                assert engine.steps == step
                assert {float(shard.optimizer.state[shard.values]["step"]) for shard in engine.shards} <= {float(step)}
                for found in (dict(engine.weights()), moments(engine)):
                    assert all(torch.equal(tensor, expected[key]) for key, tensor in found.items()), (name, model_type)
            with engine.train_mode():
                engine.forward_backward_batch(share(batch, world.meshes[name], 3), weighted)
                engine.optimizer_step()
            engine.lr_scheduler_step()
            saved = Path(folder) / f"{model_type}-{kind[:3]}-{step}"
            engine.save(saved)
            barrier(world.control, "saved")
            expected = {key: tensor.clone() for key, tensor in engine.weights()} | moments(engine)
            assert VALUE_HEAD not in expected
    close_world(world)
