"""Builds on Ray: the real library, two nodes on this machine. The bytes are those of the local executor, whatever dies.

A node is `ray start --block` in a process of its own, with one CPU and 80 MB for objects.
"""

from __future__ import annotations

import importlib.util
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from piledriver.core.errors import PiledriverError, UsageError
from piledriver.corpus.pipeline.build import build_corpus
from piledriver.corpus.pipeline.recipe import load_recipe
from tests.corpus.pipeline.test_build import RECIPE, content, raw_files
from tests.patience import HANG_S

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed (extra `ray`)"),
]

# Small chunks: a hundred tasks to die in. The build begins when the nodes are there.
_BUILD = """
import sys, time
from piledriver.corpus.pipeline.build import build_corpus
from piledriver.corpus.pipeline.recipe import load_recipe
recipe, out, executor, cpus = sys.argv[1:]
if executor.startswith("ray:"):
    import ray
    ray.init(executor[4:], log_to_driver=False)
    while ray.cluster_resources().get("CPU", 0) < int(cpus):
        time.sleep(0.2)
build_corpus(load_recipe(recipe), out, executor_name=executor, workers=1, chunk_bytes=40_000, keep_work=True)
"""
# Patience for a busy machine; and a cluster takes work from those alone that know this run's token.
_SETTINGS = {
    **os.environ,
    "RAY_raylet_start_wait_time_s": "180",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "3",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
}


