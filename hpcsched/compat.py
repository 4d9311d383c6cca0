"""Names of newer standard libraries that Python 3.9 lacks, for the modules of `hpcsched-worker`.

Where Python has them they are Python's own.
"""

from __future__ import annotations

import sys

if sys.version_info >= (3, 11):
    from enum import StrEnum as StrEnum  # novermin
else:
    from enum import Enum

    class StrEnum(str, Enum):
        """Members are text, in `str` and in format strings too."""

        __str__ = str.__str__
        __format__ = str.__format__


if sys.version_info >= (3, 10):
    from builtins import zip as zip
    from dataclasses import dataclass as dataclass
    from itertools import pairwise as pairwise  # novermin

    bit_count = int.bit_count  # novermin
else:
    import builtins
    import dataclasses
    import itertools

    def dataclass(cls=None, *, slots=False, kw_only=False, **options):
        """Without slots, which only save memory; with `kw_only`, arguments have names only."""
        if cls is None:
            return lambda cls: dataclass(cls, slots=slots, kw_only=kw_only, **options)  # novermin
        if not kw_only:
            return dataclasses.dataclass(**options)(cls)
        if "__init__" not in vars(cls):
            cls.__init__ = _init
        return dataclasses.dataclass(init=False, **options)(cls)

    def _init(self, **given):
        for field in dataclasses.fields(self):
            if field.init and field.name in given:
                value = given.pop(field.name)
            elif field.default is not dataclasses.MISSING:
                value = field.default
            elif field.default_factory is not dataclasses.MISSING:
                value = field.default_factory()
            elif field.init:
                raise TypeError(f"{type(self).__name__}: missing argument {field.name!r}")
            else:
                continue
            object.__setattr__(self, field.name, value)
        if given:
            raise TypeError(f"{type(self).__name__}: unexpected arguments {', '.join(given)}")
        getattr(self, "__post_init__", lambda: None)()

    def pairwise(items):
        """Each item with the next one."""
        first, second = itertools.tee(items)
        next(second, None)
        return builtins.zip(first, second)

    def bit_count(number):
        """The number of bits that are 1."""
        return bin(number).count("1")

    _END = object()

    def zip(*iterables, strict=False):
        """As `builtins.zip`; with `strict`, ValueError for arguments of different lengths."""
        return _strict(iterables) if strict else builtins.zip(*iterables)

    def _strict(iterables):
        for items in itertools.zip_longest(*iterables, fillvalue=_END):
            if any(item is _END for item in items):
                raise ValueError("zip(): the arguments have different lengths")
            yield items
