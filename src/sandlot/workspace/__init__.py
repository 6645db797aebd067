"""Preparing a repository, scrubbing its history, capturing and applying a diff."""

from sandlot.workspace.apply import Applied, apply_patch
from sandlot.workspace.capture import PATCH_LIMIT, capture
from sandlot.workspace.patch import Patch
from sandlot.workspace.prepare import Prepared, prepare

__all__ = ["PATCH_LIMIT", "Applied", "Patch", "Prepared", "apply_patch", "capture", "prepare"]
