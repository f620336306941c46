"""`Widths`: the widths of one block of our `Transformer` on one rank, from which its cost lists follow."""

from __future__ import annotations

from piledriver.models.config import ModelConfig
from piledriver.models.model_size import mean_context
from piledriver.plan.blocks.operators import Kept, Operator, moved
from piledriver.plan.blocks.setting import BlockSetting

# Passes over memory of eager elementwise kernels, relative to fused ones.
_EAGER_PASSES = 2.9
# Windows run on a kernel that takes a mask by blocks of this size, slower than the causal one.
_MASK_BLOCK, _WINDOW_COST = 128, 2.5


class Widths:
    """One block on one rank: widths in elements per token, after tp."""

    def __init__(self, config: ModelConfig, window: int | None, setting: BlockSetting, *, experts: bool = True) -> None:
        self.config, self.setting = config, setting
        self.tokens, self.size = setting.tokens, setting.itemsize
        tp = setting.tp
        self.dim = config.dim
        self.stream = config.dim / (tp if setting.sequence_parallel else 1)
        """Width of the residual stream in units of whole tokens: 1 / tp of the sequence."""
        self.moe = config.moe if experts else None
        self.heads = config.heads / tp
        self.q = config.heads * config.head_dim / tp
        self.kv = config.kv_heads * config.head_dim / tp
        self.attended = config.heads * config.value_dim / tp
        """Width of the output of attention."""
        self.inner = (config.mlp_dim if self.moe is None else self.moe.expert_dim) / tp
        self.shared = 0.0 if self.moe is None else self.moe.shared_dim / tp
        """Width of the shared expert."""
        self.gated = config.mlp == "gated"
        traits = setting.traits
        self.context = mean_context(setting.length, window) if traits.causal else float(setting.length)
        windowed = window is not None and window < setting.length and traits.name == "piledriver"
        self.mask_cost = _WINDOW_COST * (1 + _MASK_BLOCK / (window or 1)) if windowed else 1.0
        """Time of attention with a window, relative to the products of a causal kernel that skips what is masked."""
        self.eager = not setting.compiled and traits.name in ("piledriver", "torchtitan")
        self.passes = traits.memory_passes * (_EAGER_PASSES if self.eager else 1.0)

    @property
    def fuses_gate(self) -> bool:
        """Whether the gated MLP keeps its inputs only. tp hooks its second product, which unfuses it."""
        fused = self.setting.traits.fused_gate and self.gated and self.config.activation == "silu"
        return fused and not self.config.mlp_bias and self.setting.tp == 1

    @property
    def expert_rows(self) -> float:
        """Rows that the experts of this rank compute, padding included."""
        moe, capacity = self.moe, self.setting.expert_capacity
        assert moe is not None
        even = self.tokens * moe.experts_per_token
        if self.setting.ep > 1:
            return even * (capacity or 1.0)
        return even + 16 * (moe.experts + 1)

    @property
    def attention_matrices(self) -> dict[str, tuple[float, float]]:
        """Rows and columns of the matrices of attention on this rank."""
        latent = self.config.latent
        if latent is None:
            return {"qkv": (self.q + 2 * self.kv, self.dim), "out": (self.dim, self.attended)}
        found: dict[str, tuple[float, float]] = {}
        if latent.q_rank is not None:
            found["query latent"] = (latent.q_rank, self.dim)
        found["queries"] = (self.q, latent.q_rank or self.dim)
        found["key-value latent"] = (latent.kv_rank + latent.rope_dim, self.dim)
        found["keys and values"] = (self.q + self.attended - self.heads * latent.rope_dim, latent.kv_rank)
        found["out"] = (self.dim, self.attended)
        return found

    @property
    def attention_parameters(self) -> float:
        """Elements of the matrices of attention on this rank."""
        return sum(rows * columns for rows, columns in self.attention_matrices.values())

    @property
    def mlp_parameters(self) -> float:
        """Elements of the matrices of the MLP or of the experts and the shared expert on this rank."""
        experts = 1.0 if self.moe is None else self.moe.experts / self.setting.ep
        return (experts * self.inner + self.shared) * self.dim * (3 if self.gated else 2)

    def move(self, name: str, elements: float) -> Operator:
        """Return a kernel that moves this many elements per token."""
        return moved(name, elements * self.tokens * self.size * self.passes)

    def keep(self, name: str, width: float, size: float | None = None) -> Kept:
        """Return a kept tensor of this width per token."""
        return Kept(name, width * self.tokens * (self.size if size is None else size))

    def norm_input(self, name: str) -> Kept:
        """Return the kept input of a norm. Eager norms with fp32 weights cast it, and keep the cast."""
        casts = not self.setting.compiled and self.setting.precision not in ("fp32", "bf16-pure", "fp8-pure")
        casts = casts and self.config.norm_weight and not self.setting.gathered
        return self.keep(name, self.stream, 4 if casts else None)

    def linear_input(self, name: str, width: float | None = None, *, fp8: bool = False) -> list[Kept]:
        """Return the kept input of a projection: 1 byte an element for one in fp8, which keeps its columns.

        Compiled blocks with `recompute_norms` compute it again.
        """
        if self.setting.recompute_norms and not self.setting.sequence_parallel:
            return []
        return [self.keep(name, self.dim if width is None else width, 1 if fp8 else None)]

    def kept_weights(self, name: str, elements: float, fp8: float) -> list[Kept]:
        """Return the kept casts of weights: those of fp8 products by columns, of others in the compute dtype.

        The partitioner too prefers to keep a cast: it is smaller than the weight.
        """
        found = self.fp8_weights(name, fp8)
        if self.setting.casts and elements > fp8:
            found.append(Kept(f"{name} in the compute dtype", (elements - fp8) * self.size))
        return found

    def fp8_weights(self, name: str, elements: float) -> list[Kept]:
        """Return the kept columns of weights that are multiplied in fp8."""
        ours = self.setting.traits.name == "piledriver"
        if not elements or not ours or self.setting.precision == "fp8-rowwise":
            return []
        return [Kept(f"{name} in fp8", elements)]
