"""Looks for what it should not see. `told` names a secret file, a secret folder and the secret text in them."""
import os

secret = told["secret"].encode()
places = [
    "/etc/passwd", "/etc/shadow", "/root", "/home", "/srv", "/var/log", "/run", "/mnt",
    "/proc/1/environ", f"/proc/{os.getppid()}/environ", "/proc/self/environ", "/proc/1/cmdline", "/proc/self/cmdline",
    *told["paths"], *(f"/proc/1/root{path}" for path in told["paths"]), *(f"/proc/self/root{path}" for path in told["paths"]),
]
for place in places:
    try:
        if os.path.isdir(place):
            print("BAD listed" if os.listdir(place) else "empty", place, os.listdir(place), flush=True)
        else:
            with open(place, "rb") as file:
                content = file.read(100_000)
            print("BAD read" if secret in content or b"root:" in content else "harmless", place, flush=True)
    except OSError as error:
        print("blocked", place, error.strerror, flush=True)
if secret.decode() in repr(dict(os.environ)):
    print("BAD environment", flush=True)
for name in ("grader", "reference", "assignments", "tests", ".git"):
    for folder in (*told["project"], "/app"):
        if os.path.exists(f"{folder}/{name}") and os.listdir(f"{folder}/{name}"):
            print("BAD sees", folder, name, flush=True)
links = {}
for number in os.listdir("/proc/self/fd"):
    try:
        links[int(number)] = os.readlink(f"/proc/self/fd/{number}")
    except OSError:
        pass  # the descriptor of the listing itself
allowed = ("/dev/null", "pipe:", "socket:", "/memfd:arena")
print("BAD descriptors" if any(not link.startswith(allowed) for link in links.values()) else "descriptors", links, flush=True)
