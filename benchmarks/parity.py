"""Every engine in every parallelism against one process of plain transformers, in float32: docs/parity.md and parity.json.

    python -m benchmarks.parity                       # the whole matrix (a quarter of an hour), written to docs/
    python -m benchmarks.parity --check               # the same, and exits with 1 where a target is missed
    python -m benchmarks.parity --quick --engines fsdp --out /tmp/parity
    bash launch/veomni.sh python -m benchmarks.parity --engines veomni

A cell is (engine, layout, model). Engines that cannot be imported here keep the figures that the JSON file already has.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from spmd_rl.batch import Batch, TokenOutput
from spmd_rl.collectives import all_max_float, all_sum, barrier
from spmd_rl.config import CheckpointConfig, OptimizerConfig, TimeoutConfig
from spmd_rl.engine.base import BaseEngine, EngineModel
from spmd_rl.engine.hf_names import to_checkpoint
from spmd_rl.engine.registry import EngineRegistry
from spmd_rl.launch import detect_launch
from spmd_rl.mesh import Role, RoleMesh, World, close_world, open_store, split_world
from spmd_rl.metrics import Sum
from spmd_rl.models import resolve_model
from tests.helpers import make_rows, randomize, tiny_config

ROOT = Path(__file__).resolve().parent.parent
KINDS = {  # column of the matrix: (architecture, tied embeddings)
    "dense tied": ("llama", True),
    "dense untied": ("llama", False),
    "GQA + qk-norm": ("qwen3", True),
    "qkv bias": ("qwen2", False),
    "MoE": ("qwen3_moe", False),
}
REAL = "SmolLM2-135M"
TARGETS = {"log_probs": 1e-5, "gradient": 1e-4, "grad_norm": 1e-4, "loss": 1e-5, "parameters": 1e-6, "export": 0.0}
REAL_TARGETS = TARGETS | {"log_probs": 5e-5}
MEANING = {
    "log_probs": "largest difference of a log-prob, nats, over two micro-batch budgets, with and without shared prompts",
    "gradient": "worst relative L2 difference of a parameter's gradient, over three steps of other micro-batches",
    "grad_norm": "largest relative difference of the gradient norm",
    "loss": "largest relative difference of the summed loss",
    "parameters": "largest difference of a parameter after 3 AdamW steps, learning rate 1e-5, clipped at 1.0",
    "export": "tensors that import and export do not leave bitwise as they were",
}
OPTIMIZER = OptimizerConfig(learning_rate=1e-5, clip_grad_norm=1.0, weight_decay=0.01, total_steps=4)
GROUPS = [(5, [4, 1, 7]), (9, [3, 3]), (2, [6]), (3, [2, 5, 4]), (6, [3, 4])]
SIZES = (2, 5, 1)  # rows of a micro-batch in each step


@dataclass(frozen=True)
class Cell:
    backend: str
    layout: str
    ranks: int
    options: dict[str, Any]
    kind: str


@dataclass
class Reference:
    """What plain transformers says of the batch: log-probs [B, T] of the first step, and of each step the rest."""

    log_probs: Tensor | None = None
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)


def model_config(kind: str) -> dict[str, Any]:
    architecture, tied = KINDS[kind]
    return tiny_config(architecture, tied, num_hidden_layers=4).to_dict()


@functools.cache
def real_config() -> dict[str, Any]:
    return json.loads((Path(resolve_model("smollm2-135m-instruct")) / "config.json").read_text())


def cells(backends: list[str], quick: bool = False) -> tuple[list[Cell], list[tuple[Cell, str]]]:
    """(cells to measure, cells that the engine refuses and why). `quick`: every layout once, every model once."""
    todo, refused = [], []
    for backend in backends:
        module = EngineRegistry.module(backend)
        seen: set[str] = set()
        for i, (layout, (ranks, options)) in enumerate(module.LAYOUTS.items()):
            able = []
            for kind in KINDS:
                cell = Cell(backend, layout, ranks, options, kind)
                why = module.problems(module.Config(dtype="float32", **options), ranks, model_config(kind))
                refused += [(cell, "; ".join(why))] if why else []
                able += [] if why else [cell]
            if quick and able:
                fresh = [cell for cell in able if cell.kind not in seen]
                able = fresh if i == 0 else (fresh or [able[i % len(able)]])[:1]
            seen |= {cell.kind for cell in able}
            todo += able
            config = module.Config(dtype="float32", **options)
            if not quick and ranks == 2 and not module.problems(config, ranks, real_config()):
                todo.append(Cell(backend, layout, ranks, options, REAL))
    return todo, refused


def weighted(output: TokenOutput, data: Batch) -> tuple[Tensor, dict]:
    """A plain sum: weights are a function of the row's names, so that every layout has the same total."""
    tokens = output.log_probs if output.values is None else output.values
    scale = (data.uid[:, None] + 1.0) * (data.sample[:, None] + 0.5) * 0.01
    loss = (tokens * scale)[data.response_mask].sum() if len(data) else tokens.sum()
    return loss, {"loss": Sum(float(loss.detach()))}


