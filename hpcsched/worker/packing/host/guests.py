"""A job that is a member in its pack's process: what came with it, what it is told, how it ends."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from contextvars import Context, copy_context
from pathlib import Path
from typing import Any, Optional

import torch

from hpcsched import strategies
from hpcsched.contract import exits, variables
from hpcsched.contract.strategies import Packed
from hpcsched.errors import HpcschedError
from hpcsched.worker.background.protocol import GuestConnection
from hpcsched.worker.background.rng_isolation import NotHostable, process_settings, put_back
from hpcsched.worker.packing.environment import common
from hpcsched.worker.packing.failures import MemberExited, out_of_memory
from hpcsched.worker.packing.host.session import LiveMember, bring
from hpcsched.worker.process import rng
from hpcsched.worker.process.contract import JobEnv, say
from hpcsched.worker.process.guest import GuestGone, HostedGuest, be_hosted
from hpcsched.worker.session.trainer import Trainer

Load = Callable[[Optional[str]], Trainer]
Word = dict[str, Any]

NOTHING: Word = {}
"""To be said to somebody who has gone."""

NO_ROOM = "out of memory in the pack"
"""What the output of a member says that had to make room for the others."""


class PackGuest:
    """One job in here, from its greeting to its end.

    Args:
        facts: what its own process says of it, with descriptors of its output, its errors and its progress.
        environ: what all members in here have in common.

    Raises HpcschedError when it cannot be one of them (NotHostable: but by itself).
    """

    def __init__(self, line: GuestConnection, facts: Mapping[str, Any], environ: Mapping[str, str]) -> None:
        theirs = {str(name): str(value) for name, value in facts["environ"].items()}
        _check_alike((str(facts["cwd"]), str(facts["python"]), common(theirs)), environ)
        for name in (variables.CONTROL_FD, variables.ARENA_FD, variables.PROGRESS_FD, variables.PACE):
            theirs.pop(name, None)
        if len(line.descriptors) > 2:
            theirs[variables.PROGRESS_FD] = str(line.descriptors[2])
        env = JobEnv.from_environ(theirs)
        if env is None or env.world_size != 1 or not env.trainer or env.strategy.get("kind") != "packed":
            raise NotHostable("only a packed trainer of one rank can be a member")
        packed = strategies.read(env.strategy, where="strategy")
        assert isinstance(packed, Packed)
        self.line, self.env, self.mode = line, env, packed.mode
        output, errors = (os.fdopen(os.dup(number), "w", buffering=1) for number in line.descriptors[:2])
        self.hosted = HostedGuest(theirs, output, errors, just_gone=line.hung_up)
        self.context: Context = copy_context()
        self.context.run(be_hosted, self.hosted)
        self.trains = False
        """Whether it is in the pack, or was."""
        self.asked = False
        """Whether its own process wants it to leave."""
        self._member: LiveMember | None = None

    @property
    def name(self) -> str:
        """For those who read the log."""
        return f"job {self.env.job_id} (attempt {self.env.attempt})"

    @property
    def member(self) -> LiveMember:
        """Its training; there is one once it was built."""
        assert self._member is not None
        return self._member

    def leave(self, why: str) -> None:
        """Have it save and end when it is looked at next."""
        self.hosted.stop = self.hosted.stop or why

    def build(self, load: Load, device: torch.device) -> None:
        """Make its training, as far as it has got; nothing of the others is changed.

        Raises NotHostable if it changes what belongs to all, and what the user's code raises.
        """
        before, settings = rng.capture(device), process_settings()
        try:
            self._member = self.context.run(self._build, load)
        finally:
            try:
                put_back(settings)
            finally:
                rng.restore(before, device)

    def _build(self, load: Load) -> LiveMember:
        member = bring(load(self.env.trainer), self.env, context=self.context)
        _ = member.architecture  # asks the user's modules: whatever they raise is to be put down to them
        return member

    # -- ends: each gives what its own process is told ---------------------------------------------------

    def after(self, act: Callable[[], object], *, crowded: bool = False) -> Word | None:
        """Do something of its own; None: it goes on.

        `crowded`: others are here, so it may be for them that there is no memory for it.
        """
        try:
            act()
        except Exception as error:
            return self.failed(error, crowded=crowded)
        except BaseException as end:
            return _word_of(end)
        return None

    def finish(self, *, crowded: bool) -> Word:
        """All its steps are made."""
        word = self.after(self.member.finish, crowded=crowded)
        return {"exit": 0} if word is None else word

    def save_and_leave(self) -> Word:
        """It was asked to leave, and is out of the pack."""
        if self.member.torn:  # what it had of the step cannot be saved: its newest checkpoint stays that
            return {"exit": exits.SUSPENDED}
        word = self.after(self.member.look)
        return {"exit": exits.SUSPENDED} if word is None else word

    def make_room(self, why: str) -> Word:
        """The device is full, and it is the one to leave."""
        self.leave(NO_ROOM)
        word = self.save_and_leave()
        self._say(f"{NO_ROOM} ({why}); saved and taken out of it")
        return word

    def failed(self, error: Exception, *, crowded: bool) -> Word:
        """Its own code has raised this."""
        if crowded and out_of_memory(error):
            self._say(f"{NO_ROOM}; taken out of it as it was saved last")
            return {"exit": exits.SUSPENDED}
        if isinstance(error, NotHostable):
            return {"refused": str(error)}
        if isinstance(error, MemberExited):
            return _word_of(error.end)
        if isinstance(error, HpcschedError):
            self._say(str(error))
            return {"exit": error.exit_code}
        traceback.print_exception(type(error), error, error.__traceback__, file=self.hosted.errors)
        return {"exit": 1}

    def end(self, word: Word) -> None:
        """Say it, and let go of all that came with it."""
        self._member = None
        for stream in (self.hosted.output, self.hosted.errors):
            with contextlib.suppress(OSError):  # a full disk: what was not written is lost
                stream.close()
        self.line.say(word)
        self.line.close()

    def _say(self, message: str) -> None:
        self.context.run(say, message)


def _word_of(end: BaseException) -> Word:
    if isinstance(end, SystemExit):
        return {"exit": end.code if isinstance(end.code, int) else int(end.code is not None)}
    if isinstance(end, GuestGone):
        return NOTHING
    raise end


def _check_alike(theirs: tuple[str, str, dict[str, str]], environ: Mapping[str, str]) -> None:
    """Raise NotHostable unless a job is at home where we are."""
    cwd, python, common_of_theirs = theirs
    if (cwd, python) != (str(Path.cwd()), sys.prefix):
        raise NotHostable("its pack's process runs in another working directory or Python environment")
    names = sorted(environ.keys() | common_of_theirs.keys())
    if other := [name for name in names if environ.get(name) != common_of_theirs.get(name)]:
        raise NotHostable(f"its pack's process has another {other[0]} in its environment")
