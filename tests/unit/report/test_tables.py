"""The tables, as a terminal shows them."""

import math
import re

import pytest

from hpcsched.core.model import Ended, JobState, Role
from hpcsched.report.result import AttemptResult, JobResult, Result
from hpcsched.report.tables import comparison_table, duration, headline, job_table, side_by_side


def stretch(start_s, end_s, gpus, role, ended=Ended.COMPLETED):
    return AttemptResult(start_s=start_s, end_s=end_s, gpus=tuple(range(gpus)), role=role, ended=ended)


def job(job_id=1, attempts=(), end_s=100.0, state=JobState.COMPLETED, **changes):
    fields = {
        "name": f"job-{job_id}",
        "model": "ResNet-50",
        "submit_s": 0.0,
        "start_s": 0.0,
        "steps": 3600,
        "step": 3600,
        "steps_repeated": 0,
    }
    return JobResult(id=job_id, attempts=tuple(attempts), end_s=end_s, state=state, **(fields | changes))


def result(*jobs, policy="marble", **changes):
    fields = {
        "makespan_s": 608.0,
        "mean_jct_s": 407.0,
        "gpu_hours": 0.91,
        "utilisation": 0.899,
        "overhead_share": 0.239,
        "p95_jct_s": 608.0,
        "mean_wait_s": 37.3,
        "lower_bound_s": 501.2,
        "gap": 0.213,
        "mean_jct_bound_s": 306.0,
        "jct_gap": 0.33,
        "switches": 1,
        "jobs_total": len(jobs),
        "jobs_completed": len(jobs),
    }
    return Result(policy=policy, gpus=6, jobs=jobs, **(fields | changes))


MOVED = job(
    3,
    [
        stretch(111.8, 549.2, 2, Role.SECONDARY, Ended.SUSPENDED),
        stretch(549.2, 608.0, 3, Role.PRIMARY),
    ],
    start_s=111.8,
    end_s=608.0,
    suspensions=1,
    overhead_s=74.11,
    metrics={"accuracy": 0.95},
)


def test_job_table():
    other = job(12, [stretch(0.0, 501.2, 4, Role.PRIMARY)], end_s=501.2, model="VGG-16")
    assert job_table(result(MOVED, other)).splitlines() == [
        "JOBID  NAME    MODEL      ST  SUBMIT(s)  START(s)  END(s)  JCT(s)  GPUS     STEPS  SUSP  COST(s)"
        "  ACCURACY",
        "    3  job-3   ResNet-50  CD        0.0     111.8   608.0   608.0  2s > 3p   3600     1     74.1"
        "    0.9500",
        "   12  job-12  VGG-16     CD        0.0       0.0   501.2   501.2  4p        3600     0      0.0"
        "         -",
    ]


@pytest.mark.parametrize("width", [80, 100, 120])
def test_job_table_fits_the_terminal_and_keeps_what_matters(width):
    table = job_table(result(MOVED), width=width)
    assert max(map(len, table.splitlines())) <= width
    header = table.splitlines()[0].split()
    assert {"JOBID", "NAME", "END(s)", "GPUS"} <= set(header)


def test_names_are_never_cut():
    name = "x" * 64
    assert name in job_table(result(job(name=name)), width=40)


def test_times_of_an_hour_and_more_are_clock_times_for_the_whole_table():
    table = job_table(result(job(1, end_s=59.6), job(2, end_s=3725.4)))
    assert "END  " in table.splitlines()[0]
    assert "0:01:00" in table.splitlines()[1]
    assert "1:02:05" in table.splitlines()[2]


def test_a_job_that_never_started():
    line = job_table(result(job(state=JobState.CANCELLED, start_s=None, end_s=None, step=0))).splitlines()[1]
    assert line.split() == ["1", "job-1", "ResNet-50", "CA", "0.0", "-", "-", "-", "-", "0/3600", "0", "0.0"]


def test_long_stories_of_gpu_counts_are_shortened_and_repeats_told_once():
    many = [stretch(0.0, 1.0, n, Role.SECONDARY) for n in (1, 1, 2, 1, 3, 1, 4)]
    assert "1s > 2s > .. > 4s" in job_table(result(job(1, many)))


def test_every_state_has_a_code():
    assert all(state.code.isupper() for state in JobState)


def rows_of(table):
    """The cells of each line by its label; those of a label that comes twice are in its first line."""
    rows = {}
    for line in table.splitlines():
        label, *cells = re.split(r"  +", line.strip())
        rows.setdefault(label, cells)
    return rows


LSF = {
    "policy": "exclusive",
    "makespan_s": 940.0,
    "mean_jct_s": 692.0,
    "p95_jct_s": 940.0,
    "mean_wait_s": 378.6,
    "utilisation": 0.5,
    "overhead_share": 0.0,
    "gap": 0.875,
    "jct_gap": 1.26,
    "switches": 0,
    "gpu_hours": 1.57,
}


def test_comparison_is_relative_to_the_first():
    table = comparison_table([result(MOVED, **LSF), result(MOVED)])
    rows = rows_of(table)
    assert table.splitlines()[0].split() == ["exclusive", "marble"]
    assert rows["makespan(s)"] == ["940.0", "608.0", "-35.3%"]
    assert rows["lower bound(s)"] == ["501.2", "501.2"]
    assert rows["gap to it(%)"] == ["87.5", "21.3"]
    assert rows["mean JCT(s)"] == ["692.0", "407.0", "-41.2%"]
    assert rows["p95 JCT(s)"] == ["940.0", "608.0", "-35.3%"]
    assert rows["mean wait(s)"] == ["378.6", "37.3", "-90.1%"]
    assert rows["utilisation(%)"] == ["50.0", "89.9", "+39.9pp"]
    assert rows["GPU-hours"] == ["1.57", "0.91", "-42.0%"]
    assert rows["overhead(%)"] == ["0.0", "23.9", "+23.9pp"]
    assert rows["switches"] == ["0", "1", "+1"]
    assert "jobs completed" not in rows
    bounds = [line.split()[-1] for line in table.splitlines() if "lower bound" in line or "gap" in line]
    assert bounds == ["501.2", "21.3", "306.0", "33.0"]


