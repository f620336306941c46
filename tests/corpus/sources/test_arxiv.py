"""ArXiv: which submissions are papers, and each rule of the LaTeX converter."""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.corpus.sources.extracting import SAMPLES, extract_bytes, extract_paths
from tests.corpus.sources.mutating import mutations, parse_without_failure


def archive(files: dict[str, bytes | str]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in files.items():
            data = content.encode() if isinstance(content, str) else content
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def paper(body: str, preamble: str = "") -> str:
    return f"\\documentclass{{article}}\n{preamble}\n\\begin{{document}}\n{body}\n\\end{{document}}\n"


def text_of(body: str, preamble: str = "", **files: str) -> str:
    members = {"main.tex": paper(body, preamble), **{name.replace("_", "."): text for name, text in files.items()}}
    found, refusals = extract_bytes("arxiv", "2001.00001.gz", gzip.compress(archive(members)))
    assert not refusals
    return found[0].text


# Submissions


def test_a_single_tex_file_in_gzip() -> None:
    found, _ = extract_bytes("arxiv", "hep-th9901001.gz", gzip.compress(paper("Hello.").encode()))
    assert found[0].text == "Hello."
    assert found[0].meta["arxiv_id"] == "hep-th/9901001"


def test_a_bulk_tar_holds_submissions() -> None:
    bulk = archive(
        {"2001/2001.00001.gz": gzip.compress(archive({"m.tex": paper("One.")})), "2001/2001.00002.pdf": b"%PDF-1.5"}
    )
    found, refusals = extract_bytes("arxiv", "arXiv_src_2001_001.tar", bulk)
    assert [document.text for document in found] == ["One."]
    assert found[0].meta["origin"] == "arXiv_src_2001_001.tar!2001/2001.00001.gz"
    assert [refusal.reason for refusal in refusals] == ["pdf only"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"%PDF-1.4 ...", "pdf only"),
        (b"%!PS-Adobe-2.0", "postscript only"),
        (b"<html><body>x</body></html>", "not latex"),
        (b"%auto-ignore\nThis paper has been withdrawn by the author.", "withdrawn"),
        (archive({"fig.png": b"\x89PNG", "a.pdf": b"%PDF-1.4"}), "pdf only"),
    ],
)
def test_what_is_no_paper_is_refused_by_name(content: bytes, reason: str) -> None:
    found, refusals = extract_bytes("arxiv", "2001.00001.gz", gzip.compress(content))
    assert not found
    assert [refusal.reason for refusal in refusals] == [reason]


def test_the_main_file_is_the_one_that_reads_the_others() -> None:
    assert text_of("A \\input{part} \\include{sub}", part_tex="b", sub_tex="c") == "A b\n\nc"


def test_inputs_come_from_the_archive_only_and_never_twice_into_themselves() -> None:
    assert (
        text_of("x \\input{/etc/passwd}\\input{../../etc/passwd}\\input{loop} y", loop_tex="z\\input{loop}") == "x z y"
    )


def test_a_folder_of_papers_gives_a_document_each(tmp_path: Path) -> None:
    folder = tmp_path / "papers"
    folder.mkdir()
    (folder / "a.tex").write_text(paper("First."))
    (folder / "b.tex").write_text(paper("Second."))
    found, _ = extract_paths("arxiv", folder)
    assert sorted(document.text for document in found) == ["First.", "Second."]


# Text


def test_title_and_abstract_are_kept_and_authors_are_not() -> None:
    body = "\\title{On $x$\\thanks{NSF}}\\author{A. Nobody}\\maketitle\\begin{abstract}We do.\\end{abstract}Text."
    assert text_of(body) == "# On $x$\n\n## Abstract\n\nWe do.\n\nText."


def test_comments_go_and_escaped_percent_stays() -> None:
    assert text_of("50\\% of % hidden\n  all\n\n% whole line\nnext") == "50% of all\n\nnext"


def test_sections_and_references_to_them() -> None:
    body = "\\section{One}\\label{s:1}a\\subsection*{Two}b, see Section~\\ref{s:1} and \\ref{nowhere}."
    assert text_of(body) == "## One\n\na\n\n### Two\n\nb, see Section 1 and [nowhere]."


def test_a_label_means_what_its_environment_numbered_and_no_more() -> None:
    body = (
        "\\section{A}\\begin{equation}x\\label{e}\\end{equation}\\label{s}\\begin{figure}\\subfloat[p\\label{f:a}]{}"
        "\\caption{c}\\label{f}\\end{figure} \\ref{e} \\ref{s} \\ref{f} \\ref{f:a}"
    )
    assert text_of(body).endswith("Figure 1: c\n\n1 1 1 [f:a]")


