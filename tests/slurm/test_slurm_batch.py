"""The batch system's seam on a real Slurm."""

from __future__ import annotations

import functools
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcsched.batch.base import AllocatedHost, BatchJobState
from hpcsched.batch.command import run_command
from hpcsched.batch.hostlist import expand
from hpcsched.batch.slurm import Slurm
from hpcsched.errors import BatchError

pytestmark = pytest.mark.slurm

INSIDE = """#!/bin/bash
exec python3 - <<'END'
import json, os, pathlib, subprocess, sys, time
from hpcsched.batch import open_batch
from hpcsched.errors import BatchError

batch = open_batch(environ=os.environ)
work = pathlib.Path({work!r})

def tell(name, said):
    (work / (name + ".new")).write_text(json.dumps(said) + "\\n")
    (work / (name + ".new")).rename(work / name)

{body}
END
"""

LOOK = "import os; print(os.environ['SLURMD_NODENAME'], os.environ.get('CUDA_VISIBLE_DEVICES'), "
LOOK += "os.environ['SLURM_CPUS_ON_NODE'], *__import__('sys').argv[1:])"


def inside(slurm: Any, body: str, *options: str) -> str:
    """Submits a job whose script is this Python, as hpcsched would be: `exec`ed by the script."""
    return str(slurm.sbatch(INSIDE.format(work=str(slurm.work), body=body), *options))


def told(slurm: Any, name: str) -> Any:
    return json.loads(slurm.wait_for(slurm.work / name))


