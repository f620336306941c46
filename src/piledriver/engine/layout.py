"""`Layout`: how one model sits on hardware, as a value that is planned, applied, printed and saved with checkpoints.

World size = pp * dp_replicate * dp_shard * cp * tp. Experts are sharded over `ep` of the dp_shard * cp ranks, so ep
needs no ranks of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, cast, get_args

from piledriver.core.config import to_mapping
from piledriver.core.registry import Registry
from piledriver.engine.errors import LayoutError
from piledriver.engine.tiers import PRESETS, Offload, OffloadPreset

Precision = Literal["auto", "fp32", "bf16", "fp16", "fp8", "fp8-rowwise", "bf16-pure", "fp8-pure"]
Activations = Literal["keep", "selective", "full", "budget"]
Schedule = Literal["gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "interleaved-zero-bubble", "zbv", "dualpipev"]

Zero = Literal[0, 1, 2, 3]
ContextMethod = Literal["ring", "all-to-all"]
Reducer = Literal["bucketed", "ddp"]

_SIZES = ("dp_replicate", "dp_shard", "tp", "pp", "cp", "ep", "activation_every", "microbatches")
_CHOICES: dict[str, tuple[Any, ...]] = {
    "zero": get_args(Zero),
    "precision": get_args(Precision),
    "activations": get_args(Activations),
    "cp_method": get_args(ContextMethod),
    "schedule": get_args(Schedule),
    "reducer": get_args(Reducer),
    "compile": (None, True, False, "blocks", "model"),
    "fuse": (None, True, False),
}

PLANNERS: Registry[Callable[..., Any]] = Registry("planner", {"default": "piledriver.plan.entry:auto_layout"})
"""What `Layout.auto` asks: functions of a model and settings that return a layout. The planner stands on a higher
floor; its name is resolved when it is asked for."""

TWO_STAGES_A_RANK: frozenset[str] = frozenset({"zbv", "dualpipev"})
MANY_STAGES_A_RANK: frozenset[str] = frozenset({"interleaved-1f1b", "looped-bfs", "interleaved-zero-bubble"})
SPLIT_BACKWARD: frozenset[str] = frozenset({"interleaved-zero-bubble", "zbv", "dualpipev"})
"""Schedules that compute input gradients first and weight gradients later, which compiled blocks cannot."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One model on one mesh.

    >>> Layout(zero=3, tp=2).on(8)
    Layout(zero=3, dp_replicate=1, dp_shard=4, tp=2)
    >>> Layout(tp=3).on(8)
    Traceback (most recent call last):
    piledriver.engine.errors.LayoutError: 8 processes cannot be divided by pp 1 * cp 1 * tp 3 = 3. Fix: use 6 or 9 processes
    """  # noqa: E501

    zero: Zero = 0
    """What data-parallel ranks shard: 0 nothing, 1 optimizer states, 2 also gradients, 3 also parameters."""
    dp_replicate: int | None = None
    """Replicas of what zero shards; None: all remaining ranks where zero is 0, else 1."""
    dp_shard: int | None = None
    """Ranks that shard one replica; None: all remaining ranks where zero is 1 or more, else 1."""
    tp: int = 1
    """Tensor parallel: ranks that shard each matrix."""
    pp: int = 1
    """Pipeline parallel: groups that hold consecutive blocks."""
    cp: int = 1
    """Context parallel: ranks that shard each sequence."""
    ep: int = 1
    """Expert parallel: ranks that shard the experts."""
    reducer: Reducer = "bucketed"
    """What averages gradients of full replicas: our buckets, or torch DDP (communication hooks, `Join`,
    `static_graph`, unused-parameter errors)."""

    precision: Precision = "fp32"
    """Mixed precision: fp32 master weights with 16-bit or fp8 compute; the `*-pure` modes keep bf16 weights only;
    `auto`: bf16 on a GPU, fp32 on a CPU."""
    activations: Activations = "keep"
    """Activation checkpointing: keep all, keep expensive ops, recompute blocks, or recompute to fit a budget."""
    activation_every: int = 1
    """Recompute only every n-th block."""
    activation_budget: float = 0.5
    """With `budget`: the fraction of activation bytes that may be kept."""
    activation_offload: bool = False
    """Keep saved activations in host memory until the backward pass needs them."""
    recompute_norms: bool = False
    """Recompute the norms before attention and MLP in the backward pass of compiled blocks."""
    offload: OffloadPreset | Offload = "none"
    """What lives outside the device: nothing, optimizer states, or these and the parameters in host memory; an
    `Offload` names the tier of each, disk included."""

    sequence_parallel: bool = True
    """With tp: also shard the activations of norms along the sequence."""
    loss_parallel: bool = True
    """With tp: keep the logits sharded over the vocabulary in the loss."""
    cp_method: ContextMethod = "ring"
    """Ring attention, or all-to-all over heads (Ulysses)."""
    expert_capacity: float | None = None
    """Tokens an expert accepts, as a multiple of its even share; None drops nothing."""

    microbatches: int | None = None
    """With pp: micro-batches per batch; None: twice the number of stages."""
    schedule: Schedule = "1f1b"
    """With pp: the pipeline schedule."""
    stages_per_rank: int | None = None
    """With pp: stages per rank; None: what the schedule needs."""
    stage_blocks: tuple[int, ...] | None = None
    """With pp: blocks of each stage, for devices of uneven speed or memory; the output layer is in the last stage.
    None: stages of about equal cost."""

    compile: bool | Literal["blocks", "model"] | None = None
    """Compile each block (`true` means the same), or the model as one graph; None: each block, on GPUs."""
    fuse: bool | None = None
    """Replace operators of other libraries' models by fused ones that compute the same; None: on GPUs."""
    prefetch: int = 1
    """With zero 3: how many blocks ahead parameters are gathered."""
    debug: bool = False
    """Check that the parallel model computes what the plain one does, and that ranks agree."""

    def __post_init__(self) -> None:
        for name in _SIZES:
            size = getattr(self, name)
            if size is not None and (type(size) is not int or size < 1):
                raise LayoutError(f"{name} is {size!r}", fix="sizes are whole numbers, 1 or more")
        for name, choices in _CHOICES.items():
            # By type too: True is 1, and 0 is False.
            if not any(getattr(self, name) == one and type(getattr(self, name)) is type(one) for one in choices):
                named = ", ".join(map(repr, choices))
                raise LayoutError(f"{name} is {getattr(self, name)!r}", fix=f"use one of {named}")
        if not isinstance(self.offload, Offload) and self.offload not in PRESETS:
            named = ", ".join(map(repr, PRESETS))
            raise LayoutError(f"offload is {self.offload!r}", fix=f"use one of {named}, or an Offload")
        if self.precision == "fp16" and self.tiers.gradients == "step":
            raise LayoutError(
                "precision fp16 with gradients 'step': the loss scale must see all gradients before the first step",
                fix="use Offload(gradients='host') or 'disk', or bf16",
            )
        if self.prefetch < 0:
            raise LayoutError(f"prefetch is {self.prefetch}", fix="use 0 or more blocks")
        if self.expert_capacity is not None and not self.expert_capacity > 0:
            raise LayoutError(f"expert_capacity is {self.expert_capacity}", fix="use 1.0 or more, or leave it out")
        self._check_data_parallel()
        self._check_reducer()
        self._check_stages()
        self._check_one_graph()
        if not 0.0 < self.activation_budget <= 1.0:
            raise LayoutError(
                f"activation_budget is {self.activation_budget}", fix="give the share to keep, above 0 and at most 1"
            )

    def _check_data_parallel(self) -> None:
        if self.zero == 0 and (self.dp_shard or 1) > 1:
            raise LayoutError(f"dp_shard {self.dp_shard} with zero 0 shards nothing", fix="use zero 1, 2 or 3")
        if self.ep > 1 and self.zero in (1, 2):
            raise LayoutError(
                f"ep {self.ep} with zero {self.zero}: experts are not replicated on every rank", fix="use zero 0 or 3"
            )

    def _check_reducer(self) -> None:
        if self.reducer == "ddp" and not self.replicates:
            raise LayoutError(
                f"reducer 'ddp' needs a full replica on every rank, but this is {self!r}", fix="leave reducer out"
            )

    def _check_stages(self) -> None:
        if self.pp == 1:
            if self.stage_blocks is not None:
                raise LayoutError(f"stage_blocks {list(self.stage_blocks)} with pp 1", fix="raise pp, or leave it out")
            return
        stages = self.stages_per_rank
        if self.schedule in TWO_STAGES_A_RANK and stages not in (None, 2):
            raise LayoutError(f"{self.schedule} holds 2 stages a rank, not {stages}", fix="leave stages_per_rank out")
        if self.schedule in MANY_STAGES_A_RANK and stages == 1:
            raise LayoutError(f"{self.schedule} needs 2 or more stages a rank", fix="raise it, or use schedule 1f1b")
        if self.schedule in ("gpipe", "1f1b") and stages not in (None, 1):
            raise LayoutError(f"{self.schedule} holds 1 stage a rank, not {stages}", fix="use interleaved-1f1b")
        if self.streams_parameters or (self.offloads and self.tiers.gradients == "step"):
            # Micro-batches pass a block in both directions at once, and a gradient is complete after the last of them.
            raise LayoutError(
                f"offload {self.offload!r} with pp {self.pp}: a schedule uses every block of a stage again and again",
                fix="keep parameters on the device and gradients on the host or disk, or use pp=1 and zero=3",
            )
        if self.offloads and self.schedule in SPLIT_BACKWARD:
            raise LayoutError(
                f"offload {self.offload!r} with {self.schedule}, whose weight gradients come outside of a backward",
                fix="use schedule 1f1b or interleaved-1f1b",
            )
        if self.compile and self.schedule in SPLIT_BACKWARD:
            raise LayoutError(
                f"{self.schedule} runs the backward in two parts, which compiled blocks cannot", fix="use schedule 1f1b"
            )
        self._check_stage_blocks()
        if self.microbatches is not None:
            check_microbatches(self.schedule, ranks=self.pp, stages=self.stages, microbatches=self.microbatches)

    def _check_stage_blocks(self) -> None:
        counts = self.stage_blocks
        if counts is None:
            return
        if len(counts) != self.stages:
            raise LayoutError(
                f"stage_blocks {list(counts)} has {len(counts)} numbers for {self.stages} stages",
                fix=f"give the blocks of each of the {self.stages} stages",
            )
        if any(type(count) is not int or count < 0 for count in counts) or 0 in counts[:-1]:
            raise LayoutError(
                f"stage_blocks {list(counts)} has an empty stage",
                fix="give each stage 1 or more blocks; the last may have 0, with the output layer alone",
            )

    def _check_one_graph(self) -> None:
        """Reject features that act between two blocks, which cannot be inside one graph."""
        if self.compile != "model":
            return
        between = {"zero": self.zero == 3, "tp": self.tp > 1, "pp": self.pp > 1, "cp": self.cp > 1, "ep": self.ep > 1}
        between |= {"offload": self.offloads, "activation_offload": self.activation_offload}
        for name in (name for name, acts in between.items() if acts):
            raise LayoutError(
                f"compile 'model' with {name} {getattr(self, name)!r}, which acts between blocks",
                fix="use 'blocks'",
            )

    @classmethod
    def auto(cls, model: Any, **settings: Any) -> Layout:
        """Return the fastest layout that is predicted to fit; `settings` are those of `piledriver.plan.plan`.

        >>> Layout.auto("llama-3-8b", batch=64, hardware="8xh100-80g").zero
        3
        """
        found: Layout = PLANNERS["default"](model, **settings)
        return found

    def on(self, world_size: int) -> Layout:
        """Return this layout with every size resolved for a world size."""
        fixed = self.pp * self.cp * self.tp
        left, rest = divmod(world_size, fixed)
        if rest or left == 0:
            below, above = world_size - rest, world_size - rest + fixed
            choices = f"{below} or {above}" if below else f"{above}"
            raise LayoutError(
                f"{world_size} processes cannot be divided by pp {self.pp} * cp {self.cp} * tp {self.tp} = {fixed}",
                fix=f"use {choices} processes",
            )
        if self.offloads and world_size > 1:
            self._check_offload(world_size)
        replicate, shard = self._share(left)
        if replicate * shard != left:
            raise LayoutError(
                f"dp_replicate {replicate} * dp_shard {shard} is not the {left} processes left of {world_size}",
                fix=f"use dp_shard={left} and dp_replicate=1, or leave one of them out",
            )
        if (shard * self.cp if self.zero else left * self.cp) % self.ep:
            size = shard * self.cp if self.zero else left * self.cp
            nearest = max(n for n in range(1, min(self.ep, size) + 1) if size % n == 0)
            raise LayoutError(f"ep {self.ep} does not divide the {size} data-parallel ranks", fix=f"use ep={nearest}")
        return replace(self, dp_replicate=replicate, dp_shard=shard)

    def _check_offload(self, world_size: int) -> None:
        tiers, on = self.tiers, f"on {world_size} processes"
        if self.zero == 0 and world_size > self.pp:
            raise LayoutError(
                f"offload={self.offload!r} with zero 0 {on} keeps a copy on each", fix="use zero=1, 2 or 3"
            )
        if self.zero != 3 and tiers.gradients == "step":
            raise LayoutError(f"offload={self.offload!r} with zero {self.zero} {on}", fix="use zero=3")
        if self.zero != 3 and self.streams_parameters and (self.tp > 1 or self.ep > 1):
            raise LayoutError(
                f"offload={self.offload!r} with zero {self.zero}, tp {self.tp} and ep {self.ep}", fix="use zero=3"
            )
        if tiers.optimizer_share < 1.0 and tiers.optimizer == "host":
            raise LayoutError(f"offload={self.offload!r} {on}", fix="use optimizer_share=1")

    def _share(self, left: int) -> tuple[int, int]:
        replicate, shard = self.dp_replicate, self.dp_shard
        if replicate is None and shard is None:
            return (1, left) if self.zero else (left, 1)
        if replicate is None:
            assert shard is not None
            return max(left // shard, 1), shard
        return replicate, shard if shard is not None else (max(left // replicate, 1) if self.zero else 1)

    def for_device(self, device_type: str) -> Layout:
        """Return this layout with the precision `auto` resolved: bf16 on a GPU, fp32 on a CPU."""
        if self.precision != "auto":
            return self
        return replace(self, precision="bf16" if device_type == "cuda" else "fp32")

    @property
    def stages(self) -> int:
        """Number of pipeline stages over all ranks."""
        if self.pp == 1:
            return 1
        several = self.schedule in TWO_STAGES_A_RANK | MANY_STAGES_A_RANK
        return self.pp * (self.stages_per_rank or (2 if several else 1))

    @property
    def replicates(self) -> bool:
        """Whether every rank holds a full replica of the model and its optimizer states, on its device."""
        return self.zero == 0 and self.tp == self.pp == self.cp == self.ep == 1 and not self.offloads

    @property
    def tiers(self) -> Offload:
        """The tier of each part of the training state."""
        return self.offload if isinstance(self.offload, Offload) else PRESETS[self.offload]

    @property
    def offloads(self) -> bool:
        """Whether optimizer states (and parameters) live in host memory or on disk."""
        return self.tiers.optimizer != "device"

    @property
    def streams_parameters(self) -> bool:
        """Whether the parameters live in host memory or on disk, and blocks are streamed to the device."""
        return self.tiers.parameters != "device"

    @property
    def has_bf16_weights(self) -> bool:
        """Whether the weights themselves are bf16, without fp32 master weights."""
        return self.precision in ("bf16-pure", "fp8-pure")

    @property
    def data_size(self) -> int:
        """Number of different batches read per step. Needs a resolved layout (see `on`)."""
        assert self.dp_replicate is not None
        assert self.dp_shard is not None
        return self.dp_replicate * self.dp_shard

    def __repr__(self) -> str:
        """Show only what differs from the defaults."""
        plain = {name: field.default for name, field in type(self).__dataclass_fields__.items()}
        shown = {**to_mapping(self), "offload": self.offload}
        said = [f"{k}={v!r}" for k, v in shown.items() if v != plain[k]]
        return f"Layout({', '.join(said)})"


def resolve_layout(given: Layout | None, precision: str = "no", *, compile: bool | str | None = None) -> Layout:
    """Return the layout that was given, or the plainest one: a replica per rank, gradients averaged by torch DDP.

    `precision` (Accelerate's `mixed_precision`) and `compile` fill in what the layout leaves at its default.

    >>> resolve_layout(None, "bf16")
    Layout(reducer='ddp', precision='bf16', compile=False)
    >>> resolve_layout(Layout(zero=3), "bf16")
    Layout(zero=3, precision='bf16')
    """
    plainest = Layout(precision="fp8") if precision == "fp8" else Layout(reducer="ddp", compile=False)
    layout = given or plainest
    if compile is not None and (given is None or given.compile is None):
        layout = replace(layout, compile=cast(Any, compile) if layout.replicates else "blocks")
    if precision == "no" or layout.precision.startswith(precision):
        return layout
    if layout.precision not in ("fp32", "auto"):
        raise LayoutError(
            f"mixed_precision is {precision!r}, the layout's precision is {layout.precision!r}", fix="give one of them"
        )
    return replace(layout, precision=cast(Precision, precision))


def check_microbatches(schedule: str, *, ranks: int, stages: int, microbatches: int) -> None:
    """Raise `LayoutError` with the nearest valid number if a schedule cannot run this many micro-batches.

    >>> check_microbatches("interleaved-1f1b", ranks=4, stages=8, microbatches=11)
    Traceback (most recent call last):
    piledriver.engine.errors.LayoutError: interleaved-1f1b with 8 stages on 4 ranks cannot run 11 microbatches: they \
must fill rounds of 4 or more evenly. Fix: use microbatches=12
    """
    rule, why = _rule(schedule, ranks, stages)
    if rule(microbatches):
        return
    # Of two equally near numbers, the larger keeps the pipeline bubble smaller.
    distance = next(d for d in range(1, microbatches + 2 * stages) if rule(microbatches - d) or rule(microbatches + d))
    nearest = microbatches + distance if rule(microbatches + distance) else microbatches - distance
    raise LayoutError(
        f"{schedule} with {stages} stages on {ranks} ranks cannot run {microbatches} microbatches: {why}",
        fix=f"use microbatches={nearest}",
    )


def _rule(schedule: str, ranks: int, stages: int) -> tuple[Callable[[int], bool], str]:
    if schedule in ("1f1b", "dualpipev"):
        return lambda n: n >= stages, f"it needs at least {stages}, one for each stage"
    if schedule in ("interleaved-1f1b", "interleaved-zero-bubble"):
        return lambda n: n >= 1 and n % max(1, n // ranks) == 0, f"they must fill rounds of {ranks} or more evenly"
    return lambda n: n >= 1, "it needs at least 1"
