#!/bin/bash
# Runs the test files named in the first argument (with commas between them), or all of them.
python3 -m pytest -v -p no:cacheprovider ${1//,/ }
