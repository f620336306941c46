from __future__ import annotations

import contextlib
import enum
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piledriver.core.config import from_mapping, load_config, save_config, to_yaml
from piledriver.core.errors import ConfigError, StorageError, UsageError


class Mode(enum.Enum):
    FAST = "fast"
    EXACT = "exact"


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    name: Literal["adamw", "lion"] = "adamw"

    def __post_init__(self) -> None:
        if self.learning_rate <= 0:
            raise ValueError(f"learning_rate is {self.learning_rate}; it must be positive")


@dataclass(frozen=True, kw_only=True)
class Run:
    model: str
    steps: int = 100
    seed: int | None = None
    mode: Mode = Mode.EXACT
    folder: Path = Path("runs")
    optimizer: Optimizer = field(default_factory=Optimizer)
    stages: list[Optimizer] = field(default_factory=list)
    weights: dict[str, float] = field(default_factory=dict)
    budget: int | str | None = None
    compile: bool | Literal["blocks"] | None = None


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


def test_defaults_then_file_then_command_line(tmp_path: Path) -> None:
    path = written(tmp_path, "model: tiny\nsteps: 7\noptimizer:\n  learning_rate: 1e-4\n")
    run = load_config(Run, path, ["optimizer.name=lion", "steps=9"])
    assert run == Run(model="tiny", steps=9, optimizer=Optimizer(learning_rate=1e-4, name="lion"))


@pytest.mark.parametrize(
    ("text", "overrides", "said"),
    [
        ("model: x\nstep: 3\n", [], ["run.yaml:2", "'step'", "did you mean 'steps'?"]),
        ("model: x\noptimizer:\n  lr: 1\n", [], ["run.yaml:3", "'optimizer.lr'", "learning_rate"]),
        ("model: x\nsteps: many\n", [], ["run.yaml:2", "'many'", "a whole number"]),
        ("model: x\nsteps: 1.5\n", [], ["run.yaml:2", "1.5", "a whole number"]),
        ("model: x\ncompile: block\n", [], ["run.yaml:2", "'block'", "true or false or 'blocks'"]),
        ("model: x\nsteps: true\n", [], ["run.yaml:2", "True"]),
        ("steps: 3\n", [], ["run.yaml", "'model' is required"]),
        ("model: x\nmodel: y\n", [], ["run.yaml:2", "given twice"]),
        ("model: [x\n", [], ["run.yaml", "not valid YAML"]),
        ("- model\n", [], ["run.yaml:1", "mapping"]),
        ("model: x\noptimizer:\n  learning_rate: -1\n", [], ["run.yaml:2", "must be positive"]),
        ("model: x\noptimizer:\n  betas: [1]\n", [], ["run.yaml:3", "a list of 2"]),
        ("model: x\nmode: slow\n", [], ["run.yaml:2", "'fast', 'exact'"]),
        ("model: x\nstages:\n- {name: sgd}\n", [], ["run.yaml:3", "stages.0.name", "'adamw', 'lion'"]),
        ("model: x\n", ["optimizer.nam=lion"], ["command line", "optimizer.nam", "did you mean 'name'?"]),
        ("model: x\n", ["steps"], ["'steps' is not an override", "key=value"]),
        ("model: x\n", ["steps.deep=3"], ["command line", "'steps'", "a whole number"]),
        ("a: &a [*a]\n", [], ["run.yaml"]),
        ("model: 7\n", [], ["run.yaml:1", 'text, in quotes: "..."']),
        ("model: x\n", ["model=7"], ["command line", """'model="..."'"""]),
    ],
)
def test_wrong_input_names_the_file_the_key_and_the_fix(
    tmp_path: Path, text: str, overrides: list[str], said: list[str]
) -> None:
    with pytest.raises(UsageError) as caught:
        load_config(Run, written(tmp_path, text), overrides)
    message = str(caught.value)
    assert all(words in message for words in said), message
    assert "\n" not in message


def test_dates_and_numbers_with_colons_are_text(tmp_path: Path) -> None:
    for value in ("2026-11-17", "2:4", "12:30:01"):
        assert load_config(Run, written(tmp_path, f"model: {value}\n")).model == value
        assert load_config(Run, None, [f"model={value}"]).model == value


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"nowhere\.yaml"):
        load_config(Run, tmp_path / "nowhere.yaml")


numbers = st.floats(min_value=1e-9, max_value=1e9, allow_nan=False)
names = st.text(min_size=1, max_size=20)
optimizers = st.builds(
    Optimizer, learning_rate=numbers, betas=st.tuples(numbers, numbers), name=st.sampled_from(["adamw", "lion"])
)
runs = st.builds(
    Run,
    model=names,
    steps=st.integers(-(2**40), 2**40),
    seed=st.none() | st.integers(0, 2**63),
    mode=st.sampled_from(Mode),
    folder=st.sampled_from([Path("runs"), Path("a/b c")]),
    optimizer=optimizers,
    stages=st.lists(optimizers, max_size=3),
    weights=st.dictionaries(names, numbers, max_size=3),
    budget=st.none() | st.integers(0, 10) | names,
)


@given(run=runs)
def test_a_resolved_config_loads_back_to_an_equal_value(run: Run, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("config") / "resolved.yaml"
    save_config(run, path)
    assert load_config(Run, path) == run
    assert to_yaml(run) == path.read_text(encoding="utf-8")


@given(data=st.dictionaries(st.text(), st.none() | st.booleans() | st.integers() | st.text() | st.lists(st.integers())))
def test_arbitrary_mappings_are_accepted_or_refused_never_crash(data: dict[str, object]) -> None:
    with contextlib.suppress(ConfigError):
        assert isinstance(from_mapping(Run, data), Run)
