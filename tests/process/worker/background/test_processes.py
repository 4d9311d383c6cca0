"""What lanes need of a process and its environment, without torch."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcsched.worker.background import proxy, settings
from hpcsched.worker.background.protocol import GuestConnection, connect, listen
from hpcsched.worker.background.settings import Mode
from hpcsched.worker.process.contract import JobEnv, OrderReader
from hpcsched.worker.process.guest import HostedGuest, be_hosted
from hpcsched.worker.session.duty_cycle import DutyCycle, rest_s
from hpcsched.worker.session.stopping import StopFlag

# -- how a GPU is shared -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "gpus", "meant"),
    [
        ("", "0", Mode.STREAMS),
        ("auto", "GPU-1234", Mode.STREAMS),
        ("auto", "", Mode.PROCESS),
        ("auto", "-1", Mode.PROCESS),
        ("streams", "", Mode.STREAMS),
        ("green", "0", Mode.GREEN),
        ("mps", "0", Mode.MPS),
        ("process", "0", Mode.PROCESS),
    ],
)
def test_a_gpu_is_shared_by_streams_unless_something_else_is_asked_for(
    word: str, gpus: str, meant: Mode
) -> None:
    assert settings.mode({"HPCSCHED_LANE_MODE": word, "CUDA_VISIBLE_DEVICES": gpus}) is meant


def test_only_guests_of_the_same_run_and_device_find_a_host() -> None:
    def of(run: str, devices: str, rank: str) -> str | None:
        return settings.address({"HPCSCHED_RUN_ID": run, "HPCSCHED_DEVICES": devices, "HPCSCHED_RANK": rank})

    assert of("r1", "4,5,6", "1") == of("r1", "5", "0")
    assert len({of("r1", "5", "0"), of("r2", "5", "0"), of("r1", "6", "0")}) == 3
    assert of("r1", "", "0") is None


# -- the pace ----------------------------------------------------------------------------------------------


def test_the_agent_can_set_the_pace_and_nonsense_is_passed_over(capsys: pytest.CaptureFixture[str]) -> None:
    read, write = os.pipe()
    orders = OrderReader(read)
    assert orders.pace == 1.0
    os.write(write, b'{"pace": 0.25}\n{"pace": 7}\n{"pace": "fast"}\n')
    orders.look()
    assert orders.pace == 0.25
    assert capsys.readouterr().err.count("makes no sense") == 2
    os.write(write, b'{"pace": 1}\n')
    orders.look()
    assert orders.pace == 1.0
    os.close(write)
    os.close(read)


class Time:
    """A clock that goes on only when somebody works or rests."""

    def __init__(self) -> None:
        self.now = self.rested = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.rested += seconds


@pytest.mark.parametrize("share", [1.0, 0.5, 0.25, 0.1])
def test_a_training_rests_so_that_it_works_for_its_share(share: float) -> None:
    time = Time()
    rest = DutyCycle(clock=lambda: time.now, sleep=time.sleep)
    for _ in range(20):
        time.now += 0.3
        rest.take(lambda: share, lambda: False)
    assert 1 - time.rested / time.now == pytest.approx(share)


def test_a_training_at_a_share_of_nothing_rests_until_that_changes_or_it_is_to_stop() -> None:
    time = Time()
    rest = DutyCycle(clock=lambda: time.now, sleep=time.sleep)
    time.now += 1.0
    rest.take(lambda: 0.0 if time.now < 100 else 1.0, lambda: False)
    assert time.now == pytest.approx(100, abs=0.1)
    rest.take(lambda: 0.0, lambda: time.now > 200)
    assert time.now == pytest.approx(200, abs=0.1)
    assert rest_s(2.0, 0.0) == float("inf")


def test_what_a_gpu_still_computes_counts_as_work() -> None:
    time = Time()
    rest = DutyCycle(clock=lambda: time.now, sleep=time.sleep)

    def settle() -> None:
        time.now += 2.0

    rest.take(lambda: 0.5, lambda: False, settle)
    assert time.rested == pytest.approx(2.0)
    rest.take(lambda: 1.0, lambda: False, settle)  # nothing is waited for at full speed
    assert time.now == pytest.approx(4.0)


# -- a guest's surroundings ----------------------------------------------------------------------------------


@pytest.fixture
def guest() -> Iterator[HostedGuest]:
    with Path(os.devnull).open("w") as nowhere:
        found = HostedGuest({"HPCSCHED_JOB_ID": "7", "HPCSCHED_JOB_DIR": "/tmp/seven"}, nowhere, nowhere)
        yield found


def test_a_guest_has_its_own_environment_and_hears_of_a_stop_without_signals(guest: HostedGuest) -> None:
    from contextvars import copy_context

    def inside() -> tuple[JobEnv | None, StopFlag]:
        be_hosted(guest)
        flag = StopFlag(None)
        assert flag.install()
        return JobEnv.from_environ(), flag

    env, flag = copy_context().run(inside)
    assert env is not None and env.job_id == 7
    assert flag.wanted is None
    guest.stop = "SIGTSTP"
    assert flag.wanted == "SIGTSTP"
    flag.close()


def test_a_job_that_goes_on_by_itself_can_be_suspended_before_its_training_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its ready file may be there from when it was a guest, and the default action would stop the process."""
    monkeypatch.setattr(proxy, "HOST_WITHIN_S", 0.0)
    former = {number: signal.getsignal(number) for number in (signal.SIGTSTP, signal.SIGTERM)}
    environ = {
        "HPCSCHED_JOB_ID": "7",
        "HPCSCHED_JOB_DIR": str(tmp_path),
        "HPCSCHED_RUN_ID": str(uuid.uuid4()),
    }
    try:
        assert proxy.be_guest({**environ, "HPCSCHED_DEVICES": "0"}) is None
        codes: list[int] = []
        monkeypatch.setattr(os, "_exit", codes.append)
        os.kill(os.getpid(), signal.SIGTSTP)
        os.kill(os.getpid(), signal.SIGTERM)
        assert codes == [75, 75]
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
    assert "in a process of its own" in capsys.readouterr().err


