from __future__ import annotations

import io
import os
import pty
import subprocess
import sys

import pytest

from piledriver.core.progress import progress, track


def test_a_log_gets_whole_lines_and_a_last_word() -> None:
    stream = io.StringIO()
    with progress("tokenise", total=3, unit="files", stream=stream, every_seconds=0) as bar:
        bar.note("a.txt")
        for _ in range(3):
            bar.advance()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 4
    assert lines[0].startswith("tokenise: 1 of 3 files (33%)")
    assert lines[-1].startswith("tokenise: 3 of 3 files (100%) in")
    assert "a.txt" in lines[-1]


def test_tracking_gives_every_item(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(track(range(5), "count", total=5)) == list(range(5))
    assert "count: 5 of 5" in capsys.readouterr().err


@pytest.mark.slow
def test_an_interrupted_bar_is_erased() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    with pytest.raises(KeyboardInterrupt), progress("read", total=2, stream=terminal) as bar:
        bar.advance()
        raise KeyboardInterrupt
    assert terminal.getvalue().endswith("\x1b[1A\x1b[2K"), "one line up, and erased"


def test_a_terminal_gets_a_live_bar() -> None:
    parent, child = pty.openpty()
    code = "from piledriver.core.progress import progress\nwith progress('build', total=2) as bar:\n  bar.advance(2)"
    subprocess.run([sys.executable, "-c", code], stderr=child, check=True)
    os.close(child)
    shown = os.read(parent, 65536).decode()
    assert "build" in shown
    assert "━" in shown
    assert "\x1b[" in shown
