"""Generation with a whole transformers model on each rank: the rollout backend that needs nothing but torch.

A prompt is computed once for its group; its keys and values are then copied to the siblings, which decode together in
one preallocated cache. B rows decoding, P prompts, R requests, T tokens, N = max_tokens, V vocabulary, L cache columns.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from spmd_rl.batch import Sampling
from spmd_rl.config import RolloutConfig
from spmd_rl.engine import hf_names
from spmd_rl.engine.base import held_bytes
from spmd_rl.engine.half import float32_products, is_emulated
from spmd_rl.mesh import RoleMesh
from spmd_rl.roles.generation import Expired, Reply, Request, RolloutBackend, RolloutModel

ATTENTION = "spmd_rl_grouped"
ONLY_FULL = "rollout.backend 'hf' knows full softmax attention only"
BLOCK = 128  # vocabulary entries summed at once when a cumulative distribution is inverted


def grouped_attention(module, query, key, value, attention_mask, scaling=None, sliding_window=None, softcap=None,
                      s_aux=None, **kwargs):  # fmt: skip
    """Softmax attention without repeated keys: the query heads of a key head are laid along the token axis.

    query [B, heads, tokens, dim], key and value [B, key heads, L, dim], additive mask [B, 1, tokens, L].
    Returns [B, tokens, heads, dim]. Raises ValueError for sliding windows, soft-capped logits and attention sinks."""
    if sliding_window is not None or softcap is not None or s_aux is not None:
        what = f"sliding_window={sliding_window}, softcap={softcap}, sinks={s_aux is not None}"
        raise ValueError(f"model type '{module.config.model_type}' has {what}: {ONLY_FULL}")
    batch, heads, tokens, dim = query.shape
    repeats = heads // key.shape[1]
    query = query.reshape(batch, key.shape[1], repeats * tokens, dim)
    mask = attention_mask if tokens == 1 else attention_mask.repeat(1, 1, repeats, 1)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    return out.reshape(batch, heads, tokens, -1).transpose(1, 2), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, grouped_attention)


class PrefixCache:
    """Keys and values of P left padded prompts as the model makes them: a [P, heads, T, dim] pair a layer."""

    def __init__(self):
        self.layers: list[tuple[Tensor, Tensor]] = []

    def update(self, keys: Tensor, values: Tensor, layer: int, *args, **kwargs) -> tuple[Tensor, Tensor]:
        self.layers.append((keys, values))
        return keys, values


class RowCache:
    """Keys and values of the rows that decode together: a [B, heads, L, dim] pair a layer, written in place."""

    def __init__(self, prefix: PrefixCache, owner: Tensor, num_new: int):
        """`owner` [B] int64: the prompt of each row; `num_new`: columns after the prompt."""
        self.rows, self.column = len(owner), prefix.layers[0][0].shape[2]
        self.layers = [(self._grow(k, owner, num_new), self._grow(v, owner, num_new)) for k, v in prefix.layers]

    @staticmethod
    def _grow(prompt: Tensor, owner: Tensor, num_new: int) -> Tensor:
        _, heads, tokens, dim = prompt.shape
        out = prompt.new_empty(len(owner), heads, tokens + num_new, dim)
        out[:, :, :tokens] = prompt[owner]
        return out

    def update(self, keys: Tensor, values: Tensor, layer: int, *args, **kwargs) -> tuple[Tensor, Tensor]:
        all_keys, all_values = (x[: self.rows] for x in self.layers[layer])
        all_keys[:, :, self.column] = keys[:, :, 0]
        all_values[:, :, self.column] = values[:, :, 0]
        return all_keys[:, :, : self.column + 1], all_values[:, :, : self.column + 1]

    def keep(self, live: Tensor) -> Tensor:
        """Drop the rows not in `live` (ascending): the last live rows move into the gaps. Returns the new order [B]."""
        order, num = torch.arange(self.rows, device=live.device), len(live)
        gap = torch.ones(self.rows, dtype=torch.bool, device=live.device).index_fill_(0, live, False)
        gaps, movers = gap[:num].nonzero()[:, 0], live[live >= num]
        order[gaps] = movers
        if len(gaps):
            for pair in self.layers:
                for x in pair:
                    x[gaps, :, : self.column] = x[movers, :, : self.column]
        self.rows = num
        return order[:num]


@dataclass
class Prefix:
    """Prompts computed once."""

    cache: PrefixCache
    mask: Tensor  # [P, 1, 1, T] additive: -inf at padding
    lengths: Tensor  # [P] int64
    logits: Tensor  # [P, V] float32: of the first response token


@dataclass
class Drawn:
    """The replies to all requests, filled as tokens are drawn."""

    tokens: Tensor  # [R, N] int64
    log_probs: Tensor  # [R, N] float32 nats
    counts: Tensor  # [R] int64: tokens drawn
    stopped: Tensor  # [R] bool: ended by a stop id


def _invert(weights: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Where the cumulative sum of `weights` [B, K] first exceeds `target` [B], and the rest of the target. float64."""
    cumulative = weights.cumsum(-1)
    # Rounding must not carry the target past the last entry that has weight
    target = torch.minimum(target, torch.nextafter(cumulative[:, -1], torch.zeros_like(target))).unsqueeze(-1)
    index = torch.searchsorted(cumulative, target, right=True).clamp_(max=weights.shape[-1] - 1)
    return index[:, 0], (target - cumulative.gather(1, index) + weights.gather(1, index))[:, 0]


