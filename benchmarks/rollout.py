"""Tokens per CPU second of our rollout backends and of a bare `vllm.LLM` loop, on the same requests in the same run.

    python benchmarks/rollout.py                          # float32: vllm, hf and bare vLLM
    python benchmarks/rollout.py --dtype bfloat16
    python benchmarks/rollout.py --siblings 8             # 4 prompts x 8 samples: what rollout.block_size does

Every contender is a process of its own, with one thread, started once; they work by turns. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
KEYS = {"float32": "fp32", "bfloat16": "bf16"}
BLOCK_SIZES = (32, 64, 128)  # on a host vLLM takes multiples of 32
Generate = Callable[[], tuple[list[list[int]], float]]  # the new tokens of each request, share of prompt tokens cached


class Job(NamedTuple):
    """What one contender does in a turn."""

    contender: str  # vllm | hf | bare_vllm
    folder: str
    dtype: str
    prompts: int
    siblings: int  # samples of a prompt
    prompt_tokens: int
    tokens: int  # new ones of each sample; nothing ends earlier
    block_size: int

    @property
    def rows(self) -> int:
        return self.prompts * self.siblings

    def requests(self) -> list[tuple[list[int], int]]:
        """(prompt, seed) of each sample: ids drawn at random, so that only siblings have a prefix in common."""
        import torch

        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(100, 40_000, (self.prompts, self.prompt_tokens), generator=generator).tolist()
        return [(ids[i // self.siblings], 1000 + i) for i in range(self.rows)]


def stored_tensors(folder: str) -> Iterator[tuple[str, Any]]:
    """(name, tensor) of every tensor that a model folder holds, one at a time, in the order of its parameters."""
    from safetensors import safe_open

    from spmd_rl.engine.hf_names import stored_files, stored_shapes

    files = stored_files(folder)
    opened = {path: safe_open(path, "pt") for path in set(files.values())}
    for name in stored_shapes(folder):
        yield name, opened[files[name]].get_tensor(name)


def ours(job: Job) -> Generate:
    """A backend of ServerAdapter, in a world of one rank."""
    from spmd_rl.batch import Sampling
    from spmd_rl.config import ROLLOUTS, RolloutConfig, TimeoutConfig, resolve
    from spmd_rl.launch import detect_launch
    from spmd_rl.mesh import Role, open_store, split_world
    from spmd_rl.roles.generation import Request, RolloutModel

    launch = detect_launch()
    world = split_world({"rollout": Role((0,), 1)}, launch, open_store(launch, TimeoutConfig()), "cpu", TimeoutConfig())
    config = RolloutConfig(
        backend=job.contender,
        dtype=job.dtype,
        max_batch_rows=job.rows,
        max_model_len=job.prompt_tokens + job.tokens,
        block_size=job.block_size,
    )
    backend = resolve(job.contender, ROLLOUTS)(config, RolloutModel(job.folder, ()), world.meshes["rollout"])
    requests = [Request(ids, seed, 0, job.tokens) for ids, seed in job.requests()]
    sampling = Sampling(1.0, job.siblings, 0, job.tokens, ())
    backend.update_weights(stored_tensors(job.folder))

    def generate():
        backend.take_counts()
        replies = backend.complete(requests, sampling, None)
        cached, asked = backend.take_counts().get("rollout/prefix_cache_hit_rate", (0, 1))
        if job.contender == "vllm":
            backend.engine.reset_prefix_cache()
        return [reply.ids for reply in replies], cached / asked

    return generate


def bare_vllm(job: Job) -> Generate:
    """What a script would do with vLLM alone, in its own process as ours is, and with the same limits."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    from vllm import LLM, SamplingParams

    llm = LLM(
        job.folder, dtype=job.dtype, skip_tokenizer_init=True, enforce_eager=True, generation_config="vllm", seed=0,
        max_model_len=job.prompt_tokens + job.tokens, max_num_seqs=job.rows, block_size=job.block_size,
        kv_cache_memory_bytes=4 << 30, logprobs_mode="processed_logprobs",
    )  # fmt: skip
    asked = job.requests()
    prompts = [{"prompt_token_ids": ids} for ids, _ in asked]
    params = [
        SamplingParams(n=1, temperature=1.0, seed=seed, max_tokens=job.tokens, ignore_eos=True, logprobs=0, detokenize=False)
        for _, seed in asked
    ]

    def generate():
        outputs = llm.generate(prompts, params, use_tqdm=False)
        llm.reset_prefix_cache()
        cached = sum(out.num_cached_tokens or 0 for out in outputs)
        return [list(out.outputs[0].token_ids) for out in outputs], cached / sum(len(ids) for ids, _ in asked)

    return generate


