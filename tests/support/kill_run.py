"""Runs a workload on run directories and kills it with SIGKILL before, after and in the middle of its n-th system call.

Started by the kill tests: `python kill_run.py DIRECTORY`; prints how many places there were to kill at. For each place
a fork of this process is killed there, then a second one runs the same workload to its end. With `full` as a second
argument, files cannot grow beyond a size instead, for one size after the other, as on a full disk.
"""

from __future__ import annotations

import errno
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sandlot.trajectory.records import SealedRecord, SessionRecord
from sandlot.trajectory.rundir import EpisodeState, RunDir
from support.sessions import SessionBuilder

CALLS = ("write", "fsync", "rename", "ftruncate", "mkdir", "unlink")


def session(k: int) -> SessionBuilder:
    s = SessionBuilder()
    t0 = s.root((1, 2, k), (3, k))
    t1 = s.follow(t0, (4,), (5,))
    s.fork(t1, 3, (6,), (7,))
    return s


def workload(path: Path) -> None:
    """Two episodes; the same command goes on where it was."""
    with RunDir.create_or_continue(path, {"n": 2, "seed": 7}) as run:
        run.recover()
        for k in range(2):
            episode = f"task/{k}"
            if run.state(episode) is EpisodeState.FINISHED:
                continue
            with run.begin(SessionRecord(episode_id=episode, group_id="task")) as journal:
                for turn in session(k).turns:
                    journal.turn(turn)
                journal.append(SealedRecord(reward=float(k)))
            run.complete(episode)


def arm(place: int, half: bool) -> Callable[[], int]:
    """Kill this process at the `place`-th call; of a write, with `half`, only the first half is done before."""
    count = 0

    def wrap(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == place:
                if half and name == "write":
                    real(args[0], bytes(args[1])[: max(1, len(args[1]) // 2)])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return call

    for name in CALLS:
        setattr(os, name, wrap(name, getattr(os, name)))
    return lambda: count


def forked(run: Callable[[], None]) -> int:
    """Run in a fork of this process; its wait status."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        try:
            run()
        except BaseException as e:
            print(f"{type(e).__name__}: {e}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1]


def full(directory: Path) -> None:
    """Run the workload with no room beyond each size, then with room; prints how often it did not go through."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    whole = directory / "whole"
    workload(whole)
    refused = 0
    for size in range(0, max(file.stat().st_size for file in whole.rglob("*") if file.is_file()), 151):
        path = directory / f"{size:05}"

        def cramped(path: Path = path, size: int = size) -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
            try:
                workload(path)
            except OSError as error:
                if error.errno != errno.EFBIG:
                    raise
                os.kill(os.getpid(), signal.SIGKILL)  # to tell it from one that went through

        status = forked(cramped)
        refused += os.WIFSIGNALED(status)
        if not os.WIFSIGNALED(status) and status:
            raise SystemExit(f"room for {size} bytes: status {status}")
        if forked(lambda path=path: workload(path)):
            raise SystemExit(f"room for {size} bytes: the second start failed")
    print(refused)


def main(directory: Path) -> None:
    place = 0
    while True:
        place += 1
        for half in (False, True):
            path = directory / f"{place:03}{'h' if half else ''}"

            def killed(path: Path = path, place: int = place, half: bool = half) -> None:
                arm(place, half)
                workload(path)

            status = forked(killed)
            if status == 0:
                print(place - 1)
                return
            if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
                raise SystemExit(f"place {place}: not killed, status {status}")
            if forked(lambda path=path: workload(path)):
                raise SystemExit(f"place {place}{' half' if half else ''}: the second start failed")


if __name__ == "__main__":
    os.fsync = lambda fd: None  # type: ignore[assignment]  # a place to be killed at; a kill loses nothing in the cache
    (full if sys.argv[2:] == ["full"] else main)(Path(sys.argv[1]))
