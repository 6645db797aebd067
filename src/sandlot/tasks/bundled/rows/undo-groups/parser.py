"""Turn the log of `pytest -v` into {"tests": [{"name", "status"}]}: parser.py STDOUT STDERR OUTPUT."""

import json
import re
import sys

LINE = re.compile(r"^(\S+::.+?) (PASSED|FAILED|SKIPPED|ERROR|XFAIL|XPASS)(?: |$)")


def main(stdout_path: str, stderr_path: str, output_path: str) -> None:
    with open(stdout_path, encoding="utf-8", errors="replace") as log:
        found = [match.groups() for match in map(LINE.match, log) if match]
    tests = [{"name": name, "status": status} for name, status in found]
    with open(output_path, "w", encoding="utf-8") as output:
        json.dump({"tests": tests}, output, indent=2)


if __name__ == "__main__":
    main(*sys.argv[1:4])
