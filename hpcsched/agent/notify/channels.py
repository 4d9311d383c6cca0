"""The ways a message takes: a command that gets it as JSON, or a webhook."""

from __future__ import annotations

import ipaddress
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import urlsplit

import msgspec

from hpcsched.agent.notify.message import Message
from hpcsched.contract import variables

ACCEPTED_URL = "an https:// address, or an http:// one of this host, without a user name"

_MOST_URL = 2000


class Channel(Protocol):
    """A way that a message takes: a program that is given it."""

    @property
    def name(self) -> str:
        """What people are told when it does not work; no secret is in it."""

    @property
    def argv(self) -> Sequence[str]: ...

    @property
    def spares_children(self) -> bool:
        """Whether processes that it leaves behind, having ended well, are its user's business."""

    def environ(self, message: Message) -> Mapping[str, str]:
        """The variables that it is given besides the agent's own."""

    def stdin(self, message: Message) -> bytes: ...

    def failure(self, code: int, last_line: str) -> str:
        """Why it did not deliver, by its exit code and the last line that it said."""


@dataclass(frozen=True)
class CommandChannel:
    """A command of the user's: JSON on its stdin, and the text in variables."""

    argv: Sequence[str]
    spares_children: bool = True  # `mail` leaves the sending to one

    @property
    def name(self) -> str:
        return f"the command {self.argv[0]}"

    def environ(self, message: Message) -> Mapping[str, str]:
        return {
            variables.MESSAGE_KIND: message.kind,
            variables.MESSAGE_TEXT: message.text.replace("\0", ""),
            variables.RUN_DIR: message.run.dir,
            variables.RUN_ID: message.run.id,
        }

    def stdin(self, message: Message) -> bytes:
        return msgspec.json.encode(message) + b"\n"

    def failure(self, code: int, last_line: str) -> str:
        return f"exit code {code}" + (f": {last_line}" if last_line else "")


@dataclass(frozen=True)
class WebhookChannel:
    """An address that the message is posted to as JSON."""

    url: str = field(repr=False)
    argv: Sequence[str] = (sys.executable, "-P", "-m", "hpcsched.agent.notify.post")
    spares_children: bool = False

    @property
    def name(self) -> str:
        return f"the webhook at {without_path(self.url)}"

    def environ(self, message: Message) -> Mapping[str, str]:
        return {}

    def stdin(self, message: Message) -> bytes:
        # Not on the command line, which everybody on the host can see.
        said = msgspec.structs.replace(message, text=_without_markup(message.text))
        return self.url.encode() + b"\n" + msgspec.json.encode(said)

    def failure(self, code: int, last_line: str) -> str:
        return last_line or f"exit code {code}"


def _without_markup(text: str) -> str:
    """The text without what chats take for a mention or a link: words of programs stand in it."""
    return text.replace("<", "\u2039").replace(">", "\u203a").replace("@", "@\u2060")


def is_accepted(url: str) -> bool:
    """Whether messages may be posted there: what leaves this host is encrypted."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname or "", parts.port
    except ValueError:
        return False
    plain = url.isascii() and url.isprintable() and " " not in url and len(url) <= _MOST_URL
    if not (plain and host) or "@" in parts.netloc:
        return False
    return parts.scheme == "https" or (parts.scheme == "http" and is_this_host(host))


def is_this_host(host: str) -> bool:
    """Whether a name or an address of a URL means this host itself."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def without_path(url: str) -> str:
    """Such as https://hooks.example.org: what follows is often a secret."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
