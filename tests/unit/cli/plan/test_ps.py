"""Models of trainings on CPU cores as JSON, and `hpcsched plan ps`: what it prints, and what it refuses."""

import json
import re

import pytest
from click.testing import CliRunner

from hpcsched.cli.main import cli
from hpcsched.cli.plan import ps as plan_ps
from hpcsched.errors import ConfigError
from hpcsched.planning.ps.model import NetworkLink, PsModel
from hpcsched.planning.ps.training import PsTraining
from hpcsched.planning.ps.whatif.models_file import parse, to_table
from hpcsched.store.profiles import shipped
from profiles.ps.nearchus import CLUSTERS, WORKLOADS, made, workload

NET = {"model": "net", "batch_cpu_s": 10, "parameter_mib": 4, "weak": True, "staleness": 1, "overlap": 0.9}
EVERYTHING = {
    **NET,
    "worker_cpu_s": 0.1,
    "update_cpu_s": 0.2,
    "byte_cpu_s": 1e-9,
    "uneven": 0.1,
    "serial": 0.01,
    "most_cores": 16,
    "link_mib_s": 119,
    "start_s": 1,
    "suspend_s": 2,
    "stable_s": 3,
    "build_s": 4,
    "change_s": 5,
    "source": "made up",
    "note": "for a test",
}


def parsed(*models):
    return parse({"schema": 1, "models": list(models)}, where="m.json")


# -- the file ------------------------------------------------------------------------------------------


def test_a_file_says_all_that_there_is_of_a_training():
    assert parsed(EVERYTHING) == {
        "net": PsTraining(
            model=PsModel(
                batch_cpu_s=10.0,
                worker_cpu_s=0.1,
                update_cpu_s=0.2,
                byte_cpu_s=1e-9,
                parameter_bytes=4 * 2**20,
                uneven=0.1,
                serial=0.01,
                most_cores=16.0,
                overlap=0.9,
                staleness=1,
                weak=True,
            ),
            link=NetworkLink(bytes_s=119 * 2**20),
            start_s=1.0,
            suspend_s=2.0,
            stable_s=3.0,
            build_s=4.0,
            change_s=5.0,
        )
    }


def test_what_is_left_out_is_as_by_default():
    (training,) = parsed({"model": "net", "batch_cpu_s": 10, "parameter_mib": 4}).values()
    assert training == PsTraining(model=PsModel(batch_cpu_s=10.0, parameter_bytes=4 * 2**20))


def test_what_is_written_is_read_again():
    (training,) = parsed(EVERYTHING).values()
    table = to_table("net", training, source="made up", note="for a test")
    assert table == EVERYTHING
    assert parsed(table) == {"net": training}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": ""}, r"models\[0\].model: ''; accepted: text"),
        ({"batch_cpu_s": None}, r"models\[0\].batch_cpu_s: missing"),
        ({"batch_cpu_s": 0}, r"models\[0\].batch_cpu_s: 0; accepted: CPU seconds, above 0"),
        ({"batch_cpu_s": float("nan")}, r"models\[0\].batch_cpu_s: nan"),
        ({"batch_cpu_s": "10"}, r"models\[0\].batch_cpu_s: '10'"),
        ({"parameter_mib": -1}, r"models\[0\].parameter_mib: -1; accepted: MiB, above 0"),
        ({"byte_cpu_s": -1e-9}, r"models\[0\].byte_cpu_s: -1e-09"),
        ({"uneven": 1.5}, r"models\[0\].uneven: 1.5; accepted: a part, 0 to 1"),
        ({"most_cores": 0}, r"models\[0\].most_cores: 0"),
        ({"staleness": -1}, r"models\[0\].staleness: -1; accepted: a whole number, 0 or more"),
        ({"staleness": True}, r"models\[0\].staleness: True"),
        ({"weak": 1}, r"models\[0\].weak: 1; accepted: true or false"),
        ({"link_mib_s": 0}, r"models\[0\].link_mib_s: 0; accepted: MiB a second, above 0"),
        ({"start_s": "soon"}, r"models\[0\].start_s: 'soon'; accepted: seconds, 0 or more"),
        ({"source": 1}, r"models\[0\].source: 1"),
        ({"link": 1}, r"models\[0\]: unknown key 'link'"),
    ],
)
def test_what_is_wrong_in_a_file_is_refused_by_its_key(changes, said):
    with pytest.raises(ConfigError, match=f"^m.json: {said}"):
        parsed({key: value for key, value in {**NET, **changes}.items() if value is not None})


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ([], "a table with the keys schema, models"),
        ({"schema": 2, "models": [NET]}, "schema: 2; accepted: 1"),
        ({"schema": True, "models": [NET]}, "schema: True"),
        ({"schema": 1}, "models: missing"),
        ({"schema": 1, "models": []}, r"models: \[\]; accepted: a list of tables, at least 1"),
        ({"schema": 1, "models": [NET, NET]}, r"models\[1\].model: 'net' again"),
    ],
)
def test_what_is_no_such_file_is_refused(table, said):
    with pytest.raises(ConfigError, match=said):
        parse(table, where="m.json")


