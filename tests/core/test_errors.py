from __future__ import annotations

import pickle

import pytest

from piledriver.core.errors import ConfigError, MissingDependencyError, PiledriverError, UnknownNameError, nearest


@pytest.mark.parametrize(
    "error",
    [
        PiledriverError("it broke", fix="mend it"),
        ConfigError("a.yaml:3: unknown key 'x'", fix="did you mean 'y'?"),
        UnknownNameError("source", "wikipeda", ["wikipedia-en", "github"]),
        MissingDependencyError("ray", extra="ray", purpose="the ray executor"),
    ],
)
def test_errors_cross_process_boundaries_whole(error: PiledriverError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert (str(copy), copy.what, copy.fix) == (str(error), error.what, error.fix)
    assert "\n" not in str(error)


def test_the_nearest_name_is_suggested_and_a_far_one_is_not() -> None:
    assert nearest("learning_rte", ["learning_rate", "steps"]) == "learning_rate"
    assert nearest("zzz", ["learning_rate", "steps"]) is None
    assert "choose from github, wikipedia-en" in str(UnknownNameError("source", "zzz", ["wikipedia-en", "github"]))
