"""At the limit of processes no thread is to be had: that ends no agent, and all others are saved."""

from __future__ import annotations

import errno
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from hpcsched.agent.abandon import abandon
from hpcsched.agent.allocation.release import HostReleases
from hpcsched.agent.gpu_memory import GpuMemory
from hpcsched.batch.local import Local
from hpcsched.core import events as ev
from hpcsched.core.model import Device
from hpcsched.launch.modules import Modules
from hpcsched.launch.saved_outside import NOT_STARTED, SaveCommand
from hpcsched.threads import started

GPU = Device(index=0, host="here", kind="fake", handle="0", memory_mib=81920.0)


@pytest.fixture(autouse=True)
def no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)


def test_it_is_an_error_of_the_system() -> None:
    with pytest.raises(OSError, match="can't start new thread") as raised:
        started(print, "one")
    assert raised.value.errno == errno.EAGAIN


def test_memory_of_a_gpu_is_waited_for_no_longer_than_its_time() -> None:
    now = 100.0
    memory = GpuMemory(lambda device: True, tell=lambda line: None, clock=lambda: now)
    assert not memory.free("job", [GPU], lambda: 0, within_s=10.0)
    now = 111.0
    assert memory.free("job", [GPU], lambda: 0, within_s=10.0)
    memory.close()


def test_a_command_that_saves_from_outside_counts_as_not_started() -> None:
    assert SaveCommand(["true"], 1, {}, "/", 1.0).result == (NOT_STARTED, "[Errno 11] can't start new thread")


def test_hosts_that_cannot_be_given_back_are_used_as_before() -> None:
    nodes: Any = SimpleNamespace(
        keeps=lambda host: False,
        guests_among=lambda hosts: (),
        releasing=lambda hosts: None,
        stay=lambda hosts: None,
    )
    releases = HostReleases(Local(), nodes, tell=lambda line: None)
    releases.begin(("n1",))
    (event,) = releases.events(7.0)
    assert isinstance(event, ev.ReleaseFailed) and "can't start new thread" in event.error


def test_what_was_not_begun_is_not_waited_for_at_the_end() -> None:
    loader = Modules({})
    with pytest.raises(OSError, match="can't start"):
        loader.ready(("gcc",), "job")
    loader.close()


def test_one_that_cannot_be_asked_keeps_nobody_from_being_saved() -> None:
    class Attempt:
        self_saving = None

        def __init__(self, job_id: int) -> None:
            self.job_id, self.asked = job_id, False
            self.workers = SimpleNamespace(tell=lambda order: None)

        def give_up_resizing(self, number: int) -> None: ...

        def ask_to_save(self, within_s: float) -> None:
            if self.job_id == 1:
                raise RuntimeError("can't start new thread")
            self.asked = True

        def reap(self) -> int | None:
            return 75 if self.asked else None

        def send(self, number: int) -> None:
            self.reap = lambda: 137  # type: ignore[method-assign]

        def close(self) -> None: ...

    attempts: dict[int, Any] = {number: Attempt(number) for number in (1, 2)}
    assert abandon(attempts, 0.05, lambda: None) == [(2, 75), (1, 137)]