@pytest.mark.parametrize("letter", CLUSTERS)
def test_the_shipped_ones_are_the_calibrated_ones(letter):
    """To the last bit, and as nearchus.py writes them."""
    name = f"nearchus-{letter.lower()}"
    text = shipped("ps")[name].read_text()
    assert made()[f"{name}.json"] == text
    cluster = CLUSTERS[letter]
    assert parse(json.loads(text), where=name) == {
        model: PsTraining(model=workload(model, cluster), link=cluster.link) for model in WORKLOADS
    }


# -- the command ---------------------------------------------------------------------------------------


@pytest.fixture
def ps(tmp_path):
    def run(table, *words):
        file = tmp_path / "m.json"
        file.write_text(table if isinstance(table, str) else json.dumps(table))
        return CliRunner().invoke(cli, ["plan", "ps", str(file), *map(str, words)])

    return run


def shown(*words):
    done = CliRunner().invoke(cli, ["plan", "ps", *map(str, words)])
    assert done.exit_code == 0, done.exception
    return done.stdout


@pytest.mark.long
def test_the_way_and_a_line_for_each_rule():
    lines = shown("nearchus-a", "--model", "Inception-V3", "--cpus", 100).splitlines()
    assert lines[0] == "Inception-V3 on 100 cores, by dtconfig:"
    assert lines[1].split() == ["TIME(s)", "STEPS/S", "CORES", "USED", "CONFIGURATION", "WHY"]
    end = lines.index("")
    way = [re.split(r"  +", line.strip()) for line in lines[2:end]]
    assert way[0][0] == "0" and way[0][2] == "15" and way[0][4:] == ["1 server x 5 + 2 workers x 5", "start"]
    times = [float(row[0]) for row in way]
    assert times == sorted(times)
    assert {"more cores", "network bottleneck: more servers"} <= {row[5] for row in way}
    rules = {line.split()[0]: re.split(r"  +", line.strip()) for line in lines[end + 2 :]}
    assert list(rules) == ["dtconfig", "optimus", "fixed", "best"]
    assert rules["dtconfig"][1] == way[-1][1] and rules["dtconfig"][-1] == way[-1][4]
    assert rules["dtconfig"][5:7] == [str(len(way) - 1), way[-1][0]]
    best = float(rules["best"][1])
    for name in ("dtconfig", "optimus", "fixed"):
        assert float(rules[name][2]) == pytest.approx(float(rules[name][1]) / best, abs=0.006)
    assert float(rules["optimus"][2]) < float(rules["fixed"][2]) < float(rules["dtconfig"][2])