def share(batch: Batch, mesh: RoleMesh, size: int, multiple: int = 1) -> list[Batch]:
    """This replica's micro-batches of `size` rows; the last of several replicas has none, and runs dummies."""
    owners = max(1, mesh.num_replicas - 1)
    parts = {r: batch[batch.uid % owners == r] for r in range(owners)}
    count = max(-(-len(p) // size) for p in parts.values())
    count = -(-count // multiple) * multiple
    mine = parts.get(mesh.replica, batch[:0])
    return [mine[i * size : (i + 1) * size] for i in range(count)]


def refer(folder: Path, batch: Batch, steps: int, optimizer: OptimizerConfig = OPTIMIZER) -> Reference:
    """One process of plain transformers, a row at a time."""
    model, found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), Reference()
    adam = torch.optim.AdamW(
        model.parameters(), optimizer.learning_rate, tuple(optimizer.betas), optimizer.eps, optimizer.weight_decay
    )
    for _ in range(steps):
        out = torch.zeros(batch.input_ids.shape)
        for b, (ids, n) in enumerate(zip(batch.input_ids, batch.lengths.tolist())):
            logits = model(input_ids=ids[None, :n], use_cache=False).logits[0].float()
            out[b, 1:n] = logits.log_softmax(-1)[:-1].gather(1, ids[1:n, None])[:, 0]
        loss, _ = weighted(TokenOutput(log_probs=out), batch)
        loss.backward()
        if found.log_probs is None:
            found.log_probs = (out * batch.response_mask).detach()
        found.gradients.append(stored_names({k: p.grad.clone() for k, p in model.named_parameters()}))
        found.losses.append(float(loss.detach()))
        found.norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), optimizer.clip_grad_norm)))
        adam.step()
        adam.zero_grad()
    found.parameters = stored_names({k: p.detach() for k, p in model.named_parameters()})
    return found


def stored_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """By the names of the safetensors file, which has experts one by one."""
    return dict(pair for name, tensor in tensors.items() for pair in to_checkpoint(name, tensor))


def make(backend: str, folder: Path, mesh: RoleMesh, model_type="language_model", trainable=True, optimizer=OPTIMIZER, **options):
    config = EngineRegistry.module(backend).Config(**({"backend": backend, "dtype": "float32"} | options))
    engine = EngineRegistry.get(model_type, backend, mesh.device.type)
    return engine(EngineModel(str(folder), model_type, trainable), config, optimizer, CheckpointConfig(), mesh)


def log_prob_error(engine: BaseEngine, batch: Batch, mesh: RoleMesh, expected: Tensor) -> float:
    """Local: over the rows of this replica, on this lane."""
    worst, shared = 0.0, engine.shared_prompt
    for size, engine.shared_prompt in ((2, shared), (5, shared), (5, False)):
        micro = share(batch, mesh, size, engine.count_multiple)
        with engine.eval_mode():
            outputs = engine.forward_backward_batch(micro, None, forward_only=True)
        for rows, output in zip(micro, outputs):
            assert output.log_probs.shape == rows.input_ids.shape
            index = [int(((batch.uid == u) & (batch.sample == s)).nonzero()) for u, s in zip(rows.uid, rows.sample)]
            if index:
                worst = max(worst, float((output.log_probs - expected[index]).abs().max()))
    engine.shared_prompt = shared
    return worst


def largest(got: dict[str, Tensor], want: dict[str, Tensor], relative: bool) -> float:
    """Over all tensors: the largest difference, or the largest norm of the difference over the norm."""
    assert got.keys() == want.keys(), sorted(got.keys() ^ want.keys())
    if not relative:
        return max(float((got[name] - want[name]).abs().max()) for name in want)
    return max(float((got[name] - want[name]).norm() / want[name].norm().clamp(min=1e-8)) for name in want)


