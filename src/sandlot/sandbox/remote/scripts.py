"""The shell scripts that run inside remote sandboxes. POSIX sh, so that Debian's dash and BusyBox both do."""

from __future__ import annotations

import re
from collections.abc import Sequence

MARK = "SANDLOT_EXEC"
"""Environment variable by which the processes of a command are told from others."""

# $1: bytes of stdin, or `pipe` to leave it as it is; $2: directory; the rest: the command. The stream that carries
# stdin need not end, so exactly as many bytes are taken as there are.
_WRAP = f"""
cd "$2" 2>/dev/null || {{ echo "${MARK}: cannot enter the directory $2" >&2; exit 126; }}
case $1 in
pipe) ;;
0) exec </dev/null ;;
*) f=/tmp/.${MARK}; (umask 077; head -c "$1" >"$f") && exec <"$f" || exit 126; rm -f "$f" ;;
esac
shift 2
exec "$@"
"""

_STAT = """
stat_of() {
    s=
    { while IFS= read -r line || [ -n "$line" ]; do s="$s $line"; done <"/proc/$1/stat"; } 2>/dev/null
    s=${s##*") "}
}
"""

# What runs now, as a number and the moment of its start, which no later process has in common.
_PROCESSES = f"""{_STAT}
for d in /proc/[0-9]*; do
    p=${{d#/proc/}}; stat_of "$p"; set -- $s
    [ $# -ge 20 ] && echo "$p-${{20}}"
done
:
"""

# The shells and helpers that brought us here are not to be killed.
_ANCESTORS = f"""{_STAT}
above=" 1 $$ "
climb() {{
    stat_of "$1"
    set -- $s
    [ $# -ge 20 ] || return
    above="$above$2 "
    [ "$2" -gt 1 ] && climb "$2"
}}
climb $$
"""

# $1: the mark; $2: ticks since the command started. Kills what carries the mark, and what started since then without
# another's mark, unless $3 says otherwise. What cannot be read is not spared; what may not be signalled is not of this
# user, and so not of the command. Exit 3: everything must go.
_KILL_TREE = f"""{_ANCESTORS}
mark=$1; since=$2; strict=$3; me=$$; read -r up _ </proc/uptime
whole=${{up%.*}}; part=${{up#*.}}; since=$((whole * 100 + ${{part#0}} - since)); n=0
while [ $n -lt 60 ]; do
    n=$((n + 1)); victims=
    for d in /proc/[0-9]*; do
        p=${{d#/proc/}}
        case $above in *" $p "*) continue ;; esac
        stat_of "$p"
        set -- $s
        [ $# -ge 20 ] || continue
        case $1 in Z | X) continue ;; esac
        [ "$2" = "$me" ] && continue
        if grep -q "{MARK}=$mark" "$d/environ" 2>/dev/null; then
            [ "${{20}}" -lt "$since" ] && since=${{20}}
            victims="$victims $p"
        elif [ -z "$strict" ] && [ "${{20}}" -ge "$since" ] && ! grep -q "{MARK}=" "$d/environ" 2>/dev/null; then
            kill -0 "$p" 2>/dev/null && victims="$victims $p"
        fi
    done
    [ -z "$victims" ] && exit 0
    kill -9 $victims 2>/dev/null
    [ $n -gt 3 ] && sleep 0.05
done
exit 3
"""

# Kills all but PID 1, this shell, and what the sandbox itself lives by. $1: processes as `_PROCESSES` says them; $2:
# pids of ours, which stay with what started them and what runs beside them in their process groups.
_KILL_ALL = f"""{_ANCESTORS}
keep=" $1 "; groups=" "; n=0
group_of() {{ stat_of "$1"; set -- $s; groups="$groups$3 "; }}
for p in $2; do above="$above$p "; climb "$p"; group_of "$p"; done
while [ $n -lt 100 ]; do
    n=$((n + 1)); victims=
    for d in /proc/[0-9]*; do
        p=${{d#/proc/}}
        case $above in *" $p "*) continue ;; esac
        stat_of "$p"
        set -- $s
        [ $# -ge 20 ] || continue
        case $1 in Z | X) continue ;; esac
        case $keep in *" $p-${{20}} "*) continue ;; esac
        case $groups in *" $3 "*) continue ;; esac
        victims="$victims $p"
    done
    [ -z "$victims" ] && exit 0
    kill -9 $victims 2>/dev/null
    [ $n -gt 3 ] && sleep 0.05
done
exit 3
"""

_REFUSE_SPECIAL = """
[ -n "$real" ] || exit 44
case $real in /proc/* | /sys/* | /dev/*) exit 45 ;; esac
"""

# With a dot, or the shell would take the line breaks that a name may end with.
_READ = f"""
real=$(readlink -f "$1" && printf .) || {{ [ -L "$1" ] && exit 45; exit 44; }}
real=${{real%?.}}
{_REFUSE_SPECIAL}
[ -e "$real" ] || exit 44
[ -f "$real" ] || exit 45
exec head -c "$2" "$real"
"""

