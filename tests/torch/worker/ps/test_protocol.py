"""How messages are laid out, and how long they take over a slow link."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from hpcsched.worker.ps.link import MIB, WINDOW_S, LinkDirection, ServerLink, covered  # noqa: E402
from hpcsched.worker.ps.protocol import Frame  # noqa: E402

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.complex64]
FORMS = st.lists(st.tuples(st.sampled_from(DTYPES), st.integers(0, 70)), max_size=8)


@given(st.integers(0, 9), st.integers(0, 9), FORMS, FORMS)
def test_the_parts_of_a_message_are_apart_aligned_and_as_large_as_asked_for(
    words: int, flags: int, forms: list[tuple[torch.dtype, int]], behind: list[tuple[torch.dtype, int]]
) -> None:
    buffers = [torch.zeros(elements, dtype=dtype) for dtype, elements in behind]
    frame = Frame(words, flags, forms, buffers)
    page = frame.page()
    parts = [page.words, page.flags, *page.tensors, *page.buffers]
    assert [(t.dtype, t.numel()) for t in parts[2:]] == [*forms, *behind]
    assert (page.words.numel(), page.flags.numel()) == (words, flags)
    for number, part in enumerate(parts):
        part.copy_(torch.full(part.shape, number + 1).to(part.dtype))
    for number, part in enumerate(parts):
        assert bool((part == torch.tensor(number + 1).to(part.dtype)).all())
    for dtype, flat in page.flats.items():
        assert flat.data_ptr() % 64 == page.data.data_ptr() % 64
        assert flat.numel() == sum(elements for one, elements in forms if one == dtype)
    assert len(page.data) == frame.size >= frame.short
    assert Frame(words, flags, forms).size == frame.short, "the buffers come last"


def test_transfers_in_one_direction_come_one_after_the_other() -> None:
    lane = LinkDirection(2.0)
    assert lane.transfer(MIB, 10.0) == pytest.approx(10.5)
    assert lane.transfer(MIB, 10.1) == pytest.approx(11.0), "it waits for the first one"
    assert lane.transfer(MIB, 20.0) == pytest.approx(20.5), "and an idle link saves nothing up"
    assert lane.bytes == 3 * MIB


def test_a_link_without_a_capacity_takes_no_time_and_is_never_busy() -> None:
    link = ServerLink(None, 0.0)
    assert link.inward.transfer(10**12, 3.0) == 3.0
    link.look(100.0)
    assert (link.windows, link.busy_windows, link.inward.bytes) == (0, 0, 10**12)


def test_windows_are_busy_when_something_is_under_way_in_either_direction() -> None:
    link = ServerLink(1.0, 0.0)
    end = link.inward.transfer(MIB // 2, 0.0)
    link.outward.transfer(MIB // 2, end)
    link.look(0.99)
    assert (link.windows, link.busy_windows) == (4, 4)
    link.look(2.01)
    assert (link.windows, link.busy_windows) == (10, 5)


@given(
    st.lists(st.tuples(st.floats(0, 3), st.integers(1, MIB)), max_size=12),
    st.floats(0.2, 50),
)
def test_a_lane_never_carries_more_than_its_capacity(sent: list[tuple[float, int]], mib_s: float) -> None:
    link, at, last = ServerLink(mib_s, 0.0), 0.0, 0.0
    for pause, size in sent:
        at += pause
        end = link.inward.transfer(size, at)
        assert end >= max(at, last) + 0.999 * size / (mib_s * MIB)
        last = end
    spans = link.inward.during(0.0, last)
    assert covered(spans) * mib_s * MIB == pytest.approx(sum(size for _, size in sent), rel=1e-6)
    link.look(last + WINDOW_S)
    assert 0 <= link.busy_windows <= link.windows


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=8))
def test_what_is_covered_counts_once(spans: list[tuple[int, int]]) -> None:
    good = [(float(min(span)), float(max(span))) for span in spans]
    assert covered(good) == len({at for start, stop in good for at in range(int(start), int(stop))})
