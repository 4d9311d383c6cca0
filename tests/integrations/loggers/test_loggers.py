"""TensorBoard, W&B and MLflow, each in one run over the attempts of a job."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from attempts import Attempts

from hpcsched.worker import loggers
from hpcsched.worker.link import Link, Wish

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

STEPS = 6


class Died(SystemExit):
    """Without a word, as by a signal."""


def train(make: Callable[[], loggers.Logger], *, dies_at: int = 0, stops_at: int = 0) -> None:
    """Saves after step 2, and when it is told to."""
    link, logger = Link(), make()
    link.ready()
    for step in range(link.step + 1, STEPS + 1):
        logger.log({"loss": 1.0 / step}, step)
        link.report(step)
        if step == dies_at:
            logger.close()  # else what a test reads may not be written yet
            raise Died(1)
        if step == stops_at:
            Attempts.stop()
        wish = link.wishes()
        if wish or step == 2:
            path = link.place(step)
            path.write_text("state")
            link.saved(step, path)
        if wish & Wish.STOP:
            logger.close()
            link.leave()
    logger.close()


def played(folder: Path, make: Callable[[], loggers.Logger]) -> None:
    """Dies after step 4, is suspended after step 5, and ends: steps 3 and 4 are done twice."""
    attempts = Attempts(folder, HPCSCHED_RUN_ID="ab12")
    ways = iter([{"dies_at": 4}, {"stops_at": 5}, {}])
    attempts.run(lambda: train(make, **next(ways)))
    assert attempts.codes == [1, 75]


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    for name in ("WANDB_RUN_ID", "WANDB_RESUME", "WANDB_NAME", "MLFLOW_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    yield


def test_tensorboard_shows_each_step_once(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    played(tmp_path, loggers.TensorBoard)
    (folder,) = {one.parent for one in tmp_path.rglob("events.out.*")}
    assert folder == tmp_path / "tensorboard"
    events = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    read = events.EventAccumulator(str(folder))
    read.Reload()
    assert [(one.step, one.value) for one in read.Scalars("loss")] == [
        (step, pytest.approx(1.0 / step)) for step in range(1, STEPS + 1)
    ]


def test_wandb_has_one_run(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    played(tmp_path, lambda: loggers.WandB("cifar", mode="offline", settings={"console": "off"}))
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert [file.name for file in files] == ["run-ab12-1.wandb"] * 3
    records = [record for file in files for record in records_of(file)]
    assert {record.exit.exit_code for record in records if record.HasField("exit")} == {0}
    steps = [record.history.step.num for record in records if record.HasField("history")]
    assert steps == [1, 2, 3, 4, 3, 4, 5, 6]


def records_of(file: Path) -> Iterator[Any]:
    """A .wandb file: blocks of 32 KiB with records, each behind a checksum, a length and a kind."""
    known = importlib.import_module("wandb.proto.wandb_internal_pb2")
    data, at, part = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        room = 32768 - at % 32768
        if room < 7:
            at += room
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        part, at = part + data[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield known.Record.FromString(part)
            part = b""


def test_mlflow_has_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    try:
        played(tmp_path, lambda: loggers.MLflow("cifar"))
        (run,) = mlflow.search_runs(experiment_names=["cifar"], output_format="list")
        assert (run.info.status, run.data.tags[loggers.TAG]) == ("FINISHED", "ab12-1")
        history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "loss")
        assert sorted({(one.step, one.value) for one in history}) == [
            (step, 1.0 / step) for step in range(1, STEPS + 1)
        ]
    finally:
        mlflow.set_tracking_uri(None)
