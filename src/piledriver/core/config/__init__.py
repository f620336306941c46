"""Config: frozen, keyword-only dataclasses from YAML and `key=value` overrides; `keys` lists their keys with help."""

from piledriver.core.config.build import build, from_mapping, load_config, save_config, to_mapping, to_yaml
from piledriver.core.config.plain_data import load_yaml

__all__ = ["build", "from_mapping", "load_config", "load_yaml", "save_config", "to_mapping", "to_yaml"]
