"""The report's page and its pictures of global batches: what is shown, and that nothing can break them."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from hpcsched.core.model import Ended, JobState, Role
from hpcsched.planning.vsw.options import WorkerOptions
from hpcsched.report.batches import batches_svg, draw, thinned
from hpcsched.report.drawing import INK, MissingExtra
from hpcsched.report.gantt import gantt_svg
from hpcsched.report.html import BatchHistory, RunPage
from hpcsched.report.idle import HostIdle, Idle
from hpcsched.report.jobs import JobDetail
from hpcsched.report.result import AttemptResult, JobResult, Result
from hpcsched.store.batches import Decision

pytestmark = pytest.mark.long

ADAPTIVE = {"kind": "vsw", "local_batch": [16, 64], "global_batch": [64, 512]}


def options(**more: Any) -> WorkerOptions:
    return WorkerOptions.parse({**ADAPTIVE, **more})


def a_decision(step: int, **more: Any) -> Decision:
    table: dict[str, Any] = {
        "t": 1e9 + step,
        "attempt": 1,
        "step": step,
        "samples": 64 * step,
        "epoch": step / 100,
        "global_batch": 64,
        "local_batch": 16,
        "workers": (2, 2),
        "at_once": (1, 1),
        "similarity": 0.25,
        "loss": 0.5,
    }
    return Decision(**{**table, **more})


GROWING = [
    a_decision(8, similarity=None, loss=None, workers=(4,), at_once=(1,)),
    a_decision(100, global_batch=128, similarity=0.05, workers=(8,), at_once=(2,)),
    a_decision(130, attempt=2, global_batch=128, similarity=0.05, workers=(5, 3), loss=0.1),
    a_decision(200, attempt=2, global_batch=512, similarity=-0.4, workers=(20, 12), loss=0.001),
]


def drawn(decisions: list[Decision], chosen: WorkerOptions, step: int = 0) -> list[Any]:
    """The panels' axes, from above."""
    from matplotlib.figure import Figure

    figure = Figure()
    draw(figure, decisions, chosen, step=step, title="t")
    figure.canvas.draw()
    return figure.axes


def labels(panels: list[Any]) -> list[str]:
    return [axes.get_ylabel().replace("\n", " ") for axes in panels]


def series(axes: Any, number: int) -> list[tuple[float, float]]:
    """The points of one of a panel's lines; vertical and horizontal marks are lines, too."""
    return [(float(x), float(y)) for x, y in axes.get_lines()[number].get_xydata()]


def test_a_history_is_four_panels_on_one_axis() -> None:
    panels = drawn(GROWING, options(similarity=0.2), step=400)
    assert labels(panels) == ["global batch (samples)", "gradient similarity", "stream workers", "loss"]
    assert [axes.get_xlim() for axes in panels] == [(0.0, 4.0)] * 4
    batch = panels[0]
    assert batch.get_yscale() == "log"
    assert [text.get_text() for text in batch.get_yticklabels()] == ["64", "128", "256", "512"]
    assert series(batch, 1) == [(0.08, 64.0), (1.0, 128.0), (2.0, 512.0), (4.0, 512.0)]


@pytest.mark.parametrize(
    ("batches", "ticks"),
    [
        ((48, 80), ["48", "80"]),
        ((48,), ["48"]),
        ((16, 1 << 16), ["16", "128", "1024", "8192", "65536"]),
    ],
)
def test_the_axis_of_batches_has_a_few_plain_numbers(batches: tuple[int, ...], ticks: list[str]) -> None:
    panel = drawn([a_decision(10 * i, global_batch=b) for i, b in enumerate(batches, 1)], options())[0]
    assert [text.get_text() for text in panel.get_yticklabels()] == ticks


def test_similarity_is_shown_once_for_each_measurement_beside_its_target() -> None:
    similarity = drawn(GROWING, options(similarity=0.2))[1]
    assert series(similarity, 1) == [(1.0, 0.05), (2.0, -0.4)]
    assert {y for _, y in series(similarity, 2)} == {0.2}
    assert "target 0.2" in [text.get_text() for text in similarity.texts]


def test_workers_are_stacked_by_rank() -> None:
    workers = drawn(GROWING, options())[2]
    tops = [max(y for path in c.get_paths() for _, y in path.vertices) for c in workers.collections]
    assert tops == [20, 32]
    assert [text.get_text() for text in workers.get_legend().get_texts()] == ["rank 1", "rank 0"]
    many = [a_decision(1, workers=(1,) * 24, at_once=(1,) * 24)]
    workers = drawn(many, options())[2]
    assert workers.get_legend() is None
    assert [text.get_text() for text in workers.texts] == ["ranks 0 to 23,\nfrom below"]


