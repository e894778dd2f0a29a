"""The checkpoint that transformers itself writes is the judge of every name and value."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from spmd_rl.engine.hf_names import check_model_type, from_checkpoint, sources, to_checkpoint
from tests.helpers import tiny_config

TIED = [("llama", True), ("qwen3", True), ("qwen3_moe", True)]
KINDS = [("llama", False), ("qwen2", False), ("qwen3_moe", False), *TIED]


@pytest.fixture(params=KINDS, ids=lambda k: f"{k[0]}-{'tied' if k[1] else 'untied'}")
def saved(request, tmp_path):
    """A random tiny model and the tensors of its safetensors file."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(*request.param))
    model.save_pretrained(tmp_path)
    return model, load_file(tmp_path / "model.safetensors")


def test_parameters_become_the_checkpoint(saved):
    model, file = saved
    ours = {hf: t for name, p in model.named_parameters() for hf, t in to_checkpoint(name, p.detach())}
    assert sorted(ours) == sorted(file)
    for name, tensor in file.items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=0)


def test_a_file_copied_into_the_views_fills_every_parameter(saved):
    model, file = saved
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(torch.nan)
    views = from_checkpoint(dict(model.named_parameters()))
    assert views.keys() == file.keys()
    for name, tensor in file.items():
        views[name].copy_(tensor)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), before[name], rtol=0, atol=0)


def test_sources_cover_each_element_once(saved):
    model, file = saved
    for name, p in model.named_parameters():
        hits = torch.zeros(p.shape, dtype=torch.int32)
        for hf_name, index in sources(name, p.shape):
            assert hits[index].shape == file[hf_name].shape
            hits[index] += 1
        assert (hits == 1).all(), name


def test_experts_of_unknown_layout_are_refused():
    names = ["model.layers.0.mlp.experts.gate_up_proj"]
    check_model_type("qwen3_moe", names)
    check_model_type("llama", ["model.norm.weight"])
    with pytest.raises(ValueError, match=r"'mixtral'.*model\.layers\.0\.mlp\.experts\.gate_up_proj.*qwen3_moe"):
        check_model_type("mixtral", names)
