"""Simple commands in a shell text, as words: what runs, and what is only quoted or written into a file."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from itertools import pairwise

_HERE = re.compile(
    r"<<-?[ \t]*(['\"]?)(?P<end>\w+)\1(?P<rest>[^\n]*)\n(?P<body>.*?)(?:\n[ \t]*(?P=end)[ \t]*(?=\n|$)|$)", re.DOTALL
)
_ASSIGNMENT = re.compile(r"\w+=")
_BEFORE = {"sudo", "env", "time", "nohup", "exec", "command", "builtin", "then", "do", "else", "if", "elif", "while",
           "until", "!", "{", "xargs", "stdbuf", "nice", "$"}  # fmt: skip
_SHELLS = {"bash", "sh", "zsh", "dash", "ash"}
_RUN_THEIR_INPUT = re.compile(r"\b(?:python[\d.]*|node|perl|ruby|(?:ba|z|da)?sh)\b")
_BETWEEN = re.compile(r"[;|&\n]")
_DEPTH = 4


def simple_commands(text: str, depth: int = 0) -> Iterator[list[str]]:
    """Every simple command of `text`, also of scripts handed to another shell; its words without what stands before it.

    The body of a here-document is no command, unless an interpreter reads it: then it is one word more.
    """
    text, bodies = _without_documents(text)
    words: list[str] = []
    for token in [*_tokens(text), "\n"]:
        if token.strip(";&|()\n"):
            words.append(bodies.get(token, token))
            continue
        if words := _stripped(words):
            script = _script_of(words)
            if script is not None and depth < _DEPTH:
                yield from simple_commands(script, depth + 1)
            else:
                yield words
        words = []


def _without_documents(text: str) -> tuple[str, dict[str, str]]:
    bodies: dict[str, str] = {}

    def taken(match: re.Match[str]) -> str:
        before = text[text.rfind("\n", 0, match.start()) + 1 : match.start()]
        if not _RUN_THEIR_INPUT.search(_BETWEEN.split(before)[-1]):
            return f"{match['rest']}\n"
        name = f"HERE-{len(bodies)}"
        bodies[name] = match["body"] + "\n"
        return f"{match['rest']} {name}\n"

    # With a line break at its end a beginning is always found whole: each that is not would be tried to the end.
    return _HERE.sub(taken, text + "\n"), bodies


def _tokens(text: str) -> list[str]:
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";&|()\n")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    try:
        return list(lexer)
    except ValueError:  # a quote that nothing closes
        return [token for token in re.split(r"([\n;|&()]+)|[ \t\r]+", text) if token]


def _stripped(words: list[str]) -> list[str]:
    while words and (words[0] in _BEFORE or _ASSIGNMENT.match(words[0]) or words[0] == "timeout"):
        words = words[2:] if words[0] == "timeout" else words[1:]
        while len(words) > 1 and words[0].startswith("-"):
            words = words[1:]
    return [words[0].strip("`"), *words[1:]] if words else []


def _script_of(words: list[str]) -> str | None:
    """The script that a shell is handed as an argument or as its input."""
    name = words[0].rpartition("/")[2]
    if name == "eval":
        return " ".join(words[1:])
    if name in _SHELLS:
        for option, value in pairwise(words):
            if re.fullmatch(r"-\w*c", option):
                return value
        if "\n" in words[-1]:
            return words[-1]
    return None
