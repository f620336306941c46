"""Checkpoint folders of `transformers`: config.json and safetensors, one file or sharded. Pickle is never read."""

from piledriver.models.interchange.folder.copy_files import copy_model_files
from piledriver.models.interchange.folder.load import (
    load_folder,
    load_weights,
    read_folder_config,
    read_generation,
    stored_dtype,
)
from piledriver.models.interchange.folder.save import save_folder
from piledriver.models.interchange.folder.weights import read_weights, stored_parts

__all__ = [
    "copy_model_files",
    "load_folder",
    "load_weights",
    "read_folder_config",
    "read_generation",
    "read_weights",
    "save_folder",
    "stored_dtype",
    "stored_parts",
]