def soon(met: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not met():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s"
        time.sleep(0.02)


def of_job(slurm: Any, job: str) -> Slurm:
    return Slurm({**slurm.env, "SLURM_JOB_ID": job})


@pytest.mark.parametrize(
    ("options", "cpus", "gpus"),
    [
        ("--gpus-per-node=6 --ntasks-per-node=1 -c4", [4, 4], [6, 6]),
        ("--gpus=12", [1, 1], [6, 6]),
        ("--gpus=8", [1, 1], [6, 2]),
        ("--gres=gpu:6 -n2 --mem-per-cpu=50", [1, 1], [6, 6]),
        ("-n4 --gpus-per-task=3 -c2", [4, 4], [6, 6]),
        ("-n3 --gpus-per-task=2", [2, 1], [4, 2]),
        ("-n12 --ntasks-per-gpu=1 --gpus=12", [6, 6], [6, 6]),
        ("--gpus-per-node=4 --mem-per-gpu=50 --exclusive", [12, 12], [6, 6]),
        ("-n2", [1, 1], [0, 0]),
    ],
)
def test_steps_get_everything_the_job_has(slurm: Any, options: str, cpus: list[int], gpus: list[int]) -> None:
    body = f"""
found = batch.allocation()
argv = [sys.executable, "-c", {LOOK!r}]
steps = [subprocess.run(c, capture_output=True, text=True) for c in batch.on_hosts(found.hosts, argv)]
tell("steps", {{
    "kind": found.kind, "id": found.id, "here": found.here, "restarts": found.restart_count,
    "left": found.deadline - time.time(),
    "hosts": [(h.name, h.gpus, h.cpus) for h in found.hosts],
    # Where no task plugin can bind, srun grumbles about --cpu-bind=none.
    "steps": [
        (s.returncode, s.stdout.split(), [l for l in s.stderr.splitlines() if "lacks support" not in l])
        for s in steps
    ],
}})
"""
    (slurm.work / "steps").unlink(missing_ok=True)
    job = inside(slurm, body, "-N2", "--time=7", *options.split())
    said = told(slurm, "steps")
    assert (said["kind"], said["id"], said["here"], said["restarts"]) == ("slurm", job, "node1", 0)
    assert 360 < said["left"] <= 420
    names = [",".join(map(str, range(count))) or "None" for count in gpus]
    mine = list(map(str, range(gpus[0]))) if gpus[0] else None
    assert said["hosts"] == [["node1", mine, cpus[0]], ["node2", None, cpus[1]]]
    assert said["steps"] == [
        [0, [host, names[at], str(cpus[at]), "--name", host], []]
        for at, host in enumerate(("node1", "node2"))
    ]


def test_the_end_moves_with_the_time_limit(slurm: Any) -> None:
    job = slurm.sbatch("sleep 300", "--time=10")
    slurm.wait(job, {"RUNNING"})
    batch = of_job(slurm, job)
    first = batch.end_time()
    assert first is not None and abs(first - time.time() - 600) < 30
    for zone in ("Asia/Kathmandu", "America/New_York"):
        assert Slurm({**slurm.env, "SLURM_JOB_ID": job, "TZ": zone}).end_time() == first
    odd = {
        "SLURM_TIME_FORMAT": "relative",
        "SQUEUE_STATES": "PENDING",
        "SQUEUE_FORMAT": "%i",
        "LANG": "de_DE",
    }
    assert Slurm({**slurm.env, **odd, "SLURM_JOB_ID": job}).end_time() == first
    slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=12")
    assert batch.end_time() == first + 120


def test_requeue_brings_the_job_back(slurm: Any) -> None:
    body = """
found = batch.allocation()
if found.restart_count == 0:
    code = batch.requeue()
    tell("asked", code)
    time.sleep(30)
tell("back", found.restart_count)
"""
    for name in ("asked", "back"):
        (slurm.work / name).unlink(missing_ok=True)
    job = inside(slurm, body, "--requeue")
    slurm.wait(job, {"PENDING"})
    soon(lambda: "restarts=1" in slurm.run("scontrol", "-o", "show", "job", job).lower())
    slurm.wait(job, {"PENDING"})  # it completes first, and completing counts as running
    assert Slurm(slurm.env).job_state(job) is BatchJobState.PENDING
    slurm.start_again(job)
    assert told(slurm, "back") == 1


def test_requeue_is_refused_with_what_to_do(slurm: Any) -> None:
    body = """
try:
    tell("refused", batch.requeue())
except BatchError as error:
    tell("refused", str(error))
"""
    inside(slurm, body, "--no-requeue")
    said = told(slurm, "refused")
    assert "disabled" in said and "#SBATCH --requeue" in said and "\n" not in said


def test_a_comment_stands_beside_the_job(slurm: Any) -> None:
    job = slurm.sbatch("sleep 300", "--hold")
    of_job(slurm, job).comment('3 of 10 done, "vit"=promoted; $HOME\nnext' + "x" * 500)
    shown = slurm.run("squeue", "-h", "-j", job, "-o", "%k").strip()
    assert shown.startswith('3 of 10 done, "vit"=promoted; $HOME next') and len(shown) == 200


def test_the_next_job_is_like_this_one_and_knows_nothing_of_it(slurm: Any) -> None:
    body = """
if os.environ.get("HPCSCHED_MARK") != "kept":
    sys.exit("no mark")
me = os.environ["SLURM_JOB_ID"]
first = work / "first"
if not first.exists():
    tell("first", me)
    os.environ["SLURM_RESTART_COUNT"] = "3"
    os.environ["SLURM_GPUS"] = "99"
    tell("submitted", batch.submit_next(None))
else:
    found = batch.allocation()
    tell("second", [dict(os.environ), found.restart_count, found.deadline - time.time(), os.getcwd()])
"""
    options = "--partition=short --time=1 -N2 --gpus-per-node=2 --ntasks-per-node=1 -c3 --job-name=chain"
    slurm.env = {**slurm.env, "HPCSCHED_MARK": "kept"}
    job = inside(slurm, body, *options.split())
    following = told(slurm, "submitted")
    slurm.jobs.append(following)
    assert Slurm(slurm.env).job_state(following) in (
        BatchJobState.PENDING,
        BatchJobState.RUNNING,
        BatchJobState.ENDED,
    )
    environ, restarts, left, cwd = told(slurm, "second")
    assert told(slurm, "first") == job and environ["SLURM_JOB_ID"] == following
    assert "SLURM_RESTART_COUNT" not in environ and "SLURM_GPUS" not in environ and restarts == 0
    assert environ["SLURM_JOB_PARTITION"] == "short" and left <= 60 and cwd == str(slurm.work)
    assert environ["SLURM_JOB_NAME"] == "chain" and environ["SLURM_NNODES"] == "2"
    assert environ["SLURM_CPUS_PER_TASK"] == "3" and environ["CUDA_VISIBLE_DEVICES"] == "0,1"


def test_what_the_next_script_says_itself_counts(slurm: Any) -> None:
    job = slurm.sbatch("sleep 300", "--partition=short", "--time=1", "--gpus=4")
    slurm.wait(job, {"RUNNING"})
    script = slurm.work / "next.sh"
    script.write_text("#!/bin/bash\n#SBATCH -t 5 --gres=gpu:1\n#SBATCH -p main --hold\nsleep 1\n")
    following = of_job(slurm, job).submit_next(script)
    slurm.jobs.append(following)
    shown = slurm.run("scontrol", "-o", "show", "job", following)
    assert "Partition=main" in shown and "TimeLimit=00:05:00" in shown
    assert "TresPerNode=gres:gpu:1" in shown and "TresPerJob" not in shown
    assert f"afterany:{job}" in shown


def test_lives(slurm: Any) -> None:
    batch = Slurm(slurm.env)
    waiting = slurm.sbatch("sleep 300", "--hold")
    running = slurm.sbatch("sleep 300")
    array = slurm.sbatch("sleep 300", "--array=0-2%2")
    slurm.wait(running, {"RUNNING"})
    assert batch.job_state(waiting) is BatchJobState.HELD
    assert batch.why_waiting(waiting).startswith("JobHeld")
    assert batch.job_state(running) is BatchJobState.RUNNING
    soon(lambda: batch.job_state(f"{array}_0") is BatchJobState.RUNNING)
    assert batch.job_state("999999") is BatchJobState.ENDED
    assert batch.job_state("none") is batch.job_state("") is BatchJobState.UNKNOWN
    # The array's own id is also that of its last task, which waits while others run.
    assert batch.job_state(array) is BatchJobState.PENDING
    assert isinstance(of_job(slurm, running).end_time(), float)
    slurm.cancel(running)
    slurm.wait(running)
    assert batch.job_state(running) is BatchJobState.ENDED
    assert batch.version().startswith("Slurm 2")


TREE = """
import os, pathlib, subprocess, sys, time
child = subprocess.Popen(["sleep", "300"], start_new_session=True, stdout=subprocess.DEVNULL)
note = pathlib.Path(sys.argv[sys.argv.index("--name") + 1] + ".pids")
pathlib.Path("new").write_text(f"{os.getpid()} {child.pid}\\n")
pathlib.Path("new").rename(note)
time.sleep(300)
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_ending_srun_ends_what_it_started(slurm: Any, number: signal.Signals) -> None:
    (slurm.work / "tree.py").write_text(TREE)
    (slurm.work / "node2.pids").unlink(missing_ok=True)
    (slurm.work / "srun").unlink(missing_ok=True)
    body = """
found = batch.allocation()
os.chdir(work)
command = batch.on_hosts(found.hosts[1:], [sys.executable, "tree.py"])
step = subprocess.Popen(command[0])
tell("srun", step.pid)
ended = step.wait()
tell("ended", ended)
time.sleep(30)
"""
    inside(slurm, body, "-N2", "--gpus-per-node=6")
    step = int(told(slurm, "srun"))
    pids = list(map(int, slurm.wait_for(slurm.work / "node2.pids").split()))
    assert all(map(alive, pids))
    os.kill(step, number)
    soon(lambda: not any(map(alive, [*pids, step])), timeout_s=20)  # long before KillWait


def test_a_controller_that_hangs_is_an_error_in_time(slurm: Any) -> None:
    job = slurm.sbatch("sleep 300", "--hold")
    quick = functools.partial(run_command, timeout_s=0.7)
    batch = Slurm({**slurm.env, "SLURM_JOB_ID": job, "SLURM_JOB_NODELIST": "node[1-2]"}, run=quick)
    slurm.signal("slurmctld", signal.SIGSTOP)
    try:
        start = time.monotonic()
        with pytest.raises(BatchError, match="squeue did not answer within"):
            batch.end_time()
        assert time.monotonic() - start < 10
        assert batch.job_state(job) is BatchJobState.UNKNOWN
        found = batch.allocation()
        assert found.deadline is None and [host.name for host in found.hosts] == ["node1", "node2"]
    finally:
        slurm.signal("slurmctld", signal.SIGCONT)
    assert of_job(slurm, job).job_state(job) is BatchJobState.HELD


def test_a_controller_that_is_gone_is_an_error_in_time(slurm: Any, tmp_path: Any) -> None:
    conf = (slurm.folder / "slurm.conf").read_text()
    nobody = tmp_path / "slurm.conf"
    nobody.write_text(
        "\n".join("SlurmctldPort=1" if "SlurmctldPort" in line else line for line in conf.split("\n"))
    )
    quick = functools.partial(run_command, timeout_s=2.0)
    batch = Slurm({**slurm.env, "SLURM_CONF": str(nobody), "SLURM_JOB_ID": "1"}, run=quick)
    start = time.monotonic()
    with pytest.raises(BatchError, match="squeue"):  # it tries again for longer than COMMAND_TIMEOUT_S
        batch.end_time()
    assert time.monotonic() - start < 10


def test_host_lists_expand_as_scontrol_does(slurm: Any) -> None:
    lists = [
        "node1", "node[1-3]", "node[1-3,7]", "gpu-a0[01-12]", "n[001-003,010]", "r[1-2]n[1-4]", "a,b,c",
        "a[1-2],b", "a,b[9-11]", "a[8-12]", "a[08-12]", "a[098-102]", "a[1]",
        "rack[0-1]-node[00-02]", "x[3,1,2]", "x[1,1-2]", "b[1-2],a[1-2],b3", "a1b[2-3]",
    ]  # fmt: skip
    for text in lists:
        assert list(expand(text)) == slurm.run("scontrol", "show", "hostnames", text).split(), text


def test_hosts_are_named_one_by_one(slurm: Any) -> None:
    batch = Slurm({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_GPUS": "12"})
    commands = batch.on_hosts([AllocatedHost(name="node1"), AllocatedHost(name="node2")], ["agent"])
    assert [command[-3:] for command in commands] == [("agent", "--name", f"node{n}") for n in (1, 2)]
