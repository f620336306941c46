"""The page and its data over HTTP: who may read them, that they are right, and that hostile runs cannot script it."""

from __future__ import annotations

import http.client
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pytest

from piledriver.observe.watch import server as server_module
from piledriver.observe.watch.server import WatchServer
from tests.patience import HANG_S

HOSTILE = "<img src=x onerror=\"document.title='scripted'\">"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    for number, name in enumerate(["first", "second"]):
        folder = root / name
        (folder / "ranks").mkdir(parents=True)
        rows = [
            {
                "step": step,
                "time": 1e9 + step,
                "tokens": 10 * step,
                "loss": 5.0 - step / 1000 + number,
                "validation/A": 1.0,
            }
            for step in range(1, 3001)
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "resolved.yaml").write_text(f"seed: {number}\nrun:\n  steps: 3000\n")
        (folder / "log.txt").write_text("one\ntwo\n")
        for rank in range(3):
            lines = [{"time": 1e9 + t, "step": t, "step_seconds": 0.1 * (rank + 1)} for t in range(10)]
            (folder / f"ranks/{rank:05d}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    prediction = {
        "time": {"step_seconds": 0.5, "parts": {"compute": 0.5}},
        "batch": 4,
        "length": 128,
        "memory": {"allocated_gib": 2.0, "owners": [], "phase": "loss"},
    }
    (root / "first/prediction.json").write_text(json.dumps(prediction))
    (root / "first/samples.jsonl").write_text(json.dumps({"step": 3, "prompt": "a", "text": "b"}) + "\n")
    (root / "first/profile").mkdir()
    (root / "first/profile/report.html").write_text("<h1>report</h1>")
    evil = root / "evil" / HOSTILE.replace("/", "")
    evil.mkdir(parents=True)
    row = {"step": 1, "loss": 1.0, HOSTILE: 2.0, f"{HOSTILE}/x": 1.0, "note": HOSTILE}
    (evil / "metrics.jsonl").write_text(json.dumps(row) + "\n" + '{"step": 2, "loss": NaN}\n{"step": 3, "lo')
    (evil / "resolved.yaml").write_text(f"{HOSTILE!r}: {HOSTILE!r}\n")
    (evil / "log.txt").write_text(HOSTILE + "\n</pre><script>document.title='scripted'</script>\n")
    (evil / "samples.jsonl").write_text(json.dumps({"step": 1, "prompt": HOSTILE, "text": HOSTILE}) + "\n")
    absurd = {**prediction, "time": {"step_seconds": 1e-300, "parts": {HOSTILE: 1}}, "batch": 1e300}
    (evil / "prediction.json").write_text(json.dumps(absurd))
    (evil / "ranks").mkdir()
    (evil / f"ranks/{HOSTILE.replace('/', '')}.jsonl").write_text('{"time": 1, "step_seconds": Infinity}\n')
    (evil / "x.html").write_text("<script>document.title='scripted'</script>")
    return root


@pytest.fixture(scope="module")
def served(runs: Path) -> Iterator[WatchServer]:
    with WatchServer([str(runs)]) as server:
        server.start()
        yield server
        server.shutdown()


def ask(
    server: WatchServer, path: str, headers: dict[str, str] | None = None, *, token: bool = True, method: str = "GET"
) -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=HANG_S)
    allowed = {"Authorization": f"Bearer {server.token}"} if token else {}
    connection.request(method, path, headers=allowed | (headers or {}))
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer, content


def data(server: WatchServer, path: str, **query: Any) -> Any:
    answer, content = ask(server, f"/api/{path}?{urlencode(query, doseq=True)}")
    assert answer.status == 200, content
    return json.loads(content)


def ids(server: WatchServer) -> dict[str, str]:
    return {run["name"]: run["id"] for run in data(server, "runs")["runs"]}


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/", {}, 403),
        ("/?token=wrong", {}, 403),
        ("/?token=%ff%00", {}, 403),
        ("/api/runs", {}, 403),
        ("/api/runs", {"Authorization": "Bearer "}, 403),
        ("/api/runs?token=TOKEN", {"Host": "evil.example"}, 403),
        ("/api/runs?token=TOKEN", {"Host": "127.0.0.1.evil.example:80"}, 403),
        ("/api/runs?token=TOKEN", {"Host": ""}, 403),
        ("/api/runs?token=TOKEN", {"Host": "localhost:9999"}, 200),  # through a tunnel
        ("/api/runs?token=TOKEN", {"Host": "[::1]:9999"}, 200),
        ("/?token=TOKEN", {}, 200),
        ("/api/nothing?token=TOKEN", {}, 404),
        ("/../../etc/passwd?token=TOKEN", {}, 404),
        ("/api/log?token=TOKEN&run=../../etc", {}, 404),
        ("/api/series?token=TOKEN&points=x", {}, 400),
        ("/api/series?token=TOKEN" + "&metric=a" * 2000, {}, 400),
        ("/report?token=TOKEN&name=profile/report.html", {}, 403),
    ],
)
def test_who_may_read(served: WatchServer, path: str, headers: dict[str, str], status: int) -> None:
    answer, content = ask(served, path.replace("TOKEN", served.token), headers, token=False)
    assert answer.status == status, content
    assert served.token.encode() not in content


