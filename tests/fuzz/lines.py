"""The lines of hpcsched that an input reaches, as far as none before has reached them."""

from __future__ import annotations

import sys
from types import CodeType, FrameType
from typing import Any

import hpcsched

Place = tuple[str, int]
"""A file and a line of it."""

_ROOT = hpcsched.__path__[0] + "/"


class Lines:
    """Notes lines while it is entered. `seen` are those that it passes over; functions all of whose lines
    are seen cost next to nothing."""

    def __init__(self) -> None:
        self.seen: set[Place] = set()
        self._new: set[Place] = set()
        self._open: dict[CodeType, set[int]] = {}

    def taken(self) -> set[Place]:
        """What was new, and is not any more."""
        new, self._new = self._new, set()
        self.seen |= new
        return new

    def __enter__(self) -> Lines:
        sys.settrace(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _called(self, frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        left = self._open.get(code)
        if left is None:
            left = self._open[code] = self._unseen(code)
        if not left:
            return None
        name = code.co_filename

        def local(frame: FrameType, event: str, arg: Any) -> Any:
            at = frame.f_lineno
            if at in left:
                left.discard(at)
                self._new.add((name, at))
                if not left:
                    return None
            return local

        return local(frame, event, arg)

    def _unseen(self, code: CodeType) -> set[int]:
        if not code.co_filename.startswith(_ROOT):
            return set()
        lines = {line for *_, line in code.co_lines() if line}
        return {line for line in lines if (code.co_filename, line) not in self.seen}
