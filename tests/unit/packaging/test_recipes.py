"""The recipes of package managers ask for what pyproject.toml asks for, at this version."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import hpcsched

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "packaging"))
import recipes  # noqa: E402

SDIST, WHEEL = "5" * 64, "7" * 64
ASKED = [Requirement(line) for line in recipes.PROJECT["dependencies"]]


@pytest.fixture(scope="module")
def made() -> dict[str, str]:
    found = recipes.filled(SDIST, WHEEL)
    assert not any(re.search(r"@[A-Z_0-9]+@", text) for text in found.values())
    return {Path(name).name: text for name, text in found.items()}


def test_conda_asks_for_the_same(made: dict[str, str]) -> None:
    run = made["recipe.yaml"].partition("\n  run:\n")[2].partition("\n  run_constraints:\n")[0]
    lines = dict(re.findall(r"^    - ([a-z0-9-]+) (>=[0-9.]+)$", run, re.MULTILINE))
    assert lines == {canonicalize_name(each.name): str(each.specifier) for each in ASKED}
    assert f'version: "{hpcsched.__version__}"' in made["recipe.yaml"] and SDIST in made["recipe.yaml"]


def test_spack_asks_for_the_same(made: dict[str, str]) -> None:
    ast.parse(made["package.py"])
    always = dict(
        re.findall(r'^ {8}depends_on\("py-([^@]+)@([0-9.]+):"\)$', made["package.py"], re.MULTILINE)
    )
    assert {name: f">={lowest}" for name, lowest in always.items()} == {
        canonicalize_name(each.name): str(each.specifier) for each in ASKED
    }
    assert f'version("{hpcsched.__version__}", sha256="{SDIST}")' in made["package.py"]


def test_what_easybuild_brings_is_within_the_bounds(made: dict[str, str]) -> None:
    text = made[f"hpcsched-{hpcsched.__version__}-GCCcore-13.3.0.eb"]
    ast.parse(text)
    modules = [
        pair
        for words in re.findall(r"^    \(.*\),  # (.*)$", text, re.MULTILINE)
        for pair in words.split(", ")
    ]
    brought = dict(pair.split() for pair in modules)
    brought |= dict(re.findall(r"^    \('([^']+)', '([^']+)', \{$", text, re.MULTILINE))
    versions = {canonicalize_name(name): version for name, version in brought.items()}
    for each in ASKED:
        version = versions.get(canonicalize_name(each.name))
        assert version and each.specifier.contains(version), f"{each}: {version}"
    assert f"version = '{hpcsched.__version__}'" in text and WHEEL in text


def test_a_bound_that_recipes_cannot_say_is_told() -> None:
    assert recipes.at_least("SQLAlchemy>=2.0") == ("sqlalchemy", "2.0")
    with pytest.raises(SystemExit, match="click<9"):
        recipes.at_least("click<9")