def draw(logits: Tensor, temperature: float, uniforms: Tensor | None) -> tuple[Tensor, Tensor]:
    """One token a row by inverting the cumulative distribution; the largest logit at temperature 0.

    logits [B, V] float32, overwritten; uniforms [B] float64 in [0, 1). Returns tokens [B] int64 and their log-prob [B]
    float32 in nats at `temperature` (at 1 where it is 0), NaN where logits are not finite."""
    rows = torch.arange(len(logits), device=logits.device)
    greedy = logits.argmax(-1) if temperature == 0 else None
    if temperature not in (0, 1):
        logits.div_(temperature)
    weights = F.pad(logits.sub_(logits.amax(-1, keepdim=True)).exp_(), (0, -logits.shape[-1] % BLOCK))
    blocks = weights.view(len(logits), -1, BLOCK)
    sums = blocks.sum(-1).double()
    total = sums.sum(-1)
    if greedy is not None:
        tokens = greedy
    else:
        block, rest = _invert(sums, uniforms * total)
        tokens = block * BLOCK + _invert(blocks[rows, block].double(), rest)[0]
        tokens.clamp_(max=logits.shape[-1] - 1)  # NaN is found nowhere
    return tokens, (weights[rows, tokens].double() / total).log().float()


def problems(config: RolloutConfig, device: str) -> list[str]:
    """What this backend cannot do with this configuration."""
    if config.tensor_parallel_size != 1:
        return [
            f"rollout.tensor_parallel_size: {config.tensor_parallel_size} with rollout.backend=hf, which holds a whole model on "
            f"each rank - set 1, or rollout=vllm"
        ]
    return []


