"""Checkpoint folders of `transformers`: read, write, convert configs and weights. Families are data."""

from piledriver.models.interchange.config_json import read_config, write_config
from piledriver.models.interchange.errors import InterchangeError
from piledriver.models.interchange.folder.copy_files import copy_model_files
from piledriver.models.interchange.folder.load import (
    allocate_folder,
    load_folder,
    load_weights,
    read_folder_config,
    read_generation,
    stored_dtype,
)
from piledriver.models.interchange.folder.save import layers_kept_dense, save_folder
from piledriver.models.interchange.folder.weights import read_weights, stored_parts

__all__ = [
    "InterchangeError",
    "allocate_folder",
    "copy_model_files",
    "layers_kept_dense",
    "load_folder",
    "load_weights",
    "read_config",
    "read_folder_config",
    "read_generation",
    "read_weights",
    "save_folder",
    "stored_dtype",
    "stored_parts",
    "write_config",
]
