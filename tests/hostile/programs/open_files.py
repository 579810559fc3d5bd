"""Opens descriptors until it is stopped: files, pipes, sockets of its own and memory."""
import os

held = []
for name, act in (("files", lambda: [os.open("/dev/null", os.O_RDONLY)]), ("pipes", lambda: list(os.pipe())),
                  ("memory", lambda: [os.memfd_create("x")])):
    n = 0
    try:
        while n < 5000:
            held += act()
            n += 1
        print("BAD", name, n, flush=True)
    except OSError as error:
        print("stopped", name, "at", n, error.strerror, flush=True)
    for number in held:
        os.close(number)
    held = []
