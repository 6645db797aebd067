"""SkyRL's own `validate_generator_output`, taken out of its source: importing its package needs a GPU's whole stack."""

from __future__ import annotations

import ast
import importlib.util
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

_FUNCTIONS = ("validate_generator_output", "_validate_step_wise_fields")


def own_validator() -> Callable[..., None] | None:
    """The function, or None where SkyRL is not installed."""
    spec = importlib.util.find_spec("skyrl")
    if spec is None or not spec.submodule_search_locations:
        return None
    file = Path(next(iter(spec.submodule_search_locations))) / "train" / "utils" / "trainer_utils.py"
    tree = ast.parse(file.read_text("utf-8"))
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in _FUNCTIONS]
    names: dict[str, Any] = {"np": np, "logger": logging.getLogger("skyrl"), "GeneratorOutput": dict}
    exec(compile(tree, str(file), "exec"), names)
    found: Callable[..., None] = names["validate_generator_output"]
    return found
