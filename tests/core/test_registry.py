from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from piledriver.core.errors import UnknownNameError, UsageError
from piledriver.core.registry import Registry


def test_listing_imports_nothing_and_asking_imports_one() -> None:
    registry: Registry[object] = Registry("thing", {"broken": "no.such.module:x", "join": "os.path:join"})
    assert list(registry) == ["broken", "join"]
    assert callable(registry["join"])


def test_an_unknown_name_suggests_the_nearest() -> None:
    registry: Registry[object] = Registry("thing", {"wikipedia": "os:sep"})
    with pytest.raises(UnknownNameError, match="did you mean 'wikipedia'"):
        registry["wikipeda"]


def test_a_name_is_never_replaced() -> None:
    registry: Registry[int] = Registry("thing", {"one": "os:sep"})
    registry.register("two", 2)
    assert registry["two"] == 2
    with pytest.raises(UsageError, match="already registered"):
        registry.register("one", 1)


def test_other_packages_add_through_entry_points(tmp_path: Path) -> None:
    (tmp_path / "plugin_module.py").write_text("ANSWER = 42\n")
    info = tmp_path / "plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[piledriver.thing]\nanswer = plugin_module:ANSWER\n")
    code = "from piledriver.core.registry import Registry; print(Registry('thing')['answer'])"
    said = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert said.stdout == "42\n"
