"""For all tests: how many random examples are tried, and which tests wait for `make test-all`."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import stubdriver
from hypothesis import HealthCheck, settings

# No deadline for one example: a busy machine stalls whom it likes. The quick tiers always try the same
# examples, so that they fail for a reason; new ones are tried at night.
_ANY = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("check", max_examples=10, derandomize=True, **_ANY)
settings.register_profile("test", max_examples=25, derandomize=True, **_ANY)
settings.register_profile("all", max_examples=100, **_ANY)
settings.load_profile("test")

# No test, and nothing that a test starts, finds the runs, the database or the settings of who runs the tests:
# `clean` removes runs.
_OWN = tempfile.mkdtemp(prefix="hpcsched-tests-")
_PID = os.getpid()
atexit.register(
    lambda: os.getpid() == _PID and shutil.rmtree(_OWN, ignore_errors=True)
)  # not where we forked
os.environ.update({f"XDG_{kind}_HOME": f"{_OWN}/{kind.lower()}" for kind in ("STATE", "DATA", "CONFIG")})
os.environ.pop("HPCSCHED_DATABASE", None)

BEGAN = time.monotonic()

# As in an activated environment: the first `python` in PATH is the one that runs the tests.
os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))

# The tests start some thousand processes: none of them compiles hpcsched anew, whatever is set here.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# What is ignored here (by `nohup`, or in `make test &` of a script) would be by all that tests start.
for _number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, lambda number, frame: None)

# Threads of a training that wait for each other sleep: where several tests share the cores, spinning ones
# take what the awaited ones need, and steps take ten times as long.
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"


_HANDLED = (
    signal.SIGTERM,
    signal.SIGTSTP,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGCHLD,
)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Iterator[None]:
    """What a test does with signals in its own process goes with it: what is ignored would be by all that
    later tests start, and a handler that stays is called for them. Adapters hold theirs until their process
    ends."""
    before = {number: signal.getsignal(number) for number in _HANDLED}
    try:
        return (yield)
    finally:
        if stopping := sys.modules.get("hpcsched.worker.session.stopping"):
            for flag in [*stopping._handlers._open]:
                flag.close()
        for number, handler in before.items():
            if handler is not None and signal.getsignal(number) != handler:
                signal.signal(number, handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", metavar="K/N", help="only the K-th of N parts of the tests, K from 0")
    parser.addoption("--within", metavar="SECONDS", type=float, help="skip what has not begun by then")


def pytest_runtest_setup(item: pytest.Item) -> None:
    within_s = item.config.getoption("--within")
    if within_s is not None and time.monotonic() > BEGAN + within_s:
        pytest.skip("the time is up")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The part that was asked for: always the same tests, whatever others there are."""
    if told := config.getoption("--part"):
        number, parts = (int(word) for word in told.split("/"))
        others = [item for item in items if zlib.crc32(item.nodeid.encode()) % parts != number]
        config.hook.pytest_deselected(items=others)
        kept = set(items) - set(others)
        items[:] = [item for item in items if item in kept]


@pytest.fixture(scope="session")
def stub_libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stubdriver.build(tmp_path_factory.mktemp("stub-driver"))


@pytest.fixture
def driver(stub_libraries: Path, tmp_path: Path) -> stubdriver.StubDriver:
    """A CUDA driver and an NVML that drive nothing, and a log of who calls the driver."""
    return stubdriver.StubDriver(stub_libraries, tmp_path)
