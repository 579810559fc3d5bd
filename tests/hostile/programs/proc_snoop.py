import os

numbers = [name for name in os.listdir("/proc") if name.isdigit()]
print("BAD sees processes" if len(numbers) > 2 else "sees", numbers, flush=True)
for number in numbers:
    for name in ("root/etc/shadow", "environ"):
        try:
            with open(f"/proc/{number}/{name}", "rb") as file:
                content = file.read(200)
            if content and number != str(os.getpid()):
                print("BAD", number, name, content[:80], flush=True)
        except OSError as error:
            print("blocked", number, name, error.strerror, flush=True)
for path in ("/proc/kcore", "/proc/cmdline", "/sys/kernel/security", "/sys/fs/cgroup", "/proc/sysrq-trigger"):
    try:
        size = len(os.listdir(path)) if os.path.isdir(path) else len(open(path, "rb").read(20_000))
        print("BAD read" if size else "empty", path, size, flush=True)
    except OSError as error:
        print("blocked", path, error.strerror, flush=True)
for path in ("/proc/sys/kernel/core_pattern", "/proc/sys/vm/overcommit_memory", "/proc/self/uid_map", "/proc/self/setgroups"):
    try:
        with open(path, "wb", buffering=0) as file:
            file.write(b"0 0 1")
        print("BAD wrote", path, flush=True)
    except OSError as error:
        print("blocked write", path, error.strerror, flush=True)
