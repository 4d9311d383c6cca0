"""The table of frameworks: what is read of a program's output, and how runs are compared."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.append(str(ROOT / "benchmarks"))

from frameworks import examples, table  # noqa: E402
from frameworks.examples import EXAMPLES  # noqa: E402
from frameworks.table import BEGIN, END, Row, page, put  # noqa: E402
from frameworks.trial import Course, Printed, TooShort, _toml, _without_steps  # noqa: E402

WHOLE = "step 1 loss 0.5\nother\nstep 2 loss 0.25\nstep 3 loss 0.125\ndone step 3 loss 0.125\n"


def test_lines_are_read_by_step() -> None:
    printed = Printed.read(WHOLE)
    assert printed.losses == {1: "0.5", 2: "0.25", 3: "0.125"}
    assert (printed.done, printed.repeated) == (True, 0)
    again = Printed.read("step 1 loss 0.5\nstep 2 loss 0.25\nstep 2 loss 0.2500001\n")
    assert (again.done, again.repeated) == (False, 1)


def test_a_last_digit_and_a_missing_step_are_seen() -> None:
    whole = Printed.read(WHOLE)
    assert Printed.read(WHOLE).compared(whole) == (True, 0.0, 0)
    same, apart, missing = Printed.read(WHOLE.replace("0.25\n", "0.2500001\n")).compared(whole)
    assert (same, missing) == (False, 0)
    assert apart == pytest.approx(1e-7)
    assert Printed.read("step 1 loss 0.5\n").compared(whole) == (False, 0.0, 2)


def test_a_job_file_says_what_its_tables_do() -> None:
    table = {
        "schema": 1,
        "job": [{"name": "it", "command": ["python", "a b.py", 'x="1"'], "gpus": {"min": 1, "max": 2}}],
    }
    assert tomllib.loads(_toml(table)) == table
    words = ["python", "train.py", "--steps", "60", "--out", "o"]
    assert [*_without_steps(words)] == [*_without_steps([*words, "--steps=9"])] == [*words[:2], *words[4:]]


def test_the_table_is_put_between_its_marks(tmp_path: Path) -> None:
    file = tmp_path / "page.md"
    file.write_text(f"# Page\n\n{BEGIN}\nold\n{END}\n\nMore.\n")
    row = Row("gpt", "A | B", {"torch": "2.13.0"}, changed=3)
    row.fault("it never ended")
    put(page([row]), file)
    text = file.read_text()
    assert "old" not in text
    assert text.startswith("# Page\n") and text.endswith("\nMore.\n")
    assert "| [A / B](../examples/gpt/README.md) | torch 2.13.0 |" in text
    assert not row.ok


def test_each_example_is_there_and_changes_no_more_lines_than_it_may() -> None:
    for example in EXAMPLES:
        assert (example.folder / "README.md").exists(), example.name
        for program in ("train.py", "elastic.py"):
            job = example.job(program)
            assert (job is not None) == (example.folder / program).exists(), example.name
            assert job is None or program in job["command"], f"{example.name} runs from its own folder"
        assert example.changed is None or example.changed <= example.most_changed, example.name


def test_an_interpreter_has_all_that_an_example_needs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And of distributions that stand for each other one: else its row is left out."""
    by_name = {example.name: example for example in EXAMPLES}
    for name, there, found in (
        ("trl-lora", {"transformers": "5"}, ""),
        ("trl-lora", {"transformers": "5", "trl": "1", "peft": "0"}, sys.executable),
        ("xgboost", {"xgboost-cpu": "3"}, sys.executable),
        ("xgboost", {}, ""),
    ):
        monkeypatch.setattr(examples, "versions", lambda *_, there=there: there)
        assert examples.python_of(by_name[name], tmp_path) == found


def test_a_program_as_people_write_it_knows_nothing_of_hpcsched() -> None:
    for example in EXAMPLES:
        assert "hpcsched" not in (example.folder / "train.py").read_text(), example.name


@pytest.mark.parametrize(
    ("enough", "tried", "ok"),
    [(45, [45], True), (225, [45, 225], True), (99999, [45, 225, 1125, 5625], False)],
)
def test_a_training_that_is_done_too_soon_is_longer_the_next_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, enough: int, tried: list[int], ok: bool
) -> None:
    seen = list[int]()

    def filled(row: Row, *_: object, **__: object) -> Row:
        seen.append(row.steps)
        if row.steps < enough:
            raise TooShort("done before it was asked")
        return row

    monkeypatch.setattr(table, "_filled", filled)
    row = table.try_example(EXAMPLES[0], python=sys.executable, steps=45, place=tmp_path)
    assert (seen, row.ok) == (tried, ok)
    assert ok or row.wrong == ["done before it was asked"]


@pytest.mark.parametrize(
    ("printed", "cell"),
    [
        (WHOLE, "losses equal to the last digit"),
        (
            WHOLE.partition("done")[0] + "step 4 loss 0.1\n",
            "goes on; resumed after its last step it makes one more",
        ),
        (
            "step 1 loss 0.5\nstep 2 loss 0.25\ndone step 3 loss 0.125\n",
            "falls behind by a step at each resume",
        ),
    ],
)
def test_what_an_unchanged_program_does(monkeypatch: pytest.MonkeyPatch, printed: str, cell: str) -> None:
    course = Course(Printed.read(printed), [1], 1.0, [0.1], [0.1])
    trial = SimpleNamespace(suspended=lambda: course)
    assert cell in table._unchanged(trial, Printed.read(WHOLE))  # type: ignore[arg-type]
