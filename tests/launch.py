"""`@spmd(world_size=4)`: the test's body runs on that many ranks, as processes of one job, and must pass on each."""

from __future__ import annotations

import importlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def children(pid: int) -> list[int]:
    """Of all generations. Linux."""
    own = [int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]
    return own + [grandchild for child in own for grandchild in children(child)]


def start_ranks(command: list[str], world_size: int, folder: Path, **env: str) -> list[tuple[subprocess.Popen, Path]]:
    """One process a rank, with the variables that torchrun would set; each writes to its own file."""
    shared = os.environ | {
        "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1",
    } | env  # fmt: skip
    ranks = []
    for rank in range(world_size):
        out = folder / f"rank{rank}.out"
        with out.open("w") as file:
            own = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = subprocess.Popen([sys.executable, *command], env=own, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT)
        ranks.append((process, out))
    return ranks


def wait_ranks(ranks: list[tuple[subprocess.Popen, Path]], timeout: float) -> list[int | None]:
    """Exit codes, None for a rank that had to be killed at the time-out."""
    end = time.monotonic() + timeout
    while time.monotonic() < end and any(p.poll() is None for p, _ in ranks):
        time.sleep(0.05)
    codes = [p.poll() for p, _ in ranks]
    for process, _ in ranks:
        process.kill()
        process.wait()
    return codes


def run_body(body, world_size: int, folder: Path, timeout: float = 300) -> None:
    """Runs the body of an `@spmd` test on that many ranks, which share `folder`; all must end well."""
    path = Path(sys.modules[body.__module__].__file__).relative_to(ROOT).with_suffix("")
    ranks = start_ranks(["-m", "tests.launch", ".".join(path.parts), body.__name__, str(folder)], world_size, folder)
    codes = wait_ranks(ranks, timeout)
    tails = "\n".join(
        f"--- rank {i}: exit code {c}\n{out.read_text()[-4000:]}" for i, (c, (_, out)) in enumerate(zip(codes, ranks))
    )
    assert codes == [0] * world_size, tails


def spmd(world_size: int, timeout: float = 300):
    """The body gets a folder that all ranks share. Put many checks into one launch: imports take most of its time."""

    def decorate(body):
        @pytest.mark.spmd
        def test():
            with tempfile.TemporaryDirectory() as folder:
                run_body(body, world_size, Path(folder), timeout)

        test.body = body
        test.__name__, test.__doc__ = body.__name__, body.__doc__
        return test

    return decorate


if __name__ == "__main__":
    vars(importlib.import_module(sys.argv[1]))[sys.argv[2]].body(Path(sys.argv[3]))
