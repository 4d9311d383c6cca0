"""What a pool asks for: within caps and budget, where it pays, backed off after failures, and why."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

from hpcsched.pool.deciding import Forecast, Situation, Work, backoff_s, decide
from hpcsched.pool.foresight import Rest, followed, forecast
from hpcsched.pool.poolfile import Pool, Template
from hpcsched.pool.record import Allocation, State, Trouble, Wanted
from hpcsched.sim.blocks import Block
from hpcsched.testing.builders import a_job, a_profile

SMALL = Template(name="small", gpus_per_node=2, limit_s=3600.0)
LARGE = Template(name="large", gpus_per_node=8, limit_s=3600.0, most=1)
POOL = Pool(
    dir=Path("/run"), templates=(SMALL, LARGE), max_allocations=4, max_gpus=12, gpu_hours=40.0, idle_s=60.0
)
LEADS = Work(waiting=3, running=2, leads=True, wanted_gpus=3)


def held(template: Template, state: State = State.RUNNING, n: int = 1) -> Allocation:
    return Allocation(
        name=f"pool-x-{n}",
        template=template.name,
        gpus=template.gpus,
        limit_s=template.limit_s,
        asked=0.0,
        state=state,
    )


def foresee(small: float, large: float, *, without: float = 1000.0, cost: float = 0.0):
    ends = {None: without, "small": small, "large": large}

    def of(template: Template | None) -> Forecast:
        key = template.name if template else None
        return Forecast(end_s=ends[key], gpu_s=5000.0 + (cost if template else 0.0))

    return of


def test_it_asks_for_what_ends_the_queue_soonest_and_says_why() -> None:
    decision = decide(POOL, Situation(now=0.0, work=LEADS, waits={"large": 120.0}), foresee(900.0, 400.0))
    assert decision.template is LARGE
    assert decision.why[0] == "3 jobs wait: all would be done in 6:40 instead of 16:40 (it would wait 2:00)"


def test_of_ends_that_are_alike_the_cheaper_one_is_taken() -> None:
    def of(template: Template | None) -> Forecast:
        return {
            None: Forecast(end_s=1000.0, gpu_s=4000.0),
            "small": Forecast(end_s=410.0, gpu_s=4000.0),
            "large": Forecast(end_s=400.0, gpu_s=4500.0),
        }[template.name if template else None]

    assert decide(POOL, Situation(now=0.0, work=LEADS), of).template is SMALL


@pytest.mark.parametrize(
    ("small", "cost", "why"),
    [
        (990.0, 0.0, "all is done in 16:40 without it, 0:10 sooner with it"),
        (900.0, 201.0, "1:40 sooner on 2 GPUs (0.056 GPU-hours) would cost 0.056"),
        (inf, 0.0, "the queue would not end with it either"),
    ],
)
def test_it_asks_for_nothing_that_does_not_pay(small: float, cost: float, why: str) -> None:
    pool = replace(POOL, templates=(SMALL,))
    decision = decide(pool, Situation(now=0.0, work=LEADS), foresee(small, inf, cost=cost))
    assert decision.template is None and decision.why == (f"small: {why}",)


def test_the_first_one_is_asked_for_whatever_it_costs_and_others_where_they_pay() -> None:
    work = Work(waiting=5, wanted_gpus=5)
    first = decide(POOL, Situation(now=0.0, work=work), foresee(800.0, 300.0, without=inf, cost=1e9))
    assert first.template is LARGE and first.why[0].startswith("no agent leads the run, and 5 jobs wait")
    never = decide(POOL, Situation(now=0.0, work=work), foresee(inf, inf, without=inf))
    assert never.template is LARGE and "for not all of which one allocation is enough" in never.why[0]
    # It waits, has just started, or is about to lead the run in the place of another one.
    for state in (State.ASKED, State.WAITING, State.RUNNING):
        one = held(LARGE, state)
        at = Situation(now=0.0, work=work, held=[one], coming=[one])
        assert decide(POOL, at, foresee(990.0, 300.0)).template is None
        assert decide(POOL, at, foresee(500.0, 300.0)).template is SMALL
        assert decide(POOL, at, foresee(500.0, 300.0, cost=1e9)).template is None


@pytest.mark.parametrize(
    ("at", "why"),
    [
        ({"held": [held(SMALL, n=i) for i in range(4)]}, "4 allocations wait or run: max_allocations = 4"),
        ({"held": [held(LARGE)], "used_gpu_s": 0.0}, "large: 1 of it wait or run: its max"),
        ({"held": [held(SMALL, n=i) for i in range(3)]}, "large: 6 GPUs are asked for or held, 8 more"),
        ({"used_gpu_s": 100000.0, "promised_gpu_s": 20000.0}, "large: up to 8 GPU-hours, and 6.67 of"),
        ({"refused": {"large": "Invalid account"}}, "large: the batch system would not take it: Invalid"),
        ({"troubles": {"large": Trouble(count=2, last=0.0, why="denied")}}, "large: tried again in 2:20"),
        ({"troubles": {"large": Trouble(count=5, last=0.0, why="denied")}}, "large: set aside after 5"),
    ],
)  # fmt: skip
def test_no_cap_is_passed_and_no_failure_is_repeated_at_once(at: dict[str, object], why: str) -> None:
    decision = decide(POOL, Situation(now=100.0, work=LEADS, **at), foresee(1000.0, 10.0))
    assert decision.template is None
    assert any(one.startswith(why) for one in decision.why), decision.why


def test_failures_are_backed_off_exponentially_up_to_an_hour() -> None:
    assert [backoff_s(n, 60.0) for n in (1, 2, 3, 10, 10**6)] == [120.0, 240.0, 480.0, 3600.0, 3600.0]


def test_what_waits_is_given_up_when_nothing_needs_it() -> None:
    waiting = held(SMALL, state=State.WAITING, n=2)
    at = Situation(now=0.0, work=Work(running=2, leads=True), held=[held(SMALL), waiting])
    decision = decide(POOL, at, foresee(1.0, 1.0))
    assert decision.template is None and decision.give_up == (waiting,)
    paused = decide(POOL, replace(at, work=LEADS, wanted=Wanted.PAUSE), foresee(1.0, 1.0))
    assert paused.template is None and paused.give_up == () and paused.why == ("paused",)


def test_jobs_of_unknown_length_are_counted() -> None:
    at = Situation(now=0.0, work=replace(LEADS, wanted_gpus=3, free_gpus=1))
    assert decide(POOL, at, lambda _: None).template is SMALL
    one = held(SMALL, State.WAITING)
    coming = replace(at, held=[one], coming=[one])
    decision = decide(POOL, coming, lambda _: None)
    assert decision.template is None and "3 GPUs are needed at least, 3 are free" in decision.why[0]


def test_a_forecast_knows_waits_ends_and_idle_hosts() -> None:
    profile = a_profile("m", [1.0], start_s=0.0, suspend_s=0.0, resume_s=0.0)
    jobs = [a_job(f"j{i}", "m", 100, gpus=(1, 1)) for i in range(4)]
    rest = Rest(jobs=jobs, profiles=[profile])
    assert forecast(rest, [], 60.0) == Forecast(end_s=inf, gpu_s=inf)
    assert forecast(rest, [Block(gpus=1)], 60.0) == Forecast(end_s=400.0, gpu_s=400.0)
    soon = forecast(rest, [Block(gpus=1), Block(gpus=1, start_s=100.0)], 60.0)
    assert soon == Forecast(end_s=300.0, gpu_s=500.0)  # the last 100 s: one of them is idle, and leaves
    ends = forecast(rest, [Block(gpus=1, lasts_s=150.0), Block(gpus=1, lasts_s=600.0)], 60.0)
    assert ends == Forecast(end_s=310.0, gpu_s=460.0)  # one of them saves 60 s before its end
    late = forecast(rest, [Block(gpus=1), Block(gpus=2, start_s=390.0)], 60.0)
    assert late is not None and late.end_s == 400.0 and late.gpu_s > 400.0
    fast = forecast(replace(rest, speed=10.0), [Block(gpus=1, start_s=7.0)], 60.0)
    assert fast == Forecast(end_s=47.0, gpu_s=40.0)


def test_what_is_there_ends_and_others_are_asked_for_then() -> None:
    again = Block(gpus=1, start_s=100.0, lasts_s=200.0)  # its wait, and its limit
    found = followed([Block(gpus=2, lasts_s=150.0), Block(gpus=1, start_s=50.0, lasts_s=150.0)], again)
    assert [one.start_s for one in found[2:]] == [360.0, 720.0, 1080.0, 1440.0, 1800.0]
    assert [one.lasts_s for one in found[2:]] == [200.0, 200.0, 200.0, 200.0, inf]
    assert followed([Block(gpus=2)], again) == [Block(gpus=2)]
    profile = a_profile("m", [1.0], start_s=0.0, suspend_s=0.0, resume_s=0.0)
    rest = Rest(jobs=[a_job("j", "m", 200, gpus=(1, 1))], profiles=[profile])
    late = forecast(rest, followed([Block(gpus=1, lasts_s=150.0)], again), 60.0)
    # It saves 60 s before each end, and goes on: 90 steps until then, the rest after the wait and a minute.
    assert late == Forecast(end_s=310.0 + 110.0, gpu_s=150.0 + 110.0)
