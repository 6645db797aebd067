"""Limits by cgroup v2 and by a user's systemd, for real, where this machine itself has neither."""

from pathlib import Path

import pytest

from support import limited, other_kernel

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("plain_user", [False, True], ids=["root", "plain user"])
def test_limits_by_groups_of_version_two(tmp_path: Path, plain_user: bool) -> None:
    tmp_path.chmod(0o755)
    said = other_kernel.run(tmp_path, Path(limited.__file__), plain_user=plain_user)
    by_group = {"memory": "group", "processes": "group", "cpu": "group", "disk": "watch"}
    assert said["limits"] == {"tier": "systemd" if plain_user else "cgroup-v2", **by_group}
    assert said["users"] == ("single" if plain_user else "range")
    assert said["settings"]["memory.max"] == str(64 << 20)
    assert said["settings"]["pids.max"] == "40"
    assert said["settings"]["cpu.max"] == "50000 100000"
    assert said["settings"].get("memory.swap.max", "0") == "0"
    assert said["hog"] == [None, True]
    assert "fork" in said["forks"]
    assert said["alive"] == "alive\n"
    assert said["left"] == []
    assert said["files"] == [".lock"]
