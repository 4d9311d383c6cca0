"""LSF's commands and environment, on documented text."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

import pytest
from places import DATA

from hpcsched.batch import lsf_text
from hpcsched.batch.base import AllocatedHost, BatchJobState, EndReason
from hpcsched.batch.command import CommandOutput
from hpcsched.batch.lsf import Lsf
from hpcsched.errors import BatchError
from hpcsched.testing.batch import LSF_JOB, FakeCluster, FakeJob, FakeLsfCommands

BATCH = DATA / "batch"


@pytest.fixture(autouse=True)
def zone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()


def at(year: int, month: int, day: int, *clock: int) -> float:
    return datetime(year, month, day, *clock).timestamp()


NOW = 1775000000.0  # 31 March 2026


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("Apr 12 22:27:01 2026 L", (2026, 4, 12, 22, 27, 1)),
        ("Apr 12 22:27:01 2026", (2026, 4, 12, 22, 27, 1)),
        ("Apr  2 22:27 L", (2026, 4, 2, 22, 27)),
        ("Apr 12 22:27:01 2026 X", (2026, 4, 12, 22, 27, 1)),
        ("Mar 31 04:00 X", (2026, 3, 31, 4, 0)),  # a moment ago, not in a year
        ("Jan  2 03:04 L", (2027, 1, 2, 3, 4)),
        ("Feb 29 03:04 L", (2028, 2, 29, 3, 4)),
        ("Apr 12 22:27:01 2026 E", None),  # an estimate ends nothing
        ("-", None),
        ("", None),
        ("Apr 31 22:27 2026 L", None),
        ("Mai 12 22:27", None),
        ("tomorrow", None),
    ],
)
def test_finish_times(text: str, end: tuple[int, ...] | None) -> None:
    assert lsf_text.finish_time(text, now=NOW) == (None if end is None else at(*end))


def test_recorded_records() -> None:
    record = lsf_text.job_record((BATCH / "bjobs-10.1.txt").read_text())
    assert record["JOBID"] == "806290" and lsf_text.state_of(record) is BatchJobState.RUNNING
    assert lsf_text.gpu_alloc(record["GPU_ALLOC"]) == {"h1": ("0", "1"), "h2": ("0", "1")}
    unknown = lsf_text.job_record((BATCH / "bjobs-unknown-10.1.txt").read_text())
    assert lsf_text.state_of(unknown) is BatchJobState.ENDED


@pytest.mark.parametrize(
    "text", ["", "{", "LIM is down", "[]", '{"RECORDS":[]}', '{"RECORDS":[1]}', '{"RECORDS":"x"}']
)
def test_no_record_is_an_error_in_one_line(text: str) -> None:
    with pytest.raises(BatchError) as caught:
        lsf_text.job_record(text)
    assert "\n" not in str(caught.value)


STATES = {
    "PENDING": "PEND WAIT PROV",
    "RUNNING": "RUN",
    "SUSPENDED": "PSUSP USUSP SSUSP",
    "ENDED": "DONE EXIT",
    "UNKNOWN": "UNKWN ZOMBI NEW",
}


@pytest.mark.parametrize(("stat", "life"), [(s, life) for life, all_ in STATES.items() for s in all_.split()])
def test_states(stat: str, life: str) -> None:
    assert lsf_text.state_of({"STAT": stat}) == life
    assert lsf_text.state_of({"ERROR": "no licence"}) is BatchJobState.UNKNOWN


@pytest.mark.parametrize("text", ["", "h1", "h1:", "h1:a,b", ";;", "-"])
def test_gpus_that_cannot_be_read(text: str) -> None:
    assert lsf_text.gpu_alloc(text) == {}


def test_hosts_by_what_is_there(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("a\na\nb\n")
    both = {"LSB_DJOB_HOSTFILE": str(file), "LSB_MCPU_HOSTS": "c 4 d 2", "LSB_HOSTS": "e e f"}
    assert lsf_text.slots_of(both) == {"a": 2, "b": 1}
    file.write_text("")
    assert lsf_text.slots_of(both) == {"c": 4, "d": 2}
    assert lsf_text.slots_of({"LSB_HOSTS": "e e f"}) == {"e": 2, "f": 1}
    for environ in (
        {},
        {"LSB_MCPU_HOSTS": "c 4 d"},
        {"LSB_MCPU_HOSTS": "c d"},
        {"LSB_MCPU_HOSTS": "\u202e"},
        {"LSB_DJOB_HOSTFILE": "/none"},
    ):
        with pytest.raises(BatchError, match="LSB_") as caught:
            lsf_text.slots_of(environ)
        assert str(caught.value).isprintable()


SUMMIT = {**LSF_JOB, "LSB_MCPU_HOSTS": "batch5 1 h36n09 42 h36n10 42", "LSB_JOBINDEX": "3"}


def running(job: str, **record: str) -> FakeLsfCommands:
    return FakeLsfCommands(FakeCluster({job: FakeJob(job, **record)}))


def test_a_launch_node_is_not_a_host() -> None:
    found = Lsf(SUMMIT, run=running("806290[3]"), launcher="jsrun", hostname="batch5").allocation()
    assert [(host.name, host.gpus, host.cpus) for host in found.hosts] == [
        ("h36n09", None, 42),
        ("h36n10", None, 42),
    ]
    assert found.here is None and found.id == "806290[3]"


def test_a_first_host_like_the_others_is_one() -> None:
    plain = Lsf(SUMMIT, run=running("806290[3]"), launcher="blaunch", hostname="batch5").allocation()
    assert [host.name for host in plain.hosts] == ["batch5", "h36n09", "h36n10"] and plain.here == "batch5"
    alike = {**SUMMIT, "LSB_MCPU_HOSTS": "h36n08 42 h36n09 42"}
    assert len(Lsf(alike, run=running("806290[3]"), launcher="jsrun").allocation().hosts) == 2
    alone = {**SUMMIT, "LSB_MCPU_HOSTS": "batch5 42"}
    assert len(Lsf(alone, run=running("806290[3]"), launcher="jsrun").allocation().hosts) == 1


def test_the_launcher_is_found_on_the_path(tmp_path: Path) -> None:
    (tmp_path / "jsrun").write_text("#!/bin/sh\n")
    (tmp_path / "jsrun").chmod(0o755)
    hosts = [AllocatedHost(name="h1"), AllocatedHost(name="h2")]
    with_it = Lsf({**LSF_JOB, "PATH": str(tmp_path)}).on_hosts(hosts, ["agent"])
    assert [" ".join(command) for command in with_it] == [
        "jsrun -n 2 -r 1 -a 1 -g ALL_GPUS -c ALL_CPUS -b none agent"
    ]
    without = Lsf({**LSF_JOB, "PATH": "/none"}).on_hosts(hosts, ["agent"])
    assert without == [("blaunch", "-n", name, "-no-shell", "agent", "--name", name) for name in ("h1", "h2")]
    sized = Lsf(LSF_JOB, launcher="jsrun", jsrun_gpus="6", jsrun_cpus="42").on_hosts(hosts, ["agent"])
    assert "-g 6 -c 42" in " ".join(sized[0])


def test_gpus_of_the_hosts() -> None:
    here = Lsf(LSF_JOB, run=running("806290"), launcher="blaunch", hostname="h1.cluster").allocation()
    assert [host.gpus for host in here.hosts] == [("0", "1"), ("0", "1")]


class NoGpuField:
    """A bjobs of before GPU_ALLOC."""

    def __init__(self) -> None:
        self.inner = running("806290", end=None)

    def __call__(self, argv: Sequence[str], *, environ: Mapping[str, str], stdin: str = "") -> CommandOutput:
        if any("gpu_alloc" in word for word in argv):
            return CommandOutput(255, "", "gpu_alloc: Bad field name\n")
        return self.inner(argv, environ=environ)


def test_a_bjobs_that_knows_no_gpus() -> None:
    found = Lsf(
        {**LSF_JOB, "LSB_RESTART": "Y"}, run=NoGpuField(), launcher="blaunch", hostname="x"
    ).allocation()
    assert found.restart_count == 1 and found.here is None
    assert len(found.hosts) == 2


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("99", 99),
        ("99 EXCLUDE(12)", 99),
        ("EXCLUDE(12) 99 100", 99),
        ("EXCLUDE(12)", 12),
        ("", None),
        ("0 300", None),
        ("all", 99),
        ("all ~1 ~2", 99),
        ("ALL ~99", 100),
        ("all EXCLUDE(99)", 100),
        ("all ~1 EXCLUDE(9)", 99),
        ("~99", None),
        ("75 ~75 98", 98),
        (" ".join(["all", *(f"~{code}" for code in range(256) if code != 7)]), 7),
        (" ".join(["all", *(f"~{code}" for code in range(256) if code != 9), "EXCLUDE(9)"]), 9),
    ],
)
def test_requeue_codes(text: str, code: int | None) -> None:
    assert lsf_text.requeue_code(text) == code
    batch = Lsf({**LSF_JOB, "LSB_EXIT_REQUEUE": text})
    if code is None:
        with pytest.raises(BatchError, match='bsub -Q "99"'):
            batch.requeue()
    else:
        assert batch.requeue() == code


def long_form(name: str, job: str, now: float = NOW) -> dict[str, str]:
    return lsf_text.job_record((BATCH / name).read_text(), job, form="long", now=now)


def test_the_form_for_people() -> None:
    """The last start counts; the end is that much later, by the year that it must be."""
    record = long_form("bjobs-long-10.1.txt", "806290[3]")
    assert (
        lsf_text.state_of(record) is BatchJobState.RUNNING
        and record["FINISH_TIME"] == "Mar 31 09:10:09 2026 L"
    )
    record = long_form("bjobs-long-2.2.txt", "7")
    assert lsf_text.finish_time(record["FINISH_TIME"], now=NOW) == at(2026, 3, 31, 5, 20, 9)
    new_year = at(2027, 1, 1, 0, 0, 1)
    assert long_form("bjobs-long-2.2.txt", "7", new_year)["FINISH_TIME"] == "Mar 31 05:20:09 2026 L"


@pytest.mark.parametrize("cut", ["RUNLIMIT", "Started on"])
def test_no_limit_is_no_end(cut: str) -> None:
    text = (BATCH / "bjobs-long-2.2.txt").read_text().replace(cut, "")
    assert lsf_text.job_record(text, "7", form="long", now=NOW)["FINISH_TIME"] == "-"


@pytest.mark.parametrize(
    "text",
    ["", "LIM is down", "Job <8>, User <me>, Status <RUN>", "8|RUN|-", "7|RUN", "JOBID|STAT|FINISH_TIME"],
)
@pytest.mark.parametrize("form", ["delimiter", "long"])
def test_what_tells_of_no_job_is_an_error(text: str, form: str) -> None:
    with pytest.raises(BatchError, match="did not answer with a job's record"):
        lsf_text.job_record(text, "7", "stat", "finish_time", form=form)


@pytest.mark.parametrize("form", lsf_text.FORMS)
def test_how_bjobs_is_asked_is_found_once(form: str) -> None:
    end = float(int(time.time()) + 3600)
    run = FakeLsfCommands(FakeCluster({"806290": FakeJob("806290", end=end)}), form=form)
    batch = Lsf(LSF_JOB, run=run)
    assert batch.job_state("1") is BatchJobState.ENDED  # of which there is no record to learn from
    assert batch.end_time() == end
    before = len(run.cluster.calls)
    assert batch.end_time() == end and len(run.cluster.calls) == before + 1
    run.cluster.answers = False
    with pytest.raises(BatchError, match="LIM is down"):
        batch.end_time()


KILL = "\nMon Mar 30 23:06:00: Signal <KILL> requested by user or administrator <me>;"


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ("", EndReason.UNKNOWN),
        (KILL, EndReason.CANCELLED),
        (KILL.replace("KILL", "TERM"), EndReason.CANCELLED),
        (KILL.replace("KILL", "STOP"), EndReason.UNKNOWN),
        (KILL.replace("KILL", "REQUEUE"), EndReason.REQUEUED),
        (KILL + "\nMon Mar 30 23:06:09: Completed <exit>; TERM_PREEMPT: job killed", EndReason.PREEMPTED),
        (KILL + "\nMon Mar 30 23:06:09: Completed <exit>; TERM_MEMLIMIT: job killed", EndReason.UNKNOWN),
        (KILL + "\nMon Mar 30 23:07:09: Starting (Pid 4712);", EndReason.UNKNOWN),
        ("\nMon Mar 30 23:06:09: Completed <exit>; TERM_RUNLIMIT: job killed", EndReason.LIMIT),
    ],
)
def test_why_it_ends(told: str, reason: EndReason) -> None:
    run = running("806290", end=NOW)
    run.history = (BATCH / "bhist-10.1.txt").read_text().rstrip() + told
    batch = Lsf(LSF_JOB, run=run, now=lambda: NOW - 60)
    batch.end_time()
    assert batch.reason() is reason


def test_what_nobody_asked_for_is_the_limits_once_that_has_come() -> None:
    run = running("806290", end=NOW)
    batch = Lsf(LSF_JOB, run=run, now=lambda: NOW - 5)
    assert batch.reason() is EndReason.UNKNOWN  # no end is known yet
    batch.end_time()
    assert batch.reason() is EndReason.LIMIT
    run.history = KILL
    assert batch.reason() is EndReason.CANCELLED


def test_how_long_there_is() -> None:
    assert Lsf(LSF_JOB, run=running("806290")).kill_wait() == 30.0
    run = running("806290")
    run.cluster.answers = False
    assert Lsf(LSF_JOB, run=run).kill_wait() == 20.0


def test_signals_to_the_whole_job() -> None:
    batch = Lsf(LSF_JOB, run=running("806290"))
    assert batch.allocation().ends_by == {signal.SIGINT, signal.SIGTERM} < batch.allocation().signals_all
    at_a_terminal = Lsf({**LSF_JOB, "LSB_INTERACTIVE": "Y"}, run=running("806290")).allocation()
    assert at_a_terminal.ends_by == {signal.SIGTERM}


def test_the_script_goes_in_by_stdin(tmp_path: Path) -> None:
    script = tmp_path / "next.sh"
    script.write_text("#BSUB -q batch\ntrue\n")
    heard: list[tuple[tuple[str, ...], str, Mapping[str, str]]] = []

    def run(argv: Sequence[str], *, environ: Mapping[str, str], stdin: str = "") -> CommandOutput:
        heard.append((tuple(argv), stdin, environ))
        return CommandOutput(0, "Job <806291> is submitted to queue <batch>.\n")

    assert Lsf({**LSF_JOB, "HOME": "/home/me"}, run=run).submit_next(script) == "806291"
    argv, stdin, environ = heard[0]
    assert argv == ("bsub", "-w", "ended(806290)") and stdin == script.read_text()
    assert environ == {"HOME": "/home/me"}
    with pytest.raises(BatchError, match="name the one to submit"):
        Lsf(LSF_JOB, run=run).submit_next(None)


def test_what_lsf_says_is_shortened() -> None:
    assert len(CommandOutput(code=1, out="", err="9" * 5000).complaint()) < 400
