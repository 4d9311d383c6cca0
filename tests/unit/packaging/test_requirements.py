"""packaging/requirements.txt is a whole answer to what pyproject.toml asks for: `make lock` makes it anew."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[3]
FILE = (ROOT / "packaging" / "requirements.txt").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ASKED = [
    Requirement(line)
    for lines in (PROJECT["dependencies"], *(PROJECT["optional-dependencies"][x] for x in ("report", "plan")))
    for line in lines
]
"""Without torch, which a site chooses by its GPUs."""


def pinned(python: str) -> dict[str, str]:
    """What pip takes from it on Linux, name to version."""
    here = {
        "python_version": python,
        "python_full_version": f"{python}.4",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": "x86_64",
    }
    found: dict[str, str] = {}
    for line in re.findall(r"^([a-z0-9].*?) \\$", FILE, re.MULTILINE):
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate(here):
            (exactly,) = requirement.specifier
            assert exactly.operator == "==" and requirement.name not in found, line
            found[canonicalize_name(requirement.name)] = exactly.version
    return found


@pytest.mark.parametrize("python", ["3.11", "3.12"])
def test_it_has_one_version_of_each_package_that_is_asked_for(python: str) -> None:
    versions = pinned(python)
    for asked in ASKED:
        version = versions.get(canonicalize_name(asked.name))
        assert version and asked.specifier.contains(version), f"{asked}: {version}; run `make lock`"


def test_each_version_has_hashes_and_no_index_is_named() -> None:
    entries = re.split(r"^(?=[a-z0-9])", FILE, flags=re.MULTILINE)[1:]
    assert all(re.search(r"--hash=sha256:[0-9a-f]{64}", entry) for entry in entries)
    assert "://" not in FILE and "--index" not in FILE and "torch" not in pinned("3.12")
