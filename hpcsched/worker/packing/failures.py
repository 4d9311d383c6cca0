"""What goes wrong in a pack, and whom it is put down to."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from hpcsched.worker.packing.member import Member


class Failed(Exception):
    """Members whose own code has raised, each with its error. The others are none the worse for it."""

    def __init__(self, errors: Sequence[tuple[Member, Exception]]) -> None:
        super().__init__("; ".join(f"{member.name}: {error}" for member, error in errors))
        self.errors = tuple(errors)


class OutOfMemory(Exception):
    """The device is full; `member`, the last one in, has to leave. It is between two steps, as all are.

    `why` is what has been said about the memory.
    """

    def __init__(self, member: Member, why: str = "") -> None:
        super().__init__(f"out of memory with {member.name} in the pack: {why}")
        self.member, self.why = member, why


class DeviceFull(Exception):
    """The device has no more memory. Some members may have made a step more than others.

    `told` is where that was found, as Python tells it.
    """

    def __init__(self, why: str, told: str = "") -> None:
        super().__init__(why)
        self.told = told


class ModeRefused(Exception):
    """A way of making steps cannot be had by these members, and why."""


class SharedBatchChanged(Exception):
    """A member has written into its batch, which others are still to be given."""


class MemberExited(Exception):
    """A member's own code has ended the process, as far as that is its own: `end` is how."""

    def __init__(self, end: SystemExit) -> None:
        super().__init__(f"SystemExit({end.code})")
        self.end = end


def out_of_memory(error: BaseException) -> bool:
    """Whether something has failed as there was no memory left, on a GPU or on the host."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


def let_go(error: BaseException | None) -> None:
    """Free what the frames of an error hold: the activations of the step that found no room."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def told_of(error: BaseException) -> str:
    """An error as Python tells it, to be kept when all that it holds is let go."""
    return "".join(traceback.format_exception(type(error), error, error.__traceback__))


def line_of(error: BaseException) -> str:
    """What an error says, in a line."""
    return (str(error) or type(error).__name__).splitlines()[0][:200]


class Failures:
    """What has gone wrong in one step of several members, gathered while the others make theirs."""

    def __init__(self) -> None:
        self._errors: list[tuple[Member, Exception]] = []
        self._full: tuple[str, str] | None = None

    @property
    def full(self) -> bool:
        """Whether there is no room for anybody else to try."""
        return self._full is not None

    def add(self, member: Member, error: Exception | SystemExit) -> None:
        """A member's step has raised this; whom it has left in the middle of a step is to blame himself."""
        if isinstance(error, SystemExit):
            error = MemberExited(error)
        if out_of_memory(error) and not member.torn:
            self._full = line_of(error), told_of(error)
            let_go(error)
        else:
            self._errors.append((member, error))

    def check(self) -> None:
        """Raise Failed or Full if anything has gone wrong."""
        if self._errors:
            raise Failed(self._errors)
        if self._full is not None:
            raise DeviceFull(*self._full)
