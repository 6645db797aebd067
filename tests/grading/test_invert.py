"""Inverted tests: what passes must fail, whatever the test is written like, and nothing else may change."""

from __future__ import annotations

import ast
import asyncio
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandlot.grading.invert import inverted
from support.profiles import few

pytestmark = pytest.mark.filterwarnings("ignore::SyntaxWarning")


def run(source: bytes, name: str) -> str:
    """What becomes of the test `name` in a source: passed, or the name of the exception."""
    space: dict[str, Any] = {"__name__": "test_it"}
    exec(compile(source, "test_it.py", "exec"), space)
    case = space.get("T")
    test = getattr(case(name), name) if isinstance(case, type) and hasattr(case, name) else space[name]
    try:
        done = test()
        if asyncio.iscoroutine(done):
            asyncio.run(done)
    except Exception as error:
        return type(error).__name__
    return "passed"


BODIES = [
    "assert 1 + 1 == 2",
    "assert (\n        1 + 1\n        == 2\n    )",
    "assert 2 == 1 + 1, 'two'",
    "assert [1, 'a'] == [1] + ['a']",
    "assert 'é' + 'x' == 'éx'  # höher",
    "x = 'ä'; assert x == 'ä'",
    "assert 1.5 != 2",
    "assert 1 < 2",
    "assert 2 >= 2",
    "assert 'a' in 'abc'",
    "assert 'z' not  in 'abc'",
    "assert None is None",
    "assert 1 is not None",
    "assert not False",
    "assert not(0)",
    "assert 1 < 2 < 3",
    "assert (1 and 2)",
    "assert all(x for x in (1, 2))",
    "assert len('abc')",
    "assert {'a': 1} == {'a': 1}",
    "assert b'a' == b'a'",
    "assert (lambda: 3)() == 3",
    "'''Says what.'''\n    assert 1 == 1",
    "for x in (1, 2):\n        assert x",
    "with open('/dev/null') as file:\n        assert file.read() == ''",
    "if True:\n        return\n    assert False",
    "try:\n        int('x')\n    except ValueError:\n        pass",
    "import pytest\n    with pytest.raises(ValueError):\n        int('x')",
    "import pytest\n    with pytest.raises((ValueError, ZeroDivisionError), match='x') as e:\n        int('x')",
    "from pytest import raises\n    raises(ValueError, int, 'x')",
    "with open('/dev/null'):\n        pass",
    "pass",
    "def inner():\n        return 1\n    assert inner() == 1",
    "class A:\n        def test_x(self): return 1\n    assert A().test_x() == 1",
]


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_test_that_passes_fails_when_inverted(body: str, kind: str, exact: bool) -> None:
    source = f"import os\n\n\n{kind} test_a():\n    {body}\n\n\ndef helper():\n    assert 1 == 1\n".encode()
    assert run(source, "test_a") == "passed"
    for seed in "abc":
        files, names = inverted({"t.py": source}, None, seed=seed, exact=exact)
        assert names == {"test_a": {"t.py"}}
        assert run(files["t.py"], "test_a") != "passed", files["t.py"].decode()
        assert files["t.py"].endswith(b"def helper():\n    assert 1 == 1\n")


@pytest.mark.parametrize(
    "call",
    ["assertEqual(1 + 1, 2)", "assertEqual(first=2, second=2)", "assertTrue(1)", "assertFalse(0)", "assertIn(1, [1])",
     "assertIs(None, None)", "assertIsNotNone(1)", "assertLess(1, 2)", "assertGreaterEqual(2, 2)", "assertIsNone(None)",
     "assertNotEqual(1, 2)", "assertIsInstance(1, int)", "assertAlmostEqual(1, 1.0)", "assertEqual(*(2, 2))",
     "assertRaises(ValueError, int, 'x')", "assertRaisesRegex(ValueError, 'x', int, 'x')"],
)  # fmt: skip
def test_unittest_methods(call: str) -> None:
    source = f"import unittest\nclass T(unittest.TestCase):\n\tdef test_a(self):\n\t\tself.{call}\n".encode()
    assert run(source, "test_a") == "passed"
    files, names = inverted({"t.py": source}, frozenset({"test_a"}), seed="s", exact=False)
    assert names == {"test_a": {"t.py"}}
    assert run(files["t.py"], "test_a") in ("AssertionError", "ValueError"), files["t.py"].decode()


def test_exactly_means_negated_and_no_more() -> None:
    source = b"def test_a():\n    assert x == 5\n"
    (changed,) = inverted({"t.py": source}, None, seed="s", exact=False)[0].values()
    (negated,) = inverted({"t.py": source}, None, seed="s", exact=True)[0].values()
    assert negated == b"def test_a():\n    assert not (x == 5)\n"
    assert changed.startswith(b"def test_a():\n    assert x == ")
    assert changed != source


@pytest.mark.parametrize(
    ("path", "source", "names"),
    [
        ("t.js", b"test('a', () => {})", None),
        ("t.py", b"def test_a(:\n", None),
        ("t.py", b"# coding: latin-1\ndef test_a():\n    assert '\xe9'\n", None),
        ("t.py", b"def check():\n    assert 1\n", None),
        ("t.py", b"def test_a():\n    assert 1\n", frozenset({"test_b"})),
        ("t.py", b"def test_a():\n    yield 1\n", None),
        ("t.py", b"@pytest.mark.xfail(strict=True)\ndef test_a():\n    assert f()\n", None),
        (
            "t.py",
            b"class T(TestCase):\n @expectedFailure\n def test_a(self):\n  assert f()\n",
            None,
        ),
        ("t.py", b"\x00", None),
    ],
)
def test_what_cannot_be_inverted_stays(path: str, source: bytes, names: frozenset[str] | None) -> None:
    assert inverted({path: source}, names, seed="s", exact=False) == ({}, {})


def test_a_name_that_cannot_be_inverted_everywhere_says_nothing_there() -> None:
    good, bad = b"def test_a():\n    assert 1\n", b"def test_a():\n    yield 1\n"
    changed, names = inverted({"a.py": good, "b.py": bad, "c.py": good + bad}, None, seed="s", exact=False)
    assert (list(changed), names) == (["a.py", "c.py"], {"test_a": {"a.py"}})


def test_generated_examples_are_not_searched_for_a_smaller_one() -> None:
    source = b"@given(x)\ndef test_a(x):\n    assert f(x) == 1\n"
    assert b"assert 0 == 1\n    assert f(x) == 1" in inverted({"t.py": source}, None, seed="s", exact=False)[0]["t.py"]


@few
@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode), st.text(max_size=5))
def test_any_file_is_taken(source: bytes, seed: str) -> None:
    inverted({"t.py": source}, None, seed=seed, exact=False)


@few
@given(st.lists(st.sampled_from(BODIES), min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_several_tests_of_a_file_are_inverted_each_for_itself(bodies: list[str], chance: random.Random) -> None:
    source = "".join(f"def test_{n}():\n    {body}\n" for n, body in enumerate(bodies)).encode()
    chosen = frozenset(f"test_{n}" for n in range(len(bodies)) if chance.random() < 0.5)
    files, names = inverted({"t.py": source}, chosen, seed=str(chance.random()), exact=False)
    assert names.keys() == chosen
    changed = files.get("t.py", source)
    ast.parse(changed)
    for n in range(len(bodies)):
        assert (run(changed, f"test_{n}") == "passed") is (f"test_{n}" not in chosen)
