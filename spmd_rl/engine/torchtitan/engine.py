"""The engine: TorchTitan's parallel decoder in our loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from spmd_rl.batch import TokenOutput
from spmd_rl.engine.eager import EagerEngine, full_tensors, global_norm
from spmd_rl.engine.packing import Packed, dummy_batch, pack
from spmd_rl.engine.slices import load_slices
from spmd_rl.engine.torchtitan.layout import length_multiple
from spmd_rl.engine.torchtitan.names import WRAPPED, sources, to_checkpoint
from spmd_rl.metrics import Stats, add_stats


class Stages(nn.Module):
    """The modules of this rank's pipeline stages under one root, by the names that they have in the whole decoder."""

    def __init__(self, parts: list[nn.Module], localize: Callable):
        super().__init__()
        self.parts, self.localize = tuple(parts), localize  # a tuple of modules is no child
        layers = {}
        for part in parts:
            layers.update(part.layers.items())
            for name, module in part.named_children():
                if name != "layers" and module is not None:
                    self.add_module(name, module)
        self.layers = nn.ModuleDict(layers)

    def named_parameters(self, *args, **kwargs) -> Iterator[tuple[str, nn.Parameter]]:
        """Activation checkpointing leaves no trace in names."""
        for name, parameter in super().named_parameters(*args, **kwargs):
            yield name.replace(WRAPPED, ""), parameter

    def forward(self, packed: Packed, with_entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        """Without a pipeline: [N] float32 for the packed response tokens, and their entropy [N]."""
        return self.parts[0](None, self.localize(packed), with_entropy)


class TorchTitanEngine(EagerEngine):
    def __init__(self, model_config, engine_config, optimizer_config, checkpoint_config, mesh):
        super().__init__(model_config, engine_config, optimizer_config, checkpoint_config, mesh)
        if mesh.device.type == "cpu":
            from spmd_rl.engine.torchtitan import cpu

            cpu.prepare()
        from spmd_rl.engine.torchtitan.build import build

        self.length_multiple = length_multiple(engine_config)
        hf = AutoConfig.from_pretrained(model_config.folder, trust_remote_code=model_config.trust_remote_code)
        built = build(hf, engine_config, len(mesh.ranks), mesh.device, model_config.model_type == "value_model")
        self.dims, self.shapes = built.dims, built.shapes
        self.module = Stages(built.parts, self._localize)
        self.rotary = LlamaRotaryEmbedding(hf).to(mesh.device)
        self.pipeline = self._pipeline(built, hf.hidden_size) if engine_config.pipeline_parallel_size > 1 else None
        load_slices(self._stored().items(), sources, Path(model_config.folder))
        if model_config.model_type == "value_model" and self.module.parts[-1].lm_head is not None:
            nn.init.zeros_(self.module.lm_head.weight)  # the first values are 0 whatever the state
        self.finish_build()

    def _pipeline(self, built, hidden_size: int):
        from spmd_rl.engine.torchtitan.pipeline import Pipeline

        config = self.config
        return Pipeline(
            parts=built.parts,
            stages=built.stages,
            num_stages=config.pipeline_parallel_size * config.virtual_pipeline_size,
            group=built.dims.get_mesh("pp").get_group(),
            hidden_size=hidden_size,
            dtype=torch.bfloat16 if config.dtype == "bfloat16" else torch.float32,
            sequence_ranks=config.context_parallel_size * (config.tensor_parallel_size if config.sequence_parallel else 1),
            device=self.mesh.device,
        )

    def _localize(self, packed: Packed):
        """What this rank sees of a packed row: under context parallelism the chunks `rank` and `-1 - rank` of twice as many
        as ranks, so that all have as much to attend to."""
        from spmd_rl.engine.torchtitan.modules import Local

        mine, gathered, positions = None, None, packed.position_ids
        if (context := self.dims.get_optional_mesh("cp")) is not None:
            size = context.size()
            chunks = torch.arange(positions.shape[1], device=positions.device).chunk(2 * size)
            parts = [torch.cat([chunks[rank], chunks[-1 - rank]]) for rank in range(size)]
            mine, gathered = parts[context.get_local_rank()], torch.cat(parts)
            positions = positions[:, mine]
        cos, sin = self.rotary(torch.empty(0, device=positions.device), positions)
        return Local(packed, (cos[0, :, None], sin[0, :, None]), mine, gathered)

    def _in_checkpoint(self, name: str) -> bool:
        """Whether a checkpoint of the language model has this parameter."""
        return self.model_config.model_type == "language_model" or not name.startswith("lm_head.")

    def _stored(self) -> dict[str, nn.Parameter]:
        """This rank's parameters that a checkpoint has."""
        return {name: parameter for name, parameter in self.module.named_parameters() if self._in_checkpoint(name)}

    def gradient_norm(self, parameters: list[nn.Parameter]) -> float:
        norm = global_norm(parameters)
        if self.pipeline is None:
            return norm
        total = torch.tensor(norm, dtype=torch.float64, device=self.mesh.device) ** 2
        dist.all_reduce(total, group=self.pipeline.group)
        return math.sqrt(float(total))

    def forward_backward_batch(self, micro_batches, loss_function, forward_only=False, with_entropy=False):
        if self.pipeline is None or not micro_batches:
            return super().forward_backward_batch(micro_batches, loss_function, forward_only, with_entropy)
        return self._run_pipeline(list(micro_batches), loss_function, forward_only, with_entropy)

    def _run_pipeline(self, batches: list, loss_function, forward_only: bool, with_entropy: bool) -> list[TokenOutput] | Stats:
        from spmd_rl.engine.torchtitan.pipeline import padded

        real, stats = len(batches), {}
        rows = [batch if len(batch) else dummy_batch() for batch in batches]
        rows += [dummy_batch() for _ in range(self.pipeline.count(real) - real)]
        packs = [pack(data, self.shared_prompt, self.length_multiple, self.mesh.device) for data in rows]
        longest = max(packed.input_ids.shape[1] for packed in packs)
        packs = [padded(packed, longest) for packed in packs]
        found: dict[int, tuple[Tensor, Tensor | None]] = {}

        def finish(index: int, tokens: Tensor, entropy: Tensor | None) -> Tensor:
            nonlocal stats
            loss = tokens.sum() * 0
            if forward_only:
                found[index] = tokens, entropy
            elif index < real:
                batch = batches[index]
                some = len(batch) > 0
                output = self._output(packs[index], tokens, entropy) if some else self._no_output(tokens, batch, with_entropy)
                own, more = loss_function(output, batch.to(self.mesh.device))
                loss, stats = loss + own, add_stats(stats, more)
            return loss

        self.pipeline.run([self._localize(packed) for packed in packs], with_entropy, finish, forward_only)
        if not forward_only:
            numbers = {key: type(stat)(*map(float, vars(stat).values())) for key, stat in stats.items()}  # no device travels
            return self.pipeline.share_object(numbers)
        outputs = []
        with_entropy = with_entropy and self.model_config.model_type == "language_model"
        for index, batch in enumerate(batches):
            count = len(packs[index].targets)
            tokens, entropy = found.get(index, (None, None))
            nothing = torch.empty(1 + with_entropy, count, device=self.mesh.device)
            kept = [tokens] + [entropy] * with_entropy
            both = self.pipeline.share(torch.stack(kept) if tokens is not None else nothing)
            some = len(batch) > 0
            tokens, entropy = both[0], both[1] if with_entropy else None
            output = self._output(packs[index], tokens, entropy) if some else self._no_output(tokens, batch, with_entropy)
            outputs.append(TokenOutput(**{k: v if v is None else v.cpu() for k, v in vars(output).items()}))
        return outputs

    def weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        return self._stream_stages(self._stored(), dtype)

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        return self._stream_stages({name: parameter.grad for name, parameter in self._stored().items()})

    @torch.no_grad()
    def _stream_stages(self, held: dict[str, Any], dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Stage by stage; the ranks that hold one gather it and send it to those of the other stages."""
        for stage, shapes in enumerate(self.shapes):
            shapes = [(name, shape) for name, shape in shapes if self._in_checkpoint(name)]
            if self.pipeline is None:
                whole = full_tensors(((name, held[name]) for name, _ in shapes), dtype)
            else:
                whole = self._sent(shapes, held, stage % self.pipeline.group.size(), dtype or torch.float32)
            for name, tensor in whole:
                yield from to_checkpoint(name, tensor)

    def _sent(self, shapes: list, held: dict[str, Tensor], owner: int, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Full tensors of a stage that pipeline rank `owner` holds."""
        if self.pipeline.group.rank() == owner:
            own = full_tensors(((name, held[name]) for name, _ in shapes), dtype)
            whole = ((name, tensor.to(dtype).contiguous()) for name, tensor in own)
        else:
            whole = ((name, torch.empty(shape, dtype=dtype, device=self.mesh.device)) for name, shape in shapes)
        for name, tensor in whole:
            dist.broadcast(tensor, group=self.pipeline.group, group_src=owner)
            yield name, tensor

    def _check_packing(self) -> None:
        """Nothing to find out: the attention is ours, of models whose layers all attend to everything before."""
