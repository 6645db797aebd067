"""Match required test names with the tests that ran."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from sandlot.errors import GradingError
from sandlot.tasks.task import PytestGrading, SwebenchGrading, SweProGrading

PASSED, FAILED, ERROR, SKIPPED, MISSING = "passed", "failed", "error", "skipped", "missing"
_WORST_FIRST = (FAILED, ERROR, SKIPPED, MISSING)


def required_tests(grading: PytestGrading | SweProGrading | SwebenchGrading) -> list[str]:
    """The tests that must pass. None at all is an error: every patch would have solved the task."""
    required = [*grading.fail_to_pass, *grading.pass_to_pass]
    if not required:
        raise GradingError("the task names no test that must pass")
    return required


def match(required: Iterable[str], ran: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """What became of each required test, and the repairs that were needed to tell.

    `ran` maps full test names to results. Trailing blanks do not count on either side. Data sets cut names of
    parametrised tests at a blank: a name with an unclosed `[` stands for every test it could mean, and all of them must
    have passed. A name that fits nothing is `missing`.
    """
    by_name: dict[str, str] = {}
    for name, result in ran.items():
        by_name[name.rstrip()] = worst([result, by_name.get(name.rstrip(), result)])
    results, repairs = {}, []
    for name in required:
        exact = name.rstrip()
        if exact in by_name:
            results[name] = by_name[exact]
            continue
        meant = [other for other in by_name if other.startswith(exact)] if is_cut(exact) else []
        if meant:
            repairs.append(
                f"{name!r} is cut short and was taken for {len(meant)} tests: {', '.join(sorted(meant)[:20])}"
            )
        results[name] = worst([by_name[other] for other in meant])
    return results, repairs


def function_of(name: str) -> str:
    """The plain function name in the full name of a test: of pytest (`::`), R2E-Gym (`.`) or unittest (`name (…)`)."""
    return re.sub(r"[\[\s].*", "", name, flags=re.DOTALL).rpartition("::")[2].rpartition(".")[2]


def lies_in(name: str, path: str) -> bool:
    """Whether a test of that full name can be of the file `path`. Either may lack directories in front; names of
    unittest tell a module, and R2E-Gym's nothing."""
    file, parted, _ = name.partition("::")
    if parted:
        return f"/{file}".endswith(f"/{path}") or f"/{path}".endswith(f"/{file}")
    if module := re.search(r"\(([\w.]+)\)", name):
        parts = module[1].split(".")
        dotted = "." + path.removesuffix(".py").replace("/", ".")
        return any(dotted.endswith("." + ".".join(parts[:length])) for length in range(1, len(parts) + 1))
    return True


def is_cut(name: str) -> bool:
    """Whether the name's parameter part was opened and never closed."""
    return "[" in name and not name.endswith("]")


def worst(results: Iterable[str]) -> str:
    """The worst of some results; of none, `missing`."""
    found = list(results)
    for result in _WORST_FIRST:
        if result in found:
            return result
    return PASSED if found else MISSING
