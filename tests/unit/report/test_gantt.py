"""Gantt charts: what is drawn, that it is the same every time, and that files are whole."""

import sys
import xml.etree.ElementTree as ET

import pytest
from msgspec.structs import replace

from hpcsched.core.model import Ended, JobState, Role
from hpcsched.report.drawing import MissingExtra
from hpcsched.report.gantt import _darker, _runs, gantt_svg
from hpcsched.report.result import AttemptResult, JobResult, Result

pytestmark = pytest.mark.long


def result(jobs, gpus=6, policy="marble", lower_bound_s=None):
    """Job i has the i-th of `jobs`, each a list of (gpus, start_s, end_s, role, ended)."""
    rows = []
    for i, stretches in enumerate(jobs, 1):
        attempts = tuple(
            AttemptResult(start_s=s, end_s=e, gpus=g, role=r, ended=x, overhead_s=4.0)
            for g, s, e, r, x in stretches
        )
        rows.append(
            JobResult(
                id=i,
                name=f"job-{i}",
                model="m",
                submit_s=0.0,
                start_s=0.0,
                end_s=stretches[-1][2],
                state=JobState.COMPLETED,
                steps=1,
                step=1,
                steps_repeated=0,
                attempts=attempts,
            )
        )
    ends = [e for stretches in jobs for _, _, e, _, _ in stretches if e is not None]
    return Result(
        policy=policy,
        gpus=gpus,
        makespan_s=max(ends, default=0.0),
        mean_jct_s=None,
        gpu_hours=1.0,
        utilisation=0.5,
        overhead_share=0.1,
        lower_bound_s=lower_bound_s,
        jobs=tuple(rows),
    )


P, S = Role.PRIMARY, Role.SECONDARY
SET_2 = result(
    [
        [((0, 1, 2, 3), 0.0, 501.0, P, Ended.COMPLETED)],
        [((4, 5), 0.0, 112.0, S, Ended.COMPLETED)],
        [((4, 5), 112.0, 549.0, S, Ended.SUSPENDED), ((0, 1, 2), 549.0, 608.0, P, Ended.COMPLETED)],
    ],
    lower_bound_s=501.0,
)


def texts(path):
    return [element.text for element in ET.parse(path).iter("{http://www.w3.org/2000/svg}text")]


def test_jobs_policies_and_marks_are_named(tmp_path):
    gantt_svg([SET_2, result([[((0,), 0.0, 900.0, P, Ended.RESIZED)]], policy="other")], tmp_path / "g.svg")
    found = texts(tmp_path / "g.svg")
    assert {"job-1", "job-2", "job-3", "time (s)", "primary", "secondary", "suspended", "resized"} <= set(
        found
    )
    assert "lower bound" in found
    assert [t.split()[0] for t in found if t and " on " in t] == ["marble", "other"]


def test_the_same_results_give_the_same_bytes(tmp_path):
    gantt_svg([SET_2], tmp_path / "a.svg")
    gantt_svg([SET_2], tmp_path / "b.svg")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_the_file_is_replaced_whole_and_nothing_is_left_beside_it(tmp_path, monkeypatch):
    path = tmp_path / "g.svg"
    path.write_text("old")

    def fail(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", fail)
    with pytest.raises(OSError, match="disk full"):
        gantt_svg([SET_2], path)
    assert path.read_text() == "old"
    monkeypatch.undo()
    gantt_svg([SET_2], path)
    assert path.read_text().startswith("<?xml")
    assert list(tmp_path.iterdir()) == [path]


def test_global_style_is_left_alone(tmp_path):
    import matplotlib as mpl

    def state():
        pyplot = "matplotlib.pyplot" in sys.modules
        return pyplot, {key: mpl.rcParams[key] for key in mpl.rcParams if key != "backend"}

    before = state()
    gantt_svg([SET_2], tmp_path / "g.svg")
    assert state() == before


def test_without_matplotlib_one_line_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtra, match=r"^[^\n]*install hpcsched\[report\]$"):
        gantt_svg([SET_2], tmp_path / "g.svg")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "results",
    [
        pytest.param([], id="no result"),
        pytest.param([result([])], id="no job"),
        pytest.param(
            [result([[((0,), 0.0, None, P, None)], [((1,), 0.0, 9.0, S, Ended.LOST)]])], id="running"
        ),
        pytest.param(
            [
                result(
                    [
                        [((i % 64, 63 - i % 64), i * 100.0, i * 100.0 + 90, P, Ended.COMPLETED)]
                        for i in range(60)
                    ],
                    64,
                )
            ],
            id="many",
        ),
    ],
)
def test_odd_and_large_results_can_be_drawn(results, tmp_path):
    gantt_svg(results, tmp_path / "g.svg")
    ET.parse(tmp_path / "g.svg")


def test_names_are_text_not_formulas_or_markup(tmp_path):
    gantt_svg([result([[((0, 1), 0.0, 9.0, P, Ended.COMPLETED)]], policy="$a_b$<&>")], tmp_path / "g.svg")
    assert any(t and t.startswith("$a_b$<&> on 6 GPUs") for t in texts(tmp_path / "g.svg"))


def test_labels_that_do_not_fit_give_way_to_the_id_and_then_to_nothing(tmp_path):
    jobs = [
        [((0,), start, start + width, P, Ended.COMPLETED)] for start, width in ((0, 900), (900, 40), (940, 8))
    ]
    gantt_svg([result(jobs, gpus=1)], tmp_path / "g.svg")
    bars = texts(tmp_path / "g.svg")
    assert bars.count("job-1") == 2  # bar and legend
    assert (bars.count("job-2"), bars.count("#2")) == (1, 1)
    assert (bars.count("job-3"), bars.count("#3")) == (1, 0)


def test_neighbouring_gpus_share_a_bar():
    assert list(_runs((5, 0, 1, 3, 4))) == [(0, 2), (3, 3)]
    assert list(_runs(())) == []


def test_the_ninth_job_is_darker_than_the_first_and_the_same_in_every_panel(tmp_path):
    jobs = [[((i % 6,), 10.0 * i, 10.0 * i + 9, P, Ended.COMPLETED)] for i in range(9)]
    gantt_svg([result(jobs), result(jobs, policy="other")], tmp_path / "g.svg")
    drawn = (tmp_path / "g.svg").read_text().lower()
    assert _darker("#56B4E9") == "#346c8c"
    assert drawn.count("fill: #346c8c") == 3  # a bar in each panel, and the legend
    assert drawn.count("fill: #56b4e9") == 3


def test_what_really_happened_is_told_from_its_simulation(tmp_path):
    bars = [[((0,), 0.0, 9.0, P, None)]]
    gantt_svg([replace(result(bars), label="so far"), result(bars)], tmp_path / "g.svg")
    assert [t.partition(":")[0] for t in texts(tmp_path / "g.svg") if t and " on " in t] == [
        "so far (marble) on 6 GPUs",
        "marble on 6 GPUs",
    ]
