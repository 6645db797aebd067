import pytest

from stencil import TemplateError, render


def test_values_and_filters():
    assert render("Hello {{ user.name | upper }}!", user={"name": "eve"}) == "Hello EVE!"


def test_loop():
    source = "{% for x in xs %}{{ loop.index }}{{ x }}{% if loop.last %}.{% else %},{% end %}{% end %}"
    assert render(source, xs=["a", "b"]) == "1a,2b."


def test_set():
    assert render("{% set n = a.b %}{{ n }}", a={"b": 7}) == "7"


def test_unknown_name():
    with pytest.raises(TemplateError, match="unknown name 'x'"):
        render("{{ x }}")


def test_unknown_filter():
    with pytest.raises(TemplateError, match="unknown filter"):
        render("{{ x | rot13 }}", x="a")
