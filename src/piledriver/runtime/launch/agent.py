"""Start the processes of a node with torch's elastic agent; failures are errors that name the rank."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from piledriver.core.errors import MissingFileError
from piledriver.runtime import environment
from piledriver.runtime.errors import LaunchError, PortTakenError, RendezvousError, StoppedError
from piledriver.runtime.hardware import find_hardware
from piledriver.runtime.launch.config import LaunchConfig, processes_per_node


def launch(wanted: LaunchConfig, script: str, arguments: Sequence[str] = (), *, module: bool = False) -> None:
    """Run a script on every process of this node and wait for them; raises `LaunchError` if one fails.

    If a process dies, all of them are stopped and, up to `max_restarts` times, started again; the script should resume
    from its last checkpoint.
    """
    if not module and not os.path.isfile(script):
        raise MissingFileError(f"script {script}", fix="give its path from the current folder")
    hardware = find_hardware()
    count, _ = processes_per_node(wanted, hardware)
    worker = [sys.executable, "-u", "-m", "piledriver.runtime.launch.worker"]
    worker += ["--alias-accelerate"] if wanted.alias_accelerate else []
    worker += ["--bind-numa"] if wanted.bind_numa else []
    worker += ["-m"] if module else []
    with environment.patched(**worker_environment(wanted, count, hardware.cores)):
        run_agent(wanted, count, worker[0], [*worker[1:], script, *arguments])


def worker_environment(wanted: LaunchConfig, count: int, cores: int) -> dict[str, str]:
    """Return the environment variables of the processes, besides their rank."""
    variables: dict[str, str] = {}
    if wanted.cpu:
        variables[environment.DEVICE] = "cpu"
    if wanted.mixed_precision is not None:
        variables[environment.MIXED_PRECISION] = wanted.mixed_precision
    if wanted.gradient_accumulation_steps is not None:
        variables[environment.ACCUMULATION_STEPS] = str(wanted.gradient_accumulation_steps)
    if wanted.debug_collectives:
        variables[environment.DEBUG] = "1"
    if "OMP_NUM_THREADS" not in environment.snapshot():
        # Otherwise every process starts as many threads as there are cores.
        variables["OMP_NUM_THREADS"] = str(max(1, cores // count))
    return variables | wanted.env


def run_agent(wanted: LaunchConfig, count: int, entry: str | Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """Run torch's elastic agent on a command or a function."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig as ElasticConfig
    from torch.distributed.launcher.api import elastic_launch

    from piledriver.runtime.connection import resolve_host

    if wanted.rdzv_endpoint is not None:
        resolve_host(wanted.rdzv_endpoint.rpartition(":")[0], wanted.rdzv_timeout_seconds)
    low, high = wanted.node_range()
    fixed_ranks = wanted.node_rank is not None and low == high and high > 1
    rendezvous: dict[str, Any] = {"timeout": int(wanted.rdzv_timeout_seconds)}
    if fixed_ranks:
        rendezvous["rank"] = wanted.node_rank
    elif wanted.node_rank is not None:
        rendezvous["is_host"] = wanted.node_rank == 0
    options = ElasticConfig(
        min_nodes=low,
        max_nodes=high,
        nproc_per_node=count,
        run_id=wanted.rdzv_id,
        # Nodes with a given rank keep it; others are numbered in the order of arrival.
        rdzv_backend="static" if fixed_ranks else "c10d",
        rdzv_endpoint=wanted.rdzv_endpoint or "localhost:0",
        rdzv_configs=rendezvous,
        max_restarts=wanted.max_restarts,
        monitor_interval=0.1,
        start_method="fork" if callable(entry) else "spawn",
        logs_specs=DefaultLogsSpecs(log_dir=wanted.log_dir, tee=Std.ALL if wanted.log_dir else Std.NONE),
    )
    try:
        with _quiet_agent():
            return elastic_launch(options, entry)(*arguments)
    except ChildFailedError as error:
        raise _failure(error, wanted) from None
    except SignalException as stop:
        if stop.sigval == signal.SIGINT:
            raise KeyboardInterrupt from stop
        raise StoppedError(
            f"stopped by {stop.sigval.name}, which was forwarded to all processes", fix="run the same command to resume"
        ) from None
    except (TimeoutError, RuntimeError) as error:
        raise _rendezvous_failure(error, wanted) from error


def _failure(error: Any, wanted: LaunchConfig) -> LaunchError:
    rank, first = error.get_first_failure()
    # Only a Python exception is recorded; a process that exits or is killed leaves no message and no traceback.
    raised = isinstance(first.message, dict)
    said = str(first.message["message"]).strip().splitlines() if raised else []
    what, _, own_fix = "".join(said[:1]).partition(". Fix: ")
    ended = f"killed by {first.signal_name()}" if first.exitcode < 0 else f"exit code {first.exitcode}"
    tried = f" after {wanted.max_restarts} restart(s)" if wanted.max_restarts else ""
    if wanted.log_dir:
        fix = f"read {wanted.log_dir}"
    elif raised:
        fix = "its traceback is above"
    elif first.exitcode == -signal.SIGKILL:
        fix = "check the memory of the machine: the system kills processes when it runs out"
    else:
        fix = "check its output: it ended without a Python exception"
    fix = f"{own_fix}; {fix}" if own_fix else fix
    return LaunchError(f"rank {rank} failed{tried} ({ended}){': ' if said else ''}{what}", fix=fix)


def _rendezvous_failure(error: Exception, wanted: LaunchConfig) -> Exception:
    text = str(error)
    if "EADDRINUSE" in text or "address already in use" in text.lower():
        return PortTakenError(
            f"the port of {wanted.rdzv_endpoint} is in use by another program", fix="choose another --rdzv-endpoint"
        )
    why = text.splitlines()[0] if text else repr(error)
    return RendezvousError(
        f"the nodes could not connect at {wanted.rdzv_endpoint or 'localhost'}: {why}",
        fix="start the same command on every node, with an endpoint that all of them can reach",
    )


@contextmanager
def _quiet_agent() -> Iterator[None]:
    """Silence the agent's log: its failures become our errors."""
    loggers = [logging.getLogger(name) for name in ("torch.distributed.elastic", "torch.distributed.launcher")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
