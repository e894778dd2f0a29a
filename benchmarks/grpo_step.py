"""Seconds of one GRPO step on the host, ours and a peer's, on the same work in the same call.

    python benchmarks/grpo_step.py --peer trl                     # 26-token prompts, float32 and bfloat16
    python benchmarks/grpo_step.py --peer trl --prompts 26 128 --dtypes float32 float32-medium bfloat16 --ragged
    python benchmarks/grpo_step.py --rollouts vllm                # only with this rollout backend; by default also with hf

Ours is the product as users start it: torchrun, `-m spmd_rl.train`, its own metrics.jsonl. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PEER_PACKAGES = ("torch==2.13.0", "trl==1.16.0", "transformers==5.24.0", "datasets==5.2.0", "accelerate==1.15.0")
DTYPES = {  # name on the command line: (key in the JSON line, dtype, torch.set_float32_matmul_precision)
    "float32": ("fp32", "float32", "highest"),
    "float32-medium": ("fp32-medium", "float32", "medium"),
    "bfloat16": ("bf16", "bfloat16", "highest"),
}
QUESTION_TOKENS = 25  # of the shortest prompt below, under SmolLM2's tokenizer and chat template
FILLER = "time year people way day man thing woman life child world school state family student group country problem".split()


@dataclass(frozen=True)
class Work:
    """One configuration of the step. Tokens are those of one row; `min_tokens` = `max_tokens` forbids the end of sequence."""

    key: str
    dtype: str
    matmul_precision: str
    prompt_tokens: int
    min_tokens: int
    max_tokens: int
    prompts_per_step: int
    group: int
    rows_per_micro_batch: int
    ranks: int
    threads: int
    steps: int
    learning_rate: float = 1e-6


def prompts(tokens: int) -> list[dict[str, Any]]:
    """81 chats of `tokens` tokens each: a sum, behind words of one token each."""
    words = [FILLER[i % len(FILLER)] for i in range(tokens - QUESTION_TOKENS)]
    system = {"role": "system", "content": " ".join(["Be brief.", *words])}
    pairs = [(a, b) for a in range(1, 10) for b in range(1, 10)]
    return [{"messages": [system, {"role": "user", "content": f"What is {a} + {b}?"}]} for a, b in pairs]


def reward(samples: list) -> list[float]:
    """Siblings all but never agree on it, so that no group is without an advantage and nothing is skipped."""
    return [len(sample.completion) / 100 for sample in samples]


def micro_batch_tokens(work: Work) -> int:
    """Of so many rows as ours are packed: each group's prompt once."""
    groups = max(1, work.rows_per_micro_batch // work.group)
    return groups * (work.prompt_tokens + work.group * work.max_tokens)


def run_ours(work: Work, folder: Path, model: str, rollout: str) -> list[dict[str, float]]:
    """Metrics of each step, from the run folder of the product with this rollout backend."""
    config = {
        "defaults": ["train", {"override data": "files"}, "_self_"],
        "model": {"path": model},
        "data": {
            "train": "benchmarks.grpo_step:prompts",
            "train_kwargs": {"tokens": work.prompt_tokens},
            "prompts_per_step": work.prompts_per_step,
            "max_prompt_tokens": work.prompt_tokens,
        },
        "reward": {"functions": {"benchmarks.grpo_step:reward": 1.0}},
        "rollout": {
            "backend": rollout,
            "n": work.group,
            "min_response_tokens": work.min_tokens,
            "max_response_tokens": work.max_tokens,
        },
        "engine": {
            "dtype": work.dtype,
            "matmul_precision": work.matmul_precision,
            "max_tokens_per_micro_batch": micro_batch_tokens(work),
        },
        "optimizer": {"learning_rate": work.learning_rate},
        "trainer": {"total_steps": work.steps, "device": "cpu", "keep": 0, "resume": "never", "run_dir": str(folder / "run")},
    }
    (folder / "bench.yaml").write_text(json.dumps(config))  # JSON is YAML
    launch_ranks(work, sys.executable, ["-m", "spmd_rl.train", "--config-dir", str(folder), "--config-name", "bench"], folder)
    found = read_jsonl(folder / "run" / "metrics.jsonl")
    return [row | {"tokens": row["response/length_mean"]} for row in found]


def run_trl(work: Work, folder: Path, model: str, venv: Path) -> list[dict[str, float]]:
    """The same of TRL, whose prompts are the same chats."""
    chats = [row["messages"] for row in prompts(work.prompt_tokens)]
    job = asdict(work) | {"model": model, "out": str(folder / "out.jsonl"), "prompts": chats}
    launch_ranks(work, str(venv / "bin/python"), [str(ROOT / "benchmarks/trl_peer.py"), json.dumps(job)], folder)
    found = read_jsonl(folder / "out.jsonl")
    tokens = {row["log"]: row["tokens"] for row in found if "log" in row}
    return [row | {"tokens": tokens[row["step"]]} for row in found if "log" not in row]


def launch_ranks(work: Work, python: str, arguments: list[str], folder: Path) -> None:
    """Runs a program under torchrun to its end. Raises RuntimeError with the end of what it printed."""
    command = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(work.ranks), *arguments]
    environment = os.environ | {
        "OMP_NUM_THREADS": str(work.threads),
        "MALLOC_ARENA_MAX": "2",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    log = folder / "log.txt"
    with log.open("w") as file:
        code = subprocess.run(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT).returncode
    if code:
        tail = "\n".join(log.read_text().splitlines()[-80:])
        raise RuntimeError(f"{' '.join(command[:6])} ... ended with {code}:\n{tail}")


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def summarise(work: Work, steps: list[dict[str, float]]) -> dict[str, float]:
    """Medians of the measured steps; the peak is the largest."""
    phases = sorted({name for step in steps for name in step if name.startswith(("time/", "cpu/"))})
    medians = {name: round(statistics.median(step.get(name, 0.0) for step in steps), 3) for name in phases}
    rows, seconds = work.prompts_per_step * work.group, medians["time/step"]
    tokens = statistics.median(step["tokens"] for step in steps)
    return {
        "samples_per_second": round(rows / seconds, 3),
        "new_tokens_per_second": round(rows * tokens / seconds, 1),
        "response_tokens": tokens,
        "rss_gb_per_rank": round(max(step["memory/rss_gb"] for step in steps), 2),
        "steps_measured": len(steps),
        **medians,
    }


def measure(work: Work, model: str, venv: Path | None, rounds: int, rollouts: list[str]) -> dict[str, dict[str, float]]:
    """Ours with each rollout backend and the peer's by turns, so that a disturbance of the machine meets all.

    The first step of a run is warm-up."""
    runs: dict[str, list] = {name: [] for name in [*rollouts, *(["trl"] if venv else [])]}
    for _ in range(rounds):
        for name, steps in runs.items():
            with tempfile.TemporaryDirectory(prefix="grpo_step-") as folder:
                path = Path(folder)
                steps += (run_trl(work, path, model, venv) if name == "trl" else run_ours(work, path, model, name))[1:]
            rates = [work.prompts_per_step * work.group / step["time/step"] for step in steps]
            load = os.getloadavg()[0]
            who = name if name == "trl" else f"ours, {name}"
            print(f"{work.key} {who}: samples/s {', '.join(f'{r:.2f}' for r in rates)} (load {load:.1f})", flush=True)
    return {name: summarise(work, steps) for name, steps in runs.items()}


def machine() -> dict[str, Any]:
    """What decides the numbers; without `avx512_bf16` or `amx_bf16`, bfloat16 is emulated and slower than float32."""
    info = Path("/proc/cpuinfo").read_text()
    model = re.search(r"model name\s*: (.*)", info)
    wide = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if f" {flag}" in info]
    return {"cpu": model and model[1], "flags": wide, "cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1)}


def make_venv(venv: Path) -> None:
    """The peer's environment, installed once."""
    stamp = venv / "installed.txt"
    if stamp.exists() and stamp.read_text() == str(PEER_PACKAGES):
        return
    print(f"installing {', '.join(PEER_PACKAGES)} into {venv} (minutes, once)", flush=True)
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    subprocess.run([str(venv / "bin/python"), "-m", "pip", "install", "-qq", *PEER_PACKAGES], check=True)
    stamp.write_text(str(PEER_PACKAGES))


def show(results: dict[str, dict[str, dict[str, float]]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="one GRPO step: wall seconds (CPU seconds of a rank), median of the steps after the first")
    phases = ("generate", "reward", "train", "optimizer", "weights")
    for column in ("work", "who", "samples/s", "tokens a response", "step", *phases, "peak GB a rank"):
        table.add_column(column, justify="left" if column in ("work", "who") else "right")
    for key, by_name in results.items():
        for name, r in by_name.items():
            cells = [f"{r[f'time/{p}']:.2f} ({r[f'cpu/{p}']:.2f})" if f"time/{p}" in r else "" for p in ("step", *phases)]
            figures = f"{r['samples_per_second']:.2f}", f"{r['response_tokens']:.1f}", *cells, f"{r['rss_gb_per_rank']:.2f}"
            table.add_row(key, name if name == "trl" else f"ours, {name}", *figures)
    Console(width=160).print(table)


def report(results: dict[str, dict[str, dict[str, float]]], rollouts: list[str]) -> dict[str, Any]:
    """Of the JSON line: figures and ratios by work; those of another rollout backend than the default carry its name."""
    line: dict[str, Any] = {}
    for rollout in rollouts:
        suffix = "" if rollout == "vllm" else f"_{rollout}"
        line[f"dtypes{suffix}"] = {key: by_name[rollout] for key, by_name in results.items()}
        ratios = ("ratio_vs_trl", "samples_per_second"), ("cpu_vs_trl", "cpu/step"), ("memory_vs_trl", "rss_gb_per_rank")
        for ratio, name in ratios if all("trl" in by for by in results.values()) else ():
            line[ratio + suffix] = {key: round(by[rollout][name] / by["trl"][name], 3) for key, by in results.items()}
    if "ratio_vs_trl" in line:
        line["trl"] = {key: by_name["trl"] for key, by_name in results.items()}
    return line


def plan(args: argparse.Namespace) -> list[Work]:
    """Keys: the dtype, `@tokens` for prompts other than the first length, ` ragged` where sequences end by themselves."""
    rows = args.prompts_per_step * args.group
    micro = min(args.rows_per_micro_batch, rows // args.ranks)
    common = (args.prompts_per_step, args.group, micro, args.ranks, args.threads, args.steps)
    works = []
    for tokens in args.prompts:
        for name in args.dtypes:
            key, dtype, precision = DTYPES[name]
            key += "" if tokens == args.prompts[0] else f"@{tokens}"
            works.append(Work(key, dtype, precision, tokens, args.tokens, args.tokens, *common))
            if args.ragged and tokens == args.prompts[0]:
                works.append(Work(f"{key} ragged", dtype, precision, tokens, 0, 2 * args.tokens, *common))
    return works


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=["float32", "bfloat16"])
    parser.add_argument("--prompts", nargs="+", type=int, default=[26], help="tokens of a prompt, one work each")
    parser.add_argument("--ragged", action="store_true", help="also natural ends, up to twice --tokens")
    parser.add_argument("--rollouts", nargs="+", choices=["vllm", "hf"], default=["vllm", "hf"], help="ours, one run each")
    parser.add_argument("--peer", choices=["trl"])
    parser.add_argument("--peer-venv", type=Path, default=ROOT / "outputs/bench/trl-venv")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each, by turns")
    parser.add_argument("--steps", type=int, default=2, help="steps a run; the first is not measured")
    parser.add_argument("--prompts-per-step", type=int, default=16)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32, help="new tokens of a response")
    parser.add_argument("--rows-per-micro-batch", type=int, default=16, help="of both; ours are packed")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="a rank")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    args = parser.parse_args()
    if args.steps < 2:
        parser.error("--steps: 1 leaves nothing to measure after the first - set at least 2")
    if min(args.prompts) < QUESTION_TOKENS:
        parser.error(f"--prompts: {min(args.prompts)} tokens do not hold the question - set at least {QUESTION_TOKENS}")

    sys.path.insert(0, str(ROOT))
    from spmd_rl.models import resolve_model

    model, venv = resolve_model(args.model), args.peer_venv.absolute() if args.peer else None
    if venv:
        make_venv(venv)
    results = {work.key: measure(work, model, venv, args.rounds, args.rollouts) for work in plan(args)}
    show(results)
    line = {
        "benchmark": "grpo_step",
        "machine": machine(),
        "work": {k: v for k, v in vars(args).items() if isinstance(v, int | list)},
    }
    print(json.dumps(line | report(results, args.rollouts)))


if __name__ == "__main__":
    main()
