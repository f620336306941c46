"""`compress.report`: compare models in size, bits per byte, speed and error of their layers.

- `compare`: measure; `page`: one self-contained HTML page
"""

from __future__ import annotations

from piledriver.compress.comparison.compare import compare_models, stored_bytes

__all__ = ["compare_models", "stored_bytes"]
