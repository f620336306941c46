"""Trackers with their real packages, offline; and trackers that fail or hang."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from piledriver.core.errors import MissingDependencyError, PiledriverError, UnknownNameError
from piledriver.observe.trackers import (
    TRACKERS,
    GeneralTracker,
    Patience,
    Tracker,
    TrackerHub,
    choose_trackers,
    make_trackers,
)
from piledriver.observe.trackers.jsonl import JsonlTracker, read_jsonl
from tests.patience import HANG_S

CONFIG = {"lr": 0.01, "steps": 12, "flag": False, "name": "x"}
VALUES = {"loss": torch.tensor(0.5), "iteration": 1, "note": "text", "eval": {"ppl": np.float32(2.0)}}


def run_all(hub: TrackerHub) -> None:
    hub.start(CONFIG)
    hub.log(VALUES, step=0)
    hub.log({"loss": 0.25}, step=1)
    hub.finish()


def made(name: str, folder: Path, **kwargs: Any) -> Any:
    return make_trackers(choose_trackers(name, folder), "project", folder, {name: kwargs})[0]


def in_own_process(program: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program in the repository's root, where the tests can be imported."""
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[2],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )


def importable(package: str) -> None:
    """Skip where it is not installed, without importing it here: threads and sockets that a package leaves behind
    would fail whichever test comes when they are collected. So the packages run in processes of their own."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


def use_mlflow(folder: Path) -> None:
    import mlflow

    tracker = made("mlflow", folder, tracking_uri=f"file://{folder}/runs")
    hub = TrackerHub([tracker])
    artifact = folder / "note.txt"
    artifact.write_text("x")
    hub.start(CONFIG | {"long": "x" * 100_000})
    # The training thread's own calls go to the same run.
    assert mlflow.active_run().info.run_id == tracker.run_id
    hub.log(VALUES, step=3)
    tracker.log_artifact(str(artifact), artifact_path="files")
    hub.finish()
    assert hub.problems == {}
    assert mlflow.active_run() is None
    run = mlflow.get_run(tracker.run_id)
    files = mlflow.artifacts.list_artifacts(run_id=tracker.run_id, artifact_path="files")
    assert run.info.status == "FINISHED"
    assert run.data.metrics == {"loss": 0.5, "iteration": 1.0, "eval/ppl": 2.0}
    assert run.data.params == {key: str(value) for key, value in CONFIG.items()}
    assert [file.path for file in files] == ["files/note.txt"]


class TestJsonl:
    def test_lines(self, tmp_path: Path) -> None:
        run_all(TrackerHub([made("jsonl", tmp_path)]))
        first, second = read_jsonl(tmp_path / "project/metrics.jsonl")
        assert (first["step"], first["loss"], first["note"], first["eval"]) == (0, 0.5, "text", {"ppl": 2.0})
        assert (second["step"], second["loss"]) == (1, 0.25)
        assert json.loads((tmp_path / "project/config.json").read_text()) == CONFIG

    def test_a_resumed_run_goes_on_after_a_line_that_was_cut_off(self, tmp_path: Path) -> None:
        for _ in range(2):
            run_all(TrackerHub([made("jsonl", tmp_path)]))
            with open(tmp_path / "project/metrics.jsonl", "a") as file:
                file.write('{"step": 2, "lo')
        assert [record["step"] for record in read_jsonl(tmp_path / "project/metrics.jsonl")] == [0, 1, 0, 1]

    def test_what_json_lacks(self, tmp_path: Path) -> None:
        tracker = JsonlTracker("r", tmp_path)
        tracker.log({"loss": float("nan"), "path": Path("a")}, step=1)
        tracker.finish()
        assert read_jsonl(tracker.path)[0]["loss"] == "nan"


@pytest.mark.slow
class TestRealPackages:
    def test_tensorboard(self, tmp_path: Path) -> None:
        pytest.importorskip("tensorboard")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            hub = TrackerHub([made("tensorboard", tmp_path)])
            run_all(hub)
        assert hub.problems == {}
        events = EventAccumulator(str(tmp_path / "project"))
        events.Reload()
        assert [(e.step, e.value) for e in events.Scalars("loss")] == [(0, 0.5), (1, 0.25)]
        assert "note/text_summary" in events.Tags()["tensors"]

    def test_wandb_offline(self, tmp_path: Path) -> None:
        importable("wandb")
        done = in_own_process(
            "from tests.observe.test_trackers import *\n"
            f"folder = {str(tmp_path)!r}\n"
            "hub = TrackerHub([made('wandb', Path(folder), mode='offline', dir=folder)])\n"
            "run_all(hub); print(hub.problems)\n"
        )
        assert done.stdout.splitlines()[-1] == "{}", done.stderr
        (log,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
        content = log.read_bytes()
        assert b"note" in content
        assert b"iteration" in content
        assert b"lr" in content

    def test_mlflow_in_a_folder(self, tmp_path: Path) -> None:
        importable("mlflow")
        done = in_own_process(
            "from tests.observe.test_trackers import *\n"
            f"use_mlflow(Path({str(tmp_path)!r})); print('as it should be')\n",
            MLFLOW_ALLOW_FILE_STORE="true",
        )
        assert done.stdout.splitlines()[-1:] == ["as it should be"], done.stderr

    def test_comet_offline(self, tmp_path: Path) -> None:
        importable("comet_ml")
        done = in_own_process(
            "import comet_ml; from tests.observe.test_trackers import *\n"
            f"folder = {str(tmp_path)!r}\n"
            "where = comet_ml.ExperimentConfig(offline_directory=folder, log_env_details=False, log_code=False)\n"
            "hub = TrackerHub([made('comet_ml', Path(folder), online=False, experiment_config=where)])\n"
            "run_all(hub); print(hub.problems)\n"
        )
        assert done.stdout.splitlines()[-1] == "{}", done.stderr
        (archive,) = tmp_path.glob("*.zip")
        with zipfile.ZipFile(archive) as opened:
            messages = [json.loads(line)["payload"] for line in opened.read("messages.json").splitlines()]
        metrics = [m["metric"] for m in messages if "metric" in m]
        assert [m["metricValue"] for m in metrics if m["metricName"] == "loss"] == [0.5, 0.25]
        parameters = {m["param"]["paramName"]: m["param"]["paramValue"] for m in messages if "param" in m}
        assert parameters.items() >= CONFIG.items()

    def test_dvclive(self, tmp_path: Path) -> None:
        importable("dvclive")
        # It makes the repository around the working directory a DVC repository.
        done = in_own_process(
            "from tests.observe.test_trackers import *\n"
            f"folder = {str(tmp_path)!r}; os.chdir(folder)\n"
            "hub = TrackerHub([made('dvclive', Path(folder), dir=folder, save_dvc_exp=False, dvcyaml=None)])\n"
            "run_all(hub); print(hub.problems)\n"
        )
        assert done.stdout.splitlines()[-1] == "{}", done.stderr
        assert json.loads((tmp_path / "metrics.json").read_text()) == {
            "loss": 0.25,
            "iteration": 1,
            "note": "text",
            "eval": {"ppl": 2.0},
            "step": 1,
        }

    def test_trackio(self, tmp_path: Path) -> None:
        importable("trackio")
        # It chooses its folder when it is imported.
        done = in_own_process(
            "from tests.observe.test_trackers import *\n"
            "hub = TrackerHub(make_trackers(['trackio'], 'project', None, {'trackio': {'embed': False}}))\n"
            "run_all(hub); print(hub.problems)\n",
            TRACKIO_DIR=str(tmp_path),
        )
        assert done.stdout.splitlines()[-1] == "{}", done.stderr
        assert (tmp_path / "project.db").is_file()


class Broken(GeneralTracker):
    """Fails in the calls that it is told to fail in."""

    name = "broken"
    requires_logging_directory = False

    def __init__(self, *where: str) -> None:
        super().__init__()
        self.where = where
        self.logged: list[Any] = []

    @property
    def tracker(self) -> Any:
        return self.logged

    def act(self, where: str) -> None:
        if where in self.where:
            raise RuntimeError(f"{where} is down")

    def start(self) -> None:
        self.act("start")

    def store_init_configuration(self, values: Any) -> None:
        self.act("config")

    def log(self, values: Any, step: int | None = None, **kwargs: Any) -> None:
        self.act("log")
        self.logged.append((step, values, kwargs))

    def finish(self) -> None:
        self.act("finish")


class Hanging(Broken):
    """Waits for ever in the calls that it is told to."""

    name = "hanging"

    def __init__(self, *where: str) -> None:
        super().__init__(*where)
        self.release = threading.Event()

    def act(self, where: str) -> None:
        if where in self.where:
            self.release.wait()


@pytest.fixture
def hanging() -> Iterator[Any]:
    all_made: list[Hanging] = []

    def make(*where: str) -> Hanging:
        all_made.append(Hanging(*where))
        return all_made[-1]

    yield make
    for tracker in all_made:
        tracker.release.set()


class TestGuard:
    @pytest.mark.parametrize("where", ["start", "config", "log", "finish"])
    def test_a_failure_is_counted_and_said_once(self, where: str, caplog: pytest.LogCaptureFixture) -> None:
        good = Broken()
        good.name = "good"
        hub = TrackerHub([Broken(where), good])
        with caplog.at_level(logging.WARNING):
            run_all(hub)
        assert hub.problems["broken"].failed == (2 if where == "log" else 1)
        assert hub.problems["broken"].last == f"RuntimeError: {where} is down"
        assert sum("is down" in message for message in caplog.messages) == 1
        assert [step for step, _, _ in good.logged] == [0, 1]

    @pytest.mark.parametrize("where", ["start", "config", "log", "finish"])
    def test_a_tracker_that_hangs_does_not_stop_training(self, where: str, hanging: Any) -> None:
        patience = Patience(start_s=0.05, call_s=0.01, finish_s=0.1, queue_length=50)
        good = Broken()
        good.name = "good"
        stuck = hanging(where)
        hub = TrackerHub([stuck, good], patience=patience)
        hub.start(CONFIG)
        for step in range(200):
            hub.log({"loss": 1.0}, step=step)
            # A step takes as long as the good one needs on this machine, or its own queue would fill.
            while len(good.logged) <= step:
                time.sleep(0.001)
        hub.finish()
        assert len(good.logged) == 200
        assert hub.problems["hanging"].unfinished
        if where == "log":
            assert hub.problems["hanging"].dropped >= 100

    def test_values_are_taken_when_they_are_logged(self, hanging: Any) -> None:
        stuck = hanging("start")
        hub = TrackerHub([stuck], patience=Patience(start_s=0.01, call_s=0.01))
        hub.start()
        loss, row = torch.tensor([1.0]), np.ones(2)
        hub.log({"loss": loss, "nested": {"row": row}}, step=0)
        loss.fill_(9.0)
        row[:] = 9.0
        stuck.release.set()
        hub.finish()
        ((step, values, kwargs),) = stuck.logged
        assert (step, values["loss"], values["nested"]["row"].tolist(), kwargs) == (0, 1.0, [1.0, 1.0], {})

    def test_a_hanging_tracker_does_not_keep_the_process(self) -> None:
        program = (
            "import time, logging; from piledriver.observe.trackers import *\n"
            "class Stuck(GeneralTracker):\n"
            "    name = 'stuck'; requires_logging_directory = False; tracker = None\n"
            "    def log(self, values, step=None): time.sleep(1000)\n"
            "hub = TrackerHub([Stuck()], patience=Patience(finish_s=0.1))\n"
            "hub.start(); hub.log({'a': 1}); hub.finish()\n"
            "print('trained')\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=HANG_S, check=False
        )
        assert done.returncode == 0
        assert done.stdout == "trained\n"
        assert "did not finish within 0.1 s" in done.stderr


class TestHub:
    def test_only_the_main_process_logs(self) -> None:
        tracker = Broken()
        everywhere = Broken()
        everywhere.main_process_only = False
        hub = TrackerHub([tracker, everywhere], is_main=False)
        run_all(hub)
        assert tracker.logged == []
        assert len(everywhere.logged) == 2
        assert isinstance(TrackerHub([tracker], is_main=False).get("broken"), GeneralTracker)

    def test_arguments_by_tracker(self) -> None:
        tracker = Broken()
        hub = TrackerHub([tracker])
        hub.start()
        hub.log({"a": 1}, log_kwargs={"broken": {"commit": True}, "other": {"x": 1}})
        hub.log_images({"a": []})
        hub.finish()
        assert tracker.logged == [(None, {"a": 1}, {"commit": True})]
        assert hub.get("broken") is tracker
        assert hub.get("broken", unwrap=True) is tracker.logged
        with pytest.raises(UnknownNameError, match="did you mean 'broken'"):
            hub.get("brocken")

    def test_a_tracker_is_a_protocol(self, tmp_path: Path) -> None:
        assert isinstance(JsonlTracker("r", tmp_path), Tracker)

        class Duck:
            """Like a subclass of Accelerate's own base class."""

            name = "duck"
            requires_logging_directory = False
            tracker = None

            def store_init_configuration(self, values: Any) -> None: ...

            def log(self, values: Any, step: int | None = None) -> None: ...

            def finish(self) -> None: ...

        hub = TrackerHub(make_trackers(choose_trackers(Duck()), "p"))
        run_all(hub)
        assert hub.problems == {}


