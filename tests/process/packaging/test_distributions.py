"""The sdist and the wheel: they pass the usual checks, hold what they should, and the wheel runs elsewhere.

They are built here from a copy of the tree, or are those in $HPCSCHED_DIST, as `make dist` has built them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import hpcsched

ROOT = Path(__file__).resolve().parents[3]
PATIENCE_S = 300
NOT_OURS = shutil.ignore_patterns(
    ".*", "__pycache__", "*.egg-info", "build", "dist", "_build", "*-run", "*.log"
)
GRAFTED = (
    "benchmarks",
    "docs",
    "hpcsched",
    "jobscripts",
    "packaging",
    "profiles",
    "site-config",
    "tests",
    "tools",
)


def call(*words: object, cwd: Path, **env: str) -> str:
    done = subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env={k: v for k, v in os.environ.items() if not k.startswith(("HPCSCHED_", "PYTHON"))} | env,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist of hpcsched, and the wheel that was made from it."""
    pytest.importorskip("build", reason="the extra dev")
    if given := os.environ.get("HPCSCHED_DIST"):
        return Path(given).absolute()
    folder = tmp_path_factory.mktemp("dist")
    tree = folder / "tree"
    shutil.copytree(ROOT, tree, ignore=NOT_OURS)
    call(sys.executable, "packaging/build.py", "--out", folder / "dist", "hpcsched", cwd=tree)
    return folder / "dist"


@pytest.fixture(scope="module")
def built(whole: Path) -> Path:
    """A folder with the sdist and the wheel of each distribution."""
    if "HPCSCHED_DIST" not in os.environ:
        parts = ("hpcsched-worker", "hydra-hpcsched-launcher")
        call(sys.executable, "packaging/build.py", "--out", whole, *parts, cwd=whole.parent / "tree")
    return whole


@pytest.fixture(scope="module")
def wheel(whole: Path) -> Path:
    (found,) = whole.glob("hpcsched-*.whl")
    assert found.name == f"hpcsched-{hpcsched.__version__}-py3-none-any.whl"
    return found


@pytest.mark.slow
def test_they_pass_the_usual_checks(built: Path) -> None:
    for module in ("twine", "check_wheel_contents"):
        pytest.importorskip(module, reason="the extra dev")
    files = sorted([*built.glob("*.whl"), *built.glob("*.tar.gz")])
    assert len(files) == 6
    call(sys.executable, "-m", "twine", "--no-color", "check", "--strict", *files, cwd=ROOT)
    for file in built.glob("*.whl"):
        call(sys.executable, "-m", "check_wheel_contents", file, cwd=ROOT)


def test_an_sdist_holds_what_tests_and_documentation_need(whole: Path) -> None:
    with tarfile.open(whole / f"hpcsched-{hpcsched.__version__}.tar.gz") as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    there = set()
    for path in (path for folder in GRAFTED for path in (ROOT / folder).rglob("*")):
        parts = path.relative_to(ROOT).parts
        if path.is_file() and not NOT_OURS("", list(parts)):
            there.add("/".join(parts))
    missing = there - held
    assert len(there) > 500 and not missing
    more = (
        "CHANGELOG.md",
        "CITATION.cff",
        "LICENSE",
        "Makefile",
        "README.md",
        "SECURITY.md",
        "constraints.txt",
    )
    assert {*more, "pyproject.toml", "PKG-INFO"} <= held
    assert not any(name.endswith((".pyc", ".db")) or "/.venv/" in name for name in held)


def test_a_wheel_holds_the_package_alone(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.partition("/")[0] for name in names}
    stem = f"hpcsched-{hpcsched.__version__}"
    assert tops == {"hpcsched", f"{stem}.data", f"{stem}.dist-info"}
    assert "hpcsched/py.typed" in names and f"{stem}.dist-info/licenses/LICENSE" in names
    assert "hpcsched/store/migrations/script.py.mako" in names


