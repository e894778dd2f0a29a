"""Worlds of thousands of ranks on paper: what one rank does at set-up and in a step, on torch's fake process group.

    python benchmarks/scale.py                             # 64, 512 and 4096 ranks, 2 and 3 cells
    python benchmarks/scale.py --worlds 64 256 --prompts 64

One process plays single ranks of each world. Each figure has a law, checked as a ratio of what was found to what the law allows;
the exit code is 1 where one does not hold. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

sys.path.insert(0, str(Path(__file__).parent.parent))

from spmd_rl import placed  # noqa: E402
from spmd_rl.batch import DTYPES, PER_ROW, Batch, make_batch, plan_balance, plan_routes, row_cost  # noqa: E402
from spmd_rl.config import TimeoutConfig  # noqa: E402
from spmd_rl.launch import Launch  # noqa: E402
from spmd_rl.mesh import Role, World, split_world  # noqa: E402
from spmd_rl.placed import Placed, traffic  # noqa: E402

NODE = 8  # ranks of a node, and of a replica of the rollout
FIELDS = [name for name in Batch.__dataclass_fields__ if name not in ("values", "returns", "token_rewards", "token_weights")]
SLACK = 1.05  # of counts and bytes
TIME_SLACK = 3.0  # of seconds: other jobs, caches


def layout(world_size: int, cells: int) -> dict[str, Role]:
    """Half of the ranks train; the others generate, in 3 cells half of them only, and the reference has its own."""
    half, ranks = world_size // 2, tuple(range(world_size))
    first = half if cells == 2 else half + world_size // 4
    actor, rollout = Role(ranks[:half], half), Role(ranks[first:], (world_size - first) // NODE)
    ref = actor if cells == 2 else Role(ranks[half:first], first - half)
    return {"actor": actor, "critic": actor, "ref": ref, "rollout": rollout}


@dataclass
class Groups:
    """What one rank asked of torch."""

    calls: int = 0
    sizes: list[int] = field(default_factory=list)  # of the groups that the rank is in


@contextmanager
def fake_world(roles: dict[str, Role], rank: int, world_size: int) -> Iterator[tuple[World, Groups, float]]:
    """This process as one rank of that world: (world, the groups made, seconds of split_world)."""
    made = Groups(sizes=[world_size])
    init, new_group = dist.init_process_group, dist.new_group

    def fake_init(backend, store, rank, world_size, timeout):
        init("fake", store=store, rank=rank, world_size=world_size, timeout=timeout)

    def fake_group(ranks, backend, **options):
        made.calls += 1
        if dist.get_rank() in ranks:
            made.sizes.append(len(ranks))
        return new_group(ranks, backend="fake", **options)

    launch = Launch("torchrun", rank, world_size, rank % NODE, NODE, "127.0.0.1", 0, False, 0)
    with patch.dict(os.environ), patch.object(dist, "init_process_group", fake_init), patch.object(dist, "new_group", fake_group):
        start = time.perf_counter()
        world = split_world(roles, launch, FakeStore(), "cpu", TimeoutConfig())
        seconds = time.perf_counter() - start
        yield world, made, seconds
        dist.destroy_process_group()


def set_up(world_size: int, cells: int, rounds: int) -> dict[str, float]:
    """The first and the last rank's set-up, the worse of both: an actor and a lane of the rollout."""
    roles, found = layout(world_size, cells), []
    for rank in (0, world_size - 1):
        seconds = []
        for _ in range(rounds):
            with fake_world(roles, rank, world_size) as (_, made, took):
                seconds.append(took)
        found.append((made.calls, len(made.sizes), sum(size - 1 for size in made.sizes), statistics.median(seconds)))
    return dict(zip(("new_group_calls", "groups_joined", "peers", "setup_s"), map(max, zip(*found))))


