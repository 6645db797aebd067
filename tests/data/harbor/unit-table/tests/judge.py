"""Each pair of different units is converted in a process of its own; the reward is the share that is right."""

import itertools
import os
import subprocess
import sys

METRES = {"m": 1.0, "cm": 0.01, "km": 1000.0, "in": 0.0254, "ft": 0.3048}
places = int(os.environ["PLACES"])
pairs = list(itertools.permutations(METRES, 2))
right = 0
for unit, to in pairs:
    code = f"from units import convert; print(repr(float(convert(7.0, {unit!r}, {to!r}))))"
    done = subprocess.run([sys.executable, "-c", code], cwd="/app", capture_output=True, text=True, timeout=20)
    try:
        right += round(float(done.stdout) - 7.0 * METRES[unit] / METRES[to], places) == 0
    except ValueError:
        pass
print(right / len(pairs))
