"""Source trees of one's own, one document a file."""

from __future__ import annotations

from piledriver.corpus.sources.base import Source
from piledriver.corpus.sources.shared.repositories.trees import tree_documents, tree_pieces, wants_file

SOURCE = Source(
    slug="code",
    name="Code",
    title="source trees, one document a file",
    raw_format="folders, git repositories (also bare), and archives of source code",
    licence="yours",
    consent="yours",
    treatment=(
        "The rules of the Github source: hidden files, licence files, minified files, data, what is not text, "
        "very long files, files of digits and files of very long lines are left out, each with its reason. The "
        "licence is that of the file's SPDX line or of the licence file at the root of the tree."
    ),
    wants=wants_file,
    pieces=tree_pieces,
    documents=tree_documents,
    text_kind="code",
)