def test_accents_dashes_and_quotes() -> None:
    assert (
        text_of("Erd\\H{o}s, Fr\\'echet, na\\\"{\\i}ve, \\c{c}a, \\ss, 1--2 --- ``so''")
        == "Erdős, Fréchet, naïve, ça, ß, 1–2 — “so”"
    )


def test_the_authors_macros_are_expanded_in_text_and_math() -> None:
    preamble = "\\newcommand{\\R}{\\mathbb{R}}\\def\\norm#1{\\|#1\\|}\\newcommand{\\foo}[2][z]{#1-#2}"
    preamble += "\\DeclareMathOperator{\\tr}{tr}"
    assert text_of("$\\norm{x}\\in\\R$, $\\tr A$, \\foo{a}, \\foo[b]{c}", preamble) == (
        "$\\|x\\|\\in\\mathbb{R}$, $\\operatorname{tr}A$, z-a, b-c"
    )


def test_macros_that_open_and_close_environments() -> None:
    assert text_of("\\be a=b \\ee", "\\newcommand{\\be}{\\begin{equation}}\\def\\ee{\\end{equation}}") == "$$a=b$$"


def test_macro_bombs_stop() -> None:
    bomb = "\\def\\a{\\b\\b}\\def\\b{\\c\\c}\\def\\c{\\d\\d}\\def\\d{\\a\\a}"
    assert "after" in text_of("\\a after", bomb)


def test_conditionals_take_the_branch_that_holds() -> None:
    assert (
        text_of("\\iffalse gone\\else kept\\fi \\ifdraft no\\fi \\drafttrue\\ifdraft yes\\fi", "\\newif\\ifdraft")
        == "kept yes"
    )


def test_booleans_of_packages() -> None:
    preamble = "\\newbool{long}\\setbool{long}{true}\\newcommand{\\x}[1]{\\ifbool{long}{long #1}{short}}"
    assert text_of("\\x{one}, \\ifthenelse{\\boolean{long}}{a}{b}, \\ifstrempty{}{c}{d}", preamble) == "long one, a, c"


def test_equations_keep_latex_and_show_the_numbers_that_are_cited() -> None:
    body = "\\begin{align}a&=b\\label{e:1}\\\\c&=d\\nonumber\\end{align} By \\eqref{e:1}, \\[x\\] and \\(y\\)."
    assert text_of(body) == (
        "$$\\begin{aligned} a&=b \\tag{1} \\\\ c&=d \\end{aligned}$$\n\nBy (1),\n\n$$x$$\n\nand $y$."
    )


def test_lists_and_descriptions() -> None:
    body = "\\begin{enumerate}\\item a\\item b\\begin{itemize}\\item c\\end{itemize}\\end{enumerate}"
    body += "\\begin{description}\\item[T] d\\end{description}"
    assert text_of(body) == "1. a\n2. b\n   - c\n\n- T: d"


def test_tables_become_pipe_tables_with_their_captions() -> None:
    body = (
        "\\begin{table}\\caption{Counts}\\begin{tabular}{l|cc}\\hline k & \\multicolumn{2}{c}{v} \\\\ "
        "\\cmidrule(lr){2-3}"
        " x & 1 & 2 \\\\[1mm] \\hline\\end{tabular}\\end{table}"
    )
    assert text_of(body) == "Table 1: Counts\n\n| k | v |  |\n|---|---|---|\n| x | 1 | 2 |"


def test_theorems_and_proofs() -> None:
    body = "\\begin{thm}[Euler]\\label{t}True.\\end{thm}\\begin{proof}By \\ref{t}.\\end{proof}"
    assert text_of(body, "\\newtheorem{thm}{Theorem}") == "Theorem 1 (Euler). True.\n\nProof. By 1. ∎"


def test_footnotes_go_to_the_end() -> None:
    assert text_of("A\\footnote{Note \\emph{it}.} b") == "A[^1] b\n\n[^1]: Note it."


def test_verbatim_text_is_not_touched() -> None:
    assert text_of("\\verb|%\\x| and\\begin{verbatim}\n% $a\\b{\n\\end{verbatim}") == "`%\\x` and\n\n```\n% $a\\b{\n```"


