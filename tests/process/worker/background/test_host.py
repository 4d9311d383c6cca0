"""A background job as a guest in its foreground's process; on the CPU only because it is asked for."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from budget import slow
from lanesparty import DEADLINE_S, Party, code_of, models_same, until
from otheruser import as_other

from hpcsched.worker.background import settings

pytestmark = pytest.mark.torch


@pytest.fixture
def party(tmp_path: Path) -> Iterator[Party]:
    found = Party(tmp_path)
    yield found
    for process in found.started:
        process.kill()
        process.join()


@pytest.mark.slow
def test_a_guest_changes_no_bit_of_the_foreground_and_is_what_it_would_be_alone(party: Party) -> None:
    front = party.start(1, "foreground", steps=300, slow_until=str(party.dir(2) / "ready.1"))
    back = party.start(2, "background", steps=40, say="from the guest")
    assert (code_of(front), code_of(back)) == (0, 0), party.output(1) + party.output(2)
    assert "from the guest" in party.output(2)
    assert "from the guest" not in party.output(1)
    assert json.loads((party.dir(2) / "STATE.json").read_text())["metrics"] == {"training": 0.0}
    together = party.final(1), party.final(2)
    assert models_same(together[0], party.alone(3, steps=300))
    assert models_same(together[1], party.alone(4, steps=40))


@pytest.mark.slow
def test_suspending_a_guest_saves_it_and_lets_the_foreground_go_on(party: Party) -> None:
    go_on = party.folder / "go on"
    front = party.start(1, "foreground", steps=300, slow_until=str(go_on))
    back = party.start(2, "background", steps=10**9)
    until((party.dir(2) / "ready.1").exists)
    assert back.pid is not None
    os.kill(back.pid, signal.SIGTSTP)
    assert code_of(back) == 75, party.output(2)
    state = json.loads((party.dir(2) / "STATE.json").read_text())
    assert state["attempt"] == 1 and Path(state["checkpoint"]).exists()
    again = party.start(2, "background", steps=state["step"] + 5, attempt=2)
    assert code_of(again) == 0, party.output(2)
    go_on.touch()
    assert code_of(front) == 0
    assert party.final(2)["step"] == state["step"] + 5
    assert models_same(party.final(1), party.alone(3, steps=300))
    assert models_same(party.final(2), party.alone(4, steps=state["step"] + 5))


def test_an_exception_of_the_guests_ends_only_the_guest_which_is_nobodys_guest_any_more(party: Party) -> None:
    go_on = party.folder / "go on"
    front = party.start(1, "foreground", steps=300, slow_until=str(go_on))
    back = party.start(2, "background", raise_at=5)
    assert code_of(back) == 1
    assert "ZeroDivisionError: the user's own" in party.output(2)
    assert "ZeroDivisionError" not in party.output(1)
    again = party.start(2, "background", attempt=2)
    assert code_of(again) == 0
    assert "in a process of its own: it failed while it was a guest" in party.output(2)
    go_on.touch()
    assert code_of(front) == 0


HEAVY = """
import os, weakref
import torch
from lanes_training import Noisy

class Heavy(Noisy):
    def build(self, args):
        parts = super().build(args)
        weakref.finalize(parts.model, os.mknod, args["freed"])
        return parts

    def loss(self, model, batch):
        losses = super().loss(model, batch)
        if self.seen == 5:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return losses
