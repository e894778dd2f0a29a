"""The table of engines, and what a third party can do with it."""

from __future__ import annotations

import sys
import types

import pytest

from spmd_rl.engine.fsdp import FSDPConfig, FSDPEngine, problems
from spmd_rl.engine.registry import EngineRegistry


@pytest.mark.parametrize("model_type", ["language_model", "value_model"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_fsdp_is_registered_everywhere(model_type, device):
    assert EngineRegistry.get(model_type, "fsdp", device) is FSDPEngine
    assert EngineRegistry.module("fsdp").Config is FSDPConfig


def test_unknown_rows_list_what_is_registered():
    with pytest.raises(ValueError, match="no engine for language_model / fsdb / cpu; registered: language_model / fsdp / cpu"):
        EngineRegistry.get("language_model", "fsdb", "cpu")
    with pytest.raises(ValueError, match="model_type is one of"):
        EngineRegistry.register("reward_model", "mine", "cpu", "a:B")


def test_a_third_party_registers_or_names_its_own(monkeypatch):
    module = types.ModuleType("their_package")
    module.Engine = type("Engine", (), {})
    monkeypatch.setitem(sys.modules, "their_package", module)
    monkeypatch.setattr(EngineRegistry, "_rows", dict(EngineRegistry._rows))
    EngineRegistry.register("language_model", "theirs", "cpu", "their_package:Engine")
    assert EngineRegistry.get("language_model", "theirs", "cpu") is module.Engine
    assert EngineRegistry.get("value_model", "their_package:Engine", "cuda") is module.Engine
    assert EngineRegistry.module("theirs") is module


def test_a_missing_backend_package_names_the_extra(monkeypatch, tmp_path):
    (tmp_path / "needs_megatron.py").write_text("import megatron_that_is_not_installed\nclass Engine: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(EngineRegistry, "_rows", dict(EngineRegistry._rows))
    EngineRegistry.register("language_model", "megatron", "cpu", "needs_megatron:Engine")
    with pytest.raises(ImportError, match=r'megatron_that_is_not_installed.*pip install "spmd_rl\[megatron\]"'):
        EngineRegistry.get("language_model", "megatron", "cpu")


def test_fsdp_problems_name_the_divisors():
    assert problems(FSDPConfig(), 4) == []
    assert problems(FSDPConfig(shard_size=2), 4) == []
    assert "set one of [1, 2, 4]" in problems(FSDPConfig(shard_size=3), 4)[0]
