"""HTTP server of the page: loopback only, a token for every request, no request that changes anything."""

from __future__ import annotations

import base64
import gzip
import hashlib
import hmac
import json
import math
import re
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any
from urllib.parse import parse_qs, urlsplit

from piledriver.observe.watch.files import read_head
from piledriver.observe.watch.run import Run
from piledriver.observe.watch.workspace import Workspace

_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
_MOST_RUNS, _MOST_METRICS, _MOST_POINTS = 64, 400, 20_000
_REPORT_BYTES = 64 << 20
_COMPRESS_FROM = 32 << 10
_LOOK_EVERY_S, _LONGEST_WAIT_S = 1.0, 25.0

Query = dict[str, list[str]]


class WatchServer(ThreadingHTTPServer):
    """Serves the page and the data of a workspace at 127.0.0.1; port 0 takes any free one.

    >>> with WatchServer([], port=0) as server:
    ...     server.url.startswith("http://127.0.0.1:")
    True
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, roots: Sequence[str], *, port: int = 0, token: str | None = None) -> None:
        self.token = token or secrets.token_urlsafe(24)
        self.workspace = Workspace(roots)
        self.page = resources.files("piledriver.observe.watch").joinpath("page.html").read_bytes()
        self.policy = _policy(self.page)
        super().__init__(("127.0.0.1", port), _Handler)

    @property
    def url(self) -> str:
        """The address of the page, with its token."""
        return f"http://127.0.0.1:{self.server_address[1]}/?token={self.token}"

    def start(self) -> threading.Thread:
        """Serve in a daemon thread and return it."""
        thread = threading.Thread(target=self.serve_forever, name="watch", daemon=True)
        thread.start()
        return thread

    def ticket(self, run: str, name: str) -> str:
        """Return what opens one report: a report's own script must not learn the token."""
        return hmac.new(self.token.encode(), f"{run}/{name}".encode(), hashlib.sha256).hexdigest()[:32]


