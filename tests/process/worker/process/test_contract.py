"""The contract with the agent: environment, progress, signals, and a shell script that meets it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from importlib.resources import files
from pathlib import Path

import pytest

from hpcsched.errors import ConfigError
from hpcsched.launch.environment import descriptor_identities
from hpcsched.worker.process.contract import JobEnv, ProgressWriter
from hpcsched.worker.session import stopping
from hpcsched.worker.session.stopping import StopFlag


@pytest.fixture(autouse=True)
def handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags that other tests have left open are not ours."""
    monkeypatch.setattr(stopping, "_handlers", stopping._Handlers())


def environment(folder: Path, **more: str) -> dict[str, str]:
    return {
        "HPCSCHED_JOB_ID": "3",
        "HPCSCHED_ATTEMPT": "2",
        "HPCSCHED_RUN_DIR": str(folder),
        "HPCSCHED_CHECKPOINT_DIR": str(folder / "jobs/3/checkpoint"),
        "HPCSCHED_NOTIFY_PID": str(os.getpid()),
        **{f"HPCSCHED_{name}": value for name, value in more.items()},
    }


def test_the_environment_is_read(tmp_path: Path) -> None:
    env = JobEnv.from_environ(
        environment(
            tmp_path, RANK="1", WORLD_SIZE="4", STEPS="9", ARGS='{"lr": 1}', RESUME="1", DEVICES="0,2"
        )
    )
    assert env is not None
    assert (env.rank, env.local_rank, env.world_size, env.steps) == (1, 1, 4, 9)
    assert (env.resume, env.args, env.devices) == (True, {"lr": 1}, ("0", "2"))
    assert env.job_dir == tmp_path.resolve() / "jobs/3"
    assert env.progress_fd is None


def test_other_processes_have_no_job() -> None:
    assert JobEnv.from_environ({}) is None


def test_a_bad_variable_is_named() -> None:
    with pytest.raises(ConfigError, match="HPCSCHED_RUN_DIR: not set"):
        JobEnv.from_environ({"HPCSCHED_JOB_ID": "3"})
    with pytest.raises(ConfigError, match="HPCSCHED_STEPS: 'many'"):
        JobEnv.from_environ(environment(Path("/x"), STEPS="many"))


def test_the_state_is_strict_json(tmp_path: Path) -> None:
    env = JobEnv.from_environ(environment(tmp_path))
    assert env is not None
    env.write_state(step=1, samples=2, checkpoint=Path("c"), metrics={"a": 0.5, "b": float("nan")})
    state = json.loads((env.job_dir / "STATE.json").read_text())
    assert state["metrics"] == {"a": 0.5, "b": None}
    assert state["checkpoint"] == str(Path("c").resolve())
    assert [path.name for path in env.job_dir.iterdir()] == ["STATE.json"]


def test_progress_never_blocks_nor_fails() -> None:
    read, write = os.pipe()
    progress = ProgressWriter(write)
    for step in range(10_000):  # more than a pipe holds
        progress.report(step, lambda: 0.5, force=True)
    lines = os.read(read, 1 << 20).splitlines()
    assert all(set(json.loads(line)) == {"step", "t", "loss"} for line in lines)
    os.close(read)
    progress.report(1, lambda: None, force=True)
    progress.report(2, lambda: None, force=True)
    os.close(write)
    ProgressWriter(write).report(3, lambda: None, force=True)
    ProgressWriter(None).report(4, lambda: None, force=True)


def test_progress_does_not_flood() -> None:
    read, write = os.pipe()
    progress = ProgressWriter(write)
    asked = []
    for step in range(1000):
        progress.report(step, lambda: asked.append(1))  # type: ignore[func-returns-value]
    assert 1 <= len(asked) <= 10
    os.close(read)
    os.close(write)


@pytest.mark.parametrize("number", [signal.SIGTSTP, signal.SIGTERM])
def test_a_signal_only_sets_the_flag(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    flag = StopFlag(None)
    assert flag.install()
    assert flag.wanted is None
    os.kill(os.getpid(), number)
    assert flag.wanted == number.name
    flag.close()
    assert signal.getsignal(number) is before


def test_a_killed_child_does_not_break_a_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """A DataLoader raises in the middle of what runs when a worker of its has been killed."""

    def killed(number: int, frame: object) -> None:
        raise RuntimeError("DataLoader worker is killed by signal: Terminated")

    before = signal.signal(signal.SIGCHLD, killed)
    try:
        flag = StopFlag(None)
        flag.install()
        os.kill(os.getpid(), signal.SIGTSTP)
        subprocess.run(["true"], check=True)
        flag.close()
        assert signal.getsignal(signal.SIGCHLD) is killed
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_other_threads_cannot_be_suspended(capsys: pytest.CaptureFixture[str]) -> None:
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(StopFlag(None).install()))
    thread.start()
    thread.join()
    assert answers == [False]
    assert "cannot be suspended" in capsys.readouterr().err


def test_a_lost_parent_sets_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(stopping.time, "monotonic", lambda: now[0])
    flag = StopFlag(os.getppid())
    assert flag.wanted is None
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert flag.wanted is None  # it looks every other second only
    now[0] = 2.1
    assert flag.wanted == "the agent is gone"


def test_a_lost_agent_behind_a_wrapper_sets_the_flag() -> None:
    agent = subprocess.Popen(["true"])
    agent.wait()
    assert StopFlag(agent.pid).wanted == "the agent is gone"
    assert StopFlag(os.getpid()).wanted is None


