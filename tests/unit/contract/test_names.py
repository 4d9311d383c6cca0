"""Names stand in the contract package and nowhere else; its page has exactly these."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

import hpcsched
from hpcsched.contract import exits, files, orders, variables
from hpcsched.contract.metrics import Point
from hpcsched.contract.orders import Forget, Pace, Resize, Suspend
from hpcsched.contract.progress import Batching, Line, Scaling, Usage
from hpcsched.contract.seats import Seat, to_table
from hpcsched.contract.state import State
from hpcsched.contract.version import VERSION
from hpcsched.contract.words import Held, Ready, Stop, Unusable, Versions

PACKAGE = Path(hpcsched.__file__).parent
PAGE = (PACKAGE.parent / "docs" / "contract.md").read_text()

NAMES = {
    value
    for value in vars(variables).values()
    if isinstance(value, str) and value.startswith(variables.PREFIX) and value != variables.PREFIX
}
FILES = {
    *(files.STATE, files.CHECKPOINT, files.LAYERS, files.NEVER_A_GUEST, files.METRICS, files.OUTCOME),
    *(files.VERSIONS, files.LOGGED),
    *(
        name("N")  # type: ignore[arg-type]
        for name in (files.ready, files.held, files.refused, files.left, files.unusable, files.stop)
    ),
    files.listening("N", "R"),  # type: ignore[arg-type]
    files.state_before("N"),  # type: ignore[arg-type]
    files.checkpoint_before(files.CHECKPOINT, "N"),  # type: ignore[arg-type]
}

SEATS = (Seat(True, 0.5, "h", (1,)),)
RESIZE = Resize(4, 3, (0, 1), True, SEATS, "127.0.0.1:4711")
BATCHING = Batching(64, 16, (2, 2), (1, 1), 0.5, 0.1, 0.2)
SCALING = Scaling({1: 2.0}, 64.0)
USAGE = Usage(1, 2.0, (1.0,), (0.5,), 5)
MESSAGES: dict[str, Any] = {
    "STATE.json": State(3, 4, "/c", 1, {"a": 0.5}, 0.1).encode(),
    "ready.N": Ready(in_place=True, parallel=True, step=3, stopped_s=0.5).encode(),
    "held.N": Held(3, 4).encode(),
    "versions.json": Versions("3.11.9", {"torch": "2.4.1"}).encode(),
    "unusable.N": Unusable(1, "w", "/t", ("LD_PRELOAD",)).encode(),
    "stop.N": Stop("SIGTSTP").encode(),
    "Progress lines": Line(3, 1.0, 0.5, BATCHING, SCALING, USAGE, 9).encode(),
    "metrics.jsonl": Point(3, 1.0, 1, {}).encode(),
    "key of `batching`": BATCHING.table(),
    "key of `scaling`": SCALING.table(),
    "key of `usage`": USAGE.table(),
    "order": orders.encode(Suspend(), RESIZE, Forget(4), Pace(0.5)),
    "key of `suspend`": Suspend().facts(),
    "key of `resize`": RESIZE.facts(),
    "key of `forget`": Forget(4).facts(),
    "key of `seats`": to_table(SEATS)[0],
}
"""By the heading over a table of keys, or what stands at its top."""


def tables() -> dict[str, list[str]]:
    """What stands in code in the first column of the page's tables: by their top, or by the heading over them
    where that is just "key"."""
    found: dict[str, list[str]] = {}
    heading = top = ""
    for line in PAGE.splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if not cells:
            top = ""
        elif not top:
            top = heading if cells[0] == "key" else cells[0]
        else:
            found.setdefault(top, []).extend(re.findall(r"`([^`]*)`", cells[0]))
    return found


def test_the_page_has_the_variables_files_and_exit_codes_of_the_package() -> None:
    found = tables()
    assert sorted(found["variable"]) == sorted(NAMES)
    assert sorted(found["file"]) == sorted(FILES)
    codes = {value for name, value in vars(exits).items() if name.isupper()}
    assert sorted(map(int, found["exit code"])) == sorted({0, *codes})
    assert f"This is version **{VERSION}**" in PAGE


def test_the_page_has_the_keys_of_the_messages_of_the_package() -> None:
    found = tables()
    for where, message in MESSAGES.items():
        table = json.loads(message) if isinstance(message, bytes) else message
        assert sorted(found.pop(where)) == sorted(table), where
    left = found.keys() - {"variable", "file", "exit code", "the program"}
    assert not left, f"tables of messages that are not known here: {left}"


ROOMS = ("agent", "batch", "core", "devices", "launch", "planning", "policy", "profiling", "store", "worker")


def sources(*rooms: str) -> dict[str, str]:
    paths = [path for room in rooms for path in (PACKAGE / room).rglob("*.py")]
    return {str(path.relative_to(PACKAGE)): path.read_text() for path in paths}


def test_no_name_of_a_variable_stands_elsewhere() -> None:
    """Settings of the command line (HPCSCHED_DIR, HPCSCHED_SITE_CONFIG ...) are no part of the contract."""
    found = [path for path, text in sources(*ROOMS).items() if re.search(r"HPCSCHED_[A-Z]", text)]
    assert len(sources(*ROOMS)) > 200 and not found


@pytest.mark.long
def test_no_name_of_a_file_and_no_exit_code_is_made_elsewhere() -> None:
    codes = {value for name, value in vars(exits).items() if name.isupper()} - {exits.REFUSED}
    words = re.compile(r"\.?(ready|refused|held|left|stop|unusable)\.\*?")
    named = {files.STATE, files.LAYERS, files.NEVER_A_GUEST}
    found = {
        f"{path}:{node.lineno}: {node.value!r}"
        for path, text in sources(*ROOMS, "cli", "report", "sim", "tuning").items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant)
        and (
            (type(node.value) is int and node.value in codes and path != "devices/xid.py")
            or (isinstance(node.value, str) and (node.value in named or words.fullmatch(node.value)))
        )
    }
    assert not found


def test_the_package_is_python_3_9() -> None:
    """It is imported by programs that run in another Python than hpcsched's."""
    for path, text in sources("contract").items():
        tree = ast.parse(text, path, feature_version=(3, 9))
        keywords = {
            keyword.arg for node in ast.walk(tree) if isinstance(node, ast.Call) for keyword in node.keywords
        }
        assert not keywords & {"slots", "kw_only", "strict"}, path
        assert "from __future__ import annotations" in text or path == "contract/__init__.py", path