@pytest.mark.slow
def test_the_wheel_of_hydras_launcher_is_a_plugin_with_the_licence(built: Path) -> None:
    (wheel,) = built.glob("hydra_hpcsched_launcher-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        assert any(name.endswith(".dist-info/licenses/LICENSE") for name in archive.namelist())
    folder = "hydra_plugins/hydra_hpcsched_launcher"
    there = (ROOT / "packaging/hydra" / folder).iterdir()
    assert names == {f"{folder}/{path.name}" for path in there if path.is_file()}


def test_a_wheel_runs_in_an_environment_of_its_own(wheel: Path, tmp_path: Path) -> None:
    """Its dependencies are those of this environment: what it declares is installed by the next test."""
    python = environment(tmp_path)
    install(python, "--no-index", "--no-deps", wheel)
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    runs(python, tmp_path)


@pytest.mark.slow
def test_a_wheel_finds_what_ships_beside_it_in_a_prefix_that_is_not_its_pythons(
    wheel: Path, tmp_path: Path
) -> None:
    """As EasyBuild and Spack install it."""
    words = ("--no-index", "--no-deps", "--ignore-installed", "--prefix", tmp_path, wheel)
    install(Path(sys.executable), *words)
    (site,) = (tmp_path / "lib").glob("python*/site-packages")
    own = {"HOME": str(tmp_path), "PYTHONPATH": str(site), "HPCSCHED_SITE_CONFIG": "generic-slurm"}
    where = call(sys.executable, "-c", "import hpcsched; print(hpcsched.__file__)", cwd=tmp_path, **own)
    assert Path(where.strip()).is_relative_to(tmp_path)
    said = call(sys.executable, "-m", "hpcsched", "config", "show", "--origin", cwd=tmp_path, **own)
    assert f"{tmp_path}/share/hpcsched/site-config/generic-slurm.toml" in said


@pytest.mark.slow
def test_a_wheel_brings_what_it_needs(wheel: Path, tmp_path: Path) -> None:
    python = environment(tmp_path)
    install(python, wheel)
    runs(python, tmp_path)


@pytest.mark.slow
def test_a_site_installs_it_for_all_with_its_module(wheel: Path, tmp_path: Path) -> None:
    install_sh = ROOT / "packaging" / "install.sh"
    call(install_sh, wheel, tmp_path, cwd=tmp_path)
    prefix = tmp_path / "hpcsched" / hpcsched.__version__
    assert "ok " in call(prefix / "bin" / "hpcsched", "doctor", "--batch", "none", cwd=tmp_path)
    module = tmp_path / "modulefiles" / "hpcsched" / hpcsched.__version__
    if modulecmd := shutil.which("modulecmd"):
        assert f"PATH={prefix}/bin:" in call(modulecmd, "bash", "load", module, cwd=tmp_path)
    with pytest.raises(AssertionError, match="is there already"):
        call(install_sh, wheel, tmp_path, cwd=tmp_path)
    assert prefix.is_dir()


@pytest.mark.slow
def test_both_in_one_environment_are_one_until_one_is_uninstalled(
    built: Path, wheel: Path, tmp_path: Path
) -> None:
    python = environment(tmp_path)
    (worker,) = built.glob("hpcsched_worker-*.whl")
    install(python, "--no-index", "--no-deps", wheel, worker)
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(worker) as part:
        common = [name for name in part.namelist() if ".dist-info/" not in name]
        assert len(common) > 100 and all(part.read(name) == whole.read(name) for name in common)
    call(python, "-c", "import hpcsched.worker, hpcsched.contract.version", cwd=tmp_path)
    call(
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "uninstall",
        "-q",
        "-y",
        "hpcsched-worker",
        cwd=tmp_path,
    )
    call(python, "-c", "import hpcsched", cwd=tmp_path)
    with pytest.raises(AssertionError, match="No module named 'hpcsched"):
        call(python, "-c", "import hpcsched.worker", cwd=tmp_path)
    install(python, "--no-index", "--no-deps", "--force-reinstall", wheel)
    call(python, "-c", "import hpcsched.worker", cwd=tmp_path)


def environment(folder: Path) -> Path:
    """Without pip, whose making takes longest: that of this environment installs into it."""
    call(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    return folder / "venv" / "bin" / "python"


def install(python: Path, *words: object) -> None:
    call(sys.executable, "-m", "pip", "--python", python, "install", "-q", *words, cwd=python.parent)


def runs(python: Path, folder: Path) -> None:
    own = {"HOME": str(folder), "XDG_CONFIG_HOME": str(folder), "HPCSCHED_SITE_CONFIG": "generic-slurm"}
    command = python.with_name("hpcsched")
    where = call(python, "-c", "import hpcsched; print(hpcsched.__file__)", cwd=folder).strip()
    assert Path(where).is_relative_to(folder)
    said = call(command, "--version", cwd=folder, **own)
    assert said == f"hpcsched, version {hpcsched.__version__}\n"
    words = ("--devices", "cpu:2", "--batch", "none", "--database", folder / "db")
    assert "ok       devices: 2 x cpu" in call(command, "doctor", *words, cwd=folder, **own)
    jobs = ROOT / "jobscripts" / "marble" / "set1.toml"
    shipped = ("--profiles", "marble-summit", "--database", folder / "db")
    told = call(command, "simulate", jobs, "--gpus", "6", *shipped, "--json", cwd=folder, **own)
    assert len(json.loads(told)["jobs"]) == 3
    share = python.parents[1] / "share"
    assert (share / "man" / "man1" / "hpcsched-submit.1").is_file()
    completes = f". {share}/bash-completion/completions/hpcsched && complete -p hpcsched"
    path = f"{python.parent}:{os.environ['PATH']}"
    assert "hpcsched" in call("bash", "--norc", "-c", completes, cwd=folder, **own, PATH=path)
