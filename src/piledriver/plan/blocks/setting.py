"""`BlockSetting`: everything besides the shape that the cost of a block depends on; hashable, for caches."""

from __future__ import annotations

from dataclasses import dataclass

from piledriver.engine.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """How the software that runs a layout computes: ours, or one whose published runs are compared."""

    name: str = "piledriver"
    flash_attention: bool = True
    """Attention never stores its scores."""
    causal: bool = True
    """Attention skips what the mask excludes."""
    fused_gate: bool = True
    """The gated MLP keeps its inputs only."""
    chunked_loss: bool = True
    """The logits of the whole batch never exist."""
    loss_chunk: int | None = None
    """Tokens of a chunk of logits; None for the kernel's own."""
    loss_buffers: int = 1
    """Chunks of logits that exist at once."""
    copying_loss: bool = False
    """The backward of a chunked loss copies the gradient of the output weight twice, and its chunks are uneven."""
    compiled_loss: bool = True
    """Where blocks are compiled, the loss is too."""
    overlap: float = 1.0
    """Share of data-parallel communication that runs beside the backward."""
    overlap_tp: float = 0.0
    """Share of tensor-parallel communication that runs beside the matrix products."""
    overlap_sends: bool = False
    """Schedules with several stages a rank send activations beside the next stage's compute."""
    memory_passes: float = 1.0
    """Elementwise traffic relative to compiled kernels."""
    dropout: bool = False
    fp32_gradients: bool = True
    """Gradients are summed in fp32, 4 bytes each, in communication too."""
    master_copy: bool = False
    """16-bit weights with an fp32 copy among the states (Megatron)."""
    alternate_products: bool = False
    """Selective recomputation keeps every second matrix product and computes the others again (torchtitan)."""
    scatter_sends: bool = False
    """Pipeline stages send 1 / tp of an activation from each rank, and gather it inside the node."""
    stage_buffers: bool = True
    """Pipeline stages have a buffer for each micro-batch that they receive, and keep their outputs (torch's stages)."""
    reordered_gathers: bool = False
    """Tensor parallelism that runs beside products gathers sequences in another order than that of their batch."""
    fused_casts: bool = False
    """Norms and activations write fp8 themselves."""
    fp8_gathers: bool = False
    """Tensor parallelism gathers activations in 8 bits where products run in fp8."""
    delayed_scales: bool = False
    """Scales of fp8 come from earlier steps: a cast is one pass, and weights are cast once a step."""
    hopper_attention: float = 1.0
    """Rate of attention on devices with fp8 units, relative to kernels that are written for them."""
    recompute_exchanges: bool = True
    """Recomputing a block repeats its tensor-parallel collectives."""

    def __hash__(self) -> int:
        # Of few fields: caches ask for it often, and software has a name.
        return hash((self.name, self.overlap_tp))


PILEDRIVER = Traits()


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSetting:
    """One micro-batch on one rank."""

    sequences: int
    length: int
    """Tokens of one full sequence."""
    tp: int = 1
    cp: int = 1
    ep: int = 1
    sequence_parallel: bool = True
    loss_parallel: bool = True
    ulysses: bool = False
    expert_capacity: float | None = None
    precision: str = "bf16"
    """fp32, bf16, fp16, fp8, fp8-rowwise, bf16-pure, fp8-pure."""
    activations: str = "keep"
    recompute_norms: bool = False
    budget: float = 1.0
    compiled: bool = True
    gathered: bool = False
    """Weights arrive in the compute dtype (zero 3): a block does not cast them."""
    half_matrices: bool = False
    """Matrices on the device are in the compute dtype, their fp32 masters elsewhere (offload); vectors are fp32."""
    traits: Traits = PILEDRIVER

    def __hash__(self) -> int:
        # Of the fields that a search varies.
        return hash((self.sequences, self.length, self.tp, self.cp, self.ep, self.precision, self.activations))

    @property
    def tokens(self) -> float:
        """Tokens of this rank's micro-batch, after cp."""
        return self.sequences * self.length / self.cp

    @property
    def itemsize(self) -> int:
        """Bytes of one activation."""
        return 4 if self.precision == "fp32" else 2

    @property
    def matmul_precision(self) -> str:
        """The dtype of the products inside blocks."""
        if self.precision.startswith("fp8"):
            return "fp8"
        return {"bf16-pure": "bf16"}.get(self.precision, self.precision)

    @property
    def wide_precision(self) -> str:
        """The dtype of products that are not in fp8."""
        return "bf16" if self.matmul_precision == "fp8" else self.matmul_precision

    @property
    def gathers_fp8(self) -> bool:
        """Whether tensor-parallel ranks gather activations in 8 bits."""
        return self.traits.fp8_gathers and self.precision.startswith("fp8")

    @property
    def casts(self) -> bool:
        """Whether blocks cast fp32 master weights to the compute dtype."""
        return self.precision not in ("fp32", "bf16-pure", "fp8-pure") and not (self.gathered or self.half_matrices)


def setting_of(
    layout: Layout, *, sequences: int, length: int, compiled: bool, traits: Traits = PILEDRIVER
) -> BlockSetting:
    """Return the setting of a layout's blocks for a micro-batch."""
    return BlockSetting(
        sequences=sequences,
        length=length,
        tp=layout.tp,
        cp=layout.cp,
        ep=layout.ep,
        sequence_parallel=layout.sequence_parallel and layout.tp > 1,
        loss_parallel=layout.loss_parallel and layout.tp > 1,
        ulysses=layout.cp_method == "all-to-all",
        expert_capacity=layout.expert_capacity,
        precision="bf16" if layout.precision == "auto" else layout.precision,
        activations=layout.activations,
        recompute_norms=layout.recompute_norms and compiled,
        budget=layout.activation_budget if layout.activations == "budget" else 1.0,
        compiled=compiled,
        gathered=layout.zero == 3 and (layout.dp_shard or 1) * layout.cp > 1,
        half_matrices=layout.offloads and layout.precision not in ("fp32", "fp16"),
        traits=traits,
    )
