import os
import sys

import workers.candidate

for path in (*told["files"], os.__file__, sys.executable, workers.candidate.__file__, "/app/run.py", "/etc/ld.so.cache"):
    for name, act in (("append", lambda: open(path, "ab").close()), ("chmod", lambda: os.chmod(path, 0o777)),
                      ("replace", lambda: os.rename(path, path + ".old"))):
        try:
            act()
            print("BAD", name, path, flush=True)
        except OSError as error:
            print("blocked", name, path, error.strerror, flush=True)
for folder in (os.path.dirname(os.__file__), "/", "/dev", "/usr", "/app", "/app/workers", sys.prefix):
    try:
        open(folder + "/evil.pth", "w").close()
        print("BAD new file in", folder, flush=True)
    except OSError as error:
        print("blocked new file in", folder, error.strerror, flush=True)
