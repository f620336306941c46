"""Run folders may hold anything: what is read is bounded, exact where it can be, and never outside of the folder."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from piledriver.observe.watch import metrics_file
from piledriver.observe.watch.discover import find_runs
from piledriver.observe.watch.downsample import downsample
from piledriver.observe.watch.metrics_file import MetricsFile
from piledriver.observe.watch.run import Run


def write(path: Path, rows: list[object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))


def test_rows_are_read_as_they_are_appended_and_half_a_line_waits(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, [{"step": 1, "loss": 3.0}])
    file = MetricsFile(str(path))
    file.refresh()
    with open(path, "a") as out:
        out.write('{"step": 2, "lo')
        out.flush()
        file.refresh()
        assert file.series("loss")[0].tolist() == [1]
        out.write('ss": 2.0}\n{"step": 3, "loss": 1.0, "eval": {"bpb": 0.9}}\n')
        out.flush()
        file.refresh()
    x, y = file.series("loss")
    assert (x.tolist(), y.tolist()) == ([1, 2, 3], [3, 2, 1])
    assert file.series("eval/bpb")[1].tolist() == [0.9]
    write(path, [{"step": 1, "loss": 9.0}])  # another run in the same folder
    file.refresh()
    assert file.series("loss")[1].tolist() == [9.0]


def test_a_resumed_or_rolled_back_run_shows_its_last_values(tmp_path: Path) -> None:
    write(tmp_path / "metrics.jsonl", [{"step": s, "loss": float(s)} for s in (1, 2, 3, 4, 5)])
    with open(tmp_path / "metrics.jsonl", "a") as out:
        out.write('{"step": 3, "loss": 30}\n{"step": 4, "loss": 40}\n')
    file = MetricsFile(str(tmp_path / "metrics.jsonl"))
    file.refresh()
    x, y = file.series("loss")
    assert (x.tolist(), y.tolist()) == ([1, 2, 3, 4], [1, 2, 30, 40])


def test_damaged_lines_are_skipped_and_what_is_not_finite_is_kept_apart(tmp_path: Path) -> None:
    deep = "[" * 100_000
    rows: list[object] = [
        {"step": 1, "loss": 1.0, "time": 10, "tokens": 100},
        "not json", "[1, 2]", '"text"', deep, '{"step": 2, "loss": ' + deep, "\x00\xff", "{" * 5000,
        '{"step": 2, "loss": NaN, "time": 11, "tokens": 200}',
        '{"step": 3, "loss": Infinity, "time": 12, "tokens": 300}',
        {"step": 4, "loss": "-inf", "time": 13, "tokens": 400},
        {"step": 5, "loss": None, "big": 10**400, "time": 14, "tokens": 500},
        {"step": 6, "loss": "<script>", "note": {"a": {"b": {"c": {"d": {"e": 1}}}}}, "time": 15},
        {"step": "x", "loss": 2.0, "time": 16, "tokens": 600},
        {"step": 1e308, "x" * 500: 1.0},
    ]  # fmt: skip
    write(tmp_path / "metrics.jsonl", rows)
    file = MetricsFile(str(tmp_path / "metrics.jsonl"))
    file.refresh()
    x, y = file.series("loss")
    assert x.tolist() == [1, 2, 3, 4, 5, 6]
    assert [v if math.isfinite(v) else str(v) for v in y] == [1.0, "nan", "inf", "-inf", "nan", 2.0]
    assert file.series("loss", "time")[0].tolist() == [0, 1, 2, 3, 4, 6]
    assert file.series("loss", "tokens")[0].tolist() == [100, 200, 300, 400, 500, 600]
    assert all(len(name) <= 200 for name in file.names)


def test_a_line_without_end_a_huge_file_and_endless_names_stay_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "loss": 1}\n' + b"x" * (9 << 20) + b'\n{"step": 2, "loss": 2}\n')
    file = MetricsFile(str(path))
    file.refresh()
    assert file.series("loss")[0].tolist() == [1, 2]
    assert len(file._rest) <= 1 << 20

    monkeypatch.setattr(metrics_file, "_WHOLE_UP_TO", 256 << 10)
    monkeypatch.setattr(metrics_file, "_SAMPLE", 256 << 10)
    monkeypatch.setattr(metrics_file, "_SAMPLE_BLOCK", 4 << 10)
    count = 40_000
    write(path, [{"step": step, "loss": step / count} for step in range(count)])
    file = MetricsFile(str(path))
    file.refresh()
    x, y = file.series("loss")
    assert 0.05 < len(x) / count < 0.5, "evenly spaced blocks only"
    assert x[0] == 0
    assert x[-1] > 0.99 * count
    assert np.allclose(y, x / count)
    assert file.sampled < 0.5
    with open(path, "a") as out:
        out.write(json.dumps({"step": count, "loss": 1.0}) + "\n")
    file.refresh()
    assert file.series("loss")[0][-1] == count, "what is appended is read whole"

    write(path, [{f"name {number}": 1.0} for number in range(3000)])
    file = MetricsFile(str(path))
    file.refresh()
    assert len(file.names) == 2000

    file = MetricsFile(str(path), most_rows=100)
    file.refresh()
    assert file.rows < 100


def test_links_pipes_and_devices_are_not_opened(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    write(secret, [{"step": 1, "loss": 42.0}])
    runs = tmp_path / "runs"
    for name in ("linked", "piped", "good"):
        (runs / name).mkdir(parents=True)
    (runs / "linked/metrics.jsonl").symlink_to(secret)
    os.mkfifo(runs / "piped/metrics.jsonl")
    write(runs / "good/metrics.jsonl", [{"step": 1, "loss": 1.0}])
    (runs / "good/log.txt").symlink_to("/etc/passwd")
    (runs / "good/resolved.yaml").symlink_to(secret)
    (runs / "good/report.html").symlink_to(secret)
    (runs / "good/profile").symlink_to("/etc")
    (runs / "outside").symlink_to(tmp_path)
    (runs / "loop").symlink_to(runs)
    found, _ = find_runs([str(runs)])
    assert list(found.values()) == ["good"]
    for name in ("linked", "piped"):
        file = MetricsFile(str(runs / name / "metrics.jsonl"))
        file.refresh()
        assert file.rows == 0
    run = Run(str(runs / "good"), "good")
    assert run.log_tail()["lines"] == []
    assert run.config() == {}
    assert run.reports() == []
    assert run.summary()["loss"] == 1.0


def test_configs_that_nest_without_end_are_cut(tmp_path: Path) -> None:
    bomb = "a: &a [x, x]\n" + "".join(
        f"{b}: &{b} {{p: *{a}, q: *{a}}}\n" for a, b in zip("abcdefghijklmnopqrst", "bcdefghijklmnopqrstu", strict=True)
    )
    (tmp_path / "resolved.yaml").write_text(bomb)
    assert len(Run(str(tmp_path), "bomb").config()) <= 1000
    for text in ("{" * 10_000, "x: !!python/object/apply:os.system [true]", "\x00", "- 1\n- 2"):
        (tmp_path / "resolved.yaml").write_text(text)
        Run(str(tmp_path), "odd").config()
    (tmp_path / "prediction.json").write_text('{"time": {"step_seconds": 0}, "batch": 1, "length": 1}')
    assert Run(str(tmp_path), "odd").prediction() == {}


@given(
    st.lists(st.one_of(st.floats(-1e6, 1e6), st.just(math.nan), st.just(math.inf)), max_size=300), st.integers(1, 50)
)
def test_downsampling_keeps_extremes_and_order(values: list[float], points: int) -> None:
    y = np.array(values, dtype=float)
    curve = downsample(np.arange(len(y), dtype=float), y, points)
    assert len(curve.x) <= max(points, len(y) if len(y) <= points else 0)
    assert (np.diff(curve.x) > 0).all()
    finite = y[np.isfinite(y)]
    if len(finite):
        assert np.nanmax(curve.high) == finite.max()
        assert np.nanmin(curve.low) == finite.min()
        known = ~np.isnan(curve.mean)
        slack = 1e-9 * max(1.0, np.abs(finite).max())
        assert (curve.low[known] - slack <= curve.mean[known]).all()
        assert (curve.mean[known] <= curve.high[known] + slack).all()
    else:
        assert np.isnan(curve.mean).all()


def test_a_thousand_runs_are_found_in_bounded_depth(tmp_path: Path) -> None:
    deep = tmp_path
    for _ in range(30):
        deep = deep / "d"
    write(deep / "metrics.jsonl", [{"step": 1}])
    write(tmp_path / "a/b/metrics.jsonl", [{"step": 1}])
    write(tmp_path / "a/b/checkpoints/metrics.jsonl", [{"step": 1}])
    write(tmp_path / "a/.hidden/metrics.jsonl", [{"step": 1}])
    assert list(find_runs([str(tmp_path)])[0].values()) == ["a/b"]
    assert list(find_runs([str(tmp_path / "a/b")])[0].values()) == ["b"]
