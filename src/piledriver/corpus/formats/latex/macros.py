r"""Expand the authors' definitions: `\newcommand`, `\def`, `\let`, `\newenvironment`, `\newif` and the like.

One pass over the tokens with a stack of token lists. Expansion has a budget, because a few lines of TeX can expand
endlessly; after it the rest of the source is left unexpanded.
"""

from __future__ import annotations

import re

from piledriver.corpus.formats.latex.reader import Macro, TokenReader, substituted
from piledriver.corpus.formats.latex.tokens import environment, is_word, tokenize

# The budget: so many tokens and replacements, and so many more for each token of the source.
EXPANDED_TOKENS, EXPANDED_TOKENS_EACH = 300_000, 20
EXPANSIONS, EXPANSIONS_EACH = 20_000, 3
MAX_STACK = 400

_NEW_COMMAND = frozenset(
    "\\" + name + star
    for name in ("newcommand", "renewcommand", "providecommand", "DeclareRobustCommand", "newrobustcmd")
    for star in ("", "*")
)
_DEF = frozenset(("\\def", "\\gdef", "\\edef", "\\xdef", "\\long"))
# Redefinitions of these change how a page looks, not its text, and are ignored.
_KEPT = frozenset(
    "\\" + name
    for name in str.split(
        "begin end section subsection subsubsection paragraph subparagraph chapter part title author date abstract "
        "cite citep citet label ref eqref caption footnote item maketitle bibitem newblock par document input include "
        "emph textbf textit footnotemark footnotetext appendix url href thanks keywords bibliography newtheorem "
        "newcommand renewcommand def let proof qed and em bf it rm sc tt sl sf"
    )
)
_PRIMITIVE = re.compile(
    r"\\(?:@ifnextchar|@ifstar|futurelet|csname|expandafter|ifx|ifnum|ifdim|ifcase|futurelet|catcode|write|openout|"
    r"loop|repeat|numexpr|dimexpr|the|setbox|advance|IfValueTF|IfNoValueTF|IfBooleanTF|IfValueT|IfNoValueT|afterassignment|aftergroup|begingroup|romannumeral)(?![A-Za-z])"
)
_PARAMETERS = re.compile(r"(?:#[1-9])*")


def expanded(tokens: list[str]) -> list[str]:
    r"""Return the tokens with the authors' commands expanded and their definitions removed.

    >>> "".join(expanded(tokenize(r"\newcommand{\R}{\mathbb{R}}$\R^n$")))
    '$\\mathbb{R}^n$'
    """
    return _Expansion(tokens).run()