def test_citations_by_number_by_author_and_unknown() -> None:
    bbl = "\\begin{thebibliography}{9}\\bibitem{a} A. \\newblock T.\\bibitem[Bo(1999)]{b} B.\\end{thebibliography}"
    found = text_of("\\cite{a} \\citep[p.~3]{b} \\citet{b} \\cite{zz}\\bibliography{refs}", main_bbl=bbl)
    assert found == "[1] (Bo, 1999, p. 3) Bo (1999) [@zz]\n\n## References\n\n[1] A. T.\n\nB."


def test_a_bibliography_of_biber() -> None:
    bbl = (
        "\\entry{k}{article}{}\n      \\name{author}{1}{}{%\n        {{hash=x}{%\n           family={Kn\\'uth},\n"
        "           given={D.},\n}}%\n      }\n      \\field{title}{On {TeX}}\n      \\field{year}{1984}\n\\endentry"
    )
    found = text_of("\\cite{k}\\printbibliography[heading=x]", main_bbl=bbl)
    assert found == "[1]\n\n## References\n\n[1] D. Knúth. On TeX. 1984."


def test_the_head_of_a_paper_in_two_columns() -> None:
    body = "\\twocolumn[\\icmltitle{T}\n\n\\begin{abstract}A.\\end{abstract}] B."
    assert text_of(body) == "# T\n\n## Abstract\n\nA.\n\nB."


def test_pictures_and_layout_leave_nothing() -> None:
    body = "a\\vspace{1cm}\\includegraphics[width=3cm]{f.png}\\vskip 3pt plus 1pt b "
    body += "\\begin{tikzpicture}\\draw (0,0);\\end{tikzpicture}{\\bf c}"
    assert text_of(body) == "a b c"


def test_plain_tex_without_a_class() -> None:
    found, _ = extract_bytes(
        "arxiv", "math9201001.gz", gzip.compress(b"\\magnification=1200\nHello {\\it there}.\n\\bye")
    )
    assert found[0].text == "Hello there."


def test_ams_tex_closes_its_arguments_with_commands() -> None:
    source = (
        b"\\input amstex\n\\documentstyle{amsppt}\n\\topmatter\n\\title On rings\\endtitle\n"
        b"\\author N. Body\\endauthor\n"
        b"\\abstract We look.\\endabstract\n\\endtopmatter\n\\document\n\\head 1. Rings\\endhead\nText.\n"
        b"\\proclaim{Theorem 1} True.\\endproclaim\n\\demo{Proof} Clear.\\enddemo\n\\enddocument"
    )
    found, _ = extract_bytes("arxiv", "math9201002.gz", gzip.compress(source))
    assert found[0].text == (
        "# On rings\n\n## Abstract\n\nWe look.\n\n## 1. Rings\n\nText.\n\nTheorem 1. True.\n\nProof. Clear."
    )


@pytest.mark.skipif(not (SAMPLES / "arxiv").is_dir(), reason="../shared/raw-samples is not here")
def test_real_papers() -> None:
    found, refusals = extract_paths("arxiv", SAMPLES / "arxiv" / "1911.02782.gz", SAMPLES / "arxiv" / "sympy-paper")
    assert not refusals
    assert found[0].meta["title"] == "S2ORC: The Semantic Scholar Open Research Corpus"
    assert "| PubMed Central (OA) | 2.6M |" in found[0].text
    assert "Dominika Tkaczyk, Andrew Collins" in found[0].text
    assert "\\begin{table" not in found[0].text
    assert any(document.meta.get("title") == "SymPy: symbolic computing in Python" for document in found)


VALID = paper(
    "\\section{A}$x$ \\begin{tabular}{l}a&b\\\\\\end{tabular}\\begin{itemize}\\item[x] "
    "y\\end{itemize}\\foo{z}\\footnote{n}"
    "\\begin{align}a\\\\b\\end{align}\\cite[a]{b}\\'e \\verb|x|",
    "\\newcommand{\\foo}[2][d]{#1\\bar#2}\\def\\bar#1{#1}\\newif\\ifx",
).encode()
WORDS = str.split(
    "{ } [ ] $ $$ \\[ \\item \\\\ & #1 \\begin{itemize} \\end{itemize} \\def \\a \\newcommand \\begin{tabular} \\let "
    "\\multicolumn{9} \\iftrue \\else \\fi \\' \\verb| \\begin{align} \\label \\bibitem[ \\caption x % \\section \\SI "
    "\\footnote{ \\head \\endhead \\newif \\begin{a} \\newenvironment{a}"
)
TEX = st.lists(st.sampled_from([*WORDS, " ", "\n\n"]), max_size=40)


