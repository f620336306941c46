"""Every use of torch's private API in this folder, so that an upgrade of torch is checked in one file."""

from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

__all__ = [
    "FakeTensorMode",
    "TorchDispatchMode",
    "aot_function",
    "make_boxed_func",
    "min_cut_rematerialization_partition",
    "tree_flatten",
    "tree_leaves",
    "tree_unflatten",
]
