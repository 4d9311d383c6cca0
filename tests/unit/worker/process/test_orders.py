"""What rank 0 hears from the agent beyond signals."""

from __future__ import annotations

import os

from hpcsched.contract import orders
from hpcsched.worker.process.contract import OrderReader


def test_what_is_quick_is_so_only_while_the_agent_lives_that_would_keep_it() -> None:
    read, write = os.pipe()
    reader = OrderReader(read)
    try:
        os.write(write, orders.encode(orders.Suspend(quick=True)))
        reader.look()
        assert reader.quick and reader.descriptor == read
        os.write(write, orders.encode(orders.Suspend(quick=True)))
    finally:
        os.close(write)
    try:
        reader.look()  # at once, not only when nothing comes any more
        assert not reader.quick and reader.descriptor is None
    finally:
        os.close(read)
