"""What a simple command does that an agent need not: search history, reach a network, change files.

A command is a list of words, as `shell.simple_commands` gives it.
"""

from __future__ import annotations

import re

GIT_FILES = re.compile(r"\.git/(?:packed-refs|logs|objects|ORIG_HEAD|FETCH_HEAD|refs/(?:remotes|tags|stash))")
_GIT_VALUES = {"-C", "-c", "--git-dir", "--work-tree"}
_ELSEWHERE = re.compile(
    r"(?:^|\.\.|\b(?:refs/)?remotes/)(?:origin|upstream)/|@\{|\b(?:ORIG_HEAD|FETCH_HEAD)\b|^refs/(?:remotes|tags|stash)"
)
_EVERYTHING = re.compile(r"--(?:all|reflog|branches|remotes|tags|glob|walk-reflogs)(?:=|$)|-g$")
_READS_HISTORY = {
    "log", "rev-list", "show", "grep", "shortlog", "whatchanged", "diff", "blame", "checkout", "restore", "cherry-pick",
    "merge", "rebase", "archive", "rev-parse", "merge-base", "format-patch", "reset",
}  # fmt: skip
_LISTS_REFS = {"reflog", "fsck", "for-each-ref", "show-ref", "unpack-objects", "verify-pack", "name-rev"}
_LOCAL = r"(?!(?:localhost|127\.|0\.0\.0\.0|\[::1\]|host\.docker\.internal))"
_URL = re.compile(rf"(?:https?|ftp|ssh|git)://{_LOCAL}[^\s/'\"$]*\.\w{{2,}}")
_HOST = re.compile(rf"(?:\w+@)?{_LOCAL}[\w-]+(?:\.[\w-]+)*\.(?:com|org|net|io|dev|ai|co|edu|gov|app|sh)(?:[:/]|$)")
_CLIENTS = {"curl", "wget", "aria2c", "http", "https", "lynx", "w3m", "ssh", "scp", "rsync", "telnet", "nc", "ncat"}
_IN_CODE = re.compile(
    r"(?:urlopen|urlretrieve|requests\.\w+|httpx\.\w+|fetch|create_connection|HTTPSConnection)\(|/dev/tcp/"
)
_INSTALLERS: dict[str, set[str]] = {
    "pip": {"install", "download", "index"},
    "pip3": {"install", "download", "index"},
    "uv": {"add"},
    "pipx": {"install", "run"},
    "npm": {"install", "add", "i", "view", "pack"},
    "pnpm": {"install", "add", "i", "view"},
    "yarn": {"add", "info"},
    "cargo": {"install", "add", "search"},
    "go": {"install", "get"},
    "apt": {"install", "update", "download"},
    "apt-get": {"install", "update", "download"},
    "apk": {"add"},
    "dnf": {"install"},
    "yum": {"install"},
    "conda": {"install"},
    "mamba": {"install"},
}
_OPTIONS_WITH_VALUES = {
    "-r", "-c", "-e", "-i", "-t", "--requirement", "--constraint", "--editable", "--target", "--index-url", "--prefix",
}  # fmt: skip
_PATTERN_FIRST = {"grep", "egrep", "fgrep", "rg", "ag", "ack", "sed", "awk"}
_CHANGERS = {"rm", "mv", "tee", "truncate", "unlink", "patch", "ln", "shred"}
_WRITES_IN_CODE = re.compile(
    r"open\(\s*[\"'](?P<a>[^\"']+)[\"']\s*,\s*[\"'][wax]|Path\(\s*[\"'](?P<b>[^\"']+)[\"']\s*\)\.(?:write|unlink|rename)"
    r"|(?:remove|unlink|rmtree|rename)\(\s*[\"'](?P<c>[^\"']+)[\"']|writeFileSync\(\s*[\"'](?P<d>[^\"']+)[\"']"
)


def name_of(words: list[str]) -> str:
    return words[0].rpartition("/")[2]


def git_of(words: list[str]) -> tuple[str, list[str]]:
    """The subcommand of git and its arguments; two times nothing for other commands."""
    if name_of(words) != "git":
        return "", []
    rest = words[1:]
    while rest and rest[0].startswith("-"):
        rest = rest[2:] if rest[0] in _GIT_VALUES else rest[1:]
    return (rest[0], rest[1:]) if rest else ("", [])


