"""`accelerate.commands.config`: where the launch config is, and what it says."""

from __future__ import annotations

from typing import Any

from piledriver.core.config import to_mapping
from piledriver.runtime.launch.config import LaunchConfig, default_path, resolve_launch_config

default_config_file = str(default_path())


class _LoadedConfig:
    def __init__(self, config: LaunchConfig) -> None:
        self.__dict__.update(to_mapping(config))

    def to_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)


def load_config_from_file(config_file: str | None) -> Any:
    """Return the launch config of a file, ours or Accelerate's, with a method `to_dict`."""
    return _LoadedConfig(resolve_launch_config(config_file, {})[0])
