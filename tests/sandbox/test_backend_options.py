"""What backends are made with: by a file, by variables and by flags of every command that boots sandboxes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from sandlot.cli.app import app
from sandlot.config import load_config
from sandlot.errors import ConfigError
from sandlot.sandbox import SANDBOXES, make_backend
from sandlot.sandbox.options import known_options
from sandlot.trajectory.rundir import RunDir

BACKENDS = ["local", "docker", "e2b", "modal", "daytona", "kubernetes", "harbor"]
PAGE = (Path(__file__).parents[2] / "docs" / "sandboxes.md").read_text("utf-8")


def sandlot(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize("name", BACKENDS)
def test_a_name_that_there_is_not_is_answered_with_those_there_are_and_the_page_has_them(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} has no option 'nope'") as told:
        make_backend(name, {"nope": 1})
    table = PAGE.partition("| backend | its options |")[2].partition("\n\n")[0].splitlines()
    rows = [row for row in table if row.startswith((f"| `{name}` |", "| all but"))]
    if name in ("local", "docker"):
        rows = rows[:1]
    options = str(told.value).partition("its options: ")[2].split(", ")
    assert options == sorted(known_options(SANDBOXES.get(name))[0])
    for option in options:
        assert any(f"`{option}`" in row for row in rows), option


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("e2b", "per_second", "often"),
        ("e2b", "per_second", 0),
        ("docker", "at_once", 1.5),
        ("kubernetes", "isolated", "perhaps"),
        ("harbor", "kwargs", "[1]"),
        ("modal", "app", 7),
        ("modal", "advertise_url", "here:80"),
    ],
)
def test_a_value_of_another_kind_is_refused(name: str, option: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name} cannot|advertise_url"):
        make_backend(name, {option: value})


def test_files_variables_and_flags_say_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        'sandbox = "harbor"\n[sandbox_options]\nenvironment = "e"\nper_second = 2.0\nkwargs = {image = "x"}\n'
    )
    by_file = load_config(file)
    flags = {"environment": "e", "per_second": "2.0", "kwargs": '{"image": "x"}'}
    by_flags = load_config(flags={"sandbox": "harbor", "sandbox_options": flags})
    monkeypatch.setenv("SANDLOT_SANDBOX", "harbor")
    for key, value in flags.items():
        monkeypatch.setenv(f"SANDLOT_SANDBOX_OPTIONS__{key.upper()}", value)
    for config in (by_file, by_flags, load_config()):
        made: Any = make_backend(config.sandbox, config.sandbox_options)
        assert (made._environment, made._interval, made._kwargs) == ("e", 0.5, {"image": "x"})


def test_flags_are_laid_over_a_files_options(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('sandbox = "modal"\n[sandbox_options]\napp = "one"\nper_second = 2.0\n')
    config = load_config(file, {"sandbox_options": {"app": "other"}})
    assert config.sandbox_options == {"app": "other", "per_second": 2.0}


def test_an_outside_backend_that_passes_options_on_takes_any(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("outside_backend")
    exec(
        "class Outside:\n def __init__(self, size: int = 1, **more): self.got = {'size': size, **more}\n", vars(module)
    )
    monkeypatch.setitem(sys.modules, "outside_backend", module)
    monkeypatch.setitem(SANDBOXES._builtin, "outside", "outside_backend:Outside")
    made: Any = make_backend("outside", {"size": "3", "region": "eu"})
    assert made.got == {"size": 3, "region": "eu"}
    assert known_options(lambda image="x": None) == ({"image": Any}, False)


COMMANDS = [
    ("rollout", "bundled", "--only", "page-count", "--out", "RUN"),
    ("tasks", "check", "bundled", "--only", "page-count"),
    ("grade", "bundled", "--only", "page-count", "--patch", "PATCH"),
    ("sandbox", "shell", "host", "-c", "true"),
    ("sandbox", "list"),
    ("sandbox", "sweep"),
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: "-".join(command[:2]))
def test_every_command_takes_them(command: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "patch").write_text("")
    places = {"RUN": str(tmp_path / "run"), "PATCH": str(tmp_path / "patch")}
    command = tuple(places.get(word, word) for word in command)
    done = sandlot(*command, "--sandbox", "docker", "--sandbox-option", "runtime=runsc", "--sandbox-option", "at_one=2")
    assert isinstance(done.exception, ConfigError)
    assert "docker has no option 'at_one'; its options: at_once, host, runtime" in str(done.exception)
    done = sandlot(*command, "--sandbox-option", "runtime")
    assert str(done.exception) == "--sandbox-option 'runtime' is not NAME=VALUE"


def test_a_shell_is_booted_with_them(tmp_path: Path) -> None:
    place = tmp_path / "state"
    done = sandlot("sandbox", "shell", "-c", "ls /proc/self", "--sandbox-option", f"state_dir={place}")
    assert done.exit_code == 0, done.output
    assert place.is_dir()


def test_the_doctor_tries_with_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    where = f"host=unix://{tmp_path}/none.sock"
    told = json.loads(sandlot("doctor", "--sandbox", "docker", "--sandbox-option", where, "--json").stdout)
    assert any(not check["ok"] and "none.sock" in check["detail"] for check in told)
    told = json.loads(sandlot("doctor", "--sandbox", "docker", "--sandbox-option", "nope=1", "--json").stdout)
    assert any("its options: at_once, host, runtime" in check["detail"] for check in told)


def test_a_run_is_graded_again_with_its_own_options_on_its_own_backend(tmp_path: Path) -> None:
    settings = {"tasks": "bundled", "sandbox": "modal", "sandbox_options": {"per_second": "often"}}
    with RunDir.create_or_continue(tmp_path / "run", settings):
        pass
    run = str(tmp_path / "run")
    assert "modal cannot take 'often'" in str(sandlot("grade", run).exception)
    assert "modal cannot take 'often'" in str(sandlot("grade", run, "--sandbox", "modal").exception)
    for mended in (["--sandbox-option", "per_second=2"], ["--sandbox", "local"]):
        assert "holds no patch to grade" in str(sandlot("grade", run, *mended).exception)
