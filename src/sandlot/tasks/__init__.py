"""Task, and one loader per dataset form."""

from sandlot.tasks.load import LOADERS, bundled_path, load_tasks
from sandlot.tasks.task import (
    CommandGrading,
    Grading,
    PytestGrading,
    Repository,
    ScriptGrading,
    SweProGrading,
    Task,
    TaskLimits,
)

__all__ = [
    "LOADERS",
    "CommandGrading",
    "Grading",
    "PytestGrading",
    "Repository",
    "ScriptGrading",
    "SweProGrading",
    "Task",
    "TaskLimits",
    "bundled_path",
    "load_tasks",
]