# $1: bytes to come, $2: path, $3: mode. What comes is taken in any case: a broken pipe would hide the reason.
_WRITE = f"""
trap '[ $? = 0 ] || head -c "$1" >/dev/null' EXIT
path=$2; umask 022
case $path in */*) mkdir -p "${{path%/*}}/" || exit 1 ;; esac
real=$(readlink -f "$path" && printf .) && real=${{real%?.}} || real=$path
{_REFUSE_SPECIAL}
if [ -e "$real" ] && [ ! -f "$real" ]; then exit 45; fi
: >"$path" || exit 1
head -c "$1" >"$path" && chmod "$3" "$path"
"""

# $1: directory, $2: bytes of names to come, one a line: `d NAME`, `f NAME`, or with `%` and escapes for line breaks.
# What is no directory where one must be, or stands in a member's way, goes.
_CLEAR_WAY = """
mkdir -p "$1" && cd "$1" || { head -c "$2" >/dev/null; exit 1; }
head -c "$2" | while IFS= read -r line; do
    kind=${line%"${line#?}"}; path=./${line#??}
    case $line in ?%*) path=$(printf '%b.' "$path"); path=${path%.} ;; esac
    if [ -L "$path" ]; then rm -f "$path"
    elif [ "$kind" = d ]; then [ -d "$path" ] || rm -f "$path"
    elif [ -d "$path" ]; then rm -rf "$path"
    else rm -f "$path"; fi
done
"""

_UNPACK = 'head -c "$2" | tar -xpf - -C "$1"'
_PACK = '[ -d "$1" ] || exit 44; dir=$1; max=$2; shift 2; tar -cf - "$@" -C "$dir" . | head -c "$max"'

NOT_FOUND, NOT_REGULAR = 44, 45
ESCAPED = 3


def wrapped(argv: Sequence[str], cwd: str, stdin_bytes: int | None) -> list[str]:
    """A command with its directory and stdin; None leaves stdin to the command."""
    how = "pipe" if stdin_bytes is None else str(stdin_bytes)
    return ["/bin/sh", "-c", _WRAP, "sh", how, cwd, *argv]


def _script(text: str, *arguments: str) -> list[str]:
    return ["/bin/sh", "-c", text, "sh", *arguments]


def kill_tree(mark: str, ticks: int, *, strict: bool = False) -> list[str]:
    """Kill the tree of a command that started `ticks` hundredths of a second ago; `strict` spares what has no mark."""
    return _script(_KILL_TREE, mark, str(ticks), "strict" if strict else "")


def processes() -> list[str]:
    """Say what runs, a line each, for `kill_all`."""
    return _script(_PROCESSES)


def kill_all(keep: Sequence[str] = (), ours: Sequence[int] = ()) -> list[str]:
    """Kill everything but PID 1, what `processes` said before, and `ours` with their process groups."""
    return _script(_KILL_ALL, " ".join(keep), " ".join(map(str, ours)))


def read_file(path: str, max_bytes: int) -> list[str]:
    """Write a regular file to stdout, one byte more than allowed at most."""
    return _script(_READ, path, str(max_bytes + 1))


def write_file(path: str, size: int, mode: int) -> list[str]:
    """Write `size` bytes of stdin to a file."""
    return _script(_WRITE, str(size), path, f"{mode:o}")


def clear_way(path: str, listing_bytes: int) -> list[str]:
    """Make a directory ready for an archive whose members come on stdin, as `tars.checked` lists them."""
    return _script(_CLEAR_WAY, path, str(listing_bytes))


def unpack(path: str, size: int) -> list[str]:
    """Unpack `size` bytes of tar from stdin into a directory."""
    return _script(_UNPACK, path, str(size))


def pack(path: str, exclude: Sequence[str], max_bytes: int) -> list[str]:
    """Write a directory to stdout as a tar, cut at `max_bytes`; names that mean patterns to tar are not left out."""
    plain = [name for name in exclude if re.fullmatch(r"[\w.-]+", name)]
    return _script(_PACK, path, str(max_bytes), *(f"--exclude={name}" for name in plain))


def make_user(uid: int, workdir: str) -> list[str]:
    """Make the agent's user, home and work directory where they are missing; run as root, once per image."""
    text = """
uid=$1; work=$2
for file in passwd group; do
    [ -e /etc/$file ] || echo "root:x:0:$([ $file = passwd ] && echo 0:root:/root:/bin/sh)" >/etc/$file || exit 1
    line="agent:x:$uid:$([ $file = passwd ] && echo "$uid:agent:/home/agent:/bin/sh")"
    grep -qxF "$line" /etc/$file && continue
    { echo "$line"; grep -v '^agent:' /etc/$file; } >/etc/$file.sandlot; cat /etc/$file.sandlot >/etc/$file || exit 1
    rm -f /etc/$file.sandlot
done
mkdir -p /home/agent /root /tmp "$work" && chmod 1777 /tmp && chown "$uid:$uid" /home/agent || exit 1
[ "$(readlink -f "$work")" = / ] || [ "$(stat -c %u "$work")" = "$uid" ] || chown -R "$uid:$uid" "$work"
"""
    return _script(text, str(uid), workdir)
