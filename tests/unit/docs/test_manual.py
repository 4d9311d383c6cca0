"""The manual pages say all that `--help` says, in what man takes. (`test_pages` holds them up to date.)"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from hpcsched.cli import examples

ROOT = Path(__file__).parents[3]
REQUESTS = {'.\\"', *[".TH", ".SH", ".SS", ".PP", ".TP", ".BR", ".EX", ".EE", ".PD", ".nh", ".ad"]}


@pytest.fixture(scope="module")
def manual() -> ModuleType:
    sys.path.insert(0, str(ROOT / "docs/tools"))
    import manual

    sys.path.remove(str(ROOT / "docs/tools"))
    return manual


def test_each_command_has_a_page_with_its_options_and_examples(manual: ModuleType) -> None:
    pages = {Path(name).stem: text for name, text in manual.pages().items()}
    assert pages.keys() == {"hpcsched", *("hpcsched-" + path.replace(" ", "-") for path in examples.EXAMPLES)}
    for name, text in pages.items():
        assert {line.split()[0] for line in text.splitlines() if line[0] in ".'"} <= REQUESTS, name
    submit = pages["hpcsched-submit"].replace("\\-", "-")
    assert "\n\\fB-G\\fR, \\fB--gpus\\fR \\fIN\\fR\nGPUs: auto" in submit
    assert "\nhpcsched submit --array 0-15%4 -- python train.py --fold {index}\n" in submit
    assert "\n\\fBHPCSCHED_GPUS\\fR\n\\fB--gpus\\fR\n" in submit


def test_words_stay_what_they_are(manual: ModuleType) -> None:
    assert manual._prose("see --export, or `.x 'a'`") == [
        "see \\fB\\-\\-export\\fR, or \\fB.x \\(aqa\\(aq\\fR"
    ]
    assert manual._paragraphs("\b\n.x \\d\n'y") == [".EX", "\\&.x \\ed", "\\(aqy", ".EE"]
    wrapped = manual._prose("word " * 15 + "...more")
    assert wrapped[1] == "\\&...more"
