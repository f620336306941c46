"""Who started this process, and which rank did they give it: one reader per launcher.

Each reader takes the environment and answers with a `Place`, or None where it was not that launcher.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from piledriver.runtime.environment import RENDEZVOUS_FILE, whole_number
from piledriver.runtime.errors import WorldError
from piledriver.runtime.hardware import Hardware

_DEFAULT_PORT = 29500


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """Where the processes find each other; no address where they have no need to, or meet through a file."""

    address: str | None = None
    port: int | None = None
    because: str = ""


@dataclass(frozen=True, kw_only=True)
class Place:
    """What a launcher says about this process, with the reasons."""

    launcher: str
    because: str
    rank: int = 0
    size: int = 1
    rank_because: str = "nobody started others"
    local_rank: int = 0
    local_size: int = 1
    node: int = 0
    local_because: str = "nobody started others"
    meeting: Meeting = field(default_factory=lambda: Meeting())


def find_place(environ: Mapping[str, str], hardware: Hardware) -> Place:
    """Ask each launcher in turn. The most explicit wins: RANK and WORLD_SIZE, then Slurm, then MPI, then nobody."""
    for reader in (_from_rank_variables, _from_slurm, _from_openmpi, _from_mpich):
        place = reader(environ, hardware)
        if place is not None:
            return place
    return Place(launcher="plain", because="no launcher left its variables")


def _from_rank_variables(environ: Mapping[str, str], hardware: Hardware) -> Place | None:
    rank, size = whole_number(environ, "RANK"), whole_number(environ, "WORLD_SIZE")
    if rank is None and size is None:
        return None
    if rank is None or size is None:
        missing, there = ("RANK", f"WORLD_SIZE={size}") if rank is None else ("WORLD_SIZE", f"RANK={rank}")
        raise WorldError(f"{there} is set but {missing} is not", fix=f"set {missing} too, or unset both to run alone")
    elastic = "TORCHELASTIC_RUN_ID" in environ
    local_size = whole_number(environ, "LOCAL_WORLD_SIZE")
    local_rank = whole_number(environ, "LOCAL_RANK")
    local_because = "LOCAL_RANK"
    if local_rank is None:
        per_node = local_size or hardware.count(hardware.best()) if hardware.best() != "cpu" else local_size or size
        local_rank, local_because = rank % per_node, f"LOCAL_RANK is not set: rank {rank} modulo {per_node} per node"
    if local_size is None:
        local_size = size if hardware.best() == "cpu" else min(size, max(hardware.count(hardware.best()), 1))
        local_size = max(local_size, local_rank + 1)
    node = whole_number(environ, "GROUP_RANK")
    return Place(
        launcher="torchrun" if elastic else "environment",
        because="TORCHELASTIC_RUN_ID is set" if elastic else "RANK and WORLD_SIZE are set",
        rank=rank,
        size=size,
        rank_because="RANK and WORLD_SIZE",
        local_rank=local_rank,
        local_size=local_size,
        node=node if node is not None else rank // local_size,
        local_because=local_because,
        meeting=_meeting(environ, size, everyone_here=local_size >= size),
    )


def _from_slurm(environ: Mapping[str, str], hardware: Hardware) -> Place | None:
    # A batch script has SLURM_PROCID too; only a step that srun started is one of several tasks.
    if "SLURM_STEP_ID" not in environ or "SLURM_PROCID" not in environ:
        return None
    size = whole_number(environ, "SLURM_STEP_NUM_TASKS") or whole_number(environ, "SLURM_NTASKS") or 1
    rank = whole_number(environ, "SLURM_PROCID") or 0
    node = whole_number(environ, "SLURM_NODEID") or 0
    local_rank = whole_number(environ, "SLURM_LOCALID") or 0
    per_node = slurm_tasks_per_node(
        environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or str(size)
    )
    local_size = per_node[node] if node < len(per_node) else max(local_rank + 1, size // max(len(per_node), 1))
    hosts = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST") or "127.0.0.1"
    job = whole_number(environ, "SLURM_JOB_ID") or 0
    port = whole_number(environ, "MASTER_PORT")
    return Place(
        launcher="slurm",
        because="srun left SLURM_STEP_ID and SLURM_PROCID",
        rank=rank,
        size=size,
        rank_because="SLURM_PROCID and SLURM_STEP_NUM_TASKS",
        local_rank=local_rank,
        local_size=local_size,
        node=node,
        local_because="SLURM_LOCALID and SLURM_STEP_TASKS_PER_NODE",
        meeting=Meeting(
            address=environ.get("MASTER_ADDR") or first_slurm_host(hosts),
            # Two jobs on one node must not meet: the job's number makes the port, the same on every node.
            port=port if port is not None else 20_000 + job % 10_000,
            because="MASTER_ADDR" if "MASTER_ADDR" in environ else f"the first host of {hosts!r}",
        ),
    )


def _from_openmpi(environ: Mapping[str, str], hardware: Hardware) -> Place | None:
    rank, size = whole_number(environ, "OMPI_COMM_WORLD_RANK"), whole_number(environ, "OMPI_COMM_WORLD_SIZE")
    if rank is None or size is None:
        return None
    local_rank = whole_number(environ, "OMPI_COMM_WORLD_LOCAL_RANK") or 0
    local_size = whole_number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE") or size
    return _mpi_place("openmpi", "OMPI_COMM_WORLD", environ, rank, size, local_rank, local_size)


def _from_mpich(environ: Mapping[str, str], hardware: Hardware) -> Place | None:
    rank, size = whole_number(environ, "PMI_RANK"), whole_number(environ, "PMI_SIZE")
    if rank is None or size is None:
        return None
    local_rank = whole_number(environ, "MPI_LOCALRANKID")
    local_size = whole_number(environ, "MPI_LOCALNRANKS") or size
    return _mpi_place(
        "mpich", "PMI", environ, rank, size, rank % local_size if local_rank is None else local_rank, local_size
    )


def _mpi_place(
    launcher: str, prefix: str, environ: Mapping[str, str], rank: int, size: int, local_rank: int, local_size: int
) -> Place:
    return Place(
        launcher=launcher,
        because=f"mpirun left {prefix}_RANK",
        rank=rank,
        size=size,
        rank_because=f"{prefix}_RANK and {prefix}_SIZE",
        local_rank=local_rank,
        local_size=local_size,
        node=rank // local_size,
        local_because=f"{prefix}'s local rank",
        meeting=_meeting(environ, size, everyone_here=local_size >= size),
    )


def _meeting(environ: Mapping[str, str], size: int, *, everyone_here: bool) -> Meeting:
    if size == 1:
        return Meeting()
    address = environ.get("MASTER_ADDR")
    port = whole_number(environ, "MASTER_PORT")
    if address is None and RENDEZVOUS_FILE in environ:
        return Meeting()
    if address is None and not everyone_here:
        raise WorldError(
            "the processes are on several nodes and MASTER_ADDR is not set",
            fix="set MASTER_ADDR to a name of the first node that the others can reach (mpirun -x MASTER_ADDR=...)",
        )
    return Meeting(
        address=address or "127.0.0.1",
        port=port if port is not None else _DEFAULT_PORT,
        because="MASTER_ADDR and MASTER_PORT" if address else "all processes are on this node",
    )


def first_slurm_host(nodelist: str) -> str:
    """The first host of Slurm's compressed list.

    >>> first_slurm_host("gpu[007-009,12],login1"), first_slurm_host("a1,b2")
    ('gpu007', 'a1')
    """
    match = re.match(r"([^\[,]+)(?:\[([^\],-]+)[^\]]*\]([^,]*))?", nodelist)
    if match is None:
        raise WorldError(f"cannot read Slurm's node list {nodelist!r}", fix="set MASTER_ADDR")
    return match.group(1) + (match.group(2) or "") + (match.group(3) or "")


def slurm_tasks_per_node(text: str) -> list[int]:
    """Slurm's compressed counts, one per node.

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
