"""Matching names, reading the channel, what is protected: without a sandbox."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandlot.errors import GradingError
from sandlot.grading.names import function_of, lies_in, match, required_tests
from sandlot.grading.protect import reverted, test_roots
from sandlot.grading.verdict import Verdict
from sandlot.grading.witness import CONTROL_TESTS, control_source, doubts, read_report, without_controls
from sandlot.sandbox import ExecResult
from sandlot.tasks import PytestGrading, SweProGrading
from sandlot.workspace.git import Change, Entry
from support.profiles import few

NONCE = "5" * 32
OUTCOMES = ("passed", "failed", "error", "skipped")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=10),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["event", "session", "id", "x"]), inner)
    ),
    max_leaves=6,
)


def test_absent_tests_have_not_passed() -> None:
    results, _ = match(["t.py::new", "t.py::old", "u.py::other"], {"t.py::new": "passed"})
    assert results == {"t.py::new": "passed", "t.py::old": "missing", "u.py::other": "missing"}
    assert match(["t.py::new"], {})[0] == {"t.py::new": "missing"}


def test_names_with_blanks_are_kept_whole() -> None:
    ran = {"t.py::p[a b-1]": "passed", "t.py::p[a b-2]": "failed", "t.py::q[x - y]": "passed"}
    results, repairs = match(ran, ran)
    assert results == ran
    assert repairs == []


def test_a_cut_name_needs_every_test_it_could_mean() -> None:
    ran = {"t.py::p[a b-1]": "passed", "t.py::p[a b-2]": "failed", "t.py::q[c d]": "passed", "t.py::q[e f]": "failed"}
    results, repairs = match(["t.py::p[a", "t.py::q[c", "t.py::r[z", "t.py::p"], ran)
    assert results == {"t.py::p[a": "failed", "t.py::q[c": "passed", "t.py::r[z": "missing", "t.py::p": "missing"}
    assert len(repairs) == 2


def test_trailing_blanks_do_not_count_and_the_worst_of_two_does() -> None:
    assert match(["a ", "b"], {"a": "passed", "b ": "passed", "b": "failed"})[0] == {"a ": "passed", "b": "failed"}


@pytest.mark.parametrize(
    ("name", "function", "lies"),
    [
        ("tests/a.py::T::test_x[a::b c.d]", "test_x", True),
        ("../tests/a.py::test_x", "test_x", True),
        ("a.py::test_x", "test_x", True),
        ("other/a.py::test_x", "test_x", False),
        ("tests/ba.py::test_x", "test_x", False),
        ("test_x (tests.a.T)", "test_x", True),
        ("test_x (a.T.test_x)", "test_x", True),
        ("test_x (tests.b.T)", "test_x", False),
        ("T.test_x", "test_x", True),
        ("test_x", "test_x", True),
    ],
)
def test_names_of_all_forms_tell_function_and_file(name: str, function: str, lies: bool) -> None:
    assert function_of(name) == function
    assert lies_in(name, "tests/a.py") is lies


@pytest.mark.parametrize("grading", [PytestGrading({}, ()), SweProGrading("", "", (), ())])
def test_a_task_that_requires_nothing_cannot_be_graded(grading: PytestGrading | SweProGrading) -> None:
    with pytest.raises(GradingError, match="names no test"):
        required_tests(grading)


def channel(*events: dict[str, object], nonce: str = NONCE) -> bytes:
    return b"".join(f"\n{nonce} {json.dumps(event)}\n".encode() for event in events)


def honest(control: str = "c.py", ran: int | None = None) -> list[dict[str, object]]:
    tests = [{"event": "test", "session": "s", "id": "t.py::a", "result": "passed", "text": ""}]
    for name, must_pass in CONTROL_TESTS.items():
        result = "passed" if must_pass else "failed"
        tests.append(
            {"event": "test", "session": "s", "id": f"{control}::test_a_control_{name}", "result": result, "text": ""}
        )
    ids = [test["id"] for test in tests][:ran]
    return [
        {"event": "hello", "python": "3", "pytest": "8"},
        {"event": "start", "session": "s"},
        {"event": "collected", "session": "s", "ids": ids},
        *tests,
        {"event": "finish", "session": "s", "status": 1},
        {"event": "end", "status": 1},
    ]


def judged(stdout: bytes, exit_code: int | None = 1) -> list[str]:
    return doubts(read_report(stdout, NONCE), ExecResult(exit_code, stdout, b""), ["c.py"])


def test_an_honest_run_is_believed() -> None:
    report = read_report(channel(*honest()), NONCE)
    assert judged(channel(*honest())) == []
    assert without_controls(report, ["c.py"]) == {"t.py::a": "passed"}


@pytest.mark.parametrize(
    ("stdout", "exit_code", "reason"),
    [
        (channel(*honest()), 0, "process with 0"),
        (channel(*honest()), None, "process with None"),
        (channel(*honest()[:-1]), 1, "ended before"),
        (channel(*honest()[:-2], honest()[-1]), 1, "did not finish"),
        (channel(*honest(ran=2)), 1, "which it did not collect"),
        (channel(*honest()[:4], *honest()[5:]), 1, "did not report c.py::test_a_control_fails"),
        (channel(*honest(), {"event": "stray", "text": "who?"}), 1, "something else wrote to the result channel: who?"),
        (channel(*honest(), {"event": "test", "session": "s"}), 1, "something else wrote"),
        (channel(*honest(), {"event": "finish", "session": "s", "status": "x"}), 1, "something else wrote"),
        (channel(*honest()) + b"PASSED t.py::a\n", 1, "something else wrote"),
        (channel(*honest()) + channel({"event": "end", "status": 1}, nonce="6" * 32), 1, "something else wrote"),
        (channel(*honest()) + f"{NONCE} junk\n".encode(), 1, "something else wrote"),
        (channel(*honest(control="d.py")), 1, "is missing"),
        (channel(*[{**e, "result": "passed"} if "result" in e else e for e in honest()]), 1, "reported as passed"),
        (b"", 0, "ended before"),
    ],
)
def test_what_an_honest_run_cannot_show_is_doubted(stdout: bytes, exit_code: int | None, reason: str) -> None:
    assert any(reason in doubt for doubt in judged(stdout, exit_code))


def test_control_tests_carry_the_names_of_required_ones() -> None:
    source = control_source(["check_add", "check_add", "TestX", "test_fails", "a b", "def"]).decode()
    names = [line[4:-3] for line in source.splitlines() if line.startswith("def ")]
    assert names == [*(f"check_add_control_{n}" for n in ("fails", "holds", "raises", "expects", "compares")),
                     "check_add", "TestX", "test_fails"]  # fmt: skip
    compile(source, "control", "exec")
    compile(control_source([]), "control", "exec")


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), 1.5, -0.5])
def test_a_reward_is_finite_and_between_0_and_1(reward: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        Verdict(reward)


def test_ungraded_needs_a_reason() -> None:
    with pytest.raises(ValueError, match="failure kind"):
        Verdict(None)


def taken_back(path: str, old: bytes | None = None, new: bytes | None = b"new") -> bool:
    entry = Entry("100644", "0" * 40)
    change = Change(path.encode(), None if old is None else entry, None if new is None else entry)
    hidden = ["tests/unit/test_a.py", "src/pkg/test_inner.py"]
    return bool(reverted([change], hidden=hidden, patterns=["data/*.json", "golden/"], contents=lambda _: (old, new)))


@pytest.mark.parametrize(
    "path",
    ["tests/unit/test_a.py", "tests/helpers.py", "tests/new/x.txt", "tests", "src/pkg/test_inner.py", "src/pkg", "src",
     "conftest.py", "src/conftest.py", "pytest.ini", "a/.pytest.ini", "sitecustomize.py", "x.pth", "p.egg-info/x",
     "q.dist-info/entry_points.txt", "pytest.py", "_pytest/x.py", "lib/pluggy/__init__.py", "data/a.json", "golden/x",
     "a/__pycache__/b.pyc", ".venv/bin/python3", ".venv/pyvenv.cfg"],
)  # fmt: skip
def test_what_a_patch_may_not_decide(path: str) -> None:
    assert taken_back(path)


@pytest.mark.parametrize(
    "path", ["src/pkg/core.py", "src/pkg/tests_util.py", "testing/x.py", "docs/conftest.md", "data/a.xml"]
)
def test_what_it_may(path: str) -> None:
    assert not taken_back(path)


@pytest.mark.parametrize(
    ("path", "old", "new", "back"),
    [
        ("pyproject.toml", b"[project]\nname='a'\n", b"[project]\nname='b'\n", False),
        ("pyproject.toml", b"[project]\nname='a'\n", b"[tool.pytest.ini_options]\naddopts='--co'\n", True),
        ("pyproject.toml", b"[tool.pytest.ini_options]\na='1'\n", b"[tool.pytest.ini_options]\na='1'\n[x]\n", False),
        ("pyproject.toml", b"[tool.pytest.ini_options]\na='1'\n", None, True),
        ("pyproject.toml", b"[x]\n", b"[x\n", True),
        ("pyproject.toml", None, b"[project]\n", False),
        ("setup.cfg", b"[metadata]\nname = a\n", b"[metadata]\nname = b\n", False),
        ("setup.cfg", b"[metadata]\n", b"[tool:pytest]\naddopts = --co\n", True),
        ("sub/tox.ini", None, b"[pytest]\naddopts = --co\n", True),
        ("tox.ini", None, b"[tox]\nenvlist = py\n", False),
        ("tox.ini", b"[tox]\n", b"\xff[pytest", True),
        ("pyproject.toml", b"[x]\n", b"a = " + b"[" * 100_000, True),
        ("pyproject.toml", b"[x]\n", b"a = " + b"1" * 5000, True),
    ],
)
def test_configuration_files_are_taken_back_for_their_pytest_section(
    path: str, old: bytes | None, new: bytes | None, back: bool
) -> None:
    assert taken_back(path, old, new) is back


def test_test_roots_are_the_topmost_test_directories() -> None:
    assert test_roots(["a/tests/b/tests/t.py", "test/t.py", "src/t.py", "t.py"]) == {"a/tests", "test"}


def test_numbers_that_are_none_are_junk() -> None:
    for kind in ("finish", "end"):
        told = read_report(channel(*honest()) + f'{NONCE} {{"event": "{kind}", "status": 1e999}}\n'.encode(), NONCE)
        assert "1e999" in told.stray


@few
@given(st.lists(st.one_of(st.binary(max_size=60), JSON.map(lambda value: f"{NONCE} {json.dumps(value)}".encode()))))
def test_any_channel_is_read_without_error_and_junk_is_never_believed(lines: list[bytes]) -> None:
    junk = b"\n".join(lines)
    assert judged(junk), "a run that told nothing whole"
    told = read_report(junk + b"\n" + channel(*honest()), NONCE)
    if any(line.strip(b"\n") for line in lines):
        assert told.stray
    assert told.tests["t.py::a"] == "passed"


@few
@given(st.lists(st.text(max_size=40), max_size=8), st.dictionaries(st.text(max_size=40), st.sampled_from(OUTCOMES)))
def test_what_did_not_run_has_never_passed(required: list[str], ran: dict[str, str]) -> None:
    results, _ = match(required, ran)
    assert results.keys() == set(required)
    for name, outcome in results.items():
        if outcome == "passed":
            assert {r for other, r in ran.items() if other.rstrip() == name.rstrip() or other.startswith(name.rstrip())}