def measure(cell: Cell, folder: Path, mesh: RoleMesh, batch: Batch, expected: Reference) -> dict[str, float]:
    """Collective over the world: every error of TARGETS, the largest of any rank."""
    engine = make(cell.backend, folder, mesh, **cell.options)
    stored, streamed = load_file(folder / "model.safetensors"), dict(engine.weights())
    stored = {name: tensor.float() for name, tensor in stored.items() if name in streamed or name != "lm_head.weight"}
    unlike = [n for n in stored if n not in streamed or not torch.equal(stored[n], streamed[n])]
    errors = dict.fromkeys(TARGETS, 0.0)
    errors |= {"export": len(unlike), "log_probs": log_prob_error(engine, batch, mesh, expected.log_probs)}
    del stored, streamed
    for step, (gradients, norm, loss) in enumerate(zip(expected.gradients, expected.norms, expected.losses)):
        with engine.train_mode():
            stats = engine.forward_backward_batch(share(batch, mesh, SIZES[step], engine.count_multiple), weighted)
            worst = largest(dict(engine.gradients()), gradients, relative=True)
            got = engine.optimizer_step()
        engine.lr_scheduler_step()
        total = float(all_sum(torch.tensor([stats["loss"].value]), mesh.data_group, "loss"))
        errors["gradient"] = max(errors["gradient"], worst)
        errors["grad_norm"] = max(errors["grad_norm"], abs(got - norm) / norm)
        errors["loss"] = max(errors["loss"], abs(total - loss) / abs(loss))
    if expected.parameters:
        errors["parameters"] = largest(dict(engine.weights()), expected.parameters, relative=False)
    names = list(errors)
    return dict(zip(names, all_max_float([errors[n] for n in names], torch.distributed.group.WORLD, "errors")))


