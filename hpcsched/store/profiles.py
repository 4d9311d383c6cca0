"""Profile files: reading and writing the JSON interchange, and the choice of a job's profile."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from hpcsched.core.profile import SOURCES, Cost, Profile
from hpcsched.errors import ConfigError, StoreError
from hpcsched.patience import kind_of, patiently
from hpcsched.shipped import shipped as shipped_files

FindProfiles = Callable[[set[str], str], tuple[Profile, ...]]
"""Gives the profiles of these models for this device type."""

SCHEMA = 1

_PREFERENCE = {"measured": 0, "learned": 1, "published": 2, "fitted": 2}
"""The order of preference of several profiles by source, measured ones first."""


@dataclass(frozen=True, kw_only=True)
class RateSample:
    """One measured window: `rate` units per second on `gpus` GPUs over `seconds`, ended `at` (ISO, UTC)."""

    gpus: int
    rate: float
    seconds: float
    at: str


def load_profiles(path_or_name: str | Path) -> tuple[Profile, ...]:
    """The profiles of a file, or of the shipped file with this bare name ("marble-summit").

    Raises ConfigError naming the file, the key, what was found and what is accepted.
    """
    path = Path(path_or_name)
    if path.name == str(path_or_name) and kind_of(path) is None:
        known = shipped()
        if (name := path.name.removesuffix(".json")) in known:
            path = known[name]
        else:
            names = ", ".join(known) or "none were found"
            raise ConfigError(
                where=str(path_or_name),
                got="no such file",
                accepted=f"a profiles file, or the name of a shipped one ({names})",
            )
    try:
        text = patiently(lambda: path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(where=str(path), got=str(why), accepted="a readable JSON file") from error
    return parse_profiles(text, where=str(path))


def shipped(kind: str = "") -> dict[str, Path]:
    """The profile files shipped with hpcsched, by bare name, in alphabetical order.

    `kind` "layers": those of models' layers.
    """
    return shipped_files(f"profiles/{kind}", ".json")


def parse_profiles(text: str, *, where: str) -> tuple[Profile, ...]:
    """The profiles in a JSON text; `where` names it in errors. Raises ConfigError."""
    # The standard library's reader, because it lets NaN through to the checks below, which know the
    # key it stands at, and because it can be told to notice a key that is given twice.
    try:
        whole = json.loads(text, object_pairs_hook=_Pairs)
    except (ValueError, RecursionError) as error:
        raise ConfigError(where=where, got=f"not readable: {error}", accepted="JSON") from error
    top = _Value(where, "", whole).members({"schema", "profiles"}, required=("schema", "profiles"))
    schema = top["schema"]
    if type(schema.found) is not int or schema.found != SCHEMA:
        schema.refuse(f"{SCHEMA} (written by another version of hpcsched?)")
    profiles: list[Profile] = []
    seen: dict[tuple[object, ...], int] = {}
    for i, entry in enumerate(top["profiles"].elements()):
        profile = _profile(entry)
        key = (profile.model, profile.device, profile.nodes, profile.global_batch, profile.software)
        if (first := seen.setdefault(key, i)) != i:
            raise ConfigError(
                where=where,
                key=entry.key,
                got=f"the same model, device, nodes and global_batch as profiles[{first}]",
                accepted="each once",
            )
        profiles.append(profile)
    return tuple(profiles)


def format_profiles(profiles: Iterable[Profile]) -> str:
    """The JSON interchange of these profiles, one a line, ending with a newline."""
    lines = ",\n".join(f"  {json.dumps(to_json(p), ensure_ascii=False, allow_nan=False)}" for p in profiles)
    return f'{{"schema": {SCHEMA}, "profiles": [\n{lines}\n]}}\n' if lines else _EMPTY


_EMPTY = f'{{"schema": {SCHEMA}, "profiles": []}}\n'


def save_profiles(path: Path, profiles: Iterable[Profile]) -> None:
    """Write the JSON interchange to `path`, atomically. Raises StoreError."""
    text = format_profiles(profiles)
    # A link (or /dev/stdout) is written through, not replaced.
    path = path.resolve()
    if path.exists() and not path.is_file():
        _write(path, text)
        return
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        _write(fresh, text)
        fresh.replace(path)
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror}; choose another place with -o") from error
    finally:
        fresh.unlink(missing_ok=True)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StoreError(f"{path}: cannot be written: {error.strerror}; choose another place") from error


def to_json(profile: Profile) -> dict[str, Any]:
    """One profile in the interchange's form: tables are keyed by the count as text, unknown keys left out."""
    found: dict[str, Any] = {
        "model": profile.model,
        "device": profile.device,
        "nodes": profile.nodes,
        "global_batch": profile.global_batch,
        "unit": profile.unit,
        "throughput": profile.throughput,
        "start_s": profile.start_s,
        "suspend_s": profile.suspend_s,
        "resume_s": profile.resume_s,
        "grow_s": profile.grow_s,
        "shrink_s": profile.shrink_s,
        "memory_mib": profile.memory_mib,
        "busy": profile.busy,
        "checkpoint_mib": profile.checkpoint_mib,
        "source": profile.source,
        "software": profile.software or None,
        "spread": profile.spread,
        "packed_s": profile.packed_s,
        "packed_mib": profile.packed_mib,
        "note": profile.note or None,
    }
    return {
        key: {str(g): v for g, v in sorted(value.items())} if isinstance(value, Mapping) else value
        for key, value in found.items()
        if value is not None
    }


