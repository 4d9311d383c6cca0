"""What a guest prints goes into its own output, not into its host's."""

from __future__ import annotations

import io
import sys
from typing import Any, TextIO

from hpcsched.worker.process.guest import hosted


class _Divided(io.TextIOBase):
    """A standard stream that asks who writes."""

    def __init__(self, usual: TextIO, name: str) -> None:
        self._usual, self._name = usual, name

    def _target(self) -> TextIO:
        guest = hosted()
        return self._usual if guest is None else getattr(guest, self._name)

    def write(self, text: str, /) -> int:
        return self._target().write(text)

    def flush(self) -> None:
        self._target().flush()

    def fileno(self) -> int:
        return self._target().fileno()

    def isatty(self) -> bool:
        return self._target().isatty()

    def writable(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target(), name)

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._target().encoding


def divide_output() -> None:
    """Lead what threads of a guest print to the guest's output from now on."""
    if not isinstance(sys.stdout, _Divided):
        sys.stdout = _Divided(sys.stdout, "output")
        sys.stderr = _Divided(sys.stderr, "errors")