@pytest.mark.long
def test_the_same_as_json():
    page = json.loads(shown("nearchus-a", "--model", "Inception-V3", "--cpus", 100, "--json"))
    assert (page["schema"], page["model"], page["cpus"]) == (1, "Inception-V3", 100)
    assert page["link_mib_s"] == pytest.approx(119.2, abs=0.1)
    assert list(page["rules"]) == ["dtconfig", "optimus", "fixed"]
    for rule in page["rules"].values():
        way = rule["way"]
        assert rule["changes"] == len(way) - 1 and rule["since_s"] == way[-1]["start_s"]
        assert [rule[key] for key in ("servers", "workers", "rate")] == [
            way[-1][key] for key in ("servers", "workers", "rate")
        ]
        assert rule["of_best"] == pytest.approx(rule["rate"] / page["best"]["rate"])
        assert rule["rests"] and all(each["why"] for each in way)
        for each in way:
            assert sum(each["servers"]) + sum(each["workers"]) <= 100 + 1e-9
    assert {len(each["servers"]) + len(each["workers"]) for each in page["rules"]["optimus"]["way"]} == set(
        range(3, 21)
    )


@pytest.mark.long
def test_the_way_of_another_rule():
    lines = shown("nearchus-a", "--model", "MobileNet", "--cpus", 50, "--rule", "optimus, fixed").splitlines()
    assert lines[0] == "MobileNet on 50 cores, by optimus:"
    assert [line.split()[0] for line in lines[-3:]] == ["optimus", "fixed", "best"]


@pytest.mark.long
def test_a_faster_link_needs_fewer_servers():
    def found(*words):
        page = json.loads(shown("nearchus-a", "--model", "Inception-V3", "--cpus", 100, "--json", *words))
        assert page["link_mib_s"] == pytest.approx(float(words[-1]))
        return page["rules"]["dtconfig"]

    slow, fast = (found("--rule", "dtconfig", "--link", link) for link in (100, 10_000))
    assert len(fast["servers"]) == 1 < len(slow["servers"])
    assert fast["rate"] > slow["rate"]


@pytest.mark.long
def test_rules_that_need_more_cores_are_left_out(ps):
    table = {"schema": 1, "models": [NET]}
    lines = ps(table, "--cpus", 12).stdout.splitlines()
    (optimus,) = (line for line in lines if line.startswith("optimus"))
    assert optimus.split()[-6:] == ["needs", "15", "cores", "to", "start", "with"]
    page = json.loads(ps(table, "--cpus", 7.5, "--json").stdout)
    assert page["rules"]["optimus"] is None and page["rules"]["fixed"] is None
    assert page["rules"]["dtconfig"]["rate"] > 0.6 * page["best"]["rate"]
    assert "by optimus:\nRULE" in ps(table, "--cpus", 7.5, "--rule", "optimus").stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nearchus-a", "--cpus", 10), "--model: missing; accepted: MobileNet, DenseNet-201"),
        (("nearchus-a", "--model", "net", "--cpus", 10), "--model: 'net' is not in .*; accepted: MobileNet"),
        (("nearchus-a", "--model", "MobileNet"), "--cpus: missing"),
        (("nearchus-a", "--model", "MobileNet", "--cpus", 0.1), "0.1 is not in the range"),
        (("nearchus-a", "--model", "MobileNet", "--cpus", 10, "--link", 0), "0.0 is not in the range"),
        (("nearchus-a", "--model", "MobileNet", "--cpus", 10, "--rule", "marble"), "--rule: 'marble'"),
        (("no-such", "--cpus", 10), r"no such file; .* \(nearchus-a, nearchus-b\)"),
        ((".", "--cpus", 10), "accepted: a readable JSON file"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(words, said):
    done = CliRunner().invoke(cli, ["plan", "ps", *map(str, words)])
    text = str(done.exception) if isinstance(done.exception, ConfigError) else done.stderr
    assert done.exit_code == 2 or isinstance(done.exception, ConfigError)
    assert re.search(said, text)


def test_what_is_no_json_is_refused(ps):
    assert "not readable" in str(ps("{").exception)


@pytest.mark.long
def test_a_search_that_does_not_come_to_rest_in_time_is_told(monkeypatch):
    monkeypatch.setattr(plan_ps, "LONGEST_S", 60.0)
    text = shown("nearchus-a", "--model", "MobileNet", "--cpus", 100, "--rule", "dtconfig")
    assert text.endswith("\nnote: dtconfig is still searching\n")
