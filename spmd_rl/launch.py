"""How this process was started, and how the job ends when one rank fails. Imports no torch."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn


@dataclass(frozen=True)
class Launch:
    """What the launcher says of this process; ranks are the world's."""

    launcher: str  # torchrun | srun | python
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    address: str  # host of the rendezvous store
    port: int  # 0: a store of this process alone
    hosts_store: bool  # this process opens the store
    restart: int  # torchrun's restart count: keeps the store's keys of two attempts apart

    def __str__(self) -> str:
        return f"{self.launcher}, rank {self.rank} of {self.world_size} on {socket.gethostname()}"


def detect_launch(env: dict[str, str] | None = None) -> Launch:
    """Reads torchrun's variables, else srun's, else this is `python -m` and a world of one.

    Raises ValueError when srun's tasks are spread unevenly or the first node has no address."""
    env = dict(os.environ) if env is None else env
    if "TORCHELASTIC_RUN_ID" in env or {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= env.keys():
        rank, size = int(env["RANK"]), int(env["WORLD_SIZE"])
        agent_store = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return Launch(
            launcher="torchrun" if "TORCHELASTIC_RUN_ID" in env else "env",
            rank=rank,
            world_size=size,
            local_rank=int(env.get("LOCAL_RANK", rank)),
            local_world_size=int(env.get("LOCAL_WORLD_SIZE", size)),
            address=env["MASTER_ADDR"],
            port=int(env["MASTER_PORT"]),
            hosts_store=rank == 0 and not agent_store,
            restart=int(env.get("TORCHELASTIC_RESTART_COUNT", 0)),
        )
    if int(env.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        return _srun(env)
    return Launch("python", 0, 1, 0, 1, "127.0.0.1", 0, True, 0)


def _srun(env: dict[str, str]) -> Launch:
    size, nodes = int(env["SLURM_STEP_NUM_TASKS"]), int(env.get("SLURM_STEP_NUM_NODES", 1))
    if size % nodes:
        raise ValueError(f"srun: {size} tasks on {nodes} nodes - use --ntasks-per-node so that every node has as many")
    return Launch(
        launcher="srun",
        rank=int(env["SLURM_PROCID"]),
        world_size=size,
        local_rank=int(env["SLURM_LOCALID"]),
        local_world_size=size // nodes,
        address=env.get("MASTER_ADDR") or _first_address(env.get("SLURM_STEP_NODELIST", ""), nodes),
        port=int(env.get("MASTER_PORT") or 20000 + int(env["SLURM_JOB_ID"]) % 10000),
        hosts_store=env["SLURM_PROCID"] == "0",
        restart=int(env.get("SLURM_RESTART_COUNT", 0)),
    )


def _first_address(nodes: str, num_nodes: int) -> str:
    if num_nodes == 1:
        return "127.0.0.1"
    try:
        first = _scontrol("hostnames", nodes).split()[0]
        words = _scontrol("node", first, "-o").split()
    except (OSError, subprocess.CalledProcessError) as error:
        raise ValueError(f"srun: scontrol does not say which node is first of {nodes} ({error}) - set MASTER_ADDR to it") from error
    address = next((word[9:] for word in words if word.startswith("NodeAddr=")), "")
    if not address:
        raise ValueError(f"srun: scontrol names no address for node {first} - set MASTER_ADDR to it")
    return address


def _scontrol(*what: str) -> str:
    return subprocess.run(["scontrol", "show", *what], capture_output=True, text=True, check=True).stdout


def end_at_once() -> NoReturn:
    """Ends this process whatever its threads do. Removes the folder of multiprocessing's sockets, as exit handlers would."""
    if folder := multiprocessing.current_process()._config.get("tempdir"):
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


class AbortWatch:
    """Ends every rank in seconds when one fails, and shows the first traceback once.

    The store is a key-value store that all ranks reach (`set`, `check`, `compare_set`, `get`); `connect` opens a
    connection of its own for the watching thread, since the main one may be blocked inside a wait."""

    KEY = "abort"

    def __init__(self, connect: Callable[[], Any], rank: int, poll_s: float = 1.0):
        self.store, self.rank, self.poll_s = connect(), rank, poll_s
        self.connect, self.stopped = connect, threading.Event()
        threading.Thread(target=self._watch, daemon=True, name="abort-watch").start()

    def report(self, error: BaseException) -> bool:
        """Tells the world that this rank failed. True on the rank that was first: it shows the traceback."""
        self.stopped.set()
        text = f"rank {self.rank} on {socket.gethostname()}: {type(error).__name__}: {error}"
        try:
            first = self.store.compare_set(self.KEY, "", text).decode() == text
        except Exception:  # the store's host is gone: whoever hosted it has told why
            return False
        if first:
            sys.stderr.write(f"\n[spmd_rl] {text}\n" + "".join(traceback.format_exception(error)))
            sys.stderr.flush()
        return first

    def leave(self, first: bool) -> NoReturn:
        """Ends this process at once: a thread of a broken group may never end."""
        sys.stdout.flush()
        if first:
            time.sleep(2 * self.poll_s)  # a store hosted here must outlive the others' next look
        end_at_once()

    def close(self) -> None:
        self.stopped.set()

    def _watch(self) -> None:
        store = self.connect()
        while not self.stopped.wait(self.poll_s):
            try:
                failed = store.check([self.KEY])
            except Exception:
                failed = True
            if failed and not self.stopped.wait(self.poll_s):  # leave a failing rank the time to say its own word
                end_at_once()
