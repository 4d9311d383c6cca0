"""Another user of the host, with a user id of its own, and a run of ours that goes on beside it."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from livebench import FOREVER, Agent, Bench, job, saves
from otheruser import as_other, open_place, refused
from smalldisk import one_line

from hpcsched import mps_control

CPU = ["--devices", "cpu:2"]
SECRET = secrets.token_hex(16)
GONE = (FileNotFoundError, ProcessLookupError)
"""Some processes live for as long as a step takes."""
MINE = "hooks.invalid/services/" + secrets.token_hex(8)


@contextlib.contextmanager
def careless() -> Iterator[None]:
    """A user whose umask forbids nothing."""
    before = os.umask(0)
    try:
        yield
    finally:
        os.umask(before)


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    with open_place() as folder:
        yield folder


@pytest.fixture(scope="module")
def bench(place: Path) -> Iterator[Bench]:
    bench = Bench(place)
    with careless():
        (place / "shared").mkdir(mode=0o777)  # checkpoints lie where everybody may write
        (place / "shared").chmod(0o1777)
        bench.env |= {"HPCSCHED_NOTIFY_WEBHOOK": f"https://{MINE}", "WANDB_API_KEY": SECRET}
        bench.agents.append(_begun(bench, place))
    yield bench
    bench.close()


def _begun(bench: Bench, place: Path) -> Agent:
    keeps = 'mkdir -p "$HPCSCHED_CHECKPOINT_DIR" && echo w > "$HPCSCHED_CHECKPOINT_DIR/state"; '
    waits = ': > "$HPCSCHED_JOB_DIR/ready.$HPCSCHED_ATTEMPT"; while :; do sleep 0.1; done'
    jobs = bench.set_of(saves("a", steps=FOREVER, gpus=1), job("b", keeps + waits, gpus=1))
    agent = bench.start(jobs, *CPU, "--checkpoints", str(place / "shared"))
    bench.ready("a", "b")
    bench.agents.remove(agent)
    return agent


def processes(bench: Bench) -> list[int]:
    return [bench.agents[0].pid, *bench.live_workers()]


def test_nothing_in_the_run_directory_can_be_read_or_written(bench: Bench) -> None:
    paths = [bench.dir, *bench.dir.rglob("*")]
    files = [str(path) for path in paths if path.is_file()]
    folders = [str(path) for path in paths if path.is_dir()]
    assert {"journal.jsonl", "run.json", "status.json"} <= {Path(one).name for one in files}

    def gets() -> list[str]:
        got = []
        for path in files:
            for flags in (os.O_RDONLY, os.O_WRONLY):
                with contextlib.suppress(PermissionError):
                    os.close(os.open(path, flags))
                    got.append(path)
        for folder in folders:
            with contextlib.suppress(PermissionError):
                list(Path(folder).iterdir())
                got.append(folder)
            with contextlib.suppress(PermissionError):
                Path(folder, "planted").write_text("{}")
                got.append(folder)
        return got

    assert not refused(lambda: list(bench.folder.iterdir())), "it can come as far as the folder above"
    assert len(folders) > 6 and as_other(gets) == []


def test_the_inbox_takes_no_command(bench: Bench, place: Path) -> None:
    command = place / "shared" / "command"
    new = bench.dir / "inbox" / "new" / "1"

    def orders() -> None:
        command.write_text(json.dumps({"command": "drain"}))
        command.rename(new)

    assert refused(orders)
    assert bench.agents[0].process.poll() is None and bench.states() == {"a": "RUNNING", "b": "RUNNING"}


def test_checkpoints_elsewhere_are_their_owners_alone_whatever_the_umask(bench: Bench, place: Path) -> None:
    (run,) = (path for path in (place / "shared").iterdir() if path.is_dir())
    bench.until(lambda: list(run.rglob("state")), "a checkpoint")
    (state,) = run.rglob("state")
    assert refused(lambda: list(run.iterdir()))
    assert refused(state.read_bytes)
    assert refused(lambda: Path(run, "planted").mkdir())
    assert refused(lambda: run.rename(run.with_name("away")))


def command_lines(pids: list[int]) -> list[bytes]:
    found = []
    for pid in pids:
        with contextlib.suppress(*GONE):
            found += [line for line in [Path(f"/proc/{pid}/cmdline").read_bytes()] if line]
    return found


def test_processes_show_no_secret_and_take_no_signal(bench: Bench) -> None:
    found = processes(bench)
    assert len(found) >= 3

    def tries() -> list[str]:
        got = []
        for pid in found:
            for name in ("environ", "fd", "mem", "maps"):
                path = Path(f"/proc/{pid}/{name}")
                with contextlib.suppress(PermissionError, *GONE):
                    list(path.iterdir()) if name == "fd" else path.read_bytes()
                    got.append(str(path))
            with contextlib.suppress(PermissionError, *GONE):
                os.kill(pid, signal.SIGUSR1)
                got.append(f"kill {pid}")
        return got

    assert as_other(tries) == []
    lines = as_other(lambda: command_lines(found))
    assert len(lines) >= 3 and not any(word.encode() in line for line in lines for word in (SECRET, MINE))
    ours = list[str]()
    for pid in bench.live_workers():
        with contextlib.suppress(psutil.NoSuchProcess):
            ours += psutil.Process(pid).environ().values()
    assert SECRET in ours, "it is the job's own"
    assert not any(MINE in value for value in ours), "jobs do not inherit that"


def test_what_is_on_record_holds_no_secret_of_the_environment(bench: Bench) -> None:
    """Who has stolen the run directory has what is in it: not what the job was given in its environment."""
    held = b"".join(path.read_bytes() for path in bench.dir.rglob("*") if path.is_file())
    assert SECRET.encode() not in held and MINE.encode() not in held


def test_a_run_on_one_host_listens_nowhere(bench: Bench) -> None:
    assert bench.listening() == set()
    assert not psutil.Process(bench.agents[0].pid).net_connections(kind="inet")


def test_what_was_planted_beside_the_checkpoints_is_not_gone_on_from(place: Path) -> None:
    """Who owns the folder above, as of a group, can put another in the place of a run's."""
    bench = Bench(place / "second")
    bench.folder.mkdir()
    shared = place / "second" / "ck"
    shared.mkdir()
    shared.chmod(0o777)
    jobs = bench.set_of(job("a", "exit 75", gpus=1, retries=0))
    bench("run", jobs, *CPU, "--checkpoints", shared, "-q", "--grace", "0.1")
    record = bench.rundir.read_record()
    assert record is not None
    run = shared / record.id

    def plants() -> None:
        run.rename(shared / "away")
        (run / "1").mkdir(parents=True)

    as_other(plants)
    done = bench("run", bench.set_of(job("b", "true", gpus=1), name="b.toml"), "--resume", *CPU,
                 "--checkpoints", shared)  # fmt: skip
    assert done.returncode == 2
    assert f"--checkpoints: {run} is a link, somebody else's" in one_line(done.stderr)


@pytest.mark.parametrize("how", ["folder", "open folder", "link", "file"])
def test_an_mps_folder_that_was_planted_is_refused(
    place: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = place / f"tmp-{how.replace(' ', '-')}"
    shared.mkdir()
    shared.chmod(0o1777)
    monkeypatch.setattr(mps_control, "_TEMPORARY", shared)
    home = mps_control.home("run")
    assert str(os.getuid()) in home.name, "its name can be known"

    def plants() -> None:
        if how == "link":
            (shared / "theirs").mkdir()
            home.symlink_to(shared / "theirs")
        elif how == "file":
            home.touch()
        else:
            home.mkdir(mode=0o700 if how == "folder" else 0o777)

    as_other(plants)
    daemon = mps_control.Daemon(home / "gpus")
    with pytest.raises(mps_control.MpsError, match="somebody else's, or open to others"):
        daemon._make_folders()
    assert not any(path.name in ("pipe", "log") for path in shared.rglob("*"))
