"""The cache directory follows the user's settings, its lock dies with its holder, and what is kept there is bounded."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sandlot.cache import Kept, Shelf, cache_dir, locked


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


def filled(size: int) -> Callable[[Path], object]:
    return lambda place: (place / "data").write_bytes(os.urandom(size))


def never(place: Path) -> None:
    raise AssertionError(f"{place} is made twice")


def test_a_directory_is_made_once_for_everybody(tmp_path: Path) -> None:
    begun = threading.Event()
    makers: list[Path] = []

    def make(place: Path) -> None:
        makers.append(place)
        begun.wait(5)
        (place / "data").touch()

    shelves = [Shelf(tmp_path, max_bytes=1 << 20) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        found = [pool.submit(shelf.get, "a", make) for shelf in shelves]
        begun.set()
        assert {kept.result().path for kept in found} == {tmp_path / "a"}
    assert len(makers) == 1
    assert not list(tmp_path.glob("building-*"))


def test_who_comes_at_the_same_moment_does_not_wait_for_the_end_of_a_use(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, max_bytes=1 << 20)
    makers: list[Path] = []
    rounds, kept = 50, []

    def get(name: str, together: threading.Barrier) -> Kept:
        together.wait(30)
        return shelf.get(name, makers.append)

    with ThreadPoolExecutor(8) as pool:
        for number in range(rounds):
            together = threading.Barrier(8)
            asked = [pool.submit(get, str(number), together) for _ in range(8)]
            kept += [one.result(30) for one in asked]  # all are held to the end
    assert len(makers) == rounds
    assert len(kept) == 8 * rounds


def test_the_longest_unused_goes_first_and_what_is_used_stays(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, max_bytes=450_000)
    used = shelf.get("used", filled(100_000))
    shelf.get("old", filled(100_000))
    shelf.get("new", filled(100_000))
    os.utime(tmp_path / "used.use", (1, 1))
    os.utime(tmp_path / "old.use", (2, 2))
    os.utime(tmp_path / "new.use", (3, 3))
    shelf.get("old", never)  # and so is not old any more
    shelf.get("more", filled(200_000))
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["more", "old", "used"]
    used.release()
    shelf.get("most", filled(400_000))
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["most"]
    assert (shelf.get("used", filled(10)).path / "data").stat().st_size == 10, "what was removed is made anew"


def test_what_another_process_uses_stays_until_it_dies(tmp_path: Path) -> None:
    code = """if True:
        import sys
        from pathlib import Path
        from sandlot.cache import Shelf
        kept = Shelf(Path(sys.argv[1]), max_bytes=1).get("theirs", lambda place: (place / "x").write_bytes(bytes(9999)))
        print("held", flush=True)
        sys.stdin.read()
    """
    holder = subprocess.Popen([sys.executable, "-c", code, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    Shelf(tmp_path, max_bytes=1).get("ours", filled(9999))
    assert (tmp_path / "theirs").is_dir()
    holder.kill()
    holder.communicate()
    Shelf(tmp_path, max_bytes=1).get("more", filled(9999))
    assert not (tmp_path / "theirs").exists()


def test_a_maker_that_fails_leaves_nothing(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, max_bytes=1 << 20)
    with pytest.raises(AssertionError, match="made twice"):
        shelf.get("a", never)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
    assert (shelf.get("a", filled(1)).path / "data").is_file()


def test_a_use_lasts_as_long_as_its_object(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, max_bytes=1)
    kept = shelf.get("a", filled(9999))
    shelf.get("b", filled(9999))
    assert kept.path.is_dir()
    del kept
    gc.collect()
    shelf.get("c", filled(9999))
    assert not (tmp_path / "a").exists()


def test_nobody_waits_for_the_removal_of_what_made_room(tmp_path: Path) -> None:
    """And a removal that fails leaves no lock behind."""
    begun, end = threading.Event(), threading.Event()

    def remove(tree: str) -> None:
        begun.set()
        assert end.wait(30)
        raise OSError(f"{tree} cannot be removed")

    Shelf(tmp_path, max_bytes=1).get("old", filled(9999))
    with ThreadPoolExecutor(1) as pool:
        failing = pool.submit(Shelf(tmp_path, max_bytes=1, remove=remove).get, "new", filled(9999))
        assert begun.wait(30)
        assert Shelf(tmp_path, max_bytes=1).get("other", filled(9999)).path.is_dir()
        end.set()
        with pytest.raises(OSError, match="cannot be removed"):
            failing.result(30)
    assert Shelf(tmp_path, max_bytes=1).get("old", filled(1)).path.is_dir()
