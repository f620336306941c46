"""flax's seq2seq example in this library: an encoder, and a decoder that samples each character.

The decoder is a cell inside `RNN`: its carry and its outputs are trees, and it draws from a stream in each step.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import piledriver.functional as F

VOCABULARY = 6  # padding and end of sequence, then digits
END = 1


class DecoderCell(F.Module):
    """One step: the embedding of the true token (teacher forcing) or of the last prediction to a sampled token."""

    features: int
    teacher_force: bool

    def __call__(self, carry: Any, x: Tensor) -> tuple[Any, tuple[Tensor, Tensor]]:
        state, last = carry
        state, y = self.child("lstm", F.LSTMCell(self.features))(state, x if self.teacher_force else last)
        logits = self.child("logits", F.Dense(VOCABULARY))(y)
        token = F.categorical(self.make_key("lstm"), logits)
        prediction = torch.nn.functional.one_hot(token, VOCABULARY).to(logits.dtype)
        return (state, prediction), (logits, prediction)


class Seq2Seq(F.Module):
    """Encode the inputs, then decode from the encoder's last state."""

    teacher_force: bool
    hidden: int = 32

    def __call__(self, encoder_inputs: Tensor, decoder_inputs: Tensor) -> tuple[Tensor, Tensor]:
        ends = encoder_inputs.argmax(dim=-1) == END
        lengths = torch.where(ends.any(dim=1), ends.float().argmax(dim=1) + 1, encoder_inputs.shape[1])
        encoder = self.child("encoder", F.RNN(F.LSTMCell(self.hidden), return_carry=True))
        decoder = self.child("decoder", F.RNN(DecoderCell(self.hidden, self.teacher_force)))
        state, _ = encoder(encoder_inputs, seq_lengths=lengths)
        logits, predictions = decoder(decoder_inputs[:, :-1], initial_carry=(state, decoder_inputs[:, 0]))
        return logits, predictions


def batch(seed: int, size: int = 64) -> tuple[Tensor, Tensor]:
    """Copy a digit twice: inputs `d END pad`, outputs `start d d END`, one-hot."""
    digits = F.randint(F.key(seed), (size,), 2, VOCABULARY)
    end, pad = torch.full_like(digits, END), torch.zeros_like(digits)
    inputs, outputs = torch.stack([digits, end, pad], 1), torch.stack([pad, digits, digits, end], 1)
    inputs, outputs = (torch.nn.functional.one_hot(one, VOCABULARY).float() for one in (inputs, outputs))
    return inputs, outputs


def test_the_example_learns_and_decodes_without_the_answer() -> None:
    model = Seq2Seq(teacher_force=True)
    variables = model.init(F.key(0), *batch(0))
    state = F.TrainState.create(apply_fn=model.apply, params=variables["params"], tx=F.adam(0.01))

    def step(state: F.TrainState, seed: int) -> tuple[F.TrainState, Tensor]:
        inputs, outputs = batch(seed)

        def loss(params: Any) -> Tensor:
            logits, _ = state.apply_fn({"params": params}, inputs, outputs, rngs={"lstm": F.key(seed)})
            return F.cross_entropy(logits, outputs[:, 1:].argmax(dim=-1))

        value, grads = F.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    losses = []
    for seed in range(60):
        state, value = step(state, seed)
        losses.append(float(value))
    assert losses[-1] < 0.1 < losses[0]

    inputs, outputs = batch(1000)
    _, predictions = Seq2Seq(teacher_force=False).apply(
        {"params": state.params},
        inputs,
        torch.cat([outputs[:, :1], torch.zeros(64, 3, VOCABULARY)], 1),
        rngs={"lstm": F.key(1)},
    )
    assert (predictions.argmax(-1) == outputs[:, 1:].argmax(-1)).float().mean() > 0.9


def test_each_step_samples_anew() -> None:
    class Sampler(F.Module):
        def __call__(self, carry: Tensor, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            return carry, {"drawn": F.uniform(self.make_key("lstm"), x.shape), "seen": x}

        def initial_carry(self, batch: tuple[int, ...], like: Tensor) -> Tensor:
            return torch.zeros(*batch, 1)

    x = torch.arange(24.0).reshape(2, 4, 3)
    out = F.RNN(Sampler()).apply({"params": {}}, x, rngs={"lstm": F.key(0)})
    assert out["seen"].equal(x)
    assert len({float(number) for number in out["drawn"][:, :, 0].flatten()}) == 8
    cut = F.RNN(Sampler()).apply({"params": {}}, x, lengths=torch.tensor([4, 2]), rngs={"lstm": F.key(0)})
    assert cut["drawn"][0].equal(out["drawn"][0])
    assert not cut["seen"][1, 2:].any()
    with pytest.raises(F.errors.InputShapeError, match=r"Dense has no initial_carry"):
        F.RNN(F.Dense(2)).init(F.key(0), x)
