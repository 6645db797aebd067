#!/bin/sh
# Make the virtual environment, and install the Debian packages that are missing where we may.
# usage: prepare.sh PYTHON VENV [COMMAND[:PACKAGE]…]; commands of Debian packages that tests can do without
set -eu
python=$1 venv=$2
shift 2

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "Sandlot needs Python 3.11 or newer; '$python' is not: name another with make PYTHON=/path/to/python3" >&2
    exit 1
fi

missing=""
command -v git >/dev/null || missing="$missing git"
command -v nsenter >/dev/null || missing="$missing util-linux"
"$python" -c 'import ensurepip, venv' 2>/dev/null || missing="$missing python3-venv"
if [ -n "$missing" ]; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "installing Debian packages:$missing"
        apt-get update -qq
        # shellcheck disable=SC2086 # one word per package
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
    else
        echo "missing on this machine:$missing; install them (on Debian: apt-get install$missing) and run this again" >&2
        exit 1
    fi
fi

for wished in "$@"; do
    command=${wished%%:*} package=${wished##*:}
    command -v "$command" >/dev/null && continue
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null &&
        { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$package"; } >/dev/null 2>&1; then
        echo "installed the Debian package $package"
    else
        echo "$command is not here: the tests that use it are skipped" >&2
    fi
done

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
