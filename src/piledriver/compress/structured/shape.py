"""The shape that structured pruning leaves."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from piledriver.core.errors import UsageError
from piledriver.models.config import ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmallerShape:
    """Sizes to keep; null keeps a size as it is.

    >>> config = ModelConfig(vocab_size=32, dim=16, layers=4, heads=4, kv_heads=2)
    >>> small = SmallerShape(layers=3, kv_heads=1, mlp_dim=48)
    >>> made = small.config_of(config, kept_layers=[0, 1, 3])
    >>> made.layers, made.heads, made.kv_heads, made.head_dim, made.mlp_dim
    (3, 2, 1, 4, 48)
    """

    layers: int | None = None
    """Blocks."""
    dim: int | None = None
    """Channels of the residual stream."""
    kv_heads: int | None = None
    """Key and value heads, each with the query heads that share it."""
    mlp_dim: int | None = None
    """Neurons of each MLP."""
    experts: int | None = None
    """Experts of each block."""

    def check(self, config: ModelConfig) -> None:
        """Raise `UsageError` if a size is not smaller than the model's, or cannot be removed from this model."""
        have = {
            "layers": config.layers,
            "dim": config.dim,
            "kv_heads": config.kv_heads,
            "mlp_dim": config.mlp_dim,
            "experts": 0 if config.moe is None else config.moe.experts,
        }
        wanted = {name: getattr(self, name) for name in have if getattr(self, name) is not None}
        if not wanted:
            raise UsageError("the smaller shape names no size", fix="give layers, dim, kv_heads, mlp_dim or experts")
        if self.experts is not None and config.moe is None:
            raise UsageError(f"experts is {self.experts}, and the model has none", fix="leave out experts")
        for name, size in wanted.items():
            if not 1 <= size <= have[name]:
                raise UsageError(f"{name} is {size}, the model has {have[name]}", fix=f"give 1 to {have[name]}")
        moe = config.moe
        if moe is not None and self.experts and (self.experts < moe.experts_per_token or self.experts % moe.groups):
            raise UsageError(
                f"experts is {self.experts}, with {moe.experts_per_token} per token in {moe.groups} groups",
                fix="keep at least as many as a token uses, and a multiple of the groups",
            )
        if self.mlp_dim is not None and config.moe is not None and config.expert_layers == config.layers:
            raise UsageError("mlp_dim with experts in every block", fix="remove experts instead")
        _check_kind(self, config)

    def config_of(self, config: ModelConfig, *, kept_layers: Sequence[int]) -> ModelConfig:
        """Return the config of the smaller model; `kept_layers` are the blocks that stay."""
        place = {old: new for new, old in enumerate(kept_layers)}

        def moved(layers: Sequence[int]) -> tuple[int, ...]:
            return tuple(place[layer] for layer in layers if layer in place)

        kv_heads = self.kv_heads or config.kv_heads
        moe = config.moe
        if moe is not None:
            moe = dataclasses.replace(moe, experts=self.experts or moe.experts, dense_layers=moved(moe.dense_layers))
        return dataclasses.replace(
            config,
            layers=len(kept_layers),
            dim=self.dim or config.dim,
            kv_heads=kv_heads,
            heads=config.heads // config.kv_heads * kv_heads,
            mlp_dim=self.mlp_dim or config.mlp_dim,
            moe=moe,
            full_attention_layers=moved(config.full_attention_layers),
            no_rope_layers=moved(config.no_rope_layers),
        )


def _check_kind(shape: SmallerShape, config: ModelConfig) -> None:
    heads = shape.kv_heads is not None and shape.kv_heads != config.kv_heads
    dim = shape.dim is not None and shape.dim != config.dim
    wrong = {
        "kv_heads with ALiBi, whose slopes depend on the number of heads": heads and config.positions == "alibi",
        "kv_heads with qk_norm full, which normalises all heads together": heads and config.qk_norm == "full",
        "dim with muP, whose scales depend on the width": dim and config.mup_base_dim is not None,
        "dim with a norm after the embedding": dim and config.embedding_norm,
    }
    for what, there in wrong.items():
        if there:
            raise UsageError(f"{what} cannot be pruned", fix="remove other parts")
