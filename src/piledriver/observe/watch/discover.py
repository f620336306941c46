"""Find run folders below the folders that a user names."""

from __future__ import annotations

import os

METRICS = "metrics.jsonl"
_MARKS = frozenset({METRICS, "resolved.yaml"})
_DEPTH = 4
_MOST_FOLDERS = 50_000
_MOST_RUNS = 10_000
# Parts of runs and of corpora, never runs themselves.
_NEVER = frozenset({"checkpoints", "tokens", "model", "ranks", "tensorboard", "plots", "node_modules", "__pycache__"})


def find_runs(roots: list[str]) -> tuple[dict[str, str], dict[str, int]]:
    """Return {path of a run: its name} below the roots, and {folder searched: its time of change}.

    A folder with `metrics.jsonl` or `resolved.yaml` is a run; what is inside a run is not searched. Symbolic links are
    not followed, except for a root itself. A name is the path below its root, or the root's own name.
    """
    runs: dict[str, str] = {}
    searched: dict[str, int] = {}
    for root in roots:
        top = os.path.realpath(root)
        waiting = [(top, 0)]
        while waiting and len(searched) < _MOST_FOLDERS and len(runs) < _MOST_RUNS:
            folder, depth = waiting.pop()
            try:
                searched[folder] = os.stat(folder).st_mtime_ns
                with os.scandir(folder) as listing:
                    entries = list(listing)
            except OSError:
                continue
            if any(entry.name in _MARKS and entry.is_file(follow_symlinks=False) for entry in entries):
                del searched[folder]
                name = os.path.relpath(folder, top) if folder != top else os.path.basename(top)
                runs.setdefault(folder, name.replace(os.sep, "/"))
                continue
            if depth < _DEPTH:
                waiting += [
                    (entry.path, depth + 1)
                    for entry in entries
                    if entry.name not in _NEVER
                    and not entry.name.startswith(".")
                    and entry.is_dir(follow_symlinks=False)
                ]
    return runs, searched


def changed(searched: dict[str, int]) -> bool:
    """Return whether a searched folder has changed, so that there may be another run."""
    for folder, before in searched.items():
        try:
            if os.stat(folder).st_mtime_ns != before:
                return True
        except OSError:
            return True
    return False
