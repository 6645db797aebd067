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
from collections.abc import Sequence
from typing import Any

_MAX_PACKET = 65536
_MAX_FDS = 16
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
    op, fds = _receive(stream, 1)
    if not op or not fds:
        for fd in fds:
            os.close(fd)
        return b"", {}, []
    with open(fds[0], "rb") as body:
        return op, json.loads(body.read()), fds[1:]


def send_packet(channel: socket.socket, body: dict[str, Any], fds: Sequence[int] = ()) -> None:
    """Answer on a channel."""
    socket.send_fds(channel, [json.dumps(body).encode()], list(fds))


def receive_packet(channel: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """The next packet of a channel, None at its end."""
    data, fds = _receive(channel, _MAX_PACKET)
    return (json.loads(data) if data else None), fds


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
