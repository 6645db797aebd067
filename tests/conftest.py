"""Its being here puts `tests/` on the import path, so that tests can say `from support.toy_model import …`.

Hypothesis profiles: `dev` by default, `ci` where the environment says CI, `deep` by `--hypothesis-profile=deep`.
"""

import os

import pytest
from hypothesis import HealthCheck, settings

_SHARED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "print_blob": True}

settings.register_profile("dev", max_examples=100, **_SHARED)
settings.register_profile("ci", max_examples=2_000, **_SHARED)
settings.register_profile("deep", max_examples=100_000, **_SHARED)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first, so that no worker is left alone with one of them at the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
