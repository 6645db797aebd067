"""The built-in cheats are made for any task: without a sandbox."""

from __future__ import annotations

import ast

import pytest

from sandlot.grading.cheats import CHEATS, View, is_test_path, with_code

VIEW = View(
    ("tests/test_a.py::test_one[x 1]", "tests/test_a.py::TestB::test_two", "odd name"),
    {"tests/test_a.py": b"x", "conftest.py": b"y"},
    {"m.py": b'"""Doc."""\nfrom __future__ import annotations\nx = 1\n', "n.py": b"def broken(:\n"},
)


@pytest.mark.parametrize("name", CHEATS)
def test_cheats_are_python_that_compiles(name: str) -> None:
    files = CHEATS[name](VIEW)
    assert files
    for path, content in files.items():
        if content is not None and path.endswith(".py") and path != "n.py":
            compile(content, path, "exec")
    if name == "weakened_tests":
        assert [n.name for n in ast.walk(ast.parse(files["tests/test_a.py"] or b"")) if hasattr(n, "name")][:3] == [
            "test_one",
            "TestB",
            "test_nothing",
        ]


def test_code_goes_behind_docstring_and_future_imports() -> None:
    assert with_code(VIEW.modules["m.py"], "y = 2").splitlines()[2:] == [b"y = 2", b"x = 1"]
    assert with_code(b"import os", "y = 2") == b"y = 2\nimport os"
    assert with_code(b'"""Doc."""', "y = 2") == b'"""Doc."""\ny = 2\n'


@pytest.mark.parametrize(
    ("path", "is_test"),
    [
        ("tests/helpers.py", True),
        ("pkg/test_x.py", True),
        ("pkg/x_test.go", True),
        ("src/a.spec.ts", True),
        ("pkg/testing.py", False),
        ("contest/a.py", False),
        ("conftest.py", True),
    ],
)
def test_what_looks_like_a_test(path: str, is_test: bool) -> None:
    assert is_test_path(path) is is_test
