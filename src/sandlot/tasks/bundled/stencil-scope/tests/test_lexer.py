import pytest

from stencil.errors import TemplateError
from stencil.lexer import tokenize


def test_kinds():
    kinds = [(t.kind, t.text, t.line) for t in tokenize("a\n{{ b }}{% if c %}\nd")]
    assert kinds == [("text", "a\n", 1), ("print", "b", 2), ("tag", "if c", 2), ("text", "\nd", 2)]


def test_empty_tag():
    with pytest.raises(TemplateError, match="line 2"):
        list(tokenize("\n{{ }}"))
