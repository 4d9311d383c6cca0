"""What a training that runs as a guest in another job's process has in place of a process of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import TextIO

from hpcsched.compat import dataclass


class GuestGone(BaseException):
    """The guest's own process has ended: nobody is there who could answer for what the guest does."""


@dataclass(eq=False, slots=True)
class HostedGuest:
    """One guest: the environment that its own process was given, and what that process hears.

    `stop`: why the guest is to save and leave, once it is. `gone`: that process has ended, so another attempt
    may be at work, and the guest must leave no more traces. `just_gone` says so too, where nobody else looks
    while the guest works.
    """

    environ: Mapping[str, str]
    output: TextIO
    errors: TextIO
    stop: str | None = None
    gone: bool = False
    just_gone: Callable[[], bool] = lambda: False


_hosted: ContextVar[HostedGuest | None] = ContextVar("hosted", default=None)


def hosted() -> HostedGuest | None:
    """The guest that the calling thread works for; None in an ordinary process."""
    return _hosted.get()


def be_hosted(guest: HostedGuest) -> None:
    """From now on the calling thread works for this guest."""
    _hosted.set(guest)


def check_not_gone() -> None:
    """To be called before anything is written. Raises Gone if the calling thread's guest must not."""
    guest = _hosted.get()
    if guest is not None and (guest.gone or guest.just_gone()):
        raise GuestGone


def surroundings() -> Mapping[str, str]:
    """The environment that the calling thread's job was started with."""
    guest = _hosted.get()
    return os.environ if guest is None else guest.environ
