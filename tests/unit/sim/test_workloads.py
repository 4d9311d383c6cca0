"""Traces read as workloads: which jobs they become, that durations come out exactly, and what is refused."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest
from budget import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from places import ROOT

from hpcsched.core.model import JobSpec
from hpcsched.errors import ConfigError
from hpcsched.sim.engine import Simulation
from hpcsched.sim.workloads import COLUMNS, Workload, read_trace
from hpcsched.store.profiles import load_profiles


@pytest.fixture
def read(tmp_path: Path):
    def read(text: str, gpus: int = 8, hosts: int = 4, **rest: str) -> Workload:
        path = tmp_path / "trace.csv"
        path.write_text(dedent(text).lstrip())
        return read_trace(path, gpus=gpus, hosts=hosts, **rest)

    return read


def shape(job: JobSpec) -> tuple[int, int, int | None]:
    return job.nodes, job.gpus_min, job.gpus_max


def test_a_job_with_a_duration_is_of_fixed_size_and_comes_at_its_time(read):
    found = read(
        """
        submit_s,duration_s,gpus,vc
        0,60,1,a
        7.5,90.25,8,b
        """
    )
    assert [(job.name, job.submit_at, shape(job)) for job in found.jobs] == [
        ("job-1", 0.0, (1, 1, 1)),
        ("job-2", 7.5, (1, 8, 8)),
    ]
    assert (found.left_out, found.rounded) == (0, 0)


def test_jobs_larger_than_a_host_are_spread_evenly_and_those_larger_than_all_are_left_out(read):
    found = read(
        """
        time,duration,gpus
        0,60,9
        1,60,12
        2,60,17
        3,60,32
        4,60,33
        5,60,1000
        """
    )
    assert [shape(job) for job in found.jobs] == [(2, 5, 5), (2, 6, 6), (3, 6, 6), (4, 8, 8)]
    assert (found.left_out, found.rounded) == (2, 2)  # 9 and 17 got one GPU more each


def test_jobs_are_in_the_order_in_which_they_come_and_keep_their_names(read):
    found = read(
        """
        Name,gpus,arrival,runtime_s
        late,1,20,5
        early,1,10,5
        as-early,1,10,5
        """
    )
    assert [job.name for job in found.jobs] == ["early", "as-early", "late"]


@pytest.mark.parametrize(
    "column", [(c, name) for c in ("arrival", "duration", "gpus") for name in COLUMNS[c]]
)
def test_every_accepted_name_of_a_column_is_read(read, column):
    names = {"arrival": "submit_s", "duration": "duration_s", "gpus": "gpus"} | {column[0]: column[1]}
    found = read(f"{','.join(names.values())}\n3,60,2\n")
    (job,) = found.jobs
    assert (job.submit_at, job.gpus_min, job.steps) == (3.0, 2, 60_000_000)


@settings(max_examples=examples(50))
@given(st.lists(st.decimals(min_value="0.000001", max_value=10**8, places=6), min_size=1, max_size=5))
def test_a_simulated_job_runs_exactly_as_long_as_the_trace_says(tmp_path_factory, durations):
    path = tmp_path_factory.mktemp("trace") / "trace.csv"
    lines = [f"{200_000_000 * i},{duration:f},12" for i, duration in enumerate(durations)]
    path.write_text("\n".join(["submit_s,duration_s,gpus", *lines]))
    read = read_trace(path, gpus=8, hosts=2)
    truth = [float(duration) for duration in durations]
    (profile,) = read.profiles
    assert [job.steps / profile.rate(6) for job in read.jobs] == truth
    machine = Simulation(read.jobs, read.profiles, gpus=8, nodes=2).run()
    ends = [job.submit_s + seconds for job, seconds in zip(machine.run.jobs.values(), truth, strict=True)]
    assert [job.ended_s for job in machine.run.jobs.values()] == ends


def test_a_job_with_a_model_and_steps_is_elastic(read):
    found = read(
        """
        submit_s,model,steps,duration_s,gpus,job
        5,ResNet-50,1200,,,elastic
        6,ResNet-50,1200,30,2,fixed
        """
    )
    elastic, fixed = found.jobs
    assert (elastic.model, elastic.steps, shape(elastic)) == ("ResNet-50", 1200, (1, 1, None))
    assert (fixed.model, shape(fixed)) == (found.profiles[0].model, (1, 2, 2))
    assert (
        Simulation(found.jobs, [*found.profiles, *load_profiles("marble-summit")], gpus=6).run().run.finished
    )


def test_only_jobs_of_known_duration_bring_a_profile(read):
    assert read("arrival,model,steps\n0,ResNet-50,10\n").profiles == ()


def test_apps_whose_steps_are_known_need_none(read):
    found = read(
        """
        workload,job,submit_s,app,gpus,batch
        1,a,0,cifar10,6,2048
        1,b,1,cifar10,6,600
        1,c,2,bert,1,4
        1,d,3,ncf,1,32768
        2,a,4,ncf,1,32768
        """,
        workload="1",
    )
    assert [(job.name, job.model, job.steps, shape(job)) for job in found.jobs] == [
        ("a", "cifar10 (global batch 1024)", 5722, (1, 1, None)),
        ("b", "cifar10 (global batch 512)", 10615, (1, 1, None)),
        ("c", "bert (global batch 12)", 14774, (1, 1, None)),
        ("d", "ncf (global batch 32768)", 1548, (1, 1, None)),
    ]
    assert Simulation(found.jobs, load_profiles("pollux-t4"), gpus=4, nodes=2).run().run.finished


def test_steps_are_known_for_the_shipped_profiles_only():
    lines = (ROOT / "profiles" / "pollux-t4-steps.csv").read_text().splitlines()[1:]
    models = {"{} (global batch {})".format(*line.split(",")) for line in lines}
    assert models == {p.model for p in load_profiles("pollux-t4")} - {"imagenet (global batch 80)"}


def test_spaces_blank_lines_and_a_byte_order_mark_do_not_matter(read):
    (job,) = read("\ufeffsubmit_s, duration_s ,gpus\n\n 1 , 2 , 1 \n\n").jobs
    assert (job.submit_at, job.steps) == (1.0, 2_000_000)


HEADER = "submit_s,duration_s,gpus,name"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", ":1: no column for the arrival among none; accepted: submit_s | arrival | arrival_s | "),
        ("duration_s,gpus\n", ":1: no column for the arrival among duration_s, gpus; accepted: submit_s | "),
        (
            "time,gpus\n",
            ":1: no column for the duration among time, gpus; accepted: duration_s | duration | ",
        ),
        ("time,duration\n", ":1: no column for the GPUs among time, duration; accepted: gpus | num_gpus | "),
        ("time,arrival,duration_s,gpus\n", ":1: columns time and arrival; accepted: one of them"),
        (HEADER, ": no jobs; accepted: a line for each job"),
        (f"{HEADER}\n1,2,1,a\n1,2,1\n", ":3: 3 values; accepted: 4: submit_s, duration_s, gpus, name"),
        (
            f"{HEADER},a\x1bb{'c' * 500}\n1\n",
            ":2: 1 values; accepted: 5: submit_s, duration_s, gpus, name, a\\x1bbc",
        ),
        (f"{HEADER}\n1,soon,1,a\n", ":2: duration_s: 'soon'; accepted: seconds, such as 90 or 12.5"),
        (f"{HEADER}\n-1,2,1,a\n", ":2: submit_s: '-1'; accepted: seconds, such as 90 or 12.5"),
        (f"{HEADER}\n,2,1,a\n", ":2: submit_s: nothing; accepted: seconds, such as 90 or 12.5"),
        (f"{HEADER}\n1,nan,1,a\n", ":2: duration_s: 'nan'; accepted: seconds, such as 90 or 12.5"),
        (f"{HEADER}\n1,0.0,1,a\n", ":2: duration_s: no time at all; accepted: seconds, more than 0"),
        (f"{HEADER}\n1,2,0,a\n", ":2: gpus: '0'; accepted: a whole number of at least 1"),
        (f"{HEADER}\n1,2,1.5,a\n", ":2: gpus: '1.5'; accepted: a whole number of at least 1"),
        (f"{HEADER}\n1,2,1,a\n1,2,1,a\n", ":3: name: a again, after line 2; accepted: a name that no other"),
        (f"{HEADER}\n1,2,1,a b\n", ":2: name: 'a b'; accepted: 1 to 64 of A-Z a-z 0-9 . _ = -"),
        (f"{HEADER}\n1,,1,a\n", ":2: duration_s: nothing; accepted: seconds; or a model, and its steps"),
        (
            "time,app\n1,ufo\n",
            ":2: app: 'ufo' without steps; accepted: a column steps, or duration_s, or one of",
        ),
        ("time,model,steps\n1,a,0\n", ":2: steps: '0'; accepted: a whole number of at least 1"),
        (
            "time,model,steps,workload\n1,a,1,x\n1,a,1,y\n",
            ":3: workload: 'x' and 'y' in one file; accepted: one of them, chosen with --workload",
        ),
        (f'{HEADER}\n1,2,1,"a\n', ": unexpected end of data; accepted: a readable CSV file"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_place(read, tmp_path, text, message):
    with pytest.raises(ConfigError) as error:
        read(text)
    assert str(error.value).startswith(f"{tmp_path}/trace.csv{message}")


def test_a_workload_that_is_not_in_the_file_is_refused(read):
    with pytest.raises(ConfigError, match="no jobs of workload '3'; accepted: a line for each job"):
        read("time,model,steps,workload\n1,a,1,x\n", workload="3")


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="No such file or directory; accepted: a readable CSV file"):
        read_trace(tmp_path / "none.csv", gpus=1, hosts=1)
    (tmp_path / "latin.csv").write_bytes(b"time,dur\xe9e\n")
    with pytest.raises(ConfigError, match="accepted: a readable CSV file"):
        read_trace(tmp_path / "latin.csv", gpus=1, hosts=1)
