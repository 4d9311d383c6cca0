"""How much memory this process may still take. Standard library only."""

from __future__ import annotations

from pathlib import Path


def admits(needed: int, available: int) -> bool:
    """Whether so many more bytes may be taken for good: half of what is available stays for others."""
    return needed <= available // 2


def available(root: Path = Path("/")) -> int:
    """Bytes that can still be had, by the account of this host and of all control groups around us."""
    rooms = [
        1024 * int(line.split()[1])
        for line in _lines(root / "proc/meminfo")
        if line.startswith("MemAvailable:")
    ]
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mount, files = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        group = mount / path.lstrip("/")
        for folder in (group, *group.parents):  # a limit may be set on any level
            rooms += _room_in(folder, *files)
            if folder == mount:
                break
    return max(0, min(rooms, default=0))


def _room_in(group: Path, limit: str, usage: str, cache: str) -> list[int]:
    """What a control group has left, if it has a limit; files cached and not in use make room when needed."""
    numbers = [line for name in (limit, usage) for line in _lines(group / name)]
    if len(numbers) != 2 or not all(number.isdecimal() for number in numbers):
        return []  # "max", or no such group in our view of the tree
    cached = [line.split()[1] for line in _lines(group / "memory.stat") if line.startswith(f"{cache} ")]
    return [int(numbers[0]) - int(numbers[1]) + sum(map(int, cached))]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
