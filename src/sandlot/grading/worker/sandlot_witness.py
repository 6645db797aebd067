"""What pytest really did, told event by event over a channel that the code under test was not given.

Runs inside the sandbox, under the image's interpreter, so it needs nothing but pytest. As a plugin loaded with
`-p sandlot_witness` it takes its channel from the environment and removes it there; `session.py` uses the class.

Code under test shares a process with its tests, so code written against this very file can find the channel in memory
and tell what it likes. The control tests and the checks of what was reported make that hard; a grading of the same
patch with inverted tests, which must fail, makes it show.
"""

import json
import os
import socket
import sys
import types
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest

CHANNEL = "SANDLOT_WITNESS"
_TEXT = 4000


class Channel:
    """Tells events to `run.py` over a socket, in lines that carry the token it was greeted with."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect("\0" + address)
        try:
            self._token = self._socket.makefile("rb").readline().decode().strip()
        except OSError:
            self._token = ""
        self._pid = os.getpid()
        self._write, self._dumps, self._getpid = self._socket.sendall, json.dumps, os.getpid

    @property
    def open(self) -> bool:
        """Whether we were let in."""
        return bool(self._token)

    def send(self, **event: Any) -> None:
        if self._getpid() == self._pid:
            self._write((self._token + " " + self._dumps(event) + "\n").encode("utf-8", "replace"))


class Seal:
    """The functions that make up the test runner, remembered so that a change of one is seen."""

    def __init__(self, config: "pytest.Config") -> None:
        self._config = config
        self._functions: list[tuple[Any, str, Any, Any, Any]] = []
        self._keys: list[tuple[Any, set[str]]] = []
        for owner, module in self._owners():
            keys = set()
            for key, value in list(vars(owner).items()):
                function = _function(value)
                if function is None or (owner is module and function.__module__ != module.__name__):
                    continue
                keys.add(key)
                self._functions.append((owner, key, value, function, function.__code__))
            if owner is not module:
                self._keys.append((owner, keys))
        self._plugins = {id(plugin) for plugin in config.pluginmanager.get_plugins()}

    @staticmethod
    def _owners() -> "Iterator[tuple[Any, types.ModuleType]]":
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] in ("_pytest", "pluggy", "sandlot_witness") or name == "unittest.case":
                yield module, module
                for value in list(vars(module).values()):
                    if isinstance(value, type) and value.__module__ == name:
                        yield value, module

    def broken(self) -> "list[str]":
        """What is not as it was, by name."""
        found = []
        for owner, key, value, function, code in self._functions:
            if vars(owner).get(key) is not value or function.__code__ is not code:
                found.append("%s.%s" % (owner.__name__, key))  # noqa: UP031
        for owner, keys in self._keys:
            found += [owner.__name__ + "." + k for k, v in list(vars(owner).items()) if k not in keys and _function(v)]
        for plugin in self._config.pluginmanager.get_plugins():
            place = _module_of(plugin)
            if id(plugin) not in self._plugins and not place.startswith("_pytest.") and not _is_conftest(plugin):
                found.append("the plugin " + str(place))
        return found


def _function(value: Any) -> "types.FunctionType | None":
    if isinstance(value, (classmethod, staticmethod)):
        value = value.__func__
    elif isinstance(value, property):
        value = value.fget
    return value if isinstance(value, types.FunctionType) else None


def _module_of(plugin: object) -> str:
    """The name of the module that a plugin (a module, a class or an object) comes from."""
    if isinstance(plugin, types.ModuleType):
        return plugin.__name__
    return str(getattr(plugin, "__module__", None) or type(plugin).__module__)


def _is_conftest(plugin: object) -> bool:
    return os.path.basename(getattr(plugin, "__file__", None) or "") == "conftest.py"


class Witness:
    """A pytest plugin: which tests were collected, what became of each, and how the session ended."""

    def __init__(
        self,
        channel: "Channel",
        session: str,
        keep: "Callable[[list[str]], list[str]] | None" = None,
        path: "str | None" = None,
    ) -> None:
        self._channel, self._session, self._keep, self._path = channel, session, keep, path
        self._phases: dict[str, dict[str, Any]] = {}
        self._raised: set[str] = set()
        self._xfails: set[str] = set()
        self._seal: Seal | None = None
        self._codes: dict[pytest.Item, Any] = {}

    def check(self) -> None:
        """Tell, once, when the runner is not what it was at the start."""
        broken = self._seal.broken() if self._seal is not None else []
        if broken:
            self._seal = None
            self.send("broken", names=broken[:20])

    def send(self, kind: str, **event: Any) -> None:
        self._channel.send(event=kind, session=self._session, **event)

    @pytest.hookimpl(tryfirst=True)
    def pytest_load_initial_conftests(self) -> None:
        # Only now: plugins that packages in the workdir offer by entry points are not taken.
        if self._path:
            sys.path.insert(0, self._path)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session: "pytest.Session") -> None:
        self.send("start")
        self._seal = Seal(session.config)

    def pytest_collectreport(self, report: "pytest.CollectReport") -> None:
        if report.failed:
            self.send("collect_error", id=report.nodeid, text=str(report.longrepr)[-_TEXT:])
        elif report.skipped and _from_elsewhere(report):
            self.send("foreign_skip", id=report.nodeid)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: "pytest.Config", items: "list[pytest.Item]") -> None:
        if self._keep is not None:
            kept = self._keep([item.nodeid for item in items])
            by_id: dict[str, list[pytest.Item]] = {}
            for item in items:
                by_id.setdefault(item.nodeid, []).append(item)
            chosen = [item for name in kept for item in by_id.pop(name, [])]
            left = [item for group in by_id.values() for item in group]
            if left:
                config.hook.pytest_deselected(items=left)
            items[:] = chosen
        self.send("collected", ids=[item.nodeid for item in items])
        self._codes = {item: _code_of(item) for item in items}
        self.check()

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: "pytest.Function") -> "Generator[None, Any, None]":
        if _code_of(pyfuncitem) is not self._codes.get(pyfuncitem):
            self.send("broken", names=[pyfuncitem.nodeid])
        outcome = yield
        if outcome.excinfo is not None:
            self._raised.add(pyfuncitem.nodeid)

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: "pytest.Item", call: "pytest.CallInfo[None]") -> "Iterator[None]":
        if call.excinfo is not None and isinstance(call.excinfo.value, pytest.xfail.Exception):
            self._xfails.add(item.nodeid)
        yield

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: "pytest.TestReport") -> None:
        phases = self._phases.setdefault(report.nodeid, {})
        phases[report.when] = report
        if report.when != "teardown":
            return
        self.check()
        result = self._result(report.nodeid, phases)
        failing = [str(p.longrepr) for p in phases.values() if p.longrepr is not None and not p.passed]
        duration = sum(p.duration for p in phases.values())
        self.send("test", id=report.nodeid, result=result, duration=duration, text="\n".join(failing)[-_TEXT:])
        if any(p.skipped and self._was_asked(p) and _from_elsewhere(p) for p in phases.values()):
            self.send("foreign_skip", id=report.nodeid)
        self._phases[report.nodeid] = {}

    def _was_asked(self, report: "pytest.TestReport") -> bool:
        """Whether a call made this skip or expected failure, and not a mark of the test."""
        return not hasattr(report, "wasxfail") or report.nodeid in self._xfails

    def _result(self, name: str, phases: "dict[str, Any]") -> str:
        setup, call, teardown = (phases.get(when) for when in ("setup", "call", "teardown"))
        if setup is None or teardown is None:
            return "error"
        if setup.skipped:
            return "skipped"
        if setup.failed or teardown.failed or call is None:
            return "error"
        if call.skipped:
            return "skipped"
        return "failed" if call.failed or name in self._raised else "passed"

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: "pytest.Session", exitstatus: int) -> None:
        self.check()
        self.send("finish", status=int(exitstatus), ran=session.testscollected)


def _code_of(item: "pytest.Item") -> Any:
    """The code of the function that a test item runs, or nothing for items that run none."""
    function = getattr(item, "_obj", None)
    return getattr(getattr(function, "__func__", function), "__code__", None)


def _from_elsewhere(report: Any) -> bool:
    """Whether a skip was raised outside of the test's own file: by the code under test, that is."""
    place: Any = report.longrepr
    path = place[0] if isinstance(place, tuple) else getattr(getattr(place, "reprcrash", None), "path", "")
    file: str = report.nodeid.partition("::")[0]
    return os.path.basename(str(path)) != os.path.basename(file)


def pytest_configure(config: "pytest.Config") -> None:
    """Loaded by name: the address of the channel is in the environment."""
    address = os.environ.pop(CHANNEL, "")
    if address:
        channel = Channel(address)
        if channel.open:
            config.pluginmanager.register(Witness(channel, "pytest"))
