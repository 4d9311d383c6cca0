"""`profile run` with real processes: a small program whose speed depends on its world size."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hpcsched.cli.profile.group import profile
from hpcsched.core.profile import Profile
from hpcsched.errors import HpcschedError
from hpcsched.profiling.trial import TrialFailed
from hpcsched.store.database import Database
from hpcsched.store.profiles import parse_profiles

PROGRAM = """
import json, os, signal, sys, time
env = {key[9:]: value for key, value in os.environ.items() if key.startswith("HPCSCHED_")}
rank, size, folder, mode = int(env["RANK"]), int(env["WORLD_SIZE"]), env["JOB_DIR"], sys.argv[1]
open(os.path.join(os.path.dirname(__file__), f"pid-{os.getpid()}"), "w").close()
leave = []
signal.signal(signal.SIGTSTP, lambda *about: leave.append(1))
if mode == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if mode == "fails" and size == 2:
    sys.exit("out of memory, sort of")
if mode == "no-resume" and env["RESUME"] == "1":
    sys.exit("cannot read my own checkpoint")
step = json.load(open(f"{folder}/STATE.json"))["step"] if env["RESUME"] == "1" else 0
time.sleep(0.5)
listening = os.path.join(folder, f"listening.{env['ATTEMPT']}.")
if rank:
    open(f"{listening}{rank}", "w").close()
while rank == 0 and not all(os.path.exists(f"{listening}{r}") for r in range(1, size)):
    time.sleep(0.01)
if rank == 0 and mode in ("good", "no-resume"):
    open(f"{folder}/ready.{env['ATTEMPT']}", "w").close()
while not leave and not (mode == "short" and step == 3):
    time.sleep({1: 0.2, 2: 0.01}[size])
    step += 1
    if rank == 0 and mode != "silent":
        os.write(int(env["PROGRESS_FD"]), b'{"step": %d, "t": %f}\\n' % (step, time.monotonic()))
if rank == 0:
    os.makedirs(env["CHECKPOINT_DIR"])
    with open(f"{env['CHECKPOINT_DIR']}/weights", "wb") as file:
        file.write(bytes(2**20))
    record = {"step": step, "samples": 32 * step, "checkpoint": env["CHECKPOINT_DIR"]}
    with open(f"{folder}/STATE.json", "w") as file:
        json.dump(record, file)
    os.kill(int(env["NOTIFY_PID"]), signal.SIGUSR1)
