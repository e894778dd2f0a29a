from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("module", ["spmd_rl", "spmd_rl.config", "spmd_rl.models", "spmd_rl.rewards"])
def test_light_modules_import_no_torch(module):
    code = f"import sys, {module}; sys.exit('torch is imported' if 'torch' in sys.modules else 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_transformers_can_be_imported():
    """Fails with `operator torchvision::nms does not exist` where a torchvision for another torch is installed."""
    from transformers import LlamaForCausalLM

    assert LlamaForCausalLM.base_model_prefix == "model"


@pytest.mark.slow
@pytest.mark.network
def test_the_wheel_carries_the_configuration(tmp_path):
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("spmd_rl-*.whl")
    shipped = set(zipfile.ZipFile(wheel).namelist())
    wanted = {f"spmd_rl/{file.relative_to(ROOT)}" for file in (ROOT / "conf").rglob("*.yaml")}
    assert wanted and wanted <= shipped
    assert "spmd_rl/config.py" in shipped and not any(name.startswith("tests/") for name in shipped)
