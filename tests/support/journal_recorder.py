"""A plugin of pytest that writes down every event that a machine of the ordinary policies is told.

    RECORD_JOURNALS=FOLDER PYTHONPATH=.:tests/support python -m pytest -p journal_recorder tests/unit/core ...

It leaves a file for each process of the tests in that folder, a line for each machine; `record_journals`
chooses among them. Machines with a policy of a test's own are left out: no replay could make them again.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from impossible import any_policy
from recorded import digest_of_actions

from hpcsched.core.machine import Machine
from hpcsched.policy import make_policy

MOST_EVENTS = 400
"""Of a journal: the first ones of a longer one are a journal too."""

MOST_BYTES = 400_000
MOST_OF_A_TEST = 400


class Notebook:
    """What one machine was told, and what it answered."""

    def __init__(self, *, stories: bool) -> None:
        self.stories, self.full, self.size = stories, False, 0
        self.events: list[tuple[str, str]] = []
        self.answers: list[str] = []

    def copy(self) -> Notebook:
        """The same so far."""
        other = Notebook(stories=self.stories)
        other.full, other.size = self.full, self.size
        other.events, other.answers = list(self.events), list(self.answers)
        return other


_books: list[Notebook] = []
_seen: Counter[str] = Counter()


def install() -> None:
    """From now on machines are recorded."""
    made, handled, became = Machine.__init__, Machine.handle, Machine.become

    def init(self: Any, maker: Any, *, stories: bool = True) -> None:
        made(self, maker, stories=stories)
        self.notebook = Notebook(stories=stories) if maker in (make_policy, any_policy) else None
        if self.notebook:
            _books.append(self.notebook)

    def handle(self: Any, event: Any) -> Any:
        book = self.notebook
        if book is None or book.full:
            return handled(self, event)
        body = msgspec.json.encode(event).decode()
        book.size += len(body)
        if len(book.events) >= MOST_EVENTS or book.size > MOST_BYTES:
            book.full = True
            return handled(self, event)
        book.events.append((type(event).__name__, body))
        try:
            actions = handled(self, event)
        except Exception as error:
            book.answers.append(f"{type(error).__name__}: {error}")
            raise
        book.answers.append(digest_of_actions(actions))
        return actions

    def become(self: Any, other: Any) -> None:
        became(self, other)
        if self.notebook:
            self.notebook = self.notebook.copy()
            _books.append(self.notebook)

    Machine.__init__, Machine.handle, Machine.become = init, handle, become  # type: ignore[method-assign]


def flush(test: str) -> None:
    """Write down what has been recorded since the last time, as of this test."""
    folder = Path(os.environ["RECORD_JOURNALS"])
    with (folder / f"machines-{os.getpid()}.jsonl").open("a") as file:
        for book in _books:
            if book.events and _seen[test] < MOST_OF_A_TEST:
                _seen[test] += 1
                told = {"test": test, "stories": book.stories, "events": book.events, "answers": book.answers}
                file.write(json.dumps(told) + "\n")
    _books.clear()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """The machines of a test are over with it; those of a fixture go on in the next one's line."""
    flush(item.nodeid)


def pytest_configure() -> None:
    """Record all that follows."""
    install()
