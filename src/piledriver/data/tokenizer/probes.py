"""Probe texts that tell tokenizers apart: every script and symbol class, white space, numbers, code, long runs."""

from __future__ import annotations

import numpy as np

from piledriver.core.random import Stream


def probes() -> list[str]:
    """Return the probe texts, the same in every process."""
    fixed = [
        "",
        " ",
        "\n",
        "Hello world",
        " leading and trailing ",
        "tabs\tand\r\nline ends\n\n\n  indented\n\tmore",
        "I'm you're we've he'll they'd IT'S o'clock rock'n'roll ''quoted''",
        "1 12 123 1234 12345 3.14159 1,000,000 0x1F 1e-9 ½ ² ٣٤٥ 一二三",
        "def f(x):\n    return {'a': [x ** 2 for _ in range(10)]}  # comment\n\n\nclass A:\n\tpass\n",
        "https://example.org/a_b-c?d=e&f=%20#g user@example.org C:\\path\\to\\file.txt",
        "<|endoftext|> <s> </s> [PAD] <unk> <|im_start|>",
        "Ünïcödé naïve café Straße ŁÓDŹ İstanbul ǅ ﬁ ﬀ",
        "Привет, мир! Γειά σου Κόσμε שלום עולם مرحبا بالعالم नमस्ते दुनिया สวัสดีชาวโลก 你好，世界 こんにちは 안녕하세요",
        "e\u0301 vs é, a\u0308\u0323, z\u0335\u0336, क्षि, กำ, \u200d\u200c\u200b\ufeff\u00ad",
        "👍🏽👩‍👩‍👧‍👦🇩🇪🏴󠁧󠁢󠁥󠁮󠁧󠁿 ™®© ←→ ∑∫√ ≤≥ £€¥ “”‘’–—… ¿¡",
        "\u00a0nbsp\u2003em\u3000ideographic\u2028line\u2029paragraph\x0b\x0c\x1c\x85next",
        "\x00\x01\x7f\x80\x9f\ufffd\ufffe\U0010ffff\U000e0001",
        "a" * 3000,
        " " * 1000 + "x" + "\n" * 500 + "=" * 400,
        "the quick brown fox jumps over the lazy dog. " * 40,
        "antidisestablishmentarianism pneumonoultramicroscopicsilicovolcanoconiosis xqzjkvbw",
    ]
    return fixed + [_scrambled(number) for number in range(40)]


def _scrambled(number: int) -> str:
    """Return random characters of many Unicode blocks."""
    stream = Stream(0, "tokenizer probe", number)
    blocks = [(32, 127), (9, 14), (160, 592), (880, 1424), (1424, 1920), (2304, 3072), (8192, 8304), (8352, 8960)]
    blocks += [(12288, 12544), (19968, 20480), (44032, 44544), (127744, 129536), (65024, 65136), (768, 880)]
    draws = stream.bits(np.arange(1200)).reshape(400, 3).tolist()
    characters = []
    for which, plain, offset in draws:
        low, high = blocks[which % len(blocks)] if plain % 3 else blocks[0]
        characters.append(chr(low + offset % (high - low)))
    return "".join(characters)
