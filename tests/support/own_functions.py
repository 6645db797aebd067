"""Functions of trainers taken out of their installed source, where importing the package needs a GPU's whole stack."""

from __future__ import annotations

import ast
import importlib.util
import logging
from pathlib import Path
from typing import Any


def own_functions(package: str, file: str, *names: str, **known: Any) -> dict[str, Any] | None:
    """The functions `names` of a source file of `package`, None where it is not there. `known` are names they use."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(next(iter(spec.submodule_search_locations))) / file
    tree = ast.parse(path.read_text("utf-8"))
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names]
    scope: dict[str, Any] = {"Any": Any, "logger": logging.getLogger(package), **known}
    exec(compile(tree, str(path), "exec"), scope)
    return {name: scope[name] for name in names}
