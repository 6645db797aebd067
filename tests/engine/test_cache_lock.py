"""The cache directory follows the user's settings, and its lock lets one in at a time and dies with its holder."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from sandlot.cache import cache_dir, locked


def test_the_cache_follows_xdg_and_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "sandlot"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for none in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", none)
        assert cache_dir() == tmp_path / "home" / ".cache" / "sandlot"


def test_one_thread_at_a_time_is_inside(tmp_path: Path) -> None:
    inside, most = 0, 0

    def enter() -> None:
        nonlocal inside, most
        for _ in range(20):
            with locked(tmp_path / "deep" / "lock"):
                inside += 1
                most = max(most, inside)
                inside -= 1

    threads = [threading.Thread(target=enter) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert (inside, most) == (0, 1)


def test_a_killed_holder_frees_the_lock(tmp_path: Path) -> None:
    code = """if True:
        import sys
        from pathlib import Path
        from sandlot.cache import locked
        with locked(Path(sys.argv[1])):
            print("held", flush=True)
            sys.stdin.read()
    """
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    entered = threading.Event()

    def enter() -> None:
        with locked(tmp_path / "lock"):
            entered.set()

    thread = threading.Thread(target=enter)
    thread.start()
    assert not entered.wait(0.1)
    holder.kill()
    holder.communicate()
    assert entered.wait(5)
    thread.join()
