"""What travels between roles: `Prompts` and `Batch`, and the plans that split them. B rows, T tokens, G siblings."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapreplace

import torch
from tensordict import tensorclass
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How to draw completions. `temperature` 0 is greedy; its log-probs are then reported at temperature 1."""

    temperature: float
    n: int  # samples a prompt
    min_tokens: int
    max_tokens: int
    stop_token_ids: tuple[int, ...]  # every id that ends a response, the model's own included
    purpose: str = "train"  # train | validation: part of the seed


@dataclass
class TokenOutput:
    """What a forward pass says of each token; entry t belongs to token t, 0 where nothing was computed."""

    log_probs: Tensor | None = None  # [B, T] float32 nats
    entropy: Tensor | None = None  # [B, T] float32 nats
    values: Tensor | None = None  # [B, T] float32


def sample_seed(run_seed: int, sampling: Sampling, step: int, uid: int, sample: int) -> int:
    """The seed of one sample: a function of names, never of which rank draws it. 63 bits."""
    name = f"{run_seed}/{sampling.purpose}/{step}/{uid}/{sample}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") >> 1


@tensorclass(shadow=True)
class Prompts:
    """Prompts of one step, one row a prompt occurrence."""

    input_ids: Tensor  # [B, T] int64, right padded
    lengths: Tensor  # [B] int64
    uid: Tensor  # [B] int64: the prompt occurrence, unique in a run
    row: Tensor  # [B] int64: row in the dataset
    data_source: Tensor  # [B] int64


@tensorclass(shadow=True)
class Batch:
    """Samples, one row each; siblings of a prompt stay adjacent. Entry t of a per-token field belongs to token t."""

    input_ids: Tensor  # [B, T] int64, right padded
    prompt_lengths: Tensor  # [B] int64
    lengths: Tensor  # [B] int64: prompt + response
    response_mask: Tensor  # [B, T] bool: the policy chose this token
    uid: Tensor  # [B] int64: the prompt occurrence, the group key
    sample: Tensor  # [B] int64: index in the group
    row: Tensor  # [B] int64: row in the dataset
    data_source: Tensor  # [B] int64
    policy_version: Tensor  # [B, T] int32: the weights that sampled the token
    truncated: Tensor  # [B] bool: stopped by the token limit
    temperature: Tensor  # [B] float32
    rollout_log_probs: Tensor | None = None  # [B, T] float32 nats
    old_log_probs: Tensor | None = None  # [B, T] float32 nats
    ref_log_probs: Tensor | None = None  # [B, T] float32 nats
    values: Tensor | None = None  # [B, T] float32: value of the state before the token
    advantages: Tensor | None = None  # [B, T] float32
    returns: Tensor | None = None  # [B, T] float32
    token_rewards: Tensor | None = None  # [B, T] float32
    token_weights: Tensor | None = None  # [B, T] float32: carries the loss normalisation
    rewards: Tensor | None = None  # [B] float32: the score, less the KL once it is in the reward; NaN where scoring failed


INTEGERS = ("input_ids", "prompt_lengths", "lengths", "uid", "sample", "row", "data_source")
DTYPES = {name: torch.float32 for name in Batch.__dataclass_fields__}
DTYPES.update(dict.fromkeys(INTEGERS, torch.int64), policy_version=torch.int32, response_mask=torch.bool, truncated=torch.bool)
EQUAL_TERMS_LENGTH = 6 * 4096  # tokens; of a model of width 4096: one constant, so that a plan depends on lengths alone
PER_ROW = ("prompt_lengths", "lengths", "uid", "sample", "row", "data_source", "truncated", "temperature", "rewards")


def fields_of(batch: Batch) -> dict[str, Tensor]:
    """The fields that are present, in declared order."""
    return {name: value for name in DTYPES if (value := batch._tensordict.get(name, None)) is not None}


def make_batch(tensors: dict[str, Tensor]) -> Batch:
    """A Batch of these fields; the number of rows is that of `uid`."""
    return Batch(**tensors, batch_size=[tensors["uid"].shape[0]])


def text_batch(ids: Tensor, prompt_lengths: Tensor, lengths: Tensor, uid: Tensor, sample: Tensor) -> Batch:
    """Rows of given tokens, [B, T] and [B] each: every token after the prompt is a response, drawn by nobody."""
    place, zeros = torch.arange(ids.shape[1]), torch.zeros_like(uid)
    return make_batch(
        {
            "input_ids": ids,
            "prompt_lengths": prompt_lengths,
            "lengths": lengths,
            "response_mask": (place >= prompt_lengths[:, None]) & (place < lengths[:, None]),
            "uid": uid,
            "sample": sample,
            "row": zeros,
            "data_source": zeros,
            "policy_version": torch.zeros_like(ids, dtype=torch.int32),
            "truncated": zeros.bool(),
            "temperature": torch.ones(len(uid)),
        }
    )


def sort_rows(batch: Batch) -> Batch:
    """Rows in the order of (uid, sample), the one order of every shard."""
    names = list(zip(batch.uid.tolist(), batch.sample.tolist()))
    order = sorted(range(len(names)), key=names.__getitem__)
    return batch if order == list(range(len(names))) else batch[torch.tensor(order)]


