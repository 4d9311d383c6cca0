"""Loggers that go on where they were, instead of beginning a new version at each start."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

from hpcsched.integrations.lightning.framework import pl
from hpcsched.worker.process.contract import say

_VERSIONS = "loggers.json"
_BY_ID = ("WandbLogger", "MLFlowLogger", "CometLogger", "NeptuneLogger")


def keep(trainer: Any, folder: Path) -> None:
    """Put into a checkpoint's folder what loggers need to go on; by rank 0. Raises OSError."""
    versions = []
    for number, logger in enumerate(trainer.loggers):
        versions.append(logger.version if _has_versions(logger) else None)
        if isinstance(logger, pl.loggers.CSVLogger):
            logger.save()
            table = Path(logger.experiment.metrics_file_path)
            if table.exists():
                shutil.copyfile(table, folder / _table(number))
    (folder / _VERSIONS).write_text(json.dumps(versions))


def go_on(trainer: Any, folder: Path) -> None:
    """Have the loggers of a trainer go on as of a checkpoint; on all ranks."""
    try:
        versions = json.loads((folder / _VERSIONS).read_bytes())
    except (OSError, ValueError):
        return
    for number, (logger, version) in enumerate(zip(trainer.loggers, versions)):
        if type(logger).__name__ in _BY_ID and trainer.is_global_zero:
            say(f"Lightning: {type(logger).__name__} goes on in the same run only if it is told the run's id")
        if not _has_versions(logger) or version is None:
            continue
        begun = Path(logger.log_dir)
        logger._version = version
        if not trainer.is_global_zero:
            continue
        _take_back(logger, begun)
        if isinstance(logger, pl.loggers.CSVLogger):
            _go_on_in_table(logger, folder / _table(number))


def _table(number: int) -> str:
    return f"metrics-{number}.csv"


def _has_versions(logger: Any) -> bool:
    return isinstance(logger, (pl.loggers.CSVLogger, pl.loggers.TensorBoardLogger))


def _take_back(logger: Any, begun: Path) -> None:
    """Close what has been begun in another version's folder, and remove that if nothing else is in it."""
    if begun == Path(logger.log_dir):
        return
    writer, logger._experiment = logger._experiment, None
    if hasattr(writer, "close"):
        writer.close()
    files = list(begun.glob("*"))
    if all(one.name.startswith("events.out.tfevents.") for one in files):
        for one in files:
            one.unlink()
        if begun.is_dir():
            begun.rmdir()


def _go_on_in_table(logger: Any, kept: Path) -> None:
    """Have a CSVLogger write below the rows of before: it deletes a table that it finds."""
    if not kept.exists():
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the table will be deleted: it is kept
        writer = logger.experiment
    shutil.copyfile(kept, writer.metrics_file_path)
    with kept.open() as file:
        writer.metrics_keys = file.readline().strip().split(",")
