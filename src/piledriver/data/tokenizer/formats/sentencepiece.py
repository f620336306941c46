"""SentencePiece models (`*.model`)."""

from __future__ import annotations

from functools import partial

from piledriver.core.errors import CorruptFileError
from piledriver.core.lazy import import_optional
from piledriver.data.tokenizer import encoders
from piledriver.data.tokenizer.encoders import Ids, Offsets
from piledriver.data.tokenizer.tokenizer import Tokenizer


def from_sentencepiece(name: str, content: bytes, encoder: str | None) -> Tokenizer:
    """Return the tokenizer of a SentencePiece model."""
    library = import_optional("sentencepiece", extra="data", purpose="reading a SentencePiece model")
    try:
        if not content:
            raise RuntimeError("it is empty")
        model = library.SentencePieceProcessor(model_proto=content)
    except RuntimeError as error:
        raise CorruptFileError(f"{name} is not a SentencePiece model: {error}", fix="fetch it again") from error

    def reference(texts: list[str]) -> tuple[Ids, Offsets]:
        return encoders.concatenate_ids(model.encode(texts, num_threads=1) if texts else [])

    chosen, encode_batch = encoders.choose(
        reference, {"gigatoken": partial(encoders.gigatoken_sentencepiece, content)}, encoder
    )
    ids = [model.unk_id(), model.bos_id(), model.eos_id(), model.pad_id()]
    return Tokenizer(
        content=content,
        suffix=".model",
        vocab_size=model.get_piece_size(),
        specials={model.id_to_piece(i): i for i in ids if i >= 0},
        encoder=chosen,
        encode_batch=encode_batch,
        pieces=None,
        reference_decode=model.decode,
    )
