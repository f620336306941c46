"""Families of `transformers` checkpoints as data: one YAML file each, named after its `model_type`."""

from piledriver.models.interchange.families.registry import (
    FAMILIES,
    Family,
    UnknownFamilyError,
    family,
    family_names,
    family_of,
    variants_of,
    with_defaults,
)

__all__ = [
    "FAMILIES",
    "Family",
    "UnknownFamilyError",
    "family",
    "family_names",
    "family_of",
    "variants_of",
    "with_defaults",
]
