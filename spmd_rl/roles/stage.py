"""Stage: who is on the device. Free memory is measured around every phase; too little of it stops the run with a table.

Free is what can still be taken: of a CUDA device what the driver says, of a host what the kernel can make available, and no
more than what the memory limits of this process's control groups leave (a SLURM job or a container has one).
"""

from __future__ import annotations

import math
import os
import re
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import torch

from spmd_rl.metrics import Max, Min, Stats

GB = 1e9
MEMINFO = Path("/proc/meminfo")
V2 = ("memory.max", "memory.current", "inactive_file")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
ADVICE = ("rollout.kv_cache_gb", "rollout.max_batch_rows", "engine.max_tokens_per_micro_batch")  # to lower


@dataclass(frozen=True)
class Free:
    """Memory that can still be taken, in bytes; `total` is infinite where nobody says."""

    free: float
    total: float
    where: str


@dataclass(frozen=True)
class ControlGroup:
    """A control group that may limit this process's memory."""

    folder: Path
    names: tuple[str, str, str]  # file of the limit, file of the use, key of page cache in memory.stat: V2 or V1

    def free(self, enough: float) -> Free:
        """What the limit leaves, page cache that can be dropped included; that is not looked up beyond `enough`."""
        limit = (self.folder / self.names[0]).read_text().strip()
        where = f"the memory limit of {self.folder}"
        if limit == "max":
            return Free(math.inf, math.inf, where)
        left = int(limit) - int((self.folder / self.names[1]).read_text())
        if left < enough:
            cache = re.search(rf"^{self.names[2]} (\d+)$", (self.folder / "memory.stat").read_text(), re.MULTILINE)
            left += int(cache[1]) if cache else 0
        return Free(max(0, left), int(limit), where)


def control_groups(own: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> list[ControlGroup]:
    """This process's own group and those around it, v2 or v1, as far as they can be read here; none where there are none.

    A container sees its own group as the root, whatever path the host gave it."""
    found = []
    for line in own.read_text().splitlines() if own.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        names, mounts = (V1, [root / "memory"]) if controllers else (V2, [root, root / "unified"])
        inner = PurePosixPath(path)
        folders = [mount / part.relative_to("/") for mount in mounts for part in (inner, *inner.parents)]
        found += [ControlGroup(folder, names) for folder in folders if (folder / names[0]).exists()]
    return found


def host_free(groups: Sequence[ControlGroup], meminfo: Path = MEMINFO) -> Free:
    """The least of what the host can make available and what each group leaves. Without /proc, as on macOS: no bound."""
    if not meminfo.exists():
        return Free(math.inf, math.inf, "the host")
    found = dict(re.findall(r"^(\w+): +(\d+) kB$", meminfo.read_text(), re.MULTILINE))
    least = Free(int(found["MemAvailable"]) * 1024, int(found["MemTotal"]) * 1024, "the host")
    for group in groups:
        least = min(least, group.free(least.free), key=lambda f: f.free)
    return least


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peaks() -> dict[str, float]:
    """Peaks since the process started, in GB of 10^9 bytes: resident memory, and what torch allocated on cuda."""
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB on Linux
    found = {"memory/rss_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GB}
    if torch.cuda.is_initialized():
        found["memory/cuda_gb"] = torch.cuda.max_memory_allocated() / GB
    return found


class Stage:
    """Local to a rank. `holders`: of each role on this rank, the bytes that its parts hold on the device."""

    def __init__(
        self,
        min_free_gb: float,
        rank: int,
        device: torch.device,
        holders: Mapping[str, Callable[[], dict[str, int]]],
        measure: Callable[[], Free] | None = None,
    ):
        self.min_free_gb, self.rank, self.device, self.holders = min_free_gb, rank, device, holders
        self.groups = control_groups() if device.type == "cpu" else []
        self.measure = measure or self._measure
        self.least = math.inf

    def watch(self, when: str) -> None:
        """Measures; `when` says what begins or has ended. MemoryError with a table where less is free than `min_free_gb`."""
        found = self.measure()
        self.least = min(self.least, found.free / GB)
        if found.free < self.min_free_gb * GB:
            raise MemoryError(self._table(when, found))

    def step(self) -> Stats:
        """The least that was free since the last call, and the peaks of use."""
        least, self.least = self.least, math.inf
        stats: Stats = {key: Max(value) for key, value in peaks().items()}
        return stats | {"memory/free_gb_min": Min(least)}

    def _measure(self) -> Free:
        if self.device.type == "cpu":
            return host_free(self.groups)
        free, total = torch.cuda.mem_get_info(self.device)
        if free < self.min_free_gb * GB:  # torch keeps what it freed, and gives it back when asked
            torch.cuda.empty_cache()
            free, total = torch.cuda.mem_get_info(self.device)
        return Free(free, total, str(self.device))

    def _table(self, when: str, found: Free) -> str:
        parts = {f"{role} {part}": size for role, memory in self.holders.items() for part, size in memory().items()}
        held = sum(parts.values())
        if self.device.type == "cpu":
            process = resident()
            rest = {
                "rest of this process: activations, caches, libraries": process - held,
                "this process (RSS)": process,
                "other processes": found.total - found.free - process,
            }
            advice = [f"lower {', '.join(ADVICE)}", "take more memory or fewer ranks on this host"]
        else:
            rest = {
                "rest: activations, caches, contexts, other processes": found.total - found.free - held,
                "torch allocated": torch.cuda.memory_allocated(self.device),
                "torch reserved": torch.cuda.memory_reserved(self.device),
            }
            advice = [f"lower rollout.gpu_memory_utilization, {', '.join(ADVICE)}", "set engine.offload=true, use more devices"]
        rows = {**parts, **rest, "free": found.free, "total": found.total}
        width = max(map(len, rows))
        lines = [f"  {name:<{width}}  {max(0.0, size) / GB:9.3f}" for name, size in rows.items()]
        return "\n".join(
            [
                f"trainer.min_free_gb: {when}, {found.free / GB:.3f} GB of {found.where} are free on rank {self.rank}, less than "
                f"{self.min_free_gb:g} - {', '.join(advice)}, or lower trainer.min_free_gb. Who holds what, in GB:",
                *lines,
            ]
        )
