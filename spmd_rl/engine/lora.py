"""LoRA (https://arxiv.org/abs/2106.09685) by peft: a layer computes W x + alpha / rank * B (A x), and only A and B train.

The reference is the same model with its adapters off. Elsewhere nobody sees adapters: weights are streamed merged, layer by
layer. W [out, in], A [rank, in], B [out, rank], all float32.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from spmd_rl.config import ConfigError, closest
from spmd_rl.engine.slices import local_region

A, B, BASE = ".lora_A.", ".lora_B.", ".base_layer."  # parts of parameter names, peft's
STORED = "lora"  # the key of a checkpoint that holds `settings`


class LoRAOptions(Protocol):
    lora_rank: int
    lora_alpha: float
    lora_targets: list[str] | None


def lora_problems(config: LoRAOptions, model: dict | None) -> list[str]:
    """What is wrong with the options. `model`: its parsed config.json, or None where it is not known yet."""
    rank, targets = config.lora_rank, config.lora_targets
    if rank < 0:
        return [f"engine.lora_rank: {rank} is no rank - set 0 to train all weights, or a rank such as 16"]
    if rank == 0:
        unread = f"engine.lora_targets: {targets}, but there are no adapters (engine.lora_rank=0) - set a rank, or leave it out"
        return [unread] if targets is not None else []
    found = []
    if find_spec("peft") is None:
        found.append(f'engine.lora_rank: {rank} needs peft, which is not installed - pip install "spmd_rl[lora]", or set 0')
    if not 0 < config.lora_alpha < math.inf:
        found.append(f"engine.lora_alpha: {config.lora_alpha} switches the adapters off - set more than 0, such as {2 * rank}")
    if targets == []:
        found.append("engine.lora_targets: names no layer - set null for all linear layers, or names such as [q_proj,v_proj]")
    elif targets and model and model.get("model_type") in CONFIG_MAPPING:  # code of the model's own is not run here
        with torch.device("meta"):
            lm = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model["model_type"]](**model))
        found += _target_problems(linear_layers(lm), targets)
    return found


def linear_layers(lm: nn.Module) -> list[str]:
    """Names of the modules that can be adapted: all linear layers but the head, of which log-probs read the weight alone."""
    head = lm.get_output_embeddings()
    return [name for name, module in lm.named_modules() if isinstance(module, nn.Linear) and module is not head]


def _target_problems(layers: list[str], targets: list[str]) -> list[str]:
    known = list(dict.fromkeys(layer.rpartition(".")[2] for layer in layers))
    return [
        f"engine.lora_targets: no linear layer that can be adapted is called '{target}'{closest(target, known)} - "
        f"set some of [{','.join(known)}], or null for all"
        for target in targets
        if not any(_is(layer, target) for layer in layers)
    ]


def _is(layer: str, target: str) -> bool:
    return f".{layer}".endswith(f".{target}")


def add_adapters(lm: nn.Module, config: LoRAOptions) -> None:
    """Local: puts adapters without values into a model on the meta device, and freezes all else.

    Raises ValueError for targets that it does not have."""
    from peft import LoraConfig, inject_adapter_in_model

    layers = linear_layers(lm)
    if wrong := _target_problems(layers, config.lora_targets or []):
        raise ValueError("\n".join(wrong))
    if config.lora_targets:
        layers = [layer for layer in layers if any(_is(layer, target) for target in config.lora_targets)]
    options = LoraConfig(r=config.lora_rank, lora_alpha=config.lora_alpha, target_modules=layers, init_lora_weights=False)
    inject_adapter_in_model(options, lm, low_cpu_mem_usage=True)


@torch.no_grad()
def draw_adapters(lm: nn.Module, seed: int) -> None:
    """Local: first values. A is uniform as peft draws it, B 0, so that the first model is its base.

    A function of (seed, name) alone: alike on every rank and under every sharding."""
    for name, parameter in lm.named_parameters():
        if A in name:
            local, region = local_region(parameter)
            digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
            bound = parameter.shape[1] ** -0.5
            local.copy_(torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator)[tuple(region)])
        elif B in name:
            parameter.zero_()


def base_parameters(lm: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters without adapters, under the names that they have without them."""
    return ((name.replace(BASE, "."), p) for name, p in lm.named_parameters() if A not in name and B not in name)


def merged(named: Iterable[tuple[str, Tensor]], config: LoRAOptions) -> Iterator[tuple[str, Tensor]]:
    """Local: a stream of all full tensors as one of the base model's, with W + alpha / rank * B A in the place of W.

    One layer's is held at a time; what is adapted is no view of the stream's."""
    scale = config.lora_alpha / config.lora_rank
    weight, first = ("", torch.empty(0)), torch.empty(0)
    for name, tensor in named:
        if name.endswith(f"{BASE}weight"):
            weight = name.replace(BASE, "."), tensor
        elif A in name:
            first = tensor
        elif B in name:
            yield weight[0], torch.addmm(weight[1], tensor, first, alpha=scale)
        else:
            yield name.replace(BASE, "."), tensor


@contextmanager
def adapters_off(lm: nn.Module) -> Iterator[None]:
    """Local: within it the model computes what its base does, bit for bit."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    adapted = [module for module in lm.modules() if isinstance(module, BaseTunerLayer)]
    for module in adapted:
        module.enable_adapters(False)
    yield
    for module in adapted:
        module.enable_adapters(True)


def adapter_state(state: dict[str, Any], module: nn.Module, config: LoRAOptions) -> dict[str, Any]:
    """What a checkpoint needs of an engine's whole state: what trains. The base is read from its own files again."""
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    model = {name: value for name, value in state["model"].items() if name in trained}
    return state | {"model": model, STORED: _settings(module, config)}


def _settings(module: nn.Module, config: LoRAOptions) -> Tensor:
    """float64 (rank, alpha, adapted layers)."""
    count = sum(B in name for name, _ in module.named_parameters())
    return torch.tensor([config.lora_rank, config.lora_alpha, count], dtype=torch.float64)


def check_stored(folder: Path, module: nn.Module, config: LoRAOptions | None) -> None:
    """Collective over the role's mesh. Raises ConfigError where a checkpoint is not of such adapters; `config` None: of none."""
    wanted = None if config is None else _settings(module, config)
    stored = None
    if STORED in dcp.FileSystemReader(folder).read_metadata().state_dict_metadata:
        stored = torch.zeros(3, dtype=torch.float64)
        dcp.load({STORED: stored}, checkpoint_id=folder)
    there, here = _told(stored), _told(wanted)
    if there != here:
        raise ConfigError(
            f"trainer.resume: {folder} holds {there}, this run trains {here} - set engine.lora_rank, engine.lora_alpha and "
            f"engine.lora_targets as they were, or trainer.resume=never"
        )


def _told(settings: Tensor | None) -> str:
    if settings is None:
        return "all weights"
    rank, alpha, count = settings.tolist()
    return f"adapters of {count:.0f} layers (rank {rank:.0f}, alpha {alpha:g})"
