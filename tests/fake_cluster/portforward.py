"""``pods/portforward`` over a WebSocket (v4.channel.k8s.io): one port of one pod, in both directions."""

from __future__ import annotations

import base64
import hashlib
import socket
import struct
import threading
from contextlib import suppress
from typing import Any

from websocket import ABNF
from websocket._abnf import frame_buffer

MAGIC = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
DATA, ERROR = b"\0", b"\1"


def accept(key: str) -> str:
    """Return the server's reply to a WebSocket key (RFC 6455, section 4.2.2)."""
    return base64.b64encode(hashlib.sha1((key + MAGIC).encode()).digest()).decode()


def forward(connection: Any, reader: Any, address: str, port: int) -> None:
    """Serve a client after the handshake, until one side disconnects."""
    lock = threading.Lock()

    def send(payload: bytes) -> None:
        size = len(payload)
        length = bytes([size]) if size < 126 else b"\x7e" + struct.pack("!H", size)
        with lock:
            connection.sendall(bytes([0x80 | ABNF.OPCODE_BINARY]) + length + payload)

    for channel in (DATA, ERROR):
        send(channel + struct.pack("<H", port))
    try:
        pod = socket.create_connection((address, port), timeout=5)
    except OSError as error:
        send(ERROR + f"failed to connect to localhost:{port} inside namespace: {error}".encode())
        return
    pod.settimeout(None)

    def back() -> None:
        with suppress(OSError):
            while data := pod.recv(1 << 14):
                send(DATA + data)
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    threading.Thread(target=back, daemon=True).start()

    def read(size: int) -> bytes:
        if not (data := reader.read(size)):
            raise ConnectionResetError("the client has left")  # frame_buffer would retry for ever
        return bytes(data)

    frames = frame_buffer(read, True)
    with pod, suppress(OSError):
        while True:
            frame = frames.recv_frame()
            if frame.opcode == ABNF.OPCODE_CLOSE or not frame.data:
                break
            pod.sendall(frame.data[1:])
        pod.shutdown(socket.SHUT_RDWR)
