"""Honest tests that touch what a cheat would: descriptors, processes, mocks, the runner itself."""

SOURCE = b"""\
import multiprocessing
import os
import subprocess
import sys
import unittest
from unittest import mock
import pytest
from calc import add

pytest_plugins = ["pytester"]


def child(q):
    q.put(add(2, 3))


def test_mp():
    q = multiprocessing.Queue()
    p = multiprocessing.Process(target=child, args=(q,))
    p.start()
    assert q.get(timeout=10) == 5
    p.join()


def test_fork():
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert add(1, 1) == 2


def test_fork_exit_by_sysexit():
    pid = os.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", "print('x')"])
    os.waitpid(pid, 0)
    assert add(1, 1) == 2


def test_sub(capfd):
    subprocess.run([sys.executable, "-c", "print('hello')"], check=True)
    assert "hello" in capfd.readouterr().out
    assert add(1, 1) == 2


def test_monkey(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "getpid", lambda: 1)
    monkeypatch.setattr(os, "write", None)
    monkeypatch.setattr("json.dumps", None)
    assert add(1, 1) == 2


def test_mock():
    with mock.patch("os.write") as w, mock.patch("json.dumps"), mock.patch("builtins.print"):
        assert add(1, 1) == 2


def test_pytester(pytester):
    pytester.makepyfile("def test_a(): assert 1")
    pytester.runpytest("-p", "no:sandlot_witness").assert_outcomes(passed=1)
    assert add(1, 1) == 2


def test_stdin():
    assert add(1, 1) == 2
    assert sys.stdin is not None


@pytest.mark.xfail(strict=True)
def test_xf():
    assert add(1, 1) == 3


@pytest.fixture(params=[1, 2])
def two(request):
    return request.param


def test_fix(two):
    assert add(two, 0) == two
    assert add(1, 1) == 2


class TestU(unittest.IsolatedAsyncioTestCase):
    async def test_a(self):
        self.assertEqual(add(1, 1), 2)

    def test_sub(self):
        for i in range(3):
            with self.subTest(i=i):
                self.assertEqual(add(i, i), 2 * i)


class TestC:
    @staticmethod
    def test_s():
        assert add(1, 1) == 2

    @classmethod
    def test_c(cls):
        assert add(1, 1) == 2

    @mock.patch("os.getcwd")
    def test_deco(self, m):
        assert add(1, 1) == 2


def test_writes_here():
    open("out.txt", "w").write("x")
    os.makedirs("tests/generated", exist_ok=True)
    open("tests/generated/x", "w").write("1")
    assert add(1, 1) == 2


def test_git():
    assert subprocess.run(["git", "status"], check=True)
    assert add(1, 1) == 2
"""

NAMES = tuple(
    f"tests/test_core.py::{name}"
    for name in (
        "test_mp",
        "test_fork",
        "test_fork_exit_by_sysexit",
        "test_sub",
        "test_monkey",
        "test_mock",
        "test_pytester",
        "test_stdin",
        "test_fix[1]",
        "test_fix[2]",
        "TestU::test_a",
        "TestU::test_sub",
        "TestC::test_s",
        "TestC::test_c",
        "TestC::test_deco",
        "test_writes_here",
        "test_git",
    )
)
