"""Which limit tier is chosen, and what it writes: cgroup v1 and v2, and a scope of the user's systemd."""

import os
import shutil
from pathlib import Path

import pytest

from sandlot.sandbox import Limits, SandboxSpec
from sandlot.sandbox.jail import cgroups
from sandlot.sandbox.local import LocalBackend, limits, systemd

LIMITS = {"memory": 1 << 28, "processes": 64, "cpu": 1.5}
# Like the real one as far as we ask: it checks what it is asked for, and becomes the command in another limit group.
SYSTEMD_RUN = """#!/bin/sh
echo "$@" >> {log}
for argument in "$@"; do
    case $argument in --user | --scope | --quiet | --collect) ;; --unit=*) unit=${{argument#--unit=}} ;;
    --property=Delegate=yes) delegated=1 ;; --) break ;; *) echo "unknown: $argument" >&2; exit 1 ;; esac
    shift
done
shift
[ -n "$delegated" ] && [ -n "$XDG_RUNTIME_DIR" ] || exit 1
{behave}
exec "$@"
"""


def _fake_group(path: Path, controllers: str) -> Path:
    path.mkdir()
    (path / "cgroup.controllers").write_text(controllers)
    for name in (
        "cgroup.subtree_control",
        "cgroup.procs",
        "memory.max",
        "memory.swap.max",
        "pids.max",
        "memory.events",
    ):
        (path / name).touch()
    return path


def test_what_is_written_for_each_version() -> None:
    assert cgroups.settings(2, "", LIMITS) == [
        *(("memory.max", str(1 << 28), True), ("memory.swap.max", "0", False), ("pids.max", "64", True)),
        ("cpu.max", "150000 100000", False),
    ]
    assert [row[0] for row in cgroups.settings(1, "memory", LIMITS)] == [
        *("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"),
    ]
    assert cgroups.settings(1, "cpu", LIMITS) == [
        *(("cpu.cfs_period_us", "100000", True), ("cpu.cfs_quota_us", "150000", True)),
    ]
    assert [row[0] for row in cgroups.settings(2, "", {**LIMITS, "cpu": None})][-1] == "pids.max"


def test_only_controllers_that_are_there_are_given_on(tmp_path: Path) -> None:
    group = _fake_group(tmp_path / "full", "cpuset cpu io memory pids")
    assert set(cgroups.give_on(str(group))) == {"cpu", "memory", "pids"}
    assert set((group / "cgroup.subtree_control").read_text().split()) == {"+cpu", "+memory", "+pids"}
    group = _fake_group(tmp_path / "without cpu", "memory pids")
    assert cgroups.give_on(str(group)) == ["memory", "pids"]
    tier = limits.systemd_tier(str(group), ["memory", "pids"])
    assert tier.facts(Limits(cpu=2.0)) == {
        "tier": "systemd",
        "memory": "group",
        "processes": "group",
        "cpu": "affinity",
        "disk": "watch",
    }
    assert tier.groups("1-a", Limits()) == {"": str(group / "1-a")}
    with pytest.raises(OSError, match="no memory and pids controllers"):
        cgroups.give_on(str(_fake_group(tmp_path / "poor", "hugetlb")))


def test_why_no_scope_can_be_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert "root" in str(systemd.refusal())
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert systemd.refusal() == "systemd-run is not installed"
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    assert "XDG_RUNTIME_DIR" in str(systemd.refusal())
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert "enable-linger" in str(systemd.refusal())
    assert "enable-linger" in limits.why_not_groups() or "cgroup v2" in limits.why_not_groups()
    (tmp_path / "bus").touch()
    assert systemd.refusal() is None
    assert systemd.scope("sandlot-x") == [
        *("/usr/bin/systemd-run", "--user", "--scope", "--quiet", "--collect", "--unit=sandlot-x"),
        *("--property=Delegate=yes", "--", "/usr/bin/env", "-i"),
    ]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "behave",
    ["exit 1", "", "echo $$ > {group}/cgroup.procs || exit 1"],
    ids=["refuses", "gives no group", "gives a group without controllers"],
)
async def test_a_scope_that_does_not_help_is_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, behave: str
) -> None:
    """Then the zygote starts outside of it, and the run goes on with the tier that every machine has."""
    point = limits.unified()
    if point is None or os.geteuid() != 0:
        pytest.skip("needs a limit group of version 2 that may be made")
    if "memory" in (point / "cgroup.controllers").read_text().split():
        pytest.skip("limit groups of version 2 work here")
    group = point / f"sandlot-test-{os.getpid()}"
    group.mkdir()
    log = tmp_path / "log"
    stand_in = tmp_path / "bin" / "systemd-run"
    stand_in.parent.mkdir()
    stand_in.write_text(SYSTEMD_RUN.format(log=log, behave=behave.format(group=group)))
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{stand_in.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(systemd, "refusal", lambda: None)
    monkeypatch.setattr(limits, "detect", lambda: limits.RLIMITS)
    backend = LocalBackend(tmp_path / "state")
    try:
        async with await backend.create(SandboxSpec()) as box:
            assert box.facts["limits"]["tier"] == "rlimits"
            assert (await box.exec("env; echo works")).stdout.endswith(b"works\n")
        lines = [line for line in log.read_text().splitlines() if line.startswith("--user")]
        assert len(lines) == 1
        assert lines[0].startswith(f"--user --scope --quiet --collect --unit=sandlot-{backend.run_dir.name}-")
        assert " --property=Delegate=yes -- " in lines[0]
    finally:
        await backend.close()
        os.rmdir(group)  # fails where anything was left in it
    assert os.listdir(tmp_path / "state") == [".lock"]
    assert not (point / "zygote").exists()
