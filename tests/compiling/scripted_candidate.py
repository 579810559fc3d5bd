"""A program in place of workers/compile_candidate.py that says what the test wrote: the hand-in is its script.

The script is JSON: {"say": [messages], "times": how often, "stderr": text, "then": "end", "sleep", "abort" or "print"}.
"""

import json
import mmap
import os
import socket
import sys
import time

from workers import protocol


def main(control_fd: int, arena_fd: int, arena_bytes: int) -> None:
    channel = protocol.Channel(socket.socket(fileno=control_fd))
    arena = mmap.mmap(arena_fd, arena_bytes)
    channel.send({"op": "ready"})
    load = channel.receive()
    script = json.loads(arena[: load["length"]])
    channel.send({"op": "loaded", "entry": "scripted", "request": load["request"]})
    while True:
        request = channel.receive()["request"]
        print(script.get("stderr", ""), file=sys.stderr, flush=True)
        for _ in range(script.get("times", 1)):
            for message in script["say"]:
                channel.send(message | {"request": request})
        match script["then"]:
            case "sleep":
                time.sleep(600)
            case "abort":
                os.abort()
            case "print":
                while True:
                    os.write(1, b"x" * 65536)
        channel.send({"op": "compiled", "complete": True, "request": request})
