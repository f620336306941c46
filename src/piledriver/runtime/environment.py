"""Environment variables: names, parsing, and temporary changes. Only this room reads the environment."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from piledriver.runtime.errors import WorldError

DEVICE = "PILEDRIVER_DEVICE"
MIXED_PRECISION = "PILEDRIVER_MIXED_PRECISION"
ACCUMULATION_STEPS = "PILEDRIVER_GRADIENT_ACCUMULATION_STEPS"
DEBUG = "PILEDRIVER_DEBUG"
RENDEZVOUS_FILE = "PILEDRIVER_RENDEZVOUS_FILE"

# Names of Accelerate, read second, so that job scripts written for it keep working.
_ACCELERATE_NAMES = {
    DEVICE: "ACCELERATE_TORCH_DEVICE",
    MIXED_PRECISION: "ACCELERATE_MIXED_PRECISION",
    ACCUMULATION_STEPS: "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    DEBUG: "ACCELERATE_DEBUG_MODE",
}

_TRUE = frozenset({"y", "yes", "t", "true", "on", "1"})
_FALSE = frozenset({"n", "no", "f", "false", "off", "0", ""})


def lookup(name: str, environ: Mapping[str, str] | None = None) -> tuple[str, str] | None:
    """Return the value of a variable and the name under which it was found, or None.

    >>> lookup(DEVICE, {"ACCELERATE_TORCH_DEVICE": "cuda:1"})
    ('cuda:1', 'ACCELERATE_TORCH_DEVICE')
    """
    environ = os.environ if environ is None else environ
    for spelled in (name, _ACCELERATE_NAMES.get(name, name)):
        if environ.get(spelled):
            return environ[spelled], spelled
    return None


def flag(name: str, environ: Mapping[str, str] | None = None) -> bool:
    """Return whether a boolean variable is true."""
    found = lookup(name, environ)
    return found is not None and parse_bool(found[0], found[1])


def parse_bool(text: str, name: str = "the value") -> bool:
    """Parse yes/no, true/false, on/off or 1/0, in any case.

    >>> parse_bool("Yes"), parse_bool("off")
    (True, False)
    """
    lowered = text.strip().lower()
    if lowered in _TRUE:
        return True
    if lowered in _FALSE:
        return False
    raise WorldError(f"{name} is {text!r}", fix="set it to true or false")


def integer(environ: Mapping[str, str], name: str) -> int | None:
    """Return the integer in a variable, or None if it is not set; raises `WorldError` for anything else."""
    text = environ.get(name)
    if text is None or not text.strip():
        return None
    try:
        return int(text)
    except ValueError:
        raise WorldError(f"{name} is {text!r}", fix="it must be an integer; unset it to run one process") from None


@contextmanager
def patched(**variables: object) -> Iterator[None]:
    """Set variables (names in upper case) inside a `with` block; restore the previous values after it.

    >>> with patched(pd_example=3):
    ...     os.environ["PD_EXAMPLE"]
    '3'
    >>> "PD_EXAMPLE" in os.environ
    False
    """
    wanted = {name.upper(): str(value) for name, value in variables.items() if value is not None}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        _restore(before)


@contextmanager
def cleared() -> Iterator[None]:
    """Clear the environment inside a `with` block."""
    before = dict(os.environ)
    os.environ.clear()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def snapshot() -> dict[str, str]:
    """Return a copy of the environment."""
    return dict(os.environ)


def update(variables: Mapping[str, str]) -> None:
    """Set variables for this process and its children."""
    os.environ.update(variables)


def unset(names: Iterable[str]) -> None:
    """Unset variables for this process and its children."""
    for name in names:
        os.environ.pop(name, None)


def _restore(before: Mapping[str, str | None]) -> None:
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
