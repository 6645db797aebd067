"""Its being here puts `tests/` on the import path, so that tests can say `from support.toy_model import …`.

Hypothesis profiles: `dev` by default, `ci` where the environment says CI, `deep` by `--hypothesis-profile=deep`.
"""

import os

from hypothesis import HealthCheck, settings

_SHARED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "print_blob": True}

settings.register_profile("dev", max_examples=100, **_SHARED)
settings.register_profile("ci", max_examples=2_000, **_SHARED)
settings.register_profile("deep", max_examples=100_000, **_SHARED)
settings.load_profile("ci" if os.environ.get("CI") else "dev")
