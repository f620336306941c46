"""Github and code: which files are taken, from checkouts, bare repositories and archives, and under which licence."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from piledriver.corpus.raw.git.pack import DamagedError, apply_delta
from piledriver.corpus.raw.git.repository import Repository
from piledriver.corpus.sources.shared.repositories.rules import code_text, why_not_by_name
from piledriver.corpus.text.spdx import spdx_id
from tests.corpus.sources.extracting import SAMPLES, extract_bytes, extract_paths

MIT = """MIT License

Copyright (c) 2020 Somebody

Permission is hereby granted, free of charge, to any person obtaining a copy of this software ("Software") ...
The above copyright notice and this permission notice shall be included in all copies."""

FILES = {
    "LICENSE": MIT,
    "README.md": "# Tool\n",
    "src/main.c": "int main(void) { return 0; }\n",
    "src/own.c": "/* SPDX-License-Identifier: GPL-2.0-only */\nint a;\n",
    ".hidden": "x\n",
    "web/node_modules/a.js": "x\n",
    "web/lib.min.js": "x\n",
    "data.csv": "a,b\n",
}
TAKEN = {"README.md": "MIT", "src/main.c": "MIT", "src/own.c": "GPL-2.0-only"}

needs_git = pytest.mark.skipif(
    shutil.which("git") is None, reason="the git command, which makes the repository, is not here"
)


def write_tree(folder: Path) -> Path:
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return folder


def git(folder: Path, *arguments: str) -> str:
    clean = {"PATH": os.environ["PATH"], "HOME": str(folder), "GIT_CONFIG_NOSYSTEM": "1"}
    named = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main", "-c", "commit.gpgsign=false"]
    done = subprocess.run(
        ["git", *named, *arguments], cwd=folder, env=clean, check=True, capture_output=True, text=True
    )
    return done.stdout


def taken(documents: list) -> dict[str, str]:  # type: ignore[type-arg]
    return {document.meta["file_name"]: document.meta["licence"] for document in documents}


def test_a_folder(tmp_path: Path) -> None:
    documents, refusals = extract_paths("github", write_tree(tmp_path / "tool"))
    assert taken(documents) == TAKEN
    assert {refusal.origin: refusal.reason for refusal in refusals} == {
        "tool/LICENSE": "licence file",
        "tool/.hidden": "hidden file",
        "tool/web/node_modules/a.js": "minified or installed file",
        "tool/web/lib.min.js": "minified or installed file",
        "tool/data.csv": "data by its ending",
    }
    # The original shared one meta between all files of a repository.
    assert len({document.meta["file_name"] for document in documents}) == len(documents)


def test_a_folder_of_repositories_keeps_them_apart(tmp_path: Path) -> None:
    write_tree(tmp_path / "all" / "one")
    (tmp_path / "all" / "two").mkdir()
    (tmp_path / "all" / "two" / "a.py").write_text("a = 1\n")
    documents, _ = extract_paths("github", tmp_path / "all")
    assert {
        (d.meta["repo_name"], d.meta["licence"]) for d in documents if d.meta["file_name"] in ("a.py", "README.md")
    } == {
        ("one", "MIT"),
        ("two", "unknown"),
    }


@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_an_archive(kind: str) -> None:
    packed = io.BytesIO()
    # The licence comes last: what came before waits for it.
    names = sorted(FILES, key=lambda name: name == "LICENSE")
    if kind == "zip":
        with zipfile.ZipFile(packed, "w") as archive:
            for name in names:
                archive.writestr(f"tool-main/{name}", FILES[name])
    else:
        with tarfile.open(fileobj=packed, mode="w:gz") as tar:
            for name in names:
                entry = tarfile.TarInfo(f"tool-main/{name}")
                entry.size = len(FILES[name])
                tar.addfile(entry, io.BytesIO(FILES[name].encode()))
    documents, _ = extract_bytes("github", "tool.zip" if kind == "zip" else "tool.tar.gz", packed.getvalue())
    assert taken(documents) == TAKEN


@needs_git
@pytest.mark.parametrize("packed", [False, True])
def test_a_bare_repository(tmp_path: Path, packed: bool) -> None:
    work = tmp_path / "work"
    write_tree(work)
    (work / "link").symlink_to("/etc/passwd")
    git(work, "init", "-q")
    git(work, "remote", "add", "origin", "https://github.com/owner/tool.git")
    for version in range(6):
        (work / "big.py").write_text(
            "".join(f"line_{i} = {i * (version + 1) if i % 50 == 0 else i}\n" for i in range(2000))
        )
        git(work, "add", "-A")
        git(work, "commit", "-q", "-m", f"{version}")
    if packed:
        git(work, "gc", "-q", "--aggressive")
    bare = tmp_path / "tool.git"
    shutil.move(str(work / ".git"), bare)
    documents, refusals = extract_paths("github", bare)
    assert taken(documents) == TAKEN | {"big.py": "MIT"}
    assert "symbolic link" in {refusal.reason for refusal in refusals}
    assert {document.meta["repo_name"] for document in documents} == {"owner/tool"}
    text = next(document.text for document in documents if document.meta["file_name"] == "big.py")
    assert text == (work / "big.py").read_text()
    repository = Repository(str(bare))
    listed = [line.split("\t")[1] for line in git(bare, "ls-tree", "-r", "HEAD").splitlines()]
    assert [entry.path for entry in repository.entries(repository.head())] == listed


@needs_git
def test_a_bare_repository_in_an_archive(tmp_path: Path) -> None:
    work = write_tree(tmp_path / "work")
    (work / "config").write_text("a = 1\n")
    git(work, "init", "-q")
    git(work, "add", "-A")
    git(work, "commit", "-q", "-m", "x")
    git(work, "gc", "-q")
    packed = tmp_path / "tool.tar.gz"
    with tarfile.open(packed, "w:gz") as archive:
        archive.add(work / ".git", "tool.git")
    documents, _ = extract_paths("github", packed)
    assert taken(documents) == TAKEN | {"config": "MIT"}
    # A file that is only called like one of git's is code like any other.
    plain = tmp_path / "plain.tar"
    with tarfile.open(plain, "w") as archive:
        archive.add(work / "config", "plain/config")
    documents, _ = extract_paths("github", plain)
    assert taken(documents) == {"config": "unknown"}


@needs_git
def test_a_checkout_is_read_from_its_files_and_named_by_its_remote(tmp_path: Path) -> None:
    work = write_tree(tmp_path / "checkout")
    git(work, "init", "-q")
    git(work, "remote", "add", "origin", "git@github.com:owner/tool.git")
    git(work, "add", "-A")
    git(work, "commit", "-q", "-m", "x")
    hook = work / ".git" / "hooks" / "post-checkout"
    hook.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    hook.chmod(0o755)
    (work / "outside").symlink_to("/etc/passwd")
    documents, refusals = extract_paths("github", work)
    assert taken(documents) == TAKEN
    assert {document.meta["repo_name"] for document in documents} == {"owner/tool"}
    assert not any(".git/" in item.origin for item in refusals)
    assert not (tmp_path / "ran").exists()


CONTENT = {
    "binary": (b"\x7fELF\x00\x01", "not text"),
    "digits": (b"0123456789" * 10 + b"\n", "mostly digits"),
    "long lines": (b"x = y;" * 100 + b"\nz\n", "lines too long on average"),
    "too long": (b"a b c\n" * 20_000, "100000 characters or more"),
    "empty": (b" \n", "empty file"),
    "latin-1": ("caf\xe9 = 1\n".encode("latin-1"), None),
    "utf-16": ("a = 'é'\n".encode("utf-16"), None),
}


@pytest.mark.parametrize("name", CONTENT)
def test_content(name: str) -> None:
    content, reason = CONTENT[name]
    assert code_text(content)[1] == reason


def test_names() -> None:
    assert why_not_by_name("a/.github/x.yml") == "hidden file"
    assert why_not_by_name("LICENSE-MIT") == "licence file"
    assert why_not_by_name("src/Makefile") is None


PHRASES = {
    "Apache-2.0": "Apache License\n Version 2.0, January 2004",
    "GPL-2.0": "GNU GENERAL PUBLIC LICENSE\n\tVersion 2, June 1991",
    "LGPL-3.0": "GNU LESSER GENERAL PUBLIC LICENSE\n Version 3 ... GNU General Public License version 3",
    "AGPL-3.0": "GNU AFFERO GENERAL PUBLIC LICENSE Version 3, 19 November 2007",
    "MPL-2.0": "Mozilla Public License Version 2.0\n====",
    "MIT": MIT,
    "BSD-3-Clause": "Redistribution and use in source and binary forms, with or without modification, are permitted "
    "in binary form must reproduce ... may be used to endorse or promote products",
    "BSD-2-Clause": "Redistribution and use in source and binary forms, with or without\nmodification, are permitted "
    "Redistributions in binary form must reproduce",
    "ISC": "Permission to use, copy, modify, and/or distribute this software for any purpose with or without fee "
    "is hereby granted, provided that the above copyright notice",
    "0BSD": "Permission to use, copy, modify, and/or distribute this software for any purpose with or without fee "
    "is hereby granted.",
    "CC0-1.0": "CC0 1.0 Universal",
    "CC-BY-SA-4.0": "Attribution-ShareAlike 4.0 International",
    "Unlicense": "This is free and unencumbered software released into the public domain.",
}


@pytest.mark.parametrize("name", PHRASES)
def test_licence_by_its_text(name: str) -> None:
    assert spdx_id(PHRASES[name]) == name


def test_an_unknown_licence_is_none() -> None:
    assert spdx_id("All rights reserved. Do not touch.") is None


@given(st.binary(max_size=200), st.binary(max_size=100))
@settings(max_examples=100)
def test_damaged_deltas_are_refused(base: bytes, delta: bytes) -> None:
    with contextlib.suppress(DamagedError):
        assert isinstance(apply_delta(base, delta), bytes)


def test_a_damaged_repository_is_refused(tmp_path: Path) -> None:
    bare = tmp_path / "x.git"
    for name in ("objects/pack", "refs/heads"):
        (bare / name).mkdir(parents=True)
    (bare / "HEAD").write_text("ref: refs/heads/../../../../etc/passwd\n")
    (bare / "objects/pack/pack-1.idx").write_bytes(b"\xfftOc" + b"\0" * 2000)
    (bare / "objects/pack/pack-1.pack").write_bytes(b"PACK" + b"\xff" * 100)
    documents, refusals = extract_paths("github", bare)
    assert documents == []
    assert [refusal.reason for refusal in refusals] == ["unreadable repository"]


@pytest.mark.skipif(not (SAMPLES / "github").exists(), reason="the shared raw samples are not here")
def test_samples() -> None:
    documents, refusals = extract_paths("github", SAMPLES / "github")
    assert len(documents) == 13
    assert [refusal.reason for refusal in refusals] == ["hidden file"]
    code, _ = extract_paths("code", SAMPLES / "github" / "sqlite")
    assert {document.meta["language"] for document in code} == {"C"}
    assert code[0].text == (SAMPLES / "github" / "sqlite" / "src" / "complete.c").read_text()
