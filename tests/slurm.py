"""A SLURM cluster on this machine alone: munged, slurmctld and slurmd of two nodes, all in one folder. Needs root."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.launch import ROOT, free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "sinfo")
NODES = ("n1", "n2")
CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={root}/munge.socket
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
MinJobAge=600
FirstJobId={first_job}
{nodes}PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 CoresPerSocket=2 RealMemory=2000 State=UNKNOWN\n"


def missing() -> str:
    """Why there can be no cluster here, or nothing."""
    if os.geteuid():
        return "SLURM's daemons want root"
    absent = [name for name in PROGRAMS if not _find(name)]
    return f"{', '.join(absent)} not installed" if absent else ""


def _find(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


@dataclass
class Cluster:
    env: dict[str, str]

    def run(self, *command: str, timeout: float = 120) -> subprocess.CompletedProcess:
        return subprocess.run(command, env=self.env, cwd=ROOT, capture_output=True, text=True, timeout=timeout)

    def submit(self, *command: str) -> str:
        """The id of the job."""
        done = self.run("sbatch", "--parsable", *command)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def state(self, job: str) -> tuple[str, str]:
        """(state, exit code:signal)."""
        shown = self.run("scontrol", "show", "job", job, "--oneliner").stdout
        return re.search(r"JobState=(\S+)", shown)[1], re.search(r"\bExitCode=(\S+)", shown)[1]

    def wait(self, job: str, timeout: float = 180) -> tuple[str, str]:
        """The state in which the job ended, or is when the time is up."""
        end = time.monotonic() + timeout
        while (found := self.state(job))[0] in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING") and time.monotonic() < end:
            time.sleep(0.3)
        return found


@contextmanager
def slurm_cluster(root: Path) -> Iterator[Cluster]:
    """Both nodes are idle; at the end jobs are cancelled and no daemon is left."""
    root.chmod(0o755)
    for name in ("state", *(f"spool-{node}" for node in NODES)):
        (root / name).mkdir()
    (root / "munge.key").write_bytes(os.urandom(128))
    (root / "munge.key").chmod(0o400)
    host = socket.gethostname().partition(".")[0]
    nodes = "".join(NODE.format(name=name, host=host, port=free_port()) for name in NODES)
    first_job = random.randrange(1000, 9000)  # the port of a job's rendezvous depends on it
    (root / "slurm.conf").write_text(CONF.format(host=host, port=free_port(), root=root, nodes=nodes, first_job=first_job))
    cluster = Cluster(os.environ | {"SLURM_CONF": str(root / "slurm.conf")})
    munge = [f"--socket={root}/munge.socket", *(f"--{name}-file={root}/munge.{name}" for name in ("key", "pid", "log", "seed"))]
    commands = [
        [_find("munged"), "--foreground", "--force", *munge],
        [_find("slurmctld"), "-D"],
        *([_find("slurmd"), "-D", "-N", node] for node in NODES),
    ]
    daemons = []
    try:
        for command in commands:
            with (root / "daemons.out").open("a") as out:
                daemons.append(subprocess.Popen(command, env=cluster.env, stdout=out, stderr=subprocess.STDOUT))
            _wait_for(lambda: (root / "munge.socket").exists(), root)
        _wait_for(lambda: cluster.run("sinfo", "-h", "-N", "-o", "%T").stdout.split() == ["idle"] * len(NODES), root)
    except AssertionError as error:
        _stop(daemons)
        pytest.skip(f"SLURM's daemons do not start here: {error}")
    try:
        yield cluster
    finally:
        cluster.run("scancel", "--full", "--signal=KILL", "--user=root")
        cluster.run("scancel", "--user=root")
        with contextlib.suppress(AssertionError):
            _wait_for(lambda: not cluster.run("squeue", "-h").stdout, root)
        _stop(daemons)


def _stop(daemons: list[subprocess.Popen]) -> None:
    for daemon in reversed(daemons):
        daemon.terminate()
    for daemon in daemons:
        try:
            daemon.wait(10)
        except subprocess.TimeoutExpired:
            daemon.kill()


def _wait_for(ready, root: Path, timeout: float = 30) -> None:
    end = time.monotonic() + timeout
    while not ready():
        assert time.monotonic() < end, "\n".join(path.read_text()[-2000:] for path in (root / "daemons.out", *root.glob("*.log")))
        time.sleep(0.1)
