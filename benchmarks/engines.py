"""Tokens per CPU second of one training step of each engine, beside a hand-written loop of plain transformers in the same run.

    python benchmarks/engines.py                                   # every engine that can be imported here, 1 and 2 ranks
    python benchmarks/engines.py --engines fsdp --rounds 3

SmolLM2-135M, packed rows without shared prompts, so that both compute the same tokens: forward, backward, gradients summed over
the ranks, clipping, AdamW, in float32. The loop on several ranks holds whole parameters on each, as `engine=fsdp` does at this
size. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.grpo_step import launch_ranks, machine  # noqa: E402

LAYOUTS = {"fsdp": "{}", "megatron": "{}", "torchtitan": '{"shard_size": 1}'}  # options: data parallelism, whole parameters
LOOP = "transformers loop"
TARGET = 0.95  # of the loop's tokens per CPU second, for fsdp


class Launch(NamedTuple):
    """What `launch_ranks` asks of a work."""

    ranks: int
    threads: int


def rows(args: argparse.Namespace, count: int) -> Any:
    from tests.helpers import make_rows

    return make_rows([(args.prompt_tokens, [args.tokens])] * count, vocabulary=40_000)


def loss_of(output: Any, data: Any) -> tuple[Any, dict]:
    return -output.log_probs[data.response_mask].sum() / 1000, {}


def engine_step(args: argparse.Namespace, name: str, world: Any, folder: str) -> Any:
    """A function that makes one step with an engine."""
    from benchmarks.parity import make

    engine = make(name, Path(folder), world.meshes["actor"], shared_prompt=False, **json.loads(LAYOUTS[name]))
    micro = list(rows(args, args.rows).split(args.rows_per_micro_batch))

    def step() -> None:
        with engine.train_mode():
            engine.forward_backward_batch(micro, loss_of)
            engine.optimizer_step()
        engine.lr_scheduler_step()

    return step


def loop_step(args: argparse.Namespace, world: Any, folder: str) -> Any:
    """The same by hand: packed rows, the head at response tokens only, one all-reduce a parameter."""
    import torch
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    adam = torch.optim.AdamW(model.parameters(), 1e-5, (0.9, 0.99), fused=True)
    length, prompt = args.prompt_tokens + args.tokens, args.prompt_tokens
    micro = rows(args, args.rows).input_ids.split(args.rows_per_micro_batch)

    def step() -> None:
        for ids in micro:
            positions = torch.arange(length).repeat(len(ids))[None]
            hidden = model.model(input_ids=ids.reshape(1, -1), position_ids=positions, use_cache=False).last_hidden_state
            predicting = hidden.view(len(ids), length, -1)[:, prompt - 1 : -1].flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(model.lm_head(predicting), ids[:, prompt:].flatten(), reduction="sum")
            (loss / 1000).backward()
        if len(world.meshes["actor"].ranks) > 1:
            work = [dist.all_reduce(p.grad, async_op=True) for p in model.parameters()]
            for handle in work:
                handle.wait()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        adam.zero_grad()

    return step


def work(args: argparse.Namespace) -> None:
    """On each rank of a launch: CPU and wall seconds of each step after the first, summed over ranks."""
    import torch
    import torch.distributed as dist

    from benchmarks.parity import start
    from spmd_rl.mesh import close_world
    from spmd_rl.models import resolve_model

    world, folder = start({"actor": 1}, args.ranks[0]), resolve_model(args.model)
    step = loop_step(args, world, folder) if args.work == LOOP else engine_step(args, args.work, world, folder)
    step()
    found = []
    for _ in range(args.steps):
        wall, cpu = time.perf_counter(), time.process_time()
        step()
        spent = torch.tensor([time.process_time() - cpu, time.perf_counter() - wall], dtype=torch.float64)
        dist.all_reduce(spent)
        found.append(spent.tolist())
    if world.rank == 0:
        Path(args.out).write_text(json.dumps(found))
    close_world(world)


def measure(args: argparse.Namespace, name: str, ranks: int) -> list[float]:
    """Tokens per CPU second of each step."""
    with tempfile.TemporaryDirectory(prefix="engines-") as folder:
        out = Path(folder) / "out.json"
        keys = ("model", "rows", "rows_per_micro_batch", "prompt_tokens", "tokens", "steps")
        options = [x for key in keys for x in ("--" + key.replace("_", "-"), str(vars(args)[key]))]
        command = ["-m", "benchmarks.engines", "--work", name, "--out", str(out), "--ranks", str(ranks), *options]
        launch_ranks(Launch(ranks, 1), sys.executable, command, Path(folder))
        spent = json.loads(out.read_text())
    tokens = ranks * args.rows * (args.prompt_tokens + args.tokens)
    rates = [tokens / cpu for cpu, _ in spent]
    walls = ", ".join(f"{wall / ranks:.2f}" for _, wall in spent)
    print(f"{name}, {ranks} ranks: {', '.join(f'{r:.0f}' for r in rates)} tokens a CPU second; steps of {walls} s", flush=True)
    return rates


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rows", type=int, default=32, help="of each rank, in a step")
    parser.add_argument("--rows-per-micro-batch", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=26)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--steps", type=int, default=2, help="measured in each run, after a first one that is not")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each, by turns")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    args = parse()
    if args.work:
        work(args)
        return 0
    rates: dict[str, dict[str, list[float]]] = {}
    for ranks in args.ranks:
        of = rates[str(ranks)] = {name: [] for name in [LOOP, *args.engines]}
        for _ in range(args.rounds):
            for name, found in of.items():
                found += measure(args, name, ranks)
    medians = {ranks: {name: round(statistics.median(found), 1) for name, found in of.items()} for ranks, of in rates.items()}
    ratios = {r: {name: round(rate / of[LOOP], 3) for name, rate in of.items() if name != LOOP} for r, of in medians.items()}
    line = {"benchmark": "engines", "machine": machine(), "target": {"fsdp": TARGET}, "tokens_per_cpu_second": medians}
    print(json.dumps(line | {"ratio_vs_loop": ratios}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
