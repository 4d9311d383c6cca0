"""The scaling engine's rules one by one (NEARCHUS, section IV)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from hpcsched.contract.seats import Seat
from hpcsched.core.model import Usage
from hpcsched.core.reasons import Why
from hpcsched.policy.cpu.configurations import CpuShape, Rules, SeenUsage, balanced
from hpcsched.policy.cpu.dtconfig import MOST_CHANGES, ScalingMove, ScalingSearch, ScalingStep, look

RULES = Rules(budget=10_000)


def seats_of(servers: Sequence[int], workers: Sequence[int]) -> tuple[Seat, ...]:
    return tuple(
        Seat(server=server, share=share / 100)
        for server, shares in ((True, servers), (False, workers))
        for share in shares
    )


def usage_of(
    seats: Sequence[Seat], used: Sequence[float] | float, rate: float, *full: float, samples: int = 30
) -> Usage:
    each = [used] * len(seats) if isinstance(used, float) else used
    net = (*full, *(0.0 for _ in seats[len(full) :]))
    cpu = tuple(seat.share * part for seat, part in zip(seats, each, strict=True))
    return Usage(rate=rate, cpu=cpu, net=net, samples=samples, stable=True)


class Job:
    """A job that is measured and goes where it is told."""

    def __init__(
        self, servers: Sequence[int] = (100,), workers: Sequence[int] = (100, 100), **rules: int
    ) -> None:
        self.seats, self.search = seats_of(servers, workers), ScalingSearch()
        self.rules = Rules(budget=rules.pop("budget", 10_000), **rules)

    def measured(
        self, used: Sequence[float] | float, rate: float, *full: float, room: int = 10_000, goes: bool = True
    ) -> ScalingStep | None:
        usage = usage_of(self.seats, used, rate, *full)
        found = look(self.search, self.seats, usage, self.rules, room)
        if found is not None:
            self.search = found.search
            if found.shape is not None and goes:
                self.seats = seats_of(found.shape.servers, found.shape.workers)
        return found

    @property
    def shape(self) -> CpuShape:
        return CpuShape.of(self.seats)


def why(found: ScalingStep | None) -> Why | None:
    return found.reason.why if found and found.reason else None


def test_it_starts_with_one_server_two_workers_and_r0_of_the_budget() -> None:
    assert RULES.first() == CpuShape(servers=(500,), workers=(500, 500))
    assert Rules(budget=10_000, servers=2, workers=3, start=0.5).first() == CpuShape.even(2, 3, 5_000)
    assert Rules(budget=30).first() == CpuShape(servers=(10,), workers=(10, 10))


@pytest.mark.parametrize(("used", "expected"), [(0.901, Why.MORE_CORES), (0.89, Why.UTILISATION_BOTTLENECK)])
def test_from_90_percent_on_there_is_no_bottleneck(used: float, expected: Why) -> None:
    assert why(Job().measured(used, 1.0)) is expected


@pytest.mark.parametrize(
    ("full", "expected"), [(0.11, Why.NETWORK_BOTTLENECK), (0.10, Why.UTILISATION_BOTTLENECK)]
)
def test_a_link_that_is_full_in_more_than_a_tenth_of_the_samples_is_the_bottleneck(
    full: float, expected: Why
) -> None:
    assert why(Job().measured(0.89, 1.0, full)) is expected


def test_a_full_link_is_a_bottleneck_however_well_cores_are_used() -> None:
    assert why(Job().measured(0.99, 1.0, 0.5)) is Why.NETWORK_BOTTLENECK


def test_more_cores_that_paid_are_followed_by_twice_as_many_more_before_more_workers() -> None:
    job = Job(budget=10_000)
    job.measured(1.0, 1.0)
    assert job.shape == CpuShape.even(1, 2, 450)
    found = job.measured(0.85, 1.45)  # a bottleneck shows, but half as many cores again brought 45 %
    assert why(found) is Why.MORE_CORES and job.shape == CpuShape.even(1, 2, 900)
    job.measured(0.85, 2.8)
    assert job.shape == CpuShape.even(1, 2, 2700)
    found = job.measured(0.85, 3.6)  # three times as many brought 29 %: kept, but they have not paid
    assert why(found) is Why.UTILISATION_BOTTLENECK


def test_more_cores_that_did_not_help_are_not_followed_by_even_more() -> None:
    job = Job(budget=10_000)
    job.measured(1.0, 1.0)
    job.measured(1.0, 1.5)
    job.measured(1.0, 1.5)  # of twice as many
    assert job.search.base is not None and job.search.base.shape.cores == 450
    assert job.search.stride == 1


def test_larger_steps_that_did_not_pay_leave_the_usual_one_to_be_tried() -> None:
    """4.5 cores, 9 and 6.75: the 9 are not worth it, and are not gone back to either."""
    rates = {300: 1.0, 450: 1.45, 900: 1.59, 675: 1.55}
    job = Job(budget=10_000)
    job.rules = Rules(budget=10_000, servers=1, workers=2)
    for _ in range(40):
        if job.search.rests:
            break
        job.measured(1.0, rates.get(job.shape.cores, 1.0))
    assert job.search.rests and job.shape.cores == 675


def test_cores_that_come_with_other_changes_must_bring_something_too() -> None:
    job = Job(servers=(20,), workers=(100, 100))
    assert why(job.measured(0.85, 1.0, 0.5)) is Why.NETWORK_BOTTLENECK
    job.measured(0.85, 1.02, 0.5, 0.5)  # another server, a tenth more cores, and links as full as before
    assert job.search.base is not None and len(job.search.base.shape.servers) == 1


def test_where_servers_are_given_a_full_link_is_no_reason_for_more_workers_before_more_cores() -> None:
    job = Job(servers=(100,), workers=(100, 100))
    job.rules = Rules(budget=10_000, servers=1)
    assert why(job.measured(0.99, 1.0, 0.5)) is Why.MORE_CORES
    found = job.measured(0.99, 1.0, 0.5, room=0)
    assert why(found) is Why.MORE_WORKERS
    assert "it used 99% of its 3 cores, and nothing else helped or was free" in str(found and found.reason)


def test_a_few_saturated_servers_get_cores_of_workers_that_use_most_of_theirs() -> None:
    job = Job(servers=(100,), workers=(4000, 4000))
    found = job.measured([1.0, 0.85, 0.85], 1.0)
    assert why(found) is Why.BALANCED
    assert job.shape.servers[0] > 120
    assert (
        why(Job(servers=(100,), workers=(4000, 4000)).measured([0.88, 0.85, 0.85], 1.0)) is not Why.BALANCED
    )


def test_scaling_up_gives_every_process_half_as_much_again() -> None:
    job = Job(servers=(50,), workers=(100, 200))
    job.measured(1.0, 1.0)
    assert job.shape == CpuShape(servers=(75,), workers=(150, 300))


def test_scaling_up_ends_at_the_budget_and_at_what_is_free() -> None:
    job = Job(budget=400)
    job.measured(1.0, 1.0)
    assert job.shape.cores == pytest.approx(400, abs=3)
    job = Job()
    job.measured(1.0, 1.0, room=60)
    assert job.shape == CpuShape(servers=(120,), workers=(120, 120))


def test_a_change_that_failed_when_cores_came_free_is_judged_by_the_next_measurement() -> None:
    """Else a waiting job would ask for it again at once, without end."""
    job = Job()
    job.measured(1.0, 1.0, room=0)
    usage = usage_of(job.seats, 1.0, 1.0)
    found = look(job.search, job.seats, usage, job.rules, 200)
    assert found is not None and found.shape is not None and not found.search.waits
    job.search = found.search
    assert look(job.search, job.seats, usage, job.rules, 200) is None
    found = job.measured(1.0, 1.001)
    assert ScalingMove.UP in job.search.tried and why(found) is not Why.MORE_CORES


def test_the_way_back_is_asked_for_once_when_cores_came_free() -> None:
    """There are fewer than the next step up takes, but as many as the fastest configuration needs."""
    here, fastest = seats_of((100,), (100, 100)), seats_of((110,), (100, 100))
    usage = usage_of(here, 0.99, 1.0)
    job = Job()
    search = ScalingSearch(
        base=SeenUsage.of(here, usage),
        best=SeenUsage.of(fastest, usage_of(fastest, 0.99, 1.2)),
        tried=frozenset(ScalingMove) - {ScalingMove.UP},
        waits=True,
        looked_at=usage,
    )
    found = look(search, here, usage, job.rules, 10)
    assert why(found) is Why.BEST_SEEN and found is not None
    assert look(found.search, here, usage, job.rules, 10) is None


def test_without_free_cores_it_waits_and_goes_on_when_there_are_some() -> None:
    job = Job()
    assert why(job.measured(1.0, 1.0, room=0)) is Why.WANTS_CORES
    assert job.search.waits
    usage = usage_of(job.seats, 1.0, 1.0)
    assert look(job.search, job.seats, usage, job.rules, 0) is None
    assert why(look(job.search, job.seats, usage, job.rules, 200)) is Why.MORE_CORES


def test_a_new_worker_brings_no_cores_and_a_new_server_as_much_as_the_others_have() -> None:
    job = Job(servers=(40,), workers=(100, 100))
    job.measured(0.89, 1.0)
    assert job.shape == CpuShape(servers=(40,), workers=(66, 66, 66))
    job = Job(servers=(40,), workers=(100, 100))
    job.measured(0.9, 1.0, 0.5)
    assert job.shape == CpuShape(servers=(40, 40), workers=(100, 100))


def test_servers_share_what_they_have_where_nothing_is_free_for_one_more() -> None:
    job = Job(servers=(40,), workers=(100, 100))
    job.measured(0.9, 1.0, 0.5, room=0)
    assert job.shape == CpuShape(servers=(20, 20), workers=(100, 100))


def test_servers_that_idle_give_their_cores_to_workers_that_do_not() -> None:
    job = Job()
    found = job.measured([0.2, 0.95, 0.95], 1.0)
    assert why(found) is Why.BALANCED
    (server,), workers = job.shape.servers, job.shape.workers
    assert server < 40 and workers[0] == workers[1] > 125
    assert "the servers used 20% of what there was, the workers 95%" in str(found.reason)


def test_among_workers_cores_go_to_the_one_that_uses_them() -> None:
    job = Job(servers=(100,), workers=(100, 100))
    found = job.measured([0.95, 0.5, 1.0], 1.0)
    assert why(found) is Why.BALANCED
    assert job.shape.workers[1] == pytest.approx(2 * job.shape.workers[0], rel=0.05)


def test_where_all_idle_alike_there_is_nothing_to_balance() -> None:
    assert why(Job().measured([0.5, 0.5, 0.5], 1.0)) is Why.UTILISATION_BOTTLENECK


def test_a_move_that_makes_steps_faster_is_kept_one_that_does_not_is_not_tried_again() -> None:
    job = Job()
    job.measured(0.85, 1.0)
    assert len(job.shape.workers) == 3
    job.measured(0.85, 1.02)  # within what samples differ by, and no better used
    tried = len(job.shape.workers)
    assert tried == 2 and job.search.base is not None and len(job.search.base.shape.workers) == 2
    job = Job()
    job.measured(0.85, 1.0)
    job.measured(0.85, 1.2)
    assert job.search.base is not None and len(job.search.base.shape.workers) == 3


def test_half_as_many_cores_again_must_be_worth_it() -> None:
    for rate, kept in ((1.04, False), (1.06, True)):
        job = Job()
        job.measured(1.0, 1.0)
        job.measured(0.97, rate, room=0)
        assert job.search.base is not None
        assert (job.search.base.shape.cores > 300) is kept


def test_a_bottleneck_that_is_gone_counts_even_if_steps_are_no_faster_yet() -> None:
    job = Job()
    job.measured(0.9, 1.0, 0.5)
    job.measured(0.9, 1.0, 0.0, 0.0)
    assert job.search.base is not None and len(job.search.base.shape.servers) == 2


def test_after_workers_that_did_not_help_more_cores_come_first() -> None:
    job = Job()
    assert why(job.measured(0.89, 1.0)) is Why.UTILISATION_BOTTLENECK
    assert why(job.measured(0.89, 0.9)) is Why.MORE_CORES
    assert why(job.measured(0.89, 1.3)) is Why.MORE_CORES
    assert job.shape == CpuShape(servers=(225,), workers=(225, 225))


def test_cores_that_are_no_use_alone_may_be_with_what_they_ask_for() -> None:
    """A process at its limit: more cores do nothing, more workers on the same cores do nothing, both do."""
    job = Job()
    job.measured(0.99, 1.0)
    found = job.measured(0.66, 1.0)  # with half as many cores again it uses no more
    assert job.shape == CpuShape(servers=(150,), workers=(100, 100, 100)) and why(found) is Why.AT_ONCE
    job.measured(0.9, 1.4)
    assert job.search.base is not None and job.search.base.shape.cores == 450


def test_fewer_workers_are_tried_when_nothing_that_is_more_helps() -> None:
    job, seen = Job(budget=300), []
    while not job.search.rests:
        seen.append(why(job.measured(0.97, 1.3 if len(job.shape.workers) == 1 else 1.0)))
    assert Why.FEWER_WORKERS in seen
    assert job.shape == CpuShape(servers=(100,), workers=(200,))


def test_when_nothing_helps_it_goes_back_to_the_best_and_rests() -> None:
    job = Job(budget=600)
    first, seen = job.shape, []
    for _ in range(20):
        found = job.measured(0.85, 1.0 if job.shape == first else 0.9)
        seen.append(why(found))
        if job.search.rests:
            break
    assert job.shape == first and seen[-2:] == [Why.BEST_SEEN, Why.SETTLED]
    assert why(job.measured(0.85, 1.03)) is None  # it stays at rest


def test_a_training_that_changes_at_rest_is_looked_at_anew() -> None:
    job = Job(budget=300)
    while not job.search.rests:
        job.measured(0.99, 1.0)
    assert job.measured(0.99, 1.09) is not None and job.search.rests
    job.search = replace(job.search, stride=4)  # more cores had paid
    assert why(job.measured(0.7, 0.8)) in (Why.UTILISATION_BOTTLENECK, Why.BALANCED)
    assert job.search.stride == 1


def test_at_rest_all_is_tried_again_ever_more_seldom() -> None:
    job, first = Job(budget=600), CpuShape.even(1, 2, 300)
    rests: list[int] = []
    for k in range(200):
        job.measured(0.85, (1.0 if job.shape == first else 0.9) + 1e-6 * k)
        if job.search.rests and job.search.rested == 0:
            rests.append(job.search.patience)
    assert rests[:4] == [3, 6, 12, 24]
    assert job.search.changes <= MOST_CHANGES


def test_a_change_that_could_not_be_made_counts_as_tried() -> None:
    job = Job()
    refused = job.measured(0.85, 1.0, goes=False)
    assert refused is not None and refused.shape is not None
    other = job.measured(0.85, 1.001, goes=False)
    assert other is not None and other.shape not in (None, refused.shape)


def test_counts_that_were_given_are_not_searched_for() -> None:
    job = Job()
    job.rules = Rules(budget=10_000, servers=1, workers=2)
    for _ in range(30):
        job.measured(0.7, 1.0, 0.9)
        assert (len(job.shape.servers), len(job.shape.workers)) == (1, 2)


def test_the_number_of_changes_is_bounded_however_the_speed_jumps_about() -> None:
    job, changes = Job(), 0
    for k in range(4 * MOST_CHANGES):
        found = job.measured(0.85, 1.0 + 0.5 * (k % 3))
        changes += found is not None and found.shape is not None
    assert changes <= MOST_CHANGES + 1
    assert job.search.rests


def test_cores_that_nobody_uses_are_given_back() -> None:
    job = Job(servers=(100,), workers=(400, 400), budget=900)
    reasons = []
    for _ in range(12):
        used = [
            cpu / share for cpu, share in zip((0.5, 2.0, 2.0), (s.share for s in job.seats), strict=False)
        ]
        used = (used + [0.3] * 9)[: len(job.seats)]
        reasons.append(why(job.measured([min(1.0, u) for u in used], 1.0 if len(job.seats) == 3 else 0.9)))
        if job.search.rests:
            break
    assert Why.TRIMMED in reasons
    assert job.shape.cores < 600


def at_rest(budget: int) -> Job:
    job = Job(budget=budget)
    while not job.search.rests:
        job.measured(0.9, 1.0)
    return job


def test_a_job_that_starts_again_on_fewer_cores_than_it_had_grows_again() -> None:
    again = Job(servers=(10,), workers=(10, 10), budget=300)
    again.search = at_rest(300).search.anew()
    assert why(again.measured(0.99, 0.2, room=0)) is Why.WANTS_CORES
    assert why(again.measured(0.99, 0.2, room=300)) is Why.MORE_CORES
    assert again.shape == CpuShape(servers=(15,), workers=(15, 15))


def test_who_cannot_go_back_goes_on_from_where_it_is() -> None:
    job = at_rest(300)
    job.measured(0.5, 0.8)  # it has changed: fewer cores will do, too
    while job.shape.cores > 250:
        job.measured(0.5, 0.8)
    trimmed = job.shape
    job.measured(0.9, 0.7, room=0)  # they would not, but somebody else has the others by now
    assert job.search.base is not None and job.search.base.shape == trimmed
    assert job.shape.cores <= trimmed.cores and not job.search.rests


def test_a_way_back_that_fails_is_not_tried_for_ever() -> None:
    job = Job(budget=600)
    first, found = job.shape, None
    while why(found) is not Why.BEST_SEEN:
        before = job.seats
        found = job.measured(0.85, 1.0 if job.shape == first else 0.9)
    job.seats = before
    asked = 0
    for k in range(20):
        found = job.measured(0.85, 0.9 + 1e-6 * k, goes=False)
        asked += found is not None and found.shape is not None
        if job.search.rests:
            break
    assert asked <= len(ScalingMove) and job.search.rests and job.search.base is not None
    assert job.search.base.shape == job.shape


def test_from_what_it_has_not_any_more_it_tries_nothing() -> None:
    """It has come down from there, and others have the cores by now."""
    job = Job(servers=(100,), workers=(300, 300), budget=900)
    large, small = job.seats, seats_of((100,), (100, 100))
    base = SeenUsage.of(large, usage_of(large, 0.5, 1.0))
    job.search = ScalingSearch(
        base=base,
        best=base,
        trial=ScalingMove.TRIM,
        shape=CpuShape.of(small),
        tried=frozenset({ScalingMove.OUT}),
    )
    job.seats = small
    found = job.measured(0.7, 0.5, room=0)  # half as fast: back, if it could
    assert found is not None and job.search.base is not None
    assert job.search.base.shape == CpuShape.of(small)
    assert job.shape.cores <= 300


def test_the_smallest_processes_have_nothing_to_share_out() -> None:
    """In proportion each would get the least there is, and a little less as numbers are rounded."""
    seats = seats_of((10,), (10,) * 7)
    used = {"servers": (0.0008 / 1.1,), "workers": (0.0008,) * 7}  # a server counts for a tenth more
    assert balanced(replace(SeenUsage.of(seats, usage_of(seats, 0.5, 1.0)), **used)) is None
