#!/bin/bash
cat > /app/units.py <<'END'
FACTORS = {"m": 1.0, "cm": 0.01, "km": 1000.0, "in": 0.0254, "ft": 0.3048}


def convert(number, unit, to):
    return number * FACTORS[unit] / FACTORS[to]
END
