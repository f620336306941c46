"""A transformer block and a decoder: RMS norm, rotary positions, grouped-query attention, gated MLP, tied output.

Parameters and activations carry logical axis names (`embed`, `mlp`, `heads`, `kv_heads`, `vocab`, `batch`, `length`),
so that one rules table shards the whole model (see `partitioning`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from piledriver.functional.frame import Initialiser
from piledriver.functional.initialisers import scaled_normal
from piledriver.functional.layers.attention import Implementation, MultiHeadAttention
from piledriver.functional.layers.dropout import Dropout
from piledriver.functional.layers.embed import Embed
from piledriver.functional.layers.linear import Dense, DenseParameters, promoted
from piledriver.functional.layers.norm import RMSNorm
from piledriver.functional.layers.positions import first_rotary_tables, rotary_tables
from piledriver.functional.module import Module
from piledriver.functional.transforms.lift import Remat, Scanned
from piledriver.functional.transforms.tracing import only_autograd_surrounds
from piledriver.kernels.gated_mlp import can_fuse, gated_linear

_NORMAL = scaled_normal(0.02)


class GatedMLP(Module):
    """`down(silu(gate(x)) * up(x))` (Shazeer, 2020)."""

    hidden: int
    fuse_projections: bool = False
    dtype: torch.dtype | None = None
    param_dtype: torch.dtype = torch.float32
    kernel_init: Initialiser = _NORMAL

    def __call__(self, x: Tensor) -> Tensor:
        axes = ("embed", "mlp")
        width = x.shape[-1]
        if self.fuse_projections:
            outer = DenseParameters(self.hidden, self.param_dtype, self.kernel_init, kernel_axes=axes)
            kernels = [self.child(name, outer)(width)[0] for name in ("gate", "up")]
            x, *kernels = promoted(self.dtype, x, *kernels)
            gate_up = torch.matmul(x, torch.cat(kernels, dim=1))
            if _kernels_take(gate_up):
                inner = DenseParameters(width, self.param_dtype, self.kernel_init, kernel_axes=("mlp", "embed"))
                gate_up, kernel = promoted(self.dtype, gate_up, self.child("down", inner)(self.hidden)[0])
                return gated_linear(gate_up, kernel.t(), self.hidden)
            gate, up = gate_up.chunk(2, dim=-1)
        else:
            layer = Dense(self.hidden, False, self.dtype, self.param_dtype, self.kernel_init, kernel_axes=axes)
            gate, up = self.child("gate", layer)(x), self.child("up", layer)(x)
        hidden = self.constrain(F.silu(gate) * up, ("batch", "length", "mlp"))
        down = Dense(width, False, self.dtype, self.param_dtype, self.kernel_init, kernel_axes=("mlp", "embed"))
        return self.child("down", down)(hidden)


def _kernels_take(gate_up: Tensor) -> bool:
    is_sharded = hasattr(gate_up, "placements")
    return can_fuse(gate_up, "silu") and not is_sharded and only_autograd_surrounds()


class TransformerBlock(Module):
    """Attention and a gated MLP, each behind a norm and added to the stream."""

    heads: int
    mlp_dim: int
    kv_heads: int | None = None
    head_dim: int | None = None
    rotary_base: float | None = 10000.0
    norm_epsilon: float = 1e-5
    dropout_rate: float = 0.0
    causal: bool = True
    decode: bool = False
    max_length: int = 0
    fuse_projections: bool = False
    implementation: Implementation = "auto"
    dtype: torch.dtype | None = None
    param_dtype: torch.dtype = torch.float32
    kernel_init: Initialiser = _NORMAL

    def __call__(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        rotary: tuple[Tensor, Tensor] | None = None,
        deterministic: bool = True,
    ) -> Tensor:
        norm = RMSNorm(self.norm_epsilon, dtype=self.dtype, param_dtype=self.param_dtype, axes=("embed",))
        attention = MultiHeadAttention(
            self.heads,
            self.kv_heads,
            self.head_dim,
            use_bias=False,
            causal=self.causal,
            rotary_base=self.rotary_base,
            dropout_rate=self.dropout_rate,
            decode=self.decode,
            max_length=self.max_length,
            fuse_projections=self.fuse_projections,
            implementation=self.implementation,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            kernel_init=self.kernel_init,
        )
        mlp = GatedMLP(self.mlp_dim, self.fuse_projections, self.dtype, self.param_dtype, self.kernel_init)
        attended = self.child("attention", attention)(
            self.child("attention_norm", norm)(x),
            mask=mask,
            positions=positions,
            rotary=rotary,
            deterministic=deterministic,
        )
        if self.dropout_rate and not deterministic:
            attended = self.child("attention_dropout", Dropout(self.dropout_rate, deterministic=False))(attended)
        x = self.constrain(x + attended, ("batch", "length", "embed"))
        mapped = self.child("mlp", mlp)(self.child("mlp_norm", norm)(x))
        if self.dropout_rate and not deterministic:
            mapped = self.child("mlp_dropout", Dropout(self.dropout_rate, deterministic=False))(mapped)
        return self.constrain(x + mapped, ("batch", "length", "embed"))


class Decoder(Module):
    """A causal language model: tokens (batch, length) to logits (batch, length, vocab).

    `scan` stacks the layers' parameters in one tensor each; `remat` recomputes each block in the backward pass.
    """

    vocab_size: int
    dim: int
    depth: int
    heads: int
    mlp_dim: int
    kv_heads: int | None = None
    head_dim: int | None = None
    rotary_base: float = 10000.0
    norm_epsilon: float = 1e-5
    dropout_rate: float = 0.0
    tie_embeddings: bool = True
    decode: bool = False
    max_length: int = 0
    scan: bool = False
    remat: bool = False
    fuse_projections: bool = False
    implementation: Implementation = "auto"
    dtype: torch.dtype | None = None
    param_dtype: torch.dtype = torch.float32
    kernel_init: Initialiser = _NORMAL

    def __call__(
        self,
        tokens: Tensor,
        *,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        deterministic: bool = True,
        features_only: bool = False,
    ) -> Tensor:
        """Return logits; with `features_only` the normed stream, for a loss that computes logits in chunks."""
        embed = self.child(
            "embed",
            Embed(self.vocab_size, self.dim, self.dtype, self.param_dtype, self.kernel_init, ("vocab", "embed")),
        )
        x = self.constrain(embed(tokens), ("batch", "length", "embed"))
        block = self._block()
        # Computed once for all blocks; when decoding, each block reads its position from its cache.
        head_dim = self.head_dim or self.dim // self.heads
        rotary = None
        if positions is not None:
            rotary = rotary_tables(positions, head_dim, self.rotary_base)
        elif not self.decode:
            rotary = first_rotary_tables(tokens.shape[-1], head_dim, self.rotary_base, tokens.device)
        shared = {"mask": mask, "positions": positions, "rotary": rotary, "deterministic": deterministic}
        if self.scan:
            x = self.child("layers", Scanned(block, self.depth))(x, **shared)
        else:
            for i in range(self.depth):
                x = self.child(f"layers_{i}", block)(x, **shared)
        norm = RMSNorm(self.norm_epsilon, dtype=self.dtype, param_dtype=self.param_dtype, axes=("embed",))
        x = self.child("norm", norm)(x)
        if features_only:
            return x
        if self.tie_embeddings:
            return embed.attend(x)
        axes = ("embed", "vocab")
        head = Dense(self.vocab_size, False, self.dtype, self.param_dtype, self.kernel_init, kernel_axes=axes)
        return self.child("head", head)(x)

    def _block(self) -> Module:
        block = TransformerBlock(**{name: getattr(self, name) for name in TransformerBlock._fields if name != "causal"})
        return Remat(block) if self.remat else block


def cross_entropy(logits: Tensor, targets: Tensor, ignore: int = -100) -> Tensor:
    """Return the mean cross-entropy in fp32 over the targets that are not `ignore`."""
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten(), ignore_index=ignore)