"""


@pytest.mark.slow
def test_a_guest_that_runs_out_of_memory_gives_it_back_at_once_and_ends_alone(party: Party) -> None:
    (party.folder / "heavy.py").write_text(HEAVY)
    freed = party.folder / "freed"
    front = party.start(1, "foreground", steps=300, slow_until=str(freed))
    back = party.start(2, "background", env={"HPCSCHED_TRAINER": "heavy:Heavy"}, freed=str(freed))
    assert code_of(back) == 1
    assert "OutOfMemoryError: CUDA out of memory." in party.output(2)
    until(freed.exists)  # the foreground, in whose process it was, does not go on fast before
    assert code_of(front) == 0, party.output(1)
    assert models_same(party.final(1), party.alone(3, steps=300))


@pytest.mark.slow
def test_a_host_does_not_take_in_a_job_that_has_failed_there_even_if_the_job_has_forgotten(
    party: Party,
) -> None:
    go_on = party.folder / "go on"
    front = party.start(1, "foreground", steps=300, slow_until=str(go_on))
    assert code_of(party.start(2, "background", raise_at=5)) == 1
    (party.dir(2) / "never-a-guest").unlink()
    assert code_of(party.start(2, "background", attempt=2)) == 0
    assert "in a process of its own: it has failed as a guest before" in party.output(2)
    go_on.touch()
    assert code_of(front) == 0


def test_when_the_foreground_ends_its_guest_is_saved_and_goes_on_in_its_own_process(party: Party) -> None:
    env = {"TEST_HOST_WITHIN_S": "0.5"}
    front = party.start(1, "foreground", steps=300, slow_until=str(party.dir(2) / "ready.1"))
    back = party.start(2, "background", steps=400, env=env)
    assert code_of(front) == 0, party.output(1)
    assert code_of(back) == 0, party.output(2)
    assert "looking for another foreground" in party.output(2)
    assert models_same(party.final(2), party.alone(4, steps=400))


@pytest.mark.slow
def test_a_guest_whose_foreground_is_killed_goes_on_by_itself_from_what_it_had_saved(party: Party) -> None:
    env = {"HPCSCHED_CHECKPOINT_EVERY_S": "0.05"}
    front = party.start(1, "foreground", steps=10**9)
    back = party.start(2, "background", steps=1000, env=env)
    until((party.dir(2) / "STATE.json").exists)
    front.kill()
    assert code_of(back) == 0, party.output(2)
    assert "the foreground's process died while this job was a guest in it" in party.output(2)
    assert models_same(party.final(2), party.alone(4, steps=1000))


@pytest.mark.slow
def test_a_guest_finds_the_next_foreground_and_goes_on_there(party: Party) -> None:
    front = party.start(1, "foreground", steps=300, slow_until=str(party.dir(2) / "ready.1"))
    back = party.start(2, "background", steps=10**9)
    assert code_of(front) == 0, party.output(1)
    (party.dir(2) / "ready.1").unlink()
    party.start(3, "foreground", steps=10**9)
    until((party.dir(2) / "ready.1").exists)
    assert back.pid is not None
    os.kill(back.pid, signal.SIGTERM)
    assert code_of(back) == 75
    assert "in a process of its own" not in party.output(2)


@pytest.mark.slow
def test_a_guest_that_changes_what_belongs_to_the_process_is_sent_away_before_it_does_harm(
    party: Party,
) -> None:
    go_on = party.folder / "go on"
    front = party.start(1, "foreground", steps=300, slow_until=str(go_on))
    back = party.start(2, "background", default_dtype=1)
    assert code_of(back) == 0, party.output(2)
    assert "in a process of its own: torch.set_default_dtype is used" in party.output(2)
    go_on.touch()
    assert code_of(front) == 0
    assert models_same(party.final(1), party.alone(3, steps=300))


@pytest.mark.slow
def test_a_guest_that_takes_long_to_build_is_sent_away_and_the_foreground_goes_on_meanwhile(
    party: Party,
) -> None:
    def step() -> int:
        path = party.dir(1) / "STATE.json"
        return int(json.loads(path.read_text())["step"]) if path.exists() else 0

    built = party.folder / "built"
    front = party.start(
        1,
        "foreground",
        steps=10**9,
        env={"TEST_BUILT_WITHIN_S": "0.5", "HPCSCHED_CHECKPOINT_EVERY_S": "0.05"},
    )
    until(step)
    back = party.start(2, "background", slow_build=str(built))
    back.join(2.0)  # the foreground has stood still once by now
    before = step()
    until(lambda: step() > before + 200)  # which a stand at each step would make 100 s
    built.touch()
    assert code_of(back) == 0, party.output(2)
    assert "building it takes longer than its foreground can stand still" in party.output(2)
    assert front.is_alive()


@pytest.mark.slow
def test_a_guest_whose_own_process_is_killed_does_nothing_more(party: Party) -> None:
    go_on = party.folder / "go on"
    front = party.start(1, "foreground", steps=300, slow_until=str(go_on))
    back = party.start(2, "background", steps=10**9)
    until((party.dir(2) / "ready.1").exists)
    back.kill()
    assert code_of(back) == -signal.SIGKILL
    assert code_of(party.start(3, "background", steps=12)) == 0  # the lane is free again
    assert "in a process of its own" not in party.output(3)
    assert not (party.dir(2) / "STATE.json").exists()
    go_on.touch()
    assert code_of(front) == 0


def test_a_guest_keeps_the_pace_it_is_told(party: Party) -> None:
    pipe = party.folder / "control"
    os.mkfifo(pipe)
    # Slow, and not for the guest's sake: else the feedback may keep the guest out for long on a busy machine.
    front = party.start(1, "foreground", steps=10**9, slow_until="for ever")
    order = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    os.write(order, b'{"pace": 0}\n')
    back = party.start(2, "background", steps=30, env={"OPEN_CONTROL": str(pipe)})
    until((party.dir(2) / "ready.1").exists)
    back.join(0.3)
    assert back.is_alive()  # at a share of nothing it does nothing
    os.write(order, b'{"pace": 1.0}\n')
    assert code_of(back) == 0, party.output(2)
    os.close(order)
    assert front.is_alive()


def test_a_training_in_a_process_of_its_own_keeps_the_pace_it_is_told_too(party: Party) -> None:
    pipe = party.folder / "control"
    os.mkfifo(pipe)
    order = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    os.write(order, b'{"pace": 0}\n')
    alone = party.start(1, None, steps=30, env={"OPEN_CONTROL": str(pipe)})
    until((party.dir(1) / "ready.1").exists)
    alone.join(0.5)
    assert alone.is_alive()
    os.write(order, b'{"pace": 1.0}\n')
    assert code_of(alone) == 0, party.output(1)
    os.close(order)


HALF = """
from lanes_training import Noisy

