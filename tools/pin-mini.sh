#!/bin/sh
# Make the hashed pins of the mini-swe-agent layer anew.
# usage: tools/pin-mini.sh [--upgrade]
set -eu
cd "$(dirname "$0")/.."
uv=${UV:-.venv/bin/uv}
out=src/sandlot/harness/mini_swe_agent.txt
box=$(mktemp -d)
trap 'rm -rf "$box"' EXIT
printf 'mini-swe-agent==2.4.6\nlitellm==1.110.0\n' >"$box/wanted.txt"
# Its dependencies that no unattended run imports: a marker that never holds leaves them out, and theirs.
for unused in boto3 datasets hf-xet huggingface-hub textual tokenizers; do
    echo "$unused; sys_platform == 'never'"
done >"$box/unused.txt"
"$uv" pip compile "$box/wanted.txt" --override "$box/unused.txt" --universal --python-version 3.11 --generate-hashes \
    --no-emit-index-url --no-emit-find-links --no-header --no-annotate --quiet -o "$box/pins.txt" "${@}"
{
    echo "# What mini-swe-agent runs with, written by tools/pin-mini.sh."
    # A pin and its hashes are one record; those that no Linux machine needs go.
    awk '/^[^ ]/ { keep = !/== .(never|win32|emscripten)./ } keep' "$box/pins.txt"
} >"$out"