def test_nothing_can_be_changed_and_only_this_machine_is_answered(served: WatchServer) -> None:
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert ask(served, "/api/runs", method=method)[0].status == 501
    assert served.server_address[0] == "127.0.0.1"
    answer, content = ask(served, f"/?token={served.token}", token=False)
    policy = answer.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert answer.headers["Referrer-Policy"] == "no-referrer"
    assert b"http://" not in content, "the page must not name another host"
    assert b"https://" not in content
    assert b"innerHTML" not in content
    again, nothing = ask(served, f"/?token={served.token}", {"If-None-Match": answer.headers["ETag"]}, token=False)
    assert (again.status, nothing) == (304, b"")


def test_curves_are_those_of_the_file(served: WatchServer) -> None:
    first = ids(served)["first"]
    whole = data(served, "series", run=first, metric="loss", points=5000)[first]["loss"]
    assert whole["x"] == list(range(1, 3001))
    assert whole["y"][9] == pytest.approx(4.99)
    fewer = data(served, "series", run=first, metric=["loss", "missing"], points=100, x="tokens")[first]
    assert len(fewer["loss"]["x"]) == 100
    assert fewer["loss"]["n"] == 3000
    assert (max(fewer["loss"]["high"]), min(fewer["loss"]["low"])) == (pytest.approx(4.999), pytest.approx(2.0))
    assert fewer["missing"]["x"] == []
    part = data(served, "series", run=first, metric="loss", points=5000, **{"from": 100, "to": 110})[first]["loss"]
    assert part["x"] == list(range(99, 112)), "one more on each side"
    beyond = data(served, "series", run=first, metric="loss", **{"from": 1e9, "to": 2e9})[first]["loss"]
    assert beyond["x"] == []


def test_a_run_its_ranks_its_log_and_its_report(served: WatchServer) -> None:
    listed = {run["name"]: run for run in data(served, "runs")["runs"]}
    assert (listed["first"]["state"], listed["first"]["step"], listed["first"]["total"]) == ("finished", 3000, 3000)
    first = listed["first"]["id"]
    about = data(served, "run", run=first)
    assert about["config"] == {"seed": "0", "run.steps": "3000"}
    assert about["prediction"]["tokens_per_second"] == 1024
    assert about["samples"] == [{"step": 3, "prompt": "a", "text": "b"}]
    assert data(served, "log", run=first)["lines"] == ["one", "two"]
    names = data(served, "names", run=first)[first]
    assert names["metrics"] == ["loss", "validation/A"]
    assert "step_seconds" in names["ranks"]
    heat = data(served, "ranks", run=first, metric="step_seconds", columns=5)
    assert heat["ranks"] == ["0", "1", "2"]
    assert [line[0] for line in heat["values"]] == pytest.approx([0.1, 0.2, 0.3])
    (report,) = about["reports"]
    answer, content = ask(
        served, f"/report?run={first}&name={quote(report['name'])}&ticket={report['ticket']}", token=False
    )
    assert (answer.status, content) == (200, b"<h1>report</h1>")
    assert "sandbox allow-scripts;" in answer.headers["Content-Security-Policy"]
    other = ids(served)["second"]
    path = f"/report?run={other}&name={quote(report['name'])}&ticket={report['ticket']}"
    assert ask(served, path, token=False)[0].status == 403, "a ticket opens one report"


def test_a_change_ends_the_wait(runs: Path, served: WatchServer) -> None:
    version = data(served, "runs")["version"]
    assert data(served, "changes", since=version, wait=0)["version"] == version
    new = runs / "third"
    new.mkdir()
    (new / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    served.workspace._folders_at = 0.0  # as after some seconds
    changed = data(served, "changes", since=version, wait=20)["version"]
    assert changed != version
    assert "third" in ids(served)
    with open(new / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "loss": 0.5}\n')
    assert data(served, "changes", since=changed, wait=20)["version"] != changed
    third = ids(served)["third"]
    assert data(served, "series", run=third, metric="loss")[third]["loss"]["y"] == [1.0, 0.5]
    shutil.rmtree(new)


def test_hostile_runs_are_data(served: WatchServer) -> None:
    listed = {run["name"]: run for run in data(served, "runs")["runs"]}
    (name,) = [name for name in listed if name.startswith("evil")]
    key = listed[name]["id"]
    assert HOSTILE in data(served, "names", run=key)[key]["metrics"]
    curve = data(served, "series", run=key, metric="loss")[key]["loss"]
    assert (curve["y"], curve["bad"]) == ([1.0, None], 1)
    assert data(served, "log", run=key)["lines"][0] == HOSTILE
    assert data(served, "run", run=key)["prediction"]["tokens_per_second"] is None
    assert data(served, "ranks", run=key, metric="step_seconds")["values"] == [[None]]


@pytest.mark.slow
def test_the_page_in_a_browser(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
    if browser is None:
        pytest.skip("needs Chromium")
    # The page's wait for a change must not keep the browser's clock from advancing.
    monkeypatch.setattr(server_module, "_LONGEST_WAIT_S", 0.0)
    with WatchServer([str(runs)]) as server:
        server.start()
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=6000", "--dump-dom"]
        done = subprocess.run([*command, server.url], capture_output=True, text=True, timeout=HANG_S, check=False)
        server.shutdown()
    dom = done.stdout.partition("<script>")[0]
    assert 'data-ready="true"' in dom, done.stderr[-2000:]
    assert "<title>piledriver watch</title>" in dom, "a script of a run was executed"
    assert dom.count('class="card chart') >= 3
    assert "&lt;img src=x" in dom, "hostile names are shown as text"
    assert "<img" not in dom
    assert "first" in dom
    assert "no answer" not in dom