def draw_rows(prompts: int, samples: int, tokens: int, holders: list[int], num_ranks: int) -> list[list[tuple[int, int]]]:
    """(uid, length) of the rows on each rank of the bridge, whole groups, dealt to the holders in turn."""
    draw = random.Random(0)
    held: list[list[tuple[int, int]]] = [[] for _ in range(num_ranks)]
    for uid in range(prompts):
        held[holders[uid % len(holders)]] += [(uid, draw.randint(tokens // 4, tokens)) for _ in range(samples)]
    return held


def plan_seconds(held: list[list[tuple[int, int]]], lanes: list[list[int]], me: int, rounds: int) -> float:
    """Seconds of what every rank computes before rows move."""
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        costs: Counter[int] = Counter()
        for uid, length in (row for rows in held for row in rows):
            costs[uid] += row_cost(length)
        plan = plan_balance(list(costs.items()), len(lanes))
        plan_routes([[uid for uid, _ in rows] for rows in held], plan, lanes, me)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def shard(rows: list[tuple[int, int]], tokens: int) -> Batch:
    """A batch of zeros with these names and lengths."""
    sizes = {name: (len(rows),) if name in PER_ROW else (len(rows), tokens) for name in FIELDS}
    tensors = {name: torch.zeros(sizes[name], dtype=DTYPES[name]) for name in FIELDS}
    uids, lengths = (torch.tensor(column, dtype=torch.int64) for column in zip(*rows))
    return make_batch(tensors | {"uid": uids, "lengths": lengths})


def move_bytes(roles: dict[str, Role], world_size: int, held: list[list[tuple[int, int]]], rank: int, tokens: int):
    """Bytes that one rank sends and receives in `samples.to(actor.mesh)`, by the real move without its communication.

    `names`: what each rank gathers first. `held`: by index in the bridge from rollout to actor."""
    received = [0]

    def fake_exchange(sends, receives, group, name):
        received[0] += sum(buffer.numel() for _, buffer in receives)
        for _, buffer in receives:
            buffer.zero_()

    with ExitStack() as stack:
        world, _, _ = stack.enter_context(fake_world(roles, rank, world_size))
        rollout, actor = world.meshes["rollout"], world.meshes["actor"]
        rows = [torch.tensor(r, dtype=torch.int64).view(-1, 2) for r in held]
        schema = [tokens, *(int(name in FIELDS) for name in DTYPES)]
        stack.enter_context(patch.object(placed, "gather_rows", lambda *_: rows))
        stack.enter_context(patch.object(placed, "all_max", lambda *_: schema))
        stack.enter_context(patch.object(placed, "exchange", fake_exchange))
        mine = held[actor.bridge(rollout).ranks.index(rank)]
        traffic.clear()
        Placed(rollout, shard(mine, tokens) if mine else None).to(actor)
    return {"sent": traffic["batch"], "received": received[0], "names": len(rows) * max(map(len, rows)) * rows[0].shape[1] * 8}


def model_tensors(hidden: int = 4096, layers: int = 32, inner: int = 14336, kv: int = 1024, vocabulary: int = 128256):
    """(name, tensor without storage) of a decoder of eight billion parameters, as an engine's `weights()` gives them."""
    block = {"q": (hidden, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, hidden)}
    block |= {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner), "norm1": (hidden,), "norm2": (hidden,)}
    shapes = {"embed": (vocabulary, hidden), "norm": (hidden,), "head": (vocabulary, hidden)}
    shapes |= {f"{layer}.{name}": shape for layer in range(layers) for name, shape in block.items()}
    return ((name, torch.empty(shape, device="meta")) for name, shape in shapes.items())


def weight_bytes(senders: int) -> dict[str, int]:
    """Bytes of one update in bfloat16: what an actor rank sends at most, what a rollout rank receives, the largest bucket."""
    buckets = [sum(2 * tensor.numel() for _, tensor in bucket) for bucket in placed._buckets(model_tensors(), torch.bfloat16)]
    sent = [sum(buckets[turn::senders]) for turn in range(min(senders, len(buckets)))]
    return {"sent": max(sent), "received": sum(buckets), "bucket": max(buckets)}


def measure(world_size: int, cells: int, args: argparse.Namespace) -> dict[str, float]:
    roles = layout(world_size, cells)
    actor, rollout = roles["actor"], roles["rollout"]
    union = sorted({*actor.ranks, *rollout.ranks})
    index = {rank: i for i, rank in enumerate(union)}
    prompts = max(args.prompts, actor.num_replicas)  # fewer would leave replicas without work, which `validate` refuses
    holders = [index[rank] for rank in rollout.ranks[:: len(rollout.ranks) // rollout.num_replicas]]
    held = draw_rows(prompts, args.samples, args.tokens, holders, len(union))
    lanes = [[index[rank]] for rank in actor.ranks]
    batch_sent = move_bytes(roles, world_size, held, rollout.ranks[0], args.tokens)
    batch_received = move_bytes(roles, world_size, held, actor.ranks[0], args.tokens)
    weights = weight_bytes(len(actor.ranks))
    return {
        **set_up(world_size, cells, args.rounds),
        "rows": prompts * args.samples,
        "actor_replicas": actor.num_replicas,
        "rollout_replicas": rollout.num_replicas,
        "plan_s": max(plan_seconds(held, lanes, me, args.rounds) for me in (holders[0], index[actor.ranks[0]])),
        "names_bytes": batch_sent["names"],
        "batch_sent_bytes": batch_sent["sent"],
        "batch_received_bytes": batch_received["received"],
        "weights_sent_bytes": weights["sent"],
        "weights_received_bytes": weights["received"],
        "weights_bucket_bytes": weights["bucket"],
    }


LAWS = {  # figure -> (the law in words, what it may grow like, slack)
    "new_group_calls": ("constant", lambda size, f: 1.0, 1.0),
    "groups_joined": ("constant", lambda size, f: 1.0, 1.0),
    "peers": ("linear in ranks", lambda size, f: size, SLACK),
    "setup_s": ("at most linear in ranks", lambda size, f: size, TIME_SLACK),
    "plan_s": ("at most linear in rows + ranks", lambda size, f: f["rows"] + size, TIME_SLACK),
    "names_bytes": ("at most linear in rows + ranks", lambda size, f: f["rows"] + size, SLACK),
    "batch_sent_bytes": ("rows / replicas of the rollout", lambda size, f: f["rows"] / f["rollout_replicas"], SLACK),
    "batch_received_bytes": ("rows / replicas of the actor", lambda size, f: f["rows"] / f["actor_replicas"], 1.3),
    "weights_sent_bytes": (
        "model / ranks of the actor, plus a bucket",
        lambda size, f: f["weights_received_bytes"] / f["actor_replicas"] + f["weights_bucket_bytes"],
        SLACK,
    ),
    "weights_received_bytes": ("constant", lambda size, f: 1.0, SLACK),
}


def check_laws(figures: dict[int, dict[str, float]]) -> dict[str, float]:
    """Law by law, the worst growth from the smallest world over what the law allows: at most the law's slack where it holds."""
    base = min(figures)

    def worst(name: str, scale) -> float:
        def per_unit(size: int) -> float:
            return figures[size][name] / scale(size, figures[size])

        return max(per_unit(size) / per_unit(base) for size in figures if size > base)

    return {name: worst(name, scale) for name, (_, scale, _) in LAWS.items()}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    out = argparse.ArgumentParser("scale")
    out.add_argument("--worlds", type=int, nargs="+", default=[64, 512, 4096], help=f"multiples of {4 * NODE} ranks")
    out.add_argument("--cells", type=int, nargs="+", default=[2, 3], choices=[2, 3])
    out.add_argument("--prompts", type=int, default=512, help="of a step; at least one a replica of the actor")
    out.add_argument("--samples", type=int, default=16)
    out.add_argument("--tokens", type=int, default=1024, help="of the longest row")
    out.add_argument("--rounds", type=int, default=5)
    args = out.parse_args(argv)
    if len({*args.worlds}) < 2:
        out.error("--worlds: growth needs two sizes")
    if wrong := [size for size in args.worlds if size < 4 * NODE or size % (4 * NODE)]:
        out.error(f"--worlds: {wrong} are no multiples of {4 * NODE}")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    results, laws = {}, {}
    for cells in args.cells:
        figures = {size: measure(size, cells, args) for size in sorted(args.worlds)}
        results[f"{cells} cells"], laws[f"{cells} cells"] = figures, check_laws(figures)
        print(f"\n{cells} cells{'':25}" + "".join(f"{size:>12} ranks" for size in figures) + "   growth / law")
        for name in next(iter(figures.values())):
            row = "".join(f"{f[name]:>18.4g}" for f in figures.values())
            law = f"{laws[f'{cells} cells'][name]:>8.2f} of {LAWS[name][2]:g}: {LAWS[name][0]}" if name in LAWS else ""
            print(f"{name:32}{row} {law}")
    broken = [f"{cells}: {name}" for cells, found in laws.items() for name, ratio in found.items() if ratio > LAWS[name][2] + 1e-9]
    print("every law holds" if not broken else f"broken laws: {', '.join(broken)}")
    line = {"benchmark": "scale", "torch": torch.__version__, "figures": results, "growth_over_law": laws, "broken": broken}
    print(json.dumps(line))
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
