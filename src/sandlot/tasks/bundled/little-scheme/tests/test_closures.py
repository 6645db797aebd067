import pytest

from parens import SchemeError, global_scope, run

LOOP = "(define (loop n) {}) (loop 20000)"


def test_counters_are_apart():
    text = """
    (define (make-counter)
      (let ((n 0))
        (lambda () (set! n (+ n 1)) n)))
    (define a (make-counter))
    (define b (make-counter))
    (a) (a) (b)
    (list (a) (b))
    """
    assert run(text) == [3, 2]


def test_free_names_are_found_where_written():
    assert run("(define x 1) (define (f) x) (let ((x 2)) (f))") == 1


def test_parameters_of_the_caller_are_hidden():
    assert run("(define x 1) (define (f) x) (define (g x) (f)) (g 5)") == 1
    with pytest.raises(SchemeError, match="unknown name 'y'"):
        run("(define (f) y) (define (g y) (f)) (g 5)")


def test_a_function_that_makes_functions():
    assert run("(define (adder n) (lambda (x) (+ x n))) (map (adder 10) '(1 2))") == [11, 12]
    assert run("(define (adder n) (lambda (x) (+ x n))) (let ((n 100)) ((adder 1) 1))") == 2


def test_inner_definitions_see_the_parameters():
    assert run("(define (f x) (define (g y) (+ x y)) (g 10)) (f 1)") == 11


def test_later_definitions_are_seen():
    assert run("(define (f) (g)) (define (g) 7) (f)") == 7


def test_set_changes_the_outer_variable():
    assert run("(define n 0) (define (tick) (set! n (+ n 1))) (tick) (tick) n") == 2
    assert run("(let ((n 1)) (let ((m 2)) (set! n (+ n m))) n)") == 3


def test_set_prefers_the_innermost():
    assert run("(define n 0) (let ((n 1)) (set! n 5)) n") == 0


def test_set_of_an_unknown_name():
    scope = global_scope()
    with pytest.raises(SchemeError, match="unknown name 'n'"):
        run("(define (f) (set! n 1)) (f)", scope)
    with pytest.raises(SchemeError, match="unknown name 'n'"):
        run("n", scope)


def test_tail_call_in_if():
    assert run(LOOP.format("(if (= n 0) 'done (loop (- n 1)))")) == "done"


def test_tail_call_in_cond_and_begin():
    assert run(LOOP.format("(cond ((= n 0) 'done) (else 1 (begin 2 (loop (- n 1)))))")) == "done"


def test_tail_call_in_let():
    assert run(LOOP.format("(let ((m (- n 1))) 0 (if (< m 0) 'done (loop m)))")) == "done"


def test_tail_call_in_and_and_or():
    assert run(LOOP.format("(or (= n 0) (and #t (loop (- n 1))))")) is True


def test_two_functions_that_call_each_other():
    text = """
    (define (even n) (if (= n 0) #t (odd (- n 1))))
    (define (odd n) (if (= n 0) #f (even (- n 1))))
    (even 20001)
    """
    assert run(text) is False


def test_tail_call_through_a_parameter():
    assert run("(define (go f n) (if (= n 0) 'done (f f (- n 1)))) (go go 20000)") == "done"


def test_too_deep():
    with pytest.raises(SchemeError, match="too deep"):
        run("(define (count n) (if (= n 0) 0 (+ 1 (count (- n 1))))) (count 100000)")


def test_nested_calls_still_work():
    assert run("(define (count n) (if (= n 0) 0 (+ 1 (count (- n 1))))) (count 100)") == 100


def test_empty_and_or():
    assert run("(list (and) (or))") == [True, False]
