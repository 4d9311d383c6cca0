"""Forms of inputs: each read into a tree of dicts, lists and scalars, and written, whatever is in it."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import re
import tomllib
from collections.abc import Mapping
from typing import Any
from zlib import crc32

import msgspec


class Raw(str):
    """What stands in a document as it is, such as 1e999."""

    __slots__ = ()


class Again(str):
    """A key that stands twice in a table."""

    __slots__ = ()
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


class Form:
    """One form of documents. `load` gives None for what it cannot read."""

    name = "bytes"
    raw: tuple[str, ...] = ()
    """Values that only this form can say."""
    any_bytes = True
    """Whether its inputs come as bytes, which may be any."""

    def load(self, data: bytes) -> Any:
        return None

    def dump(self, tree: Any) -> bytes:
        return bytes(tree)


_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}


def _quoted(text: str) -> str:
    """Most control characters stay as they are, which neither form allows."""
    return '"' + "".join(_ESCAPES.get(letter, letter) for letter in text) + '"'


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape" if not _LONE.search(text) else "surrogatepass")


_LONE = re.compile("[\ud800-\udc7f\udd00-\udfff]")


class Json(Form):
    name = "json"
    raw = ("NaN", "Infinity", "-Infinity", "1e999", "-0", "9" * 5000, "[" * 2000 + "]" * 2000, '{"a":' * 1500)

    def load(self, data: bytes) -> Any:
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(data)
        return None

    def dump(self, tree: Any) -> bytes:
        return _bytes(self._text(tree)) + b"\n"

    def _text(self, tree: Any) -> str:
        match tree:
            case dict():
                pairs = (f"{_quoted(str(key))}: {self._text(value)}" for key, value in tree.items())
                return "{" + ", ".join(pairs) + "}"
            case list():
                return "[" + ", ".join(map(self._text, tree)) + "]"
            case Raw():
                return str(tree)
            case str():
                return _quoted(tree)
            case float() if tree != tree or abs(tree) == float("inf"):
                return "NaN" if tree != tree else "Infinity" if tree > 0 else "-Infinity"
        return json.dumps(tree)


class Toml(Form):
    name = "toml"
    raw = (
        "nan",
        "inf",
        "-inf",
        "1e999",
        "0x1f",
        "9" * 5000,
        "[" * 2000 + "]" * 2000,
        "1979-05-27",
        "07:32:00",
    )

    def load(self, data: bytes) -> Any:
        with contextlib.suppress(ValueError, RecursionError):
            return tomllib.loads(data.decode())
        return None

    def dump(self, tree: Any) -> bytes:
        if not isinstance(tree, dict):
            return _bytes(f"x = {self._text(tree)}\n")
        lines, below = [], []
        for key, value in tree.items():
            if isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
                below += [(f"[[{self._key(key)}]]", each) for each in value]
            elif isinstance(value, dict):
                below.append((f"[{self._key(key)}]", value))
            else:
                lines.append(f"{self._key(key)} = {self._text(value)}")
        for head, table in below:
            lines += ["", head]
            lines += [f"{self._key(key)} = {self._text(value)}" for key, value in table.items()]
        return _bytes("\n".join(lines) + "\n")

    @staticmethod
    def _key(key: Any) -> str:
        return str(key) if re.fullmatch(r"[A-Za-z0-9_-]+", str(key)) else _quoted(str(key))

    def _text(self, tree: Any) -> str:
        match tree:
            case dict():
                return "{" + ", ".join(f"{self._key(k)} = {self._text(v)}" for k, v in tree.items()) + "}"
            case list():
                return "[" + ", ".join(map(self._text, tree)) + "]"
            case bool():
                return "true" if tree else "false"
            case None:
                return '""'
            case Raw():
                return str(tree)
            case str():
                return _quoted(tree)
        return str(tree)


class Csv(Form):
    """Rows of cells."""

    name = "csv"
    raw = ("nan", "inf", "-inf", "1e999", "9" * 5000, '"', "a,b", "1_0", "\u0661")

    def load(self, data: bytes) -> Any:
        with contextlib.suppress(ValueError, csv.Error):
            return list(csv.reader(io.StringIO(data.decode())))
        return None

    def dump(self, tree: Any) -> bytes:
        rows = tree if isinstance(tree, list) else [tree]
        lines = [row if isinstance(row, list) else [row] for row in rows]
        return _bytes("\n".join(",".join(map(str, line)) for line in lines) + "\n")


class Words(Form):
    """A list of words, or a table of them: arguments of a command, and variables of an environment."""

    name = "words"
    any_bytes = False
    raw = ("--", "-", "@x", "=", "--dir=", "1e999", "nan", "9" * 5000, "\udcff", "1" * 20, "\u0661", "\u00b2")

    def load(self, data: bytes) -> Any:
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(data)
        return None

    def dump(self, tree: Any) -> bytes:
        if isinstance(tree, Mapping):
            plain: Any = {_word(key): _word(value) for key, value in tree.items()}
        else:
            plain = [_word(value) for value in (tree if isinstance(tree, list) else [tree])]
        return json.dumps(plain).encode()


MOST_WORD = 2**17 - 100
"""Characters of one word: Linux takes no longer ones."""


def _word(value: Any) -> str:
    """As the kernel hands it over: no byte that is zero, and none that Python could not have got."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    text = text.replace("\0", "")[:MOST_WORD]
    return _bytes(text).decode("utf-8", "surrogateescape")


class Msgpack(Form):
    name = "msgpack"

    def load(self, data: bytes) -> Any:
        with contextlib.suppress(msgspec.MsgspecError, ValueError, RecursionError):
            return msgspec.msgpack.decode(data)
        return None

    def dump(self, tree: Any) -> bytes:
        return msgspec.msgpack.encode(_packable(tree))


def _packable(tree: Any) -> Any:
    """Without what msgpack has no form for."""
    match tree:
        case dict():
            return {_packable(str(key)): _packable(value) for key, value in tree.items()}
        case list():
            return [_packable(value) for value in tree]
        case str():
            return str(tree).encode("utf-8", "replace").decode()
        case int() if not -(2**63) <= tree < 2**64:
            return float(tree)
    return tree


class Journal(Form):
    """Records of a journal, whose checksums are right whatever is in them."""

    name = "journal"
    raw = Json.raw

    def load(self, data: bytes) -> Any:
        try:
            return [json.loads(line) for line in data.splitlines() if line.strip(b"\0")]
        except (ValueError, RecursionError):
            return None

    def dump(self, tree: Any) -> bytes:
        lines, form = [], Json()
        for record in tree if isinstance(tree, list) else [tree]:
            if not isinstance(record, dict):
                lines.append(form.dump(record))
                continue
            seq, kind = record.get("seq"), record.get("type")
            event = form.dump(record.get("event")).rstrip(b"\n")
            checksum = f"{crc32(event, crc32(f'{seq} {kind} '.encode('utf-8', 'replace'))):08x}"
            head = {**record, "crc": checksum, "event": Raw("")}
            lines.append(form.dump(head).replace(b'"event": ', b'"event": ' + event, 1))
        return b"".join(lines)


FORMS: dict[str, Form] = {
    form.name: form for form in (Form(), Json(), Toml(), Csv(), Words(), Msgpack(), Journal())
}
