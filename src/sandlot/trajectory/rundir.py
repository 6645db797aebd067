"""The run directory: everything a set of episodes produced, safe against a kill at any moment.

    run.toml                              the resolved configuration, and versions
    episodes/<name>.jsonl.gz              journal of an episode
    episodes/<name>.<n>.aborted.jsonl.gz  journals of attempts that were cut off and started again
    samples/<name>.parquet                its audited samples
    results.jsonl                         one line per finished episode, written last
    patches/, logs/, metrics.jsonl

An episode is finished when its journal is sealed *and* its result line exists. A sealed journal without a result line
is completed from the journal; an unsealed one is set aside and the episode begins again.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import os
import re
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import tomli_w

from sandlot.errors import ConfigError, FailureKind, JournalError
from sandlot.trajectory.audit import AuditReport, audit_journal
from sandlot.trajectory.journal import JournalWriter, read_header, read_journal, sync_directory
from sandlot.trajectory.lines import LineWriter
from sandlot.trajectory.records import SessionRecord
from sandlot.trajectory.result import complete_episode, episode_samples, row_violations
from sandlot.trajectory.results import Results
from sandlot.trajectory.runfile import first_difference, plain, read_run_file
from sandlot.trajectory.sample import Sample
from sandlot.trajectory.store import read_samples, remove_unfinished, write_atomically, write_samples

_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,119}")
_ABORTED = re.compile(r".*\.\d+\.aborted", re.IGNORECASE)
_FOLDERS = ("episodes", "samples", "patches", "logs")


class EpisodeState(StrEnum):
    """How far an episode came."""

    ABSENT = "absent"
    UNSEALED = "unsealed"
    SEALED = "sealed"
    FINISHED = "finished"


def _begun(path: Path) -> bool:
    """Whether an episode of the run was ever started."""
    results = path / "results.jsonl"
    return any((path / "episodes").glob("*.jsonl.gz")) or (results.exists() and results.stat().st_size > 0)


def _episode_of(file: Path, name: str) -> set[str]:
    """The id of the episode whose journal is called `name`, none where its header is not complete."""
    try:
        header = read_header(file)
    except JournalError:
        return {name}
    return {header.episode_id} if header else set()


def safe_name(episode_id: str) -> str:
    """A file name for an episode id: the id itself where that is safe, else a readable part and a hash."""
    if _PLAIN.fullmatch(episode_id) and not _ABORTED.fullmatch(episode_id):
        return episode_id
    readable = re.sub(r"[^A-Za-z0-9_-]+", "_", episode_id)[:80].strip("_-") or "episode"
    return f"{readable}-{hashlib.sha256(episode_id.encode()).hexdigest()[:16]}"


class RunDir:
    """A run directory. Open it with `create_or_continue` to write (one process and who `join`s it) or with `read`."""

    def __init__(self, path: Path, config: Mapping[str, Any], facts: Mapping[str, Any], lock: int | None) -> None:
        self.path = path
        self.config = config
        self.facts = facts
        self._lock = lock
        self._results = Results(path / "results.jsonl", write=lock is not None)
        self._metric_lines = LineWriter(path / "metrics.jsonl", durable=False) if lock is not None else None

    @classmethod
    def create_or_continue(
        cls,
        path: str | os.PathLike[str],
        config: Mapping[str, Any],
        *,
        facts: Mapping[str, Any] | None = None,
        may_differ: Collection[str] = (),
    ) -> Self:
        """Make a run, or go on with the one at `path` when its configuration is the same.

        `config` is what the results depend on; `may_differ` names dotted keys (or their beginnings) that may change
        between starts, such as a concurrency. `facts` (versions, command line) are only recorded. A run in which no
        episode began takes any configuration.
        """
        path = Path(path)
        config = plain(config, "config")
        if path.is_dir() and not (path / "run.toml").exists() and any(p.name[0] != "." for p in path.iterdir()):
            raise ConfigError(f"{path} is not empty and no run; choose another directory")
        path.mkdir(parents=True, exist_ok=True)
        lock = _take_lock(path)
        try:
            stored, recorded = read_run_file(path) if (path / "run.toml").exists() else (None, {})
            difference = "" if stored is None else first_difference(stored, config, may_differ)
            if difference and _begun(path):
                raise ConfigError(
                    f"{path} was made with another configuration ({difference}); use the same one or another directory"
                )
            if stored is not None and not difference:
                facts = recorded
            else:
                facts = plain(facts or {}, "facts")
                run = {"schema": 1, "created": time.time(), "facts": facts, "config": config}
                write_atomically(path / "run.toml", lambda file: tomli_w.dump(run, file))
                sync_directory(path.parent)
            folders = [path / name for name in _FOLDERS]
            for folder in folders:
                folder.mkdir(exist_ok=True)
            for folder in (path, *folders):
                remove_unfinished(folder)
            return cls(path, config, facts, lock)
        except BaseException:
            os.close(lock)
            raise

    @classmethod
    def join(cls, path: str | os.PathLike[str], lock: int) -> Self:
        """Write a run together with the process that opened it, whose `lock` this one has inherited.

        Each episode is written by one process. The run stays locked until the last of them is gone.
        """
        config, facts = read_run_file(Path(path))
        return cls(Path(path), config, facts, lock)

    @property
    def lock(self) -> int | None:
        """File descriptor of the lock, for a process that is to `join`."""
        return self._lock

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Self:
        """Look at a run, also while another process writes it."""
        path = Path(path)
        if not (path / "run.toml").exists():
            raise ConfigError(f"{path} is no run directory: it has no run.toml")
        config, facts = read_run_file(path)
        return cls(path, config, facts, None)

    def journal_path(self, episode_id: str) -> Path:
        return self.path / "episodes" / f"{safe_name(episode_id)}.jsonl.gz"

    def samples_path(self, episode_id: str) -> Path:
        return self.path / "samples" / f"{safe_name(episode_id)}.parquet"

    def patch_path(self, episode_id: str) -> Path:
        return self.path / "patches" / f"{safe_name(episode_id)}.patch"

    def log_path(self, episode_id: str, kind: str) -> Path:
        return self.path / "logs" / f"{safe_name(episode_id)}.{kind}.log"

    def episode_ids(self) -> list[str]:
        """Ids of all episodes that have a journal with a header, sorted; set-aside attempts do not count.

        One whose header is damaged goes by the name of its file: asking for its state says what is wrong.
        """
        found = set(self._results)
        known = {safe_name(episode_id) for episode_id in found}
        for file in (self.path / "episodes").glob("*.jsonl.gz"):
            name = file.name.removesuffix(".jsonl.gz")
            if name not in known and not _ABORTED.fullmatch(name):
                with suppress(FileNotFoundError):  # its writer has just set it aside
                    found |= _episode_of(file, name)
        return sorted(found)

    def state(self, episode_id: str) -> EpisodeState:
        if episode_id in self._results:  # only ever written after its journal was sealed
            return EpisodeState.FINISHED
        try:
            sealed = read_journal(self.journal_path(episode_id)).sealed
        except FileNotFoundError:
            return EpisodeState.ABSENT
        return EpisodeState.SEALED if sealed else EpisodeState.UNSEALED

    def results(self) -> Iterator[dict[str, Any]]:
        """The result rows of the finished episodes, in the order they finished."""
        return map(self._results.__getitem__, self._results)

    def result(self, episode_id: str) -> dict[str, Any] | None:
        return self._results.get(episode_id)

    def finished(self) -> list[str]:
        """Ids of the finished episodes, those of a group together: groups and episodes in the order of their ids."""
        return sorted(self._results, key=lambda episode_id: (self._results.group(episode_id), episode_id))

    def samples_of(self, episode_id: str) -> list[Sample]:
        """The stored samples of an episode, none before it is finished."""
        path = self.samples_path(episode_id)
        if episode_id not in self._results or not (self._results.has_samples(episode_id) or path.exists()):
            return []
        return list(read_samples(path))

    def sample_groups(self, *, without: Collection[str] = ()) -> Iterator[list[Sample]]:
        """The samples of all finished episodes but `without`, those of a group together, in the order of `finished`."""
        wanted = [e for e in self.finished() if e not in without and self._results.has_samples(e)]
        for _, group in itertools.groupby(wanted, self._results.group):
            yield [sample for episode_id in group for sample in read_samples(self.samples_path(episode_id))]

    def samples(self) -> Iterator[Sample]:
        """The samples of all finished episodes, in the order of `sample_groups`."""
        return itertools.chain.from_iterable(self.sample_groups())

    def begin(self, header: SessionRecord) -> JournalWriter:
        """A fresh journal for an episode that is to run now. What a cut-off attempt left is set aside."""
        self._writable()
        path = self.journal_path(header.episode_id)
        if self.state(header.episode_id) in (EpisodeState.SEALED, EpisodeState.FINISHED):
            raise JournalError(f"episode {header.episode_id!r} is over; complete it or take its result")
        self._set_aside(header.episode_id)
        journal = JournalWriter(path)
        try:
            journal.append(header)
        except BaseException:
            journal.close()
            raise
        return journal

    def begin_again(self, episode_ids: Collection[str]) -> None:
        """Take finished episodes for ones that never ran; their journals are set aside. Nothing may run meanwhile."""
        self._writable()
        self._results.drop(episode_ids)  # first: a result without its journal would be taken for damage
        for episode_id in episode_ids:
            self._set_aside(episode_id)

    def _set_aside(self, episode_id: str) -> None:
        path = self.journal_path(episode_id)
        if path.exists():
            number = 1
            while (aside := path.with_name(f"{safe_name(episode_id)}.{number}.aborted.jsonl.gz")).exists():
                number += 1
            path.rename(aside)
            sync_directory(path.parent)

    def complete(self, episode_id: str) -> dict[str, Any]:
        """Samples and result row of an episode whose journal is sealed, made from the journal alone.

        The same for an episode that just ended and for one that a killed process left behind; doing it again gives
        the row that is there. Samples that do not pass the audit are not written, and the row says so.
        """
        self._writable()
        if episode_id in self._results:
            return self._results[episode_id]
        content = read_journal(self.journal_path(episode_id))
        row, samples = complete_episode(content)
        if samples:
            write_samples(self.samples_path(episode_id), samples)
        else:
            self.samples_path(episode_id).unlink(missing_ok=True)
        self._results.add(row)
        return self._results[episode_id]

    def recover(self) -> list[dict[str, Any]]:
        """Complete every sealed episode that has no result row yet; returns the new rows.

        Samples of finished episodes whose file is gone are made again. A damaged journal does not keep the others from
        being completed; then `JournalError` names it.
        """
        rows: list[dict[str, Any]] = []
        damaged: list[str] = []
        for episode_id in self.episode_ids():
            try:
                if self.state(episode_id) is EpisodeState.SEALED:
                    rows.append(self.complete(episode_id))
                elif episode_id in self._results and self._results.has_samples(episode_id):
                    self._make_again(episode_id)
            except JournalError as e:
                damaged.append(str(e))
        if damaged:
            raise JournalError("; ".join(damaged))
        return rows

    def _make_again(self, episode_id: str) -> None:
        path, journal = self.samples_path(episode_id), self.journal_path(episode_id)
        if not path.exists() and journal.exists():
            write_samples(path, episode_samples(read_journal(journal)))

    def audit(self, episode_id: str) -> AuditReport:
        """Prove the stored samples of a finished episode, and its result row, against its journal."""
        content = read_journal(self.journal_path(episode_id))
        row, samples = self._results.get(episode_id), self.samples_of(episode_id)
        if row is None:
            return audit_journal(content, samples, failure=FailureKind.ABORTED)
        report = audit_journal(content, samples, failure=row["failure"] if row.get("violations") else None)
        return report if not report.ok else replace(report, violations=row_violations(row, content, report))

    def metrics(self, row: Mapping[str, Any]) -> None:
        """Add a line to `metrics.jsonl`."""
        self._writable().append({"time": time.time(), **row})

    def close(self) -> None:
        """Let go of the run; another process may write it then."""
        self._results.close()
        if self._metric_lines is not None:
            self._metric_lines.close()
        if self._lock is not None:
            os.close(self._lock)
        self._lock = self._metric_lines = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _writable(self) -> LineWriter:
        """The lines of `metrics.jsonl`, which only a writer has."""
        if self._metric_lines is None:
            raise ConfigError(f"{self.path} is open for reading only")
        return self._metric_lines


def _take_lock(path: Path) -> int:
    fd = os.open(path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.read(fd, 32).decode(errors="replace").strip() or "?"
        os.close(fd)
        raise ConfigError(
            f"{path} is being written by process {owner}; wait for it or choose another directory"
        ) from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd
