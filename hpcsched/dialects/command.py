"""The script and the arguments of a command, where it is plain which words they are."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcsched.core.processes import KnownLauncher, launcher_of

_PYTHON = re.compile(r"python[\d.]*")
_WITH_VALUE = frozenset({"-X", "-W"})


class NotSure(Exception):
    """What a program does cannot be said for sure; says why."""


@dataclass(frozen=True, slots=True)
class Call:
    """A script (or `module`, of `python -m`) and its arguments."""

    script: Path | None
    module: str
    args: tuple[str, ...]
    launcher: KnownLauncher | None = None
    options: frozenset[str] = frozenset()
    """Options that the script is seen to define: none of them is short for another one."""

    def value(self, *names: str) -> str | None:
        """The value of an option under any of its names (`--a b`, `--a=b`; the last one counts), or None.

        Raises NotSure where it may be given in another way: without a value, or shortened, as argparse takes.
        """
        found: str | None = None
        for at, word in enumerate(self.args):
            name, equals, after = word.partition("=")
            if name in names and name.startswith("--") and equals:
                found = after
            elif word in names:
                found = self.args[at + 1] if at + 1 < len(self.args) else None
                if found is None or found.startswith("--"):
                    raise NotSure(f"{word} has no value")
            elif self._may_be(name, names):
                raise NotSure(f"{name} may stand for {names[0]}")
        return found

    def says(self, *names: str) -> bool:
        """Whether a flag is there (alone, or with a value that means yes).

        Raises NotSure where it has a value that nobody knows, or may be shortened.
        """
        said = False
        for at, word in enumerate(self.args):
            name, equals, after = word.partition("=")
            if self._may_be(name, names):
                raise NotSure(f"{name} may stand for {names[0]}")
            if name not in names:
                continue
            value = after if equals else next(iter(self.args[at + 1 : at + 2]), "--")
            if value.startswith("-"):
                value = "true"
            if value.lower() not in _YES | _NO:
                raise NotSure(f"{name} is {value!r}")
            said = value.lower() in _YES
        return said

    def _may_be(self, word: str, names: Iterable[str]) -> bool:
        """Whether argparse would take a word for one of these options that it only begins."""
        if not word.startswith("-") or word in names or word in self.options or word in ("-", "--"):
            return False
        if word.startswith("--"):
            return any(name.startswith(word) for name in names)
        return any(word.startswith(name) for name in names if not name.startswith("--"))


_YES, _NO = frozenset({"true", "1", "yes", "y", "t"}), frozenset({"false", "0", "no", "n", "f"})


def program_name(command: Sequence[str]) -> str:
    """The name of a command's program: of a script behind its interpreter, the script's."""
    first, *rest = command
    if re.fullmatch(r"python[\d.]*|bash|sh", Path(first).name):
        if "-m" in rest[:-1]:
            return rest[rest.index("-m") + 1].rpartition(".")[2]
        script = next((word for word in rest if not word.startswith("-")), "")
        if script.endswith((".py", ".sh")):
            return Path(script).stem
    return Path(first).name


def call_of(command: Sequence[str], workdir: Path) -> Call:
    """What a command calls: `python`, `torchrun` or `accelerate launch` with a script, or `python -m`.

    Raises NotSure for everything else: a shell, a container, a program.
    """
    launcher = launcher_of(tuple(command))
    words = list(command)
    if launcher in (KnownLauncher.TORCHRUN, KnownLauncher.ACCELERATE) and words[0] != "env":
        # Which options of theirs have values differs by version: the first word that is a script counts.
        at = next((n for n, word in enumerate(words) if n and word.endswith(".py")), 0)
        if not at:
            raise NotSure("no script is named in the command")
        return Call(_inside(workdir, words[at]), "", tuple(words[at + 1 :]), launcher)
    if launcher or not words or not _PYTHON.fullmatch(words[0].rpartition("/")[2]):
        raise NotSure("the command begins with no Python")
    at = 1
    while at < len(words) and words[at].startswith("-"):
        if words[at] == "-m":
            if at + 1 == len(words):
                raise NotSure("no module is named in the command")
            return Call(None, words[at + 1], tuple(words[at + 2 :]))
        if words[at] in ("-c", "-", "--"):
            raise NotSure("the program is not in a file")
        at += 2 if words[at] in _WITH_VALUE else 1
    if at >= len(words) or not words[at].endswith(".py"):
        raise NotSure("no script is named in the command")
    return Call(_inside(workdir, words[at]), "", tuple(words[at + 1 :]))


def _inside(workdir: Path, word: str) -> Path:
    if re.search(r"[{}$~]", word):
        raise NotSure("the name of the script is made when it starts")
    return workdir / word


def folder(text: str) -> str:
    """The name of a folder as it may stand in a pattern. Raises NotSure for what a shell or a glob reads."""
    text = text.rstrip("/")
    if not text or re.search(r"[{}$~*?\[\]\0]", text):
        raise NotSure(f"{text[:60]!r} is no plain folder")
    return text
