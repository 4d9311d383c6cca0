"""Sharded state by DCP: saved when asked, found again, and where a program's own is newer, left alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from hpcsched.integrations.dcp import Elastic  # noqa: E402
from hpcsched.store.metrics import read_points  # noqa: E402
from hpcsched.worker import link as links  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore"),  # DCP warns of a single process
]


class Counter:
    """A training's state: one tensor."""

    def __init__(self) -> None:
        self.value = torch.zeros(2)

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


@pytest.fixture
def attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Begins an attempt of a job, in this process."""

    def begin(number: int) -> None:
        told = {"JOB_ID": 1, "JOB_DIR": tmp_path, "ATTEMPT": number, "RESUME": int(number > 1), "RUN_ID": "r"}
        for name, value in {**told, "CHECKPOINT_DIR": tmp_path / "checkpoint", "RANK": 0}.items():
            monkeypatch.setenv(f"HPCSCHED_{name}", str(value))
        links._of_process.clear()

    yield begin
    links._of_process.clear()


def test_goes_on_with_state_and_random_numbers(attempt: Any, tmp_path: Path) -> None:
    attempt(1)
    counter = Counter()
    elastic = Elastic({"it": counter}, samples=8)
    assert elastic.step == 0
    for step in (1, 2):
        counter.value += torch.rand(2)
        elastic.after(step, 0.5)
    elastic.log({"accuracy": torch.tensor(0.25), "note": "no number"})
    points = read_points(tmp_path / "metrics.jsonl")
    assert [(each.step, each.values) for each in points] == [(1, {"loss": 0.5}), (2, {"accuracy": 0.25})]
    (tmp_path / "stop.1").write_text('{"signal": "SIGTSTP"}')
    counter.value += torch.rand(2)
    with pytest.raises(SystemExit) as left:
        _until_asked(elastic)
    assert left.value.code == 75
    following = torch.rand(2)
    record = json.loads((tmp_path / "STATE.json").read_text())
    assert record["samples"] == 8 * record["step"]

    attempt(2)
    torch.manual_seed(7)
    again = Counter()
    elastic = Elastic({"it": again})
    assert elastic.step == record["step"]
    assert torch.equal(again.value, counter.value)
    assert torch.equal(torch.rand(2), following)

    own = Counter()
    own.value += 5
    assert Elastic({"it": own}, step=record["step"] + 3).step == record["step"] + 3
    assert own.value.tolist() == [5, 5], "a newer checkpoint of the program's own stays"


def test_a_save_that_fails_is_said_and_nothing_is_put_on_record(
    attempt: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    attempt(1)
    (tmp_path / "checkpoint").write_text("no folder")
    elastic = Elastic({"it": Counter()})
    (tmp_path / "stop.1").write_text('{"signal": "SIGTSTP"}')
    with pytest.raises(SystemExit) as left:
        _until_asked(elastic)
    assert left.value.code == 74
    assert "could not be saved" in capfd.readouterr().err
    assert not (tmp_path / "STATE.json").exists()


def test_the_last_step_is_saved_and_not_left(
    attempt: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCSCHED_STEPS", "3")
    attempt(1)
    elastic = Elastic({"it": Counter()})
    (tmp_path / "stop.1").write_text('{"signal": "SIGTSTP"}')
    elastic._link._flag._next_look = 0.0
    elastic.after(3)
    assert json.loads((tmp_path / "STATE.json").read_text())["step"] == 3
    with pytest.raises(SystemExit):  # the job file was wrong
        elastic.after(4)


def _until_asked(elastic: Elastic) -> None:
    for _ in range(1000):
        elastic.after(3)
        elastic._link._flag._next_look = 0.0