def test_only_the_parent_is_woken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append(pid))
    for parent, expected in ((os.getpid(), 1), (1, 0)):
        monkeypatch.setattr(os, "getppid", lambda parent=parent: parent)
        env = JobEnv.from_environ(environment(tmp_path))
        assert env is not None
        env.wake_agent()
        assert len(sent) == expected
        sent.clear()


def test_the_package_itself_imports_no_torch() -> None:
    program = (
        "import sys, hpcsched.worker.process.contract; print('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "False False\n"


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_a_shell_script_meets_the_contract(tmp_path: Path) -> None:
    job = tmp_path / "jobs/3"
    job.mkdir(parents=True)
    woken: list[int] = []
    former = signal.signal(signal.SIGUSR1, lambda number, _: woken.append(number))

    def start(attempt: int, steps: int) -> subprocess.Popen[bytes]:
        env = environment(tmp_path, RESUME=str(int(attempt > 1)), STEPS=str(steps))
        env |= {"HPCSCHED_ATTEMPT": str(attempt), "STEP_S": "0.01"}
        script = str(files("hpcsched.examples") / "plain.sh")
        process = subprocess.Popen(["bash", script], env={**os.environ, **env}, start_new_session=True)
        deadline = time.monotonic() + 60
        while not (job / f"ready.{attempt}").exists() and time.monotonic() < deadline:
            time.sleep(0.005)
        return process

    try:
        first = start(1, 100_000)
        os.killpg(first.pid, signal.SIGTSTP)
        assert first.wait(60) == 75
        state = json.loads((job / "STATE.json").read_text())
        assert Path(state["checkpoint"]).read_text() == f"{state['step']}\n"
        assert state["attempt"] == 1
        assert woken
        second = start(2, state["step"] + 3)
        assert second.wait(60) == 0
    finally:
        signal.signal(signal.SIGUSR1, former)
    final = json.loads((job / "STATE.json").read_text())
    assert (final["step"], final["attempt"]) == (state["step"] + 3, 2)
    assert not list(job.rglob("*.tmp"))


TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
OURS = {f"HPCSCHED_{name}": value for name, value in TORCHRUN.items()}


@pytest.mark.parametrize(
    ("told", "ranks"),
    [
        ({}, (0, 1, 0)),
        (OURS, (1, 2, 1)),
        ({**OURS, **TORCHRUN}, (1, 2, 1)),
        (TORCHRUN, (1, 2, 1)),  # a launcher that was told nothing
        ({**OURS, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, (0, 1, 0)),  # one on each GPU
        ({**OURS, **TORCHRUN, "RANK": "5", "WORLD_SIZE": "8"}, (5, 8, 1)),
        (
            {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
            (3, 4, 1),
        ),
        ({**OURS, **TORCHRUN, "PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0"}, (3, 4, 0)),
        ({"SLURM_PROCID": "2", "SLURM_NTASKS": "3", "SLURM_LOCALID": "0"}, (2, 3, 0)),
        ({"PMI_RANK": "0", "PMI_SIZE": "2", **TORCHRUN}, (1, 2, 1)),  # torchrun on each node, by mpirun
    ],
)
def test_the_rank_is_that_of_the_nearest_launcher(
    tmp_path: Path, told: dict[str, str], ranks: tuple[int, int, int]
) -> None:
    env = JobEnv.from_environ({**environment(tmp_path), **told})
    assert env is not None
    assert (env.rank, env.world_size, env.local_rank) == ranks


def test_a_descriptor_that_has_become_another_file_is_not_used(tmp_path: Path) -> None:
    read, write = os.pipe()
    told = environment(
        tmp_path,
        PROGRESS_FD=str(write),
        **{
            name.removeprefix("HPCSCHED_"): value
            for name, value in descriptor_identities({"HPCSCHED_PROGRESS_FD": write}).items()
        },
    )

    def offered() -> int | None:
        env = JobEnv.from_environ(told)
        assert env is not None
        return env.progress_fd

    assert offered() == write
    with (tmp_path / "mine").open("w") as file:
        os.dup2(file.fileno(), write)
    assert offered() is None
    os.close(write)
    assert offered() is None
    os.close(read)


def test_the_stop_file_sets_the_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(stopping.time, "monotonic", lambda: now[0])
    env = JobEnv.from_environ(environment(tmp_path))
    assert env is not None and env.stop_file == tmp_path.resolve() / "jobs/3/stop.2"
    flag = StopFlag(None, env.stop_file)
    assert flag.wanted is None
    env.job_dir.mkdir(parents=True)
    env.stop_file.touch()
    assert flag.wanted is None  # it looks twice a second only
    now[0] = 0.6
    assert flag.wanted == "stop.2"


def test_who_has_others_between_itself_and_the_agent_says_that_it_leaves(tmp_path: Path) -> None:
    def leaves(**more: str) -> int:
        env = JobEnv.from_environ({**environment(tmp_path), **more})
        assert env is not None
        return env.leave()

    left = tmp_path / "jobs/3/left.2"
    assert leaves(HPCSCHED_NOTIFY_PID=str(os.getppid())) == 75
    assert leaves(RANK="1", WORLD_SIZE="2") == 0
    assert not left.exists()
    assert leaves() == 75  # behind a script
    assert left.exists()
    assert leaves(RANK="0", WORLD_SIZE="2") == 0  # behind a launcher
    shutil.rmtree(tmp_path / "jobs")
    (tmp_path / "jobs").touch()
    assert leaves(RANK="0", WORLD_SIZE="2") == 75, "what nobody was told of must not seem to be done"
