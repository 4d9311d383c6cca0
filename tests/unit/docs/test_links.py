"""Links and file names in the repository's Markdown: what they name is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = sorted(
    page
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/*.md", "profiles/*.md")
    for page in ROOT.glob(pattern)
)
ENTRANCE = ROOT / "docs/index.md"

_FENCE = re.compile(r"^ *(```|~~~).*?^ *\1", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`+[^`]*`+")
_LINK = re.compile(r"\[[^\]]*\]\(<?([^()\s>]+)>?\)")
_HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)
_ENTRY = re.compile(r"^- \[[^\]]+\]\(([^)#]+)\)", re.MULTILINE)
_PATH = re.compile(r"`([\w.*-]+(?:/[\w.*-]+)*/?)`")
_MADE_IN_THE_WALKS = {
    "hpcsched/policy/least.py",
    "hpcsched/worker/clipped/strategy.py",
    "hpcsched/worker/clipped/__init__.py",
    "hpcsched/batch/pbs.py",
    "hpcsched/cli/jobs/where.py",
}
_SUFFIXES = (".py", ".md", ".toml", ".cfg", ".sh", ".yaml", ".yml")


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as code hosts make them (and MyST after them)."""
    found: set[str] = set()
    for heading in _HEADING.findall(_FENCE.sub("", text)):
        heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = base = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        count = 0
        while slug in found:
            count += 1
            slug = f"{base}-{count}"
        found.add(slug)
    return found


def links(text: str) -> list[str]:
    return _LINK.findall(_CODE.sub("", _FENCE.sub("", text)))


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_relative_links_of_a_page_lead_somewhere(page: Path) -> None:
    broken = []
    for link in links(page.read_text()):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or not target.is_relative_to(ROOT):
            broken.append(f"{link}: no such file")
        elif anchor and anchor not in anchors(target.read_text()):
            broken.append(f"{link}: no such heading")
    assert broken == []


def test_each_page_is_in_one_list_of_the_entrance() -> None:
    listed = [(ENTRANCE.parent / entry).resolve() for entry in _ENTRY.findall(ENTRANCE.read_text())]
    assert len(set(listed)) == len(listed)
    pages = set(ROOT.glob("docs/*.md")) - {ENTRANCE} | {ROOT / "docs/adr/README.md"}
    assert pages - set(listed) == set()


def test_records_of_decisions_are_found_by_their_number() -> None:
    records = [page.name for page in ROOT.glob("docs/adr/*.md") if page.name != "README.md"]
    assert [name for name in records if not re.fullmatch(r"0\d{3}-[a-z0-9-]+\.md", name)] == []
    numbers = [name[:4] for name in records]
    assert len(set(numbers)) == len(numbers)


def test_files_that_the_guide_for_contributors_names_are_there() -> None:
    tokens = _PATH.findall(_FENCE.sub("", (ROOT / "CONTRIBUTING.md").read_text()))
    paths = [token for token in tokens if "/" in token or token.endswith(_SUFFIXES)]
    assert len(paths) > 20
    missing = {path for path in paths if not any(ROOT.glob(path.rstrip("/")))}
    assert missing - _MADE_IN_THE_WALKS == set()
