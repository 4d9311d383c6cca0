"""Takes out of text what looks like a secret, and on request what tells who and where. Pure.

No rule finds all: what is made with this says that it should be looked through.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

REMOVED = "<removed>"

_SECRET = (
    r"secret|token|passw|passphrase|credential|cookie|private|bearer"
    r"|(?<![a-z])(?:key|auth|pwd)(?![a-z])|api-?_?key|access-?_?key"
)
_NAME = re.compile(_SECRET, re.IGNORECASE)
_WORD = rf"[\w.-]*?(?:{_SECRET})[\w.-]*"
_TEXT = r'(?:[^"\\]|\\.)*'
_SINGLE = r"(?:[^'\\]|\\.)*"
_RULES = tuple(
    (re.compile(pattern, re.IGNORECASE | re.DOTALL), to)
    for pattern, to in (
        # The values of a JSON or TOML document, also one that is cut off; a command's words behind --token.
        (rf'("{_WORD}"\s*[:=]\s*")(?:{_TEXT})("|\Z)', rf"\1{REMOVED}\2"),
        (rf'("-{{1,2}}{_WORD}"\s*,\s*")(?:{_TEXT})("|\Z)', rf"\1{REMOVED}\2"),
        (rf"('-{{1,2}}{_WORD}'\s*,\s*')(?:{_SINGLE})('|\Z)", rf"\1{REMOVED}\2"),
        (rf'(?<![\w"])({_WORD}\s*=\s*")(?:{_TEXT})("|\Z)', rf"\1{REMOVED}\2"),
        # NAME=value and --name=value, --name value in running text.
        (rf"(?<![\w])({_WORD}=)(?!=)(?![\"' ])[^\s\"',;]+", rf"\1{REMOVED}"),
        (rf"((?<!\w)--{_WORD}\s+)(?!-)[^\s\"',;]+", rf"\1{REMOVED}"),
        (r"(\b(?:bearer|basic)\s+)[\w.~+/=-]{8,}", rf"\1{REMOVED}"),
        (r"(\w+://)[^\s/@\"']+@", rf"\1{REMOVED}@"),
        # Tokens that are known by their form alone.
        (r"\b(?:hf_|ghp_|gho_|github_pat_|glpat-|sk-|xox[abp]-|AKIA)[\w-]{12,}", REMOVED),
        (r"-----BEGIN [^-]*PRIVATE KEY-----.*?(?:-----END [^-]*-----|\Z)", REMOVED),
    )
)


def is_secret(name: str) -> bool:
    """Whether a variable or a key of this name is likely to hold a secret."""
    return _NAME.search(name.replace("_", "-").lower()) is not None


def without_secrets(text: str) -> str:
    """The text with the values of secret names, and what looks like a token, replaced by `REMOVED`."""
    for pattern, to in _RULES:
        text = pattern.sub(to, text)
    return text


def renamed(text: str, names: Mapping[str, str]) -> str:
    """The text with these names (of users, folders, hosts) replaced, the longest first."""
    wanted = sorted(filter(None, names), key=len, reverse=True)
    if not wanted:
        return text
    either = re.compile("|".join(rf"(?<!\w){re.escape(name)}(?!\w)" for name in wanted))
    return either.sub(lambda found: names[found[0]], text)
