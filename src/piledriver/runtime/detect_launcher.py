"""Detect the launcher of this process and the rank that it assigned: one reader per launcher.

Each reader takes the environment and returns a `RankInfo`, or None if that launcher did not start the process.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from piledriver.runtime.environment import RENDEZVOUS_FILE, integer
from piledriver.runtime.errors import WorldError
from piledriver.runtime.hardware import Hardware

_DEFAULT_PORT = 29500


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Where processes connect. There is no address for a single process, or if they meet through a file."""

    address: str | None = None
    port: int | None = None
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """Rank and world size that a launcher assigned, with the variables that say so."""

    launcher: str
    launcher_reason: str
    rank: int = 0
    size: int = 1
    rank_reason: str = "no launcher"
    local_rank: int = 0
    local_size: int = 1
    node: int = 0
    local_reason: str = "no launcher"
    rendezvous: Rendezvous = field(default_factory=Rendezvous)


def detect_launcher(environ: Mapping[str, str], hardware: Hardware) -> RankInfo:
    """Return the rank from the first launcher found: RANK and WORLD_SIZE, Slurm, MPI; else a single process."""
    for reader in (_from_rank_variables, _from_slurm, _from_openmpi, _from_mpich):
        found = reader(environ, hardware)
        if found is not None:
            return found
    return RankInfo(launcher="plain", launcher_reason="no launcher left its variables")


def _from_rank_variables(environ: Mapping[str, str], hardware: Hardware) -> RankInfo | None:
    rank, size = integer(environ, "RANK"), integer(environ, "WORLD_SIZE")
    if rank is None and size is None:
        return None
    if rank is None or size is None:
        missing, there = ("RANK", f"WORLD_SIZE={size}") if rank is None else ("WORLD_SIZE", f"RANK={rank}")
        raise WorldError(
            f"{there} is set but {missing} is not", fix=f"set {missing} too, or unset both to run one process"
        )
    elastic = "TORCHELASTIC_RUN_ID" in environ
    local_size = integer(environ, "LOCAL_WORLD_SIZE")
    local_rank = integer(environ, "LOCAL_RANK")
    local_reason = "LOCAL_RANK"
    if local_rank is None:
        per_node = local_size or hardware.count(hardware.best()) if hardware.best() != "cpu" else local_size or size
        local_rank, local_reason = rank % per_node, f"LOCAL_RANK is not set: rank {rank} modulo {per_node} per node"
    if local_size is None:
        local_size = size if hardware.best() == "cpu" else min(size, max(hardware.count(hardware.best()), 1))
        local_size = max(local_size, local_rank + 1)
    node = integer(environ, "GROUP_RANK")
    return RankInfo(
        launcher="torchrun" if elastic else "environment",
        launcher_reason="TORCHELASTIC_RUN_ID is set" if elastic else "RANK and WORLD_SIZE are set",
        rank=rank,
        size=size,
        rank_reason="RANK and WORLD_SIZE",
        local_rank=local_rank,
        local_size=local_size,
        node=node if node is not None else rank // local_size,
        local_reason=local_reason,
        rendezvous=_rendezvous(environ, size, one_node=local_size >= size),
    )


