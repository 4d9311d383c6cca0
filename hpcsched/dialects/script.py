"""A training script as its syntax tree shows it: imports, calls, arguments. It is read, never run."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path

from hpcsched.decoding import read_file
from hpcsched.dialects.command import Call, NotSure
from hpcsched.errors import BadInput
from hpcsched.patience import passes, patiently

MOST_BYTES = 256 * 1024
"""The longest script that is read (chosen): the longest of Transformers' own examples has 60 KiB."""

_MOST_PARTS = 64
"""The most expressions that a value is followed through (chosen)."""


@dataclass(frozen=True, slots=True)
class Option:
    """An option of an `ArgumentParser`: its spellings, and the text that it has by default (None: not known).

    `takes_text`: it takes one word, and gives it on as it is; `flag`: it takes none, and means yes.
    """

    names: tuple[str, ...]
    default: str | None
    takes_text: bool
    flag: bool = False


@dataclass
class Script:
    """What is seen of a script. `imported` maps a local name to "package.module.name"."""

    name: str
    imported: dict[str, str] = field(default_factory=dict)
    calls: list[ast.Call] = field(default_factory=list)
    assigned: dict[str, list[ast.expr]] = field(default_factory=dict)
    """What is assigned to each name, in any scope; parameters, loops and the like as `ast.Constant(...)`."""
    set_attributes: set[str] = field(default_factory=set)
    """Attributes that are assigned to, as in `args.output_dir = ...`."""
    options: dict[str, Option] = field(default_factory=dict)
    """Options by the name of their attribute."""
    bases: dict[str, list[str]] = field(default_factory=dict)
    """Classes that are defined here, with the names of their bases."""
    texts: set[str] = field(default_factory=set)
    """All literal texts of at most 80 characters."""

    @cached_property
    def flags(self) -> frozenset[str]:
        """All spellings of its options."""
        return frozenset(name for option in self.options.values() for name in option.names)

    @cached_property
    def packages(self) -> frozenset[str]:
        """The packages that it imports."""
        return frozenset(origin.partition(".")[0] for origin in self.imported.values())

    @cached_property
    def by_name(self) -> Mapping[str, list[ast.Call]]:
        """Its calls, by the last part of the name of what is called."""
        found: dict[str, list[ast.Call]] = {}
        for call in self.calls:
            found.setdefault(self.name_of(call.func), []).append(call)
        return found

    def called(self, *names: str) -> list[ast.Call]:
        """The calls of what is imported as one of these names, from wherever, or is one of these methods."""
        return [call for name in names for call in self.by_name.get(name, [])]

    def name_of(self, func: ast.expr) -> str:
        """The last part of what an expression names: `Trainer` of `L.Trainer`, and of an imported one."""
        if isinstance(func, ast.Attribute):
            return func.attr
        if isinstance(func, ast.Name):
            return self.imported.get(func.id, func.id).rpartition(".")[2]
        return ""

    def origin(self, func: ast.expr) -> str:
        """Where what is called comes from, as "lightning.Trainer" of `L.Trainer`; "" if that is not seen."""
        if isinstance(func, ast.Name):
            return self.imported.get(func.id, "")
        if isinstance(func, ast.Attribute) and (base := self.origin(func.value)):
            return f"{base}.{func.attr}"
        return ""

    def leaves(self, value: ast.expr) -> list[ast.expr]:
        """All expressions that a value may come from, through names, conditions and `or`. Raises NotSure."""
        found: list[ast.expr] = []
        waiting, names, seen = [value], set(), 0
        while waiting:
            part, seen = waiting.pop(), seen + 1
            if seen > _MOST_PARTS:
                raise NotSure("a value comes from too many places")
            if isinstance(part, ast.Name) and part.id in self.assigned:
                waiting += self.assigned[part.id] if part.id not in names else []
                names.add(part.id)
            elif isinstance(part, ast.IfExp):
                waiting += [part.body, part.orelse]
            elif isinstance(part, ast.BoolOp) and isinstance(part.op, ast.Or):
                waiting += part.values
            else:
                found.append(part)
        return found

    def option_of(self, value: ast.expr) -> Option | None:
        """The option that an expression like `args.output_dir` is; None where it is none, or is changed."""
        if not isinstance(value, ast.Attribute) or not isinstance(value.value, ast.Name):
            return None
        source = self.assigned.get(value.value.id, [])
        parsed = len(source) == 1 and isinstance(source[0], ast.Call)
        if not parsed or self.name_of(source[0].func) != "parse_args" or source[0].args:  # type: ignore[attr-defined]
            return None
        return None if value.attr in self.set_attributes else self.options.get(value.attr)

    def text(self, value: ast.expr, call: Call) -> str:
        """The text that an expression has in this call: a literal, an option, a path of them.

        Raises NotSure where it is anything else.
        """
        return self._text(value, call, [_MOST_PARTS, False])

    def pattern(self, value: ast.expr, call: Call) -> str:
        """The same, with a `*` for each part of an f-string that is not plain."""
        return self._text(value, call, [_MOST_PARTS, True])

    def truth(self, value: ast.expr | None, call: Call) -> bool:
        """Whether a literal or a flag means yes in this call (no value: no). Raises NotSure."""
        if value is not None and (option := self.option_of(value)) and option.flag:
            return any(name in call.args for name in option.names) or call.says(*option.names)
        return constant(value) is True

    def _text(self, value: ast.expr, call: Call, left: list[int]) -> str:
        left[0] -= 1
        if left[0] < 0:
            raise NotSure("a value comes from too many places")
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            return value.value
        if isinstance(value, ast.Name) and len(source := self.assigned.get(value.id, [])) == 1:
            return self._text(source[0], call, left)
        if (option := self.option_of(value)) and option.takes_text:
            found = call.value(*option.names)
            if found is None:
                found = option.default
            if found is not None:
                return found
        if isinstance(value, ast.Call) and not value.keywords and value.args:
            name = self.name_of(value.func)
            if name in ("join", "Path") or (name == "str" and len(value.args) == 1):
                return str(Path(*(self._text(part, call, left) for part in value.args)))
        if isinstance(value, ast.JoinedStr) and left[1]:
            parts = [part.value if isinstance(part, ast.Constant) else "*" for part in value.values]
            return "".join(map(str, parts))
        if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Div):
            return str(Path(self._text(value.left, call, left), self._text(value.right, call, left)))
        raise NotSure(f"{shown(value)} is not plain")