# -- the line ------------------------------------------------------------------------------------------------


def test_messages_and_descriptors_pass_between_processes_of_one_user() -> None:
    address = f"\0hpcsched/test/{uuid.uuid4()}"
    assert connect(address) is None
    listener = listen(address)
    assert listener is not None and listen(address) is None
    ours = connect(address)
    assert ours is not None
    theirs = GuestConnection(listener.accept()[0])
    read, write = os.pipe()
    assert ours.say({"guest": {"environ": {"LONG": "x" * 100_000}}}, [write])
    heard = theirs.hear(5.0)
    assert heard is not None and len(heard["guest"]["environ"]["LONG"]) == 100_000
    os.write(theirs.descriptors[0], b"through")
    assert os.read(read, 10) == b"through"
    assert theirs.hear(0.0) is None and not theirs.closed
    ours.close()
    assert theirs.hear(5.0) is None and theirs.closed
    assert not theirs.say({"exit": 0})
    theirs.close()
    listener.close()
    os.close(read)
    os.close(write)


def test_a_host_of_another_user_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"\0hpcsched/test/{uuid.uuid4()}"
    listener = listen(address)
    assert listener is not None
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    assert connect(address) is None
    listener.close()


def test_what_is_no_message_closes_the_line() -> None:
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line = GuestConnection(a)
    b.send(b"not json")
    assert line.hear(1.0) is None and line.closed
    line.close()
    b.close()


# -- a host that does not do its part ------------------------------------------------------------------------


@pytest.fixture
def waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[dict[str, str], socket.socket]]:
    """The environment of a job that is to be a guest, and the socket of its host."""
    monkeypatch.setattr(proxy, "HOST_WITHIN_S", 0.3)
    monkeypatch.setattr(proxy, "BEGUN_WITHIN_S", 0.3)
    environ = {
        "HPCSCHED_JOB_ID": "7",
        "HPCSCHED_JOB_DIR": str(tmp_path),
        "HPCSCHED_RUN_ID": str(uuid.uuid4()),
        "HPCSCHED_DEVICES": "0",
    }
    former = {number: signal.getsignal(number) for number in (signal.SIGTSTP, signal.SIGTERM)}
    listener = listen(settings.address(environ) or "")
    assert listener is not None
    yield environ, listener
    listener.close()
    for number, handler in former.items():
        signal.signal(number, handler)


def test_a_host_that_does_not_answer_is_not_waited_for(
    waiting: tuple[dict[str, str], socket.socket], capsys: pytest.CaptureFixture[str]
) -> None:
    assert proxy.be_guest(waiting[0]) is None
    assert "in a process of its own: the foreground on this device does not" in capsys.readouterr().err


def test_a_host_under_which_the_training_does_not_begin_is_left(
    waiting: tuple[dict[str, str], socket.socket], capsys: pytest.CaptureFixture[str]
) -> None:
    environ, listener = waiting

    def accept_only() -> None:
        line = GuestConnection(listener.accept()[0])
        line.say({"accepted": True})
        while not line.closed:
            line.hear(5.0)
        line.close()

    host = threading.Thread(target=accept_only, daemon=True)
    host.start()
    assert proxy.be_guest(environ) is None
    host.join(5.0)
    assert not host.is_alive()  # it has been told
    assert "HPCSCHED_RESUME" not in environ  # nothing of it has been done there
    assert "in a process of its own" in capsys.readouterr().err


def test_hosts_that_hang_up_without_a_word_are_asked_for_a_while_and_not_all_the_time(
    waiting: tuple[dict[str, str], socket.socket], capsys: pytest.CaptureFixture[str]
) -> None:
    environ, listener = waiting
    calls: list[int] = []

    def hang_up() -> None:
        with contextlib.suppress(OSError):
            while True:
                listener.accept()[0].close()
                calls.append(1)

    threading.Thread(target=hang_up, daemon=True).start()
    assert proxy.be_guest(environ) is None
    listener.shutdown(socket.SHUT_RDWR)
    assert 1 <= len(calls) <= 4
    assert "no foreground on this device takes guests" in capsys.readouterr().err


@pytest.mark.parametrize("pace", [0.25, 0.0])
def test_a_job_that_goes_on_by_itself_keeps_the_pace_it_was_told(
    waiting: tuple[dict[str, str], socket.socket], pace: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ, _ = waiting
    read, write = os.pipe()
    os.write(write, b'{"pace": %f}\n' % pace)
    environ["HPCSCHED_CONTROL_FD"] = str(read)
    assert proxy.be_guest(environ) is None
    monkeypatch.setenv("HPCSCHED_PACE", environ["HPCSCHED_PACE"])
    assert OrderReader(read).pace == pace
    os.close(write)
    os.close(read)


def test_a_pace_in_the_environment_that_is_none_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for nonsense in ("fast", "7", "{"):
        monkeypatch.setenv("HPCSCHED_PACE", nonsense)
        assert OrderReader(None).pace == 1.0
    assert capsys.readouterr().err.count("makes no sense") == 3
