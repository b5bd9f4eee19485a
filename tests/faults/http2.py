"""Minimal HTTP/2 client that leaves messages unfinished, which no library does."""

from __future__ import annotations

import socket
import struct
import threading
from collections import defaultdict

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST, SETTINGS, PING, GOAWAY, WINDOW = 0, 1, 3, 4, 6, 7, 8
FRAME = 16_384


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Return one frame."""
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def headers(path: str) -> bytes:
    """Return the headers of a gRPC call, as literals."""
    fields = {
        ":method": "POST", ":scheme": "http", ":path": path, ":authority": "x", "content-type": "application/grpc",
        "te": "trailers",
    }  # fmt: skip
    return b"".join(
        b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        for name, value in fields.items()
    )


def unfinished_messages(channel: socket.socket, path: str, streams: int, size: int, stop: threading.Event) -> None:
    """Begin a message of ``size`` bytes in each of so many streams, and send all but the last byte."""
    channel.sendall(PREFACE + frame(SETTINGS, 0, 0))
    channel.settimeout(0.2)
    waiting = {
        number: bytearray(b"\0" + struct.pack(">I", size) + bytes(size - 1)) for number in range(1, 2 * streams, 2)
    }
    opened = set[int]()
    initial, room = 65_535, defaultdict[int, int](int)
    room[0] = 65_535
    received, quiet = b"", 0
    while not stop.is_set() and waiting and quiet < 5:
        for number, left in list(waiting.items()):
            if number not in opened:
                channel.sendall(frame(HEADERS, 4, number, headers(path)))
                opened.add(number)
            while left and (part := min(FRAME, len(left), room[0], initial + room[number])) > 0:
                channel.sendall(frame(DATA, 0, number, bytes(left[:part])))
                del left[:part]
                room[0] -= part
                room[number] -= part
        try:
            block = channel.recv(1 << 16)
        except TimeoutError:
            quiet += 1
            continue
        if not block:
            return
        received += block
        while len(received) >= 9:
            length, kind, flags = int.from_bytes(received[:3], "big"), received[3], received[4]
            if len(received) < 9 + length:
                break
            number = int.from_bytes(received[5:9], "big")
            payload, received = received[9 : 9 + length], received[9 + length :]
            if kind == SETTINGS and not flags & 1:
                settings = dict(struct.iter_unpack(">HI", payload))
                initial = settings.get(4, initial)
                channel.sendall(frame(SETTINGS, 1, 0))
            elif kind == PING and not flags & 1:
                channel.sendall(frame(PING, 1, 0, payload))
            elif kind == WINDOW:
                room[number] += int.from_bytes(payload, "big")
                quiet = 0
            elif kind == RST:
                waiting.pop(number, None)
            elif kind == GOAWAY:
                return
