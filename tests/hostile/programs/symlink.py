import os

for name in ("out.json", "result", "out.bin"):
    os.symlink("/etc/shadow", name)
os.symlink(told["folder"], "folder")
try:
    os.mkfifo("fifo")
    print("BAD fifo", flush=True)
except OSError as error:
    print("blocked fifo", error.strerror, flush=True)
for path in ("out.json", "folder/secret.txt", "/proc/self/root/etc/shadow", "/proc/self/cwd/../../../../etc/shadow",
             f"/proc/1/root{told['folder']}/secret.txt"):
    try:
        print("BAD", path, open(path).read(30), flush=True)
    except OSError as error:
        print("blocked", path, error.strerror, flush=True)
