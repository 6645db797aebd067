"""Messages between Sandlot, the zygote and the sandboxes: one byte with file descriptors, and small JSON packets.

A request is one byte on a stream socket, carrying a reply channel, a memory file with its JSON body, and whatever
descriptors it needs. Each request is answered on its own channel (a packet socket), so that no answer can be mixed up
with another, and the end of the channel is the end of whoever answers.
"""

from __future__ import annotations

import array
import fcntl
import json
import os
import socket
from collections.abc import Iterable, Sequence
from typing import Any, cast

_MAX_PACKET = 65536
_MAX_FDS = 253  # of the kernel
_F_ADD_SEALS, _SEAL_ALL = 1033, 0x1 | 0x2 | 0x4 | 0x8


def packet_pair() -> tuple[socket.socket, socket.socket]:
    """The two ends of a channel."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def memory_file(data: bytes, *, name: str = "sandlot") -> int:
    """An immutable memory file with `data`, read position at 0."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.lseek(fd, 0, os.SEEK_SET)
        fcntl.fcntl(fd, _F_ADD_SEALS, _SEAL_ALL)
    except BaseException:
        os.close(fd)
        raise
    return fd


def send_request(stream: socket.socket, op: bytes, body: dict[str, Any], fds: Sequence[int]) -> None:
    """Send operation `op` with its body and descriptors; ours stay open."""
    request = memory_file(json.dumps(body).encode())
    try:
        socket.send_fds(stream, [op], [request, *fds])
    finally:
        os.close(request)


def receive_request(stream: socket.socket) -> tuple[bytes, dict[str, Any], list[int]]:
    """The next operation, its body and descriptors; an empty operation at end of stream."""
    op, fds = receive_sealed(stream)
    return (op, unseal(fds[0]), fds[1:]) if op else (op, {}, [])


def receive_sealed(stream: socket.socket) -> tuple[bytes, list[int]]:
    """The next operation and its descriptors, of which the first is the body, to be forwarded or unsealed."""
    op, fds = _receive(stream, 1)
    if not op or not fds:
        close_all(fds)
        return b"", []
    return op, fds


def unseal(fd: int) -> dict[str, Any]:
    """The body of a request; closes its file."""
    try:
        return read(fd)
    finally:
        os.close(fd)


def read(fd: int) -> dict[str, Any]:
    """The body of a request that is to be forwarded."""
    return cast("dict[str, Any]", json.loads(os.pread(fd, os.fstat(fd).st_size, 0)))


def forward(stream: socket.socket, op: bytes, fds: Sequence[int]) -> None:
    """Send a sealed request on; ours stay open."""
    socket.send_fds(stream, [op], fds)


def send_packet(channel: socket.socket, body: dict[str, Any], fds: Sequence[int] = ()) -> None:
    """Answer on a channel."""
    socket.send_fds(channel, [json.dumps(body).encode()], list(fds))


def receive_packet(channel: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """The next packet of a channel, None at its end."""
    data, fds = _receive(channel, _MAX_PACKET)
    return (json.loads(data) if data else None), fds


def close_all(fds: Iterable[int]) -> None:
    """Close descriptors."""
    for fd in fds:
        os.close(fd)


def close_all_but(keep: set[int]) -> None:
    """Close every descriptor of this process that is not in `keep`."""
    first = 0
    for fd in sorted(keep):
        if first < fd:  # an empty range would be taken for all
            os.closerange(first, fd)
        first = fd + 1
    os.closerange(first, 1 << 20)


def _receive(sock: socket.socket, size: int) -> tuple[bytes, list[int]]:
    fds = array.array("i")
    space = socket.CMSG_LEN(_MAX_FDS * fds.itemsize)
    try:
        data, ancillary, _, _ = sock.recvmsg(size, space, socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:
        return b"", []
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    return data, list(fds)
