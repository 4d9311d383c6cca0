"""The bottleneck model of parameter-server training: its laws, and what the paper measured."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcsched.contract.seats import Seat
from hpcsched.planning.ps.model import NetworkLink, PsModel, even_seats, loads, usage
from hpcsched.planning.ps.whatif.best import fixed
from profiles.ps.nearchus import CLUSTERS, GBPS, WORKLOADS, measured, workload

SLOW = NetworkLink(bytes_s=GBPS)
FAST = NetworkLink(bytes_s=10 * GBPS)

PLAIN = PsModel(batch_cpu_s=12.0, parameter_bytes=100.0)


def seats(servers, workers):
    """Of shares that are given."""
    return tuple(
        [Seat(server=True, share=s) for s in servers] + [Seat(server=False, share=s) for s in workers]
    )


def on_hosts(where, *shares):
    """Seats of one share each on hosts by name: "s" of "s@x" is a server."""
    return tuple(
        Seat(server=kind == "s", share=share, host=host)
        for (kind, host), share in zip(
            (name.split("@") for name in where), shares or (1.0,) * 99, strict=False
        )
    )


@st.composite
def models(draw):
    part = st.floats(0, 1)
    return PsModel(
        batch_cpu_s=draw(st.floats(0.1, 100)),
        worker_cpu_s=draw(part),
        update_cpu_s=draw(part),
        byte_cpu_s=draw(st.floats(0, 1e-7)),
        parameter_bytes=draw(st.floats(1e3, 1e9)),
        uneven=draw(st.floats(0, 0.9)),
        serial=draw(st.floats(0, 0.3)),
        most_cores=draw(st.floats(0.5, 64)),
        overlap=draw(part),
        staleness=draw(st.sampled_from([0, 1, 4])),
        weak=draw(st.booleans()),
    )


SHARES = st.lists(st.floats(0.05, 32), min_size=1, max_size=5)
LINKS = st.one_of(st.none(), st.builds(NetworkLink, bytes_s=st.floats(1e5, 1e10), of_hosts=st.booleans()))


# -- by hand -------------------------------------------------------------------------------------------


def test_a_batch_is_split_over_the_workers():
    found = usage(PLAIN, seats([1], [2, 2, 2]))
    assert found.rate == pytest.approx(6 / 12)
    assert found.cpu == pytest.approx((0, 2, 2, 2))
    assert found.net == (0,) * 4


def test_the_slowest_worker_decides_and_the_others_have_time():
    found = usage(PLAIN, seats([1], [1, 3]))
    assert found.rate == pytest.approx(1 / 6)
    assert found.cpu == pytest.approx((0, 1, 1))


def test_what_each_worker_does_besides_does_not_shrink():
    found = usage(replace(PLAIN, worker_cpu_s=1.0), seats([1], [1] * 12))
    assert found.rate == pytest.approx(1 / 2)


def test_with_batches_of_their_own_each_worker_adds_its_speed():
    assert usage(replace(PLAIN, weak=True), seats([1], [2, 2, 2])).rate == pytest.approx(3 * 2 / 12)


def test_a_synchronous_step_computes_pushes_updates_and_pulls():
    model = replace(PLAIN, update_cpu_s=2.0, byte_cpu_s=0.01)
    found = usage(model, seats([1, 1], [3, 3]), NetworkLink(bytes_s=50))
    # 12 / 6 of the workers; each server: 2 x 50 bytes in, half of 2 s and of 200 bytes, 2 x 50 bytes out
    assert 1 / found.rate == pytest.approx(2 + 2 + (1 + 1) + 2)
    assert found.net == pytest.approx((2 / 8, 2 / 8, 0, 0))
    assert found.cpu == pytest.approx((2 / 8, 2 / 8, 6 / 8, 6 / 8))


def test_stale_workers_take_turns_until_the_link_is_full():
    model = replace(PLAIN, staleness=1, weak=True)
    link = NetworkLink(bytes_s=50)  # 2 s each way, for one worker
    assert usage(model, seats([1], [1] * 3), link).rate == pytest.approx(3 / (12 + 4))
    for workers in (8, 9, 20):
        found = usage(model, seats([1], [1] * workers), link)
        assert found.rate == pytest.approx(1 / 2)
        assert found.net[0] == pytest.approx(1)


def test_stale_workers_take_turns_until_the_servers_cores_are_full():
    model = replace(PLAIN, staleness=1, weak=True, byte_cpu_s=0.04)
    found = usage(model, seats([2], [1] * 20))
    assert found.rate == pytest.approx(1 / 2)
    assert found.cpu[0] == pytest.approx(2)


def test_what_overlaps_with_computing_costs_nothing_while_there_is_time():
    model = replace(PLAIN, overlap=1.0)
    assert usage(model, seats([1], [6]), NetworkLink(bytes_s=100)).rate == pytest.approx(1 / 2)
    assert usage(model, seats([1], [6]), NetworkLink(bytes_s=25)).rate == pytest.approx(1 / 4)


def test_the_largest_tensor_is_on_the_first_server():
    assert loads(replace(PLAIN, uneven=0.4), 3) == pytest.approx([0.6, 0.2, 0.2])
    found = usage(replace(PLAIN, uneven=0.4), seats([1] * 3, [6]), NetworkLink(bytes_s=10))
    assert 1 / found.rate == pytest.approx(2 + 2 * 6)
    assert found.net == pytest.approx((6 / 14, 2 / 14, 2 / 14, 0))


def test_the_seats_may_come_in_any_order():
    model = replace(PLAIN, uneven=0.4, update_cpu_s=1.0)
    mixed = (Seat(server=True, share=1), Seat(server=False, share=2), Seat(server=True, share=1))
    found = usage(model, mixed, SLOW)
    sorted_ = usage(model, (mixed[0], mixed[2], mixed[1]), SLOW)
    assert found.rate == sorted_.rate
    assert found.cpu == (sorted_.cpu[0], sorted_.cpu[2], sorted_.cpu[1])


def test_servers_of_a_host_share_its_link_only_where_links_are_those_of_hosts():
    apart, together = on_hosts(["s@a", "s@b", "w@c"]), on_hosts(["s@a", "s@a", "w@c"])
    for link, same in ((NetworkLink(bytes_s=10, of_hosts=True), False), (NetworkLink(bytes_s=10), True)):
        assert (usage(PLAIN, apart, link).net[0] == usage(PLAIN, together, link).net[0]) is same
    found = usage(PLAIN, together, NetworkLink(bytes_s=10, of_hosts=True))
    assert 1 / found.rate == pytest.approx(12 + 20)
    assert found.net == pytest.approx((10 / 32, 10 / 32, 0))


def test_what_stays_on_a_host_needs_no_link_of_it():
    link = NetworkLink(bytes_s=10, of_hosts=True)
    assert usage(PLAIN, on_hosts(["s@a", "w@a", "w@a"]), link) == usage(
        PLAIN, on_hosts(["s@a", "w@a", "w@a"])
    )
    # The server's own worker is left out: one push of 100 bytes comes in.
    found = usage(PLAIN, on_hosts(["s@a", "w@a", "w@b"]), link)
    assert found.net[0] * (1 / found.rate) == pytest.approx(10)


def test_a_seat_without_a_host_is_on_one_of_its_own():
    found = usage(PLAIN, seats([1, 1], [1]), NetworkLink(bytes_s=10, of_hosts=True))
    assert found == usage(PLAIN, on_hosts(["s@a", "s@b", "w@c"]), NetworkLink(bytes_s=10, of_hosts=True))
    assert found.net[0] * (1 / found.rate) == pytest.approx(5)


def test_many_workers_of_one_host_fill_its_link_too():
    link = NetworkLink(bytes_s=10, of_hosts=True)
    model = replace(PLAIN, overlap=1.0)
    found = usage(model, on_hosts(["s@a", "s@b", "w@c", "w@c"], 1, 1, 9, 9), link)
    assert 1 / found.rate == pytest.approx(20)
    assert found.net == pytest.approx((0.5, 0.5, 0, 0))


@pytest.mark.parametrize("wrong", [seats([], [1]), seats([1], []), seats([0], [1]), seats([1], [1, -1]), ()])
def test_without_a_server_a_worker_or_a_share_there_is_no_training(wrong):
    with pytest.raises(ValueError, match="a server and a worker"):
        usage(PLAIN, wrong)


# -- laws ----------------------------------------------------------------------------------------------


@given(models(), SHARES, SHARES, LINKS)
def test_nobody_uses_more_than_there_is(model, servers, workers, link):
    all_seats = seats(servers, workers)
    found = usage(model, all_seats, link)
    assert found.rate > 0
    for seat, cpu, net in zip(all_seats, found.cpu, found.net, strict=True):
        assert 0 <= cpu <= min(seat.share, model.most_cores) * (1 + 1e-9)
        assert 0 <= net <= 1 + 1e-9
        assert seat.server or net == 0


@given(models(), SHARES, SHARES, LINKS, st.data())
def test_more_cores_or_more_network_is_never_slower(model, servers, workers, link, data):
    all_seats = seats(servers, workers)
    now = usage(model, all_seats, link).rate
    which = data.draw(st.integers(0, len(all_seats) - 1))
    more = list(all_seats)
    more[which] = replace(more[which], share=more[which].share * data.draw(st.floats(1, 4)))
    assert usage(model, more, link).rate >= now * (1 - 1e-9)
    if link is not None:
        wider = replace(link, bytes_s=link.bytes_s * data.draw(st.floats(1, 4)))
        assert usage(model, all_seats, wider).rate >= now * (1 - 1e-9)
        assert usage(model, all_seats).rate >= now * (1 - 1e-9)


@given(models(), st.integers(1, 8), SHARES, st.floats(1e5, 1e10))
def test_more_servers_never_transfer_more_on_the_busiest_link(model, servers, workers, bytes_s):
    found = [
        usage(model, seats([2.0] * n, workers), NetworkLink(bytes_s=bytes_s)) for n in (servers, servers + 1)
    ]
    busy_s = [max(each.net) / each.rate for each in found]
    assert busy_s[1] <= busy_s[0] * (1 + 1e-9)
    assert found[1].rate >= found[0].rate * (1 - 1e-9)


@given(models(), st.floats(0.01, 64), st.floats(1, 8))
def test_of_a_larger_share_no_less_is_used_and_never_more_than_it(model, share, factor):
    assert model.usable(share) <= model.usable(share * factor) * (1 + 1e-9)
    assert model.usable(share) <= min(share, model.most_cores)


@given(models(), SHARES, SHARES, LINKS)
def test_waiting_for_each_other_is_never_faster(model, servers, workers, link):
    waiting, stale = (replace(model, staleness=s) for s in (0, 2))
    assert usage(stale, seats(servers, workers), link).rate >= usage(
        waiting, seats(servers, workers), link
    ).rate * (1 - 1e-9)


# -- what NEARCHUS measured ----------------------------------------------------------------------------


def test_figure_1_speed_is_linear_in_workers_and_in_cores_in_use_and_servers_do_not_matter():
    each = 20 / 8
    found = {
        (p, w): usage(measured(20), even_seats(p, w, each, each), SLOW)
        for p in range(1, 8)
        for w in range(1, 9 - p)
    }
    for (_, w), own in found.items():
        assert own.rate == pytest.approx(w * found[1, 1].rate, rel=0.03)


@pytest.mark.parametrize("of_servers", [1, 5, 10])
def test_figures_1_and_2_speed_is_linear_in_cores_in_use_whatever_the_configuration(of_servers):
    found = [
        usage(measured(20), even_seats(p, w, of_servers / p, (20 - of_servers) / w), SLOW)
        for p in range(1, 8)
        for w in range(1, 9 - p)
    ] + [
        usage(measured(20), even_seats(p, w, share, share), FAST)
        for p, w in ((1, 2), (10, 11))
        for share in (0.5, 1, 2, 5, 10)
    ]
    by_cpu = [each.rate / sum(each.cpu) for each in found]
    assert by_cpu == pytest.approx([by_cpu[0]] * len(found), rel=0.01)


@pytest.mark.parametrize(("cores", "most"), [(20, 16), (32, 21), (64, 37)])
def test_figure_3_one_process_stagnates_before_it_has_all_cores(cores, most):
    used = [measured(cores).usable(share) for share in range(1, cores + 1)]
    assert used[-1] == used[-2] == most
    assert all(a <= b for a, b in pairwise(used))
    assert measured(cores).usable(5) == pytest.approx(5, rel=0.05)


@pytest.mark.parametrize(("workers", "paper"), [(1, 37), (2, 46), (10, 57)])
def test_figure_4_more_workers_use_more_of_the_same_59_cores(workers, paper):
    found = usage(measured(64), even_seats(1, workers, 5, 59 / workers))
    assert sum(found.cpu) == pytest.approx(paper, rel=0.02)
    assert found.cpu[0] < 4  # the 5 cores of the server are enough


@pytest.mark.parametrize(("cores", "paper"), [(20, 0.177), (32, 0.535), (64, 0.534)])
def test_figure_5a_what_a_slow_link_takes(cores, paper):
    slow, fast = (
        sum(usage(measured(cores), even_seats(1, 2, cores, cores), link).cpu) for link in (SLOW, FAST)
    )
    assert 1 - slow / fast == pytest.approx(paper, abs=0.02)


def test_figure_5a_cores_of_a_worker_on_64():
    slow, fast = (usage(measured(64), even_seats(1, 2, 64, 64), link) for link in (SLOW, FAST))
    assert slow.cpu[1] == pytest.approx(16, abs=0.5)
    assert sum(slow.cpu) == pytest.approx(33, abs=0.5)
    assert fast.cpu[1] == pytest.approx(36, abs=0.5)
    assert (slow.net[0] > 0.99, fast.net[0] < 0.5) == (True, True)


def test_figure_5a_on_one_host_the_link_does_not_matter():
    placed = on_hosts(["s@a", "w@a", "w@a"], 20, 20, 20)
    slow, fast = (usage(measured(20), placed, replace(link, of_hosts=True)) for link in (SLOW, FAST))
    assert slow == fast
    assert sum(slow.cpu) >= sum(usage(measured(20), even_seats(1, 2, 20, 20), FAST).cpu)


def test_figure_5b_one_server_stagnates_about_8_workers_and_ten_go_on():
    def in_use(servers):
        every = [usage(measured(20), even_seats(servers, w, 3, 3), SLOW) for w in range(2, 12)]
        return dict(zip(range(2, 12), (sum(each.cpu) for each in every), strict=True)), every[-1].net[0]

    (one, busy), (ten, idle) = in_use(1), in_use(10)
    for w in range(2, 8):
        assert one[w] == pytest.approx(one[2] * w / 2, rel=0.01)
    assert one[11] - one[9] == pytest.approx(0, abs=0.2)
    assert one[11] < one[8] * 1.15
    for w in ten:
        assert ten[w] == pytest.approx(ten[2] * w / 2, rel=0.01)
    assert (busy, idle) == (pytest.approx(1), pytest.approx(0.18, abs=0.05))


@pytest.mark.parametrize("name", WORKLOADS)
def test_section_5_no_link_and_no_server_is_busy_on_cluster_b(name):
    cluster = CLUSTERS["B"]
    model = workload(name, cluster)
    assert max(fixed(model, 1, 59, cluster.link).usage.net) < 0.5
    found = fixed(model, 2, 58, cluster.link)
    assert max(found.usage.cpu[:2]) < 4
    assert sum(found.usage.cpu) / cluster.budget > 0.93
