"""What hpcsched is made of: each package at one version with hashes of its files, and the bill of that."""

from __future__ import annotations

import json
import re
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "packaging"))

import recipes  # noqa: E402
import sbom  # noqa: E402

LOCK = sbom.LOCK.read_text()


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "hpcsched-9.8.7-py3-none-any.whl"
    said = "Name: hpcsched\nVersion: 9.8.7\nSummary: a scheduler\nLicense-Expression: Apache-2.0\n"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("hpcsched-9.8.7.dist-info/METADATA", f"Metadata-Version: 2.4\n{said}")
    return path


def test_every_package_of_the_lock_has_a_version_and_hashes_of_its_files() -> None:
    found = sbom.packages(LOCK)
    assert len(found) > 20 and all(one.hashes and one.version and one.by for one in found)
    assert len(found) == len(re.findall(r"^[A-Za-z0-9]", LOCK, re.MULTILINE)), "and there is nothing else"
    assert sum(len(one.hashes) for one in found) == LOCK.count("--hash=") == LOCK.count("--hash=sha256:")
    names = {one.name for one in found}
    asked = [*recipes.PROJECT["dependencies"], *recipes.EXTRAS["report"], *recipes.EXTRAS["plan"]]
    assert {canonicalize_name(Requirement(line).name) for line in asked} <= names


@pytest.mark.parametrize("line", ["click>=8", "-e .", "--index-url http://x", "click @ https://x/y.whl"])
def test_a_line_that_fixes_nothing_is_told(line: str) -> None:
    with pytest.raises(ValueError, match="is no line of a lock"):
        sbom.packages(f"{LOCK}{line}\n")


def test_the_bill_names_the_wheel_and_all_of_the_lock_and_who_asks_for_what(wheel: Path) -> None:
    bill = sbom.materials(wheel, LOCK)
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    itself = bill["metadata"]["component"]
    assert (itself["name"], itself["version"]) == ("hpcsched", "9.8.7")
    known = {one.purl for one in sbom.packages(LOCK)}
    refs = [one["bom-ref"] for one in bill["components"]]
    assert sorted(refs) == sorted(known) and len(known) == len(refs)
    asks = {one["ref"]: set(one["dependsOn"]) for one in bill["dependencies"]}
    assert asks.keys() == known | {itself["bom-ref"]}
    direct = {purl.removeprefix("pkg:pypi/").partition("@")[0] for purl in asks[itself["bom-ref"]]}
    asked = [*recipes.PROJECT["dependencies"], *recipes.EXTRAS["report"], *recipes.EXTRAS["plan"]]
    assert direct == {canonicalize_name(Requirement(line).name) for line in asked}
    (alembic,) = (purl for purl in known if purl.startswith("pkg:pypi/alembic@"))
    assert {purl.partition("@")[0] for purl in asks[alembic]} >= {"pkg:pypi/mako", "pkg:pypi/sqlalchemy"}
    reached, more = set[str](), {itself["bom-ref"]}
    while more:
        reached |= more
        more = {ref for one in more for ref in asks[one]} - reached
    assert reached == asks.keys(), "somebody asks for each"


def test_the_same_wheel_has_the_same_bill(wheel: Path) -> None:
    assert json.dumps(sbom.materials(wheel, LOCK)) == json.dumps(sbom.materials(wheel, LOCK))
