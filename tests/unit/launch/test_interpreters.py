"""What is said of an interpreter that runs no trainers, and where environments are looked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import hpcsched
from hpcsched.contract.version import VERSION
from hpcsched.core.model import Container, JobSpec, Kind, PythonEnvironment
from hpcsched.errors import BadEnvironment
from hpcsched.launch.interpreters import Interpreter, InterpreterInfo, Interpreters

PIP = "/p -m pip install"
GOOD = {"executable": "/p", "prefix": "/", "python": "3.9.18", "worker": "0.2", "torch": "2.4.0+cpu"}


def has(**changes: str | None) -> InterpreterInfo:
    return InterpreterInfo(**{**GOOD, "contract": str(VERSION), **changes})  # type: ignore[arg-type]


def minor(by: int) -> str:
    return f"{VERSION.major}.{VERSION.minor + by}"


def test_the_oldest_that_will_do_and_a_minor_version_apart() -> None:
    assert has().why_not("/p") == ""
    assert has(contract=minor(1)).why_not("/p") == ""
    assert has(python="3.13.0", torch="2.13.0").why_not("/p") == ""


def test_a_worker_of_the_minor_version_before_still_works(monkeypatch: pytest.MonkeyPatch) -> None:
    # What is judged is stored: this is what a worker said before the contract got its newest minor version.
    stored = has(contract=str(VERSION))
    newer = VERSION._replace(minor=VERSION.minor + 1)
    monkeypatch.setattr("hpcsched.contract.version.fits.__defaults__", (newer,))
    assert stored.why_not("/p") == ""
    monkeypatch.setattr(
        "hpcsched.contract.version.fits.__defaults__", (newer._replace(minor=newer.minor + 1),)
    )
    assert "is needed" in stored.why_not("/p")


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"python": "3.8.10"}, "/p is Python 3.8.10; trainers need 3.9 or later"),
        ({"worker": None}, f"/p (Python 3.9.18) has no hpcsched-worker: {PIP} 'hpcsched-worker[torch]'"),
        ({"torch": None}, f"/p has no torch; trainers need 2.4 or later: {PIP} 'torch>=2.4'"),
        ({"torch": "2.3.1"}, f"/p has torch 2.3.1; trainers need 2.4 or later: {PIP} 'torch>=2.4'"),
        ({"torch": "1.13"}, f"/p has torch 1.13; trainers need 2.4 or later: {PIP} 'torch>=2.4'"),
    ],
)
def test_one_line_says_what_is_there_what_is_needed_and_how_to_get_it(changes: dict, line: str) -> None:
    assert has(**changes).why_not("/p") == line


def test_what_an_interpreter_says_of_itself_comes_in_one_line() -> None:
    line = has(worker="0.2\n\x1b[2J", contract="99.0").why_not("/p\nq")
    assert line.isprintable() and line.startswith("/p\\nq has hpcsched-worker 0.2\\n\\x1b")


@pytest.mark.parametrize("conda", ["conda", "/conda", "bin/conda", "."])
def test_odd_words_about_conda_are_no_fault(conda: str) -> None:
    environ = {"PATH": "/usr/bin", "CONDA_EXE": conda, "CONDA_ENVS_PATH": "::relative:", "CONDA_PREFIX": "p"}
    for name in ("none", "..", "."):
        with pytest.raises(BadEnvironment, match="no environment of this name"):
            Interpreters(environ).programs(PythonEnvironment(kind="conda", name=name))


@pytest.mark.parametrize("contract", [None, "99.0", minor(2), "nonsense", ""])
def test_a_worker_of_another_contract_is_told_which_version_fits(contract: str | None) -> None:
    line = has(contract=contract).why_not("/p")
    assert line.startswith("/p has hpcsched-worker 0.2, but ") and line.isprintable()
    assert line.endswith(f": {PIP} hpcsched-worker=={hpcsched.__version__}")


def test_an_activated_environment_comes_first_and_no_other_is_left(tmp_path: Path) -> None:
    (tmp_path / "pyvenv.cfg").touch()
    before = {"PATH": "/usr/bin", "CONDA_PREFIX": "/c", "PYTHONHOME": "/h", "HOME": "/home"}
    found = Interpreter(python="/x", folder=str(tmp_path / "bin")).activated(before)
    assert found == {"PATH": f"{tmp_path}/bin:/usr/bin", "VIRTUAL_ENV": str(tmp_path), "HOME": "/home"}
    (tmp_path / "pyvenv.cfg").unlink()
    (tmp_path / "conda-meta").mkdir()
    found = Interpreter(python="/x", folder=str(tmp_path / "bin")).activated(before)
    assert found["CONDA_PREFIX"] == str(tmp_path) and found["CONDA_DEFAULT_ENV"] == tmp_path.name
    assert Interpreter(python="/x", folder="", named=False).activated(before) == before


def program(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_environments_are_found_by_path_and_by_name(tmp_path: Path) -> None:
    one = program(tmp_path / "envs" / "one" / "bin" / "python")
    (tmp_path / "envs" / "one" / "conda-meta").mkdir()
    base = program(tmp_path / "bin" / "python")
    (tmp_path / "conda-meta").mkdir()
    conda = program(tmp_path / "bin" / "conda")
    named = program(tmp_path / "bin" / "python3.12")

    def found(kind: str, name: str, **environ: str) -> str:
        environment = PythonEnvironment(kind=kind, name=name)  # type: ignore[arg-type]
        interpreter = Interpreters(environ).programs(environment)
        assert interpreter
        return interpreter.python

    assert found("venv", str(one.parents[1])) == str(one)
    assert found("python", str(one)) == str(one)
    assert found("python", "python3.12", PATH=f"/none:{named.parent}") == str(named)
    assert found("conda", str(one.parents[1])) == str(one)
    assert found("conda", "one", CONDA_EXE=str(conda)) == str(one)
    assert found("conda", "one", CONDA_ENVS_PATH=f"/none:{tmp_path}/envs") == str(one)
    assert found("conda", "one", PATH=str(conda.parent)) == str(one)
    assert found("conda", "one", CONDA_PREFIX=str(one.parents[1])) == str(one)
    assert found("conda", "base", CONDA_PREFIX=str(one.parents[1])) == str(base)
    for kind, name, line in (
        ("conda", "two", "conda = 'two': no environment of this name"),
        ("python", "python9", "python = 'python9': not found in PATH=/none"),
        ("venv", str(tmp_path / "no"), "no such file"),
        ("python", "rel/python", "not an absolute path"),
        ("python", str(tmp_path), "not a program"),
    ):
        with pytest.raises(BadEnvironment, match=line) as refused:
            found(kind, name, PATH="/none")
        assert not refused.value.transient and refused.value.exit_code == 2


def test_a_job_in_a_container_is_asked_for_its_image_only(tmp_path: Path) -> None:
    image = tmp_path / "a.sif"
    spec = JobSpec(name="a", model="a", kind=Kind.TRAINER, container=Container(image=str(image)))
    later, other = replace(spec, name="b", after=("a",)), replace(spec, name="c")
    here = Interpreters({"PATH": "/none"})
    assert here.unlike([spec, later, other]) == [spec, later]
    with pytest.raises(BadEnvironment, match=rf"^job a: container {image}: not there$") as refused:
        here.check(spec)
    assert not refused.value.transient and refused.value.exit_code == 2
    here.check(later)  # the job before may make it
    image.touch()
    here.check(spec)
    here.check(replace(spec, container=Container(image="docker://a")))
