"""Compile the C kernels for this machine, once, and load them.

They run in the OpenMP threads of torch, whose runtime resolves their symbols: a second runtime would have threads of
its own, which spin on the same cores. Where no C compiler is found, or anything fails, other kernels run.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from piledriver.kernels.native.steps import (
    CHUNK,
    MOST_QUERY,
    WIDEST,
    AttentionStep,
    DecodeStep,
    LinearStep,
    WeightAddress,
)

_FLAGS = (
    # No product is fused with a sum by the compiler's choice, which differs between loops: see `add_product`.
    *("-O2", "-march=native", "-ffp-contract=off", "-fopenmp", "-fPIC"),
    *(f"-DCHUNK={CHUNK}", f"-DMOST_QUERY={MOST_QUERY}", f"-DWIDEST={WIDEST}"),
)
_HERE = Path(__file__).parent
_SECONDS = 60


@functools.cache
def native_library() -> ctypes.CDLL | None:
    """Return the compiled kernels, or None where they cannot be compiled or loaded."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None or not sys.platform.startswith("linux"):
        return None
    name = f"{_fingerprint(compiler)}.so"
    for folder in _folders():
        with suppress(OSError, subprocess.SubprocessError):
            if not (folder / name).exists():
                _compile(compiler, folder / name)
            return _declared(ctypes.CDLL(str(folder / name)))
    return None


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    """Declare the functions of a library."""
    for name, step in (("linear", LinearStep), ("attend", AttentionStep), ("decode", DecodeStep)):
        function = library[f"piledriver_{name}"]
        function.argtypes, function.restype = [ctypes.POINTER(step)], None
        setattr(library, f"piledriver_{name}", function)
    library.piledriver_dequantise.argtypes = [
        *(ctypes.POINTER(WeightAddress), ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int)
    ]
    library.piledriver_dequantise.restype = None
    library.piledriver_rotate_and_store.argtypes = [ctypes.c_void_p] * 7 + [ctypes.c_int64] * 6 + [ctypes.c_int]
    library.piledriver_rotate_and_store.restype = None
    library.piledriver_gate.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_int64] * 3 + [ctypes.c_int]
    library.piledriver_gate.restype = None
    return library


def _compile(compiler: str, target: Path) -> None:
    """Compile to a file that appears whole: several processes may do so at once."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        run = functools.partial(
            subprocess.run,
            check=True,
            cwd=scratch,
            timeout=_SECONDS,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        run([compiler, *_FLAGS, "-c", *map(str, _sources(".c"))])
        # Linked without OpenMP's runtime: torch has loaded one for all libraries of the process.
        run([compiler, "-shared", "-o", "kernels.so", *(f"{source.stem}.o" for source in _sources(".c"))])
        (Path(scratch) / "kernels.so").replace(target)


def _sources(*suffixes: str) -> list[Path]:
    return sorted(path for path in _HERE.iterdir() if path.suffix in suffixes)


def _fingerprint(compiler: str) -> str:
    """Return a name for what is compiled, by what, and for which processor."""
    parts = [path.read_bytes() for path in _sources(".c", ".h")]
    parts += [" ".join(_FLAGS).encode(), os.path.realpath(compiler).encode(), _processor()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _processor() -> bytes:
    """Return the first lines of /proc/cpuinfo that name the features of the processor."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
        return b"\n".join(
            dict.fromkeys(line for line in lines if line.startswith((b"flags", b"Features", b"model name")))
        )
    return b""


def _folders() -> Iterator[Path]:
    """Yield where the library may be: a cache in the home folder, else a folder of this process."""
    with suppress(RuntimeError):
        yield Path.home() / ".cache" / "piledriver" / "kernels"
    with tempfile.TemporaryDirectory() as scratch:
        yield Path(scratch)
