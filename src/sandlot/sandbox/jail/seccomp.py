"""The seccomp deny-list as classic BPF: kernel surface that no build, test or agent needs, refused with EPERM."""

from __future__ import annotations

import errno
import os
import struct
from functools import cache

_LD, _JEQ, _JGE, _RET, _JSET = 0x20, 0x15, 0x35, 0x06, 0x45
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NR, _ARCH, _ARG0 = 0, 4, 16  # offsets in struct seccomp_data; argument 0's low word is first (little-endian)
_X32_BIT = 0x40000000
SOCKET_FAMILIES = (1, 2, 10, 16)  # unix, inet, inet6, netlink: vsock and the like reach past the network namespace
_CLONE_NEWUSER = 0x10000000

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_SOCKET = {"x86_64": 41, "aarch64": 198}
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE3 = 435

# name: (x86_64, aarch64); None where the architecture lacks the call.
_DENIED: dict[str, tuple[int | None, int]] = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "bpf": (321, 280),
    "chroot": (161, 51),
    "clock_settime": (227, 112),
    "delete_module": (176, 106),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "init_module": (175, 105),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "ioperm": (173, -1),
    "iopl": (172, -1),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "lookup_dcookie": (212, 18),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "open_tree_attr": (467, 467),
    "perf_event_open": (298, 241),
    "pivot_root": (155, 41),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "setdomainname": (171, 162),
    "sethostname": (170, 161),
    "setns": (308, 268),
    "settimeofday": (164, 170),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
    "vhangup": (153, 58),
}


def _op(code: int, k: int, jump_true: int = 0, jump_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, jump_true, jump_false, k)


def denied_names() -> list[str]:
    """Names of the system calls of the deny-list."""
    return list(_DENIED)


def denied_numbers(machine: str) -> list[int]:
    """System call numbers of the deny-list on `machine`."""
    column = 0 if machine == "x86_64" else 1
    numbers = (row[column] for row in _DENIED.values())
    return sorted(n for n in numbers if n is not None and n >= 0)


@cache
def build_filter(machine: str | None = None) -> bytes:
    """The filter program for `machine` (default: this one), ready to install.

    Foreign call tables (32-bit, x32) get ENOSYS whole, since their numbers mean other calls. So does clone3, whose
    flags a filter cannot see: C libraries then use clone.
    """
    machine = machine or os.uname().machine
    no_call = _op(_RET, _ERRNO | errno.ENOSYS)
    program = [_op(_LD, _ARCH), _op(_JEQ, _AUDIT_ARCH[machine], 1, 0), no_call, _op(_LD, _NR)]
    if machine == "x86_64":
        program += [_op(_JGE, _X32_BIT, 0, 1), no_call]
    for number in denied_numbers(machine):
        program += [_op(_JEQ, number, 0, 1), _op(_RET, _ERRNO | errno.EPERM)]
    program += [_op(_JEQ, _CLONE3, 0, 1), no_call]
    program += [
        _op(_JEQ, _CLONE[machine], 0, 4),
        _op(_LD, _ARG0),
        _op(_JSET, _CLONE_NEWUSER, 0, 1),
        _op(_RET, _ERRNO | errno.EPERM),
        _op(_RET, _ALLOW),
    ]
    families = len(SOCKET_FAMILIES)
    program += [_op(_JEQ, _SOCKET[machine], 0, families + 2), _op(_LD, _ARG0)]
    program += [_op(_JEQ, family, families - i, 0) for i, family in enumerate(SOCKET_FAMILIES)]
    program += [_op(_RET, _ERRNO | errno.EAFNOSUPPORT), _op(_RET, _ALLOW)]
    return b"".join(program)
