"""Judges the report by itself; the reward is a number between 0 and 1."""

import json
import re
from collections import Counter
from pathlib import Path

files = [re.findall("[a-z]+", path.read_text().lower()) for path in sorted(Path("/app/letters").glob("*.txt"))]
spread = Counter(word for words in files for word in set(words))
total = Counter(word for words in files for word in words)
wanted = {word: total[word] for word, count in spread.items() if count > 1}
try:
    found = json.loads(Path("/app/report.json").read_text())
    right = isinstance(found, dict) and found == wanted
except (OSError, ValueError):
    right = False
Path("/logs/verifier/reward.txt").write_text(f"{float(right)}\n")