def start(layouts: dict[str, int], world_size: int, device: str = "cpu") -> World:
    """The world with a mesh for each layout, {name: ranks of a replica}; all share the one cell."""
    launch, timeouts = detect_launch(), TimeoutConfig(collective=300, phase=300)
    ranks = tuple(range(world_size))
    roles = {name: Role(ranks, world_size // width) for name, width in layouts.items()}
    return split_world(roles, launch, open_store(launch, timeouts), device, timeouts)


def width_of(cell: Cell) -> int:
    module = EngineRegistry.module(cell.backend)
    return module.replica_width(module.Config(**cell.options))


def save_model(kind: str, folder: Path) -> None:
    """Local: transformers writes on the first rank of a world only."""
    architecture, tied = KINDS[kind]
    config = tiny_config(architecture, tied, num_hidden_layers=4)
    randomize(AutoModelForCausalLM.from_config(config), 7).save_pretrained(folder)


def prepare(kind: str, root: Path, world: World) -> tuple[Path, Batch, Reference]:
    """Collective over the world: the model's folder, the batch, and what plain transformers says of it."""
    batch = make_rows(GROUPS)
    batch.input_ids[:, 1] = 0  # the pad id in the prompts, whose embedding transformers gives no gradient as an input
    if kind == REAL:
        folder = Path(resolve_model("smollm2-135m-instruct"))
        return folder, batch, replace(refer(folder, batch, 1), parameters={})
    if world.rank == 0:
        save_model(kind, root / kind)
    barrier(world.control, "model")
    return root / kind, batch, refer(root / kind, batch, 3)


def work(todo: list[Cell], out: Path, device: str) -> None:
    """On every rank of one launch: appends a line of JSON for each cell."""
    world = start({cell.layout: width_of(cell) for cell in todo}, todo[0].ranks, device)
    references: dict[str, tuple] = {}
    for cell in todo:
        if cell.kind not in references:
            references[cell.kind] = prepare(cell.kind, out.parent, world)
        begin = time.perf_counter()
        errors = measure(cell, references[cell.kind][0], world.meshes[cell.layout], *references[cell.kind][1:])
        if world.rank == 0:
            line = {"cell": asdict(cell), "errors": errors, "seconds": round(time.perf_counter() - begin, 2)}
            with out.open("a") as file:
                file.write(json.dumps(line) + "\n")
        barrier(world.control, "cell")
    close_world(world)


def run_cells(todo: list[Cell], device: str) -> list[dict[str, Any]]:
    """Measures cells of one engine and number of ranks; where a launch dies, the cell it died in is reported, the rest follow."""
    found: list[dict[str, Any]] = []
    while todo:
        with tempfile.TemporaryDirectory() as folder:
            out, log = Path(folder) / "out.jsonl", Path(folder) / "log.txt"
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(todo[0].ranks)]
            command += [
                "-m",
                "benchmarks.parity",
                "--work",
                json.dumps([asdict(cell) for cell in todo]),
                "--out",
                str(out),
                "--device",
                device,
            ]
            environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
            with log.open("w") as file:
                code = subprocess.run(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT).returncode
            lines = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
            if code and len(lines) < len(todo):
                said = [line for line in log.read_text().splitlines() if "Error" in line]
                lines.append({"cell": asdict(todo[len(lines)]), "failed": (said or ["no message"])[0].strip()[-300:]})
        for line in lines:
            show = line.get("failed") or " ".join(f"{k} {v:.1e}" for k, v in line["errors"].items())
            print(f"{line['cell']['backend']} {line['cell']['layout']} {line['cell']['kind']}: {show}", flush=True)
        found += lines
        todo = todo[len(lines) :]
    return found


def missed(line: dict[str, Any]) -> list[str]:
    """The targets that a measured cell misses."""
    if "failed" in line:
        return ["failed"]
    targets = REAL_TARGETS if line["cell"]["kind"] == REAL else TARGETS
    return [name for name, limit in targets.items() if not line["errors"][name] <= limit]


def importable(backend: str) -> bool:
    try:
        EngineRegistry.get("language_model", backend, "cpu")
    except ImportError:
        return False
    return True


def table(backend: str, lines: list[dict[str, Any]], refused: list[dict[str, Any]]) -> str:
    rows = [f"## engine={backend}", "", "| layout | ranks | options | model | " + " | ".join(TARGETS) + " | |"]
    rows.append("|---" * (5 + len(TARGETS)) + "|")
    for line in lines:
        cell = line["cell"]
        options = ", ".join(f"{k}={v}" for k, v in cell["options"].items()) or "-"
        figures = [f"{line['errors'][name]:.1e}" if "errors" in line else "" for name in TARGETS]
        verdict = "ok" if not missed(line) else line.get("failed") or "missed: " + ", ".join(missed(line))
        rows.append(f"| {cell['layout']} | {cell['ranks']} | {options} | {cell['kind']} | {' | '.join(figures)} | {verdict} |")
    if refused:
        rows += ["", "Refused by `validate`:", ""]
        rows += [f"* {r['cell']['layout']}, {r['cell']['kind']}: {r['why']}" for r in refused]
    return "\n".join(rows) + "\n"


def write(out: Path, results: dict[str, Any]) -> None:
    """OUT.json and OUT.md."""
    out.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    targets = "\n".join(f"| `{k}` | {v:g} | {MEANING[k]} |" for k, v in TARGETS.items())
    head = (
        "# Parity\n\nMeasured by `python -m benchmarks.parity`, not written by hand (of veomni by `bash launch/veomni.sh python -m "
        "benchmarks.parity --engines veomni`): every engine and parallelism on random models of 4 layers against one process of "
        "plain transformers, in float32, on the host under gloo. "
        f"On {REAL} the target for log-probs is {REAL_TARGETS['log_probs']:g}, and one step is made.\n\n"
        f"| figure | target | |\n|---|---|---|\n{targets}\n"
    )
    parts = [table(backend, found["cells"], found["refused"]) for backend, found in results.items()]
    out.with_suffix(".md").write_text("\n".join([head, *parts]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", default=None, help="default: those that can be imported here")
    parser.add_argument("--layouts", nargs="+", default=None, help="only these")
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cpu", help="cuda: a device for each rank, and --out elsewhere"
    )
    parser.add_argument("--quick", action="store_true", help="every layout once and every model once")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a target is missed")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/parity", help="written: OUT.md, OUT.json")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work([Cell(**cell) for cell in json.loads(args.work)], args.out, args.device)
        return 0
    backends = args.engines or [b for b in EngineRegistry.backends() if importable(b)]
    todo, refused = cells(backends, args.quick)
    todo = [cell for cell in todo if args.layouts is None or cell.layout in args.layouts]
    stored = args.out.with_suffix(".json")
    results = json.loads(stored.read_text()) if stored.exists() else {}
    for backend in backends:
        lines = []
        for ranks in sorted({cell.ranks for cell in todo if cell.backend == backend}):
            lines += run_cells([cell for cell in todo if (cell.backend, cell.ranks) == (backend, ranks)], args.device)
        why = [{"cell": asdict(cell), "why": text} for cell, text in refused if cell.backend == backend]
        results[backend] = {"cells": lines, "refused": why}
    write(args.out, results)
    bad = [line for backend in backends for line in results[backend]["cells"] if missed(line)]
    print(json.dumps({"benchmark": "parity", "cells": len(todo), "missed": len(bad), "refused": len(refused)}))
    return 1 if bad and args.check else 0


if __name__ == "__main__":
    sys.exit(main())
