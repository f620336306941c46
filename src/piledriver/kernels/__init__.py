"""Kernels: the operations that decide how fast a model trains, each as a reference beside its faster implementations.

Every folder is one operation. `reference.py` holds the formula in plain torch; it runs on every device, and tests
compare the others with it. `triton.py` or a file named after the implementation holds a faster kernel. The folder's
`__init__.py` says which one runs when. `registry.py` lists all of them.
"""

from piledriver.kernels.registry import KERNELS, Kernel, ops_to_save

__all__ = ["KERNELS", "Kernel", "ops_to_save"]
