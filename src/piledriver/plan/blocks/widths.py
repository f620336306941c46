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
        self.products = setting.matmul_precision
        traits = setting.traits
        self.context = mean_context(setting.length, window) if traits.causal else float(setting.length)
        windowed = window is not None and window < setting.length and traits.name == "piledriver"
        self.mask_cost = _WINDOW_COST * (1 + _MASK_BLOCK / (window or 1)) if windowed else 1.0
        """Time of attention with a window, relative to the products of a causal kernel that skips what is masked."""
        self.eager = not setting.compiled and traits.name == "piledriver"
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
    def attention_parameters(self) -> float:
        """Elements of the matrices of attention on this rank."""
        latent = self.config.latent
        if latent is None:
            return (self.q + 2 * self.kv) * self.dim + self.attended * self.dim
        into = (latent.q_rank or 0) + latent.kv_rank + latent.rope_dim
        expanded = self.q + self.attended - self.heads * latent.rope_dim
        heads = self.q * (latent.q_rank or self.dim) + expanded * latent.kv_rank
        return into * self.dim + heads + self.attended * self.dim

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

    def linear_input(self, name: str, width: float | None = None) -> list[Kept]:
        """Return the kept input of a projection. Compiled blocks with `recompute_norms` compute it again."""
        if self.setting.recompute_norms and not self.setting.sequence_parallel:
            return []
        return [self.keep(name, self.dim if width is None else width, 1 if self.is_fp8 else None)]

    @property
    def is_fp8(self) -> bool:
        """Whether the products of the block are in fp8."""
        return self.setting.precision.startswith("fp8")
