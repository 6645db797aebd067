from inkwell import dumps, loads


def test_layout():
    assert dumps({"a": {"x": "1", "y": ""}, "": {"top": "0"}}) == "top = 0\n\n[a]\nx = 1\ny =\n"


def test_lines_and_tabs_are_escaped():
    config = {"a": {"x": "one\ntwo\tthree"}}
    assert dumps(config) == '[a]\nx = "one\\ntwo\\tthree"\n'
    assert loads(dumps(config)) == config
