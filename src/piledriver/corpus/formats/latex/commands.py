"""How many arguments a command or an environment has that are not text, and what kind of thing it is. Tables only."""

from __future__ import annotations


def _named(names: str, prefix: str = "\\") -> frozenset[str]:
    return frozenset(f"{prefix}{name}" for name in names.split())


# Commands whose arguments are for the typesetter: (how many are dropped), the rest of the text goes on behind them.
DROPPED_ARGUMENTS = {
    **dict.fromkeys(
        _named(
            "todo missingfigure marginpar vspace vspace* hspace hspace* includegraphics includegraphics* includepdf "
            "psfig epsfig epsfbox epsffile "
            "bibliographystyle usepackage RequirePackage documentclass documentstyle pagestyle thispagestyle color "
            "pagecolor hypersetup newcounter pagenumbering graphicspath input include includeonly nocite geometry "
            "stepcounter refstepcounter usetikzlibrary pgfplotsset tikzset lstset hyphenation author "
            "affil affiliation address email institute date thanks authorrunning titlerunning altaffiliation "
            "altaffilmark affaddr orcid submitted accepted ead cortext corref fnref tnoteref cormark fnmark "
            "markright shorttitle "
            "shortauthors correspondingauthor IEEEauthorblockN IEEEauthorblockA IEEEmembership "
            "IEEEspecialpapernotice IEEEpubid inst homepage collaboration preprint pacs ccsdesc copyrightyear "
            "acmYear acmDOI acmISBN acmPrice acmConference setcopyright received accepted published volume "
            "numberofauthors editor setlist captionsetup allowdisplaybreaks sisetup linenumbers hyperbaseurl cline "
            "cmidrule index glossary printindex bstctlcite urlstyle theoremstyle addbibresource "
            "DeclareGraphicsExtensions rowcolor cellcolor columncolor arrayrulecolor floatname "
            "externaldocument newlength newsavebox savebox usebox sbox gdef endnotetext footnotesep PACS subjclass "
            "authornote received revised dedication curraddr urladdr keywordsname journalname fancyhead fancyfoot "
            "lhead rhead chead lfoot rfoot cfoot fancyhf listfiles    showthe typeout "
            "message special Aff Auth affils paperid icmltitlerunning icmlaffiliation "
            "icmlcorrespondingauthor icmlkeywords icmlsetsymbol printAffiliationsAndNotice providecommand "
            "pdfinfo   orgname orgdiv orgaddress city country postcode state street"
        ),
        1,
    ),
    **dict.fromkeys(
        _named(
            "setlength addtolength setcounter addtocounter rule fontsize markboth  "
            " counterwithin   newcolumntype icmlauthor crefname Crefname "
            "resizebox resizebox* fntext settowidth settoheight counterwithout lstdefinelanguage lstdefinestyle "
            "altaffiltext slugcomment newlist pdfbookmark setbeamertemplate setbeamercolor   DeclareRobustCommand "
            "multirow"
        ),
        2,
    ),
    **dict.fromkeys(_named("addcontentsline definecolor titlespacing titlespacing* contentsline  "), 3),
    **dict.fromkeys(
        _named(
            "textcolor colorbox parbox raisebox scalebox rotatebox   foreignlanguage selectlanguage "
            "bibinfo bibfield   hyperlink hypertarget    adjustbox "
            "phantom vphantom hphantom multirowcell acrodef newacro"
        ),
        1,
    ),
}

# A dimension or a number follows without braces: `\vskip 3pt plus 1pt`, `\parindent=0pt`.
DIMENSIONS = _named(
    "vskip hskip kern mskip parindent parskip baselineskip textwidth textheight oddsidemargin evensidemargin topmargin "
    "headheight headsep footskip hsize vsize hoffset voffset leftskip rightskip abovedisplayskip belowdisplayskip "
    "columnsep tabcolsep arraycolsep itemsep parsep topsep partopsep leftmargin rightmargin marginparwidth penalty "
    "tolerance hbadness vbadness hfuzz vfuzz lineskip normalbaselineskip magnification raggedbottom unitlength "
    "epsfxsize epsfysize widowpenalty clubpenalty pretolerance looseness hangindent hangafter emergencystretch jot "
    "pageno baselinestretch arraystretch floatsep textfloatsep intextsep doublerulesep multiply advance divide lower "
    "raise"
)

