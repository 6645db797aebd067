"""Task, and one loader per dataset form."""

from sandlot.tasks.load import LOADERS, Loaded, bundled_path, load_all, load_tasks
from sandlot.tasks.task import (
    CommandGrading,
    Grading,
    GradingOptions,
    HarborGrading,
    Mutation,
    PytestGrading,
    R2EGrading,
    Repository,
    ScriptGrading,
    SwebenchGrading,
    SweProGrading,
    Task,
    TaskLimits,
)

__all__ = [
    "LOADERS",
    "CommandGrading",
    "Grading",
    "GradingOptions",
    "HarborGrading",
    "Loaded",
    "Mutation",
    "PytestGrading",
    "R2EGrading",
    "Repository",
    "ScriptGrading",
    "SweProGrading",
    "SwebenchGrading",
    "Task",
    "TaskLimits",
    "bundled_path",
    "load_all",
    "load_tasks",
]
