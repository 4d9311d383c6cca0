"""The checks that pre-commit runs, and the versions that are said in several places."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

import hpcsched

ROOT = Path(__file__).resolve().parents[3]


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "subject",
    [
        "launch: ranks get their cores",
        "core, agent, cli: x",
        "ci: x",
        "Merge branch 'x'",
        'Revert "x"',
        "fixup! x",
    ],
)
def test_a_subject_with_an_area_passes(subject: str) -> None:
    assert tool("commit_subject").problem(f"{subject}\n\nWhy.\n# a comment of git's\n") is None


@pytest.mark.parametrize(
    "message",
    [
        "",
        "Mend things",
        "launch:",
        "launch:ranks",
        "Launch: ranks",
        "# launch: a comment",
        "what is all this: x",
    ],
)
def test_a_subject_without_one_is_refused_in_one_line(message: str) -> None:
    said = tool("commit_subject").problem(message)
    assert said and "accepted: `area: what it does`" in said and "\n" not in said


def test_big_files_are_named(tmp_path: Path) -> None:
    large = tool("large_files")
    big, small = tmp_path / "big", tmp_path / "small"
    big.write_bytes(bytes(large.MOST_BYTES + 1))
    small.write_bytes(bytes(large.MOST_BYTES))
    assert large.too_big([str(big), str(small), str(tmp_path / "gone"), str(tmp_path)]) == [str(big)]
    assert large.too_big([f"{large.MEASURED}x.json"]) == []


def test_hooks_run_what_is_there_and_fetch_nothing() -> None:
    config = (ROOT / ".pre-commit-config.yaml").read_text()
    assert re.findall(r"- repo: (.*)", config) == ["local"]
    assert set(re.findall(r"language: (.*)", config)) == {"system"}
    for path in re.findall(r"tools/\w+\.py", config):
        assert (ROOT / path).is_file()


def test_the_versions_are_the_same_everywhere() -> None:
    newest, day = re.findall(
        r"^## \[(\d.*)\] - (\d{4}-\d\d-\d\d)$", (ROOT / "CHANGELOG.md").read_text(), re.M
    )[0]
    assert newest == hpcsched.__version__
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {newest}\n" in citation and f"\ndate-released: {day}\n" in citation
    minor = newest.rpartition(".")[0]
    assert f"\nVersion {minor}." in (ROOT / "README.md").read_text()


def test_there_is_room_for_what_comes_next() -> None:
    assert "\n## [Unreleased]\n" in (ROOT / "CHANGELOG.md").read_text()


def test_each_folder_of_modules_is_a_package() -> None:
    """Without `__init__.py` it is neither in a wheel nor in the table of rooms."""
    folders = {path.parent for path in (ROOT / "hpcsched").rglob("*.py")}
    bare = {str(folder.relative_to(ROOT)) for folder in folders if not (folder / "__init__.py").exists()}
    assert {name for name in bare if not name.startswith("hpcsched/store/migrations")} == set()