SECTIONS = {
    "\\part": 1, "\\chapter": 1, "\\section": 2, "\\subsection": 3, "\\subsubsection": 4, "\\paragraph": 5,
    "\\subparagraph": 6, "\\beginsection": 2, "\\head": 2, "\\subhead": 3, "\\heading": 2, "\\newsec": 2, "\\subsec": 3,
    "\\appsection": 2, "\\subheading": 3, "\\specialhead": 2, "\\IEEEPARstart": 0, "\\unnumberedsection": 2,
    "\\chapternonum": 1, "\\addchap": 1,
    "\\addsec": 2,
}  # fmt: skip

CITATIONS = _named(
    "cite citep citet citealp citealt citeauthor citeyear citeyearpar citenum parencite textcite autocite footcite "
    "supercite fullcite shortcite citeN citeNP citeA citeasnoun onlinecite Cite Citet Citep cites citeauthoryear "
    "citet* citep* cite* citealt* citealp* citeauthor* parencite* textcite* fullciteauthor smartcite"
)
REFERENCES = _named(
    "ref eqref pageref autoref cref Cref vref nameref subref fref Fref prettyref labelcref cref* Cref* ref* autoref* "
    "figref tabref secref Eqref crefrange Crefrange vpageref"
)

# Environments that hold nothing to read.
DROPPED_ENVIRONMENTS = frozenset(
    str.split(
        "tikzpicture picture pspicture pspicture* axis pgfpicture filecontents comment CCSXML lrbox asy feynmandiagram "
        "fmffile fmfgraph fmfgraph* tikzcd circuitikz psfrags overpic forest textblock textblock* "
        "authors author affiliations affils scope tikz minipagefigure IEEEauthorblock biography IEEEbiography "
        "IEEEbiographynophoto"
    )
)
# Environments whose first arguments are for the typesetter.
ENVIRONMENT_ARGUMENTS = {
    "minipage": 1, "multicols": 1, "wrapfigure": 2, "wraptable": 2, "adjustbox": 1, "subfigure": 1, "subtable": 1,
    "adjustwidth": 2, "spacing": 1, "list": 2, "tabbing": 0, "floatingfigure": 1, "SCfigure": 0, "resizebox": 2,
    "otherlanguage": 1, "otherlanguage*": 1, "textblock": 1, "landscape": 0, "mdframed": 0, "tcolorbox": 0,
    "beamerboxesrounded": 1,
    "changemargin": 2, "subappendices": 0, "CJK": 2, "CJK*": 2, "sloppypar": 0, "addmargin": 1, "column": 1,
    "IEEEkeywords": 0,
    "frame": 0, "block": 0, "threeparttable": 0, "algorithmic": 0, "hyphenrules": 1, "varwidth": 1,
    "supertabular": 0, "turn": 1,
    "rotate": 1, "subequations": 0, "savequote": 0, "wrapfloat": 3, "captivy": 1, "cases": 0, "singlespace": 0,
}  # fmt: skip

MATH_ENVIRONMENTS = {
    **dict.fromkeys(("equation", "equation*", "displaymath", "math", "dmath", "dmath*", "empheq"), ""),
    **dict.fromkeys(
        str.split("align align* aligned eqnarray eqnarray* flalign flalign* split darray dgroup dgroup*"), "aligned"
    ),
    **dict.fromkeys(("alignat", "alignat*", "xalignat", "xalignat*", "IEEEeqnarray", "IEEEeqnarray*"), "aligned"),
    **dict.fromkeys(("gather", "gather*", "multline", "multline*", "gathered"), "gathered"),
}
NUMBERED_MATH = frozenset(str.split("equation align eqnarray flalign gather multline alignat dmath IEEEeqnarray"))
TABLES = {"tabular": 1, "tabular*": 2, "tabularx": 2, "tabulary": 2, "longtable": 1, "supertabular": 1, "xtabular": 1,
          "array": 1, "tabu": 1, "longtabu": 1, "tblr": 1, "deluxetable": 1, "deluxetable*": 1, "mpxtabular": 1,
          "ltable": 1, "NiceTabular": 1, "tabularray": 1}  # fmt: skip
