"""The names that users type: every one is there, in any order of imports, and importing the package costs little."""

from __future__ import annotations

import subprocess
import sys

import pytest

import piledriver
from piledriver.compat import accelerate

NOUNS = "Accelerator Layout World Document Recipe build_corpus TokenStream Transformer train TrainConfig bits_per_byte"

ORDERS = [
    "from piledriver import train, TrainConfig\nimport piledriver.train.config",
    "import piledriver.train.config\nfrom piledriver import train, TrainConfig",
    "import piledriver.train.config as c\nfrom piledriver import train, TrainConfig\n"
    "assert c.TrainConfig is TrainConfig",
    "from piledriver import *",
]
# One import of torch; each order begins in a process of its own that has imported nothing of ours.
FORKS = """
import os, sys, torch._dynamo, torch.distributed.checkpoint
for code in {codes!r}:
    child = os.fork()
    if not child:
        exec(code, dict())
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, code
"""


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def test_all_lists_the_nouns_of_this_library() -> None:
    assert {*NOUNS.split(), "generate", "__version__"} == set(piledriver.__all__) == set(dir(piledriver))
    for name in piledriver.__all__:
        assert getattr(piledriver, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Trainer'"):
        _ = piledriver.Trainer


def test_the_names_of_accelerate_are_importable_and_not_listed() -> None:
    theirs = {"set_seed", "get_logger", "ProjectConfiguration", *accelerate.__all__} - {"__version__", "Accelerator"}
    assert [name for name in theirs if not hasattr(piledriver, name)] == []
    assert not theirs & set(piledriver.__all__)


@pytest.mark.slow
def test_train_is_a_function_and_a_package_in_any_order_of_imports() -> None:
    checks = (
        "\nimport inspect, sys, piledriver\n"
        "assert list(inspect.signature(train).parameters)[0] == 'config' and callable(train)\n"
        "assert piledriver.train.config.TrainConfig is TrainConfig\n"
        "assert piledriver.train.train is sys.modules['piledriver.train.loop'].train\n"
        "try: train(TrainConfig)\n"  # reaches the loop, which wants a config and not its class
        "except (AttributeError, TypeError): print('called')\n"
    )
    codes = [order + checks for order in ORDERS]
    assert run(FORKS.format(codes=codes)).split() == ["called"] * len(ORDERS)


def test_importing_the_package_imports_nothing_else() -> None:
    code = "import sys, piledriver; print([m for m in sys.modules if m.split('.')[0] in ('torch', 'numpy', 'yaml')])"
    assert run(code) == "[]"


def test_partial_state_agrees_with_the_accelerator() -> None:
    accelerator, state = piledriver.Accelerator(cpu=True), piledriver.PartialState(cpu=True)
    try:
        assert (state.process_index, state.num_processes) == (accelerator.process_index, accelerator.num_processes)
        assert state.device == accelerator.device
    finally:
        type(state)._reset_state()


def test_rooms_export_what_the_documents_import() -> None:
    from piledriver.corpus import Document, ShardWriter, read_shards
    from piledriver.data import TokenStream, prepare_data_loader
    from piledriver.evaluate import bits_per_byte
    from piledriver.serve import generate

    assert all((Document, ShardWriter, read_shards, TokenStream, prepare_data_loader, bits_per_byte, generate))
