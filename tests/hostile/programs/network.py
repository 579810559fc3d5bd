import socket


def attempt(name, act):
    try:
        act()
        print("BAD", name, flush=True)
    except OSError as error:
        print("blocked", name, error.strerror or error, flush=True)


def tcp():
    with socket.socket() as sock:
        sock.settimeout(1)
        sock.connect(("127.0.0.1", told["port"]))


def unix(address):
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(address)


def udp():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.sendto(b"x", ("127.0.0.1", told["port"]))


attempt("tcp", tcp)
attempt("udp", udp)
attempt("unix path", lambda: unix(told["unix_path"]))
attempt("unix abstract", lambda: unix("\0" + told["unix_abstract"]))
attempt("netlink", lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0))
attempt("vsock", lambda: socket.socket(40, socket.SOCK_STREAM))
