"""Which foregrounds take guests on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from hpcsched.worker import entry  # noqa: E402


@pytest.mark.parametrize(("kind", "takes"), [("ddp", True), ("vsw", True), ("burst", False)])
def test_the_steps_of_a_burst_job_cannot_be_followed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, takes: bool
) -> None:
    """It refuses a model and an optimizer with hooks, those of a host too."""
    told = {
        "HPCSCHED_JOB_ID": "1",
        "HPCSCHED_JOB_DIR": str(tmp_path),
        "HPCSCHED_LANE": "foreground",
        "HPCSCHED_STRATEGY": f'{{"kind": "{kind}"}}',
        "CUDA_VISIBLE_DEVICES": "0",
    }
    for name, value in told.items():
        monkeypatch.setenv(name, value)

    class Host:
        def __init__(self, environ: object, **_: object) -> None:
            self.watched = str.upper

        def open(self) -> object:
            return torch.no_grad()

    monkeypatch.setattr("hpcsched.worker.background.host.GuestHost", Host)
    with entry.hosting(lambda name: None, lambda table: None) as watched:
        assert watched("trainer") == ("TRAINER" if takes else "trainer")
