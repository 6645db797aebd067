import pytest

from inkwell import IniError, dumps, loads


def one(text):
    return loads("[s]\n" + text + "\n")["s"]["k"]


def test_hash_in_double_quotes():
    assert one('k = "#ff8800"       ; orange') == "#ff8800"


def test_semicolon_in_single_quotes():
    assert one("k = 'a; b'") == "a; b"


def test_escaped_quotes():
    assert one('k = "say \\"hi\\" # twice"') == 'say "hi" # twice'


def test_the_other_quote_inside():
    assert one('k = "it\'s" # fine') == "it's"


def test_backslash_before_the_closing_quote():
    assert one('k = "C:\\\\" ; drive') == "C:\\"


def test_comment_right_behind_the_quote():
    assert one("k = 'x'# y") == "x"


def test_text_behind_the_quote():
    with pytest.raises(IniError) as caught:
        loads("[s]\n\nk = 'a' b\n")
    assert caught.value.line == 3


@pytest.mark.parametrize("value", ['"', '"open', "'open\"", '"open\\"'], ids=range(4))
def test_open_quote(value):
    with pytest.raises(IniError) as caught:
        loads("[s]\nk = " + value + "\n")
    assert caught.value.line == 2


def test_hash_inside_a_plain_word():
    assert one("k = http://example.invalid/#top") == "http://example.invalid/#top"
    assert one("k = http://example.invalid/#top # the top") == "http://example.invalid/#top"
    assert one("k = a;b") == "a;b"


def test_value_that_is_only_a_comment():
    assert one("k = # nothing") == ""
    assert one("k =; nothing") == ""


def test_quotes_inside_a_plain_value():
    assert one('k = the "best" one') == 'the "best" one'


def test_comments_elsewhere_stay():
    assert loads("# a\n  ; b\n[s] # c\nk = 1 # d\n  2 ; e\n") == {"s": {"k": "1\n2"}}


@pytest.mark.parametrize(
    "value",
    ["#ff8800", "a ; b", "a;b", '"quoted"', "it's", " padded ", "C:\\temp", "tail\\", 'mix "\\n" \n #', "'", ""],
    ids=range(11),
)
def test_round_trip(value):
    config = {"s": {"k": value, "next": "1"}}
    assert loads(dumps(config)) == config
