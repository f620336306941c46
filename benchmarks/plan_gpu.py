"""Prediction against measurement on one GPU: calibrate, then measure a grid of layouts x shape x batch x optimizer.

`python benchmarks/plan_gpu.py --grid fresh --out FILE.jsonl` first writes the predictions of all rows, then one JSON
line per row as soon as it is measured: peak allocated and reserved, allocated bytes after each phase, the median step.
Then come the choice (the planner's first layouts for one model and batch, all measured) and the census (layouts that
are predicted to fit just so, or just not). `--compare FILE.jsonl` predicts the rows of a file again, offline and on any
machine, and prints the errors. `--tiny` shrinks every shape, to try the script on a CPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from plan_grid import CENSUS, CHOICE, COMPILED, GRIDS, as_row, config_of_row
from plan_measure import GIB, Worker

# Seconds for a row that compiles, and for one that does not.
_LIMITS = (60.0, 40.0)
_CHOICES = 7
# Seconds at the end for the census, and GiB of the device that rows may take together, each with its context.
_CENSUS_SECONDS, _ROOM, _CONTEXT = 32.0, 132.0, 1.5


def predicted(row: dict[str, Any], rates: dict[str, Any] | None = None) -> Any:
    from dataclasses import replace

    from piledriver.core.config import from_mapping
    from piledriver.engine.layout import Layout
    from piledriver.plan import Workload, parse_hardware, predict
    from piledriver.plan.blocks.setting import Traits
    from piledriver.plan.memory.timeline import step_timelines

    config, length = config_of_row(row["shape"], tiny=row.get("tiny", False))
    cluster = parse_hardware("1xh200")
    if rates is not None:
        cluster = replace(cluster, device=replace(cluster.device, measured=rates))
    batch = row["sequences"] * row["accumulation"]
    workload = Workload(config=config, length=length, batch=batch, optimizer=row["optimizer"])
    made = predict(workload, from_mapping(Layout, row["layout"], "row"), cluster, sequences=row["sequences"])
    chunk = row.get("loss_chunk")
    if "allocated" in row and chunk is None:
        # Measured when a chunk of the loss had at least 4,096 tokens.
        chunk = 1 << max((1 << 28) // config.vocab_size, 4096).bit_length() - 1
    if chunk is None:
        return made
    # Of old rows the loss also had two buffers for its logits, or copied the gradient of its weight.
    timelines = step_timelines(
        config,
        made.layout,
        length=length,
        sequences=row["sequences"],
        accumulation=made.accumulation,
        optimizer=row["optimizer"],
        compiled=made.compiled,
        traits=Traits(loss_buffers=row.get("loss_buffers", 1), loss_chunk=chunk, copying_loss="copying_loss" in row),
    )
    return replace(made, timelines=tuple(timelines))


def kendall(left: list[float], right: list[float]) -> float:
    """Return Kendall's tau of two lists."""
    signs = [1 if (left[i] - left[j]) * (right[i] - right[j]) > 0 else -1 for i in range(len(left)) for j in range(i)]
    return sum(signs) / max(len(signs), 1)


