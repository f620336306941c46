"""Print the keys of a config: `piledriver train --keys`, `piledriver corpus build --keys`."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import sys
import textwrap
from collections.abc import Callable, Iterable
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from piledriver.core.config.keys import ConfigKey


def run_keys(target: str) -> Callable[[argparse.Namespace], None]:
    """Return the function that prints the keys of the config class `module:name`."""

    def run(args: argparse.Namespace) -> None:
        from piledriver.core.config.keys import config_keys

        module, _, name = target.partition(":")
        keys = config_keys(getattr(importlib.import_module(module), name))
        print(json.dumps([dataclasses.asdict(key) for key in keys], indent=2) if args.json else keys_text(keys))

    return run


def keys_text(keys: Iterable[ConfigKey], indent: str = "") -> str:
    """Return one line per key with type and default, and its help below; wrapped on a terminal only."""
    width = get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
    lines = []
    for key in keys:
        default = "  (required)" if key.required else f" = {shown_value(key.default)}"
        lines.append(f"{indent}{key.name}: {shown_type(key)}{default}")
        lines += textwrap.wrap(key.help, width, initial_indent=f"{indent}    ", subsequent_indent=f"{indent}    ")
    return "\n".join(lines)


def shown_type(key: ConfigKey) -> str:
    """Return a key's type, with the allowed values of one whose type does not list them."""
    listed = all(repr(choice) in key.type or str(choice).lower() in key.type for choice in key.choices)
    return key.type if listed else f"{key.type} ({', '.join(map(str, key.choices))})"


def shown_value(value: Any) -> str:
    """Return a default as it would stand in a YAML file, on one line."""
    import yaml

    text = yaml.safe_dump(value, default_flow_style=True, width=sys.maxsize, sort_keys=False, allow_unicode=True)
    return str(text).removesuffix("\n...\n").strip()
