"""The docs build into a site without a warning."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    warnings = [line for line in done.stderr.splitlines() if line.startswith(("WARNING", "ERROR"))]
    assert warnings == []
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "contract" / "index.html").exists()