def choices(rows: list[dict[str, Any]], predictions: list[float]) -> list[float]:
    """Return, for each shape, batch and optimizer with several layouts, how fast the chosen one is beside the best.

    The chosen one is that whose predicted step is shortest; 1.0 means that it is the best of those measured.
    """
    groups: dict[tuple[Any, ...], list[tuple[float, float]]] = {}
    for row, predicted_seconds in zip(rows, predictions, strict=True):
        key = (row["shape"], row["sequences"] * row["accumulation"], row["optimizer"], "offload" in row["layout"])
        groups.setdefault(key, []).append((predicted_seconds, row["seconds"]))
    return [min(took for _, took in many) / min(many)[1] for many in groups.values() if len(many) > 1]


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the measured rows of a file, each with the rates that were measured before it."""
    found: list[dict[str, Any]] = []
    rates = None
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line) if line.startswith("{") else {}
        rates = row.get("rates", rates)
        if "allocated" in row:
            # Others compiled meanwhile, which slows rows that wait for the host: the fastest step is undisturbed.
            found.append({**row, "rates": rates, "seconds": row.get("fastest", row["seconds"])})
    return found


def is_disturbed(row: dict[str, Any]) -> bool:
    """Return whether the seconds of a row say little: its optimizer stepped on cores that compiled other rows."""
    return "beside_compilers" in row


def compare(path: Path) -> None:
    """Predict the rows of a file again and print the errors."""
    memory, reserved, plain, tuned = [], [], [], []
    tuned_seconds: list[float] = []
    seconds: list[float] = []
    rows = read_rows(path)
    for row in rows:
        made, by_rates = predicted(row), predicted(row, row["rates"])
        memory.append(made.worst.allocated / GIB / row["allocated"] - 1)
        reserved.append(made.worst.reserved / GIB / row["reserved"] - 1)
        misses = [one.time.total / row["seconds"] - 1 for one in (made, by_rates)]
        print(
            f"{row['shape']:>7} x{row['sequences']:<3} {row['optimizer']:<16} {json.dumps(row['layout'])[:70]:<70} "
            f"memory {row['allocated']:6.2f} {100 * memory[-1]:+6.1f}% reserved {100 * reserved[-1]:+6.1f}% "
            f"step {1e3 * row['seconds']:7.1f} ms {100 * misses[0]:+6.1f}% calibrated {100 * misses[1]:+6.1f}%"
            f"{' (beside compilers)' if is_disturbed(row) else ''}"
        )
        if is_disturbed(row):
            continue
        plain.append(misses[0])
        tuned.append(misses[1])
        tuned_seconds.append(by_rates.time.total)
        seconds.append(row["seconds"])
    named = {"allocated": memory, "reserved": reserved, "step, datasheet": plain, "step, calibrated": tuned}
    for name, errors in named.items():
        sizes = [abs(error) for error in errors]
        print(
            f"{name}: {len(errors)} rows, median {100 * statistics.median(sizes):.1f}%, worst {100 * max(sizes):.1f}%, "
            f"lowest {100 * min(errors):+.1f}%"
        )
    shares = choices([row for row in rows if not is_disturbed(row)], tuned_seconds)
    print(f"chosen layouts: {len(shares)} groups, slowest {100 * min(shares, default=1.0):.1f}% of the best measured")
    print(f"Kendall tau of the calibrated steps: {kendall(tuned_seconds, seconds):.3f}")


def said(row: dict[str, Any], rates: dict[str, Any] | None = None) -> dict[str, float]:
    """Return the predicted figures of a row."""
    made = predicted(row, rates)
    return {
        "allocated": round(made.worst.allocated / GIB, 4),
        "reserved": round(made.worst.reserved / GIB, 4),
        "seconds": round(made.time.total, 6),
        "fits": made.fits,
    }


def first_choices(rates: dict[str, Any] | None, *, tiny: bool = False) -> list[dict[str, Any]]:
    """Return the rows of the planner's first layouts for `CHOICE`, the chosen one first."""
    from dataclasses import replace

    from piledriver.plan import Workload, parse_hardware
    from piledriver.plan.search.candidates import Wishes
    from piledriver.plan.search.choose import search_layouts

    config, length = config_of_row(CHOICE[0], tiny=tiny)
    cluster = parse_hardware("1xh200")
    if rates is not None:
        cluster = replace(cluster, device=replace(cluster.device, measured=rates))
    workload = Workload(config=config, length=length, batch=CHOICE[1])
    found = search_layouts(workload, cluster, Wishes(offloads=("none",)))
    rows = []
    for one in found.fitting[:_CHOICES]:
        layout: dict[str, Any] = {**COMPILED, "activations": one.layout.activations}
        if one.layout.recompute_norms:
            layout["recompute_norms"] = True
        rows.append(as_row(CHOICE[0], one.sequences, layout, "adamw", one.accumulation))
    return rows


def edges(rates: dict[str, Any] | None, *, tiny: bool = False) -> list[dict[str, Any]]:
    """Return for each entry of `CENSUS` the largest micro-batch that is predicted to fit, and the next, which is not.

    The next is that which lacks at least 3% of the memory.
    """
    rows = []
    for shape, layout, optimizer in CENSUS:

        def at(sequences: int, shape: str = shape, layout: Any = layout, optimizer: str = optimizer) -> Any:
            return predicted(as_row(shape, sequences, layout, optimizer, 1) | {"tiny": tiny}, rates)

        fitting = _last(lambda count, at=at: at(count).fits)  # type: ignore[misc]
        beyond = _last(lambda count, at=at: at(count).missing < 0.03 * 140 * GIB) + 1  # type: ignore[misc]
        rows += [as_row(shape, 2 if tiny else count, layout, optimizer, 1) for count in (fitting, beyond)]
    return rows


def _last(holds: Callable[[int], bool]) -> int:
    """Return the largest count for which something holds, which holds for all smaller ones; at most 4,096."""
    low, high = 1, 4097
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def starts_slowly(row: dict[str, Any]) -> bool:
    """Return whether the first step of a row takes seconds: pinned memory is made, or an update is compiled."""
    return "offload" in row["layout"] or row["optimizer"] in ("adamw8bit", "adamw_bf16")


