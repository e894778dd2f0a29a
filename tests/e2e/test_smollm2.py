"""The embedded pretrained model, fetched through the command line and converted once into the user's cache."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from spmd_rl.models import SMOLLM2

pytestmark = pytest.mark.network

CHAT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nWhat is 12 + 34?<|im_end|>\n<|im_start|>assistant\n"
)


@pytest.fixture(scope="module")
def folder() -> str:
    environ = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    command = [sys.executable, "-m", "spmd_rl.models", SMOLLM2]
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def model(folder):
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def test_shape_and_ids(model, tokenizer):
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert (model.config.rope_parameters["rope_theta"], model.config.rms_norm_eps) == (100_000.0, 1e-5)
    for config in (model.generation_config, tokenizer):
        assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 2)
    assert (len(tokenizer), tokenizer.model_max_length, len(tokenizer.added_tokens_decoder)) == (49152, 8192, 17)


def test_tokenizer(tokenizer):
    messages = [{"role": "user", "content": "What is 12 + 34?"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == CHAT
    assert tokenizer.tokenize("x  12") == ["x", "ĠĠ", "1", "2"]  # digits are cut off before blanks are grouped
    for text in (CHAT, "naïve 日本語 🎉\n\t1234.5"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text


@torch.no_grad()
def test_it_speaks(model, tokenizer):
    """A wrong order of the rotary rows, scale or norm shows in both: perplexity in the hundreds, no Paris."""
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    told = tokenizer.decode(model.generate(**prompt, max_new_tokens=4, do_sample=False)[0])
    assert told.startswith("The capital of France is Paris")
    ids = tokenizer("The Eiffel Tower is a wrought-iron lattice tower on the Champ de Mars in Paris, France.")
    ids = torch.tensor([ids.input_ids])
    assert model(ids, labels=ids).loss.exp() < 15
