"""Generation with a whole transformers model on each rank: the rollout backend that needs nothing but torch.

A prompt is computed once for its group; its keys and values are then copied to the siblings, which decode together in
one preallocated cache. B rows decoding, P prompts, R samples, T tokens, N = max_tokens, V vocabulary, L cache columns.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from spmd_rl.batch import Batch, Prompts, Sampling, sample_seed
from spmd_rl.config import RolloutConfig
from spmd_rl.engine import hf_names

ATTENTION = "spmd_rl_grouped"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
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
    """The responses of all samples, filled as they are drawn."""

    tokens: Tensor  # [R, N] int64
    log_probs: Tensor  # [R, N] float32 nats
    counts: Tensor  # [R] int64: response tokens
    stopped: Tensor  # [R] bool: ended by a stop id


def _invert(weights: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Where the cumulative sum of `weights` [B, K] first exceeds `target` [B], and the rest of the target. float64."""
    cumulative = weights.cumsum(-1)
    # Rounding must not carry the target past the last entry that has weight
    target = torch.minimum(target, torch.nextafter(cumulative[:, -1], torch.zeros_like(target))).unsqueeze(-1)
    index = torch.searchsorted(cumulative, target, right=True).clamp_(max=weights.shape[-1] - 1)
    return index[:, 0], (target - cumulative.gather(1, index) + weights.gather(1, index))[:, 0]


def draw(logits: Tensor, temperature: float, uniforms: Tensor) -> tuple[Tensor, Tensor]:
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


