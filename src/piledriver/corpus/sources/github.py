"""GitHub: repositories as checkouts, bare repositories or archives, one document a file."""

from __future__ import annotations

from piledriver.corpus.sources.base import Source
from piledriver.corpus.sources.shared.repositories.trees import tree_documents, tree_pieces, wants_file

SOURCE = Source(
    slug="github",
    name="Github",
    title="source code of public repositories",
    raw_format="a checkout, a bare repository or .git folder, or a tar or zip of a repository; folders of them",
    licence="mixed",
    consent="terms",
    treatment=(
        "One file is one document, as it is. Left out, each with its reason: hidden files, licence files, "
        "minified files and node_modules, files with endings of data and media (the original also left out "
        "Racket, Scheme and Gradle files, which are code), what is not text, 100,000 characters or more, more "
        "than 80 % digits, lines of more than 200 characters on average. Every document has its own meta: in the "
        "original all files of a repository shared one and ended up with the last file's name. The licence is the "
        "file's own SPDX line, else that of the licence file at the root, recognised by its sentences, else "
        "`unknown`. Bare repositories are read object by object in Python: the git command would obey the "
        "repository's own configuration. Symbolic links and submodules are refused. The sampling of 16 % of the "
        "files and the choice by stars belong to the mixing and to the download."
    ),
    citation="The Pile, arXiv:2101.00027, section 2.6",
    wants=wants_file,
    pieces=tree_pieces,
    documents=tree_documents,
    text_kind="code",
)
