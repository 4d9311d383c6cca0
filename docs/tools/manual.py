"""The manual pages, from the commands' own help: hpcsched(1), and one for each command."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

import click

from hpcsched import __version__
from hpcsched.cli import examples, main
from hpcsched.stability import marked

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "packaging/share/man/man1"

MINOR = ".".join(__version__.split(".")[:2])
"""Not the whole version: pages change when what they say does, and with a minor version."""

FILES = {
    "./hpcsched-run": "the run directory, when --dir names no other; further runs: hpcsched-run-2 and so on",
    "./hpcsched.toml": "settings of a project",
    "~/.config/hpcsched/config.toml": "settings of a user",
    "/etc/hpcsched/config.toml": "settings of a site; HPCSCHED_SITE_CONFIG names another file",
    "~/.local/share/hpcsched/hpcsched.db": "measured profiles, and the history of all runs",
}

CODES = (
    "0 if all is good, 2 for usage or bad input, 3 for no such run, 4 for no such job; more in `hpcsched(1)`."
)


def pages() -> dict[str, str]:
    """Each page's file, relative to the repository, with its text."""
    context = click.Context(main.cli, info_name="hpcsched", **main.cli.context_settings)
    below = dict(_below(main.cli, context))
    found = {_name(path): _page(path, of, _near(path, list(below))) for path, of in below.items()}
    found["hpcsched"] = _whole(context, below)
    return {f"{FOLDER}/{name}.1": text for name, text in found.items()}


def _near(path: str, paths: list[str]) -> list[str]:
    """What else to read: the page above, those beside it, those below."""
    above = path.rpartition(" ")[0]
    if above:
        beside = [other for other in paths if other.rpartition(" ")[0] == above]
        return ["", above, *(other for other in beside if other != path)]
    beside = next([*commands] for commands in main._GROUPS.values() if path in commands)
    below = [other for other in paths if other.startswith(f"{path} ")]
    return ["", *below, *(other for other in beside if other != path)]


def _below(group: click.Group, context: click.Context, path: str = "") -> Iterator[tuple[str, click.Context]]:
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if hasattr(command, "_help_option"):  # click keeps it as it was when the command was called first
            command._help_option = None
        inner = click.Context(command, info_name=name, parent=context)
        yield f"{path}{name}", inner
        if isinstance(command, click.Group):
            yield from _below(command, inner, f"{path}{name} ")


def _whole(context: click.Context, below: dict[str, click.Context]) -> str:
    command = context.command
    lines = [*_head("", "Runs your queue of trainings inside one batch allocation"), *_synopsis("", context)]
    lines += [
        ".SH DESCRIPTION",
        *_paragraphs(command.help or ""),
        ".PP",
        *_prose("Each command has a page of its own; `hpcsched COMMAND --help` says the same in short."),
        ".SH COMMANDS",
    ]
    for title, commands in main._GROUPS.items():
        lines.append(f".SS {title}")
        for name in commands:
            lines += _item(f"\\fB{_typed(_name(name))}\\fR(1)", _short(name, below[name]))
    lines += [*_options(context), ".SH EXIT STATUS"]
    for code, words in _codes():
        lines += _item(_bold(code), words)
    lines += [
        ".SH ENVIRONMENT",
        *_prose(
            "Most options can be given as variables; the page of a command names them. Options count before "
            "variables, variables before settings files."
        ),
        *_variables(context),
        ".SH FILES",
    ]
    for file, words in FILES.items():
        lines += _item(f"\\fI{_typed(file)}\\fR", words)
    return _text([*lines, *_see(["run", "status", "explain", "script", "doctor"])])


def _page(path: str, context: click.Context, near: Iterable[str]) -> str:
    command = context.command
    lines = [*_head(path, _short(path, context)), *_synopsis(path, context), ".SH DESCRIPTION"]
    lines += _paragraphs(command.help or "")
    if isinstance(command, click.Group):
        lines.append(".SH COMMANDS")
        for name, inner in _below(command, context):
            lines += _item(f"\\fB{_typed(_name(f'{path} {name}'))}\\fR(1)", _short(f"{path} {name}", inner))
    lines += _options(context)
    lines += [".SH EXAMPLES", ".EX", *map(_verbatim, examples.EXAMPLES[path]), ".EE"]
    if variables := _variables(context):
        lines += [".SH ENVIRONMENT", *variables]
    return _text([*lines, ".SH EXIT STATUS", *_prose(CODES), *_see(near)])


