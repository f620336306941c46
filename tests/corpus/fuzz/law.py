"""What must hold for any raw file whatever: the law that every mutation is held to.

A source answers with documents and refusals, never with an exception; each refusal has a reason and an origin; each
document can be written; it takes seconds and a bounded amount of memory; nothing is written beside temporary files.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from piledriver.corpus.document import Document, Refusal, refusal_line, to_line
from piledriver.corpus.extraction import extract_files
from piledriver.corpus.sources import SOURCES
from piledriver.corpus.sources.base import COMPILE_FROM_BYTES, Source

Raw = dict[str, bytes]
"""Files of one input, by their path."""

# What only a fault of ours answers: a parser that failed, hung or swelled on a small file.
FAULTS = ("", "parser failed", "timed out", "out of memory", "parser crashed")
SECONDS_A_MEGABYTE = 4.0
LEAST_SECONDS = 5.0
STANDSTILL_SECONDS = 300.0
MEMORY_BYTES = 3 << 30
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES = {"os.remove", "os.rename", "os.rmdir", "os.symlink", "os.link", "os.truncate", "os.chmod", "os.mkdir"}


class BrokenLawError(BaseException):
    """No `Exception`, so that no parser can take it for damage of its file."""


class _Watch:
    """Who writes where, from the interpreter's own audit events; hooks cannot be taken off again, only told to rest."""

    def __init__(self) -> None:
        self.allowed: str | None = None
        self.offences: list[str] = []
        sys.addaudithook(self)

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.allowed is None:
            return
        if event == "open":
            path, _, flags = arguments
            if not isinstance(path, int) and isinstance(flags, int) and flags & _WRITING:
                self._note(event, path)
        elif event in _CHANGES:
            # A name may be relative to an open folder, as `rmtree` gives it.
            folder = next((item for item in reversed(arguments) if type(item) is int and item >= 0), None)
            inside = event in ("os.remove", "os.rmdir") and folder is not None
            self._note(event, Path(f"/proc/self/fd/{folder}").resolve() if inside else arguments[0])
        elif event in ("os.system", "subprocess.Popen", "socket.connect"):
            self.offences.append(f"{event} {arguments[:1]}")

    def _note(self, event: str, path: Any) -> None:
        name = os.path.abspath(os.fsdecode(path)) if isinstance(path, str | bytes | os.PathLike) else str(path)
        # What is compiled on first use is cached beside the package.
        if self.allowed is not None and not name.startswith((self.allowed, "/dev/null")) and "__pycache__" not in name:
            self.offences.append(f"{event} {name}")


_watch: _Watch | None = None


@contextmanager
def watched(seconds: float) -> Iterator[None]:
    """Time of this process and its memory limited, its writing seen; a breach is raised as `BrokenLawError`."""
    global _watch
    _watch = _watch or _Watch()

    def too_long(*_: object) -> None:
        raise BrokenLawError(f"took more than {seconds:.1f} s")

    # Time of this process, because others may keep the machine busy; and of the clock, for what only waits.
    previous = signal.signal(signal.SIGPROF, too_long)
    previous_alarm = signal.signal(signal.SIGALRM, too_long)
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_data_bytes() + MEMORY_BYTES, hard))
    _watch.allowed, _watch.offences = os.path.abspath(tempfile.gettempdir()), []
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, STANDSTILL_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGPROF, previous)
        signal.signal(signal.SIGALRM, previous_alarm)
        _watch.allowed = None
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    if _watch.offences:
        raise BrokenLawError(f"wrote elsewhere: {_watch.offences[:3]}")


def _data_bytes() -> int:
    """What this process has of what the limit counts."""
    lines = Path("/proc/self/status").read_text().split("\n") if Path("/proc/self/status").exists() else []
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmData:")), 1 << 30)


def hold(slug: str, raw: Raw) -> list[Document | Refusal]:
    """Extract the files as a user would, by their folder, and check everything that comes out; returns it."""
    source = SOURCES[slug].prepared(COMPILE_FROM_BYTES)
    size = sum(map(len, raw.values()))
    with tempfile.TemporaryDirectory(prefix="law-") as folder:
        top = Path(folder) / "raw"
        for name, content in raw.items():
            (top / name).parent.mkdir(parents=True, exist_ok=True)
            (top / name).write_bytes(content)
        before = sorted(Path(folder).rglob("*"))
        found: list[Document | Refusal] = []
        with watched(LEAST_SECONDS + SECONDS_A_MEGABYTE * size / 1e6):
            try:
                for item in extract_files(source, [str(top)]):
                    check(source, item)
                    found.append(item)
            except (Exception, RecursionError) as error:
                raise BrokenLawError(f"{type(error).__name__} out of {slug}: {error}") from error
        if sorted(Path(folder).rglob("*")) != before:
            raise BrokenLawError("something was left beside the input")
    return found


def check(source: Source, item: Any) -> None:
    """One thing that was found."""
    if isinstance(item, Refusal):
        if item.reason in FAULTS or item.reason != item.reason.lower() or len(item.reason) > 60:
            raise BrokenLawError(f"refused as {item.reason!r}: {item.detail} ({item.origin})")
        if not item.origin:
            raise BrokenLawError(f"refused without an origin: {item}")
        refusal_line(item)
        return
    if not isinstance(item, Document):
        raise BrokenLawError(f"neither document nor refusal: {type(item)}")
    row = msgspec.json.decode(to_line(item))
    if row["meta"]["id"] != item.id or row["meta"]["pile_set_name"] != source.name:
        raise BrokenLawError(f"meta that hides the document's own id or name: {item.meta}")
    if row["text"] != item.text or not item.text.strip() or "\x00" in item.text:
        raise BrokenLawError(f"a text that does not survive writing: {item.text[:80]!r}")
    if item.source != source.name or not item.id or not item.meta.get("origin") or not item.meta.get("licence"):
        raise BrokenLawError(f"a document without its name, id, origin or licence: {item.meta}")
