import pytest

from stencil.errors import TemplateError
from stencil.nodes import For, If, Print, Text
from stencil.parser import parse


def test_tree():
    assert parse("{% for x in xs %}{% if x %}{{ x | upper }}{% else %}-{% end %}{% end %}") == [
        For("x", "xs", [If("x", [Print("x", ["upper"], 1)], [Text("-")], 1)], [], 1)
    ]


@pytest.mark.parametrize("source", ["{% end %}", "{% if x %}", "{% for x %}{% end %}", "{{ 1 + 1 }}"], ids=range(4))
def test_bad_templates(source):
    with pytest.raises(TemplateError, match="line 1"):
        parse(source)
