"""What every test on a GPU shares: its marks, and warnings of the compiler's that are not ours to mend.

The suite turns warnings into errors. Several of these are given once a process only, so whichever test came first
would fail and the same one with another parameter pass.
"""

from __future__ import annotations

import pytest
import torch

ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings(
        # What inductor imports, and how Python 3.12 sees the processes that it compiles in.
        "ignore:.torch.jit.script",
        "ignore:.*use of fork",
        # fp32 is compared with fp32 here.
        "ignore:TensorFloat32 tensor cores",
        # The first product of a thread that autograd started.
        "ignore:Attempting to run cuBLAS",
        # dynamo looks at the gradients of everything it guards.
        "ignore:The .grad attribute of a Tensor that is not a leaf",
    ),
]
