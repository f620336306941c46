"""Join words and cues to sentences."""

from __future__ import annotations

import re

from piledriver.corpus.formats.subtitles.cues import Cue
from piledriver.corpus.text.data_table import word_set

_TO_THE_LEFT = frozenset(
    [",", ".", "!", "?", ";", ":", "%", ")", "]", "}", "…", "...", "'", "’", "n't", "n’t", "?!", "!!", "¡¿"]
)
_CLITICS = word_set("'s 'm 're 've 'll 'd 't ’s ’m ’re ’ve ’ll ’d 'em 'S 'M 'LL 'RE")
_TO_THE_RIGHT = frozenset(["(", "[", "{", "$", "£", "€", "#", "¿", "¡"])
_PAIRS = {("gon", "na"), ("wan", "na"), ("got", "ta"), ("can", "not"), ("gim", "me"), ("lem", "me"), ("d'", "you")}
# French and Italian words that lose their last letter before a vowel, and the space with it.
_ELIDED = word_set(
    "l' d' j' n' s' m' t' c' qu' jusqu' lorsqu' puisqu' dell' all' nell' dall' sull' un' quest' quell' aujourd' quelqu'"
)
_END = re.compile(r"""[.!?…:;"'”’)\]♪-]$""")


def joined_words(words: list[str]) -> str:
    """Join tokens of OPUS to a sentence.

    >>> joined_words(["I", "do", "n't", "know", ",", '"', "he", "said", '"', ".", "(", "Gon", "na", ")"])
    'I don\\'t know, "he said". (Gonna)'
    """
    out: list[str] = []
    glue = True
    quoted = False
    previous = ""
    for word in words:
        if word in ('"', "``", "''"):
            space = not glue and not quoted
            out.append(' "' if space else '"')
            glue, quoted = not quoted, not quoted
            previous = word
            continue
        attached = word in _TO_THE_LEFT or word in _CLITICS or (previous.lower(), word.lower()) in _PAIRS
        if not glue and not attached:
            out.append(" ")
        out.append(word)
        glue = word in _TO_THE_RIGHT or word.lower().replace("’", "'") in _ELIDED
        previous = word
    return "".join(out)


def joined_cues(cues: list[Cue]) -> list[str]:
    """Return one line for each utterance; a sentence that continues in the next cue is joined."""
    lines: list[str] = []
    for cue in cues:
        for line in cue.lines:
            if lines and line[:1].islower() and not _END.search(lines[-1]):
                lines[-1] += " " + line
            else:
                lines.append(line)
    return lines


def undecorated(line: str) -> str:
    """Return an utterance without the dash or slash that marks a change of speaker.

    >>> undecorated("- Yeah!")
    'Yeah!'
    """
    return " ".join(line.split()).strip().strip("-–").strip().strip("/").strip()
