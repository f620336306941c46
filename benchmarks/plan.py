"""Prediction against published runs: fit one efficiency per kernel class and framework from a tenth of the rows.

`python benchmarks/plan.py --rows FOLDER` prints the errors of every table of published runs in FOLDER (CSV files; the
columns are described in docs/plan.md), `--markdown` the table of docs/plan.md, `--worst N` the rows that miss most.
`--seeds N` fits N random tenths and prints the mean error of the other rows with its spread: how much the choice of
the tenth decides; with `--groups` those of model shapes and devices that no fitted row has. Rows that cannot be
expressed as a layout are counted on stderr, by reason.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from plan_rows import GIB, Row, parse_table, read_rows, tables, timelines_of

from piledriver.plan.time.fit import fit_efficiency


@dataclass
class Outcome:
    """The errors of one table."""

    table: str
    rows: int
    fitted: int
    mean: float
    """Mean absolute error of the step time on rows that were not fitted."""
    median: float
    worst: float
    tau: float
    """Kendall's rank correlation of predicted and measured throughput."""
    efficiency: dict[str, float]


def chosen(rows: list[Row]) -> list[Row]:
    """Return a tenth of the rows, spread over the table; of small tables at least three."""
    return rows[:: max(1, min(10, len(rows) // 3))]


def fitted_together(row: Row) -> str:
    """Return the software whose rows share one fit: versions of it on the same devices do."""
    return row.software.split("-2024")[0]


def random_tenth(rows: list[Row], seed: int) -> list[Row]:
    """Return a random tenth of the rows, at least three."""
    return random.Random(seed).sample(rows, max(3, round(len(rows) / 10)))


def of_other_groups(rows: list[Row], seed: int) -> tuple[list[Row], list[Row]]:
    """Return a random tenth from a random half of the groups, and all rows of the other half."""
    groups = sorted({row.group for row in rows})
    half = set(random.Random(seed).sample(groups, max(1, len(groups) // 2)))
    fitted = [row for row in rows if row.group in half]
    tenth = random.Random(seed).sample(fitted, min(len(fitted), max(3, round(len(rows) / 10))))
    return tenth, [row for row in rows if row.group not in half]


def spread(table: str, rows: list[Row], seeds: int, *, groups: bool = False) -> dict[str, object]:
    """Fit on random tenths; return the mean error of the rest, its standard deviation, and the mean of the worst."""
    outcomes = []
    for seed in range(seeds):
        some, rest = of_other_groups(rows, seed) if groups else (random_tenth(rows, seed), None)
        outcomes.append(judge(table, rows, some, rest)[0])
    means = [one.mean for one in outcomes]
    return {
        "table": table,
        "rows": len(rows),
        "fitted": outcomes[0].fitted,
        "seeds": seeds,
        "mean": round(statistics.mean(means), 4),
        "spread": round(statistics.pstdev(means), 4),
        "worst": round(statistics.mean(one.worst for one in outcomes), 4),
    }


def judge(
    table: str, rows: list[Row], some: list[Row] | None = None, rest: list[Row] | None = None
) -> tuple[Outcome, list[tuple[float, Row]]]:
    """Fit on a tenth and return the errors of the rest."""
    some = chosen(rows) if some is None else some
    fitted = fit_efficiency([row.predict for row in some], [row.seconds or 0.0 for row in some])
    rest = rest or [row for row in rows if row not in some] or rows
    misses = [(row.predict(fitted) / (row.seconds or 1.0) - 1, row) for row in rest]
    sizes = [abs(miss) for miss, _ in misses]
    outcome = Outcome(
        table,
        len(rows),
        len(some),
        statistics.mean(sizes),
        statistics.median(sizes),
        max(sizes),
        kendall([row.predict(fitted) for row in rest], [row.seconds or 0.0 for row in rest]),
        {name: round(value, 8) for name, value in asdict(fitted).items()},
    )
    return outcome, sorted(misses, key=lambda pair: -abs(pair[0]))


def kendall(left: list[float], right: list[float]) -> float:
    """Return Kendall's tau of two lists."""
    agree = total = 0
    for i in range(len(left)):
        for j in range(i):
            total += 1
            agree += 1 if (left[i] - left[j]) * (right[i] - right[j]) > 0 else -1
    return agree / max(total, 1)


def memory_rows(folder: Path) -> list[tuple[Row, float, float]]:
    """Return (row, predicted, measured GiB) of rows that state the allocator's peak."""
    found = []
    for row in read_rows(folder, "torchtitan"):
        if row.memory is not None:
            timeline = max(timelines_of(row), key=lambda one: one.allocated)
            found.append((row, timeline.reserved / GIB, row.memory))
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=Path, required=True, help="folder with the CSV files of published runs")
    parser.add_argument("--tables", nargs="*", default=list(tables()))
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--worst", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=0, help="fit this many random tenths instead of the usual one")
    parser.add_argument("--groups", action="store_true", help="with --seeds: judge groups that no fitted row is of")
    args = parser.parse_args()
    if args.markdown:
        print("| runs | rows | fitted | mean error | median | worst | Kendall tau |\n|---|---|---|---|---|---|---|")
    for table in args.tables:
        for reason, count in Counter(reason for _, reason in parse_table(args.rows, table)[1]).items():
            print(f"{table}: {count} rows left out: {reason}", file=sys.stderr)
        rows = [row for row in read_rows(args.rows, table) if row.seconds]
        for software in sorted({fitted_together(row) for row in rows}):
            own = [row for row in rows if fitted_together(row) == software]
            name = table if len({fitted_together(row) for row in rows}) == 1 else f"{table}, {software}"
            if args.seeds:
                print(json.dumps(spread(name, own, args.seeds, groups=args.groups)), flush=True)
                continue
            outcome, misses = judge(name, own)
            if args.markdown:
                print(
                    f"| {name} | {outcome.rows} | {outcome.fitted} | {100 * outcome.mean:.1f}% | "
                    f"{100 * outcome.median:.1f}% | {100 * outcome.worst:.1f}% | {outcome.tau:.2f} |"
                )
            else:
                print(json.dumps(asdict(outcome)))
            for miss, row in misses[: args.worst]:
                print(
                    f"    {100 * miss:+.1f}% {row.id} {row.group} {row.layout!r} x{row.sequences} / {row.accumulation}"
                )
    pairs = [] if args.seeds else memory_rows(args.rows)
    if pairs:
        sizes = [abs(said / was - 1) for _, said, was in pairs]
        text = (len(pairs), 100 * statistics.mean(sizes), 100 * statistics.median(sizes), 100 * max(sizes))
        if args.markdown:
            print("| torchtitan, memory | {} | 0 | {:.1f}% | {:.1f}% | {:.1f}% | |".format(*text))
        else:
            print(json.dumps({"table": "torchtitan memory", "rows": text[0], "mean": text[1], "worst": text[3]}))
        for row, said, was in pairs if args.worst else ():
            print(f"    {said:.1f} predicted, {was:.1f} measured: {row.id} {row.group} {row.layout!r} x{row.sequences}")


if __name__ == "__main__":
    main()
