"""A link to an S3 server that loses requests and replies, cuts replies off, and flips bits of what was stored.

    client ──request──► link ──────────────────► server
              lost_request: reset ─┘               │
    client ◄────────── link ◄───────reply──────────┘
                        └─ lost_reply: reset;  cut_reply: without the last byte of a packet, then reset
                                                       flipped: one bit

A link draws the fate of each request by its seed. Only files with checksums of their own are flipped: an error or a
list of names has none. Each is flipped once at most, because what is damaged twice counts as damaged.
"""

import asyncio
import random
import re
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

STORM = {"lost_request": 0.01, "lost_reply": 0.01, "cut_reply": 0.01, "flipped": 0.1}
"""Chance of each request; of being flipped, that of each request that reads a checksummed file."""
_REQUEST = re.compile(rb"(GET|PUT|POST|DELETE|HEAD) (\S+) HTTP/1\.1\r\n")
_CHECKSUMMED = re.compile(rb"/(seg|data)/")
_EMPTY = re.compile(rb"HTTP/1\.\d 204 |\r\ncontent-length: 0\r\n", re.IGNORECASE)
_PACKET = 1 << 16


class FlakyLink:
    """The link at `endpoint`, and how often each fault has struck."""

    def __init__(self, to: str, seed: int, rates: Mapping[str, float]) -> None:
        server = urlsplit(to)
        self._rates = rates
        self._next: list[str] = []
        self._flipped: set[bytes] = set()
        self._server = (server.hostname, server.port)
        self._random = random.Random(seed)
        self.fired: Counter[str] = Counter()
        self.requests = 0
        self.endpoint = ""

    def strike_next(self, fault: str) -> None:
        """The next request meets this fault."""
        self._next.append(fault)

    async def open(self) -> asyncio.Server:
        """Listens on loopback until the server that this returns is closed."""
        listening = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        self.endpoint = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        return listening

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection of a client, with a connection to the server of its own."""
        try:
            server_reader, server_writer = await asyncio.open_connection(*self._server)
        except OSError:
            _reset(writer)
            return
        connection = _Connection(self)
        ways = [
            asyncio.create_task(_pump(reader, server_writer, connection.on_request)),
            asyncio.create_task(_pump(server_reader, writer, connection.on_reply)),
        ]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        with suppress(OSError):
            server_writer.close()
        (_reset if connection.broken else asyncio.StreamWriter.close)(writer)

    def fate(self, method: bytes, path: bytes) -> str:
        """The fault that strikes this request, or nothing."""
        self.requests += 1
        if self._next:
            return self._next.pop(0)
        may_flip = method == b"GET" and _CHECKSUMMED.search(path) and path not in self._flipped
        for fault, rate in self._rates.items():
            if (fault != "flipped" or may_flip) and self._random.random() < rate:
                if fault == "flipped":
                    self._flipped.add(path)
                return fault
        return ""


class _Connection:
    """What strikes the request that is on its way."""

    def __init__(self, link: FlakyLink) -> None:
        self._link = link
        self._fate = ""
        self._in_body = False
        self.broken = False

    def on_request(self, packet: bytes) -> bytes | None:
        """What goes on of a packet from the client; None if the connection breaks here."""
        begun = _REQUEST.match(packet)
        if begun:
            self._fate, self._in_body = self._link.fate(begun[1], begun[2]), False
        if self._fate == "lost_request":
            return self._break()
        return packet

    def on_reply(self, packet: bytes) -> bytes | None:
        """The same from the server."""
        match self._fate:
            case "lost_reply":
                return self._break()
            case "cut_reply":
                if packet.endswith(b"\r\n\r\n") and not _EMPTY.search(packet):
                    # The body comes in the next packet.
                    return packet
                self._break()
                return packet[:-1]
            case "flipped":
                return self._flipped(packet)
            case _:
                return packet

    def _break(self) -> None:
        self._link.fired[self._fate] += 1
        self.broken = True

    def _flipped(self, packet: bytes) -> bytes:
        """With one bit of the last byte of the body flipped, in the first packet that has some of it."""
        head, end, body = packet.partition(b"\r\n\r\n")
        if not self._in_body and head.startswith(b"HTTP/"):
            self._in_body = True
            # The reply of an error is no file.
            if not head.startswith((b"HTTP/1.1 200", b"HTTP/1.1 206")):
                self._fate = ""
                return packet
        else:
            head, end, body = b"", b"", packet
        if not body:
            return packet
        self._link.fired[self._fate] += 1
        self._fate = ""
        return head + end + body[:-1] + bytes([body[-1] ^ 1])


async def _pump(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, passed: Callable[[bytes], bytes | None]
) -> None:
    with suppress(OSError):
        while packet := await reader.read(_PACKET):
            on = passed(packet)
            if on is not None:
                writer.write(on)
                await writer.drain()
            if on is None or len(on) < len(packet):
                return


def _reset(writer: asyncio.StreamWriter) -> None:
    # Closing without lingering sends RST.
    connection: socket.socket | None = writer.get_extra_info("socket")
    if connection is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def _close(listening: asyncio.Server) -> None:
    """Ends the server and all connections."""
    listening.close()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


@contextmanager
def flaky_link(to: str, seed: int, rates: Mapping[str, float]) -> Iterator[FlakyLink]:
    """A link to the server at the endpoint `to`, in a thread of its own."""
    link, loop = FlakyLink(to, seed, rates), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="flaky link", daemon=True)
    thread.start()
    listening = asyncio.run_coroutine_threadsafe(link.open(), loop).result(60)
    try:
        yield link
    finally:
        asyncio.run_coroutine_threadsafe(_close(listening), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