def shown(value: ast.expr) -> str:
    """The beginning of an expression as it is written."""
    try:
        return ast.unparse(value)[:60]
    except RecursionError:
        return "an expression"


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    """What a call is given under this name, or may be where that hangs on a condition; None if nothing.

    Raises NotSure for a `**` of anything but tables that are written there.
    """
    for one in call.keywords:
        if one.arg == name:
            return one.value
        if one.arg is None:
            tables = [one.value.body, one.value.orelse] if isinstance(one.value, ast.IfExp) else [one.value]
            for table in tables:
                if not isinstance(table, ast.Dict) or not all(
                    isinstance(k, ast.Constant) for k in table.keys
                ):
                    raise NotSure("a call takes its arguments from a table")
                for key, value in zip(table.keys, table.values, strict=True):
                    if isinstance(key, ast.Constant) and key.value == name:
                        return value
    return None


def constant(value: ast.expr | None) -> object:
    """The value of a literal, None of nothing at all; raises NotSure for anything else."""
    if value is None:
        return None
    if not isinstance(value, ast.Constant):
        raise NotSure(f"{shown(value)} is not plain")
    return value.value


def read(path: Path) -> Script:
    """A script, read once as long as it does not change. Raises NotSure if it cannot be read, OSError where
    its file system does not say: what it saves would not be seen."""
    try:
        about = patiently(path.stat)
        return _read(path, about.st_ino, about.st_mtime_ns, about.st_size)
    except (OSError, ValueError) as error:
        if passes(error):
            raise
        raise NotSure(f"{path.name} cannot be read") from error


