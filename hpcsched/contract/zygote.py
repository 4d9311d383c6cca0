"""What a launcher and a zygote say to each other; the descriptors of a request come beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpcsched.contract import codec
from hpcsched.errors import BadInput

READY = b"ready"
"""The zygote can fork from now on."""


@dataclass(frozen=True)
class Request:
    """Fork a process that becomes this program.

    `argv` begins with the interpreter, -m and the module. `cores`: those it is pinned to; None: as the zygote
    is. `inherited`: the variables that tell it the numbers of the further descriptors. `hurry`: worth a
    standby.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str
    cores: tuple[int, ...] | None
    inherited: tuple[str, ...]
    hurry: bool

    def encode(self) -> bytes:
        """JSON."""
        said = {
            "argv": self.argv,
            "env": dict(self.env),
            "cwd": self.cwd,
            "cores": self.cores,
            "inherited": self.inherited,
            "hurry": self.hurry,
        }
        return json.dumps(said).encode()

    @classmethod
    def decode(cls, data: bytes) -> Request:
        """What a launcher has said; raises BadInput."""
        table = codec.document(data)
        request = cls(
            argv=codec.part(table, "argv", lambda value: codec.a_list(value, "argv", _text)),
            env=codec.part(table, "env", _variables),
            cwd=codec.part(table, "cwd", lambda value: _text(value, "cwd")),
            cores=codec.part(table, "cores", lambda value: codec.a_list(value, "cores", codec.a_whole), None),
            inherited=codec.part(table, "inherited", lambda value: codec.a_list(value, "inherited", _text)),
            hurry=codec.flag(table, "hurry", False),
        )
        if len(request.argv) < 3:
            raise BadInput("argv: an interpreter, -m and a module are expected")
        return request


def encode_answer(pid: int | None) -> bytes:
    """Who has taken the request; None: nobody has."""
    return json.dumps(pid).encode()


def decode_answer(data: bytes) -> int | None:
    """The pid in an answer, None for an empty one; raises BadInput."""
    value = codec.parsed(data or b"null")
    return None if value is None else codec.a_whole(value, "pid")


def _text(value: Any, where: str) -> str:
    """Names and values of Linux are bytes: as text they may hold what is no UTF-8."""
    if type(value) is not str:
        raise BadInput(f"{where}: text is expected")
    return value


def _variables(value: Any) -> dict[str, str]:
    return {name: _text(one, "env") for name, one in codec.an_object(value, "env").items()}