class Node:
    """One Ray node, and what of it can be killed."""

    def __init__(self, address: str, temporary: str, *, head: bool) -> None:
        port = address.split(":")[1]
        role = [f"--address={address}"]
        if head:
            role = ["--head", f"--port={port}", f"--temp-dir={temporary}", "--include-dashboard=false"]
        limits = ["--num-cpus=1", "--object-store-memory=80000000"]
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
        self._log = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            [*command, *role, *limits],
            env=_SETTINGS,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def raylet(self) -> psutil.Process | None:
        return next((child for child in self._family() if "raylet" in child.name()), None)

    def busy_workers(self) -> list[psutil.Process]:
        """Its processes that run a task now."""
        found = []
        for child in self._family():
            with suppress(psutil.Error, IndexError):
                if "execute_task" in child.cmdline()[0]:
                    found.append(child)
        return found

    def _family(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def check(self) -> None:
        """Fail at once, with what it said, where it has not come up."""
        if self.process.poll() is not None:
            self._log.seek(0)
            raise AssertionError(self._log.read().decode())

    def stop(self) -> None:
        family = self._family()
        self.process.kill()
        self.process.wait()
        for member in family:
            with suppress(psutil.NoSuchProcess):
                member.kill()
        self._log.close()


class Cluster:
    """Two nodes."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        # Ray's sockets are below it, and the names of sockets must be short.
        self._temporary = tempfile.mkdtemp(prefix="r")
        self.head = Node(self.address, self._temporary, head=True)
        self._wait_for_port()
        self.other = Node(self.address, self._temporary, head=False)

    def _wait_for_port(self) -> None:
        host, port = self.address.split(":")
        for _ in range(600):
            with suppress(OSError), socket.create_connection((host, int(port)), timeout=1):
                return
            time.sleep(0.2)
        raise TimeoutError("the head node did not start")

    def replace_other(self) -> None:
        self.other.stop()
        self.other = Node(self.address, self._temporary, head=False)

    def is_up(self) -> bool:
        return self.head.process.poll() is None

    def stop(self) -> None:
        self.other.stop()
        self.head.stop()
        shutil.rmtree(self._temporary, ignore_errors=True)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ray")
    raw_files(folder / "raw")
    (folder / "recipe.yaml").write_text(RECIPE.format(seed=7))
    return folder


@pytest.fixture(scope="module")
def expected(place: Path) -> dict[str, bytes]:
    with build(place, "local", "local") as process:
        assert process.wait() == 0
    return content(place / "local")


@pytest.fixture(scope="module")
def clusters() -> Iterator[list[Cluster]]:
    made: list[Cluster] = []
    yield made
    for cluster in made:
        cluster.stop()


@pytest.fixture
def cluster(clusters: list[Cluster]) -> Cluster:
    """The one that runs, or a new one where a test has killed it."""
    if not clusters or not clusters[-1].is_up():
        clusters.append(Cluster())
    return clusters[-1]


@contextmanager
def build(place: Path, out: str, executor: str, cpus: int = 2) -> Iterator[subprocess.Popen[bytes]]:
    """A build in a process of its own, which does not outlive the block."""
    command = [sys.executable, "-c", _BUILD, str(place / "recipe.yaml"), str(place / out), executor, str(cpus)]
    with open(said(place, out), "wb") as file:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=file, env=_SETTINGS)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def said(place: Path, out: str) -> Path:
    """What a build wrote to its standard error."""
    return place / f"{out}.stderr"


def test_a_cluster_of_this_machine_gives_the_same_bytes(place: Path, expected: dict[str, bytes]) -> None:
    with build(place, "ray", "ray") as process:
        assert process.wait() == 0
    assert content(place / "ray") == expected


def test_workers_and_a_node_of_two_die_and_the_build_goes_on(
    place: Path, expected: dict[str, bytes], cluster: Cluster
) -> None:
    luck = random.Random(5)
    for attempt in range(3):
        out = f"killed-{attempt}"
        has_killed_a_node = build_and_kill(place, out, cluster, luck)
        assert content(place / out) == expected
        if has_killed_a_node:
            return
    raise AssertionError("three builds ended before both nodes were seen to run tasks")


def build_and_kill(place: Path, out: str, cluster: Cluster, luck: random.Random) -> bool:
    """Kill workers of a build, and a node once both have run tasks; return whether one was killed."""
    took_part: set[Node] = set()
    killed = {"workers": 0, "nodes": 0}
    with build(place, out, f"ray:{cluster.address}") as process:
        while process.poll() is None:
            time.sleep(luck.uniform(0.05, 0.3))
            cluster.other.check()
            for node in (cluster.head, cluster.other):
                busy = node.busy_workers()
                if busy:
                    took_part.add(node)
                if busy and killed["workers"] < 4:
                    with suppress(psutil.NoSuchProcess):
                        busy[0].send_signal(signal.SIGKILL)
                        killed["workers"] += 1
            if len(took_part) == 2 and killed["workers"] >= 3 and not killed["nodes"]:
                raylet = cluster.other.raylet()
                if raylet is not None:
                    raylet.send_signal(signal.SIGKILL)
                    killed["nodes"] += 1
                    cluster.replace_other()
    assert process.returncode == 0, said(place, out).read_text()
    assert killed["workers"] >= 3
    return killed["nodes"] == 1


def test_after_the_head_node_has_died_the_next_run_goes_on(
    place: Path, expected: dict[str, bytes], cluster: Cluster
) -> None:
    luck = random.Random(6)
    with build(place, "headless", f"ray:{cluster.address}") as process:
        work = place / "headless" / ".work"
        while process.poll() is None and len(list(work.glob("*/*"))) < 20:
            time.sleep(0.05)
        time.sleep(luck.uniform(0, 0.5))
        assert process.poll() is None
        before = {path.name for path in work.glob("*/*") if not path.name.endswith(".partial")}
        cluster.stop()
        assert process.wait(timeout=HANG_S) != 0
    assert not (place / "headless" / "manifest.json").exists()
    with build(place, "headless", "local") as process:
        assert process.wait() == 0
    assert content(place / "headless") == expected
    assert before <= {path.name for path in work.glob("*/*")}


@pytest.mark.parametrize("address", ["nonsense", "localhost:1"])
def test_an_address_where_nothing_runs_is_refused(address: str, place: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"no Ray cluster answers at {address}"):
        build_corpus(load_recipe(place / "recipe.yaml"), str(tmp_path / "out"), executor_name=f"ray:{address}")


def test_ray_that_does_not_start_is_one_line(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "file"))
    with pytest.raises(PiledriverError, match=r"Ray did not start on this machine: .*Not a directory") as caught:
        build_corpus(load_recipe(place / "recipe.yaml"), str(tmp_path / "out"), executor_name="ray", workers=1)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out" / "manifest.json").exists()
