"""The report of a profile for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from piledriver.observe.memory.use import readable
from piledriver.observe.profile.module_tree import ModuleRow
from piledriver.observe.profile.rank import RankProfile
from piledriver.observe.profile.wall import CAUSES
from piledriver.observe.report.values import ReportValues

_NAMES = {"exposed_communication": "exposed communication", "host_wait": "host wait"}


def report_text(report: ReportValues, *, depth: int = 3, operators: int = 12, owners: int = 12) -> str:
    """Return the report; the tree of modules down to a depth, and the first few operators and owners of memory."""
    lines = [*_head(report)]
    first = report.ranks[0]
    lines += ["", "Wall time of a step", *_wall(report)]
    lines += ["", "Modules (rank 0, per step)", *_modules(first, depth)]
    lines += ["", "Operators (rank 0, per step)", *_operators(first, operators)]
    lines += ["", "Memory at the peak (rank 0)", *_memory(first, owners)]
    if report.traffic:
        lines += ["", "Communication (per step)", *_traffic(report)]
    if any(one.input_output for one in report.ranks):
        lines += ["", "Loader, tokeniser, checkpoint, tracker (per step)", *_input_output(report)]
    if len(report.ranks) > 1:
        lines += ["", "Ranks", *_ranks(report)]
    lines += ["", "Critical path", *_path(report)]
    if report.advice:
        lines += ["", "Advice", *_advice(report)]
    return "\n".join(lines)


def seconds_text(seconds: float) -> str:
    """Return a duration with a unit that fits.

    >>> seconds_text(0.0123), seconds_text(2e-5), seconds_text(3)
    ('12.30 ms', '20.0 us', '3.000 s')
    """
    if seconds >= 1:
        return f"{seconds:.3f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"


def count_text(value: float) -> str:
    """Return a large number with a prefix.

    >>> count_text(1234567), count_text(12)
    ('1.23 M', '12')
    """
    for size, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K")):
        if abs(value) >= size:
            return f"{value / size:.2f} {prefix}"
    return f"{value:.0f}"


def _head(report: ReportValues) -> Iterator[str]:
    first = report.ranks[0]
    yield f"{report.title}: {len(report.ranks)} rank(s), {first.steps} step(s), {first.device}"
    if report.error:
        yield f"ended by {report.error}"
    rate = f", {count_text(first.flops / first.wall_seconds)}FLOP/s" if first.flops else ""
    yield f"{seconds_text(report.step_seconds)} a step{rate}" + (
        f"; {seconds_text(report.plain_step_seconds)} without the profiler" if report.plain_step_seconds else ""
    )
    if first.uncounted:
        yield f"FLOPs not counted, shapes were not enough: {', '.join(first.uncounted)}"


def _wall(report: ReportValues) -> list[str]:
    rows = [["", *(f"rank {one.rank}" for one in report.ranks[:8])]]
    for cause in CAUSES:
        row = [_NAMES.get(cause, cause)]
        for one in report.ranks[:8]:
            seconds = one.seconds[cause] / one.steps
            row.append(f"{seconds_text(seconds)} {seconds * one.steps / one.wall_seconds:6.1%}")
        rows.append(row)
    rows.append(["sum", *(seconds_text(sum(one.seconds.values()) / one.steps) for one in report.ranks[:8])])
    rows.append(["wall", *(seconds_text(one.wall_seconds / one.steps) for one in report.ranks[:8])])
    return aligned_rows(rows)


def _modules(rank: RankProfile, depth: int) -> list[str]:
    rows = [["module", "class", "parameters", "FLOPs fwd", "bwd", "recomputed", "bytes", "time", "share", "roofline"]]
    total = sum(sum(row.seconds.values()) for row in rank.modules if "." not in row.path) or 1.0
    for row in rank.modules:
        level = row.path.count(".")
        seconds = sum(row.seconds.values())
        if level > depth or (not seconds and not row.parameters):
            continue
        rows.append(_module(row, level, rank.steps, seconds / total))
    return aligned_rows(rows)


def _module(row: ModuleRow, level: int, steps: int, share: float) -> list[str]:
    name = row.path.rsplit(".", 1)[-1] if not row.path.startswith("(") else row.path
    return [
        "  " * (level if not row.path.startswith("(") else 0) + name,
        row.kind,
        count_text(row.parameters) if row.parameters else "",
        *(count_text(row.flops[phase] / steps) if row.flops[phase] else "" for phase in row.flops),
        readable(row.bytes / steps) if row.bytes else "",
        seconds_text(sum(row.seconds.values()) / steps),
        f"{share:.1%}",
        f"{row.roofline_share:.0%}" if row.roofline_seconds else "",
    ]


def _operators(rank: RankProfile, most: int) -> list[str]:
    total = sum(row.seconds for row in rank.operators) or 1.0
    rows = [["operator", "share", "time", "calls", "FLOPs", "bytes"]]
    for row in rank.operators[:most]:
        rows.append(
            [
                row.name[:60],
                f"{row.seconds / total:.1%}",
                seconds_text(row.seconds / rank.steps),
                f"{row.calls / rank.steps:.0f}",
                count_text(row.flops / rank.steps) if row.flops else "",
                readable(row.bytes / rank.steps) if row.bytes else "",
            ]
        )
    return aligned_rows(rows)


def _memory(rank: RankProfile, most: int) -> list[str]:
    lines = []
    for peak in rank.memory:
        reserved = (
            f", {readable(peak.reserved)} reserved ({readable(peak.fragmentation)} unused)" if peak.reserved else ""
        )
        lines.append(f"{peak.device}: {readable(peak.bytes)}{reserved}, in {peak.where}; {peak.named_share:.1%} named")
        lines.append("  " + ", ".join(f"{name} {readable(size)}" for name, size in peak.by_category().items()))
        rows = [["  bytes", "owner", "name", "tensors"]]
        rows += [
            [f"  {readable(one.bytes)}", one.category, one.name[:70], str(one.count)] for one in peak.owners[:most]
        ]
        lines += aligned_rows(rows)
    return lines or ["not recorded"]


def _traffic(report: ReportValues) -> list[str]:
    steps = report.ranks[0].steps
    rows = [["collective", "group", "ranks", "size", "calls", "bytes", "time", "algorithm", "bus", "skew"]]
    for row in report.traffic[:20]:
        rows.append(
            [
                row.name,
                row.group[:24] or "unnamed",
                str(row.ranks),
                readable(row.size),
                f"{row.count / steps:g}",
                readable(row.bytes / steps),
                seconds_text(row.seconds) if row.seconds is not None else "",
                f"{readable(row.algorithm_bandwidth)}/s" if row.algorithm_bandwidth else "",
                f"{readable(row.bus_bandwidth)}/s" if row.bus_bandwidth else "",
                seconds_text(row.skew_seconds) if row.skew_seconds is not None else "",
            ]
        )
    return aligned_rows(rows)


def _input_output(report: ReportValues) -> list[str]:
    rows = [["part", "rank", "calls", "time", "in other threads", "a step waited"]]
    for rank in report.ranks[:8]:
        for row in rank.input_output:
            rows.append(
                [
                    row.name,
                    str(rank.rank),
                    str(row.calls),
                    seconds_text(row.seconds / rank.steps),
                    seconds_text(row.background_seconds / rank.steps),
                    seconds_text(row.waited_seconds / rank.steps),
                ]
            )
    return aligned_rows(rows)


def _ranks(report: ReportValues) -> list[str]:
    if not report.stragglers:
        return ["no stragglers"]
    return [
        f"rank {one.rank} is late: {seconds_text(one.late_seconds)} in the window, last at {one.last_share:.0%} of the "
        f"collectives; it spends more in {_NAMES.get(one.cause, one.cause)}"
        for one in report.stragglers
    ]


def _path(report: ReportValues) -> list[str]:
    total = sum(part.seconds for part in report.critical_path) or 1.0
    rows = [["rank", "cause", "time", "share"]]
    for part in report.critical_path[:10]:
        cause = _NAMES.get(part.cause, part.cause)
        rows.append([str(part.rank), cause, seconds_text(part.seconds), f"{part.seconds / total:.1%}"])
    return aligned_rows(rows)


def _advice(report: ReportValues) -> Iterable[str]:
    for number, one in enumerate(report.advice, 1):
        yield f"{number}. {one.title} (predicted: {one.gain:.2f} times as fast)"
        yield f"   measured: {one.evidence}"
        yield f"   change: {one.change}"


def aligned_rows(rows: list[list[str]]) -> list[str]:
    """Return rows as aligned lines, the first column to the left and numbers to the right.

    >>> aligned_rows([["a", "b"], ["long", "1"]])
    ['a     b', 'long  1']
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = []
        for column, cell in enumerate(row):
            right = column > 0 and all(one[column][:1].isdigit() or not one[column] for one in rows[1:])
            cells.append(cell.rjust(widths[column]) if right else cell.ljust(widths[column]))
        lines.append("  ".join(cells).rstrip())
    return lines
