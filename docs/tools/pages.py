"""What the documentation shows of the code, written anew: tables between marks in pages, pictures, the
manual pages, and the schemas of files that users write.

python docs/tools/pages.py            writes them
python docs/tools/pages.py --check    names those that are out of date; exit code 1 if there are any
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [path for path in (str(ROOT), str(Path(__file__).parent)) if path not in sys.path]

import manual  # noqa: E402
import options  # noqa: E402
import reasons  # noqa: E402
import results  # noqa: E402
import rooms  # noqa: E402
import schedules  # noqa: E402
import states  # noqa: E402

PARTS: dict[tuple[str, str], Callable[[], str]] = {
    ("docs/states.md", "job states"): states.table_of_jobs,
    ("docs/states.md", "attempts"): states.table_of_attempts,
    ("docs/states.md", "reasons"): reasons.tables,
    ("docs/architecture.md", "rooms"): rooms.table,
    ("docs/job-files.md", "strategies"): options.strategies,
    **results.parts(),
}
"""Page and part to its text, which stands between `<!-- NAME: ... -->` and `<!-- end of NAME -->`."""

FILES: dict[str, Callable[[], str]] = {
    "docs/job-states.svg": states.picture_of_jobs,
    "docs/attempts.svg": states.picture_of_attempts,
    "docs/rooms.svg": rooms.picture,
    "docs/schedules.svg": schedules.picture,
    "schemas/jobs.json": options.jobs,
    "schemas/search.json": options.searches,
    "schemas/settings.json": options.settings,
}


def written() -> dict[Path, str]:
    """Each page and each other file with what is to be in it."""
    files = {ROOT / name: text() for name, text in FILES.items()}
    files.update((ROOT / name, text) for name, text in manual.pages().items())
    for (page, name), text in PARTS.items():
        path = ROOT / page
        files[path] = _with_part(files.get(path) or path.read_text(), name, text())
    return files


def out_of_date() -> list[str]:
    """The files that are not as they would be written, and manual pages of commands that are no more."""
    files = written()
    old = [path for path, text in files.items() if not path.exists() or path.read_text() != text]
    return [str(path.relative_to(ROOT)) for path in [*old, *_gone(files)]]


def _gone(files: Collection[Path]) -> set[Path]:
    return set((ROOT / manual.FOLDER).iterdir()) - set(files)


def _with_part(page: str, name: str, text: str) -> str:
    marks = re.compile(
        rf"(<!-- {re.escape(name)}: [^>]*-->\n).*?(\n<!-- end of {re.escape(name)} -->)", re.DOTALL
    )
    new, found = marks.subn(lambda match: f"{match[1]}\n{text.strip()}\n{match[2]}", page)
    if found != 1:
        raise SystemExit(f"{name}: has its marks {found} times in the page")
    return new


def main() -> int:
    old = out_of_date()
    if "--check" in sys.argv[1:]:
        sys.stdout.write("".join(f"{name}: out of date, `make pages` writes it\n" for name in old))
        return int(bool(old))
    files = written()
    for path, text in files.items():
        path.write_text(text)
    for path in _gone(files):
        path.unlink()
    sys.stdout.write("".join(f"{name}: written\n" for name in old))
    return 0


if __name__ == "__main__":
    sys.exit(main())