class _Handler(BaseHTTPRequestHandler):
    server: WatchServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "piledriver", ""
    timeout = 60

    def do_GET(self) -> None:
        """Answer one request."""
        try:
            self._route()
        except (BrokenPipeError, ConnectionResetError, TimeoutError):
            self.close_connection = True

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:
        """Write no access log: it would hold the token."""

    def _route(self) -> None:
        target = urlsplit(self.path)
        try:
            query = parse_qs(target.query, max_num_fields=1000)
        except ValueError:
            return self._refuse(400, "too many parameters")
        # A page of another site may resolve its own name to 127.0.0.1 (DNS rebinding); its requests bear that name.
        if _host_name(self.headers.get("Host", "")) not in _LOOPBACK:
            return self._refuse(403, "this server answers at 127.0.0.1 and localhost only")
        if target.path == "/report":
            return self._report(query)
        if not self._is_allowed(query):
            return self._refuse(403, "the token is missing or wrong: open the address that piledriver watch printed")
        if target.path == "/":
            return self._send(
                200, "text/html; charset=utf-8", self.server.page, {"Content-Security-Policy": self.server.policy}
            )
        answer = _ANSWERS.get(target.path)
        if answer is None:
            return self._refuse(404, "no such page")
        try:
            found = answer(self.server, query)
        except (KeyError, ValueError) as error:
            return self._refuse(400, f"{type(error).__name__}: {error}")
        if found is None:
            return self._refuse(404, "no such run")
        return self._send(200, "application/json", json.dumps(_finite(found), allow_nan=False).encode())

    def _is_allowed(self, query: Query) -> bool:
        header = self.headers.get("Authorization", "")
        given = header.removeprefix("Bearer ") if header.startswith("Bearer ") else _one(query, "token")
        return hmac.compare_digest(given.encode(errors="replace"), self.server.token.encode())

    def _report(self, query: Query) -> None:
        """Send an HTML report of a run as an isolated document: it may run scripts, but reach nothing."""
        run, name = self.server.workspace.run(_one(query, "run")), _one(query, "name")
        expected = self.server.ticket(_one(query, "run"), name)
        if not hmac.compare_digest(_one(query, "ticket").encode(errors="replace"), expected.encode()):
            return self._refuse(403, "open reports from the page")
        if run is None or name not in run.reports():
            return self._refuse(404, "no such report")
        policy = (
            "sandbox allow-scripts; default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
            "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        content = read_head(run.file(*name.split("/")), _REPORT_BYTES)
        return self._send(200, "text/html; charset=utf-8", content, {"Content-Security-Policy": policy})

    def _refuse(self, code: int, why: str) -> None:
        self._send(code, "text/plain; charset=utf-8", why.encode(errors="replace"))

    def _send(self, code: int, kind: str, content: bytes, headers: dict[str, str] | None = None) -> None:
        tag = f'"{hashlib.sha256(content).hexdigest()[:20]}"'
        known = code == 200 and self.headers.get("If-None-Match") == tag
        self.send_response(304 if known else code)
        if not known:
            self.send_header("Content-Type", kind)
            if len(content) > _COMPRESS_FROM and "gzip" in self.headers.get("Accept-Encoding", ""):
                content = gzip.compress(content, compresslevel=1)
                self.send_header("Content-Encoding", "gzip")
            self.send_header("Content-Length", str(len(content)))
        common = {
            "ETag": tag,
            "Cache-Control": "no-cache, private",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cross-Origin-Opener-Policy": "same-origin",
        }
        for name, value in {**common, **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if not known and self.command != "HEAD":
            self.wfile.write(content)


def _runs(server: WatchServer, query: Query) -> Any:
    """Every run with its state and last values."""
    return {"version": server.workspace.version(), "runs": server.workspace.listing(), "now": time.time()}


def _changes(server: WatchServer, query: Query) -> Any:
    """Wait until something has changed since a version, or for some seconds."""
    until = time.monotonic() + min(_LONGEST_WAIT_S, max(0.0, float(_one(query, "wait", "20"))))
    while (version := server.workspace.version()) == _one(query, "since") and time.monotonic() < until:
        time.sleep(_LOOK_EVERY_S)
    return {"version": version}


def _names(server: WatchServer, query: Query) -> Any:
    """The metrics of some runs, and of their ranks."""
    found = {}
    for run in _chosen(server, query):
        file = server.workspace.columns(run)
        ranks = server.workspace.rank_names(run)
        found[run.id] = {"metrics": file.names, "ranks": ranks, "rows": file.rows, "sampled": file.sampled}
    return found


def _series(server: WatchServer, query: Query) -> Any:
    """Curves of some metrics of some runs."""
    return server.workspace.series(
        _chosen(server, query),
        query.get("metric", [])[:_MOST_METRICS],
        x=_one(query, "x", "step"),
        points=min(_MOST_POINTS, max(2, int(_one(query, "points", "1000")))),
        low=_number(_one(query, "from", "-inf")),
        high=_number(_one(query, "to", "inf")),
    )


def _details(server: WatchServer, query: Query) -> Any:
    """Config, prediction, samples and reports of one run."""
    run = server.workspace.run(_one(query, "run"))
    if run is None:
        return None
    return {
        "path": run.path,
        "config": run.config(),
        "prediction": run.prediction(),
        "samples": run.samples(),
        "reports": [{"name": name, "ticket": server.ticket(run.id, name)} for name in run.reports()],
    }


def _log(server: WatchServer, query: Query) -> Any:
    """The last lines of a run's log."""
    run = server.workspace.run(_one(query, "run"))
    return None if run is None else run.log_tail()


def _ranks(server: WatchServer, query: Query) -> Any:
    """One metric of every rank over time."""
    run = server.workspace.run(_one(query, "run"))
    columns = min(1000, max(1, int(_one(query, "columns", "200"))))
    return None if run is None else server.workspace.heat_map(run, _one(query, "metric"), columns)


_ANSWERS: dict[str, Callable[[WatchServer, Query], Any]] = {
    "/api/runs": _runs,
    "/api/changes": _changes,
    "/api/names": _names,
    "/api/series": _series,
    "/api/run": _details,
    "/api/log": _log,
    "/api/ranks": _ranks,
}


def _chosen(server: WatchServer, query: Query) -> list[Run]:
    found = [server.workspace.run(key) for key in query.get("run", [])[:_MOST_RUNS]]
    return [run for run in found if run is not None]


def _one(query: Query, name: str, default: str = "") -> str:
    return query.get(name, [default])[0]


def _number(text: str) -> float:
    value = float(text)
    return -math.inf if math.isnan(value) else value


def _finite(value: Any) -> Any:
    """Return nested values with null instead of NaN and infinity, which JSON lacks."""
    if isinstance(value, dict):
        return {name: _finite(member) for name, member in value.items()}
    if isinstance(value, list):
        # Curves are long and hold null already.
        return value if value and type(value[0]) in (float, str) else [_finite(member) for member in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _host_name(host: str) -> str:
    """Return the name in a Host header.

    >>> _host_name("127.0.0.1:8080"), _host_name("[::1]:80"), _host_name("evil.example")
    ('127.0.0.1', '::1', 'evil.example')
    """
    bracketed = re.fullmatch(r"\[([^]]*)\](?::\d+)?", host)
    return bracketed[1] if bracketed else host.partition(":")[0].lower()


def _policy(page: bytes) -> str:
    """Return the content security policy: the page's own script and style by hash, requests to this server only."""

    def hashes(tag: bytes) -> str:
        found = re.findall(rb"<" + tag + rb">(.*?)</" + tag + rb">", page, re.DOTALL)
        return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(one).digest()).decode()}'" for one in found)

    return (
        f"default-src 'none'; script-src {hashes(b'script')}; style-src {hashes(b'style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
