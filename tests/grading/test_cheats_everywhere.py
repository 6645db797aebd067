"""The same ways to look solved, tried on every other form of grading; and some that only a verifier's place allows."""

from __future__ import annotations

import pytest

from sandlot.grading import grade
from sandlot.sandbox import SandboxBackend
from support.cheats import CHEATS, EVERYWHERE, at_import, calc_patch, calc_task, in_add
from support.deal import dealt
from support.forms import FORMS

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

PLANTS = """
import os
for name, text in (("reward.json", '{"reward": 1.0}'), ("reward.txt", "1")):
    try:
        open("/logs/verifier/" + name, "w").write(text)
        os.chmod("/logs/verifier/" + name, 0o444)
    except OSError:
        pass
"""
ON_HARBOR = {
    "plants_and_leaves": at_import(PLANTS + "os._exit(0)"),
    "plants_at_the_end": at_import(f"import atexit\natexit.register(exec, {PLANTS!r})"),
    "plants_and_kills_the_verifier": in_add(PLANTS + "\nimport os\nos.kill(os.getppid(), 9)"),
    "plants_from_a_daemon": at_import(
        f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1)' + {PLANTS!r}], "
        "start_new_session=True)"
    ),
}


ALIKE = dealt(("swebench", "r2e"), EVERYWHERE)
"""These two run named tests as the form `pytest` does, on which all cheats are tried."""


@pytest.mark.parametrize(
    ("form", "cheat"), [(form, cheat) for form in FORMS if form != "pytest" for cheat in ALIKE.get(form, EVERYWHERE)]
)
async def test_a_cheat_earns_nothing(backend: SandboxBackend, form: str, cheat: str) -> None:
    verdict = await grade(calc_task(FORMS[form]), calc_patch(CHEATS[cheat]), backend)
    assert verdict.reward == 0.0, (verdict.failure, verdict.detail, verdict.evidence)


@pytest.mark.parametrize("cheat", ON_HARBOR)
async def test_a_planted_reward_earns_nothing(backend: SandboxBackend, cheat: str) -> None:
    verdict = await grade(calc_task(FORMS["harbor"]), calc_patch(ON_HARBOR[cheat]), backend)
    assert verdict.reward == 0.0, (verdict.failure, verdict.detail, verdict.evidence)
