"""The key of the scanner's compiled code in numba's cache: a checksum of every file it is compiled from.

numba invalidates cached code when the file of the entry function changes, but not when a file that it imports does. It
also adds the values of an entry's free variables to the key: each entry of this package closes over `CACHE_KEY`.
"""

from __future__ import annotations

import hashlib
from pathlib import Path


def checksum_of_files(paths: list[Path]) -> int:
    """Return a positive 62-bit checksum of the files' contents, in the order given."""
    digest = hashlib.blake2b(digest_size=8)
    for path in paths:
        content = path.read_bytes()
        digest.update(len(content).to_bytes(8, "little") + content)
    return int.from_bytes(digest.digest(), "little") >> 2 | 1


_HERE = Path(__file__).parent
# `scripts` of the tree holds a table that the scanner shares.
CACHE_KEY = checksum_of_files([*sorted(_HERE.glob("*.py")), _HERE.parent / "scripts.py"])
