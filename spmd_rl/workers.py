"""Worker processes for code of the user's: they never import torch, and end with their parent. Imports no torch."""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import signal
import sys
import threading
from functools import partial
from importlib.machinery import ModuleSpec
from multiprocessing import resource_tracker
from multiprocessing.context import ForkServerContext, ForkServerProcess

PRELOAD = ["spmd_rl.environments"]  # imported once, in the fork server: an episode's fresh worker starts in milliseconds
_SPEC_LOCK = threading.Lock()


class WorkerProcess(ForkServerProcess):
    """A worker that does not run the parent's main module again, which would import torch there.

    SIGTERM is the parent's to answer, also where it comes to every process of a job, as some SLURM configurations send it: the
    fork server inherits that it is blocked, and `enter_worker` sees to the rest."""

    def start(self) -> None:
        main = sys.modules["__main__"]
        multiprocessing.set_forkserver_preload(PRELOAD)
        with _SPEC_LOCK:
            spec, main.__spec__ = main.__spec__, ModuleSpec("__main__", None)  # this name is never run again
            resource_tracker.ensure_running()  # later it would unblock the signal again
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            try:
                super().start()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
                main.__spec__ = spec

    def terminate(self) -> None:
        self.kill()


class WorkerContext(ForkServerContext):
    Process = WorkerProcess


def search_path() -> list[str]:
    """This process's `sys.path` for `enter_worker`; '' is the current folder, also after a chdir."""
    return [os.path.abspath(entry) for entry in sys.path]


def enter_worker(path: list[str]) -> None:
    """What a worker does first: `path` becomes its `sys.path`, it gets a session of its own that ends with the parent, and it
    leaves SIGTERM to the parent; what it starts does not."""
    sys.path[:] = path
    signal.signal(signal.SIGTERM, partial(_leave_to_parent, os.getpid()))  # a handler: programs would inherit SIG_IGN
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    os.setsid()  # a signal to the rank's process group is not for its workers
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # where the kernel lacks it, the thread is left
            _kill_with_parent(multiprocessing.parent_process().sentinel)


def _leave_to_parent(worker: int, signum: int, frame: object) -> None:
    if os.getpid() != worker:  # it was forked by the user's code
        os._exit(128 + signum)


def _exit_with_parent() -> None:
    multiprocessing.parent_process().join()
    os.killpg(0, signal.SIGKILL)


def _kill_with_parent(sentinel: int) -> None:
    """The kernel's part: code that keeps the interpreter lock, such as an endless regular expression, lets no thread run."""
    fcntl.fcntl(sentinel, fcntl.F_SETOWN, -os.getpid())  # the group: programs that the worker started end too
    fcntl.fcntl(sentinel, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(sentinel, fcntl.F_SETFL, fcntl.fcntl(sentinel, fcntl.F_GETFL) | os.O_ASYNC)