class Room:
    """Memory of the device that rows in several processes share."""

    def __init__(self) -> None:
        self.free, self.changed = _ROOM, threading.Condition()

    def take(self, size: float) -> None:
        """Wait until this many GiB are free."""
        with self.changed:
            self.changed.wait_for(lambda: self.free >= size or self.free == _ROOM)
            self.free -= size

    def give(self, size: float) -> None:
        """Return them."""
        with self.changed:
            self.free += size
            self.changed.notify_all()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=165.0)
    parser.add_argument("--calibrate-seconds", type=float, default=8.0)
    parser.add_argument("--grid", choices=tuple(GRIDS), default="known")
    parser.add_argument("--from", dest="first", type=int, default=0, help="leave out this many rows of the grid")
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--host-seconds", type=float, default=0.0, help="also measure the host's time of eager blocks")
    parser.add_argument("--profiles", type=int, default=0, help="also profile so many of the rows that do not compile")
    parser.add_argument("--compare", type=Path)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    if args.compare:
        compare(args.compare)
        return
    Session(args).run()


class Session:
    """One call of the script: its clock, its file and its processes."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.begun = args, time.monotonic()
        self.file = args.out.open("a", encoding="utf-8") if args.out else None
        self.writing, turn = threading.Lock(), threading.Lock()
        self.team: list[Worker] = []
        for _ in range(args.workers):
            Worker(self.team, turn)
        self.room = Room()

    def left(self) -> float:
        """Return the seconds that are left."""
        return float(self.args.seconds) - (time.monotonic() - self.begun)

    def say(self, row: dict[str, Any]) -> None:
        """Write a line."""
        text = json.dumps({**row, "at": round(time.monotonic() - self.begun, 1)})
        with self.writing:
            print(text, flush=True)
            if self.file is not None:
                self.file.write(text + "\n")
                self.file.flush()

    def measure(self, worker: Worker, row: dict[str, Any], label: str, until: float, **options: Any) -> None:
        """Measure one row, if there is time."""
        left = self.left() - until
        if left < 4:
            return
        limit = _LIMITS[0] if row["layout"].get("compile") else _LIMITS[1]
        self.say({**row, "part": label, **worker.ask({**row, **options}, min(limit, left))})

    def run(self) -> None:
        """Predict, calibrate, measure."""
        args = self.args
        more = {"tiny": True} if args.tiny else {}
        rows = [as_row(*one) | more for one in GRIDS[args.grid][args.first :]]
        for row in rows:
            self.say({**row, "said": said(row)})
        rates = self.team[0].ask({"calibrate": args.calibrate_seconds}, 45.0)
        self.say({"rates": rates})
        known = rates if "matmul" in rates and not args.tiny else None
        jobs = [(row, "blind", {"steps": 2 if "offload" in row["layout"] else 12}) for row in rows]
        census: list[dict[str, Any]] = []
        if args.grid == "fresh":
            jobs += [(row | more, "choice", {"steps": 8}) for row in first_choices(known, tiny=args.tiny)]
            census = [row | more for row in edges(known, tiny=args.tiny)]
        for row, _, _ in jobs:
            self.say({**row, "said, calibrated": said(row, known)})
        until = _CENSUS_SECONDS if census else args.host_seconds
        eager = [job for job in jobs if not job[0]["layout"].get("compile")]
        compiled = iter([job for job in jobs if job[0]["layout"].get("compile")])
        taking = threading.Lock()

        def measure_one(worker: Worker, row: dict[str, Any], label: str, options: dict[str, Any]) -> None:
            size = said(row, known)["reserved"] + _CONTEXT
            self.room.take(size)
            self.measure(worker, row, label, until, **options)
            self.room.give(size)

        def take_jobs(worker: Worker) -> None:
            while True:
                with taking:
                    job = next(compiled, None)
                if job is None:
                    return
                measure_one(worker, *job)

        def take_eager(worker: Worker) -> None:
            nonlocal until
            # One after the other: they wait for the host, and what compiles is stopped meanwhile.
            for job in eager:
                if not starts_slowly(job[0]):
                    measure_one(worker, *job)
            if args.host_seconds:
                self.say({"host": worker.ask({"host": args.host_seconds}, args.host_seconds + 8.0)})
                until = _CENSUS_SECONDS if census else 0.0
            for job in eager:
                if starts_slowly(job[0]):
                    measure_one(worker, *job)
            for number, job in enumerate(eager[: args.profiles] if args.out else []):
                path = str(args.out.with_suffix(f".{number}.txt"))
                measure_one(worker, job[0], "profile", {"steps": 1, "profile": path})
            take_jobs(worker)

        first = threading.Thread(target=take_eager, args=(self.team[0],))
        threads = [first, *(threading.Thread(target=take_jobs, args=(worker,)) for worker in self.team[1:])]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        # At the edge of memory every other context counts.
        for worker in self.team[1:]:
            worker.close()
        for row in census:
            self.say({**row, "said, calibrated": said(row, known)})
            self.measure(self.team[0], row, "census", 0.0, steps=1)
        self.team[0].close()


if __name__ == "__main__":
    main()