def pad_to(tensor: Tensor, width: int) -> Tensor:
    """`tensor` [B, T] padded on the right with zeros to [B, width]."""
    return torch.nn.functional.pad(tensor, (0, width - tensor.shape[1])) if tensor.shape[1] < width else tensor


def row_cost(length: int) -> int:
    """What a row of `length` tokens costs to train, in FLOPs up to a factor: n (E + n), exact in integers.

    A layer of width h spends 24 n h^2 FLOPs in its matrices (attention's four, and an MLP of 4h) and 4 n^2 h in the products
    of queries, keys and values (Narayanan et al. 2021, https://arxiv.org/abs/2104.04473, appendix). They are equal at
    n = E = 6h, so the cost is in proportion to n (1 + n / E): tokens where rows are short, squares where they are long."""
    return length * (EQUAL_TERMS_LENGTH + length)


def plan_balance(groups: list[tuple[int, int]], num_replicas: int) -> list[list[int]]:
    """Which groups each replica holds: whole groups, balanced by cost. Pure, and blind to where they are now.

    `groups`: (uid, cost) of every group of the batch, in any order. Greedy, costliest first (LPT, Graham 1969); a heap of
    the replicas makes it O(groups x log replicas)."""
    heap = [(0, 0, replica) for replica in range(num_replicas)]  # (load, groups, replica): ascending, so already a heap
    plan: list[list[int]] = [[] for _ in range(num_replicas)]
    for uid, cost in sorted(groups, key=lambda g: (-g[1], g[0])):
        load, count, to = heap[0]
        heapreplace(heap, (load + cost, count + 1, to))
        plan[to].append(uid)
    return [sorted(uids) for uids in plan]


@dataclass(frozen=True)
class Route:
    """Rows that one rank sends to another, or keeps where both are the same. Ranks are indices in the bridge."""

    source: int
    target: int
    rows: tuple[int, ...]  # indices in the source's shard, ascending


def plan_routes(held: Sequence[Sequence[int]], plan: list[list[int]], lanes: list[list[int]], me: int) -> list[Route]:
    """The routes from or to rank `me`, in one order on all ranks: by replica, source, lane. Pure.

    `held`: the uid of every row that each rank of the bridge holds. `plan`: the uids that each replica of the destination
    shall hold; `lanes`: its ranks. O(rows + replicas), since each rank lists its own routes only."""
    replica_of = {uid: replica for replica, uids in enumerate(plan) for uid in uids}
    mine = next((replica for replica, ranks in enumerate(lanes) if me in ranks), None)
    rows: dict[tuple[int, int], list[int]] = {}  # (replica, source) -> rows
    for source, uids in enumerate(held):
        for row, uid in enumerate(uids):
            if source == me or replica_of[uid] == mine:
                rows.setdefault((replica_of[uid], source), []).append(row)
    return [
        Route(source, target, tuple(chosen))
        for (replica, source), chosen in sorted(rows.items())
        for target in lanes[replica]
        if me in (source, target)
    ]


def plan_micro_batches(
    items: list[tuple[int, int, int]],
    max_tokens: int,
    shared_prompt: bool,
    count_multiple: int = 1,
    length_multiple: int = 1,
) -> list[list[int]]:
    """Packs rows into micro-batches of at most `max_tokens` tokens, alignment padding included.

    `items`: (uid, prompt length, response length) of each row, siblings adjacent. Returns row indices of each micro-batch,
    siblings adjacent; with `shared_prompt` a group costs its prompt once, and a group over the budget is split with its
    prompt repeated. Empty lists at the end make the count a multiple. First fit by decreasing cost.
    Raises ValueError when one row alone is over the budget."""
    units: list[tuple[int, list[int]]] = []  # (cost, rows)

    def aligned(tokens: int) -> int:
        return -(-tokens // length_multiple) * length_multiple

    raw = 0
    for index, (uid, prompt, response) in enumerate(items):
        if aligned(prompt + response) > max_tokens:
            raise ValueError(
                f"engine.max_tokens_per_micro_batch: a sequence of {prompt + response} tokens (prompt {prompt}, response "
                f"{response}) is over the budget of {max_tokens} - set at least {aligned(prompt + response)}"
            )
        sibling = shared_prompt and index and items[index - 1][:2] == (uid, prompt)
        if sibling and aligned(raw + response) <= max_tokens:
            raw += response
            units[-1] = (aligned(raw), units[-1][1] + [index])
        else:
            raw = prompt + response
            units.append((aligned(raw), [index]))
    loads: list[int] = []
    plan: list[list[int]] = []
    for cost, rows in sorted(units, key=lambda u: (-u[0], u[1][0])):
        to = next((i for i, load in enumerate(loads) if load + cost <= max_tokens), None)
        if to is None:
            to = len(loads)
            loads.append(0)
            plan.append([])
        loads[to] += cost
        plan[to] += rows
    return plan + [[] for _ in range(-len(plan) % count_multiple)]


def pick_mini_batch(uids: list[int], num_mini_batches: int, seed: str) -> list[set[int]]:
    """Splits the batch's prompt occurrences into mini-batches: a pure function of the names, never of the layout."""
    order = sorted(set(uids), key=lambda uid: hashlib.blake2b(f"{seed}/{uid}".encode(), digest_size=8).digest())
    return [set(order[i::num_mini_batches]) for i in range(num_mini_batches)]