LISTS = frozenset(
    str.split(
        "itemize enumerate description list compactitem compactenum compactdesc inparaenum inparaitem itemize* "
        "enumerate* "
        "asparaenum asparaitem enumerate1 trivlist labeling itemlist romanlist enumeratei packed_enum packed_item "
        "tightitemize tightenumerate questions parts steps APAenumerate APAitemize arabiclist alphlist"
    )
)
NUMBERED_LISTS = frozenset(
    str.split("enumerate compactenum inparaenum enumerate* asparaenum enumeratei arabiclist questions")
)
QUOTES = frozenset(("quote", "quotation", "displayquote", "verse", "blockquote", "epigraph"))
FLOATS = {
    **dict.fromkeys(
        str.split("figure figure* wrapfigure SCfigure sidewaysfigure sidewaysfigure* floatingfigure"), "Figure"
    ),
    **dict.fromkeys(
        str.split("table table* wraptable sidewaystable sidewaystable* deluxetable deluxetable* SCtable"), "Table"
    ),
    **dict.fromkeys(("algorithm", "algorithm*", "algorithm2e", "algo"), "Algorithm"),
    **dict.fromkeys(("listing", "codelisting"), "Listing"),
}
THEOREMS = {
    "theorem": "Theorem", "thm": "Theorem", "lemma": "Lemma", "lem": "Lemma", "lemme": "Lemma",
    "proposition": "Proposition",
    "prop": "Proposition", "corollary": "Corollary", "cor": "Corollary", "definition": "Definition",
    "defn": "Definition",
    "defi": "Definition", "dfn": "Definition", "remark": "Remark", "rem": "Remark", "rmk": "Remark",
    "example": "Example",
    "exam": "Example", "exmp": "Example", "conjecture": "Conjecture", "conj": "Conjecture", "claim": "Claim",
    "fact": "Fact",
    "assumption": "Assumption", "observation": "Observation", "question": "Question", "problem": "Problem",
    "note": "Note",
    "notation": "Notation", "exercise": "Exercise", "hypothesis": "Hypothesis", "property": "Property",
    "axiom": "Axiom",
    "condition": "Condition", "thm*": "Theorem", "theorem*": "Theorem", "lemma*": "Lemma", "remark*": "Remark",
    "definition*": "Definition", "corollary*": "Corollary", "proposition*": "Proposition", "conclusion": "Conclusion",
}  # fmt: skip

# Pseudo-code: what a command of `algorithmic` and its relatives prints before (and after) its argument.
ALGORITHM = {
    "state": ("\x04", ""), "statex": ("\x04", ""), "if": ("\x04if ", " then"), "elsif": ("\x04else if ", " then"),
    "elseif": ("\x04else if ", " then"), "else": ("\x04else", None), "endif": ("\x04end if", None),
    "for": ("\x04for ", " do"),
    "forall": ("\x04for all ", " do"), "endfor": ("\x04end for", None), "while": ("\x04while ", " do"),
    "endwhile": ("\x04end while", None), "repeat": ("\x04repeat", None), "until": ("\x04until ", ""),
    "loop": ("\x04loop", None),
    "endloop": ("\x04end loop", None), "return": ("\x04return ", ""), "require": ("\x04Require: ", ""),
    "ensure": ("\x04Ensure: ", ""), "comment": (" // ", ""), "print": ("\x04print ", ""), "input": ("\x04Input: ", ""),
    "output": ("\x04Output: ", ""), "endprocedure": ("\x04end procedure", None),
    "endfunction": ("\x04end function", None),
    "kwin": ("\x04Input: ", ""), "kwout": ("\x04Output: ", ""), "kwdata": ("\x04Data: ", ""),
    "kwresult": ("\x04Result: ", ""),
    "kwret": ("\x04return ", ""), "algorithmicrequire": ("Require:", None), "algorithmicensure": ("Ensure:", None),
    "procedure": ("\x04procedure ", ""), "function": ("\x04function ", ""), "call": ("", ""), "eif": ("\x04if ",
    " then"),
}  # fmt: skip
