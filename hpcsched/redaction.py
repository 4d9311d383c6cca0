"""Takes out of text what looks like a secret, and on request what tells who and where. Pure.

No rule finds all: what is made with this says that it should be looked through. Every rule takes time in
proportion to the text: programs write into it what they like.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping
from typing import Any

REMOVED = "<removed>"

_STRONG = re.compile(
    r"secret|token(?![a-z])|passw|passphrase|credential|cookie|private|bearer|authorization|jwt|webhook"
    r"|api-?key|access-?key"
)
"""In names of what is a secret whatever it looks like."""
_WEAK = re.compile(r"(?<![a-z])(?:keys?|auth|pwd|pass|pw|dsn|signature)(?![a-z])")
"""In names of what may be one, if it is text."""
_MOST_OF_A_NAME = 200
_HOST = re.compile(r"\w[\w.-]*+")

_NAME = re.compile(r"[\w.-]++")
_OPEN = r"(?:\$|[bru]{1,2})?(?P<quote>\\*(?:\"\"\"|'''|[\"']))"
_QUOTED = rf"{_OPEN}(?:(?!(?P=quote))(?:\\.|.))*+(?P<end>(?P=quote)|\Z)"
_ASSIGNED = re.compile(
    rf"\\*[\"']?\]?(?P<sign>\s{{0,8}}(?:=>?|:)\s{{0,8}})(?![=:])(?:{_QUOTED}|(?P<bare>\[[^\]]{{0,4096}}\]?|[^\s\"'\\]+))",
    re.DOTALL,
)
_FOLLOWING = re.compile(
    rf"(?P<sign>\\*[\"']\s{{0,8}},\s{{0,8}}|\s{{1,8}})(?:{_QUOTED}|(?P<bare>[^\s\"',;-][^\s\"',;]*))",
    re.DOTALL,
)
_REST = {quote: re.compile(rf"[^\n{quote}]*") for quote in ("", '"', "'")}
"""What is left of a line, or of what is quoted there."""
_OPTION = re.compile(r"--[\w-]+(?:=.*)?|-\w", re.DOTALL)
_FORMS = tuple(
    (re.compile(pattern, re.IGNORECASE | re.DOTALL), to)
    for pattern, to in (
        (r"-----BEGIN [^-]{0,40}PRIVATE KEY-----.*?(?:-----END [^-]{0,40}-----|\Z)", REMOVED),
        (r"(\b(?:bearer|basic)\s{1,8})[\w.~+/=-]{8,}+", rf"\1{REMOVED}"),
        (r"(\w{1,20}://)(?=[^\s/@\"']{0,500}[:@])[^\s\"']{0,500}@", rf"\1{REMOVED}@"),
        (
            r"(?<![\w.-])(?:hf_|gh[oprsu]_|github_pat_|glpat-|npm_|sk-|xox[abprs]-|A[KS]IA|AIza)[\w-]{12,}+",
            REMOVED,
        ),
        (r"(?<![\w.-])eyJ[\w-]{8,}+(?:\.[\w-]++){1,2}", REMOVED),
    )
)
"""Secrets that are known by their form alone."""


def is_secret(name: str) -> bool:
    """Whether a variable or a key of this name is likely to hold a secret."""
    word = _plain(name)
    return _STRONG.search(word) is not None or _WEAK.search(word) is not None


def without_secrets(text: str) -> str:
    """The text with the values of secret names, and what looks like a token, replaced by `REMOVED`.

    Values are what follows as in NAME=value, NAME: value, `--name value`, quoted or not, also within quotes.
    """
    for pattern, to in _FORMS:
        text = pattern.sub(to, text)
    parts, at, name = [], 0, _NAME.search(text)
    while name is not None:
        if found := _value(text, name):
            start, end = found
            parts += [text[at:start], REMOVED]
            at = end
        name = _NAME.search(text, max(at, name.end()))
    return "".join([*parts, text[at:]])


def document_without_secrets(text: str) -> str:
    """The same of a JSON document, or of one a line, which stay such documents; other text as text.

    Values of secret names go whatever they are, those of options of a command too, also in documents that are
    a value themselves.
    """
    if (clean := _clean_document(text)) is not None:
        return clean
    parts, other = [], ""
    for line in io.StringIO(text, newline="\n"):
        clean = _clean_document(line) if line.lstrip()[:1] in ("{", "[") else None
        if clean is None:
            other += line
        else:
            parts += [without_secrets(other), clean]
            other = ""
    return "".join([*parts, without_secrets(other)])


def renamed(text: str, names: Mapping[str, str]) -> str:
    """The text with these names (of users, folders, hosts) replaced, the longest first."""
    odd = sorted((name for name in names if name and not _HOST.fullmatch(name)), key=len, reverse=True)
    if odd:
        either = re.compile("|".join(rf"(?<!\w){re.escape(name)}(?!\w)" for name in odd))
        text = either.sub(lambda found: names[found[0]], text)
    return _HOST.sub(lambda found: _renamed(found[0], names), text)


def _renamed(word: str, names: Mapping[str, str]) -> str:
    """A word that may be a name, of a host in its domain too, or be made of such: a look-up, however many."""
    whole = word.rstrip(".-")
    for part in (whole, whole.partition(".")[0]):
        if part in names:
            return names[part] + word[len(part) :]
    return re.sub(r"\w+", lambda found: names.get(found[0], found[0]), word)


def _plain(name: str) -> str:
    return name[-_MOST_OF_A_NAME:].replace("_", "-").lower()


def _value(text: str, name: re.Match[str]) -> tuple[int, int] | None:
    """Where the value of a secret name stands that is followed by one."""
    word = _plain(name[0])
    strong = _STRONG.search(word) is not None
    if not strong and _WEAK.search(word) is None:
        return None
    found = _ASSIGNED.match(text, name.end())
    if found is None and name[0].startswith("-"):
        found = _FOLLOWING.match(text, name.end())
    if found is None:
        return None
    if found["quote"]:
        return found.end("quote"), found.start("end")
    start = found.start("bare")
    if name[0].startswith("-") or found["sign"] == "=":
        return start, found.end()
    if not strong:
        return None  # such as `key = function(...)` in a line of a program
    if ":" not in found["sign"] or not re.search("cookie|authorization", word):
        return start, found.end()
    before = text[max(0, name.start() - 1) : name.start()]
    rest = _REST[before if before in _REST else ""].match(text, start)
    return start, (rest or found).end()


def _clean_document(text: str) -> str | None:
    """A document without secrets; None: it is no JSON."""
    try:
        return _dumped(json.loads(text), text)
    except (ValueError, RecursionError):
        return None


def _dumped(value: Any, text: str) -> str:
    end = text[len(text.rstrip()) :]
    gap = (",", ":") if ": " not in text else (", ", ": ")
    return json.dumps(_cleaned(value), ensure_ascii=False, separators=gap) + end


def _cleaned(value: Any) -> Any:
    if isinstance(value, dict):
        return {without_secrets(key): _of(key, one) for key, one in value.items()}
    if isinstance(value, list):
        return [_word(before, one) for before, one in zip([None, *value], value, strict=False)]
    if not isinstance(value, str):
        return value
    clean = _clean_document(value) if value.lstrip()[:1] in ("{", "[") else None
    return without_secrets(value) if clean is None else clean


def _of(key: str, value: Any) -> Any:
    """The value of this key."""
    if value is None or isinstance(value, bool):
        return value
    if _STRONG.search(_plain(key)) or (isinstance(value, str) and is_secret(key)):
        return REMOVED
    return _cleaned(value)


def _word(before: Any, word: Any) -> Any:
    """A word of a list, maybe of a command: the value of the option before it, or one with its value."""
    takes = isinstance(before, str) and before.startswith("-") and "=" not in before and is_secret(before)
    if isinstance(word, str):
        name, sign, _ = word.partition("=")
        if sign and before != "-c" and _NAME.fullmatch(name) and is_secret(name):
            return f"{name}={REMOVED}"
        takes = takes and not _OPTION.fullmatch(word)
    return REMOVED if takes and isinstance(word, str | int | float) else _cleaned(word)
