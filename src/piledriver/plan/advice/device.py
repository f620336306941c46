"""Rules about the device and the host that feeds it: synchronisation, kernels, precision, compilation."""

from __future__ import annotations

from piledriver.observe.report.values import Advice
from piledriver.plan.advice.case import LAUNCH, Case, milliseconds, share

# Kernels of a CUDA graph start this long after each other.
_GRAPH_GAP = 1e-6


def host_synchronisation(case: Case) -> Advice | None:
    """The host waits for the device within a step, and the device then waits for the host."""
    count = case.per_step("synchronisations")
    if not case.on_device or count < 1:
        return None
    busy = case.seconds("compute") + case.seconds("exposed_communication")
    waiting = case.per_step("synchronised_seconds")
    host = max(0.0, case.step - waiting)
    readers = ", ".join(case.facts.get("synchronised_by", {}))
    return case.advice(
        "host synchronisation",
        "do not read the device's results within a step",
        f"{count:.0f} synchronisations a step ({readers}); the device waits for the host "
        f"{milliseconds(case.seconds('host_wait'))} of {milliseconds(case.step)}",
        "keep .item(), float(loss), print(tensor), .cpu() and nonzero() out of the step; read values every N steps",
        max(busy, min(host, case.step)),
    )


def tiny_kernels(case: Case) -> Advice | None:
    """Kernels are shorter than their launch: the host limits the step."""
    if case.on_device:
        return _tiny_on_device(case)
    calls, seconds = case.per_step("small_operator_calls"), case.per_step("small_operator_seconds")
    if calls < 500 or case.micro_batches > 1:
        return None
    overhead = seconds + case.rank.seconds["host_wait"] / case.rank.steps
    return case.advice(
        "tiny kernels",
        "do more work in each operator",
        f"{calls:.0f} operators a step take less than 20 us each; they and the Python around them are "
        f"{milliseconds(overhead)} of {milliseconds(case.profiled)} ({share(overhead, case.profiled)})",
        "replace loops over samples or time steps by one batched operator; torch.compile the rest",
        case.without(overhead),
    )


def _tiny_on_device(case: Case) -> Advice | None:
    kernels, waiting = case.per_step("kernels"), case.seconds("host_wait") + case.seconds("idle")
    # A graph cures neither reads of results nor allocations of device memory, which have rules of their own.
    waiting -= case.per_step("idle_after_synchronisation") + case.per_step("malloc_seconds")
    median = float(case.facts.get("kernel_median_us", 0.0))
    if median > 12 or kernels < 50 or waiting < 0.15 * case.step:
        return None
    return case.advice(
        "tiny kernels",
        "launch fewer kernels: CUDA graphs, torch.compile, larger batches",
        f"{kernels:.0f} kernels a step with a median of {median:.1f} us; the device waits for launches "
        f"{milliseconds(waiting)} ({share(waiting, case.step)})",
        'torch.compile(model, mode="reduce-overhead"), torch.cuda.make_graphed_callables, fused optimizers',
        case.step - max(0.0, waiting - kernels * _GRAPH_GAP),
    )


def fp32_products(case: Case) -> Advice | None:
    """Matrix products run in fp32 on a device whose tensor cores are many times faster in bf16."""
    if not case.on_device or case.cluster.device.peak("bf16") <= 2 * case.cluster.device.peak("fp32"):
        return None
    rows = [row for row in case.facts.get("shapes", ()) if row["precision"] == "float32" and row["seconds"]]
    now = sum(row["seconds"] for row in rows) / case.rank.steps
    after = sum(
        min(row["seconds"], row["calls"] * case.product_seconds(row, precision="bfloat16")) for row in rows
    ) / max(1, case.rank.steps)
    # Half the bytes of everything that is limited by memory, but not of the optimizer.
    other = case.per_step("elementwise_seconds")
    if now < 0.1 * case.step:
        return None
    return case.advice(
        "fp32 products",
        "compute matrix products in bf16",
        f"products in fp32 take {milliseconds(now)} of a step ({share(now, case.step)})",
        'Accelerator(mixed_precision="bf16"), torch.autocast, or at least torch.set_float32_matmul_precision("high")',
        case.step - (now - after) - 0.3 * other,
    )


def fp64_products(case: Case) -> Advice | None:
    """Matrix products run in fp64, usually by accident: an array of numpy."""
    row = case.facts.get("products", {}).get("float64")
    if not row:
        return None
    now = row["seconds"] / case.rank.steps
    return case.advice(
        "fp64 products",
        "convert inputs to fp32",
        f"products in fp64 take {milliseconds(now)} of a step ({share(now, case.step)})",
        "tensor.float(): arrays of numpy are fp64",
        case.step - now / 2,
    )


