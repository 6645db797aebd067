"""The small task of `support.cheats` told in every form of grading."""

from __future__ import annotations

from sandlot.tasks import (
    CommandGrading,
    Grading,
    HarborGrading,
    R2EGrading,
    ScriptGrading,
    SwebenchGrading,
    SweProGrading,
)
from sandlot.tasks.patches import patch_of_contents
from support.cheats import BASE, FAIL_TO_PASS, GRADING, HIDDEN, PASS_TO_PASS

SCRIPT = """\
import sys
import pytest
from calc import add


def test_add():
    assert add(2, 3) == 5


def test_more():
    assert add(1, 1) == 2


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q"]))
"""
PARSER = """\
import json, re, sys
out = open(sys.argv[1], encoding="utf-8", errors="replace").read()
found = re.findall(r"^(PASSED|FAILED|ERROR) (\\S.*?)(?: - .*)?$", out, re.M)
json.dump({"tests": [{"name": name, "status": status} for status, name in found]}, open(sys.argv[3], "w"))
"""
RUN = 'IFS=,; python3 -m pytest -rA -q $1 ; printf "ok \\377\\360\\237 end\\n"; printf "\\377" >&2\n'
COMMAND = CommandGrading("python3 -m pytest -q tests/test_core.py tests/test_more.py", HIDDEN, timeout=60.0)
SWEPRO = SweProGrading(
    run_script=RUN,
    parser_script=PARSER,
    fail_to_pass=FAIL_TO_PASS,
    pass_to_pass=PASS_TO_PASS,
    selected_test_files=("tests/test_core.py", "tests/test_more.py"),
    files=HIDDEN,
    timeout=60.0,
)
TEST_PATCH = "".join(
    patch_of_contents(path, str(BASE[path]) if path in BASE else None, content.decode())
    for path, content in HIDDEN.items()
).encode()
SWEBENCH = SwebenchGrading(TEST_PATCH, FAIL_TO_PASS, PASS_TO_PASS, timeout=60.0)
R2E = R2EGrading(
    {name.partition("::")[2].replace("::", "."): "PASSED" for name in FAIL_TO_PASS} | {"test_old": "FAILED"},
    {f"r2e_tests/test_{n}.py": content for n, content in enumerate(HIDDEN.values(), 1)},
    timeout=60.0,
)
TEST_SH = b"""\
cd /workspace/calc
if python3 -m pytest -q -p no:cacheprovider /tests/test_core.py /tests/test_more.py; then
    echo 1 > /logs/verifier/reward.txt
else
    echo 0 > /logs/verifier/reward.txt
fi
"""
BY_NAME = {path.rpartition("/")[2]: content for path, content in HIDDEN.items()}
IMPORTS = b"import sys\nsys.path.insert(0, '/workspace/calc')\n"
HARBOR = HarborGrading({"test.sh": TEST_SH, "conftest.py": IMPORTS, **BY_NAME}, timeout=60.0)

FORMS: dict[str, Grading] = {
    "pytest": GRADING,
    "command": COMMAND,
    "script": ScriptGrading(SCRIPT, timeout=60.0),
    "swepro": SWEPRO,
    "swebench": SWEBENCH,
    "r2e": R2E,
    "harbor": HARBOR,
}
