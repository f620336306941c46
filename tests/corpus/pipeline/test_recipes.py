"""The recipes that come with the package load, name only what exists, and say what the paper says."""

from __future__ import annotations

import pytest

from piledriver.core.errors import UnknownNameError
from piledriver.corpus.pipeline.build import check_recipe
from piledriver.corpus.pipeline.recipe import load_recipe, shipped_recipes, source_name
from piledriver.corpus.pipeline.stages.filter import licence_allowed
from piledriver.corpus.sources import SOURCES

PILE = [slug for slug in SOURCES if SOURCES[slug].consent != "yours"]


@pytest.mark.parametrize("name", ["local", "open", "pile"])
def test_a_shipped_recipe_is_sound(name: str) -> None:
    assert name in shipped_recipes()
    recipe = load_recipe(name)
    check_recipe(recipe)
    assert recipe.name == name
    assert load_recipe(name, ["seed=7"]).seed == 7


def test_the_pile_is_whole_and_its_weights_are_the_papers() -> None:
    recipe = load_recipe("pile")
    assert sorted(entry.source for entry in recipe.sources) == sorted(PILE)
    assert all(entry.paths == [f"raw/{entry.source}"] for entry in recipe.sources)
    epochs = {source_name(entry): entry.epochs for entry in recipe.sources}
    # Raw GiB of the four largest and the smallest, and the weights in percent that table 1 gives them.
    for name, size, weight in [("Pile-CC", 227.12, 18.11), ("Books3", 100.96, 12.07), ("Wikipedia (en)", 6.38, 1.53)]:
        assert abs(100 * size * (epochs[name] or 0) / 1254.20 - weight) < 0.01
    assert sum(value or 0 for value in epochs.values()) == 41.5


@pytest.mark.parametrize(
    ("licence", "open_"),
    [
        ("public-domain", True),
        ("CC-BY-4.0", True),
        ("CC-BY-SA-3.0", True),
        ("CC0-1.0", True),
        ("MIT", True),
        ("BSD-3-Clause", True),
        ("MIT OR Apache-2.0", True),
        ("CC-BY-NC-4.0", False),
        ("CC-BY-ND-4.0", False),
        ("CC-BY-NC-SA-4.0", False),
        ("GPL-3.0", False),
        ("unknown", False),
        ("copyrighted", False),
        ("All rights reserved", False),
    ],
)
def test_open_takes_what_is_open(licence: str, open_: bool) -> None:
    rules = load_recipe("open").licences
    assert licence_allowed(licence, rules.allow, rules.refuse) is open_


def test_an_unknown_recipe_is_named_with_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'pile'"):
        load_recipe("pil")