@lru_cache(maxsize=64)
def _read(path: Path, inode: int, mtime_ns: int, size: int) -> Script:
    try:
        data = patiently(partial(read_file, path, most_bytes=MOST_BYTES))
        with warnings.catch_warnings():  # of the script, as in "\\d", which are nobody's business here
            warnings.simplefilter("ignore")
            tree = ast.parse(data)
        script = Script(path.name)
        _Reader(script).visit(tree)
    except (OSError, BadInput, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        if passes(error):
            raise
        raise NotSure(f"{path.name} cannot be read as Python") from error
    return script


_UNKNOWN = ast.Constant(...)


class _Reader(ast.NodeVisitor):
    def __init__(self, script: Script) -> None:
        self._script = script

    def visit_Import(self, node: ast.Import) -> None:
        for name in node.names:
            local = name.asname or name.name.partition(".")[0]
            self._script.imported[local] = name.name if name.asname else local

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        package = "." * node.level + (node.module or "")
        for name in node.names:
            self._script.imported[name.asname or name.name] = f"{package}.{name.name}"

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._script.bases[node.name] = [self._script.name_of(base) for base in node.bases]
        functions = (ast.FunctionDef, ast.AsyncFunctionDef)
        parts = [child for part in node.body if not isinstance(part, functions) for child in ast.walk(part)]
        read = {one.id for one in parts if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)}
        for part in node.body:
            match part:
                case ast.Assign(targets=[ast.Name(id=name)], value=value) if name not in read:
                    self.visit(value)  # an attribute: no name of a function's or of the module's
                case _:
                    self.visit(part)
        for other in (*node.decorator_list, *node.bases, *node.keywords):
            self.visit(other)

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            self._bind(target, node.value)
        self.visit(node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._bind(node.target, node.value)
            self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._bind(node.target, _UNKNOWN)
        self.visit(node.value)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self._bind(node.target, node.value)
        self.visit(node.value)

    def visit_For(self, node: ast.For) -> None:
        self._bind(node.target, _UNKNOWN)
        self.generic_visit(node)

    def visit_withitem(self, node: ast.withitem) -> None:
        if node.optional_vars is not None:
            self._bind(node.optional_vars, _UNKNOWN)
        self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> None:
        self._bind(ast.Name(node.arg), _UNKNOWN)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and len(node.value) <= 80:
            self._script.texts.add(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        self._script.calls.append(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            self._option(node)
        self.generic_visit(node)

    def _bind(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name):
            self._script.assigned.setdefault(target.id, []).append(value)
        elif isinstance(target, ast.Attribute):
            self._script.set_attributes.add(target.attr)
        elif isinstance(target, (ast.Tuple, ast.List)):
            for part in target.elts:
                self._bind(part, _UNKNOWN)
        elif isinstance(target, ast.Starred):
            self._bind(target.value, _UNKNOWN)

    def _option(self, node: ast.Call) -> None:
        names = tuple(
            arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)
        )
        given = {one.arg: one.value for one in node.keywords}
        if not names or len(names) < len(node.args) or None in given:
            return
        longest = next((name for name in names if name.startswith("--")), names[0])
        attribute = longest.lstrip("-").replace("-", "_")
        if isinstance(dest := given.get("dest"), ast.Constant):
            attribute = str(dest.value)
        default = given.get("default")
        if isinstance(default, ast.Call) and self._script.name_of(default.func) == "Path" and default.args:
            default = default.args[0]
        text = default.value if isinstance(default, ast.Constant) else None
        kind = given.get("type")
        plain = kind is None or (isinstance(kind, ast.Name) and kind.id in ("str", "Path"))
        option = Option(
            names=names,
            default=str(text) if isinstance(text, (str, int)) and not isinstance(text, bool) else None,
            takes_text=names[0].startswith("-") and plain and not given.keys() & {"action", "nargs"},
        )
        if isinstance(action := given.get("action"), ast.Constant) and action.value == "store_true":
            option = replace(option, flag="default" not in given)
        if attribute in self._script.options:  # of two parsers, or of two commands: nobody knows which
            option = replace(option, default=None, takes_text=False, flag=False)
        self._script.options[attribute] = option
