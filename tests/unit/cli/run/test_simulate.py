"""`hpcsched simulate`: job files and traces under several policies, on one screen."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from simulatebench import JOBS, PROFILES, SET, call, make_place, measures, page, refused, shown, write_set

from hpcsched.cli.run import progress
from hpcsched.cli.run import simulate as module
from hpcsched.cli.run.results import simulated
from hpcsched.policy import POLICIES
from hpcsched.testing.builders import a_job

CHOSEN = ("exclusive", "marble", "planner")


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return make_place(tmp_path, monkeypatch)


# --- job files --------------------------------------------------------------------------------


def test_three_policies_on_one_screen() -> None:
    text = shown(*SET, "--policy", ",".join(CHOSEN))
    lines = text.splitlines()
    assert len(lines) < 24 and max(map(len, lines)) <= 80
    assert lines[0] == "jobs.toml: 4 jobs on 4 GPUs"
    for number, name in enumerate(("one", "two", "three", "four"), 1):
        assert any(line.split()[:2] == [str(number), name] for line in lines)
    rows = measures(text)
    results = page(*SET, "--policy", ",".join(CHOSEN))
    first, *others = (result["makespan_s"] for result in results)
    told = [f"{first:.1f}"]
    for other in others:
        told += [f"{other:.1f}", f"{100 * (other / first - 1):+.1f}%"]
    assert rows["makespan(s)"] == told
    assert rows["lower bound(s)"] == [f"{results[0]['lower_bound_s']:.1f}"] * 3
    assert {"mean JCT(s)", "p95 JCT(s)", "mean wait(s)", "utilisation(%)", "GPU-hours", "switches"} <= set(
        rows
    )


def test_the_bounds_are_below_every_policy_and_the_gaps_say_by_how_much() -> None:
    for result in page(*SET, "--policy", ",".join(POLICIES)):
        assert 0 < result["lower_bound_s"] <= result["makespan_s"]
        assert 0 < result["mean_jct_bound_s"] <= result["mean_jct_s"]
        assert result["gap"] == pytest.approx(result["makespan_s"] / result["lower_bound_s"] - 1)
        assert result["jct_gap"] == pytest.approx(result["mean_jct_s"] / result["mean_jct_bound_s"] - 1)


def test_with_too_many_jobs_for_the_screen_only_the_measures_are_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_set([a_job(f"j{i}", "a", 100 + i) for i in range(12)])
    words = (*SET, "--policy", "exclusive,marble")
    text = shown(*words)
    assert text.splitlines()[0] == "jobs.toml: 12 jobs on 4 GPUs (--jobs lists them)"
    assert "j11" not in text and len(text.splitlines()) < 24
    monkeypatch.setattr(module, "_PLAIN_HEIGHT", 40)
    assert "j11" in shown(*words) and "(--jobs" not in shown(*words)


def test_a_list_of_jobs_of_each_policy_comes_before_the_comparison() -> None:
    text = shown(*SET, "--policy", "exclusive,marble", "--jobs")
    assert text.count("JOBID") == 2
    places = [text.index(what) for what in ("exclusive on 4 GPUs", "marble on 4 GPUs", "4 jobs on 4 GPUs")]
    assert places == sorted(places) and "makespan(s)" in text[places[-1] :]


def test_one_policy_has_its_list_of_jobs_however_many_there_are() -> None:
    write_set([a_job(f"j{i}", "a", 100) for i in range(60)])
    lines = shown(*SET).splitlines()
    assert lines[0].startswith("marble on 4 GPUs: makespan") and lines[1].startswith("JOBID")
    assert lines[2 + 60] == "" and lines[2 + 60 + 1].split() == ["marble"]


def test_one_policy_has_the_measures_that_several_have() -> None:
    one, two = measures(shown(*SET)), measures(shown(*SET, "--policy", "marble,exclusive"))
    assert one.keys() > {"makespan(s)", "mean wait(s)", "p95 JCT(s)", "overhead(%)", "lower bound(s)"}
    assert all(one[label] == two[label][:1] for label in one if "(%)" in label)


def test_options_go_to_the_policies_that_know_them_and_the_files_to_its_own() -> None:
    write_set(JOBS, head='[policy]\nname = "marble"\npromote = "never"')
    never, always = (
        page(*SET),
        page(*SET, "--policy", "exclusive,marble", "--policy-option", "promote=always"),
    )
    assert never[0]["switches"] == 0 and never[0]["policy"] == "marble"
    assert [result["policy"] for result in always] == ["exclusive", "marble"]
    assert always[1]["switches"] > 0
    said = refused(*SET, "--policy", "exclusive,marble", "--policy-option", "promte=never")
    assert said == (
        "--policy-option: promte: no policy given has this option; accepted: exclusive: none; marble: promote"
    )
    assert "marble.promte: unknown option; accepted: promote" in refused(
        *SET, "--policy-option", "promte=never"
    )
    assert "exclusive" in refused(*SET, "--policy", "exclusive", "--policy-option", "promote=never")


def test_what_a_file_says_of_its_policy_is_checked_whatever_policy_is_simulated() -> None:
    for head, says in (
        ('name = "plannr"', "jobs.toml: policy: 'plannr'; accepted: marble"),
        ('name = "planner"\neps = -1', "jobs.toml: policy: eps: -1; accepted: a number of at least 0"),
        ("eps = 1", "jobs.toml: policy: marble.eps: unknown option; accepted: promote"),
    ):
        write_set(JOBS, head=f"[policy]\n{head}")
        assert refused(*SET, "--policy", "exclusive").startswith(says)


def test_what_is_given_twice_is_refused() -> None:
    both = ("--policy", "marble", "--policy", "planner")
    assert refused(*SET, *both) == "--policy: 'marble' and 'planner'; accepted: one list, with commas"
    twice = ("--policy", "planner", "--policy-option", "eps=1", "--policy-option")
    assert refused(*SET, *twice, "eps=2") == "--policy-option: eps: 1 and 2; accepted: one value"
    assert page(*SET, *twice, "eps=1.0")


def test_what_cannot_be_simulated_is_named_with_its_file(place: Path) -> None:
    said = refused("jobs.toml", "--gpus-per-node", 4)
    assert said.startswith("jobs.toml: job one.model: no profile of 'a'")
    text = (place / "jobs.toml").read_text().replace("steps = 3000", "")
    (place / "jobs.toml").write_text(text)
    assert refused(*SET).startswith("jobs.toml: job one.steps: missing")


def test_how_far_a_simulation_is_shows_on_a_terminal_and_is_gone_at_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run() -> None:
        with progress.ProgressLine("marble", len(JOBS)) as shown:
            simulated(JOBS, PROFILES, gpus=4, policy="marble", options={}, watch=shown.watch)

    run()
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "PERIOD_S", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    run()
    lines = capsys.readouterr().err.split("\r")
    assert lines[1] == "hpcsched: simulating marble: 0 of 4 jobs done\x1b[K"
    assert lines[-2] == "hpcsched: simulating marble: 4 of 4 jobs done\x1b[K"
    assert lines[-1] == "\x1b[K"


def test_options_in_the_settings_count_as_they_do_in_a_run(place: Path) -> None:
    (place / "site.toml").write_text('policy_option = { promote = "never" }\n')
    assert page(*SET)[0]["switches"] == 0
    assert page(*SET, "--policy-option", "promote=always")[0]["switches"] > 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "no jobs; accepted: one of JOBS.toml, --trace F.csv and --run [DIR]"),
        (("jobs.toml", "--run", "."), "JOBS.toml and --run"),
        (("jobs.toml", "--trace", "t.csv", "--gpus-per-node", 2), "JOBS.toml and --trace"),
        (("--trace", "t.csv", "--run", "."), "--trace and --run"),
        (("jobs.toml",), "--gpus-per-node: missing"),
        (("--trace", "t.csv"), "--gpus-per-node: missing"),
        (("--trace", "missing.csv", "--gpus-per-node", 2), "missing.csv"),
        ((*SET, "--workload", "w"), "--workload"),
        ((*SET, "--policy", "marble,best"), "'best'; accepted: marble"),
        (("jobs.toml", "--gpus-per-node", 4), "no profile of 'a'"),
        ((*SET, "--gantt", "nowhere/g.svg"), "no folder nowhere"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(words: tuple[object, ...], says: str) -> None:
    assert says in refused(*words)


@pytest.mark.long
def test_charts_of_several_policies_share_a_file(place: Path) -> None:
    shown(*SET, "--policy", ",".join(CHOSEN), "--gantt", "g.svg")
    text = (place / "g.svg").read_text()
    assert all(f">{name} on 4 GPUs: makespan" in text for name in CHOSEN)
    (place / "g.svg").unlink()
    (place / "g.svg").mkdir()
    assert "--gantt: g.svg" in refused(*SET, "--gantt", "g.svg")


# --- traces -----------------------------------------------------------------------------------


def write_trace(count: int, gpus: str = "1") -> tuple[object, ...]:
    rows = [f"{10 * i},{30 + i},{gpus}" for i in range(count)]
    Path("t.csv").write_text("\n".join(["submit_s,duration_s,gpus", *rows, ""]))
    return ("--trace", "t.csv", "--gpus-per-node", 4)


def test_a_trace_of_jobs_of_fixed_size() -> None:
    words = write_trace(3)
    (result,) = page(*words)
    assert [(job["start_s"], job["end_s"]) for job in result["jobs"]] == [(0, 30), (10, 41), (20, 52)]
    assert (result["mean_wait_s"], result["mean_queued_s"]) == (0, 0)
    assert shown(*words).splitlines()[1].startswith("JOBID")
    assert measures(shown(*words, "--policy", "exclusive,marble"))["makespan(s)"] == [
        "93.0",
        "52.0",
        "-44.1%",
    ]


def test_a_trace_says_how_many_lines_were_left_out_or_rounded() -> None:
    Path("t.csv").write_text("submit_s,duration_s,gpus\n0,10,5\n0,10,9\n0,10,100\n0,10,2\n")
    done = call("--trace", "t.csv", "--gpus-per-node", 4, "--nodes", 2)
    assert done.stderr == (
        "hpcsched: 2 jobs left out: more GPUs asked for than there are; "
        "1 job rounded up to the same GPU count on each host\n"
    )
    assert done.stdout.startswith("marble on 8 GPUs: makespan 20.0 s")
    assert "4 jobs, all for more" in refused(*write_trace(4, gpus="5"))


def test_the_jobs_of_a_long_trace_are_listed_only_if_wanted() -> None:
    words = write_trace(51)
    assert "JOBID" not in shown(*words)
    assert shown(*words).splitlines()[0] == "t.csv: 51 jobs on 4 GPUs (--jobs lists them)"
    assert shown(*words, "--jobs").count("\n") > 51
    assert "JOBID" in shown(*write_trace(50))


def test_elastic_jobs_of_a_trace_go_by_profiles() -> None:
    Path("t.csv").write_text("time,model,steps,workload\n0,a,3000,x\n0,b,4000,x\n7,b,100,y\n")
    common = ("--trace", "t.csv", "--gpus-per-node", 4)
    (result,) = page(*common, "--workload", "x", "--profiles", "p.json")
    assert [job["model"] for job in result["jobs"]] == ["a", "b"]
    assert "no profile of 'b'" in refused(*common, "--workload", "y")
    assert "--workload" in refused(*common)


def test_of_very_many_jobs_only_the_measures_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    words = write_trace(20)
    (whole,) = page(*words)
    monkeypatch.setattr(module, "MOST_KEPT", 19)
    monkeypatch.setattr(module, "MOST_DRAWN", 19)
    (lean,) = page(*words)
    assert (lean["jobs"], lean["jobs_total"], lean["jobs_completed"]) == ([], 20, 20)
    del whole["idle"]
    assert {**whole, "jobs": []} == lean
    assert len(page(*words, "--jobs")[0]["jobs"]) == 20
    assert "--gantt: 20 jobs; accepted: at most 19" in refused(*words, "--gantt", "g.svg")


def test_nodes_that_nothing_could_use_are_given_back() -> None:
    Path("tail.csv").write_text("time,model,steps\n0,a,3000\n0,a,300\n")
    words = ("--trace", "tail.csv", "--gpus-per-node", 1, "--nodes", 2, "--profiles", "p.json")
    (kept,), (released,) = page(*words), page(*words, "--release-idle-nodes", 0)
    assert kept["makespan_s"] == released["makespan_s"]
    assert kept["idle"]["given_back_gpu_hours"] == 0.0 < released["idle"]["given_back_gpu_hours"]
    assert kept["utilisation"] < released["utilisation"]
    assert "GPU-hours given back" in shown(*words, "--release-idle-nodes", 0)
