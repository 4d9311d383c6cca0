"""The errors hpcsched raises on purpose; their text is one line a user can act on."""

from __future__ import annotations

from collections.abc import Sequence

from hpcsched.printing import printable, shortened

MOST_SHOWN = 300
"""Characters of a bad input that are shown (chosen)."""


class HpcschedError(Exception):
    """Base of all errors raised on purpose; `exit_code` is what the command line ends with."""

    exit_code = 1


class ConfigError(HpcschedError):
    """Bad input: says where it is, what was found and what is accepted.

    Args:
        where: file (and line, where known) or option the value came from.
        key: dotted key inside it, or "" for the file as a whole.
        got: what was found.
        accepted: what would have been right.
    """

    exit_code = 2

    def __init__(self, *, where: str, key: str = "", got: str, accepted: str) -> None:
        self.where, self.key, self.got, self.accepted = where, key, got, accepted
        where, key, got = (printable(shortened(text, MOST_SHOWN)) for text in (where, key, got))
        place = f"{where}: {key}" if key else where
        super().__init__(f"{place}: {got}; accepted: {accepted}")


class BadInput(HpcschedError):
    """Bytes from elsewhere are not what they should be: `decoding` raises this and nothing else."""

    exit_code = 2


class NoSuchRun(HpcschedError):
    """There is no run in this directory, or its agent is gone."""

    exit_code = 3


class UnknownJob(HpcschedError):
    """No job has this id or name.

    `name` is what was asked for; "" where other runs need not be looked through for it.
    """

    exit_code = 4

    def __init__(self, message: str, *, name: str = "") -> None:
        super().__init__(message)
        self.name = name


class LaunchError(HpcschedError):
    """A worker could not be started; `transient` says whether trying again can help.

    `host_fault`: the job is not to blame, but a host that is being lost.
    """

    def __init__(self, message: str, *, transient: bool, host_fault: bool = False) -> None:
        super().__init__(message)
        self.transient, self.host_fault = transient, host_fault


class BadEnvironment(LaunchError):
    """A job's Python or container cannot run it: one line says what is there, what is needed, and how to get
    it.

    `transient`: it did not say what it has, which may pass.
    """

    exit_code = 2

    def __init__(self, message: str, *, transient: bool = False) -> None:
        super().__init__(message, transient=transient)


class WrongContract(HpcschedError):
    """A worker and the agent that has started it do not fit."""

    exit_code = 76


class BatchError(HpcschedError):
    """The batch system did not answer, refused, or said what cannot be understood."""


class StoreError(HpcschedError):
    """Something could not be written to, or read from, durable storage."""


class InvalidTransition(HpcschedError):
    """A job was asked to go where its state machine has no way; prints the job's story."""

    def __init__(self, message: str, story: Sequence[str]) -> None:
        super().__init__("\n".join([message, *(f"  {line}" for line in story)]))
