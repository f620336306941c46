"""`accelerate.utils.versions`."""

from __future__ import annotations

import operator
from collections.abc import Callable
from importlib import metadata
from typing import Any

STR_OPERATION_TO_FUNC: dict[str, Callable[[Any, Any], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    "<": operator.lt,
}


def compare_versions(library_or_version: Any, operation: str, requirement_version: str) -> bool:
    """Return whether a version, or that of an installed library, satisfies the comparison."""
    from packaging.version import Version, parse

    if operation not in STR_OPERATION_TO_FUNC:
        raise ValueError(f"`operation` must be one of {list(STR_OPERATION_TO_FUNC)}, received {operation}")
    if isinstance(library_or_version, str):
        library_or_version = parse(metadata.version(library_or_version))
    version = library_or_version if isinstance(library_or_version, Version) else parse(str(library_or_version))
    return STR_OPERATION_TO_FUNC[operation](version, parse(requirement_version))


def is_torch_version(operation: str, version: str) -> bool:
    """Return whether torch's version, without a build suffix, satisfies the comparison."""
    import torch
    from packaging.version import parse

    return compare_versions(parse(parse(torch.__version__).base_version), operation, version)
