"""The seccomp filter of each architecture, run by an interpreter of our own: what it refuses, by name and argument."""

import errno
import struct

import pytest

from sandlot.sandbox.jail import seccomp
from support.syscall_table import GENERIC

ALLOW, ERRNO = 0x7FFF0000, 0x00050000
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
EPERM, ENOSYS, NO_FAMILY = ERRNO | errno.EPERM, ERRNO | errno.ENOSYS, ERRNO | errno.EAFNOSUPPORT


def run(program: bytes, architecture: int, number: int, argument: int = 0) -> int:
    """What the classic BPF `program` returns for a call, as the kernel would run it."""
    data = struct.pack("<IIQQQQQQQ", number, architecture, 0, argument, 0, 0, 0, 0, 0)
    accumulator = at = 0
    while True:
        code, jump_true, jump_false, k = struct.unpack_from("<HBBI", program, at * 8)
        at += 1
        if code == 0x20:
            accumulator = struct.unpack_from("<I", data, k)[0]
        elif code == 0x06:
            return int(k)
        else:
            holds = {0x15: accumulator == k, 0x35: accumulator >= k, 0x45: bool(accumulator & k)}[code]
            at += jump_true if holds else jump_false


def test_the_numbers_of_aarch64_are_the_kernels() -> None:
    assert (GENERIC["openat"], GENERIC["clone"], GENERIC["socket"], GENERIC["clone3"]) == (56, 220, 198, 435)
    told = {name: numbers[1] for name, numbers in seccomp._DENIED.items() if numbers[1] != -1}
    assert told == {name: GENERIC[name] for name in told}
    absent = {name for name, numbers in seccomp._DENIED.items() if numbers[1] == -1}
    assert absent == {"ioperm", "iopl"}
    assert not absent & GENERIC.keys()


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_what_is_denied_is_refused_and_nothing_else(machine: str) -> None:
    program, architecture = seccomp.build_filter(machine), ARCHITECTURES[machine]
    denied = set(seccomp.denied_numbers(machine))
    assert len(denied) > 40
    for number in range(600):
        expected = EPERM if number in denied else ENOSYS if number == GENERIC["clone3"] else ALLOW
        argument = 1  # a Unix socket; a clone without new namespaces
        assert run(program, architecture, number, argument) == expected, number


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_arguments_are_looked_at(machine: str) -> None:
    program, architecture = seccomp.build_filter(machine), ARCHITECTURES[machine]
    clone, socket = seccomp._CLONE[machine], seccomp._SOCKET[machine]
    if machine == "aarch64":
        assert (clone, socket) == (GENERIC["clone"], GENERIC["socket"])
    for flags, expected in ((0x11, ALLOW), (0x10000011, EPERM), (0x10000000, EPERM), (0x00010F00, ALLOW)):
        assert run(program, architecture, clone, flags) == expected
    for family in range(50):
        expected = ALLOW if family in seccomp.SOCKET_FAMILIES else NO_FAMILY
        assert run(program, architecture, socket, family) == expected


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_foreign_call_tables_are_refused_whole(machine: str) -> None:
    program = seccomp.build_filter(machine)
    for architecture in (0x40000003, 0x40000028, *(a for a in ARCHITECTURES.values() if a != ARCHITECTURES[machine])):
        assert {run(program, architecture, number, 1) for number in range(600)} == {ENOSYS}
    if machine == "x86_64":
        assert run(program, ARCHITECTURES[machine], 0x40000000 | 1) == ENOSYS
