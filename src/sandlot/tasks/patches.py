"""Patches as text: turned round, or made of two contents."""

from __future__ import annotations

import difflib
import re


class PatchTextError(ValueError):
    """A patch cannot be turned round; the text says why."""


_HUNK = re.compile(rb"^@@ -(\d+(?:,\d+)?) \+(\d+(?:,\d+)?) @@(.*)$", re.DOTALL)
_SWAPS = (
    (b"--- ", b"+++ "),
    (b"new file mode ", b"deleted file mode "),
    (b"old mode ", b"new mode "),
    (b"rename from ", b"rename to "),
)


def reversed_patch(patch: bytes) -> bytes:
    """The unified diff that takes `patch` back."""
    out: list[bytes] = []
    header: list[bytes] = []
    old = new = 0
    lines = patch.split(b"\n")
    for line in lines:
        if old > 0 or new > 0:
            if line.startswith(b"\\"):  # no newline at the end of the old side
                out.append(line)
                continue
            old, new = old - (line[:1] in (b" ", b"-", b"")), new - (line[:1] in (b" ", b"+", b""))
            swapped = {b"-": b"+", b"+": b"-"}.get(line[:1], line[:1])
            out.append(swapped + line[1:])
        elif match := _HUNK.match(line):
            out += _turned(header)
            header = []
            old, new = _length(match[1]), _length(match[2])
            out.append(b"@@ -%s +%s @@%s" % (match[2], match[1], match[3]))
        elif line.startswith(b"\\"):
            out.append(line)
        elif line.startswith((b"GIT binary patch", b"Binary files ")):
            raise PatchTextError("has a binary part, which cannot be turned round")
        else:
            header.append(line)
    out += _turned(header)
    if old > 0 or new > 0:
        raise PatchTextError("ends in the middle of a hunk")
    if not any(line.startswith(b"@@ ") for line in out):
        raise PatchTextError("has no hunk")
    return b"\n".join(out)


def _length(span: bytes) -> int:
    return int(span.partition(b",")[2] or 1)


def _turned(header: list[bytes]) -> list[bytes]:
    """The lines between hunks with both sides exchanged."""
    found: list[bytes] = []
    for line in header:
        if line.startswith(b"index ") and b".." in line:
            ids, blank, mode = line[6:].partition(b" ")
            first, _, second = ids.partition(b"..")
            line = b"index %s..%s%s%s" % (second, first, blank, mode)
        else:
            line = _swapped(line)
        found.append(line)
    for index in range(len(found) - 1):  # the old side is told first
        if any(found[index].startswith(new) and found[index + 1].startswith(old) for old, new in _SWAPS):
            found[index], found[index + 1] = found[index + 1], found[index]
    return found


def _swapped(line: bytes) -> bytes:
    for one, other in _SWAPS:
        for was, now in ((one, other), (other, one)):
            if line.startswith(was):
                rest = line[len(was) :]
                if was in (b"--- ", b"+++ "):
                    prefix, becomes = (b"a/", b"b/") if was == b"--- " else (b"b/", b"a/")
                    rest = becomes + rest[2:] if rest.startswith(prefix) else rest
                return now + rest
    return line


def patch_of_contents(path: str, old: str | None, new: str | None) -> str:
    """The unified diff of one text file; None where it does not exist."""
    before = (old or "").splitlines(keepends=True)
    after = (new or "").splitlines(keepends=True)
    names = ("/dev/null" if old is None else f"a/{path}", "/dev/null" if new is None else f"b/{path}")
    lines = []
    for line in difflib.unified_diff(before, after, *names):
        lines.append(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n")
    mode = "new file mode 100644\n" if old is None else "deleted file mode 100644\n" if new is None else ""
    return f"diff --git a/{path} b/{path}\n{mode}{''.join(lines)}" if lines else ""
