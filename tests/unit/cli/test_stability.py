"""What is experimental is said to be so everywhere: in help texts, on the pages, in the promise."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from hpcsched.cli.main import cli
from hpcsched.stability import EXPERIMENTAL, MARK, marked

DOCS = Path(__file__).resolve().parents[3] / "docs"


def commands(group: click.Group, path: str = "") -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command
        yield f"{path}{name}", command
        if isinstance(command, click.Group):
            yield from commands(command, f"{path}{name} ")


COMMANDS = dict(commands(cli))


def texts(command: click.Command) -> Iterator[str]:
    yield from (p.help for p in command.params if isinstance(p, click.Option) and p.help)
    yield command.help or ""


@pytest.mark.parametrize("path", COMMANDS)
def test_every_experimental_word_in_a_help_text_is_marked(path: str) -> None:
    for text in texts(COMMANDS[path]):
        for word in (word for feature in EXPERIMENTAL for word in feature.words):
            for found in re.finditer(rf"(?<![\w.]){re.escape(word)}(?!\w)", text):
                assert text[found.end() :].startswith(f" {MARK}"), f"{path}: {text}"


@pytest.mark.parametrize("feature", EXPERIMENTAL, ids=lambda feature: feature.name)
def test_an_experimental_feature_is_told_of(feature) -> None:
    for path in feature.commands:
        assert (COMMANDS[path].help or "").endswith(MARK)
        assert MARK in COMMANDS[path].get_short_help_str(200)
    for word in feature.words:
        assert any(word in text for command in COMMANDS.values() for text in texts(command)), word
    promise = (DOCS / "stability.md").read_text()
    assert f"| {feature.name} | {feature.why} (" in promise
    assert feature.pages
    for name in feature.pages:
        (page,) = DOCS.rglob(name)
        assert "stability.md#experimental" in page.read_text(), name
        assert f"{name})" in promise


def test_the_promise_names_nothing_else() -> None:
    table = (DOCS / "stability.md").read_text().partition("## Experimental")[2]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows] == [f.name for f in EXPERIMENTAL]


def test_a_mark_is_made_once_and_at_whole_words_only() -> None:
    once = marked("auto, lsf or none; see lsf.sub, lsf-jobs and my/lsf. LSF.")
    assert once == f"auto, lsf {MARK} or none; see lsf.sub, lsf-jobs and my/lsf. LSF {MARK}."
    assert marked(once) == once
    assert marked("Packs.", command="profile pack") == f"Packs. {MARK}"
    assert marked("Runs.", command="profile run") == "Runs."
