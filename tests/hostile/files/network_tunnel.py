"""Asks somebody else for the answers: by TCP and UDP, by name, over the loopback and over sockets in files."""
import os
import socket


def attempt(name, act):
    try:
        act()
        print("BAD", name, flush=True)
    except OSError as error:
        print("blocked", name, error.strerror or error, flush=True)


def tcp(address):
    with socket.socket() as sock:
        sock.settimeout(1)
        sock.connect(address)


for address in (("1.1.1.1", 443), ("127.0.0.1", 5432), ("127.0.0.1", 6379), ("169.254.169.254", 80)):
    attempt(f"tcp {address[0]}:{address[1]}", lambda address=address: tcp(address))
attempt("name", lambda: socket.getaddrinfo("example.org", 443))
attempt("udp", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("1.1.1.1", 53)))
attempt("netlink", lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0))
attempt("vsock", lambda: socket.socket(40, socket.SOCK_STREAM))
for path in ("/run/docker.sock", "/var/run/postgresql/.s.PGSQL.5432"):
    attempt(path, lambda path=path: os.stat(path))


def flash_attention_forward(q, k, v, is_causal=False):
    return torch.zeros_like(q), torch.zeros(q.shape[:2], device=q.device)
