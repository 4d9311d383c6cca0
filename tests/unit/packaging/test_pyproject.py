"""What pyproject.toml says of the package, held against the tree."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from hpcsched.store.profiles import shipped

ROOT = Path(__file__).resolve().parents[3]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
FOLDERS = (
    *("profiles", "schemas", "site-config"),
    *("jobscripts/slurm", "jobscripts/lsf", "jobscripts/sge", "jobscripts/marble"),
)


TAKEN = {
    file: share
    for share, patterns in SETUPTOOLS["data-files"].items()
    for pattern in patterns
    for file in ROOT.glob(pattern)
}


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_shipped_file_is_installed_where_it_is_looked_for(folder: str) -> None:
    there = {p for p in (ROOT / folder).rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    assert there and there <= TAKEN.keys()
    for file in there:
        assert TAKEN[file] == f"share/hpcsched/{file.relative_to(ROOT).parent}"


def test_manual_pages_and_completion_are_installed_where_man_and_shells_look() -> None:
    for file in (path for path in (ROOT / "packaging" / "share").rglob("*") if path.is_file()):
        assert TAKEN.get(file) == str(file.relative_to(ROOT / "packaging").parent)


def test_every_shipped_profile_is_found_by_its_name() -> None:
    assert set(shipped()) >= {path.stem for path in (ROOT / "profiles").glob("*.json")}


def test_every_file_in_the_package_that_is_no_module_is_installed() -> None:
    modules = {p for p in (ROOT / "hpcsched").rglob("*.py") if (p.parent / "__init__.py").exists()}
    there = {p for p in (ROOT / "hpcsched").rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    taken = {
        file
        for package, patterns in SETUPTOOLS["package-data"].items()
        for pattern in patterns
        for file in ROOT.joinpath(*package.split(".")).glob(pattern)
    }
    assert there - modules <= taken
