"""What SGE prints and writes, read."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from places import ROOT

from hpcsched.batch import sge_text
from hpcsched.batch.base import AllocatedHost, BatchJobState, EndReason
from hpcsched.batch.sge import Sge
from hpcsched.errors import BatchError
from hpcsched.testing.batch import SGE_JOB, FakeCluster, FakeJob, FakeSgeCommands

DATA = ROOT / "tests" / "data" / "batch"


def recorded(name: str) -> str:
    return (DATA / f"{name}-sge-8.1.9.xml").read_text()


@pytest.mark.parametrize(
    ("job", "task", "state"),
    [
        ("11", "1", "RUNNING"),  # deleted, and still there
        ("11", "2", "RUNNING"),
        ("11", "3", "PENDING"),
        ("11", "4", "ENDED"),
        ("11", None, "RUNNING"),
        ("12", None, "SUSPENDED"),
        ("13", None, "PENDING"),
        ("99", None, "ENDED"),
    ],
)
def test_states_of_a_recorded_listing(job: str, task: str | None, state: str) -> None:
    assert sge_text.state_of(sge_text.listing(recorded("qstat")), job, task) is BatchJobState(state)


def test_a_recorded_job() -> None:
    found = sge_text.detail(recorded("qstat-j"))
    assert found and found.owner == "me" and found.requests == {"gpu": "2", "h_rt": "600"}
    assert found.starts == {"1": 1795912490.0, "2": 1795912490.0}


@pytest.mark.parametrize(
    "text",
    ["", "error: nobody", "<a>", '<!DOCTYPE x [<!ENTITY y "z">]><x>&y;</x>', "<detailed_job_info/>"],
)
def test_what_is_no_answer_is_said_in_a_line(text: str) -> None:
    with pytest.raises(BatchError) as caught:
        sge_text.detail(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "seconds"), [("600", 600), ("0:10:00", 600), ("::30", 30), ("INFINITY", None), ("1:", "bad")]
)
def test_times(text: str, seconds: float | str | None) -> None:
    if seconds == "bad":
        with pytest.raises(ValueError):
            sge_text.seconds(text)
    else:
        assert sge_text.seconds(text) == seconds


def test_a_queue_may_have_limits_of_its_own_on_a_host() -> None:
    text = "qname    main\nnotify   00:00:60\nh_rt     INFINITY,[node1=0:10:0], \\\n         [node2=1:0:0]\n"
    assert sge_text.queue_values(text, "node1.cluster")["h_rt"] == "0:10:0"
    assert sge_text.queue_values(text, "node2")["h_rt"] == "1:0:0"
    assert sge_text.queue_values(text, "node3")["h_rt"] == "INFINITY"


def test_a_host_with_two_queues_is_one_host() -> None:
    text = "node1 4 main@node1 UNDEFINED\nnode2 8 main@node2 UNDEFINED\nnode1 2 more@node1 UNDEFINED\n"
    assert sge_text.host_slots(text) == {"node1": 6, "node2": 8}
    for odd in ("", "node1\n", "node1 many main@node1\n"):
        with pytest.raises(BatchError):
            sge_text.host_slots(odd)


@pytest.mark.parametrize(
    ("config", "notice"),
    [
        ("notify=20\nnotify_kill=default\n", (signal.SIGUSR2, 20.0)),
        ("notify=60\nnotify_kill=TERM\n", (signal.SIGTERM, 60.0)),
        ("notify=60\nnotify_kill=none\n", None),
        ("notify=0\n", None),
        ("job_name=x\n", None),
    ],
)
def test_the_warning_before_a_kill(config: str, notice: tuple[signal.Signals, float] | None) -> None:
    assert sge_text.kill_notice(sge_text.job_config(config)) == notice


@pytest.mark.parametrize(
    ("text", "names"),
    [("0 1", ("0", "1")), ("GPU-5a,MIG-1/2/3", ("GPU-5a", "MIG-1/2/3")), ("gpu0", ()), ("", ())],
)
def test_names_of_gpus_in_a_resource_map(text: str, names: tuple[str, ...]) -> None:
    assert sge_text.gpu_names(text) == names


class Qstat(FakeSgeCommands):
    """Lists our job in this state, in its letters."""

    state = "r"

    def _listing(self) -> str:
        row = f"<job_list><JB_job_number>11</JB_job_number><state>{self.state}</state></job_list>"
        return f"<job_info><queue_info>{row}</queue_info></job_info>"


@pytest.mark.parametrize(
    ("state", "now", "reason"),
    [
        ("dr", 0.0, EndReason.CANCELLED),
        ("dr", 9990.0, EndReason.CANCELLED),
        ("Rq", 0.0, EndReason.REQUEUED),
        ("Rr", 0.0, EndReason.UNKNOWN),
        ("r", 9995.0, EndReason.LIMIT),
    ],
)
def test_why_it_ends(state: str, now: float, reason: EndReason) -> None:
    run = Qstat(FakeCluster({"11": FakeJob("11", end=10000.0, hosts=("node1",))}))
    run.state = state
    batch = Sge(SGE_JOB, run=run, now=lambda: now)
    assert batch.end_time() == 10000.0
    assert batch.reason() is reason
    # The limits of a job that runs do not change: it is not asked for again.
    asked = len(run.cluster.calls)
    assert batch.end_time() == 10000.0 and len(run.cluster.calls) == asked


def test_a_task_of_an_array_has_an_id_of_its_own_and_is_followed_by_nothing(tmp_path: Path) -> None:
    run = FakeSgeCommands(FakeCluster({"11": FakeJob("11")}))
    batch = Sge({**SGE_JOB, "SGE_TASK_ID": "3", "RESTARTED": "1"}, run=run)
    found = batch.allocation()
    assert found.id == "11.3" and found.restart_count == 1
    assert found.hosts == (AllocatedHost(name="node1", cpus=8, gpus=("0", "1")),)
    (tmp_path / "x.sh").write_text("true\n")
    with pytest.raises(BatchError, match="use --requeue"):
        batch.submit_next(tmp_path / "x.sh")


def test_words_for_another_host_are_one_for_the_shell_there() -> None:
    batch = Sge(SGE_JOB, run=FakeSgeCommands(FakeCluster()))
    here, there = batch.on_hosts([AllocatedHost(name="node1"), AllocatedHost(name="node2")], ["agent", "a b"])
    assert here == ("agent", "a b", "--name", "node1")
    assert there == ("qrsh", "-inherit", "-nostdin", "node2", "agent 'a b' --name node2")
