"""Decoder transformer: embedding, blocks, norm, output projection.

`forward` returns logits, or loss sums if targets are given, so that the logits of a training batch never exist.
Pipeline stages remove some of embedding, blocks, norm and head: the rest still runs, on hidden states in place of
tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, cast, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from piledriver.core.errors import UsageError
from piledriver.kernels.attention import AttentionKernel, attention_kernel
from piledriver.kernels.linear import linear
from piledriver.models.attention.cache import AttentionCache
from piledriver.models.attention.masks import Masks, make_masks
from piledriver.models.attention.rotary import Rotary
from piledriver.models.attention.temperature import QueryTemperature
from piledriver.models.block import Block
from piledriver.models.codes import QuantisedCodes
from piledriver.models.config import ModelConfig
from piledriver.models.initial_weights import initialise
from piledriver.models.layers import Embedding, Linear, make_norm
from piledriver.models.loss import LossSums, linear_cross_entropy, project, token_losses


class Transformer(nn.Module):
    """A decoder transformer, initialised from `seed` unless it is on the meta device.

    >>> model = Transformer(ModelConfig(vocab_size=32, dim=16, layers=2, heads=2))
    >>> tokens = torch.randint(32, (1, 8))
    >>> model(tokens).shape
    torch.Size([1, 8, 32])
    >>> sums = model(tokens[:, :-1], targets=tokens[:, 1:])
    >>> (sums.total / sums.tokens).backward()
    """

    def __init__(self, config: ModelConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.compute_dtype: torch.dtype | None = None
        self.z_loss = 0.0
        self.chunk_tokens: int | None = None
        self.attention_kernel: str | AttentionKernel = "auto"
        self.generation: dict[str, Any] = {}
        """Token ids and generation settings that `interchange.save_folder` writes (`eos_token_id`, ...)."""
        self.embedding: nn.Module | None = Embedding(config.vocab_size, config.dim)
        self.source_config: dict[str, Any] | None = None
        """Content of the config.json that the model was loaded from; `interchange.save_folder` keeps its keys."""
        self.compression: list[dict[str, Any]] = []
        """What was done to the trained weights, in order: the records of `compress`."""
        rows = config.max_positions + config.position_offset if config.positions == "learned" else 0
        self.position_embedding: nn.Module | None = Embedding(rows, config.dim) if rows else None
        self.embedding_norm: nn.Module | None = make_norm(config) if config.embedding_norm else None
        kinds = {config.rope_of(layer) for layer in range(config.layers)}
        self.rotary = Rotary(config) if "full" in kinds else None
        self.sliding_rotary = Rotary(config, "sliding") if "sliding" in kinds else None
        self.temperature = QueryTemperature(config) if config.temperature_scale else None
        # A dict, so that blocks keep their names in a pipeline stage that holds some of them.
        self.blocks = nn.ModuleDict({str(layer): Block(config, layer) for layer in range(config.layers)})
        self.norm: nn.Module | None = make_norm(config)
        head = None if config.tied else Linear(config.dim, config.vocab_size, bias=config.head_bias)
        self.head: nn.Module | None = head
        # Tensor and context parallelism replace these: a rank then holds a part of the vocabulary or the sequence.
        self.project: Callable[[Tensor, Tensor], Tensor] = project
        self.cross_entropy: Callable[..., LossSums] = linear_cross_entropy
        self.token_losses: Callable[..., Tensor] = token_losses
        if not any(parameter.is_meta for parameter in self.parameters()):
            initialise(self, seed)

    @overload
    def forward(
        self,
        tokens: Tensor,
        targets: None = None,
        *,
        masks: Masks | None = None,
        cache: AttentionCache | None = None,
        positions: Tensor | None = None,
    ) -> Tensor: ...

    @overload
    def forward(self, tokens: Tensor, targets: Tensor, *, masks: Masks | None = None) -> LossSums: ...

    @overload
    def forward(
        self, tokens: Tensor, targets: Tensor, *, masks: Masks | None = None, reduction: Literal["none"]
    ) -> Tensor: ...

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        masks: Masks | None = None,
        cache: AttentionCache | None = None,
        positions: Tensor | None = None,
        reduction: Literal["sum", "none"] = "sum",
    ) -> Tensor | LossSums:
        """Return the logits of [batch, time] tokens, or the loss sums against `targets` (-100 is ignored).

        With `reduction="none"`: the negative log-likelihood of every target, [batch, time] in fp32, without gradients.
        `masks` comes from `make_masks`, for packed documents. With a `cache`, `positions` ([batch, time]) are the cache
        positions of these tokens; they attend to all entries before them.
        """
        x, balance = self.hidden(tokens, masks=masks, cache=cache, positions=positions)
        if self.norm is None:
            return x
        if targets is None:
            return self.logits(x)
        if reduction == "none":
            return self.losses_by_token(x, targets)
        return self.loss(x, targets, balance)

    def hidden(
        self,
        tokens: Tensor,
        *,
        masks: Masks | None = None,
        cache: AttentionCache | None = None,
        positions: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the input of the output layer, and the mean load-balance loss of the blocks (None without experts)."""
        x, balances = self.run(tokens, masks=masks, cache=cache, positions=positions)
        return x, torch.stack(balances).mean() if balances else None

    def run(
        self,
        tokens: Tensor,
        *,
        time: int | None = None,
        masks: Masks | None = None,
        cache: AttentionCache | None = None,
        positions: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Run the parts that are present; return hidden states and the load-balance loss of each block with experts.

        `time` is the length of the full sequence where `tokens` (or hidden states) are a part of it.
        """
        time = tokens.shape[1] if time is None else time
        self._check(time, cache, positions)
        if masks is None:
            masks = self._default_masks(time, tokens.device, cache, positions)
        x = self._embed(tokens, masks.positions)
        rotary = self._rotary_tables(time, masks.positions)
        temperature = None if self.temperature is None else self.temperature(time, masks.positions, x.device)
        balances: list[Tensor] = []
        for block in cast(Iterable[Block], self.blocks.values()):
            warm = temperature if block.rope is None else None
            x, balance = block(x, rotary[block.rope], masks.of(block.window), cache, masks.positions, warm)
            if balance is not None:
                balances.append(balance)
        if self.norm is not None:
            x = self.norm(x)
            scale = self.config.logit_scale / self.config.width_multiplier
            x = x if scale == 1.0 else x * scale
        return x, balances

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of hidden states."""
        layer = self.output_layer()
        if isinstance(layer, QuantisedCodes):
            logits = torch.unflatten(linear(hidden.flatten(0, -2), layer.quantised), 0, hidden.shape[:-1])
        else:
            logits = self.project(*self._output_operands(hidden))
        cap = self.config.logit_softcap
        return logits if cap is None else (cap * torch.tanh(logits.float() / cap)).to(logits.dtype)

    def loss(self, hidden: Tensor, targets: Tensor, balance: Tensor | None = None) -> LossSums:
        """Return the loss sums of hidden states, computed in chunks unless `chunk_tokens` is 0."""
        hidden, weight = self._output_operands(hidden)
        sums = self.cross_entropy(
            hidden,
            weight,
            targets,
            z_loss=self.z_loss,
            softcap=self.config.logit_softcap,
            chunk_tokens=self.chunk_tokens,
        )
        if balance is None or self.config.moe is None:
            return sums
        # Multiplied by the tokens: dividing by the tokens of all ranks then gives the token-weighted mean.
        weighted = balance * sums.tokens
        total = sums.total + self.config.moe.balance_coefficient * weighted
        return LossSums(total, sums.cross_entropy, sums.z_loss, weighted.detach(), sums.tokens)

    def losses_by_token(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return the negative log-likelihood of every target, fp32, without gradients."""
        hidden, weight = self._output_operands(hidden)
        return self.token_losses(hidden, weight, targets, softcap=self.config.logit_softcap)

    def output_layer(self) -> nn.Module:
        """Return the output projection, or the embedding that it is tied to."""
        layer = self.embedding if self.head is None else self.head
        if layer is None:
            raise UsageError("this pipeline stage has no output layer", fix="use the last stage, which holds the head")
        return layer

    def output_weight(self) -> Tensor:
        """Return the weight of the output layer, [vocab, dim]; a quantised one is dequantised."""
        layer = self.output_layer()
        return layer.dense() if isinstance(layer, QuantisedCodes) else cast(Tensor, layer.weight)

    @property
    def device(self) -> torch.device:
        """Where the output layer is: the device of the model but for blocks that are elsewhere."""
        return cast(Tensor, self.output_layer().weight).device

    def _output_operands(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return hidden states and output weight whose product are the logits; a bias is one more column of both.

        So every way of computing the loss supports a bias. Columns of zeros keep the width a multiple of 8.
        """
        weight = self.output_weight()
        bias = None if self.head is None else self.head.bias
        if bias is None:
            return hidden, weight
        one = hidden.new_ones(*hidden.shape[:-1], 1)
        hidden = torch.cat((hidden, F.pad(one, (0, 7))), dim=-1)
        column = cast(Tensor, bias).unsqueeze(1)
        return hidden, torch.cat((weight, column, *[torch.zeros_like(column)] * 7), dim=1)

    def _rotary_tables(self, time: int, positions: Tensor | None) -> dict[str | None, Tensor | None]:
        """Return the rotary table of each kind of block (`Block.rope`)."""
        tables: dict[str | None, Tensor | None] = {None: None}
        for kind, rotary in (("full", self.rotary), ("sliding", self.sliding_rotary)):
            if rotary is not None:
                tables[kind] = rotary(time, positions)
        return tables

    def use_attention_kernel(self, name: str) -> None:
        """Compute attention with the kernel registered under `name`; `auto` is the fastest that fits the mask."""
        self.attention_kernel = name if name == "auto" else attention_kernel(name)

    def _embed(self, tokens: Tensor, positions: Tensor | None) -> Tensor:
        if self.embedding is None:
            return tokens
        x: Tensor = self.embedding(tokens)
        if self.config.embedding_scale != 1.0:
            x = x * self.config.embedding_scale
        if self.position_embedding is not None:
            places = torch.arange(tokens.shape[1], device=tokens.device) if positions is None else positions
            x = x + self.position_embedding(places + self.config.position_offset)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        return x if self.compute_dtype is None else x.to(self.compute_dtype)

    def _default_masks(
        self, time: int, device: torch.device, cache: AttentionCache | None, positions: Tensor | None
    ) -> Masks:
        if cache is None or positions is None:
            return make_masks(self.config, time, device, kernel=self.attention_kernel)
        return cache.masks(self.config, positions)

    def _check(self, time: int, cache: AttentionCache | None, positions: Tensor | None) -> None:
        longest = time if cache is None else cache.length
        if longest > self.config.max_positions:
            raise UsageError(
                f"a sequence of {longest} tokens is longer than max_positions {self.config.max_positions}",
                fix="shorten it or raise max_positions",
            )
        if (cache is None) != (positions is None):
            raise UsageError("one of cache and positions is missing", fix="give both or neither")
