#!/bin/sh
# Make (once) an environment with Harbor, which needs Python 3.12 or newer, and print its interpreter: the tests of the
# bridge to it run there. Exit 1 where there is no such Python.
# usage: SANDLOT_TEST_HARBOR_PYTHON=$(tools/harbor-env.sh [PYTHON])
set -eu
cd "$(dirname "$0")/.."
home="${XDG_CACHE_HOME:-$HOME/.cache}/sandlot/harbor-1"
if [ ! -e "$home/.installed" ]; then
    for python in "$@" python3.13 python3.12 python3 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[2-9].*/bin/python3; do
        "$python" -c 'import sys, venv; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && break
        python=
    done
    if [ -z "$python" ]; then
        echo "Harbor needs Python 3.12 or newer, and there is none here; name one: $0 /path/to/python3" >&2
        exit 1
    fi
    rm -rf "$home"
    "$python" -m venv "$home" >&2
    "$home/bin/python" -m pip install --quiet 'harbor==0.26.*' pytest pytest-asyncio pytest-timeout hypothesis >&2
    touch "$home/.installed"
fi
# The checkout at hand, whatever was there before.
"$home/bin/python" -m pip install --quiet --editable . >&2
echo "$home/bin/python"
