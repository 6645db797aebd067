#!/bin/sh
# Make the hashed pins in constraints/ anew from pyproject.toml. They record no addresses.
# usage: tools/pin.sh [--upgrade]
set -eu
cd "$(dirname "$0")/.."
uv=${UV:-.venv/bin/uv}
compile() { # out, options…
    out=$1
    shift
    "$uv" pip compile pyproject.toml --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
        --no-emit-find-links --no-header --no-annotate --quiet -o "$out" "$@"
}
compile constraints/run.txt --extra engine --group build "${@}"
compile constraints/dev.txt --extra engine --group build --group dev -c constraints/run.txt "${@}"