def _from_slurm(environ: Mapping[str, str], hardware: Hardware) -> RankInfo | None:
    # A batch script has SLURM_PROCID too; only a step started by srun is one of several tasks.
    if "SLURM_STEP_ID" not in environ or "SLURM_PROCID" not in environ:
        return None
    size = integer(environ, "SLURM_STEP_NUM_TASKS") or integer(environ, "SLURM_NTASKS") or 1
    rank = integer(environ, "SLURM_PROCID") or 0
    node = integer(environ, "SLURM_NODEID") or 0
    local_rank = integer(environ, "SLURM_LOCALID") or 0
    per_node = slurm_tasks_per_node(
        environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or str(size)
    )
    local_size = per_node[node] if node < len(per_node) else max(local_rank + 1, size // max(len(per_node), 1))
    hosts = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST") or "127.0.0.1"
    job = integer(environ, "SLURM_JOB_ID") or 0
    port = integer(environ, "MASTER_PORT")
    return RankInfo(
        launcher="slurm",
        launcher_reason="srun left SLURM_STEP_ID and SLURM_PROCID",
        rank=rank,
        size=size,
        rank_reason="SLURM_PROCID and SLURM_STEP_NUM_TASKS",
        local_rank=local_rank,
        local_size=local_size,
        node=node,
        local_reason="SLURM_LOCALID and SLURM_STEP_TASKS_PER_NODE",
        rendezvous=Rendezvous(
            address=environ.get("MASTER_ADDR") or first_slurm_host(hosts),
            # The port follows from the job id, so that two jobs on one node do not connect to each other.
            port=port if port is not None else 20_000 + job % 10_000,
            reason="MASTER_ADDR" if "MASTER_ADDR" in environ else f"the first host of {hosts!r}",
        ),
    )


def _from_openmpi(environ: Mapping[str, str], hardware: Hardware) -> RankInfo | None:
    rank, size = integer(environ, "OMPI_COMM_WORLD_RANK"), integer(environ, "OMPI_COMM_WORLD_SIZE")
    if rank is None or size is None:
        return None
    local_rank = integer(environ, "OMPI_COMM_WORLD_LOCAL_RANK") or 0
    local_size = integer(environ, "OMPI_COMM_WORLD_LOCAL_SIZE") or size
    return _mpi_rank("openmpi", "OMPI_COMM_WORLD", environ, rank, size, local_rank, local_size)


def _from_mpich(environ: Mapping[str, str], hardware: Hardware) -> RankInfo | None:
    rank, size = integer(environ, "PMI_RANK"), integer(environ, "PMI_SIZE")
    if rank is None or size is None:
        return None
    local_rank = integer(environ, "MPI_LOCALRANKID")
    local_size = integer(environ, "MPI_LOCALNRANKS") or size
    return _mpi_rank(
        "mpich", "PMI", environ, rank, size, rank % local_size if local_rank is None else local_rank, local_size
    )


def _mpi_rank(
    launcher: str, prefix: str, environ: Mapping[str, str], rank: int, size: int, local_rank: int, local_size: int
) -> RankInfo:
    return RankInfo(
        launcher=launcher,
        launcher_reason=f"mpirun left {prefix}_RANK",
        rank=rank,
        size=size,
        rank_reason=f"{prefix}_RANK and {prefix}_SIZE",
        local_rank=local_rank,
        local_size=local_size,
        node=rank // local_size,
        local_reason=f"{prefix}'s local rank",
        rendezvous=_rendezvous(environ, size, one_node=local_size >= size),
    )


def _rendezvous(environ: Mapping[str, str], size: int, *, one_node: bool) -> Rendezvous:
    if size == 1:
        return Rendezvous()
    address = environ.get("MASTER_ADDR")
    port = integer(environ, "MASTER_PORT")
    if address is None and RENDEZVOUS_FILE in environ:
        return Rendezvous()
    if address is None and not one_node:
        raise WorldError(
            "the processes are on several nodes and MASTER_ADDR is not set",
            fix="set MASTER_ADDR to an address of the first node that the others can reach (mpirun -x MASTER_ADDR=...)",
        )
    return Rendezvous(
        address=address or "127.0.0.1",
        port=port if port is not None else _DEFAULT_PORT,
        reason="MASTER_ADDR and MASTER_PORT" if address else "all processes are on this node",
    )


def first_slurm_host(nodelist: str) -> str:
    """Return the first host of Slurm's compressed node list.

    >>> first_slurm_host("gpu[007-009,12],login1"), first_slurm_host("a1,b2")
    ('gpu007', 'a1')
    """
    match = re.match(r"([^\[,]+)(?:\[([^\],-]+)[^\]]*\]([^,]*))?", nodelist)
    if match is None:
        raise WorldError(f"cannot read Slurm's node list {nodelist!r}", fix="set MASTER_ADDR")
    return match.group(1) + (match.group(2) or "") + (match.group(3) or "")


def slurm_tasks_per_node(text: str) -> list[int]:
    """Return Slurm's compressed tasks per node, one count per node.

    >>> slurm_tasks_per_node("2(x3),1")
    [2, 2, 2, 1]
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise WorldError(f"cannot read Slurm's tasks per node {text!r}", fix="set RANK, WORLD_SIZE and LOCAL_RANK")
        counts += [int(match.group(1))] * int(match.group(2) or 1)
    return counts
