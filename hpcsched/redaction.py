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
    r"secret|token(?![a-z-])|passw|passphrase|credential|cookie|private|bearer|authorization|jwt|webhook"
    r"|api-?key|access-?key"
)
"""In names of what is a secret whatever it looks like."""
_WEAK = re.compile(r"(?<![a-z])(?:keys?|tokens?|o?auth|pwd|pass|pw|dsn|signature)(?![a-z])")
"""In names of what may be one: counts and measures have such names too, and sentences such words."""
_NO_VALUE = re.compile(r"true|false|yes|no|none|null", re.IGNORECASE)
_MEASURE = re.compile(r"[\[(]?[-+]?\d[\d.,e+ -]{0,60}[kmgb%]?(?:/?s)?[\])]?", re.IGNORECASE)
_MOST_OF_A_NAME = 200
_HOST = re.compile(r"\w[\w.-]*+")

_NAME = re.compile(r"[\w.-]++")
_HUMP = re.compile(r"(?<=[a-z])(?=(?:Keys?|Pass|Pwd|Auth)\Z)")
_SIGN = re.compile(r"\\{0,64}[\"']?\]?\s{0,8}(?P<sign>=>?|:=?)\s{0,8}(?![=:])")
_GAP = re.compile(r"\\{0,64}[\"']\s{0,8},\s{0,8}|\s{1,8}(?!-)")
"""Between an option and its value."""
_QUOTED = re.compile(
    r"[$bfru]{0,2}(?P<quote>\\{0,64}(?:\"\"\"|'''|[\"']))"
    r"(?:(?!(?P=quote))(?:\\.|.))*+(?P<end>(?P=quote)|\Z)",
    re.DOTALL | re.IGNORECASE,
)
_BARE = re.compile(
    r"\[[^\]]{0,4096}\]?|\{[^}]{0,4096}\}?|(?:[^\s\"'\\]|[\"'](?=\w)|\\(?!\\{0,64}[\"'])[^\n]?)++"
)
_NEXT_WORD = re.compile(r"[^\s\"',;]++")
_REST = {quote: re.compile(rf"[^\n{quote}]*") for quote in ("", '"', "'")}
"""What is left of a line, or of what is quoted there."""
_OPTION = re.compile(r"--[\w-]+(?:=.*)?|-\w", re.DOTALL)
_URL = re.compile(r"(?<=://)(?P<user>[^\s/@:\"']*+[:@])?+[^\s\"']*+")
_FORMS = tuple(
    (re.compile(pattern, re.IGNORECASE | re.DOTALL), to)
    for pattern, to in (
        (r"-----BEGIN [^-]{0,40}PRIVATE KEY-----.*?(?:-----END [^-]{0,40}-----|\Z)", REMOVED),
        (r"(\b(?:bearer|basic)\s{1,8})[\w.~+/=-]{8,}+", rf"\1{REMOVED}"),
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
    return name != "PWD" and (_is_strong(name) or _WEAK.search(_plain(name)) is not None)


def without_secrets(text: str) -> str:
    """The text with the values of secret names, and what looks like a token, replaced by `REMOVED`.

    Values are what follows as in NAME=value, NAME: value, `--name value`, quoted or not, also within quotes.
    """
    text = _URL.sub(_without_user, text)
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
    return _HUMP.sub("-", name[-_MOST_OF_A_NAME:]).replace("_", "-").lower()


def _is_strong(name: str) -> bool:
    """Whether what has this name is a secret whatever it looks like; in capitals it is a variable's name."""
    word = _plain(name)
    variable = "_" in name and name.isupper() and not name.endswith("TOKENS")
    return _STRONG.search(word) is not None or (variable and _WEAK.search(word) is not None)


def _hides(name: str, value: str) -> bool:
    """Whether this value is not shown where it has this name."""
    if not is_secret(name) or _NO_VALUE.fullmatch(value):
        return False
    return _is_strong(name) or not _MEASURE.fullmatch(value)


def _without_user(url: re.Match[str]) -> str:
    """What follows `://`, without the name and the password before its host."""
    _, at, host = url[0].rpartition("@")
    return f"{REMOVED}@{host}" if at and url["user"] else url[0]


def _value(text: str, name: re.Match[str]) -> tuple[int, int] | None:
    """Where the value of a secret name stands that is followed by one."""
    if not is_secret(name[0]) or name[0].endswith(".py"):
        return None
    option, strong = name[0].startswith("-"), _is_strong(name[0])
    sign = _SIGN.match(text, name.end())
    gap = sign or (_GAP.match(text, name.end()) if option else None)
    if gap is None:
        return None
    if quoted := _QUOTED.match(text, gap.end()):
        start, end = quoted.end("quote"), quoted.start("end")
        return (start, end) if _hides(name[0], text[start:end]) else None
    # Nothing may be read that is then left where it is: the next name would have it read again.
    if not (option or strong or (sign and sign[0] == "=")):
        return None  # such as `key = function(...)` in a line of a program
    bare = _bare(text, name, sign).match(text, gap.end())
    return bare.span() if bare and _hides(name[0], bare[0].rstrip(",;)}]")) else None


def _bare(text: str, name: re.Match[str], sign: re.Match[str] | None) -> re.Pattern[str]:
    """How a value without quotes looks."""
    if sign is None:
        return _NEXT_WORD
    if ":" not in sign["sign"] or not re.search("cookie|authorization", _plain(name[0])):
        return _BARE
    before = text[max(0, name.start() - 1) : name.start()]
    return _REST[before if before in _REST else ""]


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
    if _hides(key, value) if isinstance(value, str) else _is_strong(key):
        return REMOVED
    return _cleaned(value)


def _word(before: Any, word: Any) -> Any:
    """A word of a list, maybe of a command: the value of the option before it, or one with its value."""
    takes = isinstance(before, str) and before.startswith("-") and "=" not in before
    if isinstance(word, str):
        name, sign, value = word.partition("=")
        if sign and before != "-c" and _NAME.fullmatch(name) and _hides(name, value):
            return f"{name}={REMOVED}"
        takes = takes and not _OPTION.fullmatch(word)
    takes = takes and isinstance(word, str | int | float) and _hides(before, str(word))
    return REMOVED if takes else _cleaned(word)
