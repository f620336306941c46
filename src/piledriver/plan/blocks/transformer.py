"""The cost of a block of our `Transformer`, from its config alone.

The kept tensors are those that autograd saves (eager) or that the compiler's min-cut partitioner saves (compiled);
tests compare both lists with traces on fake tensors. The search asks for thousands of them, which traces would slow.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from piledriver.models.config import ModelConfig
from piledriver.models.model_size import mean_context
from piledriver.plan.blocks.operators import BlockCost, Exchange, Kept, Operator, gradients_of, matmul, moved
from piledriver.plan.blocks.setting import BlockSetting

# Products of a flash attention backward relative to its forward: it recomputes the scores.
_ATTENTION_BACKWARD = 2.5
# Kernels that the host launches for one block, forward and backward.
_EAGER_KERNELS = (62, 130)
_FUSED_EAGER_KERNELS = (34, 62)
_COMPILED_KERNELS = (16, 34)
# Further ones of routing, and of the Python that selective checkpointing runs for each operator.
_EAGER_ROUTING, _COMPILED_ROUTING = (80, 130), (24, 36)
_EAGER_SELECTIVE = (130, 260)
# Passes over memory of eager elementwise kernels, relative to fused ones.
_EAGER_PASSES = 2.9


@functools.lru_cache(maxsize=4096)
def block_cost(config: ModelConfig, window: int | None, setting: BlockSetting) -> BlockCost:
    """Return the cost of one block whose attention window is `window` (None for full attention)."""
    made = _Block(config, window, setting)
    attention, mlp = made.attention(), made.moe() if config.moe is not None else made.mlp()
    forward = (*attention, *mlp)
    backward = tuple(back for one in forward for back in made.backward_of(one))
    kept = made.kept()
    recompute = made.recomputed(forward)
    full = replace(setting, activations="keep", recompute_norms=False)
    everything = sum(one.bytes for one in _Block(config, window, full).kept())
    extra = 0.0
    if setting.activations in ("full", "selective"):
        extra = max(0.0, everything - sum(one.bytes for one in kept))
    there = made.exchanges()
    back = made.backward_exchanges(there)
    return BlockCost(
        forward=forward,
        backward=backward,
        recompute=recompute,
        kept=kept,
        forward_workspace=made.forward_workspace(),
        backward_workspace=made.backward_workspace() + extra,
        forward_exchanges=there,
        backward_exchanges=back,
        kernels=made.kernels(),
    )


class _Block:
    """The widths of a block on one rank, and the lists that follow from them."""

    def __init__(self, config: ModelConfig, window: int | None, setting: BlockSetting) -> None:
        self.config, self.setting = config, setting
        self.tokens, self.size = setting.tokens, setting.itemsize
        tp = setting.tp
        self.dim = config.dim
        self.stream = config.dim / (tp if setting.sequence_parallel else 1)
        """Width of the residual stream in units of whole tokens: 1 / tp of the sequence."""
        self.q = config.heads * config.head_dim / tp
        self.kv = config.kv_heads * config.head_dim / tp
        self.inner = config.mlp_dim / tp
        self.gated = config.mlp == "gated"
        self.products = setting.matmul_precision
        traits = setting.traits
        self.context = mean_context(setting.length, window) if traits.causal else float(setting.length)
        self.eager = not setting.compiled and traits.name == "piledriver"
        self.passes = traits.memory_passes * (_EAGER_PASSES if self.eager else 1.0)

    def _move(self, name: str, elements: float) -> Operator:
        return moved(name, elements * self.tokens * self.size * self.passes)

    def kernels(self) -> tuple[int, int]:
        """Return the kernels that the host launches, forward and backward."""
        compiled, moe = self.setting.compiled, self.config.moe is not None
        if not compiled and self.setting.traits.name != "piledriver":
            return _FUSED_EAGER_KERNELS
        found = [_COMPILED_KERNELS if compiled else _EAGER_KERNELS]
        if moe:
            found.append(_COMPILED_ROUTING if compiled else _EAGER_ROUTING)
        if self.setting.activations == "selective" and not compiled:
            found.append(_EAGER_SELECTIVE)
        return sum(one[0] for one in found), sum(one[1] for one in found)

    def attention(self) -> list[Operator]:
        """Return the operators of attention, its norm and residual."""
        t, size, config = self.tokens, self.size, self.config
        width = self.q + 2 * self.kv
        found = [
            self._move("norm", 2 * self.stream),
            matmul("qkv", t, width, self.dim, size, precision=self.products),
        ]
        if config.positions == "rotary" or config.qk_norm != "none":
            # Eager rotations run in fp32, operator by operator.
            found.append(self._move("rotary", (5 if self.eager else 2) * width))
        if config.qk_norm != "none":
            found.append(self._move("norms of queries and keys", 8 * (self.q + self.kv)))
        if self.setting.traits.flash_attention:
            flops = 4.0 * t * self.context * self.q
            shape = (round(t), round(self.context), config.head_dim)
            found.append(Operator("attention", "attention", flops, (2 * self.q + 2 * self.kv) * t * size, shape))
        else:
            found += self._scores()
        found.append(matmul("out", t, self.dim, self.q, size, precision=self.products))
        found.append(self._move("residual", (3 + 2 * self.setting.traits.dropout) * self.stream))
        return found

    def _scores(self) -> list[Operator]:
        """Attention that stores its scores: two batched products, and softmax with mask (and dropout) between."""
        config, t, size = self.config, self.tokens, self.size
        heads = config.heads / self.setting.tp
        groups = max(1, round(self.setting.sequences * heads))
        length = self.setting.length
        scores = heads * length * t * size
        passes = 2 + 2.5 * self.setting.traits.dropout
        return [
            matmul("scores", length, length, config.head_dim, size, groups=groups),
            moved("softmax", passes * scores),
            matmul("weighted values", length, config.head_dim, length, size, groups=groups),
        ]

    def mlp(self) -> list[Operator]:
        """Return the operators of the MLP, its norm and residual."""
        t, size = self.tokens, self.size
        rows = self.inner * (2 if self.gated else 1)
        return [
            self._move("norm", 2 * self.stream),
            matmul("up", t, rows, self.dim, size, precision=self.products),
            self._move("activation", rows + self.inner),
            matmul("down", t, self.dim, self.inner, size, precision=self.products),
            self._move("residual", (3 + 2 * self.setting.traits.dropout) * self.stream),
        ]

    def moe(self) -> list[Operator]:
        """Return the operators of a mixture of experts, with its router, dispatch, norm and residual."""
        moe = self.config.moe
        assert moe is not None
        t, size, chosen = self.tokens, self.size, moe.experts_per_token
        local = max(1, moe.experts // self.setting.ep)
        rows = self._expert_rows()
        width = self.inner * (2 if self.gated else 1)
        return [
            self._move("norm", 2 * self.stream),
            matmul("router", t, moe.experts, self.dim, size),
            moved("routing", t * moe.experts * 4 * 6 + rows * 8 * 8),
            self._move("dispatch", 4 * chosen * self.dim),
            matmul("experts up", rows / local, width, self.dim, size, groups=local),
            self._move("activation", chosen * (width + self.inner)),
            matmul("experts down", rows / local, self.dim, self.inner, size, groups=local),
            self._move("combine", (2 * chosen + 1) * self.dim),
            self._move("residual", 3 * self.stream),
        ]

    def _expert_rows(self) -> float:
        """Rows that the experts of this rank compute, padding included."""
        moe, capacity = self.config.moe, self.setting.expert_capacity
        assert moe is not None
        even = self.tokens * moe.experts_per_token
        if self.setting.ep > 1:
            return even * (capacity or 1.0)
        return even + 16 * (moe.experts + 1)

    def backward_of(self, operator: Operator) -> list[Operator]:
        """Return the operators of one operator's backward."""
        if operator.kind == "matmul":
            return gradients_of(operator, self.size)
        if operator.kind == "attention":
            return [replace(operator, flops=_ATTENTION_BACKWARD * operator.flops, bytes=2 * operator.bytes)]
        return [replace(operator, bytes=2.0 * operator.bytes)]

    def recomputed(self, forward: tuple[Operator, ...]) -> tuple[Operator, ...]:
        """Return what the backward computes again. The last product of a block is never needed."""
        setting = self.setting
        if setting.activations == "full":
            last = max(index for index, one in enumerate(forward) if one.kind == "matmul")
            if setting.traits.name in ("megatron", "llm-foundry"):
                return forward  # reentrant checkpointing runs the whole block
            return tuple(one for index, one in enumerate(forward) if index < last)
        cheap = tuple(one for one in forward if one.kind == "memory")
        if setting.activations == "selective":
            if not setting.traits.flash_attention:
                return tuple(one for one in forward if one.name in ("scores", "softmax", "weighted values"))
            return cheap
        if setting.activations == "budget" and setting.budget < 1.0:
            return tuple(replace(one, flops=one.flops * (1 - setting.budget), shape=None) for one in forward)
        return tuple(one for one in cheap if one.name == "norm") if setting.recompute_norms else ()

    def kept(self) -> tuple[Kept, ...]:
        """Return the tensors that the forward keeps for the backward."""
        setting = self.setting
        if setting.activations == "full":
            return (self._keep("block input", self.stream),)
        if setting.activations == "selective":
            return self._kept_selective()
        found = (*self._kept_attention(), *(self._kept_moe() if self.config.moe is not None else self._kept_mlp()))
        if setting.activations == "budget" and setting.budget < 1.0:
            return tuple(Kept(one.name, one.bytes * setting.budget) for one in found)
        return found

    def _keep(self, name: str, width: float, size: float | None = None) -> Kept:
        return Kept(name, width * self.tokens * (self.size if size is None else size))

    def _norm_input(self, name: str) -> Kept:
        # Eager norms with fp32 weights cast their input, and keep the cast.
        casts = not self.setting.compiled and self.setting.precision not in ("fp32", "bf16-pure", "fp8-pure")
        casts = casts and self.config.norm_weight and not self.setting.gathered
        return self._keep(name, self.stream, 4 if casts else None)

    def _linear_input(self, name: str) -> list[Kept]:
        """The input of a projection. Compiled blocks with `recompute_norms` compute it again."""
        if self.setting.recompute_norms and not self.setting.sequence_parallel:
            return []
        if self.setting.precision.startswith("fp8"):
            return [self._keep(name, self.dim, 1)]
        return [self._keep(name, self.dim)]

    def _kept_attention(self) -> list[Kept]:
        config = self.config
        found = [self._norm_input("block input")] if config.norm_placement != "post" else []
        found += self._linear_input("attention input")
        if config.qk_norm != "none":
            # Cast to the dtype of the norms' weights.
            wide = 4 if self.setting.precision not in ("bf16-pure", "fp8-pure") else None
            found.append(self._keep("queries and keys before their norm", self.q + self.kv, wide))
        elif config.positions != "rotary" and self.setting.traits.name == "piledriver":
            # Without a rotation queries and keys are views of the projection, beside which values are copied.
            found.append(self._keep("values, copied", self.kv))
        heads = config.heads / self.setting.tp
        if self.setting.traits.flash_attention:
            found.append(self._keep("queries, keys, values", self.q + 2 * self.kv))
            found.append(self._keep("log-sum-exp", heads, 4))
        else:
            dropout = self.setting.traits.dropout
            found.append(self._keep("queries, keys, values", self.q + 2 * self.kv))
            found.append(self._keep("scores", (2 if dropout else 1) * heads * self.setting.length))
            if dropout:
                found.append(self._keep("score dropout masks", heads * self.setting.length, 1))
        found.append(self._keep("attention output", self.q))
        if config.norm_placement == "post":
            found.append(self._norm_input("attention output before its norm"))
        if self.setting.traits.dropout:
            found.append(self._keep("dropout masks", 2 * self.stream, 1))
        if self.setting.casts:
            # The partitioner too prefers to keep the cast: it is smaller than the weight.
            found.append(Kept("attention weights in the compute dtype", self._attention_parameters() * self.size))
        return found

    def _kept_mlp(self) -> list[Kept]:
        config, setting = self.config, self.setting
        found = []
        if config.norm_placement == "pre" and not config.parallel_residual:
            found.append(self._norm_input("middle of the block"))
        elif config.parallel_residual and not setting.compiled and setting.casts:
            found.append(self._norm_input("block input, cast again"))
        found += self._linear_input("MLP input")
        fused = setting.traits.fused_gate and self.gated and config.activation == "silu" and not config.mlp_bias
        if fused:
            found.append(self._keep("gate and up", 2 * self.inner))
        elif self.gated:
            found.append(self._keep("gate and up", (2 if setting.compiled else 3) * self.inner))
            found.append(self._keep("gated product", self.inner))
        else:
            found.append(self._keep("MLP before its activation", self.inner))
            found.append(self._keep("MLP activation", self.inner))
        if config.norm_placement == "post":
            found.append(self._norm_input("MLP output before its norm"))
        if setting.casts:
            rows = self.inner * (2 if self.gated else 1)
            found.append(Kept("MLP weights in the compute dtype", (rows + self.inner) * self.dim * self.size))
        return found

    def _kept_moe(self) -> list[Kept]:
        moe = self.config.moe
        assert moe is not None
        rows = self._expert_rows() / self.tokens
        width = self.inner * (2 if self.gated else 1)
        extra = []
        if self.gated and not self.setting.compiled:
            extra.append(self._keep("activated gates of experts", rows * self.inner))
        if self.setting.casts:
            extra.append(Kept("expert weights in the compute dtype", self._mlp_parameters() * self.size))
        return [
            self._norm_input("middle of the block"),
            *self._linear_input("MLP input"),
            *extra,
            self._keep("router probabilities", 2 * moe.experts, 4),
            self._keep("routing", 4 * moe.experts_per_token, 8),
            self._keep("tokens by expert", rows * self.dim),
            self._keep("experts before their activation", rows * width),
            self._keep("expert activations", rows * self.inner),
            self._keep("expert outputs", (rows + moe.experts_per_token) * self.dim),
        ]

    def _kept_selective(self) -> tuple[Kept, ...]:
        config, setting = self.config, self.setting
        rows = self.inner * (2 if self.gated else 1)
        if not setting.traits.flash_attention:
            # Megatron's selective recomputation: everything but the scores.
            everything = _Block(config, None, replace(setting, activations="keep")).kept()
            return tuple(one for one in everything if "score" not in one.name)
        heads = config.heads / setting.tp
        if setting.traits.alternate_products:
            # Of seven products the first, third, fifth and seventh; a compiled backward does not use the last.
            last = [] if setting.compiled else [self._keep("MLP output", self.stream)]
            return (
                self._keep("block input", self.stream),
                self._keep("queries and values", self.q + self.kv),
                self._keep("attention output", self.q),
                self._keep("gates", self.inner),
                *last,
            )
        found = [
            self._keep("block input", self.stream),
            self._keep("queries, keys, values", self.q + 2 * self.kv),
            self._keep("attention output", self.q),
            self._keep("log-sum-exp", heads, 4),
            self._keep("attention projection", self.stream),
        ]
        if config.moe is not None:
            expert = self._expert_rows() / self.tokens
            return (*found, self._keep("experts up", expert * rows), self._keep("experts down", expert * self.dim))
        found.append(self._keep("MLP before its activation", rows))
        if not setting.compiled:
            found.append(self._keep("MLP output", self.stream))
        return tuple(found)

    def _attention_parameters(self) -> float:
        return (self.q + 2 * self.kv) * self.dim + self.q * self.dim

    def forward_workspace(self) -> float:
        """Return the bytes of temporaries at the MLP, the widest place of the forward."""
        wide = self.inner * (3 if self.gated else 2)
        if self.config.moe is not None:
            wide *= self._expert_rows() / self.tokens
        casts = self._mlp_parameters() * self.size if self.setting.casts else 0.0
        return self.tokens * (wide + self.dim) * self.size + casts

    def backward_workspace(self) -> float:
        """Return the bytes of temporaries at the MLP, the widest place of the backward, with one weight gradient."""
        wide = self.inner * (4 if self.gated else 2)
        if self.config.moe is not None:
            wide *= self._expert_rows() / self.tokens
        rows = self.inner * (2 if self.gated else 1) * self.dim
        weight = rows * (self.size + (0 if self.size == 4 else 4)) if self.config.moe is None else 0.0
        casts = rows * self.size if self.setting.casts else 0.0
        return self.tokens * (wide + 2 * self.dim) * self.size + weight + casts

    def _mlp_parameters(self) -> float:
        moe = self.config.moe
        experts = 1.0 if moe is None else moe.experts / self.setting.ep
        return experts * self.inner * self.dim * (3 if self.gated else 2)

    def exchanges(self) -> tuple[Exchange, ...]:
        """Return the collectives of the forward."""
        setting, found = self.setting, []
        whole = self.tokens * self.dim * self.size
        if setting.tp > 1:
            if setting.sequence_parallel:
                found.append(Exchange("all-gather", "tp", whole, 2))
                found.append(Exchange("reduce-scatter", "tp", whole, 2))
            else:
                found.append(Exchange("all-reduce", "tp", whole, 2))
        if setting.cp > 1:
            if setting.ulysses:
                width = 2 * self.q + 2 * self.kv
                found.append(Exchange("all-to-all", "cp", width * self.tokens * self.size / 4, 4))
            else:
                found.append(Exchange("send", "cp", 2 * self.kv * self.tokens * self.size, setting.cp - 1))
        if setting.ep > 1 and self.config.moe is not None:
            found.append(Exchange("all-to-all", "ep", self._expert_rows() * self.dim * self.size, 2))
        return tuple(found)

    def backward_exchanges(self, forward: tuple[Exchange, ...]) -> tuple[Exchange, ...]:
        """Return the collectives of the backward: the mirror of the forward's, and those of a recomputation."""
        setting = self.setting
        mirror = {"all-gather": "reduce-scatter", "reduce-scatter": "all-gather"}
        found = [replace(one, kind=mirror.get(one.kind, one.kind)) for one in forward]  # type: ignore[arg-type]
        if setting.cp > 1 and not setting.ulysses:
            found = [replace(one, bytes=2 * one.bytes) if one.axis == "cp" else one for one in found]
        if setting.activations == "full" and setting.traits.recompute_exchanges:
            found += list(forward)
        return tuple(found)
