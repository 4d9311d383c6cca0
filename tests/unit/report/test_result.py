"""The measures of a result, on schedules worked out by hand and on the MARBLE paper's sets."""

from dataclasses import dataclass, field

import msgspec
import pytest

from hpcsched.core.model import Attempt, Ended, JobSpec, JobState, Kind, Role
from hpcsched.report.result import Result, summarise, to_json


@dataclass
class Job:
    id: int
    attempts: list[Attempt]
    submit_s: float = 0.0
    state: JobState = JobState.COMPLETED
    step: int | None = 100
    steps_repeated: int | None = 0
    metrics: dict[str, float] = field(default_factory=dict)
    overhead: dict[int, float] = field(default_factory=dict)

    @property
    def spec(self) -> JobSpec:
        return JobSpec(name=f"job-{self.id}", kind=Kind.REPLAY, model="m", steps=100)

    @property
    def started_s(self) -> float | None:
        return self.attempts[0].start_s if self.attempts else None

    @property
    def ended_s(self) -> float | None:
        return self.attempts[-1].end_s if self.attempts and self.state.final else None


def attempt(number, gpus, start_s, end_s, ended=Ended.COMPLETED, signalled_s=None):
    return Attempt(
        number=number,
        gpus=tuple(range(gpus)),
        role=Role.PRIMARY,
        start_s=start_s,
        end_s=end_s,
        ended=ended,
        signalled_s=signalled_s,
    )


def test_a_change_in_place_leaves_no_gap_and_costs_what_it_stood_still():
    small = attempt(1, 2, 0.0, 100.0, Ended.RESIZED)
    small.stopped_s = 3.0
    job = Job(id=1, attempts=[small, attempt(2, 4, 100.0, 150.0)], overhead={1: 13.0})
    result = summarise([job], policy="p", gpus=4, overheads=overhead_of)
    (found,) = result.jobs
    first, second = found.attempts
    assert (first.ended, first.launch_s, first.suspend_s) == (Ended.RESIZED, 10.0, 3.0)
    assert (second.start_s, second.overhead_s) == (100.0, 0.0)
    assert (found.switches, found.suspensions, found.switch_s, found.queued_s) == (1, 0, 3.0, 0.0)
    assert result.overhead_share == 13.0 / 150.0
    assert b'"ended":"resized"' in to_json([result])


def overhead_of(job, attempt):
    return job.overhead.get(attempt.number, 0.0)


def example(**options):
    moved = Job(
        id=1,
        attempts=[attempt(1, 2, 0.0, 100.0, Ended.SUSPENDED, signalled_s=90.0), attempt(2, 4, 110.0, 200.0)],
        overhead={1: 25.0, 2: 20.0},
    )
    late = Job(id=2, attempts=[attempt(1, 1, 60.0, 160.0)], submit_s=50.0, overhead={1: 5.0})
    return summarise(
        [moved, late],
        policy="p",
        gpus=4,
        lower_bound_s=160.0,
        mean_jct_bound_s=100.0,
        overheads=overhead_of,
        **options,
    )


def test_every_measure_by_hand():
    result = example()
    assert result.makespan_s == 200.0
    assert result.mean_jct_s == (200.0 + 110.0) / 2
    gpu_s = 2 * 100 + 4 * 90 + 1 * 100
    assert result.gpu_hours == pytest.approx(gpu_s / 3600)
    assert result.utilisation == pytest.approx(gpu_s / (4 * 200))
    assert result.overhead_share == pytest.approx((25 + 20 + 5) / 200)
    assert result.gap == pytest.approx(0.25)
    assert result.p95_jct_s == 200.0
    assert (result.mean_jct_bound_s, result.jct_gap) == (100.0, pytest.approx(0.55))
    assert (result.mean_wait_s, result.p95_wait_s) == (5.0, 10.0)
    assert (result.mean_queued_s, result.p95_queued_s) == (10.0, 10.0)  # 100 to 110, and 50 to 60
    assert (result.switches, result.jobs_total, result.jobs_completed) == (1, 2, 2)


def test_a_jobs_suspensions_and_what_they_cost():
    moved, late = example().jobs
    assert (moved.suspensions, late.suspensions) == (1, 0)
    assert [a.suspend_s for a in moved.attempts] == [10.0, 0.0]
    assert [a.launch_s for a in moved.attempts] == [15.0, 20.0]
    assert moved.overhead_s == 45.0
    assert moved.switch_s == 30.0
    assert late.switch_s == 0.0
    assert moved.gpu_hours == pytest.approx(560 / 3600)
    assert (moved.wait_s, moved.queued_s, moved.switches) == (0.0, 10.0, 1)
    assert (late.wait_s, late.queued_s, late.switches) == (10.0, 10.0, 0)


def test_the_measures_are_the_same_without_the_jobs():
    whole, lean = example(), example(keep_jobs=False)
    assert lean.jobs == ()
    assert msgspec.structs.replace(whole, jobs=()) == lean


def test_overhead_and_lost_work_of_jobs_side_by_side_are_shares_of_what_they_held():
    wide = Job(id=1, attempts=[attempt(1, 4, 0.0, 100.0)], overhead={1: 10.0})
    failed = Job(id=2, attempts=[attempt(1, 1, 0.0, 100.0, Ended.FAILED)], overhead={1: 30.0})
    result = summarise(
        [wide, failed],
        policy="p",
        gpus=5,
        overheads=overhead_of,
        losses=lambda job, attempt: 70.0 if attempt.ended is Ended.FAILED else 0.0,
    )
    assert result.overhead_of_held == pytest.approx((4 * 10 + 30) / 500)
    assert result.lost_of_held == pytest.approx(70 / 500)
    assert result.overhead_share == pytest.approx(40 / 100)
    assert [job.lost_s for job in result.jobs] == [0.0, 70.0]


