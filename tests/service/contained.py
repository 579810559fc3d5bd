"""Runs a command as the worker's container would: docker/seccomp.json, and Docker's capabilities with SYS_ADMIN.

usage: contained.py PROFILE COMMAND...
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import sys
from pathlib import Path

import pyseccomp

# what Docker gives a container by default, by number, and the one that docker-compose.yml adds: SYS_ADMIN
CAPABILITIES = {0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 27, 29, 31} | {21}
_PR_CAPBSET_DROP = 24


def main() -> None:
    """Give up what a container lacks, then become the command."""
    profile = json.loads(Path(sys.argv[1]).read_text())
    assert profile["defaultAction"] == "SCMP_ACT_ERRNO"
    libc = ctypes.CDLL(None)
    for number in range(64):
        if number not in CAPABILITIES:
            libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0)
    filter_ = pyseccomp.SyscallFilter(pyseccomp.ERRNO(errno.EPERM))
    filter_.set_attr(pyseccomp.Attr.CTL_NNP, 0)
    for group in profile["syscalls"]:
        assert group["action"] == "SCMP_ACT_ALLOW"
        for name in group["names"]:
            with contextlib.suppress(ValueError, RuntimeError):  # newer than this host's library
                filter_.add_rule(pyseccomp.ALLOW, name)
    filter_.load()
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
