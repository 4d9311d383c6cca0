"""#HPCSCHED lines at the top of a script: options of `submit`, as sbatch reads #SBATCH."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import click

from hpcsched.errors import ConfigError

DIRECTIVES_WITHIN = 2**16
"""Characters of a script that are looked at for #HPCSCHED lines."""

_DIRECTIVE = re.compile(r"#HPCSCHED\s+(.*)")
_NEGATIVE = re.compile(r"-\d+")
_SWEEP = {"each", "array", "at_once"}
"""Where the command line says which jobs there are, none of these in a script counts."""

SAID = f"{__name__}.said"
"""In a context's `meta`: the names of the options that a script has given."""

_ACCEPTED = "#HPCSCHED and options of `submit`"


class WithDirectives(click.Command):
    """A command that reads options from `#HPCSCHED` lines at the top of the script that it is given.

    As sbatch reads #SBATCH: up to the first line that is neither empty nor a comment; what stands on the
    command line goes before it.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        args = _with_nice(args)
        given, _, _ = self.make_parser(ctx).parse_args(list(args))
        words = given.get("words")
        if isinstance(words, (tuple, list)) and words and not str(words[0]).endswith(".toml"):
            lines = self._said_by(str(words[0]), ctx)
            if {"each", "array"} & _given(given):
                lines = {key: value for key, value in lines.items() if key not in _SWEEP}
            elif "at_once" in _given(given) and "array" in lines:
                lines["array"] = str(lines["array"]).partition("%")[0]
            ctx.meta[SAID] = set(lines)
            ctx.default_map = {**(ctx.default_map or {}), **lines}
        return super().parse_args(ctx, args)

    def _said_by(self, script: str, ctx: click.Context) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for number, options in directives(script):
            where = f"{script}:{number}"
            try:
                said, rest, _ = self.make_parser(ctx).parse_args(_with_nice(options))
            except click.UsageError as error:
                raise ConfigError(
                    where=where, got=error.format_message().rstrip("."), accepted="options of `submit`"
                ) from None
            words = said.pop("words", None)
            if rest or {"-h", "--help"} & set(options) or (isinstance(words, (tuple, list)) and words):
                got = shlex.join(options)
                raise ConfigError(
                    where=where, got=got, accepted="#HPCSCHED OPTIONS, of `submit`, and no words"
                )
            for key, value in said.items():
                several = isinstance(value, list) and isinstance(found.get(key), list)
                found[key] = found[key] + value if several else value
        return found


def _with_nice(words: list[str]) -> list[str]:
    """The words, with a negative value of --nice behind a blank: as the option may stand without a value,
    click takes what begins with a minus for the next option."""
    ends = words.index("--") if "--" in words else len(words)
    found: list[str] = []
    for word in words[:ends]:
        if _NEGATIVE.fullmatch(word) and found[-1:] == ["--nice"]:
            found[-1] += f"= {word}"
        elif word.startswith("--nice=") and _NEGATIVE.fullmatch(value := word.removeprefix("--nice=")):
            found.append(f"--nice= {value}")
        else:
            found.append(word)
    return found + words[ends:]


def _given(options: dict[str, Any]) -> set[str]:
    """The options that a command line has; newer click has all here, with a mark for those it has not."""
    return {key for key, value in options.items() if isinstance(value, (str, int, list, tuple))}


def directives(script: str) -> list[tuple[int, list[str]]]:
    """The numbers of a script's #HPCSCHED lines, and their words. Raises ConfigError."""
    lines: list[tuple[int, list[str]]] = []
    try:
        if not Path(script).is_file():
            return lines
        with Path(script).open(encoding="utf-8") as file:
            head = file.read(DIRECTIVES_WITHIN)
    except (OSError, ValueError):
        return lines  # a program
    for number, line in enumerate(head.splitlines(), 1):
        if line.strip() and not line.startswith("#"):
            break
        if found := _DIRECTIVE.match(line):
            try:
                lines.append((number, shlex.split(found[1], comments=True)))
            except ValueError as error:
                where = f"{script}:{number}"
                raise ConfigError(where=where, got=str(error), accepted=_ACCEPTED) from None
    return lines
