import subprocess

import pytest


@pytest.mark.parametrize("name", ["a.log", "two words.log"])
def test_files_move_on(tmp_path, name):
    for number in range(6):
        (tmp_path / name).write_text(f"{number}")
        subprocess.run(["sh", "/app/rotate.sh", str(tmp_path / name), "3"], check=True)
    found = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert found == {name: "", f"{name}.1": "5", f"{name}.2": "4", f"{name}.3": "3"}


def test_one_old_file_only(tmp_path):
    for number in range(3):
        (tmp_path / "x").write_text(f"{number}")
        subprocess.run(["sh", "/app/rotate.sh", str(tmp_path / "x"), "1"], check=True)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"x": "", "x.1": "2"}
