"""Parse YAML to plain data, quickly."""

from __future__ import annotations

from typing import Any

import yaml


def load_yaml(text: str | bytes) -> Any:
    """Return the plain data of a YAML text; raises `yaml.YAMLError`.

    PyYAML's loader in C, which its wheels have, takes a twentieth of the time of its loader in Python.

    >>> load_yaml("heads: [2, 4]")
    {'heads': [2, 4]}
    """
    return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
