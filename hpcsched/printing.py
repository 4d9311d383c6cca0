"""Text from programs and other users, made safe to print on terminals and pages."""

from __future__ import annotations

import re

_ODD = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Control characters but tabs and ends of lines, marks that change the direction of text, lone surrogates."""


def printable(text: str, *, lines: bool = False) -> str:
    """The text with control characters written as escapes; `lines`: ends of lines and tabs stay."""
    text = _ODD.sub(_escaped, text)
    return text if lines else text.replace("\n", "\\n").replace("\t", "\\t")


def _escaped(found: re.Match[str]) -> str:
    number = ord(found[0])
    return f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}"
