"""Read torch's Flight Recorder: every collective of this process, whichever code started it, at no cost to the step."""

from __future__ import annotations

import json
from typing import Any

from piledriver.observe.communication.bandwidth import TimedCall, collective_name, dtype_size
from piledriver.observe.torch_private import dump_flight_recorder, group_size


def flight_recorder_calls(since_ns: int = 0) -> list[TimedCall]:
    """Return the collectives in the recorder that were created after a time of the Unix clock, oldest first.

    NCCL fills in durations if collectives are timed (`CommunicationRecorder` switches that on); gloo does not. The
    recorder keeps the latest 2,000; `TORCH_FR_BUFFER_SIZE` changes that before the process group is made.
    """
    text = dump_flight_recorder()
    raw = json.loads(text) if text else {}
    groups = {str(name): one for name, one in raw.get("pg_config", {}).items()}
    entries = [one for one in raw.get("entries", ()) if int(one.get("time_created_ns", 0)) >= since_ns]
    return sorted((_call(one, groups) for one in entries), key=lambda call: call.arrived_ns)


def enqueued_collectives() -> dict[str, int]:
    """Return how many collectives each group of this process has started, by the recorder's number of the group."""
    text = dump_flight_recorder(entries=False)
    status = json.loads(text).get("pg_status", {}) if text else {}
    return {str(group): int(one.get("last_enqueued_collective", 0)) for group, one in status.items()}


def _call(entry: dict[str, Any], groups: dict[str, Any]) -> TimedCall:
    name, description = (entry.get("process_group") or ["", ""])[:2]
    size = max(_bytes(entry, "input"), _bytes(entry, "output"))
    duration = entry.get("duration_ms")
    number = entry.get("p2p_seq_id") if entry.get("is_p2p") else entry.get("collective_seq_id")
    return TimedCall(
        collective_name(str(entry.get("profiling_name", ""))),
        str(description or name),
        group_size(str(name)) or _ranks(groups.get(str(name))),
        size,
        None if duration is None else float(duration) / 1000,
        (str(name), int(number or 0)),
        str(entry.get("pg_id", name)),
        int(entry.get("time_created_ns", 0)),
    )


def _ranks(config: dict[str, Any] | None) -> int:
    """Return the size of a group that is gone, which the recorder may still know; 0 if it does not."""
    listed = str((config or {}).get("ranks", ""))
    return len(json.loads(listed)) if listed.startswith("[") else 0


def _bytes(entry: dict[str, Any], side: str) -> int:
    total = 0
    kinds = entry.get(f"{side}_dtypes", [])
    for index, dims in enumerate(entry.get(f"{side}_sizes", [])):
        count = 1
        for one in dims:
            count *= int(one)
        total += count * dtype_size(str(kinds[index] if index < len(kinds) else ""))
    return total
