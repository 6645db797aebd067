"""Roman numbers."""

SIGNS = {"I": 1, "V": 5, "X": 10, "L": 50, "C": 100, "D": 500, "M": 1000}


def value(text):
    return sum(SIGNS[sign] for sign in text.upper())
