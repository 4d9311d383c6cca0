"""The tabulated input of the solver alone: options by group, as JSON (see docs/vsw-plans.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hpcsched.planning.json_reader import JsonReader
from hpcsched.planning.vsw.solver import Option

_MAX_WORKERS = 10**6
"""The most workers that are taken for meant (chosen)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionTable:
    """Groups with their options, of which the workers add up to `workers`."""

    workers: int
    names: tuple[str, ...]
    groups: tuple[tuple[Option, ...], ...]

    @classmethod
    def parse(cls, table: Any, *, where: str) -> OptionTable:
        """The problem of its JSON form. Raises ConfigError naming the group and the key that is wrong."""
        read = JsonReader(where)
        table = read.table(table, "", ("schema", "workers", "groups"))
        if table.get("schema") != 1 or isinstance(table["schema"], bool):
            read.refuse("schema", table.get("schema"), "1")
        names: list[str] = []
        groups = []
        for i, row in enumerate(read.rows(table.get("groups"), "groups", least=1)):
            group = read.table(row, f"groups[{i}]", ("name", "options"))
            name = read.text(group.get("name"), f"groups[{i}].name")
            if name in names:
                read.refuse(f"groups[{i}].name", name, "a name of its own")
            names.append(name)
            options = read.rows(group.get("options"), f"groups[{i}].options")
            groups.append(
                tuple(_option(read, each, f"groups[{i}].options[{j}]") for j, each in enumerate(options))
            )
        return cls(
            workers=_whole(read, table.get("workers"), "workers"), names=tuple(names), groups=tuple(groups)
        )

    def result(self, picked: Sequence[int | None], solve_s: float) -> dict[str, Any]:
        """The JSON form of a solution: the groups that are used."""
        used = [
            (name, group[i])
            for name, group, i in zip(self.names, self.groups, picked, strict=True)
            if i is not None
        ]
        return {
            "schema": 1,
            "iter_s": max(option.iter_s for _, option in used),
            "groups": [{"name": name, **option._asdict()} for name, option in used],
            "solve_s": solve_s,
        }


def _option(read: JsonReader, value: Any, key: str) -> Option:
    row = read.table(value, key, ("workers", "iter_s"))
    return Option(
        workers=_whole(read, row.get("workers"), f"{key}.workers"),
        iter_s=read.number(row.get("iter_s"), f"{key}.iter_s", "seconds"),
    )


def _whole(read: JsonReader, value: Any, key: str) -> int:
    number = read.whole(value, key)
    if number > _MAX_WORKERS:
        read.refuse(key, number, f"at most {_MAX_WORKERS}")
    return number
