"""Floor 3: save, load, reshard, asynchronous save, rotation, format conversion. See docs/checkpoint.md."""

from piledriver.checkpoint.checkpointer import Checkpointer, load, save
from piledriver.checkpoint.contents import Contents
from piledriver.checkpoint.folder_kinds import is_accelerate_folder
from piledriver.checkpoint.folders import checkpoints, folder_for, latest, next_number, rotate_checkpoints
from piledriver.checkpoint.formats.convert import convert
from piledriver.checkpoint.formats.huggingface import load_model, save_model
from piledriver.checkpoint.formats.merge import merge
from piledriver.checkpoint.header import Header, is_complete, read_header, verify
from piledriver.checkpoint.loading.report import LoadReport

__all__ = [
    "Checkpointer",
    "Contents",
    "Header",
    "LoadReport",
    "checkpoints",
    "convert",
    "folder_for",
    "is_accelerate_folder",
    "is_complete",
    "latest",
    "load",
    "load_model",
    "merge",
    "next_number",
    "read_header",
    "rotate_checkpoints",
    "save",
    "save_model",
    "verify",
]
