"""The way back to the gateway over a command's own stdin and stdout, for sandboxes that can dial nothing."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path

from sandlot.errors import SandboxError, SandboxLostError
from sandlot.sandbox.remote import mux
from sandlot.sandbox.remote.process import Stream

_PAUSES = (0.1, 5.0)
# A relay whose stream broke may be alive there and hold the port.
_START = """
old=/run/.sandlot-relay-$1; mkdir -p /run
[ -r $old ] && kill -9 "$(cat $old)" 2>/dev/null
command -v python3 >/dev/null || { echo "the image has no python3" >&2; exit 127; }
echo $$ >$old && exec python3 -c "$2" "$1"
"""


class Relay:
    """Connections to a port inside a sandbox arrive at `listener`.

    `start` runs a command as root there whose stdin stays open. When that ends before the sandbox does, it is started
    again; the connections that it carried are lost.
    """

    def __init__(self, start: Callable[[Sequence[str]], Awaitable[Stream]], port: int) -> None:
        self.listener = loopback_listener()
        self.pid = 0
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ready.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may be waiting
        self._start, self._port = start, port
        self._said = b""
        self._task = asyncio.create_task(self._run())

    def close(self) -> None:
        """Carry nothing any more."""
        self._task.cancel()
        self.ready.cancel()

    async def _run(self) -> None:
        source = await asyncio.to_thread(Path(mux.__file__).read_text, "utf-8")
        argv = ["/bin/sh", "-c", _START, "sh", str(self._port), source]
        pause = _PAUSES[0]
        while True:
            self.pid, why = 0, "it ended"
            try:
                stream = await self._start(argv)
                try:
                    await self._carry(stream)
                finally:
                    with suppress(OSError, SandboxError):
                        await stream.close()
            except SandboxLostError as error:
                if not self.ready.done():
                    self.ready.set_exception(error)
                return
            except (OSError, ValueError, SandboxError, mux.ProtocolError) as error:
                why = str(error)
            if not self.ready.done():
                said = self._said.decode("utf-8", "replace").strip() or why
                self.ready.set_exception(SandboxError(f"the relay of port {self._port} did not start: {said}"))
                return
            pause = _PAUSES[0] if self.pid else min(_PAUSES[1], pause * 2)
            await asyncio.sleep(pause)

    async def _carry(self, stream: Stream) -> None:
        """Pass connections until the stream ends or breaks."""

        async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            return await asyncio.open_connection(*self.listener.getsockname())

        async def receive() -> None:
            while (piece := await stream.read()) is not None:
                kind, data = piece
                if kind != 1:
                    self._said = (self._said + data)[-300:]
                elif pid := here.feed(data):
                    self.pid = pid
                    if not self.ready.done():
                        self.ready.set_result(None)

        here = mux.Mux(stream.write, connect)
        both = {asyncio.create_task(receive()), asyncio.create_task(here.send_all())}
        try:
            done, _ = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            here.close()
            for task in both:
                task.cancel()


def loopback_listener() -> socket.socket:
    """A listening socket of this machine, to be served by the caller of `listen`."""
    # With the protocol by its name, or asyncio leaves on what holds small packets back for 40 ms.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    listener.listen(512)
    listener.setblocking(False)
    return listener
