"""Ranks forked from one process that has done the imports, which take longer than most of what tests run on them.

`fork_ranks("tests.jobs:run_jobs", folder, 2)` runs `run_jobs(folder)` on 2 ranks that nothing has touched before, with the
variables that torchrun would set. The parent starts on first use, does nothing but import and fork, and ends with pytest.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

from spmd_rl.config import resolve
from tests.launch import ROOT, free_port

PRELOAD = ("spmd_rl.train", "spmd_rl.engine.fsdp", "spmd_rl.roles.hf_rollout", "transformers.models.llama.modeling_llama")
VLLM = ("vllm.v1.engine.llm_engine", "vllm.v1.worker.cpu_worker", "vllm.model_executor.model_loader.reload")


def fork_ranks(
    body: str, folder: Path, world_size: int, codes: list[int] | None = None, timeout: float = 300, preload: tuple[str, ...] = ()
) -> list[str]:
    """What each rank printed. Asserts their exit codes, by default all 0; a negative one is a signal.

    `preload`: further modules of the parent, which is another one for each such tuple."""
    parent = _parent(preload)
    parent.stdin.write(json.dumps([body, str(folder), world_size, free_port(), timeout]) + "\n")
    parent.stdin.flush()
    found = json.loads(parent.stdout.readline())
    texts = [(folder / f"rank{rank}.out").read_text() for rank in range(world_size)]
    shown = "\n".join(f"--- rank {rank}: exit code {code}\n{texts[rank][-4000:]}" for rank, code in enumerate(found))
    assert found == (codes or [0] * world_size), shown
    return texts


@functools.cache
def _parent(preload: tuple[str, ...]) -> subprocess.Popen:
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-m", "tests.forks", *preload], cwd=ROOT, env=env, **pipes)


def serve() -> None:
    for module in (*PRELOAD, *sys.argv[1:]):
        importlib.import_module(module)
    for line in sys.stdin:
        body, folder, world_size, port, timeout = json.loads(line)
        pids = [_fork(body, Path(folder), rank, world_size, port) for rank in range(world_size)]
        print(json.dumps(_wait(pids, timeout)), flush=True)


def _fork(body: str, folder: Path, rank: int, world_size: int, port: int) -> int:
    if pid := os.fork():
        return pid
    code = 1
    try:
        out = os.open(folder / f"rank{rank}.out", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream, target in ((0, os.open(os.devnull, os.O_RDONLY)), (1, out), (2, out)):
            os.dup2(target, stream)
        names = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world_size, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in names.items()}, MASTER_ADDR="127.0.0.1")
        resolve(body, {})(folder)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(pids: list[int], timeout: float) -> list[int]:
    """Exit codes, -9 for a rank that had to be killed at the time-out."""
    end, codes = time.monotonic() + timeout, {}
    while len(codes) < len(pids):
        for pid in pids:
            if pid not in codes and (done := os.waitpid(pid, os.WNOHANG))[0]:
                codes[pid] = os.waitstatus_to_exitcode(done[1])
            elif pid not in codes and time.monotonic() > end:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return [codes[pid] for pid in pids]


if __name__ == "__main__":
    serve()