def test_it_is_said_what_changes_are_relative_to():
    lines = comparison_table([result(MOVED, **LSF), result(MOVED)], width=80).splitlines()
    assert lines[-1] == "changes are against `exclusive`: % of it, or percentage points (pp)"
    assert "changes" not in comparison_table([result(MOVED)])
    so_far = result(MOVED, label="so far")
    assert "`marble`" in comparison_table([so_far, result(MOVED), result(MOVED)], base=1).splitlines()[-1]


def test_three_policies_with_their_changes_fit_on_the_smallest_screen():
    table = comparison_table([result(MOVED, **LSF), result(MOVED), result(MOVED, policy="planner")], width=80)
    lines = table.splitlines()
    assert max(map(len, lines)) <= 80 and len(lines) <= 14
    assert rows_of(table)["makespan(s)"] == ["940.0", "608.0", "-35.3%", "608.0", "-35.3%"]


def test_changes_may_be_relative_to_another_than_the_first():
    so_far = result(MOVED, label="so far", jobs_total=4)
    table = comparison_table([so_far, result(MOVED, **LSF), result(MOVED)], base=1)
    rows = rows_of(table)
    assert table.split("\n")[0].split() == ["so", "far", "exclusive", "marble"]
    assert rows["makespan(s)"] == ["608.0", "940.0", "608.0", "-35.3%"]
    assert rows["jobs completed"] == ["1/4", "1/1", "1/1"]


def test_where_changes_do_not_fit_all_policies_stay_side_by_side_without_them():
    results = [result(MOVED, policy=f"policy-{i}") for i in range(6)]
    table = comparison_table(results, width=80)
    assert max(map(len, table.splitlines())) <= 80
    assert rows_of(table)["makespan(s)"] == ["608.0"] * 6


def test_comparison_goes_on_below_where_the_terminal_ends():
    results = [result(MOVED, policy=f"policy-{i}") for i in range(8)]
    table = comparison_table(results, width=80)
    assert max(map(len, table.splitlines())) <= 80
    assert all(f"policy-{i}" in table for i in range(8))
    assert len(table.split("\n\n")) == 2
    assert all(block.count("makespan") == 1 for block in table.split("\n\n"))


def test_side_by_side_shows_each_job_under_each_policy():
    alone = job(3, [stretch(0.0, 90.0, 6, Role.PRIMARY)], end_s=90.0)
    stopped = job(4, [stretch(0.0, None, 1, Role.SECONDARY, None)], end_s=None, state=JobState.RUNNING)
    table = side_by_side([result(alone, stopped, policy="exclusive"), result(MOVED)])
    assert table.splitlines() == [
        "when each job ended (s), on how many GPUs as primary (p) or secondary (s):",
        "JOBID  NAME   exclusive  GPUS  marble  GPUS",
        "    3  job-3       90.0  6p     608.0  2s>3p",
        "    4  job-4          R  1s         -  -",
    ]


def test_side_by_side_without_gpu_counts_where_they_do_not_fit():
    results = [result(MOVED, policy=f"policy-{i}") for i in range(5)]
    table = side_by_side(results, width=80)
    assert max(map(len, table.splitlines())) <= 80
    assert table.splitlines()[0] == "when each job ended (s):"
    assert table.splitlines()[-1].split() == ["3", "job-3", *["608.0"] * 5]


def test_side_by_side_shortens_long_stories_more():
    many = [stretch(0.0, 1.0, n, Role.SECONDARY) for n in (1, 2, 3, 4)]
    assert "1s>..>4s" in side_by_side([result(job(1, many))])


def test_without_a_bound_and_without_finished_jobs():
    bare = result(lower_bound_s=None, gap=None, mean_jct_s=None, mean_jct_bound_s=None, jct_gap=None)
    assert "bound" not in headline(bare)
    assert "bound" not in comparison_table([bare, bare])
    assert rows_of(comparison_table([bare, bare]))["mean JCT(s)"] == ["-", "-"]
    assert job_table(bare).startswith("JOBID")


def test_comparison_of_nothing():
    assert comparison_table([]).splitlines()[1].strip() == "makespan(s)"


def test_headline_and_durations():
    assert headline(result(MOVED)) == (
        "marble on 6 GPUs: makespan 608.0 s, mean JCT 407.0 s, 0.91 GPU-hours, utilisation 90%, "
        "21.3% above the bound"
    )
    long = result(MOVED, makespan_s=7200.0, label="as it was")
    assert headline(long).startswith("as it was (marble) on 6 GPUs: makespan 2:00:00, mean JCT 0:06:47,")
    assert duration(59.94) == "59.9 s"
    assert duration(3600) == "1:00:00"
    assert duration(360000) == "100:00:00"
    assert duration(math.inf) == "inf"


def test_cpu_slots_are_called_so_and_devices_where_others_have_gpus():
    slots = result(MOVED, devices=["cpu"])
    assert headline(slots).startswith("marble on 6 CPU slots: ")
    assert "0.91 CPU slot-hours, " in headline(slots) and "GPU" not in comparison_table([slots])
    assert "device-hours" in comparison_table([slots, result(MOVED)])
