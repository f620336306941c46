"""Operations on plain text: normalise, split into words, detect language and licence, count tokens."""