def choose(
    profiles: Sequence[Profile], model: str, device: str, *, where: str = "profiles"
) -> Profile | None:
    """The profile that is used for jobs of `model` on `device`; None if the model has none.

    The one for the device at hand, preferring one node, then what was measured, then what was
    learned; of two that differ in software only, the one listed first. Without a match the
    model's only profile serves. Raises ConfigError that lists the candidates otherwise; `where`
    says in it where they came from.
    """
    known = [p for p in profiles if p.model == model]
    here = [p for p in known if p.device == device]
    if here:
        best = min((p.nodes != 1, _PREFERENCE[p.source]) for p in here)
        here = [p for p in here if (p.nodes != 1, _PREFERENCE[p.source]) == best]
    candidates = here or known
    if len({(p.device, p.nodes, p.global_batch) for p in candidates}) > 1:
        listed = "; ".join(describe(p) for p in candidates)
        raise ConfigError(
            where=where,
            key=model,
            got=f"{len(candidates)} profiles {'fit' if here else 'but none for'} device {device!r}: {listed}",
            accepted="one that fits: give a profiles file with only that one"
            + ("" if here else ", or name its device with --device-type"),
        )
    return min(candidates, key=lambda p: _PREFERENCE[p.source], default=None)


def choose_all(
    profiles: Sequence[Profile], models: Iterable[str], device: str, *, where: str = "profiles"
) -> tuple[Profile, ...]:
    """The chosen profile of each model for each number of hosts that it has one for, in the order given."""
    by_nodes = [[p for p in profiles if p.nodes == nodes] for nodes in sorted({p.nodes for p in profiles})]
    chosen = (choose(ps, model, device, where=where) for model in dict.fromkeys(models) for ps in by_nodes)
    return tuple(p for p in chosen if p is not None)


def measured_on(gpu_type: str, models: Iterable[str], find: FindProfiles) -> tuple[Profile, ...]:
    """The profiles of models on devices of this type alone: none where `choose` would take others'."""
    found: list[Profile] = []
    for model in sorted(models):
        with suppress(ConfigError):  # several, of other types
            found += [profile for profile in find({model}, gpu_type) if profile.device == gpu_type]
    return tuple(found)


def describe(profile: Profile, *, note: bool = True) -> str:
    """A profile in one line: what tells it from others of its model, and the beginning of its note."""
    parts = [profile.device, f"{profile.nodes} node{'s' * (profile.nodes > 1)}"]
    if profile.global_batch is not None:
        parts.append(f"batch {profile.global_batch}")
    parts.append(profile.source)
    if note and (text := " ".join(profile.note.split())):
        parts.append(text if len(text) <= 40 else text[:39] + "…")
    return ", ".join(parts)


# Reading: every check knows the file and the key it looks at.


class _Pairs(list[tuple[str, Any]]):
    """A JSON object as its pairs, so that a repeated key is seen; any other list is a JSON array."""


