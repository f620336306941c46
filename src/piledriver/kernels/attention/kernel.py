"""Attention kernels: classes that compute softmax(q k^T) v and declare which masks and scores they support."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, cast

import torch
from torch import Tensor

from piledriver.core.errors import UsageError
from piledriver.core.registry import Registry
from piledriver.kernels.registry import KERNELS, Kernel

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

MaskForm = Literal["dense", "boundaries", "block"]


class Mask(NamedTuple):
    """At most one of a dense tensor, document boundaries and a block mask; an empty mask is plain causal attention."""

    dense: Tensor | None = None
    """Boolean (True where a query may attend) or additive, broadcastable to [batch, heads, queries, keys]."""
    boundaries: Tensor | None = None
    """[documents + 1] int32: where each document begins in the flattened batch, then its end, repeated as padding."""
    block: BlockMask | None = None
    """The block mask of flex attention."""
    kernel: AttentionKernel | None = None
    """The kernel that was chosen by name; None for the built-in one of this form."""


class AttentionKernel(Kernel):
    """Base class of attention kernels.

    A subclass sets the attributes and implements `__call__`; one that sets `log_sum_exp` also implements
    `with_log_sum_exp` and `backward`. Register it in `kernels/registry.py`, or in another package through the
    entry-point group `piledriver.attention_kernel`, and choose it by name: `make_masks(..., kernel="name")`.
    """

    mask_form: ClassVar[MaskForm] = "dense"
    """The form of mask that it reads. A kernel that reads dense masks also takes the empty one."""
    documents: ClassVar[bool] = True
    """Whether a row may hold several documents that do not attend to each other."""
    window: ClassVar[bool] = True
    """Whether a sliding window is supported (in the mask, or as the argument `window`)."""
    alibi: ClassVar[bool] = True
    """Whether ALiBi is supported (in the mask, or as the argument `slopes`)."""
    softcap: ClassVar[bool] = True
    """Whether cap * tanh(score / cap) is supported."""
    sinks: ClassVar[bool] = False
    """Whether attention sinks are supported: a score per head in the softmax that attends to nothing."""
    log_sum_exp: ClassVar[bool] = False
    """Whether it returns the log-sum-exp of the scores, which ring attention needs."""
    dtypes: ClassVar[frozenset[torch.dtype] | None] = None
    """Dtypes that it computes in; None for all."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        slopes: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Return [batch, heads, queries, head_dim]; k and v may have fewer heads, each shared by several queries.

        `window` and `slopes` ([heads]) repeat what a dense mask contains, for kernels that read other forms. `sinks`
        ([heads]) is passed to kernels that support it, where a model has them.
        """
        raise NotImplementedError

    def with_log_sum_exp(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """Return the output and the log-sum-exp of each query's scores ([batch, heads, queries], fp32)."""
        raise NotImplementedError

    def backward(
        self, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v, given the output and log-sum-exp over all keys."""
        raise NotImplementedError

    @classmethod
    def missing(cls, *, documents: bool, window: bool, alibi: bool, softcap: bool, sinks: bool = False) -> list[str]:
        """Return which of the features that are needed the kernel lacks."""
        needed = {
            "documents": documents,
            "a sliding window": window,
            "ALiBi": alibi,
            "soft-capping": softcap,
            "attention sinks": sinks,
        }
        has = (cls.documents, cls.window, cls.alibi, cls.softcap, cls.sinks)
        return [name for (name, need), there in zip(needed.items(), has, strict=True) if need and not there]


ATTENTION = cast(Registry[type[AttentionKernel]], KERNELS["attention"])
"""The attention kernels by name."""


def attention_kernel(name: str) -> AttentionKernel:
    """Return an instance of a registered attention kernel, built-in or of another package."""
    kernel = ATTENTION[name]
    if not (isinstance(kernel, type) and issubclass(kernel, AttentionKernel)):
        raise UsageError(
            f"attention kernel {name!r} is {kernel!r}", fix="register a subclass of piledriver.kernels.AttentionKernel"
        )
    return kernel()
