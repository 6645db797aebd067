#!/bin/sh
# Make (once) an environment with the SDKs of the clouds, and print its interpreter: the tests of the adapters with these,
# and with servers that speak their wires, run there.
# usage: SANDLOT_TEST_CLOUDS_PYTHON=$(tools/clouds-env.sh [PYTHON3.11])
set -eu
cd "$(dirname "$0")/.."
python=${1:-python3}
home="${XDG_CACHE_HOME:-$HOME/.cache}/sandlot/clouds-1"
if [ ! -e "$home/.installed" ]; then
    rm -rf "$home"
    "$python" -m venv "$home" >&2
    "$home/bin/python" -m pip install --quiet 'e2b==2.63.*' 'modal==1.6.*' 'daytona==0.226.*' 'k8s-agent-sandbox[async]==1.0.*' \
        uvicorn pytest pytest-asyncio pytest-timeout hypothesis >&2
    touch "$home/.installed"
fi
# The checkout at hand, whatever was there before.
"$home/bin/python" -m pip install --quiet --editable . >&2
echo "$home/bin/python"
