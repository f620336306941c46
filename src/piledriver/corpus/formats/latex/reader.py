"""Read tokens as TeX does: from the innermost list first, arguments in braces or single, white space skipped."""

from __future__ import annotations

from dataclasses import dataclass, field

from piledriver.corpus.formats.latex.tokens import is_paragraph

MAX_ARGUMENT_TOKENS = 200_000


@dataclass(slots=True)
class Macro:
    """A definition: the number of arguments, the default of the first, and the tokens of the body."""

    arity: int
    default: list[str] | None
    body: list[str]


@dataclass(slots=True)
class TokenReader:
    """A stack of token lists, read from the innermost."""

    frames: list[tuple[list[str], int]] = field(default_factory=list)

    def push(self, tokens: list[str]) -> None:
        """Read these tokens next."""
        if tokens:
            self.frames.append((tokens, 0))

    def next(self) -> str | None:
        """Return the next token and move past it; `None` at the end."""
        while self.frames:
            tokens, at = self.frames[-1]
            if at < len(tokens):
                self.frames[-1] = (tokens, at + 1)
                return tokens[at]
            self.frames.pop()
        return None

    def peek(self) -> str | None:
        """Return the next token without moving past it."""
        for tokens, at in reversed(self.frames):
            if at < len(tokens):
                return tokens[at]
        return None

    def skip_space(self) -> None:
        """Skip what TeX skips after a command word: spaces and one line end, never a blank line."""
        while (token := self.peek()) is not None:
            if token == "\n" or (token[0] in " \t" and not token.strip()):
                self.next()
            elif token[0] in " \t":
                self.next()
                self.push([token.lstrip(" \t")])
                return
            else:
                return

    def argument(self) -> list[str]:
        """Return the next group without its braces, or the next single token (of a run of text its first character)."""
        self.skip_space()
        token = self.next()
        if token is None or is_paragraph(token):
            return []
        if token != "{":
            if token[0] not in "\\#{}[]&~$\x02" and len(token) > 1:
                self.push([token[1:]])
                return [token[0]]
            return [token] if token != "}" else []
        return self._until("{", "}")

    def optional(self) -> list[str] | None:
        """Return the tokens in the brackets that follow, or `None`."""
        self.skip_space()
        if self.peek() != "[":
            return None
        self.next()
        return self._until("[", "]")

    def _until(self, opening: str, closing: str) -> list[str]:
        out: list[str] = []
        depth = 1
        braces = 0
        while (token := self.next()) is not None and len(out) < MAX_ARGUMENT_TOKENS:
            if token == "{":
                braces += 1
            elif token == "}":
                braces -= 1
            if token == closing and (closing == "}" or braces <= 0):
                depth -= 1
                if depth == 0:
                    break
            elif token == opening and (opening == "{" or braces <= 0):
                depth += 1
            out.append(token)
        return out


def substituted(body: list[str], arguments: list[list[str]]) -> list[str]:
    """Return the body of a command with its arguments inserted."""
    out: list[str] = []
    for token in body:
        if token[0] == "#" and len(token) == 2 and token[1].isdecimal():
            index = int(token[1]) - 1
            if index < len(arguments):
                out.extend(arguments[index])
        elif token.startswith("##"):
            out.append(token[1:])
        elif "#" in token and token.endswith("}"):
            # An environment named by an argument: `\begin{#1}`.
            for number, argument in enumerate(arguments, 1):
                token = token.replace(f"#{number}", "".join(argument)[:60])
            out.append(token)
        else:
            out.append(token)
    return out
