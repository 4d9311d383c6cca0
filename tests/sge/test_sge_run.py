"""`hpcsched run` in real SGE jobs: saved before their end and when deleted, back by exit code 99, arrays."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest

pytestmark = [pytest.mark.slow]

LONG = """schema = 1
[[job]]
name = "a"
replay = true
model = "ResNet-50"
steps = 200000
"""
TELLS = """#!/bin/bash
#$ -S /bin/bash
#$ -pe node 3
#$ -l h_rt=600
#$ -notify
#$ -cwd -j y -o told-x.out
cd {root}
exec {python} - <<'END'
import os
from hpcsched.batch import open_batch
from hpcsched.batch.base import AllocatedHost

batch = open_batch(environ=os.environ)
found = batch.allocation()
print(found.kind, found.id, [(h.name, h.cpus) for h in found.hosts], found.here == found.hosts[0].name)
print(found.deadline is not None, batch.kill_wait(), batch.requeueable(), batch.script_pid() == os.getpid())
print(batch.version(), batch.job_state(found.id), batch.job_state("999999"), sorted(map(int, found.ends_by)))
batch.comment("two\\nlines, a=b")
END
"""


def test_its_whole_life(sge: Any) -> None:
    """The time limit, qdel and an array, at the same time: each is mostly waiting."""
    for name in ("a", "b", "c"):
        (sge.work / f"{name}.toml").write_text(LONG)
    back = sge.submit("back", ["a.toml"], "--time", "0:00:45")
    gone = sge.submit("gone", ["a.toml"], "--time", "10m")
    many = sge.submit("many", ["b.toml", "c.toml"], "--time", "10m")
    sge.at_work("back", "gone", "many/b", "many/c")

    # A deleted job saves in the time that the queue's `notify` leaves, and does not come back.
    sge.run("qdel", gone)
    sge.run("qdel", f"{many}.2")
    for name in ("gone", "many"):
        sge.until(lambda name=name: "not by itself: its batch job was cancelled" in sge.log(name))
    assert "it was cancelled" in sge.log("gone") and "saved at step" in sge.log("gone")
    assert sge.status("many/c")["run"]["state"] == "STOPPED"
    assert sge.status("many/b")["run"]["state"] == "RUNNING" and f"sge job {many}.1 on" in sge.log("many")
    assert "has ended" in sge.until(lambda: _said(sge, "gone", "has ended"))

    # At the end of its time a job saves and goes on: in the same job, by exit code 99.
    sge.until(lambda: "this batch job is back in the queue" in sge.log("back"))
    sge.until(lambda: f"sge job {back}, restart 1" in sge.log("back"))
    sge.at_work("back")
    step = int(re.findall(r"resumes at step (\d+)", sge.log("back"))[0])
    assert 0 < step < 200000 and "asked to save" in sge.log("back")
    sge.run("qdel", back)
    sge.until(lambda: "not by itself: its batch job was cancelled" in sge.log("back"))


def _said(sge: Any, name: str, words: str) -> str:
    said = sge.run("hpcsched", "status", "--dir", name)
    return str(said) if words in said else ""


def test_what_the_adapter_is_told(sge: Any, request: pytest.FixtureRequest) -> None:
    script = sge.work / "told.sge"
    script.write_text(TELLS.format(root=request.config.rootpath, python=sys.executable))
    job = sge.run("qsub", "-terse", str(script)).strip()
    lines = sge.until(lambda: (found := sge.log("told").splitlines()) and len(found) >= 3 and found)
    kind, rest = lines[0].split(maxsplit=1)
    assert kind == "sge" and rest.startswith(f"{job} [(") and rest.endswith(", 3)] True")
    assert lines[1] == "True 20.0 possible, by exit code 99 True"
    assert re.fullmatch(r"\S*GE [\d.]+\S* RUNNING ENDED \[12, 15\]", lines[2])


def test_two_hosts(sge: Any) -> None:
    """Node agents come by `qrsh -inherit`, and a job over both hosts saves when the batch job is deleted."""
    del sge.settings["HPCSCHED_INTERFACE"], sge.env["HPCSCHED_INTERFACE"]
    (sge.work / "site.toml").write_text('[script]\npe = "nodes"\n')
    (sge.work / "wide.toml").write_text(LONG + "nodes = 2\n")
    job = sge.submit("wide", ["wide.toml"], "--time", "10m", "--nodes", "2")
    sge.at_work("wide")
    assert f"sge job {job} on 2 hosts with 4 x replay" in sge.log("wide")
    sge.run("qdel", job)
    sge.until(lambda: "not by itself: its batch job was cancelled" in sge.log("wide"))
    assert "saved at step" in sge.log("wide")
    sge.until(lambda: job not in sge.run("qstat"))
