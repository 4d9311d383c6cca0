"""--notify, --notify-command and --notify-webhook: who is told what of a run."""

from __future__ import annotations

import functools
import os
import shlex
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from hpcsched.cli.common import option
from hpcsched.errors import ConfigError

if TYPE_CHECKING:
    from hpcsched.agent.notify.announcer import Announcer
    from hpcsched.agent.notify.channels import Channel
    from hpcsched.core.machine import Machine
    from hpcsched.store.rundir import RunDir

F = TypeVar("F", bound=Callable[..., Any])

OPTIONS = ("notify", "notify_command", "notify_webhook")

_KINDS = "Tell of these only: failure, drain, disk, end, with commas (all)."
_COMMAND = "Have this command told: JSON on its stdin."
_WEBHOOK = "Post messages (JSON) to this address."


@dataclass(frozen=True)
class Notify:
    """Who is told, and of what."""

    kinds: Sequence[str]
    channels: Sequence[Channel]

    def announcer(self, machine: Machine, rundir: RunDir, tell: Callable[[str], None]) -> Announcer:
        """What tells them of this run."""
        from hpcsched.agent.notify.announcer import Announcer
        from hpcsched.agent.notify.delivery import Delivery

        delivery = Delivery(self.channels, environ=os.environ, cwd=str(Path.cwd()))
        return Announcer(machine, delivery, kinds=self.kinds, rundir=rundir, tell=tell)


def notify_options(command: F) -> F:
    """Adds the three options; the command is given `notify`, None if nobody is to be told."""

    @functools.wraps(command)
    def with_notify(*args: Any, **options: Any) -> Any:
        kinds, words, url = (options.pop(key) for key in OPTIONS)
        return command(*args, notify=chosen(kinds, words, url), **options)

    with_options: Any = option("--notify-webhook", metavar="URL", help=_WEBHOOK)(with_notify)
    with_options = option("--notify-command", metavar="CMD", help=_COMMAND)(with_options)
    return cast(F, option("--notify", metavar="K,...", help=_KINDS)(with_options))


def chosen(kinds: str | None, words: str | None, url: str | None) -> Notify | None:
    """Who is told of what, by these options; raises ConfigError."""
    if not (kinds or words or url):
        return None
    from hpcsched.agent.notify.announcer import KINDS
    from hpcsched.agent.notify.channels import ACCEPTED_URL, CommandChannel, WebhookChannel, is_accepted

    wanted = [word.strip() for word in kinds.split(",")] if kinds else list(KINDS)
    if odd := [word for word in wanted if word not in KINDS]:
        raise ConfigError(where="--notify", got=repr(odd[0]), accepted=", ".join(KINDS))
    channels: list[Channel] = []
    if words:
        channels.append(CommandChannel(_program(words)))
    if url:
        if not is_accepted(url):
            raise ConfigError(where="--notify-webhook", got="another address", accepted=ACCEPTED_URL)
        channels.append(WebhookChannel(url))
    if not channels:
        accepted = "with --notify-command or --notify-webhook, or their settings"
        raise ConfigError(where="--notify", got="nobody to tell", accepted=accepted)
    return Notify(wanted, channels)


def _program(words: str) -> Sequence[str]:
    """The words of the command, whose program is there."""
    accepted = "a command, such as './tell.sh' or 'mail -s hpcsched me'"
    try:
        argv = shlex.split(words)
    except ValueError as error:
        raise ConfigError(where="--notify-command", got=str(error), accepted=accepted) from None
    found = shutil.which(argv[0]) if argv else None
    if found is None:
        got = f"no program {argv[0]}" if argv else "nothing"
        raise ConfigError(where="--notify-command", got=got, accepted=accepted)
    return (found, *argv[1:])
