"""`deepspeed.init_inference`: a model of this library, of a folder or of transformers, served by our engine."""

from __future__ import annotations

import logging
import secrets
import tempfile
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from piledriver.core.errors import UsageError, nearest
from piledriver.models import Transformer
from piledriver.models.interchange import load_folder
from piledriver.serve.engine import Engine
from piledriver.serve.request import SamplingParams

_log = logging.getLogger("piledriver.compat.deepspeed")

ALIASES = {
    "kernel_inject": "replace_with_kernel_inject",
    "tp": "tensor_parallel",
    "tm": "triangular_masking",
    "ckpt_config": "checkpoint_config",
    "injection_dict": "injection_policy",
    "max_tokens": "max_out_tokens",
    "min_tokens": "min_out_tokens",
}
IGNORED = frozenset(
    {"replace_with_kernel_inject", "enable_cuda_graph", "use_triton", "triton_autotune", "triangular_masking"}
    | {"injection_policy", "replace_method", "transposed_mode", "set_empty_params", "base_dir", "return_tuple"}
    | {"keep_module_on_host", "training_mp_size", "checkpoint_config", "min_out_tokens"}
    | {"moe", "moe_experts", "moe_type"}
)
"""Settings of how DeepSpeed replaces modules and captures graphs: the engine always does both where it can."""
REJECTED = {
    "zero": "use big-model inference: piledriver.compat.accelerate.load_checkpoint_and_dispatch",
    "quant": "quantise the model first; the engine serves quantised folders",
    "checkpoint": "convert it with `piledriver checkpoint convert` and give the folder",
    "save_mp_checkpoint_path": "save the model with piledriver.models.interchange.save_folder",
    "mpu": "leave it out: one process serves the model",
}
KNOWN = frozenset({"dtype", "tensor_parallel", "max_out_tokens", "mp_size", "ep_size", *IGNORED, *REJECTED, *ALIASES})
DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "fp16": torch.float16,
    "half": torch.float16,
    "float16": torch.float16,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
}


def init_inference(model: Any, config: Mapping[str, Any] | None = None, **kwargs: Any) -> InferenceEngine:
    """Return an engine for a `Transformer`, a model folder, or a causal language model of transformers."""
    settings = _settings(config or {}, kwargs)
    dtype = _dtype(settings.get("dtype"))
    module = _native(model, dtype)
    length = int(settings.get("max_out_tokens") or 0)
    return InferenceEngine(
        module, Engine(module, max_context=min(length, module.config.max_positions) if length else 0)
    )


class InferenceEngine(nn.Module):
    """What `init_inference` returns: forward and `generate` of the served module."""

    def __init__(self, module: Transformer, engine: Engine) -> None:
        super().__init__()
        self.module = module
        self._engine = engine
        self._times: list[float] | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on token ids [batch, time]; return logits."""
        started = time.perf_counter()
        with torch.no_grad():
            found = self.module(*args, **kwargs)
        if self._times is not None:
            if found.is_cuda:
                torch.cuda.synchronize()
            self._times.append(1000 * (time.perf_counter() - started))
        return found

    def generate(
        self,
        input_ids: Tensor,
        *,
        max_new_tokens: int | None = None,
        max_length: int | None = None,
        do_sample: bool = False,
        temperature: float = 1.0,
        top_k: int = 50,
        top_p: float = 1.0,
        eos_token_id: int | None = None,
        pad_token_id: int = 0,
        attention_mask: Tensor | None = None,
        seed: int | None = None,
    ) -> Tensor:
        """Return prompts and answers of shape [batch, time], padded on the right, with `generate`'s parameters."""
        real = attention_mask.bool() if attention_mask is not None else torch.ones_like(input_ids, dtype=torch.bool)
        prompts = [row[keep].tolist() for row, keep in zip(input_ids, real, strict=True)]
        params = []
        for prompt in prompts:
            new = max_new_tokens if max_new_tokens is not None else (max_length or 20) - len(prompt)
            params.append(
                SamplingParams(
                    max_tokens=max(1, new),
                    temperature=temperature if do_sample else 0.0,
                    top_k=top_k if do_sample else 0,
                    top_p=top_p if do_sample else 1.0,
                    stop_token_ids=() if eos_token_id is None else (eos_token_id,),
                    seed=secrets.randbits(62) if seed is None else seed,
                )
            )
        outputs = self._engine.generate(prompts, params)
        rows = [p + list(o.completions[0].token_ids) for p, o in zip(prompts, outputs, strict=True)]
        width = max(map(len, rows))
        padded = [row + [pad_token_id] * (width - len(row)) for row in rows]
        return torch.tensor(padded, dtype=input_ids.dtype, device=input_ids.device)

    def profile_model_time(self, use_cuda_events: bool = True) -> None:
        """Time every forward from now on; `model_times` returns milliseconds."""
        self._times = []

    def model_times(self) -> list[float]:
        """Return the milliseconds of the forwards since the last call."""
        if self._times is None:
            raise UsageError("model_times before profile_model_time", fix="call profile_model_time() first")
        found, self._times = self._times, []
        return found


def _settings(config: Mapping[str, Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Merge DeepSpeed's two dictionaries under the full names; a contradiction is an error, as it is there."""
    found: dict[str, Any] = {}
    for given in (config, kwargs):
        for name, value in given.items():
            if name not in KNOWN:
                close = nearest(name, KNOWN)
                raise UsageError(
                    f"unknown setting {name!r} of init_inference",
                    fix=f"did you mean {close!r}?" if close else "leave it out",
                )
            full = ALIASES.get(name, name)
            if full in found and found[full] != value:
                raise UsageError(f"{full} is given twice: {found[full]!r} and {value!r}", fix="give it once")
            found[full] = value
    for name, fix in REJECTED.items():
        value = found.get(name)
        if value and (not isinstance(value, Mapping) or value.get("enabled", bool(value))):
            raise UsageError(f"{name} of init_inference is not supported", fix=fix)
    parallel = found.get("tensor_parallel") or {}
    size = parallel.get("tp_size", 1) if isinstance(parallel, Mapping) else getattr(parallel, "tp_size", 1)
    for name, ranks in (
        ("tensor_parallel", size),
        ("mp_size", found.get("mp_size")),
        ("ep_size", found.get("ep_size")),
    ):
        if int(ranks or 1) > 1:
            raise UsageError(f"{name} is {ranks}", fix="use 1: one process serves the model")
    without_effect = sorted(found.keys() & IGNORED)
    if without_effect:
        _log.info("settings of init_inference that have no effect here: %s", ", ".join(without_effect))
    return found


def _dtype(given: Any) -> torch.dtype | None:
    if given is None or isinstance(given, torch.dtype):
        if given == torch.int8:
            raise UsageError("dtype int8 of init_inference is not supported", fix=REJECTED["quant"])
        return given
    if given not in DTYPES:
        raise UsageError(f"dtype is {given!r}", fix=f"use one of {', '.join(DTYPES)}")
    return DTYPES[given]


def _native(model: Any, dtype: torch.dtype | None) -> Transformer:
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if isinstance(model, Transformer):
        return model.to(device=device, dtype=dtype)
    if isinstance(model, str):
        return load_folder(model, device=device, dtype=dtype)
    save = getattr(model, "save_pretrained", None)
    if isinstance(model, nn.Module) and callable(save):
        with tempfile.TemporaryDirectory() as folder:
            save(folder)
            return load_folder(folder, device=device, dtype=dtype)
    raise UsageError(
        f"init_inference cannot serve a {type(model).__name__}",
        fix="give a Transformer, a model folder or a causal language model of transformers",
    )
