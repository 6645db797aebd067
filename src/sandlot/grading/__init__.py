"""One grader per grading form, in a sandbox of its own; Verdict."""

from sandlot.grading.grade import GRADERS, Grader, grade
from sandlot.grading.runtime import runtime_env, runtime_layers
from sandlot.grading.verdict import Verdict

__all__ = ["GRADERS", "Grader", "Verdict", "grade", "runtime_env", "runtime_layers"]