@settings(max_examples=150, deadline=None)
@given(mutations(VALID) | TEX.map(lambda tokens: "".join(tokens).encode()))
def test_no_source_breaks_the_converter(source: bytes) -> None:
    assert all("\x02" not in text for text in parse_without_failure("arxiv", source, "x.gz"))


@pytest.mark.parametrize("unit", ["{", "\\emph{", "\\begin{itemize}", "\\footnote{", "\\iftrue ", "\\[", "\\section{"])
def test_depth_is_no_danger(unit: str) -> None:
    parse_without_failure("arxiv", paper(unit * 3000).encode(), "x.gz")


def test_plain_tex_has_lines_items_notes_and_fonts() -> None:
    source = (
        "\\magnification=1200\n\\font\\big=cmbx10 scaled\\magstep2\n\\centerline{\\big A Title}\n\\centerline{J. Doe}\n"
        "Words\\footnote{$^1$}{a note} $$x=y\\eqno(1)$$\n\\item{(a)} first\n\\item{(b)} second\n\\bye\n"
    )
    documents, _ = extract_bytes("arxiv", "9201001.tex", source.encode())
    assert documents[0].text == (
        "A Title\n\nJ. Doe\n\nWords[^1]\n\n$$x=y\\tag{1}$$\n\n(a) first\n\n(b) second\n\n[^1]: a note"
    )


def test_of_a_condition_one_branch_is_read() -> None:
    body = (
        "\\ifx\\unknown\\undefined one\\else two\\fi, \\ifpdf three\\else four\\fi, "
        "\\ifx\\pdfoutput\\undefined five\\else six\\fi"
    )
    source = f"\\documentclass{{article}}\\begin{{document}}{body}\\end{{document}}"
    documents, _ = extract_bytes("arxiv", "paper.tex", source.encode())
    assert documents[0].text == "one, three, six"


def test_the_origin_of_a_file_by_itself_is_its_name() -> None:
    documents, _ = extract_bytes("arxiv", "main.tex", paper("Words.").encode())
    assert documents[0].meta["origin"] == "main.tex"


@pytest.mark.parametrize("name", ["1911.02782", "2001.00001v2", "hep-th9901001", "math.GT0001001v1"])
def test_submissions_as_arxiv_serves_them_have_no_ending(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(gzip.compress(paper("Words.").encode()))
    (tmp_path / "notes").write_text("no paper")
    documents, _ = extract_paths("arxiv", tmp_path)
    assert [document.text for document in documents] == ["Words."]


@pytest.mark.parametrize("prefix", ["", "./"])
def test_inputs_are_found_in_an_archive_of_a_folder_as_in_the_archive_itself(prefix: str, tmp_path: Path) -> None:
    members = {
        f"{prefix}main.tex": paper("Begin. \\input{sections/one} \\input{two.tex} End."),
        f"{prefix}sections/one.tex": "The first section.\n",
        f"{prefix}two.tex": "The second section.\n",
    }
    (tmp_path / "paper.tar.gz").write_bytes(gzip.compress(archive(members)))
    by_path, _ = extract_paths("arxiv", tmp_path / "paper.tar.gz")
    in_folder, refusals = extract_paths("arxiv", tmp_path)
    assert not refusals
    assert [document.text for document in in_folder] == [document.text for document in by_path]
    assert "The first section." in in_folder[0].text
    assert "The second section." in in_folder[0].text


def test_the_label_in_an_unknown_command_is_a_reference_and_no_word() -> None:
    body = "\\begin{theorem}\\label{thm:main}It holds.\\end{theorem} By \\thmlink{thm:main} and \\proofin{prop:lost}."
    text = text_of(body, "\\newtheorem{theorem}{Theorem}")
    assert "By 1 and" in text
    assert "prop:lost" not in text
    assert "A \\emph" not in text_of("A \\mystery{word} and \\mystery{two words: here}.")
    assert "word and two words: here" in text_of("A \\mystery{word} and \\mystery{two words: here}.")


def test_a_list_with_authors_and_years_has_no_numbers() -> None:
    entries = "\\bibitem[Knuth(1984)]{k} Knuth. \\bibitem{x} Anon. \\bibitem[Lamport(1986)]{l} Lamport."
    text = text_of(f"See \\citet{{k}}.\\begin{{thebibliography}}{{9}}{entries}\\end{{thebibliography}}")
    assert "See Knuth (1984)." in text
    assert "[2]" not in text
