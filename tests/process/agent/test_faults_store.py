"""What goes wrong around the run directory: full and read-only disks, other agents, other users."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess

import pytest
from livebench import Bench, job, saves
from smalldisk import fill, one_line, small_disk

from hpcsched.contract import files

CPU = ["--devices", "cpu:2"]


def test_a_full_disk_stops_the_run_with_all_saved_and_it_goes_on_later(bench: Bench) -> None:
    elsewhere = bench.folder / "saved"
    program = f"""
        trap 'echo 7 > {elsewhere}; exit 75' TSTP
        [ -e {elsewhere} ] && exit 0
        : > "$HPCSCHED_JOB_DIR/ready.$HPCSCHED_ATTEMPT"
        while :; do sleep 0.05; done
    """
    with small_disk(bench.dir, "size=1m"):
        waits = job("b", "true", gpus=1, after=["a"])
        agent = bench.start(bench.set_of(job("a", program, gpus=1), waits), *CPU)
        bench.ready("a")
        names = [bench.dir / "inbox" / "tmp" / command for command in ("hold", "release")]
        for name in names:
            name.write_text(json.dumps({"command": name.name, "targets": [2]}))
        before = bench.rundir.journal.read_bytes()
        ballast = fill(bench.dir)
        # Commands that lead to records fill the journal's last block, and then there is no room.
        for n in range(200):
            with contextlib.suppress(OSError):
                os.link(names[n % 2], bench.dir / "inbox" / "new" / f"{n:06}")
        code = agent.wait()
        assert code not in (0, 2), agent.said
        assert "No space left on device" in agent.said
        assert "1 of 1 running jobs saved and left" in agent.said
        assert "Traceback" not in agent.said
        assert elsewhere.read_text() == "7\n"
        ballast.unlink()
        assert bench.rundir.journal.read_bytes().startswith(before)
        done = bench("run", "--resume", "-q", *CPU)
        assert done.returncode == 0, done.stderr
        assert bench.states() == {"a": "COMPLETED", "b": "COMPLETED"}


def test_what_an_attempt_of_the_same_number_has_left_is_gone_before_the_next_begins(bench: Bench) -> None:
    """A journal that lost its tail gives a number again; what the first of that number was told is there."""
    names = " ".join(name(1) for name in (files.stop, files.left, files.held, files.ready))
    before = f"mkdir {bench.rundir.job(2)} && cd {bench.rundir.job(2)} && touch {names}"
    program = f"cd $HPCSCHED_JOB_DIR; for name in {names}; do [ ! -e $name ] || exit 3; done"
    file = bench.set_of(job("a", before, gpus=1), job("b", program, gpus=1, after=["a"]))
    done = bench("run", "-q", str(file), *CPU)
    assert done.returncode == 0, done.stdout


def test_a_snapshot_that_cannot_be_written_does_not_stop_the_run(bench: Bench) -> None:
    # As real as a full disk, but for status.json alone: its name is taken by a folder.
    agent = bench.start(bench.set_of(saves("a", steps=40, pause=0.1, gpus=1)), *CPU)
    bench.ready("a")
    blocker = bench.rundir.status
    while not blocker.is_dir():  # until the agent has not been faster
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            blocker.unlink()
            blocker.mkdir()
    assert agent.wait() == 0, agent.said
    assert "status is out of date; the run goes on" in agent.said
    blocker.rmdir()
    assert bench.replayed()[0].run.finished


def test_a_program_without_room_for_its_checkpoint_goes_on_from_the_last_one(bench: Bench) -> None:
    scratch = bench.folder / "scratch"
    program = f"""
        cd "$HPCSCHED_JOB_DIR"
        save() {{ head -c 8192 /dev/zero > {scratch}/new && mv {scratch}/new {scratch}/checkpoint &&
            printf '{{"step": %d, "attempt": %d}}' $1 $HPCSCHED_ATTEMPT > STATE.json || exit 74; }}
        [ $HPCSCHED_ATTEMPT = 3 ] && exit 0
        [ $HPCSCHED_RESUME = 1 ] || save 5
        trap 'save 9; exit 75' TSTP
        : > ready.$HPCSCHED_ATTEMPT
        while :; do sleep 0.05; done
    """
    with small_disk(scratch, "size=64k"):
        agent = bench.start(bench.set_of(job("a", program, gpus=1)), *CPU)
        bench.ready("a")
        ballast = fill(scratch)
        assert bench("suspend", "a").returncode == 0
        bench.until(lambda: bench.states()["a"] == "SUSPENDED")
        assert bench.job("a")["step"] == 5
        assert bench.job("a")["exit"] == 74
        ballast.unlink()
        assert bench("resume", "a").returncode == 0
        bench.ready("a")
        assert bench("suspend", "a").returncode == 0
        bench.until(lambda: bench.states()["a"] == "SUSPENDED" and bench.job("a")["step"] == 9)
        assert bench("resume", "a").returncode == 0
        assert agent.wait() == 0, agent.said


@pytest.mark.parametrize("where", ["/proc/nothing", "/sys/nothing"])
def test_a_place_that_cannot_be_written_is_refused(bench: Bench, where: str) -> None:
    done = bench("run", bench.set_of(job("a", "true", gpus=1)), *CPU, "--dir", where)
    assert done.returncode == 2
    assert where in one_line(done.stderr)


def test_a_read_only_run_directory_is_refused(bench: Bench) -> None:
    jobs = bench.set_of(job("a", "true", gpus=1))
    with small_disk(bench.dir, "size=256k"):
        subprocess.run(["mount", "-o", "remount,ro", str(bench.dir)], check=True)
        done = bench("run", jobs, *CPU)
        assert done.returncode == 2
        assert "Read-only file system" in one_line(done.stderr)
        sent = bench("submit", "--", "true")
        assert sent.returncode == 2
        assert "Read-only file system" in one_line(sent.stderr)


def test_somebody_elses_run_directory_is_refused(bench: Bench) -> None:
    if os.geteuid():
        pytest.skip("only root can give files away")
    bench.dir.mkdir()
    os.chown(bench.dir, 12345, -1)
    done = bench("run", bench.set_of(job("a", "true", gpus=1)), *CPU)
    assert done.returncode == 2
    assert "belongs to user 12345" in one_line(done.stderr)


def test_a_second_agent_is_refused(bench: Bench) -> None:
    agent = bench.start(bench.set_of(job("a", "sleep 600", gpus=1)), *CPU)
    bench.until(lambda: bench.states().get("a") == "RUNNING")
    for words in (["--resume"], ["set.toml", "--resume"]):
        done = bench("run", *words, *CPU)
        assert done.returncode == 2
        assert f"pid {agent.pid}" in one_line(done.stderr)
    assert agent.process.poll() is None
    assert bench.states() == {"a": "RUNNING"}


def test_what_others_put_into_the_inbox_is_refused(bench: Bench) -> None:
    agent = bench.start(bench.set_of(job("a", "sleep 600", gpus=1)), *CPU, "--grace", "0.1")
    bench.until(lambda: bench.states().get("a") == "RUNNING")
    new = bench.dir / "inbox" / "new"

    def put(name: str, text: str) -> None:  # whole, as `submit` does
        part = bench.dir / "inbox" / "tmp" / name
        part.write_text(text)
        part.rename(new / name)

    cancel = json.dumps({"command": "cancel", "targets": [1]})
    if not os.geteuid():
        foreign = bench.dir / "inbox" / "tmp" / "foreign"
        foreign.write_text(cancel)
        os.chown(foreign, 12345, 12345)
        foreign.rename(new / "1")
    put("2", "{")
    put("3", json.dumps({"command": "explode"}))
    put("4", json.dumps({"command": "cancel", "targets": [77]}))
    (new / "5").symlink_to(bench.folder / "set.toml")
    os.mkfifo(new / "6")
    (new / "7").mkdir()
    nothing = {"name": "n", "kind": "command", "model": "n", "command": ["true"]}
    put("8", json.dumps({"command": "submit", "jobs": [{**nothing, "gpus_min": 0}]}))
    put("9", json.dumps({"command": "submit", "jobs": [nothing]}))
    bench.until(lambda: bench.states().get("n") == "COMPLETED", "the last one is carried out")
    assert bench.states() == {"a": "RUNNING", "n": "COMPLETED"}
    assert os.geteuid() or "refused: it comes from user 12345" in agent.said
    assert [p.name for p in new.iterdir()] == ["7"], "what cannot be removed is left, and not read again"
    assert agent.said.count("inbox: ") <= 8
    agent.kill(signal.SIGTERM)
    assert agent.wait() == 75
    assert "Traceback" not in agent.said


def test_bad_input_starts_nothing_and_leaves_nothing_behind(bench: Bench) -> None:
    profile = '{"schema": 1, "profiles": [{"model": "a", "device": "cpu", "throughput": {"1": NaN}}]}'
    (bench.folder / "nan.json").write_text(profile)
    good = bench.set_of(job("a", "true", gpus=1), name="good.toml")
    cases = [
        ([bench.set_of(job("a", "true", gpus=1), job("a", "true", gpus=1)), *CPU], "twice"),
        ([bench.set_of(job("b", "true", gpus=3), name="big.toml"), *CPU], "at most 2"),
        ([bench.set_of(job("c", replay=True, steps=3), name="replay.toml"), *CPU], "c"),
        ([good, "--devices", "replay:2"], "a"),
        ([good, *CPU, "--profiles", "nan.json"], "nan.json"),
        ([good, *CPU, "--policy", "nonsense"], "nonsense"),
        ([good, "--devices", "cpu:zero"], "cpu:zero"),
    ]
    for words, said in cases:
        done = bench("run", *words)
        assert done.returncode == 2, (words, done.stderr)
        assert said in one_line(done.stderr), words
        assert not bench.dir.exists(), words