def not_compiled(case: Case) -> Advice | None:
    """Operators that move memory take a large part of the device's time, and nothing is compiled."""
    if not case.on_device or case.facts.get("compiled_modules") or case.facts.get("compilations"):
        return None
    seconds = case.per_step("elementwise_seconds")
    if seconds < 0.15 * case.step:
        return None
    return case.advice(
        "not compiled",
        "compile the blocks of the model",
        f"operators without matrix products take {milliseconds(seconds)} of a step ({share(seconds, case.step)})",
        'Layout(compile="blocks"), or block.compile() for each block',
        case.step - max(0.0, seconds - case.per_step("fused_seconds")),
    )


def recompilation(case: Case) -> Advice | None:
    """Steps compile again."""
    count, seconds = case.per_step("compilations"), case.per_step("compile_seconds")
    if not count:
        return None
    return case.advice(
        "recompilation",
        "keep shapes and Python values of compiled code constant",
        f"{case.facts['compilations']} compilations in {case.rank.steps} steps, {milliseconds(seconds)} of each step "
        f"({share(seconds, case.profiled)})",
        "pad to a few lengths, torch._dynamo.mark_dynamic(tensor, dim), pass numbers that change as tensors; "
        "TORCH_LOGS=recompiles names the guard",
        case.without(seconds),
    )


def unfused_attention(case: Case) -> Advice | None:
    """Attention writes its scores to memory."""
    seconds = case.per_step("softmax_seconds")
    if seconds < 0.03 * case.step:
        return None
    # Scores are written and read by the two products, the scale, the mask and the dropout as well.
    return case.advice(
        "unfused attention",
        "use fused attention",
        f"the softmax alone takes {milliseconds(seconds)} of a step ({share(seconds, case.step)})",
        'torch.nn.functional.scaled_dot_product_attention, attn_implementation="sdpa" in transformers',
        case.step - 2.5 * seconds,
    )


def slow_optimizer(case: Case) -> Advice | None:
    """The optimizer steps parameter by parameter."""
    about = case.facts.get("optimizer", {})
    if not about or about.get("fused") or not about.get("can_be_fused"):
        return None
    kernels = case.per_step("optimizer_kernels" if case.on_device else "optimizer_operators")
    seconds = case.per_step("optimizer_seconds" if case.on_device else "optimizer_host_seconds")
    if kernels < 3 * max(1, int(about.get("parameters", 1))) or seconds < 0.05 * case.step:
        return None
    state = sum(one.bytes for peak in case.rank.memory for one in peak.owners if one.category == "optimizer state")
    fused = 3 * state / case.cluster.device.bandwidth + LAUNCH
    return case.advice(
        "unfused optimizer",
        "use the fused step of the optimizer",
        f"{about.get('class')} runs {kernels:.0f} operators for {about.get('parameters')} parameters, "
        f"{milliseconds(seconds)} of a step ({share(seconds, case.step if case.on_device else case.profiled)})",
        f"torch.optim.{about.get('class')}(..., fused=True)",
        # On a CPU the profiler inflates the many operators as it inflates the step.
        case.step - max(0.0, seconds - fused) if case.on_device else case.without(max(0.0, seconds - fused)),
    )


def pageable_copies(case: Case) -> Advice | None:
    """Batches are copied from memory that is not pinned, which stops the host."""
    seconds = case.per_step("pageable_copy_seconds")
    return case.advice(
        "pageable copies",
        "copy batches from pinned memory",
        f"copies from pageable memory take {milliseconds(seconds)} of a step ({share(seconds, case.step)})",
        "DataLoader(pin_memory=True) and tensor.to(device, non_blocking=True)",
        case.step - seconds,
    )


def unaligned_shapes(case: Case) -> Advice | None:
    """Products have dimensions that tensor cores cannot load in whole words."""
    if not case.on_device:
        return None
    rows = [
        row
        for row in case.facts.get("shapes", ())
        if row["precision"] in ("bfloat16", "float16") and any(row[side] % 8 for side in ("n", "k"))
    ]
    now = sum(row["seconds"] for row in rows)
    if not now:
        return None
    after = 0.0
    for row in rows:
        rounded = row | {side: -(-row[side] // 64) * 64 for side in ("n", "k")}
        after += row["seconds"] * min(1.0, case.product_seconds(rounded) / case.product_seconds(row))
    return case.advice(
        "unaligned shapes",
        "round dimensions up to multiples of 64",
        f"products with dimensions that are no multiple of 8 take {milliseconds(now / case.rank.steps)} of a step",
        "pad the vocabulary (transformers: resize_token_embeddings(pad_to_multiple_of=64)) and head sizes",
        case.step - (now - after) / case.rank.steps,
    )
