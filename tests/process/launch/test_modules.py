"""Modules are loaded by a bash, as after a login; what they change comes to the job."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hpcsched.core.needs import Needs
from hpcsched.errors import BadEnvironment
from hpcsched.launch.local import LocalLauncher
from hpcsched.launch.modules import Modules, laid_over, load_modules
from hpcsched.launch.proc import living, stat
from hpcsched.testing.conformance_launch import plan, reaped

FAKE = """
module() {
  [ "$1" = load ] || return 2
  case $2 in
    cuda|cuda/12.4) export CUDA_HOME=/opt/cuda/12.4 PATH=/opt/cuda/12.4/bin:$PATH
      LOADEDMODULES=${LOADEDMODULES:+$LOADEDMODULES:}cuda/12.4 ;;
    gcc) unset OLD; export CC=$'/opt/gcc\\nx'; LOADEDMODULES=${LOADEDMODULES:+$LOADEDMODULES:}gcc/13 ;;
    needs-cuda) [ -n "$CUDA_HOME" ] || { echo "Lmod has detected: load cuda first" >&2; return 1; }
      LOADEDMODULES=$LOADEDMODULES:needs-cuda ;;
    silent) ;;
    old) echo "WARNING: old is deprecated" >&2; printf "use new" >&2
      LOADEDMODULES=$LOADEDMODULES:old ;;
    leaves) exit 3 ;;
    slow) echo $BASHPID > "$MODULESHOME/began.tmp"; mv "$MODULESHOME/began.tmp" "$MODULESHOME/began"
      sleep 300 & wait ;;
    floods) export BIG=$(head -c 2000000 /dev/zero | tr '\\0' x) LOADEDMODULES=floods ;;
    *) echo "ModuleCmd_Load.c(213):ERROR:105: Unable to locate a modulefile for '$2'" >&2; return 1 ;;
  esac
  export LOADEDMODULES
}
"""


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """An environment with a `module` of its own."""
    (tmp_path / "init").mkdir()
    (tmp_path / "init/bash").write_text(FAKE)
    return {"PATH": os.defpath, "HOME": "/", "OLD": "1", "MODULESHOME": str(tmp_path)}


def test_what_modules_change_is_told(environ: dict[str, str]) -> None:
    changes = load_modules(("cuda", "gcc"), environ).changes
    assert changes["CUDA_HOME"] == "/opt/cuda/12.4"
    assert changes["CC"] == "/opt/gcc\nx"
    assert changes["OLD"] is None
    there = laid_over(environ, changes)
    assert there["PATH"] == f"/opt/cuda/12.4/bin:{os.defpath}"
    assert there["LOADEDMODULES"] == "cuda/12.4:gcc/13"
    assert "OLD" not in there
    assert there["HOME"] == "/"


def test_they_are_loaded_in_their_order(environ: dict[str, str]) -> None:
    assert "needs-cuda" in str(load_modules(("cuda", "needs-cuda"), environ).changes["LOADEDMODULES"])
    with pytest.raises(BadEnvironment, match=r"modules = \[needs-cuda, cuda\].*load cuda first"):
        load_modules(("needs-cuda", "cuda"), environ)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("missing/1.0", "Unable to locate a modulefile"),
        ("silent", "`module load silent` has loaded nothing, and says nothing"),
        ("floods", "Argument list too long"),
        ("leaves", "bash ends with exit code 3"),
    ],
)
def test_one_that_does_not_load_is_one_line(environ: dict[str, str], name: str, why: str) -> None:
    with pytest.raises(BadEnvironment) as caught:
        load_modules((name,), environ)
    said = str(caught.value)
    assert said.startswith(f"modules = [{name}]: cannot be loaded: ")
    assert "\n" not in said
    assert why in said
    assert not caught.value.transient


def test_a_host_without_modules_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(BadEnvironment, match="there is no `module` on this host"):
        load_modules(("cuda",), {"PATH": os.defpath, "MODULESHOME": str(tmp_path)}, sites=["/no/such"])


def test_what_they_say_comes_into_the_output_of_the_job(environ: dict[str, str], tmp_path: Path) -> None:
    launcher = LocalLauncher(environ=environ)
    says = plan(tmp_path, ["sh", "-c", "echo works"])
    workers = launcher.launch(replace(says, needs=Needs(modules=("old",))))
    assert reaped(workers) == 0
    workers.close()
    launcher.close()
    assert says.output.read_text() == "WARNING: old is deprecated\nuse new\nworks\n"


def test_one_that_hangs_is_ended(environ: dict[str, str]) -> None:
    began = time.monotonic()
    with pytest.raises(BadEnvironment, match=r"not loaded within 0.3 s") as caught:
        load_modules(("slow",), environ, within_s=0.3)
    assert caught.value.transient
    assert time.monotonic() - began < 10


def test_launches_wait_without_blocking(environ: dict[str, str]) -> None:
    modules = Modules(environ)
    assert not modules.ready(("cuda",), "a")
    until = time.monotonic() + 20
    while not modules.ready(("cuda",), "a"):
        assert time.monotonic() < until
        time.sleep(0.01)
    assert modules.loaded(("cuda",), "a").changes["CUDA_HOME"] == "/opt/cuda/12.4"
    assert not modules.ready(("cuda",), "b")  # each launch has them loaded anew
    with pytest.raises(BadEnvironment):
        modules.loaded(("nothing",), "c")


def begun(environ: dict[str, str]) -> int:
    """The group of the processes that load the module `slow`, once it is under way."""
    file, until = Path(environ["MODULESHOME"], "began"), time.monotonic() + 20
    while not file.exists():
        assert time.monotonic() < until
        time.sleep(0.01)
    leader = int(file.read_text())
    file.unlink()
    while (seen := stat(leader)) is None or living({seen.group}, ()) < 2:
        assert time.monotonic() < until
        time.sleep(0.01)
    return seen.group


def all_end(group: int) -> None:
    """All processes of this group have been killed; one that is not ours to reap may take a moment to go."""
    until = time.monotonic() + 20
    while living({group}, ()):
        assert time.monotonic() < until
        time.sleep(0.01)


def test_who_gives_up_ends_what_nobody_else_waits_for(environ: dict[str, str]) -> None:
    modules = Modules(environ)
    for who in ("a", "b"):
        assert not modules.ready(("slow",), who, {"MARK": "of the run"})
    group = begun(environ)
    assert b"MARK=of the run" in Path(f"/proc/{group}/environ").read_bytes()
    modules.give_up("a")
    time.sleep(0.2)
    assert living({group}, ()) == 2
    modules.give_up("b")
    all_end(group)
    assert not modules.ready(("slow",), "b")
    group = begun(environ)
    modules.close()
    all_end(group)


REAL = Path("/usr/share/modules/init/bash")


@pytest.mark.skipif(not REAL.exists(), reason="environment-modules is not installed")
def test_real_environment_modules(tmp_path: Path) -> None:
    (tmp_path / "tool").mkdir()
    (tmp_path / "tool/1.0").write_text(
        "#%Module\nsetenv TOOL_HOME /opt/tool\nprepend-path PATH /opt/tool/bin\n"
    )
    environ = {"PATH": os.defpath, "HOME": "/", "MODULEPATH": str(tmp_path)}
    changes = load_modules(("tool",), environ).changes
    assert changes["TOOL_HOME"] == "/opt/tool"
    assert str(changes["PATH"]).startswith("/opt/tool/bin:")
    with pytest.raises(BadEnvironment, match="cannot be loaded"):
        load_modules(("nothing/2",), environ)


@pytest.mark.skipif(not REAL.exists(), reason="environment-modules is not installed")
def test_what_is_loaded_already_may_be_asked_for_by_another_name(tmp_path: Path) -> None:
    (tmp_path / "tool").mkdir()
    for version in ("1.0", "2.0"):
        (tmp_path / "tool" / version).write_text(f"#%Module\nsetenv TOOL {version}\n")
    (tmp_path / ".modulerc").write_text(
        "#%Module\nmodule-version tool/1.0 stable\nmodule-alias best tool/2.0\n"
    )
    environ = {"PATH": os.defpath, "HOME": "/", "MODULEPATH": str(tmp_path)}
    assert load_modules(("tool/1.0", "tool/stable"), environ).changes["TOOL"] == "1.0"
    assert load_modules(("best", "tool/2.0", "best"), environ).changes["TOOL"] == "2.0"
