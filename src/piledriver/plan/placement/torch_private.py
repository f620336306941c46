"""Every use of torch's private API in this folder, so that an upgrade of torch is checked in one file.

Nothing here imports torch's compiler, which takes seconds: `import piledriver.serve.placement` comes this way.
"""

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["FakeTensorMode", "TorchDispatchMode"]
