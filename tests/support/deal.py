"""Deal what must be tried round what it can be tried on."""

from __future__ import annotations

from collections.abc import Iterable


def dealt(places: Iterable[str], things: Iterable[str]) -> dict[str, list[str]]:
    """Each of the things at one of the places, as evenly as can be."""
    names, all_things = list(places), list(things)
    return {name: all_things[turn :: len(names)] for turn, name in enumerate(names)}
