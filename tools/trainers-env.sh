#!/bin/sh
# Make (once) an environment with the trainers whose own code the tests use, and print its interpreter.
# usage: SANDLOT_TEST_TRAINERS_PYTHON=$(tools/trainers-env.sh [PYTHON3.11])
set -eu
cd "$(dirname "$0")/.."
python=${1:-python3.11}
home="${XDG_CACHE_HOME:-$HOME/.cache}/sandlot/trainers-3"
if [ ! -e "$home/.installed" ]; then
    rm -rf "$home"
    "$python" -m venv "$home" >&2
    pip() { "$home/bin/python" -m pip install --quiet "$@" >&2; }
    pip torch==2.13.0
    pip 'trl==1.16.*' 'tinker==0.38.*' requests ray 'tensordict<=0.10' hydra-core codetiming cachetools pillow \
        uvicorn fastapi pytest pytest-asyncio pytest-timeout hypothesis
    # What the types below import; their own requirements are whole agent frameworks.
    pip 'fastmcp>=3.4,<4' 'openai>=2.54,<3' 'anthropic>=2' math-verify prime-pydantic-config prime-sandboxes
    pip --no-deps verl==0.9.1 skyrl==0.3.0 areal==1.0.4 openenv==0.10.0 verifiers==0.4.0 'renderers==0.1.*'
    pip --no-deps --ignore-requires-python harbor==0.26.0 # its models of trajectories run on 3.11 as well
    touch "$home/.installed"
fi
# The checkout at hand, whatever was there before.
"$home/bin/python" -m pip install --quiet --editable '.[engine]' >&2
echo "$home/bin/python"
