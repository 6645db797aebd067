import pytest

from parens import SchemeError, global_scope, run


def test_arithmetic():
    assert run("(+ 1 (* 2 3) (- 4))") == 3
    assert run("(/ 6 4)") == 1.5
    assert run("(< 1 2 3)") is True


def test_functions():
    assert run("(define (square x) (* x x)) (square 12)") == 144
    assert run("((lambda (a b) (- a b)) 5 3)") == 2


def test_recursion():
    assert run("(define (fact n) (if (= n 0) 1 (* n (fact (- n 1))))) (fact 10)") == 3628800


def test_forms():
    assert run("(cond ((> 1 2) 'a) ((< 1 2) 'b) (else 'c))") == "b"
    assert run("(and 1 2)") == 2
    assert run("(or #f 3)") == 3
    assert run("(let ((x 1) (y 2)) (+ x y))") == 3
    assert run("(begin 1 2 3)") == 3


def test_lists():
    assert run("(map (lambda (n) (+ n 1)) '(1 2 3))") == [2, 3, 4]
    assert run("(filter (lambda (n) (> n 1)) '(1 2 3))") == [2, 3]
    assert run("(cons 1 (cdr '(2 3)))") == [1, 3]


def test_a_scope_can_be_kept():
    scope = global_scope()
    run("(define x 1)", scope)
    run("(set! x (+ x 1))", scope)
    assert run("x", scope) == 2


@pytest.mark.parametrize("text", ["y", "(1 2)", "()", "((lambda (x) x))", "(if)", "(car '())"], ids=range(6))
def test_errors(text):
    with pytest.raises(SchemeError):
        run(text)
