"""What hpcsched brings along, and what it is built from: known, fixed, and the same each time."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
LOCK = ROOT / "packaging" / "requirements.txt"
NOT_OURS = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "*-run", "*.log")
PATIENCE_S = 600

pytestmark = pytest.mark.slow


def call(*words: object, cwd: Path = ROOT, umask: int = -1) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        umask=umask,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def test_bandit_finds_nothing_that_has_no_reason() -> None:
    pytest.importorskip("bandit", reason="the extra dev")
    found = call(sys.executable, "-m", "bandit", "-q", "-c", "pyproject.toml", "-r", "hpcsched", "-f", "json")
    seen = json.loads(found.stdout)
    assert found.returncode == 0 and not seen["results"] and not seen["errors"], found.stdout
    assert len(seen["metrics"]) > 500
    for path in (ROOT / "hpcsched").rglob("*.py"):
        for line in path.read_text().splitlines():
            assert "# nosec" not in line or re.search(r"# nosec B\d{3} # \S", line), f"{path}: {line}"
    skipped = re.findall(r'^    "(B\d{3})",(.*)$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert len(skipped) > 3 and all(re.match(r" # \S", reason) for _, reason in skipped)


@pytest.fixture(scope="module")
def twice(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Where the distributions were built from two copies of the tree, at other times, by other umasks."""
    pytest.importorskip("build", reason="the extra dev")
    found, source = [], ROOT
    for number, umask in enumerate((0o022, 0o077)):
        folder = tmp_path_factory.mktemp(f"built-{number}")
        tree = folder / ("tree" * (number + 1))
        shutil.copytree(source, tree, ignore=NOT_OURS)
        source = tree  # other tests may write into the root meanwhile
        for path in tree.rglob("*"):
            os.utime(path, (1.6e9 + 1e6 * number, 1.6e9 + 1e6 * number))
        done = call(sys.executable, "packaging/build.py", "--out", folder / "dist", cwd=tree, umask=umask)
        assert done.returncode == 0, done.stderr
        found.append(folder / "dist")
    return found


def test_wheels_that_are_built_twice_are_the_same_bit_for_bit(twice: list[Path]) -> None:
    first, second = ({path.name: path.read_bytes() for path in dist.glob("*.whl")} for dist in twice)
    assert len(first) == 3 and first.keys() == second.keys()
    for name, data in first.items():
        assert data == second[name], name


def test_sdists_that_are_built_twice_hold_the_same(twice: list[Path]) -> None:
    """Their archives hold the times of building."""

    def held(path: Path) -> dict[str, bytes]:
        with tarfile.open(path) as archive:
            files = (one for one in archive.getmembers() if one.isfile())
            return {one.name: archive.extractfile(one).read() for one in files}  # type: ignore[union-attr]

    first, second = ({path.name: held(path) for path in dist.glob("*.tar.gz")} for dist in twice)
    assert len(first) == 3 and first == second


def test_the_bill_of_materials_lies_beside_the_wheel(twice: list[Path]) -> None:
    texts = set()
    for dist in twice:
        done = call(sys.executable, "packaging/sbom.py", dist)
        assert done.returncode == 0, done.stderr
        (wheel,) = dist.glob("hpcsched-[0-9]*.whl")
        texts.add((dist / f"{wheel.name}.cdx.json").read_text())
    (text,) = texts
    itself = json.loads(text)["metadata"]["component"]
    with zipfile.ZipFile(wheel) as archive:
        (record,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    assert record == f"hpcsched-{itself['version']}.dist-info/METADATA"
    assert itself["licenses"] == [{"expression": "Apache-2.0"}]
    schema = pytest.importorskip("cyclonedx.validation.json", reason="cyclonedx-python-lib is not installed")
    version = pytest.importorskip("cyclonedx.schema").SchemaVersion.V1_6
    assert schema.JsonStrictValidator(version).validate_str(text) is None


def test_pip_takes_the_lock_with_its_hashes_and_no_other_file(tmp_path: Path) -> None:
    """As far as this machine's index goes: every file that pip would install has a hash of the lock."""
    command = (
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "--dry-run",
        "--no-deps",
    )
    target = ("--target", tmp_path / "none", "--only-binary", ":all:", "--require-hashes")
    done = call(*command, "--quiet", "--report", tmp_path / "report", *target, "-r", LOCK)
    if re.search(r"No matching distribution|Connection|Max retries|resolution", done.stderr):
        pytest.skip(f"not all of it can be had here: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    taken = json.loads((tmp_path / "report").read_text())["install"]
    text = LOCK.read_text()
    assert len(taken) > 15
    for one in taken:
        assert one["download_info"]["archive_info"]["hashes"]["sha256"] in text, one["metadata"]["name"]
    other = tmp_path / "other.txt"
    other.write_text(re.sub(r"sha256:[0-9a-f]{64}", f"sha256:{'0' * 64}", text))
    refused = call(*command, *target, "-r", other)
    assert refused.returncode != 0 and "DO NOT MATCH THE HASHES" in refused.stderr


def test_no_package_of_the_lock_has_a_known_weakness(tmp_path: Path) -> None:
    pytest.importorskip("pip_audit", reason="pip-audit is not installed")
    done = call(
        *(sys.executable, "-m", "pip_audit", "--disable-pip", "--no-deps", "--require-hashes"),
        *("--progress-spinner", "off", "--format", "json", "--cache-dir", tmp_path, "-r", LOCK),
    )
    found = json.loads(done.stdout)["dependencies"] if done.stdout.startswith("{") else []
    if unknown := [one["skip_reason"] for one in found if "skip_reason" in one]:
        pytest.skip(f"no database of advisories has {len(unknown)} of {len(found)} packages: {unknown[0]}")
    if not found:
        pytest.skip(f"no database of advisories can be reached: {done.stderr.splitlines()[-1:]}")
    assert len(found) > 15 and not [one for one in found if one["vulns"]], found