class TestChoice:
    def test_every_name_makes_a_tracker_without_its_package(self, tmp_path: Path) -> None:
        for name in TRACKERS:
            tracker = made(name, tmp_path)
            assert tracker.name == name
            assert isinstance(tracker, GeneralTracker)

    def test_a_missing_package_is_said(self, tmp_path: Path) -> None:
        try:
            import swanlab  # noqa: F401
        except ImportError:
            tracker = made("swanlab", tmp_path)
            with pytest.raises(MissingDependencyError, match="swanlab"):
                tracker.start()

    def test_wrong_choices(self) -> None:
        with pytest.raises(UnknownNameError, match="did you mean 'tensorboard'"):
            choose_trackers("tensorbord", "x")
        with pytest.raises(PiledriverError, match="requires a `logging_dir`"):
            choose_trackers("jsonl")

    def test_a_class_without_the_names_is_refused(self) -> None:
        class Nameless(GeneralTracker):
            pass

        with pytest.raises(NotImplementedError, match="name, requires_logging_directory, tracker"):
            Nameless()


def test_interrupts_of_the_process_reach_it(tmp_path: Path) -> None:
    """The tracker threads do not swallow Ctrl-C."""
    program = (
        # A suite that runs in the background has the signal ignored, and children inherit that.
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "import time, sys; from piledriver.observe.trackers import *\n"
        f"hub = TrackerHub(make_trackers(['jsonl'], 'p', {str(tmp_path)!r})); hub.start()\n"
        "print('ready', flush=True)\n"
        "while True: hub.log({'a': 1}); time.sleep(0.01)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert child.stdout is not None
    child.stdout.readline()
    time.sleep(0.1)
    child.send_signal(signal.SIGINT)
    assert child.wait(timeout=HANG_S) != 0
    child.stdout.close()
    assert read_jsonl(tmp_path / "p/metrics.jsonl")


def test_lines_are_written_when_a_process_ends_or_forks_without_finish(tmp_path: Path) -> None:
    program = (
        "import os; from piledriver.observe.trackers import *\n"
        f"hub = TrackerHub(make_trackers(['jsonl'], 'p', {str(tmp_path)!r})); hub.start()\n"
        "hub.log({'a': 1}, step=1)\n"
        "child = os.fork()\n"
        "hub.log({'a': 2}, step=2 if child else 3)\n"
        "if child: os.waitpid(child, 0)\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, timeout=HANG_S)
    assert sorted(record["step"] for record in read_jsonl(tmp_path / "p/metrics.jsonl")) == [1, 2, 3]


def test_a_write_that_fails_is_a_problem_of_the_tracker(tmp_path: Path) -> None:
    tracker = JsonlTracker("r", tmp_path)
    hub = TrackerHub([tracker])
    hub.start()
    hub.log({"a": 1}, step=1)
    lines = tracker._lines
    assert lines is not None
    os.close(lines._queue._descriptor)
    lines._queue._descriptor = os.open(tmp_path / "r/config.json", os.O_RDONLY | os.O_CREAT)  # not for writing
    lines._queue.write()
    hub.log({"a": 2}, step=2)
    hub.finish()
    assert hub.problems["jsonl"].failed >= 1
    assert "Bad file descriptor" in hub.problems["jsonl"].last
