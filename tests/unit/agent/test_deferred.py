"""Orders that wait: in their order, for each receiver apart."""

from __future__ import annotations

from hpcsched.agent.deferred import Deferred


def test_what_comes_for_the_same_receiver_waits_with_it_and_is_carried_out_in_order() -> None:
    done: list[str] = []
    deferred = Deferred[str, None](done.append)
    assert not deferred and not deferred.takes(1, "stop 1")
    deferred.put_off(1, "start 1")
    assert deferred and deferred.takes(1, "stop 1") and not deferred.takes(2, "stop 2")
    assert list(deferred) == ["start 1"]
    list(deferred.again())
    assert done == ["start 1", "stop 1"] and not deferred


def test_what_is_dropped_is_not_carried_out_nor_what_follows_it() -> None:
    done: list[str] = []
    deferred = Deferred[str, None](done.append)
    deferred.put_off(1, "start 1")
    deferred.put_off(2, "start 2")
    deferred.takes(1, "pace 1")
    assert 1 in deferred and deferred.drop(1) == "start 1"
    assert 1 not in deferred and deferred.drop(1) is None
    list(deferred.again())
    assert done == ["start 2"]


def test_one_that_is_put_off_again_keeps_what_follows_it_waiting() -> None:
    done: list[str] = []
    ready = False

    def carry_out(order: str) -> str:
        if order == "start" and not ready:
            deferred.put_off(1, order)
        else:
            done.append(order)
        return order

    deferred = Deferred[str, str](carry_out)
    deferred.put_off(1, "start")
    deferred.takes(1, "stop")
    list(deferred.again())
    assert done == [] and deferred
    ready = True
    assert list(deferred.again()) == ["start", "stop"] and done == ["start", "stop"]