def _head(path: str, words: str) -> list[str]:
    name = _name(path)
    title = [_typed(name.upper()), "1", _date(), f'"hpcsched {MINOR}"', '"hpcsched manual"']
    return [
        '.\\" Made by docs/tools/manual.py from the help of the command: `make pages` writes it anew.',
        f".TH {' '.join(title)}",
        ".nh",
        ".ad l",
        ".SH NAME",
        f"{_typed(name)} \\- {_typed(words.rstrip('.'))}",
    ]


def _synopsis(path: str, context: click.Context) -> list[str]:
    pieces = " ".join(context.command.collect_usage_pieces(context))
    return [".SH SYNOPSIS", f"{_bold(f'hpcsched {path}'.strip())} {_typed(pieces)}"]


def _date() -> str:
    """Of the minor version's first release."""
    found = re.search(
        rf"^## \[{re.escape(MINOR)}\.0\] - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    return found[1] if found else '""'


def _options(context: click.Context) -> list[str]:
    lines = [".SH OPTIONS"]
    for parameter in context.command.get_params(context):
        record = parameter.get_help_record(context)
        if isinstance(parameter, click.Option) and record:
            names, words = record
            # Words of an option in bold, what stands for its value in italics.
            shown = re.sub(r"(?<![\w-])(--?[a-zA-Z][\w-]*)|([^\s,/|]+)", _marked, names)
            lines += _item(shown, words)
    return lines


def _marked(match: re.Match[str]) -> str:
    return f"\\fB{_typed(match[1])}\\fR" if match[1] else f"\\fI{_typed(match[2])}\\fR"


def _variables(context: click.Context) -> list[str]:
    lines: list[str] = []
    for parameter in context.command.get_params(context):
        if isinstance(parameter, click.Option) and parameter.envvar:
            long = next(name for name in parameter.opts if name.startswith("--"))
            lines += [".TP 30", _bold(str(parameter.envvar)), _bold(long)]
    return [".PD 0", *lines, ".PD"] if lines else []


def _see(paths: Iterable[str]) -> list[str]:
    names = [f".BR {_typed(_name(path))} (1)" for path in paths]
    return [".SH SEE ALSO", *(f"{name}," for name in names[:-1]), names[-1]]


def _codes() -> Iterator[tuple[str, str]]:
    """The rows of the table of exit codes in docs/states.md, without links."""
    page = (ROOT / "docs/states.md").read_text().partition("\n## Exit codes\n")[2].partition("\n## ")[0]
    for code, words in re.findall(r"^\| ([^|-][^|]*) \| (.*) \|$", page, re.MULTILINE):
        yield code.replace("`", ""), words


def _short(path: str, context: click.Context) -> str:
    if path in main._COMMANDS:
        return marked(main._COMMANDS[path][1])
    return context.command.get_short_help_str(limit=200).replace("`", "")


def _name(path: str) -> str:
    return "-".join(["hpcsched", *path.split()])


def _item(term: str, words: str) -> list[str]:
    return [".TP", term, *_prose(words)]


def _paragraphs(help_: str) -> list[str]:
    lines: list[str] = []
    for paragraph in inspect.cleandoc(help_).split("\n\n"):
        if lines:
            lines.append(".PP")
        if paragraph.startswith("\b\n"):
            lines += [".EX", *map(_verbatim, paragraph.splitlines()[1:]), ".EE"]
        else:
            lines += _prose(paragraph)
    return lines


def _prose(words: str) -> list[str]:
    """Wrapped lines; in bold what stands between backticks, and options."""
    parts = re.split(r"`([^`]*)`|(?<![\w-])(--[a-z][\w-]*)", " ".join(words.split()))
    shown = "".join((_bold(part) if at % 3 else _typed(part)) for at, part in enumerate(parts) if part)
    lines = textwrap.wrap(shown, 79, break_long_words=False, break_on_hyphens=False)
    return [_guarded(line) for line in lines]


def _verbatim(line: str) -> str:
    return _guarded(_typed(line))


def _guarded(line: str) -> str:
    """A line that is no request."""
    return f"\\&{line}" if line.startswith(".") else line


def _bold(words: str) -> str:
    return f"\\fB{_typed(words)}\\fR"


def _typed(words: str) -> str:
    """Each character as people type it: what they copy from a page works."""
    special = {"\\": "\\e", "-": "\\-", "'": "\\(aq", "~": "\\(ti", "^": "\\(ha", "`": "\\(ga"}
    return "".join(special.get(char, char) for char in words)


def _text(lines: Iterable[str]) -> str:
    return "\n".join(lines) + "\n"