def serve(job: Job) -> None:
    """One line of JSON for each line on the standard input; the first turn is warm-up, before any is asked for."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries may print
    generate = bare_vllm(job) if job.contender == "bare_vllm" else ours(job)
    generate()
    answers.write("{}\n")
    for _ in sys.stdin:
        wall, cpu = time.perf_counter(), time.process_time()
        found, hit_rate = generate()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        if [len(ids) for ids in found] != [job.tokens] * job.rows:
            raise RuntimeError(f"{job.contender}: not {job.rows} samples of {job.tokens} tokens")
        samples = zlib.crc32(json.dumps(found).encode())
        answers.write(json.dumps({"wall": wall, "cpu": cpu, "hit_rate": hit_rate, "samples": samples}) + "\n")
    os._exit(0)  # nothing is left to tear down that the end of the process does not


class Contender:
    """A process that takes turns."""

    def __init__(self, job: Job, folder: Path):
        self.job, self.log, self.turns = job, folder / f"{job.contender}-{job.block_size}.log", []
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "MALLOC_ARENA_MAX": "2",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, __file__, "--serve", json.dumps(job)],
                cwd=ROOT, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
            )  # fmt: skip
        self._answer()

    def turn(self) -> dict[str, float]:
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        self.turns.append(self._answer())
        return self.turns[-1]

    def _answer(self) -> dict[str, float]:
        line = self.process.stdout.readline()
        if not line:
            tail = "\n".join(self.log.read_text().splitlines()[-60:])
            raise RuntimeError(f"{self.job.contender} ended with {self.process.wait()}:\n{tail}")
        return json.loads(line)

    def median(self, name: str) -> float:
        return statistics.median(turn[name] for turn in self.turns)

    def rate(self, seconds: str) -> float:
        """New tokens per wall or CPU second."""
        return round(self.job.rows * self.job.tokens / self.median(seconds), 1)

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def take_turns(jobs: dict[str, Job], rounds: int) -> dict[str, Contender]:
    contenders: dict[str, Contender] = {}
    with tempfile.TemporaryDirectory(prefix="rollout-") as folder:
        try:
            for name, job in jobs.items():
                contenders[name] = Contender(job, Path(folder))
            for i in range(rounds):
                for name, contender in contenders.items():
                    turn = contender.turn()
                    rate = contender.job.rows * contender.job.tokens / turn["cpu"]
                    print(f"round {i + 1} {name}: {rate:.0f} tokens a CPU second (load {os.getloadavg()[0]:.1f})", flush=True)
        finally:
            for contender in contenders.values():
                contender.close()
    return contenders


def paired_ratio(one: list[dict[str, float]], other: list[dict[str, float]], name: str = "cpu") -> float:
    """How many times less `one` needs than `other`: the median over rounds, so that a disturbance meets both."""
    return round(statistics.median(b[name] / a[name] for a, b in zip(one, other, strict=True)), 3)


def compare(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    job = Job("vllm", folder, args.dtype, args.prompts, 1, args.prompt_tokens, args.tokens, 32)
    found = take_turns({name: job._replace(contender=name) for name in args.contenders}, args.rounds)
    line: dict[str, Any] = {
        "tokens_per_cpu_second": {name: contender.rate("cpu") for name, contender in found.items()},
        "tokens_per_wall_second": {name: contender.rate("wall") for name, contender in found.items()},
    }
    for name, key in (("bare_vllm", "ratio_vs_bare_vllm"), ("hf", "ratio_vs_hf")):
        if {"vllm", name} <= found.keys():
            line[key] = paired_ratio(found["vllm"].turns, found[name].turns)
    if {"vllm", "bare_vllm"} <= found.keys():
        line["same_samples_as_bare_vllm"] = found["vllm"].turns[0]["samples"] == found["bare_vllm"].turns[0]["samples"]
    return line


def share_prefixes(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    job = Job("vllm", folder, args.dtype, 4, args.siblings, 128, args.tokens, 32)
    found = take_turns({str(size): job._replace(block_size=size) for size in BLOCK_SIZES}, args.rounds)
    return {
        "prefix_cache_hit_rate": {size: round(contender.median("hit_rate"), 3) for size, contender in found.items()},
        "cpu_seconds": {size: round(contender.median("cpu"), 2) for size, contender in found.items()},
        "tokens_per_cpu_second": {size: contender.rate("cpu") for size, contender in found.items()},
    }


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=list(KEYS), default="float32")
    parser.add_argument("--contenders", nargs="+", choices=["vllm", "hf", "bare_vllm"], default=["vllm", "bare_vllm", "hf"])
    parser.add_argument("--rounds", type=int, default=3, help="turns of each, after one of warm-up")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=40)
    parser.add_argument("--tokens", type=int, help="new tokens of a sample (128; 16 with --siblings)")
    parser.add_argument("--siblings", type=int, default=1, help="samples of each of 4 prompts of 128 tokens; 1: compare backends")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.tokens = args.tokens or (128 if args.siblings == 1 else 16)
    if args.rounds < 1:
        parser.error(f"--rounds: {args.rounds} measures nothing - set at least 1")
    return args


def main() -> None:
    args = parse()
    sys.path.insert(0, str(ROOT))
    if args.serve:
        serve(Job(*json.loads(args.serve)))
    from benchmarks.grpo_step import machine
    from spmd_rl.models import resolve_model

    folder = resolve_model(args.model)
    work = {k: v for k, v in vars(args).items() if isinstance(v, int | list)}
    line = {"benchmark": "rollout", "machine": machine(), "work": work, "dtype": KEYS[args.dtype]}
    print(json.dumps(line | (compare if args.siblings == 1 else share_prefixes)(args, folder)))


if __name__ == "__main__":
    main()
