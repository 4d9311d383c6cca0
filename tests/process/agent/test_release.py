"""Hosts of which nothing is used any more are given back to the batch system, by real agents of a Slurm job.

Slurm's commands are stand-ins: `scontrol update` ends what runs on hosts that go, as Slurm does.
"""

from __future__ import annotations

import os
import re
import shlex
import stat
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
from livebench import SLOW_AT_FIRST, Agent, Bench, job, saves

SQUEUE = """#!/bin/sh
echo "77|RUNNING|$(cat {folder}/end)"
"""
SCONTROL = """#!/bin/sh
echo "scontrol $*" >> {folder}/log
case "$*" in
*NodeList=*)
    [ -e {folder}/kills ] && kill -KILL "$(cat {folder}/pid.node9)" && sleep 1
    [ -e {folder}/refuses ] && {{ echo "Requested operation is presently disabled for job 77" >&2; exit 1; }}
    echo "${{*##*NodeList=}}" > {folder}/hosts
    kill -KILL "$(cat {folder}/pid.node9)" ;;
*"show job"*) echo "JobId=77 JobName=x JobState=RUNNING NodeList=$(cat {folder}/hosts) NumNodes=2" ;;
esac
"""
SRUN = """#!/bin/sh
[ "$1" = --version ] && echo "slurm 22.05.8" && exit
for word; do case $word in --nodelist=*) echo $$ > {folder}/pid.${{word#--nodelist=}} ;; esac; done
while [ "$1" != --export=ALL ]; do shift; done
shift
exec "$@"
"""
OPTIONS = ("--devices", "cpu:1", "--interface", "127.0.0.1", "--warm", "off")


@pytest.fixture
def slurm(bench: Bench) -> Path:
    """The folder of the stand-ins, around job 77 on node7, where the run is, and node9."""
    folder = bench.folder / "slurm"
    folder.mkdir()
    for name, text in (("squeue", SQUEUE), ("scontrol", SCONTROL), ("srun", SRUN)):
        path = folder / name
        path.write_text(text.format(folder=folder))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    (folder / "hosts").write_text("node[7,9]")
    end = datetime.fromtimestamp(time.time() + 3600, UTC)
    (folder / "end").write_text(end.strftime("%Y-%m-%dT%H:%M:%S"))
    bench.env |= {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NODELIST": "node[7,9]",
        "SLURMD_NODENAME": "node7",
        "SLURM_JOB_CPUS_PER_NODE": "2(x2)",
        "HPCSCHED_PYSLURM": "off",
    }
    return folder


def a_tail(bench: Bench, *options: str) -> Agent:
    """A run of which one job goes on alone, on node7."""
    path = bench.set_of(saves("long", steps=100_000), job("short", "exit 0"))
    agent = bench.start(path, *OPTIONS, *options)
    bench.until(lambda: bench.states().get("short") == "COMPLETED", "short is over")
    bench.ready("long")
    assert bench.job("long")["hosts"] == ["node7"]
    return agent


def test_a_host_that_nothing_can_use_is_given_back(bench: Bench, slurm: Path) -> None:
    agent = a_tail(bench, "--release-idle-nodes", "0.005")
    bench.until(lambda: bench.status()["run"]["given_back"], "given back")
    assert "nothing is left that could use host node9: given back to slurm" in agent.said
    assert (slurm / "hosts").read_text().strip() == "node7"
    assert {gpu["host"] for gpu in bench.status()["gpus"]} == {"node7"}
    assert "given back to slurm: node9" in bench("status").stderr
    assert "  given back: node9 with 1 CPU slot," in bench("explain").stdout
    # The run goes on with the other host, and what comes now waits for that.
    assert bench("submit", "--name", "more", "--gpus", "1", "--", "true").returncode == 0
    bench.until(lambda: bench.states().get("more") == "PENDING", "more waits")
    assert bench("cancel", "long").returncode == 0
    assert agent.wait() == 0
    assert bench.states() == {"long": "CANCELLED", "short": "COMPLETED", "more": "COMPLETED"}
    assert "was lost" not in agent.said and "Traceback" not in agent.said
    machine, _ = bench.replayed()
    assert [back.host for back in machine.hosts.given_back] == ["node9"]
    assert bench.all_gone()


