"""`deepspeed.comm.log_summary` and the `comms_logger` section: collectives by kind and size, without synchronising."""

from __future__ import annotations

import logging
from typing import Any

import torch.distributed as dist

from piledriver.observe.communication.bandwidth import Traffic
from piledriver.observe.communication.recorder import CommunicationRecorder
from piledriver.observe.memory.use import readable

_log = logging.getLogger("piledriver.compat.deepspeed")
_ACTIVE: list[CommunicationRecorder] = []


def configure_comms_logger(
    deepspeed_config: Any = None,
    enabled: bool | None = None,
    prof_all: bool | None = None,
    prof_ops: list[str] | None = None,
    verbose: bool | None = None,
    debug: bool | None = None,
) -> None:
    """Switch the recording of collectives on or off (`deepspeed.comm.configure`).

    Every collective is recorded; `prof_all`, `prof_ops`, `verbose` and `debug` have no effect.
    """
    section = deepspeed_config.get("comms_logger", {}) if isinstance(deepspeed_config, dict) else {}
    wanted = enabled if enabled is not None else bool(section.get("enabled", False))
    if wanted and not _ACTIVE:
        _ACTIVE.append(CommunicationRecorder().__enter__())
    elif not wanted and _ACTIVE:
        _ACTIVE.pop().__exit__()


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Log count, size, latency, algorithmic and bus bandwidth of each collective; all ranks call it together.

    With `return_dict` return `{"summary": {collective: {bytes: {...}}}}`, without stragglers if they are not asked for.
    """
    if not _ACTIVE:
        _log.warning("log_summary: the comms logger is off; call configure(enabled=True) before training")
        return {"summary": {}} if return_dict else None
    rows = _ACTIVE[0].summary(across_ranks=show_straggler)
    if not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0:
        for row in rows:
            _log.info(_line(row, show_straggler))
    if not return_dict:
        return None
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row.name, {})[row.size] = {
            "count": row.count,
            "total_latency_ms": None if row.seconds is None else row.seconds * row.count * 1e3,
            "avg_latency_ms": None if row.seconds is None else row.seconds * 1e3,
            "tput_avg_gbps": None if row.algorithm_bandwidth is None else row.algorithm_bandwidth * 8 / 1e9,
            "busbw_avg_gbps": None if row.bus_bandwidth is None else row.bus_bandwidth * 8 / 1e9,
            **(
                {"straggler_ms": None if row.skew_seconds is None else row.skew_seconds * 1e3} if show_straggler else {}
            ),
        }
    return {"summary": found}


def _line(row: Traffic, show_straggler: bool) -> str:
    known = row.seconds is not None
    times = f", {(row.seconds or 0.0) * 1e3:.3f} ms each" if known else ""
    rates = f", {readable(row.algorithm_bandwidth or 0)}/s, bus {readable(row.bus_bandwidth or 0)}/s" if known else ""
    late = f", skew {(row.skew_seconds or 0.0) * 1e3:.3f} ms" if show_straggler and row.skew_seconds is not None else ""
    return f"{row.name} ({row.group}, {row.ranks} ranks): {row.count} x {readable(row.size)}{times}{rates}{late}"