class _Expansion:
    def __init__(self, tokens: list[str]) -> None:
        self._reader = TokenReader()
        self._reader.push(tokens)
        self._macros: dict[str, Macro] = {}
        self._environments: dict[str, tuple[Macro, list[str]]] = {}
        self._flags: dict[str, bool] = {"\\iffalse": False, "\\iftrue": True, **_ENGINE}
        self._starred: set[str] = set()
        self._bools: dict[str, bool] = {}
        self._out: list[str] = []
        self._tokens_left = EXPANDED_TOKENS + EXPANDED_TOKENS_EACH * len(tokens)
        self._expansions_left = EXPANSIONS + EXPANSIONS_EACH * len(tokens)

    def run(self) -> list[str]:
        reader, out = self._reader, self._out
        while (token := reader.next()) is not None:
            if token[0] != "\\" or len(token) < 2:
                out.append(token)
            elif token in self._macros:
                self._expand(token)
            elif token[-1] == "*" and token[:-1] in self._macros:
                # The tokenizer makes a star part of the name, which is right only for commands defined with one.
                if token[:-1] not in self._starred:
                    reader.push(["*"])
                self._expand(token[:-1])
            elif token in _NEW_COMMAND:
                self._new_command(token)
            elif token in _DEF:
                self._define(token)
            elif token in _OTHERS:
                _OTHERS[token](self)
            elif token in self._flags:
                self._conditional(self._flags[token])
            elif token[-1] == "}" and (name := environment(token)) and name in self._environments:
                self._environment(token, name)
            elif token.endswith(("true", "false")) and self._set_flag(token):
                pass
            else:
                out.append(token)
        return out

    def _spend(self, tokens: int) -> bool:
        self._tokens_left -= tokens
        self._expansions_left -= 1
        return self._tokens_left > 0 and self._expansions_left > 0 and len(self._reader.frames) < MAX_STACK

    def _expand(self, token: str) -> None:
        macro = self._macros[token]
        arguments = self._arguments(macro)
        if not macro.arity and is_word(token):
            self._reader.skip_space()
        if not self._insert(macro, arguments):
            del self._macros[token]

    def _arguments(self, macro: Macro) -> list[list[str]]:
        arguments: list[list[str]] = []
        if macro.default is not None:
            given = self._reader.optional()
            arguments.append(macro.default if given is None else given)
        while len(arguments) < macro.arity:
            arguments.append(self._reader.argument())
        return arguments

    def _insert(self, macro: Macro, arguments: list[list[str]]) -> bool:
        """Read the body with its arguments next; return whether the budget allows it."""
        if not self._spend(len(macro.body) + sum(map(len, arguments)) * 2):
            return False
        self._reader.push(substituted(macro.body, arguments) if arguments else macro.body)
        return True

    def _environment(self, token: str, name: str) -> None:
        begin, end = self._environments[name]
        if token.startswith("\\end"):
            if self._spend(len(end)):
                self._reader.push(end)
            return
        self._insert(begin, self._arguments(begin))

    def _name(self) -> str:
        tokens = [token for token in self._reader.argument() if token.strip()]
        return tokens[0] if tokens else ""

    def _signature(self) -> tuple[int, list[str] | None]:
        count = "".join(self._reader.optional() or []).strip()
        arity = int(count) if count.isdecimal() and len(count) == 1 else 0
        return arity, self._reader.optional() if arity else None

    def _new_command(self, token: str) -> None:
        name = self._name()
        arity, default = self._signature()
        body = self._reader.argument()
        if token.startswith("\\provide") and name in self._macros:
            return
        self._learn(name, Macro(arity, default, body))

    def _define(self, token: str) -> None:
        if token == "\\long":
            return
        self._reader.skip_space()
        name = self._reader.next() or ""
        parameters: list[str] = []
        while (following := self._reader.peek()) is not None and following != "{" and len(parameters) < 40:
            parameters.append(self._reader.next() or "")
        body = self._reader.argument()
        if _PARAMETERS.fullmatch("".join(parameters).strip()):
            self._learn(name, Macro(sum(p.startswith("#") for p in parameters), None, body))

    def _learn(self, name: str, macro: Macro) -> None:
        if not name.startswith("\\") or name in _KEPT or environment(name):
            return
        if _PRIMITIVE.search("".join(macro.body)):
            # Programs in TeX are not run: the command stays and is handled as an unknown one.
            self._macros.pop(name, None)
            return
        while macro.body and macro.body[-1].isspace():
            macro.body.pop()
        if name in macro.body:
            return
        self._macros[name] = macro

    def _let(self) -> None:
        self._reader.skip_space()
        name = self._reader.next() or ""
        following = self._reader.peek()
        if following is not None and following.lstrip().startswith("="):
            self._reader.next()
            rest = following.lstrip()[1:].lstrip()
            if rest:
                self._reader.push([rest])
        self._reader.skip_space()
        target = self._reader.next() or ""
        if target.startswith("\\") and name.startswith("\\"):
            self._learn(name, self._macros.get(target) or Macro(0, None, [target]))

    def _operator(self) -> None:
        name = self._name()
        body = self._reader.argument()
        self._learn(name, Macro(0, None, ["\\operatorname", "{", *body, "}"]))

    def _paired_delimiter(self) -> None:
        name = self._name()
        left, right = self._reader.argument(), self._reader.argument()
        self._starred.add(name)
        self._learn(name, Macro(2, [], [*left, "#2", *right]))

    def _paired_delimiter_with_body(self) -> None:
        name = self._name()
        arity, _ = self._signature()
        left, right, body = self._reader.argument(), self._reader.argument(), self._reader.argument()
        # The size comes first, in brackets, so the arguments move on by one.
        moved = [f"#{int(token[1]) + 1}" if token[0] == "#" and token[1:].isdecimal() else token for token in body]
        self._starred.add(name)
        self._learn(name, Macro(min(arity + 1, 9), [], [*left, *moved, *right]))

    def _document_command(self) -> None:
        """Read a definition of xparse: mandatory arguments after at most one optional one."""
        name = self._name()
        specification = self._reader.argument()
        body = self._reader.argument()
        kinds = [token for token in tokenize("".join(specification).replace(" ", "")) if token.strip()]
        default: list[str] | None = None
        if kinds and kinds[0].startswith("O") and len(kinds) >= 3 and kinds[1] == "{":
            end = kinds.index("}") if "}" in kinds else len(kinds) - 1
            default, kinds = kinds[2:end], kinds[end + 1 :]
        letters = "".join(kinds)
        if letters.strip("m") == "":
            self._learn(name, Macro(len(letters) + (default is not None), default, body))

    def _new_environment(self) -> None:
        name = "".join(self._reader.argument()).strip()
        arity, default = self._signature()
        begin, end = self._reader.argument(), self._reader.argument()
        source = "".join([*begin, *end])
        if (
            name
            and name not in _KNOWN_ENVIRONMENTS
            and not _PRIMITIVE.search(source)
            and f"\\begin{{{name}}}" not in source
        ):
            self._environments[name] = (Macro(arity, default, begin), end)

    def _new_if(self) -> None:
        self._reader.skip_space()
        name = self._reader.next() or ""
        if name.startswith("\\if"):
            self._flags[name] = False

    def _if_same(self) -> None:
        """Evaluate `\\ifx`: whether two commands are the same, most often whether one is defined."""
        self._reader.skip_space()
        first = self._reader.next() or ""
        self._reader.skip_space()
        second = self._reader.next() or ""
        if second in _UNDEFINED:
            first, second = second, first
        if first in _UNDEFINED:
            self._conditional(second not in self._macros and second not in _DEFINED)
        else:
            one, other = self._macros.get(first), self._macros.get(second)
            self._conditional(first == second or (one is not None and one == other))

    def _new_bool(self) -> None:
        self._bools.setdefault("".join(self._reader.argument()).strip(), False)

    def _set_bool(self) -> None:
        name = "".join(self._reader.argument()).strip()
        self._bools[name] = "".join(self._reader.argument()).strip() == "true"

    def _if_bool(self) -> None:
        name = "".join(self._reader.argument()).strip()
        self._choose(self._bools.get(name, False))

    def _if_empty(self) -> None:
        self._choose(not "".join(self._reader.argument()).strip())

    def _if_then_else(self) -> None:
        test = [token for token in self._reader.argument() if token.strip()]
        name = "".join(test[2:-1]).strip() if test[:2] == ["\\boolean", "{"] else ""
        self._choose(self._bools.get(name, False))

    def _choose(self, value: bool) -> None:
        """Read two arguments and continue with the first if the value is true, else with the second."""
        branches = self._reader.argument(), self._reader.argument()
        chosen = branches[0] if value else branches[1]
        if self._spend(len(chosen)):
            self._reader.push(chosen)

    def _set_flag(self, token: str) -> bool:
        for ending, value in (("true", True), ("false", False)):
            flag = f"\\if{token[1:].removesuffix(ending)}"
            if token.endswith(ending) and flag in self._flags and flag not in ("\\iftrue", "\\iffalse", "\\if"):
                self._flags[flag] = value
                return True
        return False

    def _conditional(self, value: bool) -> None:
        """Read to the matching `\\fi` and push back the branch to take."""
        branches: list[list[str]] = [[]]
        depth = 1
        read = 0
        while (token := self._reader.next()) is not None:
            read += 1
            if token == "\\fi":
                depth -= 1
                if depth == 0:
                    break
            elif token.startswith("\\if") and token not in _NOT_CONDITIONS:
                depth += 1
            elif token == "\\else" and depth == 1:
                branches.append([])
                continue
            branches[-1].append(token)
        if not self._spend(read):
            self._flags.clear()
        chosen = branches[0] if value else branches[1] if len(branches) > 1 else []
        self._reader.push(chosen)