def test_a_wide_range_of_losses_is_logarithmic() -> None:
    assert drawn(GROWING, options())[3].get_yscale() == "log"
    assert drawn([a_decision(1, loss=0.5), a_decision(2, loss=2.0)], options())[3].get_yscale() == "linear"
    assert drawn([a_decision(1, loss=-9.0), a_decision(2, loss=2.0)], options())[3].get_yscale() == "linear"


def test_a_noise_scale_stands_beside_the_batch_that_follows_it() -> None:
    decisions = [
        a_decision(10, similarity=None, noise_scale=100.0),
        a_decision(20, similarity=None, noise_scale=900.0, global_batch=128),
    ]
    panels = drawn(decisions, options(noise_scale=0.5))
    assert labels(panels)[1] == "noise scale (samples)"
    assert series(panels[1], 0) == [(0.1, 100.0), (0.2, 900.0)]
    assert series(panels[1], 1) == [(0.1, 128.0), (0.2, 256.0), (0.2, 256.0)]


@pytest.mark.parametrize(
    "decisions",
    [
        pytest.param([a_decision(0)], id="only one, before the first step"),
        pytest.param([a_decision(0, similarity=None, loss=None)], id="nothing measured"),
        pytest.param([a_decision(1, global_batch=48), a_decision(2, global_batch=80)], id="no power of two"),
        pytest.param([a_decision(1, global_batch=1), a_decision(2, global_batch=2**30)], id="many powers"),
        pytest.param([a_decision(1, workers=(0, 2))], id="a rank without workers"),
        pytest.param([a_decision(1, similarity=None, noise_scale=0.0)], id="no noise"),
        pytest.param([a_decision(1, loss=5e-324), a_decision(2, loss=1.7e308)], id="beyond all bounds"),
        pytest.param([a_decision(1, noise_scale=1e-9), a_decision(2, noise_scale=1.7e308)], id="no signal"),
    ],
)
@pytest.mark.parametrize("metric", ["similarity", "noise_scale"])
def test_odd_histories_can_be_drawn(decisions: list[Decision], metric: str, tmp_path: Path) -> None:
    batches_svg(decisions, options(**{metric: 0.5}), tmp_path / "b.svg", step=0, title="<&>$x$")
    found = [e.text for e in ET.parse(tmp_path / "b.svg").iter("{http://www.w3.org/2000/svg}text")]
    assert "<&>$x$" in found and "epoch" in found


def test_what_was_not_measured_has_no_panel() -> None:
    pinned = WorkerOptions.parse({"kind": "vsw", "workers": 4})
    panels = drawn([a_decision(1, similarity=None, loss=None)], pinned)
    assert labels(panels) == ["global batch (samples)", "stream workers"]


def test_a_long_history_is_drawn_small_with_its_extremes(tmp_path: Path) -> None:
    decisions = [
        a_decision(i, similarity=(i * 7919 % 1000) / 1000, loss=1.0 + (i == 12_345), global_batch=64 + i % 2)
        for i in range(20_000)
    ]
    loss = series(drawn(decisions, options())[3], 0)
    assert len(loss) <= 600 and (123.45, 2.0) in loss
    batches_svg(decisions, options(), tmp_path / "b.svg", step=0, title="t")
    assert (tmp_path / "b.svg").stat().st_size < 300_000


@given(st.lists(st.integers(-5, 5), max_size=200), st.integers(4, 40))
def test_thinning_keeps_order_ends_and_extremes(values: list[int], most: int) -> None:
    items = list(enumerate(values))
    kept = thinned(items, lambda item: float(item[1]), most)
    assert len(kept) <= max(most, 4) and kept == sorted(kept) and set(kept) <= set(items)
    if items:
        assert (kept[0], kept[-1]) == (items[0], items[-1])
        assert {min(v for _, v in kept), max(v for _, v in kept)} == {min(values), max(values)}
    if len(items) <= most:
        assert kept == items


# -- the page ------------------------------------------------------------------------------------------

JOB = JobResult(
    id=1,
    name="one",
    model="m",
    submit_s=0.0,
    start_s=1.0,
    end_s=101.0,
    state=JobState.COMPLETED,
    steps=10,
    step=10,
    steps_repeated=0,
    attempts=(
        AttemptResult(start_s=1.0, end_s=51.0, gpus=(0,), role=Role.SECONDARY, ended=Ended.SUSPENDED),
        AttemptResult(start_s=51.0, end_s=101.0, gpus=(0, 1), role=Role.PRIMARY, ended=Ended.COMPLETED),
    ),
    suspensions=1,
    overhead_s=5.0,
    metrics={"accuracy": 0.97531},
)
RESULT = Result(
    policy="marble",
    gpus=2,
    makespan_s=101.0,
    mean_jct_s=101.0,
    gpu_hours=0.04,
    utilisation=0.75,
    overhead_share=0.9,
    overhead_gpu_hours=0.002,
    lower_bound_s=None,
    jobs_total=1,
    jobs_completed=1,
    jobs=(JOB,),
)
SVG = '<?xml version="1.0"?>\n<svg id="a"><rect id="b" clip-path="url(#b)"/><use xlink:href="#b"/></svg>'
VOID = {"meta"}


