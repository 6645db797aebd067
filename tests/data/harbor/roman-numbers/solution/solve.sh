#!/bin/bash
cat > /app/roman.py <<'END'
"""Roman numbers."""

SIGNS = {"I": 1, "V": 5, "X": 10, "L": 50, "C": 100, "D": 500, "M": 1000}


def value(text):
    signs = text.upper()
    if bad := set(signs) - set(SIGNS):
        raise ValueError(f"{sorted(bad)[0]!r} is no Roman sign")
    numbers = [SIGNS[sign] for sign in signs]
    return sum(-n if n < after else n for n, after in zip(numbers, [*numbers[1:], 0]))
END
