#!/bin/bash
cd /app
python3 - <<'END'
import collections, json, pathlib, re
files = [re.findall("[a-z]+", p.read_text().lower()) for p in pathlib.Path("letters").glob("*.txt")]
spread = collections.Counter(w for words in files for w in set(words))
total = collections.Counter(w for words in files for w in words)
pathlib.Path("report.json").write_text(json.dumps({w: total[w] for w in spread if spread[w] > 1}))
END