@dataclass(frozen=True, slots=True)
class _Value:
    """A JSON value and where it stands."""

    where: str
    key: str
    found: Any

    def refuse(self, accepted: str) -> NoReturn:
        raise ConfigError(where=self.where, key=self.key, got=_show(self.found), accepted=accepted)

    def below(self, key: str, found: Any) -> _Value:
        return _Value(self.where, f"{self.key}.{key}" if self.key else key, found)

    def elements(self) -> list[_Value]:
        if not isinstance(self.found, list) or isinstance(self.found, _Pairs):
            self.refuse("a list")
        return [_Value(self.where, f"{self.key}[{i}]", item) for i, item in enumerate(self.found)]

    def pairs(self) -> list[tuple[str, _Value]]:
        if not isinstance(self.found, _Pairs):
            self.refuse("an object {...}")
        seen: set[str] = set()
        for key, value in self.found:
            if key in seen:
                raise ConfigError(
                    where=self.where,
                    key=self.below(key, value).key,
                    got="given twice",
                    accepted="each key once",
                )
            seen.add(key)
        return [(key, self.below(key, value)) for key, value in self.found]

    def members(self, known: Iterable[str], *, required: Iterable[str]) -> dict[str, _Value]:
        found = dict(self.pairs())
        for key, value in found.items():
            if key not in known:
                accepted = ", ".join(sorted(known))
                raise ConfigError(where=self.where, key=value.key, got="unknown key", accepted=accepted)
        for key in required:
            if key not in found:
                accepted = "it is required"
                raise ConfigError(
                    where=self.where, key=self.below(key, None).key, got="missing", accepted=accepted
                )
        return found

    def text(self) -> str:
        if not isinstance(self.found, str):
            self.refuse("text")
        return self.found

    def name(self) -> str:
        if not self.text().strip() or not self.text().isprintable():
            self.refuse("a name of printable characters")
        return self.text()

    def source(self) -> str:
        if self.found not in SOURCES:
            self.refuse(" | ".join(SOURCES))
        return self.text()

    def count(self) -> int:
        if type(self.found) is not int or not 1 <= self.found < 2**63:  # as the database keeps it
            self.refuse("a whole number of at least 1")
        return self.found

    def number(self, accepted: str, fits: Callable[[float], bool]) -> float:
        if type(self.found) not in (int, float):
            self.refuse(accepted)
        try:
            value = float(self.found)
        except OverflowError:
            self.refuse(accepted)
        if not math.isfinite(value) or not fits(value):
            self.refuse(accepted)
        return value

    def positive(self) -> float:
        return self.number("a finite number above 0", lambda x: x > 0)

    def not_negative(self) -> float:
        return self.number("a finite number of at least 0", lambda x: x >= 0)

    def table(self, read: Callable[[_Value], float]) -> dict[int, float]:
        rows = self.pairs()
        if not rows:
            self.refuse('at least one GPU count with its value, like {"1": 4.4}')
        for count, value in rows:
            if not re.fullmatch("[1-9][0-9]{0,5}", count):
                raise ConfigError(
                    where=self.where,
                    key=value.key,
                    got=_show(count),
                    accepted="a GPU count, a whole number from 1",
                )
        return {int(count): read(value) for count, value in rows}

    def rates(self) -> dict[int, float]:
        return self.table(_Value.positive)

    def spreads(self) -> dict[int, float]:
        return self.table(_Value.not_negative)

    def cost(self) -> Cost:
        if isinstance(self.found, _Pairs):
            return self.table(_Value.not_negative)
        return self.number("seconds of at least 0, or a table of them by GPU count", lambda x: x >= 0)


_READERS: dict[str, Callable[[_Value], Any]] = {
    "model": _Value.name,
    "device": _Value.name,
    "throughput": _Value.rates,
    "nodes": _Value.count,
    "global_batch": _Value.count,
    "unit": _Value.name,
    "start_s": _Value.cost,
    "suspend_s": _Value.cost,
    "resume_s": _Value.cost,
    "grow_s": _Value.cost,
    "shrink_s": _Value.cost,
    "memory_mib": _Value.rates,
    "checkpoint_mib": _Value.not_negative,
    "source": _Value.source,
    "note": _Value.text,
    "software": _Value.text,
    "spread": _Value.spreads,
    "packed_s": _Value.rates,
    "packed_mib": _Value.rates,
    "busy": _Value.rates,
}
_MAY_BE_NULL = {name for name, read in _READERS.items() if read is _Value.cost} | {
    "global_batch",
    "memory_mib",
    "checkpoint_mib",
    "spread",
    "packed_s",
    "packed_mib",
    "busy",
}


def _profile(entry: _Value) -> Profile:
    found = entry.members(_READERS, required=("model", "device", "throughput"))
    return Profile(
        **{
            key: _READERS[key](value)
            for key, value in found.items()
            if value.found is not None or key not in _MAY_BE_NULL
        }
    )


def _show(found: Any) -> str:
    """A JSON value as it was written, cut to fit a line."""
    text = json.dumps(_plain(found), ensure_ascii=False)
    return text if len(text) <= 60 else text[:59] + "…"


def _plain(found: Any) -> Any:
    if isinstance(found, _Pairs):
        return {key: _plain(value) for key, value in found}
    return [_plain(item) for item in found] if isinstance(found, list) else found
