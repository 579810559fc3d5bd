"""A grandchild keeps every pipe and socket open after the file has gone, so that a reader waits for ever."""
import os
import time

if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(600)
    os._exit(0)
os._exit(0)