def test_a_host_that_is_refused_is_used_as_before(bench: Bench, slurm: Path) -> None:
    (slurm / "refuses").touch()
    agent = a_tail(bench, "--release-idle-nodes", "0.005")
    refusal = "host node9 cannot be given back: scontrol failed: Requested operation is presently disabled"
    bench.until(lambda: refusal in agent.said, "refused")
    log = slurm / "log"
    bench.until(lambda: log.read_text().count("NodeList=") > 1, "it is tried again in its time")
    assert bench("submit", "--name", "more", "--gpus", "1", "--", "true").returncode == 0
    bench.until(lambda: bench.states().get("more") == "COMPLETED", "more runs on node9")
    assert agent.said.count("cannot be given back") == 1, "said once"
    assert bench.status()["run"]["given_back"] == {}
    assert "was lost" not in agent.said


def test_a_host_that_is_refused_and_whose_node_agent_has_died_is_lost(bench: Bench, slurm: Path) -> None:
    (slurm / "refuses").touch()
    (slurm / "kills").touch()
    agent = a_tail(bench, "--release-idle-nodes", "0.005")
    bench.until(lambda: "host node9 was lost" in agent.said, "lost")
    bench.until(lambda: {gpu["host"] for gpu in bench.status()["gpus"]} == {"node7"}, "its GPUs too")
    assert agent.said.index("cannot be given back") < agent.said.index("host node9 was lost")
    assert bench("cancel", "long").returncode == 0
    assert agent.wait() == 0


def test_without_the_option_it_is_only_said(bench: Bench, slurm: Path) -> None:
    a_tail(bench)
    bench.until(lambda: bench.status()["run"]["left_over"], "left over")
    assert "idle, with no job left that could use it" in bench("status").stderr
    told = bench("explain").stdout
    assert "  idle: CPU slot 1 on node9 since " in told
    assert "  next: node9: `run --release-idle-nodes MINUTES` would give it back" in told
    assert "`sbatch --nodes=1 --gres=gpu:1 SCRIPT`" in told
    assert "NodeList=" not in (slurm / "log").read_text()


def test_where_nothing_can_be_given_back_it_is_said_at_once(bench: Bench) -> None:
    path = bench.set_of(job("a", "exit 0"))
    agent = bench.start(path, "--devices", "cpu:1", "--release-idle-nodes", "5")
    assert agent.wait() == 0
    assert "--release-idle-nodes: no batch system here takes hosts back: none is given back" in agent.said


def test_the_commands_that_explain_says_go_on_with_fewer_gpus(bench: Bench) -> None:
    path = bench.set_of(
        saves("long", steps=60, pause=SLOW_AT_FIRST, gpus=1),
        *(job(f"s{n}", "exit 0", gpus=1) for n in range(3)),
    )
    agent = bench.start(path, "--devices", "cpu:4", "--warm", "off")
    bench.until(lambda: bench.status()["run"].get("left_over"), "left over")
    bench.ready("long")
    told = bench("explain").stdout
    assert "  idle: CPU slots " in told and "  next: long needs 1 CPU slot at most" in told
    drain, resume = re.findall(r"`(.+?)`", told.partition("to go on with no more: ")[2])
    assert drain == f"hpcsched drain --dir {bench.dir}"
    assert resume == f"hpcsched run --resume --dir {bench.dir} --devices cpu:1"
    assert bench(*shlex.split(drain)[1:]).returncode == 0
    assert agent.wait() == 75
    assert bench(*shlex.split(resume)[1:]).returncode == 0
    assert len(bench.status()["gpus"]) == 1
    assert (bench.job("long")["state"], bench.job("long")["attempt"]) == ("COMPLETED", 2)
    assert "from 0 " not in bench.output(1).split("attempt 2")[-1], "it went on from where it was"
