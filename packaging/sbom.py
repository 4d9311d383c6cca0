"""The bill of materials of hpcsched's wheel, as CycloneDX 1.6 in JSON.

    python packaging/sbom.py [DIST]

What the wheel in DIST (dist by default) asks for, at the versions and with the hashes of
packaging/requirements.txt, is written beside it, as WHEEL.cdx.json. `make dist` does so.
"""

from __future__ import annotations

import argparse
import email
import hashlib
import json
import re
import uuid
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "packaging" / "requirements.txt"

_PACKAGE = re.compile(r"(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^ ;\\]+)(?: ; (?P<marker>[^\\]+?))?(?: \\)?$")


@dataclass(frozen=True)
class Package:
    """A package of the lock. `by`: the packages that ask for it, as the lock names them."""

    name: str
    version: str
    marker: str
    hashes: tuple[str, ...]
    by: tuple[str, ...]

    @property
    def purl(self) -> str:
        return f"pkg:pypi/{self.name}@{self.version}"


def packages(lock: str) -> list[Package]:
    """The packages of what `make lock` has written. Raises ValueError for a line that is none of it."""
    found: list[tuple[re.Match[str], list[str], list[str]]] = []
    for line in lock.splitlines():
        if match := _PACKAGE.match(line):
            found.append((match, [], []))
        elif hashed := re.fullmatch(r"    --hash=sha256:([0-9a-f]{64})(?: \\)?", line):
            found[-1][1].append(hashed[1])
        elif found and (said := re.fullmatch(r"    #(?: via|  )? *(.*)", line)):
            found[-1][2].extend([said[1]] if said[1] else [])
        elif line and not line.startswith("#"):
            raise ValueError(f"{line!r} is no line of a lock")
    return [
        Package(match["name"], match["version"], match["marker"] or "", tuple(hashes), tuple(by))
        for match, hashes, by in found
    ]


def materials(wheel: Path, lock: str) -> dict[str, Any]:
    """The document. It says no time and draws no number: the same wheel and lock give the same bytes."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (one for one in archive.namelist() if one.endswith(".dist-info/METADATA"))
        about = email.message_from_bytes(archive.read(name))
    sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
    itself = {
        "type": "application",
        "bom-ref": f"pkg:pypi/{about['Name']}@{about['Version']}",
        "purl": f"pkg:pypi/{about['Name']}@{about['Version']}",
        "name": about["Name"],
        "version": about["Version"],
        "description": about["Summary"],
        "licenses": [{"expression": about["License-Expression"]}],
        "hashes": [{"alg": "SHA-256", "content": sha256}],
    }
    known = packages(lock)
    asks: dict[str, set[str]] = {itself["bom-ref"]: set(), **{one.purl: set() for one in known}}
    for one in known:
        for by in one.by:
            if by == f"{about['Name']} (pyproject.toml)":
                asks[itself["bom-ref"]].add(one.purl)
            for other in known:
                if other.name == by:
                    asks[other.purl].add(one.purl)
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, sha256 + lock)}",
        "version": 1,
        "metadata": {"component": itself},
        "components": [_component(one) for one in known],
        "dependencies": [{"ref": ref, "dependsOn": sorted(asked)} for ref, asked in asks.items()],
    }


def _component(package: Package) -> Mapping[str, Any]:
    """The hashes are those of all files of that version: which one is installed, the platform says."""
    files = {
        "type": "distribution",
        "url": f"https://pypi.org/project/{package.name}/{package.version}/",
        "hashes": [{"alg": "SHA-256", "content": content} for content in package.hashes],
    }
    marker = [{"name": "hpcsched:marker", "value": package.marker}] if package.marker else []
    return {
        "type": "library",
        "bom-ref": package.purl,
        "purl": package.purl,
        "name": package.name,
        "version": package.version,
        "externalReferences": [files],
        **({"properties": marker} if marker else {}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the bill of materials of hpcsched's wheel.")
    parser.add_argument("dist", nargs="?", type=Path, default=Path("dist"), help="where the wheel is; dist")
    (wheel,) = parser.parse_args().dist.glob("hpcsched-[0-9]*.whl")
    document = materials(wheel, LOCK.read_text())
    wheel.with_name(f"{wheel.name}.cdx.json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
