"""What can be named in job files and tables is explained in the documentation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hpcsched.contract.strategies import KINDS
from hpcsched.core.model import JobState, Role
from hpcsched.core.reasons import Why
from hpcsched.policy import POLICIES

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"


def first_cells(page: str) -> list[str]:
    return re.findall(r"^\| ([^|]+?) *\|", (DOCS / page).read_text(), re.MULTILINE)


def test_each_reason_is_explained_once() -> None:
    text = (DOCS / "states.md").read_text()
    section = text[text.index("## Reasons") : text.index("## Runs and attempts")]
    cells = re.findall(r"^\| ([^|]+?) *\|", section, re.MULTILINE)
    named = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(named) == sorted(why.value for why in Why)


def test_each_state_and_each_role_is_explained() -> None:
    cells = first_cells("states.md")
    assert {state.value for state in JobState} <= set(cells)
    assert {f"*{role.value}*" for role in Role} <= set(cells)


@pytest.mark.parametrize("policy", POLICIES)
def test_each_policy_is_explained(policy: str) -> None:
    assert f"\n**`{policy}`**" in (DOCS / "policies.md").read_text()
    assert f'"{policy}"' in (DOCS / "job-files.md").read_text()


@pytest.mark.parametrize("kind", KINDS)
def test_each_strategy_is_in_the_reference_of_job_files(kind: str) -> None:
    assert f'`"{kind}"`' in (DOCS / "job-files.md").read_text()


def test_the_glossary_says_where_a_word_stands_in_the_code() -> None:
    rows = re.findall(
        r"^\| [^|]+ \|[^|]*\|[^|]*\| ([^|]*)\|$", (DOCS / "glossary.md").read_text(), re.MULTILINE
    )
    places = [place for cell in rows for place in re.findall(r"`([\w/]+(?:/|\.py))`", cell)]
    assert len(places) > 50
    assert [place for place in places if not (ROOT / "hpcsched" / place).exists()] == []