class HFRollout(RolloutBackend):
    """Local to a rank: no method here is collective."""

    def __init__(self, config: RolloutConfig, model: RolloutModel, mesh: RoleMesh):
        """Loads the whole model in `config.dtype` (float32 or bfloat16).
        Raises ValueError for other than full softmax attention."""
        self.max_batch_rows, self.device = config.max_batch_rows, mesh.device
        self.model = AutoModelForCausalLM.from_pretrained(
            model.folder, dtype=vars(torch)[config.dtype], attn_implementation=ATTENTION, local_files_only=True,
            trust_remote_code=model.trust_remote_code,
        )  # fmt: skip
        self.model.requires_grad_(False).eval().to(self.device)
        self.asleep: dict[torch.nn.Parameter, torch.Size] = {}  # whose memory was given back, until an update
        if is_emulated(self.model.dtype, self.device):
            float32_products(self.model)
        accepted = inspect.signature(self.model.forward).parameters
        self.cache_name = "cache" if "cache" in accepted else "past_key_values"  # renamed in transformers 5.24
        model_config = self.model.config
        self.max_model_len = config.max_model_len or model_config.max_position_embeddings
        kinds = set(model_config.to_dict().get("layer_types") or ()) - {"full_attention"}
        if kinds:
            raise ValueError(f"model type '{model_config.model_type}' has {', '.join(sorted(kinds))}: {ONLY_FULL}")
        hf_names.check_model_type(model_config.model_type, dict(self.model.named_parameters()))
        one = torch.ones(1, dtype=torch.int64, device=self.device)
        self._prefill(one.unsqueeze(0), one)  # a layer that cannot be computed is refused here

    @torch.inference_mode()
    def complete(self, requests: Sequence[Request], sampling: Sampling, expired: Expired | None = None) -> list[Reply]:
        """Requests with the same ids that are decoded together are computed once up to there."""
        width = max((r.max_tokens for r in requests), default=0)
        ids = torch.zeros(len(requests), width, dtype=torch.int64, device=self.device)
        drawn = Drawn(ids, ids.float(), ids.new_zeros(len(requests)), ids.new_zeros(len(requests), dtype=torch.bool))
        # Prompts padded to each other are of like length; equal ones are neighbours
        order = sorted(range(len(requests)), key=lambda i: (-len(requests[i].ids), requests[i].ids, i))
        for start in range(0, len(order), self.max_batch_rows):
            rows = order[start : start + self.max_batch_rows]
            prompts = list(dict.fromkeys(tuple(requests[i].ids) for i in rows))
            lengths = torch.tensor([len(p) for p in prompts], device=self.device)
            padded = pad_sequence([torch.tensor(p) for p in prompts], batch_first=True).to(self.device)
            index = {prompt: i for i, prompt in enumerate(prompts)}
            owner = torch.tensor([index[tuple(requests[i].ids)] for i in rows], device=self.device)
            self._decode(self._prefill(padded, lengths), owner, rows, requests, sampling, drawn, expired)
        columns = (drawn.tokens, drawn.log_probs, drawn.counts, drawn.stopped)
        return [Reply(t[:n], p[:n], stopped) for t, p, n, stopped in zip(*(c.tolist() for c in columns))]

    @torch.inference_mode()
    def score(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        found = []
        for row in rows:
            ids = torch.tensor([row], device=self.device)
            positions = torch.arange(len(row), device=self.device)
            mask = self._additive((positions <= positions[:, None])[None, None])
            out = self.model(input_ids=ids, position_ids=positions[None], attention_mask=mask, use_cache=False)
            log_probs = out.logits[0, :-1].float().log_softmax(-1)
            found.append(log_probs.gather(1, ids[0, 1:, None])[:, 0].tolist())
        return found

    def update_weights(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Copies full tensors into the model, in place."""
        targets = hf_names.from_checkpoint(dict(self.model.named_parameters()))
        for name, tensor in named:
            if name in targets:
                targets.pop(name).copy_(tensor)
        if targets:
            raise ValueError(f"parameters of the rollout model got no weights: {', '.join(sorted(targets))}")

    def sleep(self) -> None:
        for parameter in self.model.parameters():
            self.asleep[parameter] = parameter.shape
            parameter.data = parameter.new_empty(0)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def wake_up(self, what: str) -> None:
        for parameter, shape in self.asleep.items():
            parameter.data = parameter.new_empty(shape)
        self.asleep.clear()

    def memory(self) -> dict[str, int]:
        """The cache exists only while a batch decodes."""
        return {"weights": held_bytes(self.model.parameters(), self.device), "kv_cache": 0}

    def shutdown(self) -> None:
        del self.model

    def _uniforms(self, requests: Sequence[Request], rows: list[int], width: int) -> Tensor:
        """[B, N] float64 in [0, 1): one generator a request."""
        out = torch.zeros(len(rows), width, dtype=torch.float64)
        for row, i in zip(out, rows):
            row.uniform_(generator=torch.Generator().manual_seed(requests[i].seed))
        return out.to(self.device)

    @torch.inference_mode()
    def _prefill(self, ids: Tensor, lengths: Tensor) -> Prefix:
        """ids [P, T] right padded, lengths [P]. The cache is left padded: all rows then write the same column."""
        width = int(lengths.max())
        positions = torch.arange(width, device=ids.device) - (width - lengths).unsqueeze(1)  # [P, T], < 0 is padding
        real = positions >= 0
        positions.clamp_(min=0)
        causal = torch.ones(width, width, dtype=torch.bool, device=ids.device).tril()
        itself = torch.eye(width, dtype=torch.bool, device=ids.device)  # padding must see something: no NaN
        allowed = causal & real[:, None, None, :] | itself
        cache = PrefixCache()
        logits = self._logits(ids.gather(1, positions), positions, self._additive(allowed), cache)
        return Prefix(cache, self._additive(real[:, None, None, :]), lengths, logits)

    def _logits(self, ids: Tensor, positions: Tensor, mask: Tensor, cache: PrefixCache | RowCache) -> Tensor:
        """[B, V] float32 after the last of `ids` [B, T]; their keys and values go into `cache`."""
        out = self.model(input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=True, logits_to_keep=1,
                         **{self.cache_name: cache})  # fmt: skip
        return out.logits[:, -1].float()

    def _additive(self, allowed: Tensor) -> Tensor:
        zeros = torch.zeros(allowed.shape, dtype=self.model.dtype, device=allowed.device)
        return zeros.masked_fill_(~allowed, -torch.inf)

    def _decode(self, prefix: Prefix, owner: Tensor, indices: list[int], requests: Sequence[Request], sampling: Sampling,
                drawn: Drawn, expired: Expired | None) -> None:  # fmt: skip
        """Draws for requests `indices` [B] of prompts `owner` [B] into `drawn`; a finished row leaves the batch at once."""
        limits = torch.tensor([requests[i].max_tokens for i in indices], device=self.device)
        least = torch.tensor([requests[i].min_tokens for i in indices], device=self.device)
        rows, place = torch.tensor(indices, device=self.device), torch.arange(len(indices), device=self.device)
        steps = int(limits.max())
        uniforms = self._uniforms(requests, indices, steps if sampling.temperature else 0)
        cache = RowCache(prefix.cache, owner, steps - 1)
        mask = F.pad(prefix.mask, (0, steps - 1))[owner]  # [B, 1, 1, L]
        positions, logits = prefix.lengths[owner].unsqueeze(1), prefix.logits[owner]
        stop_ids = torch.tensor(sampling.stop_token_ids, dtype=torch.int64, device=self.device)
        for t in range(steps):
            early = (least[place] > t).nonzero()
            if len(early):
                logits[early, stop_ids] = -torch.inf
            tokens, log_probs = draw(logits, sampling.temperature, uniforms[place, t] if sampling.temperature else None)
            drawn.tokens[rows, t], drawn.log_probs[rows, t], drawn.counts[rows] = tokens, log_probs, t + 1
            stopped = torch.isin(tokens, stop_ids)
            drawn.stopped[rows] = stopped
            live = (~stopped & (limits[place] > t + 1)).nonzero()[:, 0]
            if len(live) == 0 or expired is not None and expired():
                return
            if len(live) < len(rows):
                order = cache.keep(live)
                rows, place, tokens = rows[order], place[order], tokens[order]
                positions, mask = positions[order], mask[order]
            logits = self._logits(tokens.unsqueeze(1), positions, mask[..., : cache.column + 1], cache)
            cache.column, positions = cache.column + 1, positions + 1
