"""The database: what goes in comes out, the schema moves up and down, and bad files are one line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from budget import slow

from hpcsched.store.database import HEAD, Database


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "made" / "h #1?.db"


@pytest.fixture
def db(path: Path) -> Iterator[Database]:
    with Database(path) as opened:
        yield opened


def test_opening_a_current_database_does_not_import_alembic(db: Database, path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from hpcsched.store.database import Database\n"
        "Database(Path(sys.argv[1])).close(); print('alembic' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


@pytest.mark.parametrize("several", [2, slow(4)])
def test_several_can_make_the_same_database_at_once(path: Path, several: int) -> None:
    code = (
        "import sys; from pathlib import Path; from hpcsched.store.database import Database\n"
        "Database(Path(sys.argv[1])).close()"
    )
    processes = [subprocess.Popen([sys.executable, "-c", code, path]) for _ in range(several)]
    assert [p.wait(120) for p in processes] == [0] * several
    with Database(path) as db:
        assert db._revision() == HEAD
