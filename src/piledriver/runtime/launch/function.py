"""Run a function on several processes from a program: a notebook's cell, a test.

Processes are forked, so that a function defined in a cell needs no file. If this process already uses CUDA they are
spawned, and the function is pickled by value (cloudpickle). An exception on any rank is raised here.
"""

from __future__ import annotations

import importlib
import pickle
import tempfile
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from piledriver.core.errors import MissingDependencyError
from piledriver.runtime import environment
from piledriver.runtime.errors import LaunchError, WorldError
from piledriver.runtime.hardware import find_hardware
from piledriver.runtime.launch.agent import run_agent
from piledriver.runtime.launch.config import LaunchConfig


def notebook_launcher(
    function: Callable[..., Any],
    args: tuple[Any, ...] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: str | int | None = None,
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: Mapping[str, Any] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
) -> None:
    """Run `function(*args)` on several processes from a notebook. The arguments are those of Accelerate.

    `num_processes` counts those of all nodes (default: one per accelerator). A single process runs in the notebook
    itself. With several nodes or restarts torch's elastic agent is used.
    """
    hardware = find_hardware()
    best = hardware.best()
    count = num_processes or (1 if best in ("cpu", "mps") else hardware.count(best))
    if mixed_precision.lower() not in ("no", "fp16", "bf16", "fp8"):
        raise ValueError(f"mixed_precision is {mixed_precision!r}: choose no, fp16, bf16 or fp8")
    variables = {environment.MIXED_PRECISION: mixed_precision.lower()}
    if num_nodes > 1 or max_restarts > 0:
        endpoint = rdzv_endpoint or f"{master_addr}:{use_port or 29500}"
        wanted = LaunchConfig(
            nproc=max(1, count // num_nodes),
            nnodes=str(num_nodes),
            node_rank=node_rank if rdzv_backend == "static" and num_nodes > 1 else None,
            rdzv_endpoint=endpoint if num_nodes > 1 else None,
            rdzv_id=rdzv_id,
            max_restarts=max_restarts,
        )
        with environment.patched(**variables):
            run_agent(wanted, max(1, count // num_nodes), function, args)
        return
    if count == 1:
        with environment.patched(**variables):
            function(*args)
        return
    run_on_processes(function, args, count, variables=variables)


def debug_launcher(function: Callable[..., Any], args: tuple[Any, ...] = (), num_processes: int = 2) -> None:
    """Run `function(*args)` on CPU processes of this machine, for tests."""
    run_on_processes(
        function, args, num_processes, variables={environment.DEVICE: "cpu", "ACCELERATE_USE_CPU": "true"}, fork=True
    )


def run_on_processes(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    count: int,
    *,
    variables: Mapping[str, str] | None = None,
    fork: bool | None = None,
) -> None:
    """Run a function on `count` new processes that connect through a file; raise what any of them raises.

    By default processes are forked, unless this process uses CUDA.
    """
    from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

    if _inside_a_launch():
        raise WorldError(
            "this process was itself started by a launcher",
            fix="start the program with plain python, or call the function directly",
        )
    fork = not _device_in_use() if fork is None else fork
    payload: Any = (function, args) if fork else _by_value(function, args)
    with tempfile.TemporaryDirectory(prefix="piledriver-") as folder:
        settings = {**(variables or {}), environment.RENDEZVOUS_FILE: str(Path(folder) / "rendezvous")}
        try:
            start_processes(  # type: ignore[no-untyped-call]
                _process_main,
                args=(payload, count, settings, folder),
                nprocs=count,
                start_method="fork" if fork else "spawn",
            )
        except (ProcessRaisedException, ProcessExitedException) as failure:
            raise _first_error(failure, Path(folder)) from None


def _process_main(rank: int, payload: Any, count: int, variables: Mapping[str, str], folder: str) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    environment.update({**variables, **{name: str(value) for name, value in place.items()}})
    try:
        function, args = pickle.loads(payload) if isinstance(payload, bytes) else payload
        function(*args)
    except BaseException as error:
        _record_error(rank, error, Path(folder))
        raise
    finally:
        from piledriver.runtime.connection import disconnect

        disconnect()


def _record_error(rank: int, error: BaseException, folder: Path) -> None:
    text = traceback.format_exc()
    try:
        content = pickle.dumps((rank, error, text))
        pickle.loads(content)
    except Exception:
        # An error that cannot be pickled keeps its text.
        content = pickle.dumps((rank, None, text))
    (folder / f"error-{rank}").write_bytes(content)


def _first_error(failure: Any, folder: Path) -> BaseException:
    """Return the error of the rank that failed first."""
    files = sorted(folder.glob("error-*"), key=lambda file: file.stat().st_mtime_ns)
    for file in files:
        # Written by our own child process in a folder that only this user can read.
        rank, error, text = pickle.loads(file.read_bytes())
        if error is None:
            return LaunchError(f"rank {rank} failed: {text.strip().splitlines()[-1]}", fix="see its traceback above")
        error.add_note(f"raised on rank {rank}:\n{text}")
        return error  # type: ignore[no-any-return]
    return LaunchError(
        f"rank {failure.error_index} ended without an exception: {failure}", fix="look for a crash or a kill"
    )


def _by_value(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    try:
        cloudpickle = importlib.import_module("cloudpickle")
    except ImportError:
        if getattr(function, "__module__", None) == "__main__":
            raise MissingDependencyError(
                "cloudpickle", extra="notebook", purpose="launching a cell's function after CUDA was used"
            ) from None
        return pickle.dumps((function, args))
    dumped: bytes = cloudpickle.dumps((function, args))
    return dumped


def _device_in_use() -> bool:
    import torch

    return bool(torch.cuda.is_initialized()) or bool(torch.xpu.is_initialized())  # type: ignore[no-untyped-call]


def _inside_a_launch() -> bool:
    return "TORCHELASTIC_RUN_ID" in environment.snapshot()
