import os

written_mib = 0
for folder in ("/w", "/tmp", "/dev/shm", "/var/tmp", "/app", "/", "."):
    try:
        for number in range(100_000):
            with open(f"{folder}/f{number}", "wb") as file:
                for _ in range(32):
                    file.write(b"x" * (1 << 20))
                    written_mib += 1
            if written_mib > 2000:
                break
    except OSError as error:
        print(folder, "stopped after", written_mib, "MiB in all:", error.strerror, flush=True)
    if written_mib > 2000:
        print("BAD wrote", written_mib, "MiB", flush=True)
        break
inodes = 0
try:
    for number in range(200_000):
        os.mkdir(f"d{number}")
        inodes += 1
    print("BAD inodes", inodes)
except OSError as error:
    print("inodes stopped at", inodes, error.strerror)
