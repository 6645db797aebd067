"""Invert tests: the same test files, but what right code passes must now fail.

A report that says `passed` of an inverted test was not made by running it. An inversion looks like any test: where a
test asserts at its top level, one of those assertions is turned round, or gets another expected value or exception;
elsewhere the test fails before its first statement. Only the text that must change does.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from string import ascii_lowercase
from typing import Any

Function = ast.FunctionDef | ast.AsyncFunctionDef

_OPERATORS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Lt: ("<", ">="),
    ast.GtE: (">=", "<"),
    ast.Gt: (">", "<="),
    ast.LtE: ("<=", ">"),
    ast.In: (r"\bin\b", "not in"),
    ast.NotIn: (r"\bnot\s+in\b", "in"),
    ast.Is: (r"\bis\b", "is not"),
    ast.IsNot: (r"\bis\s+not\b", "is"),
}
_METHODS = (
    ("assertEqual", "assertNotEqual"),
    ("assertTrue", "assertFalse"),
    ("assertIn", "assertNotIn"),
    ("assertIs", "assertIsNot"),
    ("assertIsNone", "assertIsNotNone"),
    ("assertIsInstance", "assertNotIsInstance"),
    ("assertLess", "assertGreaterEqual"),
    ("assertGreater", "assertLessEqual"),
)
_EXPECTED_TO_FAIL = re.compile(rb"xfail|expectedFailure|known_?failure", re.IGNORECASE)
"""Decorators by which a failure is no failure, and for some runners a pass: an inversion would accuse right code."""
_OTHER_METHOD = {**dict(_METHODS), **{b: a for a, b in _METHODS}}


_RAISES = {"raises", "assertRaises", "assertRaisesRegex"}
_ERRORS = ("ZeroDivisionError", "RecursionError", "BufferError")


@dataclass(frozen=True)
class Edit:
    """Bytes `start:end` of the source become `text`."""

    start: int
    end: int
    text: bytes


def inverted(
    files: Mapping[str, bytes], names: frozenset[str] | None, *, seed: str, exact: bool
) -> tuple[dict[str, bytes], dict[str, set[str]]]:
    """Those of `files` that change, inverted, and the names of the functions that were, each with its files.

    `names` are the functions meant; None means all that are called like tests. A file that holds one of a name that
    cannot be inverted is left out of that name's. `exact` is a plain negation. Without it there are also other expected
    values and opposite operators: they look like any test and show objects that equal everything, but go wrong where a
    library is about such objects.
    """
    found: dict[str, bytes] = {}
    done: dict[str, set[str]] = {}
    for path, source in files.items():
        edits: list[Edit] = []
        left: set[str] = set()
        for function, text in _functions_of(path, source):
            if function.name in names if names is not None else _is_test(function.name):
                if edit := _edit(function, text, random.Random(f"{seed} {path} {function.lineno}"), exact):
                    edits.append(edit)
                    done.setdefault(function.name, set()).add(path)
                else:
                    left.add(function.name)
        for name in left & done.keys():
            done[name].discard(path)
        if edits:
            found[path] = applied(source, edits)
    return found, {name: paths for name, paths in done.items() if paths}


def applied(source: bytes, edits: Iterable[Edit]) -> bytes:
    """`source` with edits that do not overlap."""
    for edit in sorted(edits, key=lambda edit: edit.start, reverse=True):
        source = source[: edit.start] + edit.text + source[edit.end :]
    return source


def _edit(function: Function, text: _Text, chance: random.Random, exact: bool) -> Edit | None:
    inside = list(_own_nodes(function))
    decorators = b" ".join(text.of(decorator) for decorator in function.decorator_list)
    if any(isinstance(node, ast.Yield | ast.YieldFrom) for node in inside) or _EXPECTED_TO_FAIL.search(decorators):
        return None
    reached = not any(isinstance(node, ast.Return) for node in inside)
    if reached and b"given" not in decorators:  # those would shrink
        statements = [s for s in function.body if isinstance(s, ast.Assert | ast.Expr | ast.With)]
        chance.shuffle(statements)
        for statement in statements:
            if edit := _turned(statement, text, chance, exact):
                return edit
    return _fails_at_once(function, text)


def _turned(statement: ast.stmt, text: _Text, chance: random.Random, exact: bool) -> Edit | None:
    match statement:
        case ast.Assert(test=ast.Compare(left=left, ops=[operator], comparators=[right])) if not exact:
            if isinstance(operator, ast.Eq) and (edit := _other_value((right, left), text, chance)):
                return edit
            pattern, other = _OPERATORS[type(operator)]
            return text.replaced(text.end(left), text.start(right), pattern, other)
        case ast.Assert(test=ast.UnaryOp(op=ast.Not()) as test):
            return Edit(text.start(test), text.start(test) + len("not"), b"")
        case ast.Assert(test=test):
            return Edit(text.start(test), text.end(test), b"not (" + text.of(test) + b")")
        case ast.With(items=[ast.withitem(context_expr=ast.Call(func=function, args=[expected, *_]))]):
            return _other_error(function, expected, text, chance)
        case ast.Expr(value=ast.Call(func=function, args=[expected, *_])) if _name(function) in _RAISES:
            return _other_error(function, expected, text, chance)
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr=method) as called, args=args)):
            if method not in _OTHER_METHOD or any(isinstance(argument, ast.Starred) for argument in args):
                return None
            if not exact and method == "assertEqual" and (edit := _other_value(args[1::-1], text, chance)):
                return edit
            return text.replaced(text.end(called.value), text.end(called), rf"\b{method}\b", _OTHER_METHOD[method])
    return None


def _other_error(function: ast.expr, expected: ast.expr, text: _Text, chance: random.Random) -> Edit | None:
    """Another exception in the place of the expected one."""
    others = [name for name in _ERRORS if name.encode() not in text.of(expected)]
    if _name(function) not in _RAISES or isinstance(expected, ast.Starred):
        return None
    return Edit(text.start(expected), text.end(expected), chance.choice(others).encode())


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


class _Text:
    """The places of nodes in a source, as offsets in its bytes."""

    def __init__(self, source: bytes) -> None:
        self.source = source
        self._lines = [0]
        for line in source.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))

    def at(self, line: int, column: int) -> int:
        return self._lines[line - 1] + column

    def start(self, node: ast.expr | ast.stmt) -> int:
        return self.at(node.lineno, node.col_offset)

    def end(self, node: ast.expr | ast.stmt) -> int:
        return self.at(node.end_lineno or node.lineno, node.end_col_offset or 0)

    def of(self, node: ast.expr) -> bytes:
        return self.source[self.start(node) : self.end(node)]

    def replaced(self, start: int, end: int, pattern: str, other: str) -> Edit | None:
        found = re.search(pattern.encode(), self.source[start:end])
        return Edit(start + found.start(), start + found.end(), other.encode()) if found else None


def _functions_of(path: str, source: bytes) -> Iterator[tuple[Function, _Text]]:
    """The functions of a Python file and the methods of its classes; none of a file that cannot be read."""
    if not path.endswith(".py"):
        return
    try:
        source.decode("utf-8")  # the places of nodes are counted in UTF-8
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    text = _Text(source)
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, Function):
            yield node, text
        else:
            stack += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt | ast.ExceptHandler)]


def _own_nodes(function: Function) -> Iterator[ast.AST]:
    """All nodes of a function, without those of functions and classes inside it."""
    stack: list[ast.AST] = list(function.body)
    while stack:
        node = stack.pop()
        yield node
        if not isinstance(node, Function | ast.ClassDef | ast.Lambda):
            stack += ast.iter_child_nodes(node)


def _is_test(name: str) -> bool:
    return name.startswith("test") or name.endswith("_test")


def _other_value(expected: Iterable[ast.expr], text: _Text, chance: random.Random) -> Edit | None:
    """Another literal in the place of one that the first expression made of literals holds."""
    for node in expected:
        inside = list(ast.walk(node))
        if all(isinstance(inner, ast.Constant | ast.List | ast.Tuple | ast.Load) for inner in inside):
            values = [inner for inner in inside if isinstance(inner, ast.Constant) and type(inner.value) in _OTHER]
            if values:
                old = chance.choice(values)
                new = _OTHER[type(old.value)](old.value, chance)
                return Edit(text.start(old), text.end(old), repr(new).encode())
    return None


_OTHER: dict[type, Callable[[Any, random.Random], object]] = {
    int: lambda value, chance: value + chance.randint(1, 9),
    float: lambda value, chance: value + chance.randint(1, 9),
    str: lambda value, chance: value + chance.choice(ascii_lowercase),
    bytes: lambda value, chance: value + chance.choice(ascii_lowercase).encode(),
}


def _fails_at_once(function: Function, text: _Text) -> Edit:
    """A false assertion before the first statement, on its line where that shares the line of the `def`."""
    first = function.body[0]
    decorators = getattr(first, "decorator_list", [])
    start = text.at(min([first.lineno, *(decorator.lineno for decorator in decorators)]), first.col_offset)
    line = text.source[:start].rpartition(b"\n")[2]
    between = b"; " if line.strip() else b"\n" + line
    return Edit(start, start, b"assert 0 == 1" + between)
