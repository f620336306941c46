"""One pure train step, any layout: the losses of one process, by data and by tensor on 2, by both on 4."""

from __future__ import annotations

import pytest

from tests.checkpoint.processes import run as on_ranks
from tests.functional.worker_sharded import check_every_layout


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_every_layout_trains_like_one_process(processes: int) -> None:
    on_ranks(processes, check_every_layout)
