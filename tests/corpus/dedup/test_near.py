"""Near-duplicates: the steps over files find what a comparison of everything with everything finds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from piledriver.corpus.dedup.arrays import open_array, write_arrays
from piledriver.corpus.dedup.clusters import label_components
from piledriver.corpus.dedup.minhash import PRESETS, MinHashSettings, Signer, similarity
from piledriver.corpus.dedup.near import find_candidates, sign_texts, sort_bands, verify_candidates
from piledriver.corpus.dedup.runs import RunLookup, SortedRun, hash_ranges


def texts_of(seed: int, count: int) -> list[str]:
    """Random texts, every third an edit of the one before."""
    random = np.random.default_rng(seed)
    texts: list[str] = []
    for i in range(count):
        if i % 3 == 2:
            words = texts[-1].split()
            words[int(random.integers(len(words)))] = "changed"
        else:
            words = [f"w{n}" for n in random.integers(0, 5000, 150)]
        texts.append(" ".join(words))
    return texts


def find(
    texts: list[str],
    folder: Path,
    settings: MinHashSettings,
    chunk: int,
    memory_bytes: int,
    pairs_at_once: int = 1 << 21,
) -> dict[int, int]:
    runs = []
    for first in range(0, len(texts), chunk):
        path = str(folder / f"run-{first}")
        runs.append(SortedRun(path, first, sign_texts(texts[first : first + chunk], settings, path)))
    groups = []
    for low in range(0, len(runs), 3):
        path = str(folder / f"group-{low}")
        groups.append(SortedRun(path, runs[low].first, sort_bands(runs[low : low + 3], settings, path)))
    candidates = []
    for band in range(settings.bands):
        for i, hashes in enumerate(hash_ranges(len(texts), memory_bytes)):
            candidates.append(str(folder / f"pairs-{band}-{i}"))
            find_candidates(groups, band, hashes, candidates[-1])
    signed = RunLookup(np.array([run.first for run in runs], np.uint64), lambda number: runs[number].folder)
    edges = []
    for low in range(0, len(groups), 2):
        edges.append(str(folder / f"edges-{low}"))
        chosen = groups[low : low + 2]
        verify_candidates(signed, chosen, candidates, settings.threshold, edges[-1], pairs_at_once=pairs_at_once)
    label_components(edges, len(texts), str(folder / "labels"), block=5)
    return dict(open_array(str(folder / "labels"), "clusters").tolist())


@pytest.mark.parametrize(("chunk", "memory_bytes"), [(100, 1 << 30), (7, 1 << 30), (13, 500)])
def test_clusters_do_not_depend_on_chunks_or_memory(chunk: int, memory_bytes: int, tmp_path: Path) -> None:
    texts = texts_of(0, 60)
    labels = find(texts, tmp_path, PRESETS["piledriver"], chunk, memory_bytes)
    expected = {i: i - (1 if i % 3 == 2 else 0) for i in range(60) if i % 3}
    assert labels == expected


def test_a_bucket_of_everything_costs_two_numbers_a_group_and_is_one_cluster(tmp_path: Path) -> None:
    texts = ["the same words in every text of all"] * 200
    labels = find(texts, tmp_path, PRESETS["piledriver"], 10, 1 << 30, pairs_at_once=10)
    assert labels == dict.fromkeys(range(200), 0)
    groups = [open_array(str(path), "hashes") for path in tmp_path.glob("group-*")]
    assert len(groups) == 7
    assert {len(hashes) for hashes in groups} == {2 * PRESETS["piledriver"].bands}


@given(
    edges=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=60),
    files=st.integers(1, 4),
    block=st.integers(1, 20),
)
def test_clusters_are_the_connected_components(
    edges: list[tuple[int, int]], files: int, block: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("edges")
    paths = []
    for i in range(files):
        paths.append(str(folder / str(i)))
        write_arrays(paths[-1], edges=np.array(edges[i::files], np.uint64).reshape(-1, 2))
    label_components(paths, 41, str(folder / "labels"), block=block)
    assert dict(open_array(str(folder / "labels"), "clusters").tolist()) == components(edges)


def components(edges: list[tuple[int, int]]) -> dict[int, int]:
    label = {node: node for edge in edges for node in edge}
    for _ in label:
        for one, two in edges:
            label[one] = label[two] = min(label[one], label[two])
    return label


@pytest.mark.parametrize("sign_after_word", ["", ",", " ."])
def test_signatures_estimate_the_jaccard_similarity_of_words_between_spaces(sign_after_word: str) -> None:
    sign = Signer(MinHashSettings(bands=64, rows=8))
    texts = [text.replace(" ", f"{sign_after_word} ") for text in texts_of(1, 90)]
    errors = []
    for original, edited in zip(texts[1::3], texts[2::3], strict=True):
        one, two = ({tuple(t.split()[i : i + 5]) for i in range(len(t.split()) - 4)} for t in (original, edited))
        errors.append(similarity(sign(original), sign(edited)) - len(one & two) / len(one | two))
    assert abs(float(np.mean(errors))) < 0.01
    assert float(np.std(errors)) < 0.03


def test_a_change_in_a_script_without_spaces_is_a_small_one() -> None:
    sign = Signer(PRESETS["piledriver"])
    thai = "".join(chr(0x0E01 + number) for number in np.random.default_rng(0).integers(0, 40, 400))
    assert similarity(sign(thai), sign(f"{thai[:200]}ก{thai[201:]}")) > 0.9


@given(st.text())
def test_any_text_has_a_signature(text: str) -> None:
    Signer(PRESETS["datatrove"])(text)