class Half(Noisy):
    def build(self, args):
        parts = super().build(args)
        parts.precision = "bf16"
        return parts
"""


@pytest.mark.parametrize("reason", [slow("cwd"), "strategy", slow("precision"), "no host"])
def test_what_cannot_be_a_guest_runs_in_a_process_of_its_own(party: Party, reason: str) -> None:
    env = {"TEST_HOST_WITHIN_S": "0.3"}
    if reason == "cwd":
        env["PYTHONPATH"] = "/somewhere"
    elif reason == "strategy":
        env["HPCSCHED_STRATEGY"] = '{"kind": "ddp", "reproducible": true}'
    elif reason == "precision":
        (party.folder / "half.py").write_text(HALF)
        env["HPCSCHED_TRAINER"] = "half:Half"
    if reason != "no host":
        env.pop("TEST_HOST_WITHIN_S")
        party.start(1, "foreground", steps=10**9)
    assert code_of(party.start(2, "background", env=env, batch=16)) == 0, party.output(2)
    assert "in a process of its own" in party.output(2)


def test_on_cpu_slots_a_background_job_is_an_ordinary_process(party: Party) -> None:
    assert code_of(party.start(2, "background", env={"HPCSCHED_LANE_MODE": "auto"})) == 0
    assert "hpcsched:" not in party.output(2)


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("HPCSCHED_LANE", "middle", "LANE: 'middle'; accepted: 'foreground', 'background' or 'shared'"),
        ("HPCSCHED_LANE_MODE", "fast", "accepted: auto, streams, green, mps, process"),
        ("HPCSCHED_LANE_MODE", "mps", "HPCSCHED_LANE_MODE: 'mps' without a GPU"),
    ],
)
def test_bad_words_in_the_environment_are_one_line(
    party: Party, variable: str, value: str, message: str
) -> None:
    assert code_of(party.start(2, "background", env={variable: value})) == 2
    assert message in party.output(2)
    assert party.output(2).count("\n") == 1


# -- others at the socket ------------------------------------------------------------------------------------


def name_of(party: Party) -> str:
    return settings.address({"HPCSCHED_RUN_ID": party.run, "HPCSCHED_DEVICES": "0"}) or ""


def test_a_stranger_who_calls_is_hung_up_on_without_a_word(party: Party) -> None:
    go_on = party.folder / "go on"
    front = party.start(1, "foreground", steps=300, slow_until=str(go_on))
    greeting = json.dumps({"guest": {"job": 2, "environ": {}, "cwd": "/", "python": "/"}}).encode()

    def answer() -> bytes:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
            line.settimeout(DEADLINE_S)
            line.connect(name_of(party))
            try:
                line.send(greeting)
                return line.recv(1000)
            except (BrokenPipeError, ConnectionResetError):
                return b""

    def asked() -> bytes:
        with contextlib.suppress(ConnectionRefusedError):
            return answer()
        return b""

    until(lambda: b"refused" in asked())  # from us: it is there, and this is no guest for it
    assert as_other(answer) == b""
    go_on.touch()
    assert code_of(front) == 0, party.output(1)


def test_where_a_stranger_has_the_name_he_is_told_nothing_and_the_jobs_train_apart(party: Party) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as theirs:

        def take() -> None:
            theirs.bind(name_of(party))
            theirs.listen(50)

        as_other(take)
        front = party.start(1, "foreground")
        back = party.start(2, "background", env={"TEST_HOST_WITHIN_S": "1"})
        assert (code_of(front), code_of(back)) == (0, 0), party.output(1) + party.output(2)
        assert "no guests are taken here: there is no address, or another process has it" in party.output(1)
        assert "in a process of its own" in party.output(2)
        theirs.setblocking(False)
        called = list[bytes]()
        with contextlib.suppress(BlockingIOError):
            while True:
                with theirs.accept()[0] as line:
                    called.append(line.recv(1000))
        assert called and set(called) == {b""}
