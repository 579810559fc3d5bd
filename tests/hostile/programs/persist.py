import os

for path in ("/w/left", "/tmp/left", "/dev/shm/left", "/var/tmp/left", "/run/left", "/app/left"):
    if os.path.exists(path):
        print("BAD survivor", path, flush=True)
    try:
        open(path, "w").close()
        print("wrote", path, flush=True)
    except OSError as error:
        print("blocked", path, error.strerror, flush=True)
