"""`sandlot rollout` and its neighbours as processes: killed, continued, audited, graded again; and refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sandlot.trajectory.records import SessionRecord
from sandlot.trajectory.rundir import RunDir
from support.toy_model import make_toy_model

SANDLOT = [sys.executable, "-m", "sandlot.cli"]
CLIS = ["--harness", "pi", "--harness", "claude-code"]


def sandlot(*args: str, timeout: float = 600, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*SANDLOT, *args], capture_output=True, text=True, timeout=timeout, env={**os.environ, **env}, check=False
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy_model(tmp_path_factory.mktemp("model") / "toy")


@pytest.mark.slow
@pytest.mark.npm
@pytest.mark.timeout(900)
def test_scripted_solutions_solve_every_bundled_task_with_pi_and_claude_code(model: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = sandlot(
        "quickstart", "--engine", "scripted", "--model", str(model), "--out", str(run), "--json", timeout=880
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    unsolved = [e for e in told["episodes"] if e["reward"] != 1.0 or e["failure"]]
    assert unsolved == []
    assert told["solved"] == len(told["episodes"]) >= 2 * 15
    audited = sandlot("audit", str(run), "--json")
    assert audited.returncode == 0, audited.stdout
    counts = json.loads(audited.stdout)
    assert counts["violations"] == []
    assert counts["trained_tokens"] == counts["sampled_tokens"] > 0
    assert counts["forks"] == 0
    assert counts["samples"] == counts["episodes"] == told["solved"]
    graded = sandlot("grade", str(run), "--only", "page-count", "--json")
    assert graded.returncode == 0, graded.stdout
    assert [g["reward"] for g in json.loads(graded.stdout)] == [1.0, 1.0]
    for form in ("parquet", "jsonl"):
        exported = sandlot("export", str(run), "--to", form, "--json")
        assert exported.returncode == 0, exported.stderr
        assert json.loads(exported.stdout)["samples"] == counts["samples"]
    viewed = sandlot("view", str(run), told["episodes"][0]["episode_id"])
    assert "solved" in viewed.stdout


@pytest.mark.slow
@pytest.mark.npm
def test_a_harness_speaks_the_wire_that_is_asked_for(model: Path, tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    wires = ["--harness", "pi:anthropic", "--harness", "pi:responses", "--harness", "pi:google:compaction=true"]
    common = ["--engine", "scripted", "--model", str(model), "--json"]
    done = sandlot("rollout", "bundled", "--only", "page-count", *wires, "--out", run, *common)
    assert done.returncode == 0, done.stderr
    assert [e["reward"] for e in json.loads(done.stdout)["episodes"]] == [1.0] * 3
    assert json.loads(sandlot("audit", run, "--json").stdout)["violations"] == []
    said = refused("rollout", "bundled", "--harness", "claude-code:chat", "--out", str(tmp_path / "other"), *common)
    assert "one wire only" in said


@pytest.mark.slow
@pytest.mark.npm
def test_an_idle_policy_solves_nothing(model: Path, tmp_path: Path) -> None:
    only = ["--only", "page-count", "--only", "semver-caret", "--only", "undo-groups", "--only", "wide-table"]
    out = ["--out", str(tmp_path / "run"), "--json"]
    done = sandlot("rollout", "bundled", *CLIS, "--engine", "scripted-idle", "--model", str(model), *only, *out)
    assert done.returncode == 0, done.stderr
    assert {e["reward"] for e in json.loads(done.stdout)["episodes"]} == {0.0}


@pytest.mark.slow
@pytest.mark.npm
@pytest.mark.timeout(600)
def test_a_killed_run_is_continued_and_no_episode_is_lost_or_doubled(model: Path, tmp_path: Path) -> None:
    """Killed at four different moments; what was finished is not redone, and nothing is left behind."""
    run = tmp_path / "run"
    command = [*SANDLOT, "rollout", "bundled", "--harness", "pi", "--engine", "scripted", "--model", str(model)]
    for task in ("page-count", "slug-limit", "ring-cache", "duration-text"):
        command += ["--only", task]
    command += ["-n", "3", "-j", "3", "--out", str(run), "--json"]
    finished: dict[str, float] = {}
    for kill, number in enumerate((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGKILL)):
        scratch = tmp_path / f"tmp-{kill}"
        scratch.mkdir()
        env = {**os.environ, "TMPDIR": str(scratch)}
        with subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True, env=env
        ) as p:
            end, wanted = time.monotonic() + 60, len(finished) + (kill % 3)
            while time.monotonic() < end and p.poll() is None:
                lines = (run / "results.jsonl").read_text().splitlines() if (run / "results.jsonl").exists() else []
                if len(lines) >= wanted and (run / "run.toml").exists():
                    break
                time.sleep(0.02)
            time.sleep(0.3 * (kill + 1))
            os.kill(p.pid, number)
        if number == signal.SIGTERM:
            assert (p.returncode, list(scratch.iterdir())) == (130, [])
        rows = {row["episode_id"]: row["finished"] for row in RunDir.read(run).results()}
        assert finished.items() <= rows.items()
        finished = rows
    done = sandlot(*command[len(SANDLOT) :])
    assert done.returncode == 0, done.stderr
    rows = list(RunDir.read(run).results())
    assert len(rows) == len({row["episode_id"] for row in rows}) == 12
    assert finished.items() <= {row["episode_id"]: row["finished"] for row in rows}.items()
    assert {row["reward"] for row in rows} == {1.0}
    assert json.loads(sandlot("audit", str(run), "--json").stdout)["violations"] == []


# -- bad input: one clear sentence each ------------------------------------------------------------------------------


def refused(*args: str, **env: str) -> str:
    done = sandlot(*args, timeout=120, **env)
    assert done.returncode == 1, done.stdout + done.stderr
    lines = done.stderr.strip().splitlines()
    assert lines[-1].startswith("error: "), done.stderr
    assert "Traceback" not in done.stderr
    return lines[-1]


def test_a_model_without_a_chat_template(tmp_path: Path) -> None:
    model = make_toy_model(tmp_path / "toy")
    (model / "chat_template.jinja").unlink()
    config = json.loads((model / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    said = refused("gateway", "--engine", "scripted", "--model", str(model))
    assert "template" in said


def test_an_engine_that_is_down(model: Path) -> None:
    said = refused("gateway", "--engine", "http://127.0.0.1:9", "--model", str(model))
    assert "127.0.0.1:9" in said


def test_an_engine_that_is_no_url(model: Path) -> None:
    said = refused("gateway", "--engine", "vlllm", "--model", str(model))
    assert "neither a URL (or several, with commas) nor one of" in said


def test_what_is_wrong_at_first_sight_leaves_no_run(tmp_path: Path, model: Path) -> None:
    run = tmp_path / "run"
    said = refused("rollout", "bundled", "--engine", "http://127.0.0.1:9", "--out", str(run))
    assert "give --model DIR" in said  # the embedded model's tokenizer is not that of any other
    common = ["rollout", "bundled", "--model", str(model), "--out", str(run)]
    assert "'nope'" in refused(*common, "--engine", "scripted", "--harness", "pi:nope")
    assert "neither a URL" in refused(*common, "--engine", "vlllm")
    assert not run.exists()


def test_a_row_without_a_grader(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "p", "label": "", "metadata": {"image": "host", "workdir": "/w"}}) + "\n")
    said = refused("tasks", "list", str(rows))
    assert "rows.jsonl" in said
    assert "1" in said


def test_an_unknown_harness_task_and_setting(tmp_path: Path, model: Path) -> None:
    common = ["--engine", "scripted", "--model", str(model), "--out", str(tmp_path / "run")]
    assert "no sandlot.harnesses called 'emacs'" in refused("rollout", "bundled", "--harness", "emacs", *common)
    assert "'nope'" in refused("rollout", "bundled", "--only", "nope", *common)
    assert "SANDLOT_TEMPRATURE" in refused("rollout", "bundled", *common, SANDLOT_TEMPRATURE="1")
    bad = tmp_path / "bad.toml"
    bad.write_text("attemts = 3\n")
    assert "attemts" in refused("rollout", "bundled", "--config", str(bad), *common)


@pytest.mark.slow
@pytest.mark.npm
def test_what_infrastructure_lost_is_an_error_and_is_tried_again(model: Path, tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("unshare", "mount", "nsenter", "sh"):  # all that is needed, but for git
        (tools / name).symlink_to(str(shutil.which(name)))
    run = tmp_path / "run"
    argv = ["rollout", "bundled", "--only", "page-count", "--engine", "scripted", "--model", str(model)]
    argv += ["--out", str(run), "--json"]
    said = refused(*argv, PATH=str(tools))
    assert "1 of 1 episodes were lost to infrastructure, the last so: git is not installed here" in said
    done = sandlot(*argv)
    assert done.returncode == 0, done.stderr
    (row,) = (json.loads(line) for line in (run / "results.jsonl").read_text().splitlines())
    assert (row["reward"], row["failure"]) == (1.0, None)
    assert json.loads(sandlot("audit", str(run), "--json").stdout)["violations"] == []


def test_a_cli_that_cannot_be_installed(model: Path, tmp_path: Path) -> None:
    empty = tmp_path / "bin"
    empty.mkdir()
    nowhere = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PATH": str(empty), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}
    said = refused(
        "rollout", "bundled", "--only", "page-count", "--engine", "scripted", "--model", str(model),
        "--out", str(tmp_path / "run"), **nowhere,
    )  # fmt: skip
    assert "npm" in said


def test_a_directory_that_is_no_run(tmp_path: Path) -> None:
    assert "no run directory" in refused("audit", str(tmp_path))
    (tmp_path / "file").write_text("x")
    assert "not empty" in refused("quickstart", "--engine", "scripted", "--out", str(tmp_path))


def test_a_run_is_not_continued_with_another_configuration(tmp_path: Path, model: Path) -> None:
    run = tmp_path / "run"
    with RunDir.create_or_continue(run, {"attempts": 1}) as begun:
        begun.begin(SessionRecord(episode_id="e", group_id="g")).close()
    said = refused("rollout", "bundled", "--engine", "scripted", "--model", str(model), "--out", str(run))
    assert "another configuration" in said


def test_import_is_quick_and_light() -> None:
    code = "import sys, time; t = time.perf_counter(); import sandlot; d = time.perf_counter() - t; " \
        "print(d, [m for m in ('torch', 'numpy', 'aiohttp', 'pyarrow') if m in sys.modules])"  # fmt: skip
    took = []
    for _ in range(5):  # others use this machine, too
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        seconds, _, heavy = done.stdout.partition(" ")
        assert heavy.strip() == "[]"
        took.append(float(seconds))
    assert min(took) < 0.3
