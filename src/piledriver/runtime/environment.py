"""Environment variables: how they are spelled, read, and changed for a while.

This room is the only reader of the environment. Everything that it decides from is named here, so that `piledriver env`
can show it and nothing else has to look.
"""

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

# What Accelerate's launcher and its users set; read second, so that a job script written for it keeps its meaning.
_ALSO = {
    DEVICE: "ACCELERATE_TORCH_DEVICE",
    MIXED_PRECISION: "ACCELERATE_MIXED_PRECISION",
    ACCUMULATION_STEPS: "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    DEBUG: "ACCELERATE_DEBUG_MODE",
}

_TRUE = frozenset({"y", "yes", "t", "true", "on", "1"})
_FALSE = frozenset({"n", "no", "f", "false", "off", "0", ""})


def read(name: str, environ: Mapping[str, str] | None = None) -> tuple[str, str] | None:
    """The value of one of our variables and the name under which it was found, or None.

    >>> read(DEVICE, {"ACCELERATE_TORCH_DEVICE": "cuda:1"})
    ('cuda:1', 'ACCELERATE_TORCH_DEVICE')
    """
    environ = os.environ if environ is None else environ
    for spelled in (name, _ALSO.get(name, name)):
        if environ.get(spelled):
            return environ[spelled], spelled
    return None


def flag(name: str, environ: Mapping[str, str] | None = None) -> bool:
    """Whether a switch is on: yes, true, on, 1 (in any case)."""
    found = read(name, environ)
    return found is not None and truth(found[0], found[1])


def truth(text: str, name: str = "the value") -> bool:
    """Read a switch.

    >>> truth("Yes"), truth("off")
    (True, False)
    """
    lowered = text.strip().lower()
    if lowered in _TRUE:
        return True
    if lowered in _FALSE:
        return False
    raise WorldError(f"{name} is {text!r}", fix="set it to true or false")


def whole_number(environ: Mapping[str, str], name: str) -> int | None:
    """The integer in a variable, or None where it is not set; anything else is an error that names the variable."""
    text = environ.get(name)
    if text is None or not text.strip():
        return None
    try:
        return int(text)
    except ValueError:
        raise WorldError(f"{name} is {text!r}", fix="it must be a whole number; unset it to run alone") from None


@contextmanager
def patched(**variables: object) -> Iterator[None]:
    """Set variables for the length of a `with` block (names in upper case); what was there before comes back.

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
        _put_back(before)


@contextmanager
def cleared() -> Iterator[None]:
    """An empty environment for the length of a `with` block."""
    before = dict(os.environ)
    os.environ.clear()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def snapshot() -> dict[str, str]:
    """A copy of the environment: what a pure function from environment to something is given."""
    return dict(os.environ)


def update(variables: Mapping[str, str]) -> None:
    """Set variables for this process and those that it starts."""
    os.environ.update(variables)


def remove(names: Iterable[str]) -> None:
    """Unset variables for this process and those that it starts."""
    for name in names:
        os.environ.pop(name, None)


def _put_back(before: Mapping[str, str | None]) -> None:
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