class HFRollout:
    """Local to a rank: no method here is collective."""

    def __init__(self, config: RolloutConfig, folder: str, eos_ids: tuple[int, ...], pad_id: int, seed: int,
                 device: torch.device, trust_remote_code: bool = False):  # fmt: skip
        """Loads the whole model in `folder` in `config.dtype` (float32 or bfloat16). What ends a response is said by
        each `Sampling`, so `eos_ids` is not used. Raises ValueError for other than full softmax attention."""
        self.config, self.pad_id, self.seed, self.device, self.version = config, pad_id, seed, device, 0
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=DTYPES[config.dtype], attn_implementation=ATTENTION, local_files_only=True,
            trust_remote_code=trust_remote_code,
        )  # fmt: skip
        self.model.requires_grad_(False).eval().to(device)
        accepted = inspect.signature(self.model.forward).parameters
        self.cache_name = "cache" if "cache" in accepted else "past_key_values"  # renamed in transformers 5.24
        model_config = self.model.config
        kinds = set(model_config.to_dict().get("layer_types") or ()) - {"full_attention"}
        if kinds:
            raise ValueError(f"model type '{model_config.model_type}' has {', '.join(sorted(kinds))}: {ONLY_FULL}")
        hf_names.check_model_type(model_config.model_type, dict(self.model.named_parameters()))
        one = torch.ones(1, dtype=torch.int64, device=device)
        self._prefill(one.unsqueeze(0), one)  # a layer that cannot be computed is refused here

    def generate(self, prompts: Prompts, sampling: Sampling, step: int) -> Batch:
        """`sampling.n` samples of each prompt, adjacent, in the order of the prompts; 0 prompts give 0 rows.

        A sample depends on (seed, purpose, step, uid, sample) only, up to floating point. Stop ids belong to the
        response; before `min_tokens` they have no probability, and log-probs are those of the distribution drawn from.
        Raises ValueError for an empty prompt, one that leaves no room in the context, and logits that are not finite.
        """
        prompts = prompts.to(self.device)
        self._check(prompts, sampling)
        num_rows, n, width = len(prompts.uid) * sampling.n, sampling.n, sampling.max_tokens
        ids = prompts.input_ids.new_zeros(num_rows, width)
        drawn = Drawn(ids, ids.float(), ids.new_zeros(num_rows), ids.new_zeros(num_rows, dtype=torch.bool))
        uniforms = self._uniforms(prompts.uid.tolist(), sampling, step)
        by_length = prompts.lengths.argsort(descending=True)
        with torch.inference_mode():
            # Prompts padded to each other are of like length; `split` of nothing gives one empty piece
            for chunk in by_length.split(max(1, self.config.max_batch_rows // n)) if num_rows else ():
                prefix = self._prefill(prompts.input_ids[chunk], prompts.lengths[chunk])
                rows = (chunk.unsqueeze(1) * n + torch.arange(n, device=self.device)).flatten()
                owner = torch.arange(len(chunk), device=self.device).repeat_interleave(n)
                for part in torch.arange(len(rows), device=self.device).split(self.config.max_batch_rows):
                    self._decode(prefix, owner[part], rows[part], uniforms, sampling, drawn)
        return self._batch(prompts, sampling, drawn)

    def update_weights(self, named: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copies full tensors under their checkpoint names into the model, in place; what is drawn next is `version`.

        Raises ValueError, after the whole stream, that lists names unknown, missing or of another shape."""
        targets = hf_names.from_checkpoint(dict(self.model.named_parameters()))
        missing, problems = set(targets), []
        for name, tensor in named:
            missing.discard(name)
            if name not in targets:
                problems.append(f"unknown: {name}")
            elif tensor.shape != targets[name].shape:
                problems.append(f"shape {tuple(tensor.shape)}, expected {tuple(targets[name].shape)}: {name}")
            else:
                targets[name].copy_(tensor)
        problems += [f"missing: {name}" for name in sorted(missing)]
        if problems:
            raise ValueError(f"weights of version {version} do not fit the rollout model:\n" + "\n".join(problems))
        self.version = version

    def sleep(self) -> None:
        """Frees the accelerator: weights go to the host."""
        if self.device.type == "cuda":
            self.model.to("cpu")
            torch.cuda.empty_cache()

    def wake_up(self) -> None:
        self.model.to(self.device)

    def shutdown(self) -> None:
        del self.model

    def _check(self, prompts: Prompts, sampling: Sampling) -> None:
        limit = self.model.config.max_position_embeddings - sampling.max_tokens
        for uid, length in zip(prompts.uid.tolist(), prompts.lengths.tolist(), strict=True):
            if not 1 <= length <= limit:
                raise ValueError(f"prompt uid {uid} has {length} tokens; 1 to {limit} fit beside {sampling.max_tokens} "
                                 f"response tokens: shorten it or lower rollout.max_response_tokens")  # fmt: skip

    def _uniforms(self, uids: list[int], sampling: Sampling, step: int) -> Tensor:
        """[R, N] float64 in [0, 1): one generator a sample."""
        out = torch.zeros(len(uids) * sampling.n, sampling.max_tokens, dtype=torch.float64)
        names = [(uid, sample) for uid in uids for sample in range(sampling.n)] if sampling.temperature else []
        for row, (uid, sample) in zip(out, names, strict=False):
            generator = torch.Generator().manual_seed(sample_seed(self.seed, sampling, step, uid, sample))
            row.uniform_(generator=generator)
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

    def _decode(self, prefix: Prefix, owner: Tensor, rows: Tensor, uniforms: Tensor, sampling: Sampling,
                drawn: Drawn) -> None:  # fmt: skip
        """Draws samples `rows` [B] of prompts `owner` [B] into `drawn`; a finished row leaves the batch at once."""
        cache = RowCache(prefix.cache, owner, sampling.max_tokens - 1)
        mask = F.pad(prefix.mask, (0, sampling.max_tokens - 1))[owner]  # [B, 1, 1, L]
        positions, logits = prefix.lengths[owner].unsqueeze(1), prefix.logits[owner]
        stop_ids = torch.tensor(sampling.stop_token_ids, dtype=torch.int64, device=rows.device)
        for t in range(sampling.max_tokens):
            if t < sampling.min_tokens:
                logits.index_fill_(1, stop_ids, -torch.inf)
            tokens, log_probs = draw(logits, sampling.temperature, uniforms[rows, t])
            drawn.tokens[rows, t], drawn.log_probs[rows, t], drawn.counts[rows] = tokens, log_probs, t + 1
            stopped = torch.isin(tokens, stop_ids)
            drawn.stopped[rows] = stopped
            live = (~stopped).nonzero()[:, 0]
            if t + 1 == sampling.max_tokens or len(live) == 0:
                return
            if len(live) < len(rows):
                order = cache.keep(live)
                rows, tokens, positions, mask = rows[order], tokens[order], positions[order], mask[order]
            logits = self._logits(tokens.unsqueeze(1), positions, mask[..., : cache.column + 1], cache)
            cache.column, positions = cache.column + 1, positions + 1

    def _batch(self, prompts: Prompts, sampling: Sampling, drawn: Drawn) -> Batch:
        n, num_rows = sampling.n, len(drawn.counts)
        of_prompts = (prompts.input_ids, prompts.lengths, prompts.uid, prompts.row, prompts.data_source)
        prompt_ids, prompt_lengths, uid, row, data_source = (x.repeat_interleave(n, 0) for x in of_prompts)
        lengths = prompt_lengths + drawn.counts
        width = max(lengths.tolist(), default=0)
        place = torch.arange(width, device=self.device) - prompt_lengths.unsqueeze(1)  # [R, T] index in the response
        response_mask = (place >= 0) & (place < drawn.counts.unsqueeze(1))
        index = place.clamp(0, sampling.max_tokens - 1)
        log_probs = drawn.log_probs.gather(1, index).masked_fill_(~response_mask, 0.0)
        bad = (~log_probs.isfinite()).any(1).nonzero()[:, 0].tolist()
        if bad:
            raise ValueError(f"logits of prompt uid {uid[bad[0]]}, sample {bad[0] % n} are not finite ({len(bad)} of "
                             f"{num_rows} samples): the policy diverged; lower optimizer.learning_rate")  # fmt: skip
        prompt_ids = F.pad(prompt_ids, (0, max(0, width - prompt_ids.shape[1])))[:, :width]
        input_ids = torch.where(response_mask, drawn.tokens.gather(1, index), prompt_ids)
        return Batch(
            input_ids=input_ids.masked_fill_(place >= drawn.counts.unsqueeze(1), self.pad_id),
            prompt_lengths=prompt_lengths, lengths=lengths, response_mask=response_mask,
            uid=uid, sample=torch.arange(n, device=self.device).repeat(len(prompts.uid)), row=row,
            data_source=data_source,
            policy_version=torch.where(response_mask, self.version, -1).to(torch.int32), truncated=~drawn.stopped,
            temperature=torch.full((num_rows,), sampling.temperature or 1.0, device=self.device),
            rollout_log_probs=log_probs, batch_size=[num_rows],
        )  # fmt: skip
