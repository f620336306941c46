"""The names that users type: every one of them is there, and importing the package costs little."""

from __future__ import annotations

import piledriver


def test_every_public_name_can_be_imported() -> None:
    assert {"Accelerator", "notebook_launcher", "set_seed"} <= set(piledriver.__all__)
    for name in piledriver.__all__:
        assert getattr(piledriver, name) is not None
    from piledriver.corpus import Document, ShardWriter, read_shards
    from piledriver.data import TokenStream, prepare_data_loader
    from piledriver.evaluate import bits_per_byte

    assert all((Document, ShardWriter, read_shards, TokenStream, prepare_data_loader, bits_per_byte))