def stashes(words: list[str]) -> bool:
    sub, rest = git_of(words)
    return sub == "stash" and (not rest or rest[0] in ("push", "save") or rest[0].startswith("-"))


def searches_history(words: list[str], stashed: bool) -> bool:
    """Whether a command looks for what is not the past of the checked-out commit."""
    if any(GIT_FILES.search(word) for word in named(words)):
        return True
    sub, rest = git_of(words)
    if sub in _LISTS_REFS:
        return True
    if sub == "cat-file":
        return "--batch-all-objects" in rest
    if sub == "stash":
        return not stashed and bool(rest) and rest[0] in ("list", "show", "pop", "apply")
    if sub == "branch":
        return any(re.fullmatch(r"-\w*[ar]\w*|--all|--remotes|--contains.*", word) for word in rest)
    if sub == "tag":
        return not [word for word in rest if not word.startswith("-")] or bool(
            {"-l", "--list", "--contains"} & set(rest)
        )
    before_paths = rest[: rest.index("--")] if "--" in rest else rest
    return sub in _READS_HISTORY and any(_EVERYTHING.match(word) or _ELSEWHERE.search(word) for word in before_paths)


def reaches_out(words: list[str]) -> bool:
    """Whether a command tries to reach another machine."""
    name, rest = name_of(words), words[1:]
    sub, given = git_of(words)
    if sub:
        whole = {"clone", "fetch", "pull", "ls-remote", "push"}
        return sub in whole or (sub in ("submodule", "remote") and "update" in given)
    if re.fullmatch(r"python[\d.]*", name) and rest[:2] and rest[0] == "-m":
        name, rest = rest[1], rest[2:]
    if name == "uv" and rest[:1] == ["pip"]:
        name, rest = "pip", rest[1:]
    if name in _CLIENTS:
        return any(_URL.search(word) or _HOST.match(word) for word in rest)
    if name == "gh":
        return bool(rest)
    if name in _INSTALLERS:
        places = [number for number, word in enumerate(rest) if word in _INSTALLERS[name]]
        return bool(places) and (name in ("apt", "apt-get") or bool(_positional(rest[places[0] + 1 :])))
    if name in ("echo", "printf", *_PATTERN_FIRST):
        return False
    calls = any(_IN_CODE.search(word) and (_URL.search(word) or _HOST.search(word)) for word in rest)
    return calls or any("/dev/tcp/" in word for word in words)


def _positional(words: list[str]) -> list[str]:
    """The packages among the arguments of an installer: neither options nor what lies on this machine."""
    found, skip = [], False
    for word in words:
        if not skip and not word.startswith(("-", ".", "/", "<", ">")) and not word.endswith((".whl", ".tar.gz", "/")):
            found.append(word)
        skip = word in _OPTIONS_WITH_VALUES or word in (">", ">>", "2>")
    return found


def named(words: list[str]) -> list[str]:
    """The words that may name a file or hold code: not what is printed, and not what is searched for."""
    name = name_of(words)
    if name in ("echo", "printf"):
        return _redirected(words)
    if name in _PATTERN_FIRST:
        return _files_after_pattern(words)
    return words


def _files_after_pattern(words: list[str]) -> list[str]:
    plain = [word for word in words[1:] if not word.startswith("-")]
    return plain if name_of(words) in ("sed", "awk") and "-f" in words else plain[1:]


def _redirected(words: list[str]) -> list[str]:
    """Where a command's output goes."""
    found: list[str] = []
    for number, word in enumerate(words):
        if match := re.fullmatch(r"\d?>>?\|?(.*)", word):
            found += [match[1]] if match[1] else words[number + 1 : number + 2]
    return found


def written(words: list[str]) -> list[str]:
    """The paths that a command writes, moves or removes."""
    name = name_of(words)
    found = _redirected(words)
    if name in _CHANGERS:
        found += words[1:]
    elif name in ("cp", "install", "rsync"):
        found += words[-1:]
    elif name in ("sed", "perl") and any(re.match(r"-\w*i|--in-place", word) for word in words):
        found += _files_after_pattern(words)
    elif git_of(words)[0] in ("rm", "mv"):
        found += git_of(words)[1]
    elif name not in ("echo", "printf", *_PATTERN_FIRST):
        found += [path for word in words for match in _WRITES_IN_CODE.finditer(word) for path in match.groups() if path]
    return found
