"""How many examples a property test gets where the profile's number (see `conftest.py`) is more than it needs."""

from hypothesis import settings

few = settings(max_examples=settings.default.max_examples // 4)
"""For properties of one room's inputs; what the token contract promises gets the whole number."""