sys.exit(75)
"""

FAST = ["--devices", "cpu:2", "--seconds", "0.2", "--repeats", "2", "--warmup", "0.1"]


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HPCSCHED_DATABASE", str(tmp_path / "h.db"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    return path


def measure(program: Path, mode: str, *options: str) -> Result:
    words = ["run", *FAST, "--processes", "per-gpu", *options, "--", sys.executable, str(program), mode]
    result = CliRunner().invoke(profile, words)
    if isinstance(result.exception, HpcschedError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result


def kept(program: Path) -> tuple[Profile, ...]:
    with Database(program.parent / "h.db") as db:
        return db.profiles()


def alive(folder: Path) -> list[int]:
    found = []
    for path in folder.glob("pid-*"):
        pid = int(path.name[4:])
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 0)
            found.append(pid)
    return found


def test_a_program_is_measured_suspended_and_resumed(program: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    result = measure(program, "good", "--json")
    (found,) = parse_profiles(result.stdout, where="out")
    assert kept(program) == (found,)
    assert (found.model, found.device, found.source, found.global_batch) == ("train", "cpu", "measured", 32)
    assert found.throughput[1] < 5.1 and found.throughput[2] < 100
    assert found.throughput[2] > 1.3 * found.throughput[1]
    assert found.spread is not None and set(found.spread) == {1, 2}
    assert found.checkpoint_mib == 1.0 and found.memory_mib is None
    for cost in (found.start_s, found.suspend_s, found.resume_s):
        assert isinstance(cost, dict) and set(cost) == {1, 2} and all(0 <= s < 60 for s in cost.values())
    assert min(found.start_s.values()) > 0.4  # type: ignore[union-attr]  # it sleeps for so long first
    with Database(program.parent / "h.db") as db:
        samples = db.samples(found)
    assert [s.gpus for s in samples] == [1, 1, 2, 2] and all(s.seconds >= 0.2 for s in samples)
    assert alive(program.parent) == [] and not list(program.parent.glob("hpcsched-profile-*"))
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_program_without_suspension_is_measured_all_the_same(program: Path) -> None:
    result = measure(
        program, "plain", "--gpus", "2", "--model", "m", "--software", "s", "--global-batch", "8"
    )
    assert "m: cpu, 1 node, batch 8, measured" in result.stdout and "<- optimal" in result.stdout
    assert "on 2 devices: not all costs of a restart are known" in result.stderr
    (found,) = kept(program)
    assert (found.model, found.software, found.global_batch) == ("m", "s", 8)
    assert found.suspend_s is None and found.resume_s is None and set(found.throughput) == {2}


def test_a_program_that_fails_is_told_with_its_last_words(program: Path) -> None:
    with pytest.raises(TrialFailed, match=r"on 2 devices: .* at step 0, .* ends: out of memory") as error:
        measure(program, "fails", "--no-costs")
    assert "\n" not in str(error.value) and error.value.exit_code == 1
    (scratch,) = program.parent.glob("hpcsched-profile-*")
    assert "out of memory" in (scratch / "2-devices.out").read_text()
    assert not list(scratch.glob("*-devices")) and kept(program) == () and alive(program.parent) == []


def test_a_program_that_ends_too_soon_is_told(program: Path) -> None:
    with pytest.raises(TrialFailed, match="ended with exit code 75 at step 3, before there was enough"):
        measure(program, "short", "--gpus", "1")


def test_a_program_that_cannot_resume_is_measured_without_that(program: Path) -> None:
    result = measure(program, "no-resume", "--gpus", "1")
    assert "cannot read my own checkpoint" in result.stderr
    (found,) = kept(program)
    assert found.suspend_s is not None and found.resume_s is None


def test_a_program_that_will_not_leave_is_killed(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcsched.profiling.trial.TERM_GRACE_S", 2.0)
    measure(program, "stubborn", "--gpus", "2")
    assert alive(program.parent) == []


def test_a_silent_program_is_given_up(program: Path) -> None:
    with pytest.raises(TrialFailed, match=r"no progress in 0\.5 s; the program has to write lines like"):
        measure(program, "silent", "--gpus", "1", "--timeout", "0.5")
    assert alive(program.parent) == []


def test_a_missing_program_is_one_line(program: Path) -> None:
    with pytest.raises(HpcschedError, match="command not found"):
        result = CliRunner().invoke(profile, ["run", *FAST, "--", "no-such-program-here"])
        raise result.exception or AssertionError(result.output)


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_after_a_signal(program: Path, sig: signal.Signals) -> None:
    code = "from hpcsched.cli.profile.group import profile; profile()"
    words = [
        "run",
        *FAST,
        "--seconds",
        "60",
        "--gpus",
        "2",
        "--processes",
        "per-gpu",
        "--",
        sys.executable,
        str(program),
        "good",
    ]
    running = subprocess.Popen([sys.executable, "-c", code, *words], start_new_session=True)
    deadline = time.monotonic() + 20
    while len(alive(program.parent)) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    running.send_signal(sig)
    assert running.wait(20) == 128 + sig
    assert alive(program.parent) == [] and not list(program.parent.glob("hpcsched-profile-*"))


PRINTS = """
import os, signal, sys, time
out, resumed = sys.argv[1], "--resume_from_checkpoint" in sys.argv
step = int(sys.argv[-1].rpartition("-")[2]) if resumed else 0
leave = []
signal.signal(signal.SIGTERM, lambda *about: leave.append(1))
print("Map: 100%|####| 9/9 [00:00<00:00, 9.9 examples/s]", end="\\r")
while not leave:
    print(f" 12%|#2  | {step}/600 [00:01<00:09, 9.5it/s]", end="\\r", flush=True)
    time.sleep(0.02)
    step += 1
    print("loss", 1 / step, "at step", step)
os.makedirs(f"{out}/checkpoint-{step}")
with open(f"{out}/checkpoint-{step}/weights", "wb") as file:
    file.write(bytes(2**20))
open(f"{out}/checkpoint-{step}/trainer_state.json", "w").close()
"""


def test_a_program_that_knows_no_contract_is_measured_by_its_bar_and_its_checkpoints(program: Path) -> None:
    program.write_text(PRINTS)
    jobs = program.parent / "jobs.toml"
    jobs.write_text(
        f"""schema = 1
        [[job]]
        name = "hf"
        command = ["{sys.executable}", "train.py", "out"]
        workdir = "{program.parent}"
        speaks = "transformers"
        suspend_signal = "SIGTERM"
        checkpoints = "out/checkpoint-*"
        resume_args = ["--resume_from_checkpoint", "{{checkpoint}}"]
        """
    )
    result = CliRunner().invoke(profile, ["run", *FAST, "--gpus", "1", str(jobs)], catch_exceptions=False)
    assert result.exit_code == 0 and "checkpoints are left in" in result.stderr
    (found,) = kept(program)
    # A step takes 20 ms at least; a window that ends just after one shows a little more than 50 a second.
    assert 5 < found.throughput[1] < 60 and found.checkpoint_mib == 1.0
    assert found.suspend_s is not None and found.resume_s is not None
    again = CliRunner().invoke(profile, ["run", *FAST, "--gpus", "1", str(jobs)])
    assert isinstance(again.exception, HpcschedError) and "no checkpoints" in str(again.exception)


def test_steps_are_found_by_a_pattern(program: Path) -> None:
    program.write_text(PRINTS)
    words = ["run", *FAST, "--gpus", "1", "--progress-pattern"]
    command = ["--", sys.executable, str(program), str(program.parent / "out")]
    result = CliRunner().invoke(profile, [*words, r"at step (\d+)$", *command], catch_exceptions=False)
    assert result.exit_code == 0 and "does not say that it can be suspended" in result.stderr
    assert 5 < kept(program)[0].throughput[1] < 60
    wrong = CliRunner().invoke(profile, [*words, "(a+)+", *command])
    assert isinstance(wrong.exception, HpcschedError) and wrong.exception.exit_code == 2
