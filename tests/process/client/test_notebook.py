"""The example notebook runs as it stands, from its first cell to its last."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

nbclient = pytest.importorskip("nbclient", reason="the extra dev")
nbformat = pytest.importorskip("nbformat", reason="the extra dev")

EXAMPLE = Path(__file__).parents[3] / "examples" / "notebook" / "sweep.ipynb"


@pytest.mark.slow
def test_the_notebook_sweeps_and_shows_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_STATE_HOME", "XDG_DATA_HOME", "JUPYTER_RUNTIME_DIR"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(name, str(tmp_path / name))
    shutil.copy(EXAMPLE, tmp_path)
    notebook = nbformat.read(tmp_path / EXAMPLE.name, as_version=4)
    done = nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    cells = [cell for cell in done.cells if cell.cell_type == "code"]
    assert "RUNNING; no jobs" in _html(cells[0])
    assert _text(cells[1]).startswith("{'distance':")
    page = _html(cells[3])
    assert "4 COMPLETED" in page and "sweep-4" in page and "<script" not in page
    assert _stream(cells[4]).count("\n") == 4
    assert _text(cells[5]).startswith("(0.")  # the best rate, and a distance
    assert _text(cells[6]) == "False"


def _html(cell: Any) -> str:
    shown = (output.get("data", {}) for output in cell.outputs)
    return "".join(data["text/html"] for data in shown if "text/html" in data)


def _text(cell: Any) -> str:
    return "".join(output.data["text/plain"] for output in cell.outputs if "data" in output)


def _stream(cell: Any) -> str:
    return "".join(output.text for output in cell.outputs if output.output_type == "stream")