@pytest.mark.parametrize(
    ("ends", "switches"),
    [
        pytest.param([Ended.SUSPENDED, Ended.COMPLETED], 1, id="resumed"),
        pytest.param([Ended.SUSPENDED], 0, id="not resumed yet"),
        pytest.param([Ended.RESIZED, Ended.RESIZED, Ended.COMPLETED], 2, id="resized"),
        pytest.param([Ended.FAILED, Ended.LOST, Ended.COMPLETED], 0, id="started again"),
    ],
)
def test_switches_are_what_the_policy_did(ends, switches):
    attempts = [attempt(i, 1, 10.0 * i, 10.0 * i + 10, end) for i, end in enumerate(ends)]
    state = JobState.COMPLETED if ends[-1] is Ended.COMPLETED else JobState.SUSPENDED
    result = summarise([Job(id=1, attempts=attempts, state=state)], policy="p", gpus=1)
    assert (result.switches, result.jobs[0].switches) == (switches, switches)


def test_p95_is_the_nearest_rank():
    jobs = [Job(id=i, attempts=[attempt(1, 1, float(i), i + 5.0)]) for i in range(1, 41)]
    result = summarise(jobs, policy="p", gpus=100)
    assert (result.p95_jct_s, result.p95_wait_s) == (43.0, 38.0)
    assert result.mean_wait_s == 20.5


def test_only_completed_jobs_have_a_jct():
    failed = Job(id=1, attempts=[attempt(1, 1, 0.0, 3.0, Ended.FAILED)], state=JobState.FAILED)
    cancelled = Job(id=2, attempts=[], state=JobState.CANCELLED)
    done = Job(id=3, attempts=[attempt(1, 1, 0.0, 90.0)])
    assert summarise([failed, cancelled, done], policy="p", gpus=2).mean_jct_s == 90.0
    assert summarise([failed], policy="p", gpus=2).mean_jct_s is None
    result = summarise([failed, cancelled, done], policy="p", gpus=2)
    assert [job.wait_s for job in result.jobs] == [0.0, None, 0.0]
    assert [job.queued_s for job in result.jobs] == [None, None, 0.0]
    assert (result.jobs_total, result.jobs_completed, result.mean_queued_s) == (3, 1, 0.0)


def test_attempts_that_last_count_until_now():
    running = Job(id=1, attempts=[attempt(1, 2, 10.0, None, None)], state=JobState.RUNNING)
    result = summarise([running], policy="p", gpus=2, now_s=110.0)
    assert result.makespan_s == 110.0
    assert result.gpu_hours == pytest.approx(200 / 3600)
    assert result.jobs[0].end_s is None
    assert result.jobs[0].attempts[0].end_s is None


def test_nothing_at_all():
    result = summarise([], policy="p", gpus=2)
    assert (result.makespan_s, result.utilisation, result.overhead_share) == (0.0, 0.0, 0.0)
    assert (result.mean_jct_s, result.p95_jct_s, result.gap) == (None, None, None)


@pytest.mark.parametrize(
    ("makespan_s", "overhead_s", "share"),
    [
        # Starts (and one suspend) under the fitted Summit profile: ResNet-50 21.70 s on 3 GPUs, ...
        pytest.param(496.7, [21.6993, 21.6993, 24.8078], 0.137, id="set 1"),
        pytest.param(608.0, [26.3062, 20.3887, 24.4583 + 48.0797, 26.0305], 0.239, id="set 2"),
        pytest.param(501.0, [21.6993, 24.8078 + 45.4107, 26.3062, 16.8876], 0.270, id="set 3"),
    ],
)
def test_overhead_share_is_that_of_the_marble_paper(makespan_s, overhead_s, share):
    jobs = [
        Job(id=i, attempts=[attempt(1, 1, 0.0, makespan_s)], overhead={1: s})
        for i, s in enumerate(overhead_s)
    ]
    result = summarise(jobs, policy="marble", gpus=6, overheads=overhead_of)
    assert result.overhead_share == pytest.approx(share, abs=5e-4)


def test_json_has_the_published_shape_and_reads_back():
    result = example()
    raw = msgspec.json.decode(to_json([result]))
    assert raw["schema"] == 1
    assert set(raw) >= {"policy", "gpus", "makespan_s", "mean_jct_s", "gpu_hours", "utilisation"}
    assert set(raw) >= {"overhead_share", "lower_bound_s", "jobs"}
    assert set(raw) >= {"gap", "mean_jct_bound_s", "jct_gap", "p95_jct_s", "switches", "label"}
    assert set(raw) >= {"mean_wait_s", "p95_wait_s", "mean_queued_s", "p95_queued_s"}
    job = raw["jobs"][0]
    assert set(job) >= {"id", "name", "submit_s", "start_s", "end_s", "state", "steps", "steps_repeated"}
    assert job["state"] == "COMPLETED"
    first = job["attempts"][0]
    assert (first["gpus"], first["role"], first["ended"]) == ([0, 1], "primary", "suspended")
    assert msgspec.json.decode(to_json([result]), type=Result) == result


def test_json_of_several_policies_is_a_list_in_order():
    result = example()
    raw = msgspec.json.decode(to_json([result, result]))
    assert raw["schema"] == 1
    assert [r["policy"] for r in raw["results"]] == ["p", "p"]