def a_page(**more: Any) -> str:
    fields: dict[str, Any] = {
        "title": "hpcsched: /here",
        "state": "FINISHED",
        "began": "Began.",
        "result": RESULT,
        "gantt": SVG,
        "efficiencies": {1: 0.875},
    }
    return RunPage(**{**fields, **more}).html()


class Reader(HTMLParser):
    """Checks that all elements are closed in their order, and collects cells, tiles and other texts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.texts: dict[str, list[str]] = {}
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        if data.strip() and self.open:
            self.texts.setdefault(self.open[-1], []).append(data)

    @property
    def tiles(self) -> dict[str, str]:
        return dict(zip(self.texts["dt"], self.texts["dd"], strict=True))


def test_the_page_sums_up_and_lists_the_jobs() -> None:
    read = Reader(a_page())
    assert read.tiles == {
        "state": "FINISHED",
        "policy": "marble",
        "GPUs": "2",
        "jobs completed": "1 of 1",
        "makespan": "101.0 s",
        "mean JCT": "101.0 s",
        "GPU-hours": "0.04",
        "utilisation": "75%",
        "overhead": "5.0%",
    }
    assert dict(zip(read.texts["th"], read.texts["td"], strict=True)) == {
        "id": "1",
        "name": "one",
        "state": "COMPLETED",
        "GPUs": "1s > 2p",
        "submit (s)": "0.0",
        "start (s)": "1.0",
        "end (s)": "101.0",
        "JCT (s)": "101.0",
        "steps": "10",
        "suspended": "1",
        "overhead": "5.0%",
        "efficiency": "88%",
        "accuracy": "0.9753",
    }


def test_what_is_not_known_is_a_dash() -> None:
    waits = replace(
        JOB, id=2, state=JobState.PENDING, start_s=None, end_s=None, attempts=(), metrics={}, step=None
    )
    result = replace(RESULT, mean_jct_s=None, jobs_total=2, jobs=(JOB, waits))
    read = Reader(a_page(result=result, state="RUNNING"))
    assert read.tiles["mean JCT"] == "-" and read.tiles["time so far"] == "101.0 s"
    row = read.texts["td"][13:]
    assert row == ["2", "one", "PENDING", "-", "0.0", "-", "-", "-", "10", "1", "-", "-", "-"]


def test_the_time_of_an_attempt_that_goes_on_counts_until_now() -> None:
    runs = AttemptResult(start_s=51.0, end_s=None, gpus=(0, 1), role=Role.PRIMARY, ended=None)
    job = replace(JOB, state=JobState.RUNNING, end_s=None, attempts=(JOB.attempts[0], runs), overhead_s=10.0)
    for times in ({"makespan_s": 101.0}, {"makespan_s": 60.0, "background_end_s": 101.0}):
        assert "10.0%" in Reader(a_page(result=replace(RESULT, jobs=(job,), **times))).texts["td"]


def test_idle_gpus_are_told_host_by_host() -> None:
    host = HostIdle(gpus=2, gpu_hours=1.5, left_over_gpu_hours=1.25, whole_gpu_hours=1.0, given_back_s=30.0)
    busy = HostIdle(gpus=2, gpu_hours=0.0, left_over_gpu_hours=0.0, whole_gpu_hours=0.0)
    idle = Idle(
        gpu_hours=1.5, left_over_gpu_hours=1.25, given_back_gpu_hours=2.0, hosts={"n2": host, "n1": busy}
    )
    read = Reader(a_page(result=replace(RESULT, idle=idle)))
    assert "Idle GPUs" in read.texts["h2"] and read.tiles["GPU-hours idle"] == "1.50"
    cells = read.texts["td"]
    at = cells.index("n2")
    assert cells[at : at + 12] == ["n2", "2", "1.50", "1.25", "1.00", "30.0", "n1", "2", *["0.00"] * 3, "-"]
    none = Idle(gpu_hours=0.0, left_over_gpu_hours=0.0, given_back_gpu_hours=0.0, hosts={"n1": busy})
    assert "Idle GPUs" not in Reader(a_page(result=replace(RESULT, idle=none))).texts["h2"]


def test_background_jobs_and_the_bound_are_told_where_there_are_any() -> None:
    result = replace(RESULT, gap=0.125, background_total=3, background_completed=2)
    tiles = Reader(a_page(result=result)).tiles
    assert (tiles["above the bound"], tiles["in the background"]) == ("12.5%", "2 of 3")


def test_everything_that_users_name_is_escaped() -> None:
    evil = "<script>alert('&\"')</script>\x1b]0;x\x07\u202e"
    job = replace(JOB, name=evil, metrics={evil: 1.0})
    history = BatchHistory(job_id=1, name=evil, decisions=GROWING, options=options(), svg=SVG)
    page = a_page(
        title=evil,
        began=evil,
        notes=[evil],
        state=evil,
        result=replace(RESULT, policy=evil, jobs=(job,)),
        histories=[history],
    )
    assert "script" not in Reader(page).tags
    # Title twice, beginning, note, state, policy, the job's name in two places, and the metric.
    assert page.count("&lt;script&gt;") == 9
    assert {"\x1b", "\x07", "\u202e"}.isdisjoint(page)
    assert "default-src 'none'" in page  # nothing would run even so


def test_the_page_needs_nothing_else_and_figures_keep_their_ids_apart(tmp_path: Path) -> None:
    gantt_svg([RESULT], tmp_path / "g.svg")
    batches_svg(GROWING, options(), tmp_path / "b.svg", step=400, title="one")
    svg = (tmp_path / "b.svg").read_text()
    histories = [
        BatchHistory(job_id=i, name=f"job-{i}", decisions=GROWING, options=options(), svg=svg) for i in (1, 2)
    ]
    page = a_page(gantt=(tmp_path / "g.svg").read_text(), histories=histories)
    assert {"script", "link", "img", "iframe"}.isdisjoint(Reader(page).tags)
    assert page.count("<svg") == 3 and "<?xml" not in page and page.count("<!DOCTYPE") == 1
    ids = re.findall(r'\bid="([^"]+)"', page)
    used = re.findall(r'(?:url\(|href=")#([^")]+)', page)
    assert len(ids) == len(set(ids)) and used and set(used) <= set(ids)
    assert not re.search(r'(src|(?<!xlink:)href)="(?!#)|@import|url\((?!#)', page)


def test_figures_have_the_ink_of_the_page_in_the_dark_and_do_not_shrink_until_nobody_can_read(
    tmp_path: Path,
) -> None:
    gantt_svg([RESULT], tmp_path / "g.svg", links={1})
    detail = JobDetail(job_id=1, name="one", state=JobState.COMPLETED, why="", facts=(), story=())
    page = a_page(gantt=(tmp_path / "g.svg").read_text(), details=[detail])
    figure = page[page.index("<svg") : page.index("</svg>")]
    assert "fill: var(--ink)" in figure and "fill: var(--paper)" in figure
    assert (
        INK not in figure
        and 'style="min-width: ' in figure
        and 'href="#job-1"' in figure
        and "_blank" not in page
    )
    assert "prefers-color-scheme: dark" in page and page.count('id="job-1"') == 1
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    assert f'<meta http-equiv="Content-Security-Policy" content="{policy}">' in page


@pytest.mark.parametrize(("states", "opened"), [("CF", 2), ("CFCCCC", 1), ("FFFFFF", 0)])
def test_of_many_jobs_those_that_failed_are_open(states: str, opened: int) -> None:
    kinds = {"C": JobState.COMPLETED, "F": JobState.FAILED}
    details = [
        JobDetail(
            job_id=i, name=f"j{i}", state=kinds[state], why="w", facts=[("a", "b")], story=[("0:00", "s")]
        )
        for i, state in enumerate(states)
    ]
    page = a_page(details=details)
    assert (page.count("<details open>"), page.count("<details>")) == (opened, len(states) - opened)


def test_a_section_tells_where_a_jobs_batches_are() -> None:
    history = BatchHistory(
        job_id=7, name="digits", decisions=GROWING, options=options(similarity=0.2, every=20), svg=SVG
    )
    text = re.sub("<[^>]*>", "", a_page(histories=[history]))
    assert "Job 7: digits" in text
    assert "global batch from 64 to 512 samples" in text and "bounds 64 to 512" in text
    assert "workers 32 of 16 samples on 2 ranks" in text and "similarity -0.4" in text
    assert "target 0.2, every 20 updates" in text


def test_a_run_without_chart_or_listed_jobs_is_a_page_all_the_same() -> None:
    read = Reader(a_page(gantt=None, result=replace(RESULT, jobs=()), notes=["too many"]))
    assert {"svg", "table"}.isdisjoint(read.tags) and read.texts["p"][-1] == "too many"


def test_without_jinja2_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(MissingExtra, match=r"^a page needs jinja2: install hpcsched\[report\]$"):
        a_page()