_OTHERS = {
    "\\let": _Expansion._let,
    "\\DeclareMathOperator": _Expansion._operator,
    "\\DeclareMathOperator*": _Expansion._operator,
    "\\newenvironment": _Expansion._new_environment,
    "\\newenvironment*": _Expansion._new_environment,
    "\\renewenvironment": _Expansion._new_environment,
    "\\newif": _Expansion._new_if,
    "\\ifx": _Expansion._if_same,
    **dict.fromkeys(("\\newbool", "\\providebool", "\\newboolean", "\\provideboolean"), _Expansion._new_bool),
    **dict.fromkeys(("\\setbool", "\\setboolean"), _Expansion._set_bool),
    "\\ifbool": _Expansion._if_bool,
    "\\ifstrempty": _Expansion._if_empty,
    "\\ifthenelse": _Expansion._if_then_else,
    "\\DeclarePairedDelimiter": _Expansion._paired_delimiter,
    "\\DeclarePairedDelimiterX": _Expansion._paired_delimiter_with_body,
    **dict.fromkeys(
        ("\\NewDocumentCommand", "\\RenewDocumentCommand", "\\DeclareDocumentCommand", "\\ProvideDocumentCommand"),
        _Expansion._document_command,
    ),
}
_KNOWN_ENVIRONMENTS = frozenset(
    str.split(
        "abstract document figure table proof itemize enumerate description quote thebibliography acknowledgments"
    )
)
# arXiv runs pdfTeX.
_ENGINE = {
    **dict.fromkeys(("\\ifpdf", "\\ifPDFTeX", "\\ifpdftex"), True),
    **dict.fromkeys(("\\ifxetex", "\\ifXeTeX", "\\ifluatex", "\\ifLuaTeX", "\\iftutex", "\\ifTUTeX"), False),
}
_UNDEFINED = frozenset(("\\undefined", "\\@undefined", "\\relax"))
_DEFINED = frozenset(("\\pdfoutput", "\\pdftexversion", "\\documentclass", "\\section", "\\chapter"))
_NOT_CONDITIONS = frozenset(("\\ifthenelse", "\\iff", "\\ifbool", "\\ifstrempty", "\\ifdefempty"))
