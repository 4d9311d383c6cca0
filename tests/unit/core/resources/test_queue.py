"""The waiting queue against a plain list, and what a walk touches."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hpcsched.core.needs import Needs
from hpcsched.core.resources import queue as module
from hpcsched.core.resources.queue import Asked, WaitingQueue

JOBS = st.integers(1, 12)
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), JOBS, st.integers(0, 3), st.integers(1, 5)),
        st.tuples(st.just("remove"), JOBS),
        st.tuples(st.just("walk"), st.integers(0, 8), st.booleans()),
    ),
    max_size=60,
)


def naive_walk(waiting, room):
    """In order, each job taking what it needs from `room`."""
    for _, job, need in sorted(waiting.values()):
        if need <= room:
            room -= need
            yield job


@given(OPERATIONS)
def test_it_behaves_like_a_sorted_list(operations):
    queue, waiting = WaitingQueue(), {}
    for operation, *rest in operations:
        if operation == "add":
            job, arrival, need = rest
            queue.add(job, arrival=float(arrival), need=need)
            waiting[job] = (float(arrival), job, need)
        elif operation == "remove":
            queue.remove(rest[0])
            waiting.pop(rest[0], None)
        else:
            room, take = [rest[0]], rest[1]
            found = []
            for job in queue.walk(lambda need, nodes, uneven, room=room: need <= room[0]):
                found.append(job)
                room[0] -= waiting[job][2]
            assert found == list(naive_walk(waiting, rest[0]))
            if take:
                for job in found:
                    queue.remove(job)
                    del waiting[job]
        assert len(queue) == len(waiting)
        assert all((job in queue) == (job in waiting) for job in range(1, 13))
        assert queue.first() == (min(waiting.values())[1] if waiting else None)
        needs = [need for *_, need in waiting.values()]
        assert all(
            queue.any_fits(lambda n, nodes, uneven, room=room: n <= room) == any(x <= room for x in needs)
            for room in range(6)
        )


def test_a_walk_given_up_half_way_loses_nobody():
    queue = WaitingQueue()
    for job in range(5):
        queue.add(job, arrival=0.0, need=1)
    walk = queue.walk(lambda need, nodes, uneven: need <= 9)
    assert [next(walk), next(walk)] == [0, 1]
    walk.close()
    assert list(queue.walk(lambda need, nodes, uneven: need <= 9)) == [0, 1, 2, 3, 4]


def test_a_walk_does_not_touch_jobs_that_are_too_large(monkeypatch):
    """Nor small ones behind those it gives: its cost is in what it yields, not in what waits."""
    touched = []
    pop, push = module.heappop, module.heappush
    monkeypatch.setattr(module, "heappop", lambda heap: touched.append(1) or pop(heap))
    monkeypatch.setattr(module, "heappush", lambda heap, entry: touched.append(1) or push(heap, entry))
    queue = WaitingQueue()
    for job in range(10_000):
        queue.add(job, arrival=0.0, need=8)
    for job in range(10_000, 10_300):
        queue.add(job, arrival=1.0, need=2)
    touched.clear()
    room = [6]
    found = []
    for job in queue.walk(lambda need, nodes, uneven: need <= room[0]):
        found.append(job)
        room[0] -= 2
    assert found == [10_000, 10_001, 10_002]
    assert len(touched) == 2 * len(found)


def test_jobs_whose_needs_are_not_met_are_passed_without_being_walked() -> None:
    queue, a100 = WaitingQueue(), Needs(gpu_type="a100")
    for job in range(1000):
        queue.add(job, arrival=0.0, need=1, needs=a100)
    queue.add(2000, arrival=1.0, need=1)
    asked = []

    def meets(job: Asked) -> bool:
        asked.append(job.needs)
        return job.needs is None

    assert list(queue.walk(meets=meets)) == [2000]
    assert len(asked) < 10
    assert queue.any_fits(lambda need, nodes, uneven: True, meets)
    queue.remove(2000)
    assert not queue.any_fits(lambda need, nodes, uneven: True, meets)


def test_a_higher_priority_goes_first_and_equals_as_they_came():
    queue = WaitingQueue()
    for job, (priority, arrival, need) in enumerate(
        [(0, 0.0, 1), (5, 3.0, 2), (0, 1.0, 2), (5, 2.0, 1), (-1, 0.0, 1)]
    ):
        queue.add(job, arrival=arrival, need=need, priority=priority)
    assert queue.first() == 3
    assert list(queue.walk()) == [3, 1, 0, 2, 4]
    queue.add(4, arrival=0.0, need=1, priority=9)  # it was given another one
    assert list(queue.walk(lambda need, nodes, uneven: need == 1)) == [4, 3, 0]
