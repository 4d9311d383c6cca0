"""What a unit test may not do: start a process, listen, load torch.

Such tests stand in tests/process and tests/torch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

_STARTED: list[str] = []
_EVENTS = frozenset(
    {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "socket.bind"}
)


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if event in _EVENTS and not str(arguments[:1]).startswith("('fc-list'"):  # matplotlib, once on a machine
        _STARTED.append(f"{event} {arguments!r:.200}")


sys.addaudithook(_watch)


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    """Fails a test that needs more than this folder promises."""
    _STARTED.clear()
    before = "torch" in sys.modules  # where other folders' tests ran first in this process
    yield
    assert not _STARTED, f"a unit test started or opened: {_STARTED}"
    assert before or "torch" not in sys.modules, "a unit test loaded torch"
