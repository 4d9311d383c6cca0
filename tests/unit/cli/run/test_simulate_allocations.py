"""`hpcsched simulate --allocation`: nodes that come and go."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from simulatebench import JOBS, PROFILES, call, make_place, page, refused, shown, write_set

from hpcsched.core.machine import Machine
from hpcsched.policy import POLICIES
from hpcsched.store.rundir import RunDir
from hpcsched.testing.builders import a_job
from hpcsched.testing.simulation import Rehearsal, Scene

JOBS_IN = ("jobs.toml", "--profiles", "p.json")


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("HPCSCHED_CPUS", raising=False)
    return make_place(tmp_path, monkeypatch)


def in_allocations(*asked: str, more: tuple[object, ...] = ()) -> list[dict[str, Any]]:
    return page(*JOBS_IN, *(word for one in asked for word in ("--allocation", one)), *more)


def parts(result: Mapping[str, Any]) -> list[tuple[float, float]]:
    """GPU-hours of each allocation: those that jobs used, and all."""
    return [(one["used_gpu_hours"], one["gpu_hours"]) for one in result["allocations"]]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_one_allocation_all_the_time_is_what_nodes_are(policy: str) -> None:
    same = page(*JOBS_IN, "--gpus-per-node", 4, "--policy", policy)[0]
    other = in_allocations("4@0", more=("--policy", policy))[0]
    assert parts(other) == [(pytest.approx(same["gpu_hours"]), pytest.approx(4 * same["makespan_s"] / 3600))]
    assert "allocations" not in same
    both = {**same, "allocations": other["allocations"]}
    assert {**other, "idle": same["idle"], "utilisation": same["utilisation"]} == both
    assert other["utilisation"] == pytest.approx(same["utilisation"])


def test_jobs_begin_when_the_first_allocation_does() -> None:
    at_once, late = page(*JOBS_IN, "--gpus-per-node", 4)[0], in_allocations("4@1h")[0]
    # The third job comes 40 s after the others; in an hour all of them are there.
    assert late["makespan_s"] == pytest.approx(3600 + at_once["makespan_s"], rel=0.02)
    assert late["makespan_s"] >= late["lower_bound_s"] > 3600
    assert late["allocations"][0]["start_s"] == 3600


def test_a_job_goes_on_in_the_next_allocation() -> None:
    write_set([a_job("one", "a", 6000)])
    # It trains at 24 steps/s after 5 s. Saving begins after 200 - 60 - 3 s, and takes 3.
    result = in_allocations("3@0+200", "3@1000")[0]
    [job] = result["jobs"]
    first, second = job["attempts"]
    assert first["ended"] == "suspended" and first["end_s"] == pytest.approx(140, abs=0.1)
    done = (137 - 5) * 24
    assert second["start_s"] == 1000
    assert job["end_s"] == pytest.approx(1000 + 4 + (6000 - done) / 24, abs=0.1)
    # With all of the 200 s, and one launch.
    assert result["lower_bound_s"] == pytest.approx(1000 + 4 + 6000 / 24 - 200)
    used = [3 * first["end_s"] / 3600, 3 * (job["end_s"] - 1000) / 3600]
    assert parts(result) == [(pytest.approx(hours), pytest.approx(hours)) for hours in used]
    assert [one["gpus"] for one in result["allocations"]] == [[0, 1, 2], [3, 4, 5]]
    assert [one["end_s"] for one in result["allocations"]] == [200, None]


def test_an_allocation_that_comes_when_all_is_done_is_not_used() -> None:
    alone, result = page(*JOBS_IN, "--gpus-per-node", 4)[0], in_allocations("4@0", "2x8@300h+1h")[0]
    assert result["makespan_s"] == alone["makespan_s"] and result["gpus"] == 4
    assert parts(result)[1] == (0, 0)
    assert result["utilisation"] == pytest.approx(alone["utilisation"])
    assert result["idle"]["gpu_hours"] == pytest.approx(alone["idle"]["gpu_hours"])


def test_nodes_that_stay_are_an_allocation_beside_the_others() -> None:
    words = ("--gpus-per-node", 2, "--nodes", 2)
    result = in_allocations("3@50+10m", more=words)[0]
    shapes = [(one["nodes"], one["gpus_per_node"], one["end_s"]) for one in result["allocations"]]
    assert shapes == [(2, 2, None), (1, 3, 650)] and result["gpus"] == 7
    assert in_allocations("3@50+10m", more=("--gpus-per-node", 0))[0]["gpus"] == 3


def test_what_is_not_done_in_the_allocations_is_said() -> None:
    done = call(*JOBS_IN, "--allocation", "4@0+3m", "--policy", "marble,exclusive")
    assert done.exit_code == 0
    said = "not done in these allocations"
    assert f"hpcsched: marble: 4 jobs of 4 {said}" in done.stderr
    assert f"hpcsched: exclusive: 4 jobs of 4 {said}" in done.stderr
    assert call(*JOBS_IN, "--allocation", "4@0").stderr == ""
    result = in_allocations("4@0+3m")[0]
    assert result["jobs_completed"] == 0 and result["lower_bound_s"] is None


def test_the_table_tells_what_each_policy_used() -> None:
    words = (*JOBS_IN, "--allocation", "2@0+5m", "--allocation", "2x4@100")
    lines = shown(*words, "--policy", "marble,exclusive").splitlines()
    assert lines[0] == "jobs.toml: 4 jobs on 2 allocations, at most 10 GPUs at once (--jobs lists them)"
    at = lines.index("allocations, and GPU-hours used of each:")
    assert lines[at + 1].split() == ["NODES", "GPUS", "FROM(s)", "UNTIL(s)", "marble", "exclusive"]
    assert lines[at + 2].split()[:4] == ["1", "2", "0.0", "300.0"]
    assert lines[at + 3].split()[:4] == ["2", "4", "100.0", "-"]
    [marble, _] = in_allocations("2@0+5m", "2x4@100", more=("--policy", "marble,exclusive"))
    used, all_of_it = parts(marble)[1]
    assert lines[at + 3].split()[4:7] == [f"{used:.2f}", "of", f"{all_of_it:.2f}"]
    assert "allocations, and GPU-hours used of each:" in shown(*words)
    assert "allocations, and" not in shown(*JOBS_IN, "--gpus-per-node", 4)


FORM = "[NODESx]GPUS[:TYPE]@START[+TIME], such as 2x8@1h+4h: 2 nodes of 8 GPUs each, in an hour, for 4 hours"


@pytest.mark.parametrize(
    ("text", "accepted"),
    [
        *(
            (text, FORM)
            for text in ("8", "8@", "@1h", "x8@1h", "8@1h+", "8@soon", "8@1h+2h+3h", "8@-1", "8@inf")
        ),
        *((text, FORM) for text in ("8:@0", "8: @0", "8:H200", ":H200@0", "8 H200@0", "8:H200@0@1h")),
        ("0x8@0", "at least 1 node"),
        ("8@1h+0", "a TIME of more than 0"),
        ("8@366d", "times of at most a year: 365d"),
        ("8@0+366d", "times of at most a year: 365d"),
        ("129x8@0", "at most 1024 GPUs on all its nodes"),
    ],
)
def test_what_is_no_allocation_is_refused(text: str, accepted: str) -> None:
    assert refused(*JOBS_IN, "--allocation", text) == f"--allocation: {text!r}; accepted: {accepted}"


def test_what_no_job_could_use_is_refused() -> None:
    said = "--allocation: no GPUs; accepted: at least 1 on each node, or --cpus"
    assert refused(*JOBS_IN, "--allocation", "0@0") == said
    said = "--nodes: 2; accepted: with --gpus-per-node or --cpus"
    assert refused(*JOBS_IN, "--allocation", "4@0", "--nodes", 2) == said
    many = [word for _ in range(1001) for word in ("--allocation", "1@0")]
    assert refused(*JOBS_IN, *many) == "--allocation: 1001 of them; accepted: at most 1000"


def test_jobs_must_fit_what_is_there_at_the_same_time() -> None:
    head = "[defaults]\ngpus = 4\nnodes = 2"
    write_set([a_job("one", "b", 300)], head=head)
    assert "job one.gpus: 4 GPUs; accepted: at most 2" in refused(
        *JOBS_IN, "--allocation", "4@0", "--allocation", "2@0"
    )
    apart = ("--allocation", "4@0+1h", "--allocation", "4@1h+1h")
    assert "job one.nodes: 2 hosts; accepted: at most 1" in refused(*JOBS_IN, *apart)
    [result] = in_allocations("4@0+1h", "4@30m+1h")
    assert result["jobs"][0]["start_s"] == 1800


def test_a_trace_is_cut_to_what_allocations_hold() -> None:
    Path("t.csv").write_text("submit_s,duration_s,gpus\n0,600,2\n10,900,8\n100,4000,16\n")
    done = call("--trace", "t.csv", "--allocation", "2x4@1h+2h", "--allocation", "2@0", "--json")
    assert "1 job left out" in done.stderr
    [result] = page("--trace", "t.csv", "--allocation", "2x4@1h+2h", "--allocation", "2@0")
    assert [(job["start_s"], job["end_s"]) for job in result["jobs"]] == [(0, 600), (3600, 4500)]


def test_jobs_on_cpu_cores_come_with_the_nodes() -> None:
    Path("ps.toml").write_text(
        'schema = 1\n[[job]]\nname = "one"\nmodel = "ResNet-50"\nsteps = 20\n'
        'trainer = "x:Y"\nstrategy = { kind = "ps", cpus = 4 }\n'
    )
    words = ("ps.toml", "--cpus", 8)
    there, late = page(*words)[0], page(*words, "--allocation", "0@2h")[0]
    assert late["makespan_s"] == pytest.approx(7200 + there["makespan_s"])
    assert late["jobs"][0]["attempts"][0]["host"] == "node1"


def test_a_run_in_other_allocations() -> None:
    rundir = RunDir(Path("hpcsched-run"))
    rundir.make()
    Path("rehearsal").mkdir()
    Rehearsal(Scene(jobs=JOBS, profiles=PROFILES, gpus=4), Path("rehearsal"))
    Path("rehearsal/whole.jsonl").rename(rundir.journal)
    was, late = page("--run", "--allocation", "4@1h")
    assert late["makespan_s"] == pytest.approx(3600 + was["makespan_s"], rel=0.02)
    assert "1 allocation, at most 4 GPUs at once" in shown("--run", "--allocation", "4@1h")


@pytest.mark.long
def test_the_chart_shows_when_gpus_are_not_there() -> None:
    pytest.importorskip("matplotlib")
    words = (*JOBS_IN, "--allocation", "2@0+5m", "--allocation", "2@100", "--gantt", "c.svg")
    shown(*words)
    assert "not there" in Path("c.svg").read_text()
    shown(*JOBS_IN, "--gpus-per-node", 4, "--gantt", "c.svg")
    assert "not there" not in Path("c.svg").read_text()


def test_what_comes_at_the_same_time_is_seen_at_once() -> None:
    """A policy chooses among all nodes that are there at the beginning."""
    seen: list[int] = []

    from hpcsched.sim.blocks import Block, joining, placed
    from hpcsched.sim.engine import Simulation

    def watch(event: object, actions: object, machine: Machine) -> None:
        seen.append(len(machine.ledger.devices))

    blocks = [Block(gpus=1), Block(gpus=2, nodes=2, start_s=5.0, lasts_s=300.0), Block(gpus=1)]
    events = joining(placed(blocks))
    assert [(event.at, len(event.devices)) for event in events] == [(0.0, 2), (5.0, 4)]
    Simulation([a_job("one", "a", 9000)], PROFILES, happenings=events, watch=watch).run()
    assert set(seen) == {0, 2, 6} and seen[-1] == 2


TYPED = ("two.toml", "--profiles", "two.json", "--device-type", "A100")


def write_typed(place: Path, *more: str, jobs: tuple[str, ...] = ("a", "b", "old")) -> None:
    """Jobs of one GPU and 300 steps each: 300 s on an A100, 100 s on an H200. `more` is said of the last."""
    common = '"model": "m", "nodes": 1, "start_s": 0, "suspend_s": 0'
    profiles = ", ".join(
        f'{{{common}, "device": "{device}", "throughput": {{"1": {rate}}}}}'
        for device, rate in {"A100": 1.0, "H200": 3.0}.items()
    )
    (place / "two.json").write_text(f'{{"schema": 1, "profiles": [{profiles}]}}')
    job = 'model = "m"\nreplay = true\nsteps = 300\ngpus = 1\n'
    tables = [f'[[job]]\nname = "{name}"\n{job}' for name in jobs]
    (place / "two.toml").write_text("schema = 1\n" + "".join(tables) + "\n".join(more))


def test_nodes_with_gpus_of_another_type(place: Path) -> None:
    write_typed(place, 'gpu_type = "a100"')
    asked = ("--allocation", "2@0", "--allocation", "1x1: H200 @0", "--policy", "marble")
    [result] = page(*TYPED, *asked)
    assert {job["name"]: job["end_s"] for job in result["jobs"]} == {"a": 100.0, "b": 300.0, "old": 300.0}
    assert [one.get("gpu_type") for one in result["allocations"]] == ["A100", "H200"]
    # Three jobs of 100 s, on one GPU that is worth one and two that are worth a third.
    assert result["lower_bound_s"] == pytest.approx(300 / (5 / 3))
    assert [line.split()[:3] for line in shown(*TYPED, *asked).splitlines()[-3:]] == [
        ["NODES", "GPUS", "TYPE"],
        ["1", "2", "A100"],
        ["1", "1", "H200"],
    ]
    [same] = page(*TYPED, "--gpus-per-node", 2, *asked[2:])
    assert same == result, "nodes that are there all the time have GPUs of --device-type"


@pytest.mark.parametrize(
    ("asked", "ends"),
    [
        (["1@0", "1:H200@30"], [130, 300]),  # one starts on what there is, and stays
        (["1:H200@0", "1@30"], [100, 330]),
        (["1:H200@30", "1@0+40"], [130, 230]),  # 40 s are too short to start in
        (["1:V100@0"], [300, 600]),
        (["1:H200@0", "1:V100@0"], [100, 100]),
    ],
)
def test_each_type_goes_by_its_own_profiles_whichever_comes_first(
    place: Path, asked: list[str], ends: list[float]
) -> None:
    write_typed(place, jobs=("a", "b"))
    if asked[0].startswith("1:V100"):
        text = (place / "two.json").read_text()
        (place / "two.json").write_text(text.replace('"A100"', '"V100"'))
    words = [word for one in asked for word in ("--allocation", one)]
    [result] = page(*TYPED, *words)
    assert sorted(job["end_s"] for job in result["jobs"]) == pytest.approx(ends, abs=1e-3)
    assert result["makespan_s"] >= result["lower_bound_s"] * (1 - 1e-9)


def test_a_type_on_which_nothing_was_measured_is_said(place: Path) -> None:
    write_typed(place, jobs=("a", "b"))
    words = ("--allocation", "1:A100@0", "--allocation", "1:L40@0")
    done = call(*TYPED, *words)
    assert done.exit_code == 0
    assert done.stderr == "hpcsched: no profile of m on L40: taken to be as fast there as on A100\n"
    assert call(*TYPED, "--allocation", "1:A100@0", "--allocation", "1:H200@0").stderr == ""


@pytest.mark.parametrize(
    ("more", "asked", "said"),
    [
        ('gpu_type = "v100"', "1", "job old.gpu_type: 1 x v100; accepted: at most 0 on a host: here are "),
        ("nodes = 2", "1", "job old.nodes: 2 hosts; accepted: at most 1: so many are here of one type"),
    ],
)
def test_jobs_must_fit_gpus_of_one_type(place: Path, more: str, asked: str, said: str) -> None:
    write_typed(place, more)
    words = ("--allocation", f"{asked}@0", "--allocation", f"{asked}:H200@0")
    assert said in refused(*TYPED, *words)
    # Those whose strategy can mix them have both.
    write_typed(place, "nodes = 2", 'strategy = {kind = "vsw", local_batch = 8, global_batch = [16, 64]}')
    [result] = page(*TYPED, *words)
    assert result["jobs_completed"] == 3


def test_stream_workers_take_what_hosts_have(place: Path) -> None:
    write_typed(place, "nodes = 2", 'strategy = {kind = "vsw", local_batch = 8}', jobs=("wide",))
    words = ("--allocation", "1@0", "--allocation", "3@0")
    said = "job wide.gpus: 2 GPUs; accepted: at most 1"
    text = (place / "two.toml").read_text().replace("gpus = 1", "gpus = 2")
    (place / "two.toml").write_text(text)
    [result] = page(*TYPED, *words)
    assert result["jobs"][0]["end_s"] == pytest.approx(result["lower_bound_s"]) == 300
    (place / "two.toml").write_text(text.replace('"vsw", local_batch = 8', '"vsw", workers = 2'))
    assert said in refused(*TYPED, *words)


def test_gpus_of_a_type_have_the_memory_that_is_asked_for(place: Path) -> None:
    write_typed(place, 'gpu_type = "h200"', 'gpu_memory = "80G"')
    [result] = page(*TYPED, "--allocation", "1@0", "--allocation", "1:H200@0")
    assert result["jobs_completed"] == 3 and result["jobs"][2]["end_s"] <= 200


def test_a_trace_is_spread_over_nodes_of_one_type() -> None:
    Path("t.csv").write_text("submit_s,duration_s,gpus\n0,600,4\n10,900,8\n")
    words = ("--allocation", "4@0", "--allocation", "4:H200@0")
    done = call("--trace", "t.csv", *words)
    assert done.exit_code == 0 and "1 job left out" in done.stderr
    assert "left out" not in call("--trace", "t.csv", "--allocation", "2x4:H200@0", *words).stderr


def test_types_are_not_for_runs() -> None:
    said = "--allocation: a TYPE with --run; accepted: one with JOBS.toml or --trace"
    assert refused("--run", "--allocation", "4:H200@0") == said
