import pytest

from stencil import TemplateError, render


def test_loop_variable_does_not_leak():
    assert render("{% for x in items %}{{ x }},{% end %}{{ x }}", items=[1, 2], x="outer") == "1,2,outer"


def test_loop_variable_is_unknown_afterwards():
    with pytest.raises(TemplateError, match="unknown name 'x'"):
        render("{% for x in items %}{% end %}{{ x }}", items=[1])


def test_loop_is_unknown_afterwards():
    with pytest.raises(TemplateError, match="unknown name"):
        render("{% for x in items %}{% end %}{{ loop.index }}", items=[1])


def test_inner_loop_keeps_the_outer_counter():
    source = "{% for a in rows %}{% for b in a %}.{% end %}{{ loop.index }} {% end %}"
    assert render(source, rows=[[1, 2, 3], []]) == "...1 2 "


def test_inner_loop_keeps_the_outer_variable():
    source = "{% for x in rows %}{% for x in x %}{{ x }}{% end %}{{ x | length }};{% end %}"
    assert render(source, rows=["ab", "c"]) == "ab2;c1;"


def test_last_of_nested_loops():
    source = "{% for a in rows %}{% for b in a %}{{ b }}{% end %}{% if loop.last %}.{% else %},{% end %}{% end %}"
    assert render(source, rows=["ab", "cd"]) == "ab,cd."


def test_set_in_a_loop_is_seen_after_it():
    assert render("{% for x in xs %}{% set n = x %}{% end %}{{ n }}", xs=[1, 2, 3]) == "3"


def test_set_in_nested_loops_is_seen_after_them():
    source = "{% for a in rows %}{% for b in a %}{% set n = b %}{% end %}{{ n }};{% end %}{{ n }}"
    assert render(source, rows=["ab", "cd"], n="-") == "b;d;d"


def test_set_of_the_loop_variable_stays_inside():
    source = "{% for x in xs %}{% set x = y %}{{ x }}{% end %}{{ x }}"
    assert render(source, xs=[1, 2], x="outer", y="new") == "newnewouter"


def test_else_of_an_empty_loop():
    assert render("{% for x in xs %}{{ x }}{% else %}none{% end %}", xs=[]) == "none"


def test_no_else_after_items():
    assert render("{% for x in xs %}{{ x }}{% else %}none{% end %}", xs=[1]) == "1"


def test_falsy_values_are_known():
    assert render("[{{ a }}{{ b }}{{ c }}]", a=0, b=None, c="") == "[0]"
    assert render("{% if a %}yes{% else %}no{% end %}", a=[]) == "no"


def test_else_sees_the_outer_names():
    assert render("{% for x in xs %}{% else %}{{ x }}{% end %}", xs=(), x="outer") == "outer"
