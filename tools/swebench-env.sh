#!/bin/sh
# Make (once) an environment with the official `swebench` package, and print its interpreter.
# usage: SANDLOT_TEST_SWEBENCH_PYTHON=$(tools/swebench-env.sh [PYTHON3.11])
set -eu
cd "$(dirname "$0")/.."
python=${1:-python3.11}
home="${XDG_CACHE_HOME:-$HOME/.cache}/sandlot/swebench-1"
if [ ! -e "$home/.installed" ]; then
    rm -rf "$home"
    "$python" -m venv "$home" >&2
    "$home/bin/python" -m pip install --quiet pytest pytest-asyncio pytest-timeout hypothesis >&2
    touch "$home/.installed"
fi
# The checkout at hand, whatever was there before.
"$home/bin/python" -m pip install --quiet --editable '.[swebench]' >&2
echo "$home/bin/python"
