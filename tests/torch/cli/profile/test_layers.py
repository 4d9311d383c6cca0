"""`profile layers`: what is asked for, what is shown, and what is kept."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from hpcsched.cli.jobs.given_jobs import trainer_arguments
from hpcsched.cli.profile.group import profile
from hpcsched.cli.profile.layers import _BUILT_IN, _batches, _job
from hpcsched.errors import ConfigError
from hpcsched.planning.burst.graph import LayerProfile
from hpcsched.profiling.layers_draw import layers_list, layers_table
from hpcsched.store.database import Database


def table(model: str = "m", device: str = "d", note: str = "") -> dict[str, Any]:
    times = {"1": 10.0, "2": 12.0, "4": 20.0}
    flat = {"1": 5.0, "2": 5.0, "4": 5.0}
    one = {"id": 0, "name": "features.0", "prev": [], "parameter_bytes": 7168, "activation_bytes": 2 * 2**20}
    two = {"id": 1, "name": "head", "prev": [0], "parameter_bytes": 3 * 2**30, "activation_bytes": 40}
    layers = [
        {**one, "forward_us": times, "backward_us": times},
        {**two, "forward_us": flat, "backward_us": flat},
    ]
    about = {"model": model, "device": device, "source": "measured", "note": note, "input_bytes": 12}
    return {"schema": 1, **about, "layers": layers}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "h.db"


def call(path: Path, *words: str) -> Result:
    return CliRunner().invoke(profile, ["layers", *words, "--database", str(path)])


def test_arguments_are_json_or_pairs() -> None:
    assert trainer_arguments('{"a": [1], "b": null}') == {"a": [1], "b": None}
    assert trainer_arguments("width=0.125, classes=10,name=x,on=true") == {
        "width": 0.125,
        "classes": 10,
        "name": "x",
        "on": True,
    }
    for wrong in ("width", "=1", "{", "[1]", ""):
        with pytest.raises(ConfigError, match="--args"):
            trainer_arguments(wrong)


def test_batches_are_whole_numbers_once_each() -> None:
    assert _batches("4,1, 2,4") == (1, 2, 4)
    assert _batches(None) == ()
    for wrong in ("", "0", "1,,2", "two", "-1", "1.5", "9999999"):
        with pytest.raises(ConfigError, match="--batches"):
            _batches(wrong)


def test_a_built_in_network_is_a_trainer_with_its_name_as_argument() -> None:
    job = _job("resnet50", ['{"width": 0.5}', "classes=7"], None)
    assert (job.model, job.trainer) == ("resnet50", "hpcsched.examples.models:Network")
    assert job.args == {"network": "resnet50", "width": 0.5, "classes": 7}
    assert _job("mine:Trainer", [], "other").model == "other"
    assert _job("mine:Trainer", [], None).model == "Trainer"


def test_the_built_in_networks_are_those_that_there_are() -> None:
    pytest.importorskip("torch")
    from hpcsched.examples.models import MODELS

    assert tuple(MODELS) == _BUILT_IN


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "give a TARGET to measure, or --list"),
        (["vgg16", "--list"], "give a TARGET to measure, or --list"),
        (["vgg-16"], "TARGET: 'vgg-16'; accepted: package.module:Name of a Trainer, or vgg16"),
        (["a b:C"], "trainer"),
        (["vgg16", "--args", "width"], "--args: 'width'"),
        (["vgg16", "--batches", "0"], "--batches: '0'; accepted: samples like 1,2,4,8"),
        (["vgg16", "--devices", "replay:2"], "pretended GPUs compute nothing"),
        (["vgg16", "--stored"], "no layer profile of 'vgg16'; accepted: one of"),
    ],
)
def test_what_makes_no_sense_is_one_line_and_exit_code_2(path: Path, words: list[str], text: str) -> None:
    result = call(path, *words)
    assert result.exit_code == 2 or getattr(result.exception, "exit_code", None) == 2
    assert text in (result.output + str(result.exception))
    assert "\n" not in str(result.exception)


def test_one_layer_profile_is_kept_for_each_model_and_device_the_newest(path: Path) -> None:
    at = datetime(2026, 1, 1, tzinfo=UTC)
    with Database(path) as db:
        db.record_layers(table(note="old"), at=at)
        db.record_layers(table(device="e"), at=at + timedelta(hours=1))
        db.record_layers(table("n"), at=at + timedelta(hours=2))
        db.record_layers(table(note="new"), at=at + timedelta(hours=3))
        assert [(one["model"], one["device"]) for one in db.layers()] == [("m", "d"), ("n", "d"), ("m", "e")]
        assert [one["note"] for one in db.layers("m", "d")] == ["new"]
        assert db.layers("m", "d") == (table(note="new"),)
        assert db.layers("x") == ()


def test_what_is_stored_can_be_listed_shown_and_written(path: Path, tmp_path: Path) -> None:
    with Database(path) as db:
        db.record_layers(table(note="how it was made"))
    listed = call(path, "--list")
    assert listed.output.splitlines()[1].startswith("m      d            2  1,2,4    measured  how it")
    assert json.loads(call(path, "--list", "--json").output)["layer_profiles"] == [
        table(note="how it was made")
    ]
    out = tmp_path / "m.json"
    shown = call(path, "m", "--stored", "-o", str(out))
    assert shown.exit_code == 0
    assert json.loads(out.read_text()) == table(note="how it was made")
    assert LayerProfile.parse(json.loads(out.read_text()), where="m").layers[1].name == "head"


def test_a_table_shows_how_much_faster_each_layer_is_for_a_part_of_the_batch() -> None:
    text = layers_table(LayerProfile.parse(table(note="so"), where="here"))
    assert text == (
        "m on one d, batch 4 of 1,2,4\n"
        "ID  LAYER       READS  PARAMS   OUT  FORWARD_US  BACKWARD_US   x2   x4\n"
        " 0  features.0  -        7.0K  2.0M          20           20  1.7  2.0\n"
        " 1  head        0        3.0G   40B           5            5  1.0  1.0\n"
        "    all                  3.0G                25           25  1.5  1.7\n"
        "so\n"
    )


def test_a_list_cuts_notes_to_fit() -> None:
    profiles = [LayerProfile.parse(table(note="word " * 30), where="here")]
    assert layers_list(profiles).splitlines()[1].endswith("word word word…")
