"""Runs a command as a service of docker-compose.yml would, as far as that can be had without an engine.

usage: contained.py SERVICE [--without OPTION ...] -- COMMAND...

Capabilities, the seccomp profile, no-new-privileges, volumes, the read-only root with its tmpfs, and, unless the
options lift them, Docker's masks over /proc and its read-only cgroups. `--without` leaves one option out: a capability
by name, or seccomp, systempaths, writable-cgroups. Needs root.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import json
import os
import sys
from pathlib import Path

import pyseccomp
import yaml

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())

CAPABILITIES = {
    "CHOWN": 0, "DAC_OVERRIDE": 1, "FOWNER": 3, "FSETID": 4, "KILL": 5, "SETGID": 6, "SETUID": 7, "SETPCAP": 8,
    "NET_BIND_SERVICE": 10, "NET_RAW": 13, "SYS_CHROOT": 18, "SYS_PTRACE": 19, "SYS_ADMIN": 21, "MKNOD": 27,
    "AUDIT_WRITE": 29, "SETFCAP": 31,
}  # fmt: skip
# what Docker gives where nothing is dropped
USUAL = set(CAPABILITIES) - {"SYS_PTRACE", "SYS_ADMIN"}
# what Docker's own profile refuses although SYS_ADMIN was added, of what a sandbox is built with
NOT_IN_DOCKERS_PROFILE = {"pivot_root"}
MASKED = ("/proc/acpi", "/proc/kcore", "/proc/keys", "/proc/timer_list", "/proc/scsi")
READ_ONLY = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")

_PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 24, 38
_CLONE_NEWNS = 0x00020000
_RDONLY, _NOSUID, _NODEV, _NOEXEC, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Give up what a container lacks, then become the command."""
    parser = argparse.ArgumentParser()
    parser.add_argument("service", choices=list(COMPOSE["services"]))
    parser.add_argument("--without", action="append", default=[])
    parser.add_argument("command", nargs="+")
    arguments = parser.parse_args()
    service, without = COMPOSE["services"][arguments.service], set(arguments.without)
    options = {one for one in service.get("security_opt", []) if one.split("=")[0] not in without}
    _mounts(service, options)
    _capabilities(service, without)
    if "no-new-privileges:true" in options:
        _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no-new-privileges")
    _filter(service, without)
    os.execvp(arguments.command[0], arguments.command)


def _mounts(service: dict[str, object], options: set[str]) -> None:
    _check(_libc.unshare(_CLONE_NEWNS), "unshare")
    _mount("none", "/", None, _REC | _PRIVATE)
    for volume in service.get("volumes", []):  # type: ignore[attr-defined]
        target = Path(volume.split(":")[1])
        target.mkdir(parents=True, exist_ok=True)
        _mount("tmpfs", str(target), "tmpfs", _NOSUID | _NODEV)
    if service.get("read_only"):
        _mount("none", "/", None, _REMOUNT | _BIND | _RDONLY)
    for line in service.get("tmpfs", []):  # type: ignore[attr-defined]
        path, _, how = line.partition(":")
        if not any(Path(prefix).is_relative_to(path) for prefix in (sys.prefix, sys.base_prefix, str(ROOT))):
            _mount("tmpfs", path, "tmpfs", _NOSUID | _NODEV | (0 if "exec" in how.split(",") else _NOEXEC))
        else:  # the project lies below it, as no container's does: what wants a temporary folder finds one elsewhere
            _mount("tmpfs", "/var/tmp", "tmpfs", _NOSUID | _NODEV)
    if "systempaths=unconfined" not in options:
        _mask_proc()
    if "writable-cgroups=true" not in options:
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            if " - cgroup" in line:
                _mount("none", line.split(" ")[4], None, _REMOUNT | _BIND | _RDONLY)


def _mask_proc() -> None:
    for path in (one for one in MASKED if Path(one).exists()):
        if Path(path).is_dir():
            _mount("tmpfs", path, "tmpfs", _RDONLY)
        else:
            _mount("/dev/null", path, None, _BIND)
    for path in (one for one in READ_ONLY if Path(one).exists()):
        _mount(path, path, None, _BIND | _REC)
        _mount("none", path, None, _REMOUNT | _BIND | _RDONLY)


def _capabilities(service: dict[str, list[str]], without: set[str]) -> None:
    kept = set() if service.get("cap_drop") == ["ALL"] else set(USUAL)
    kept |= set(service.get("cap_add", []))
    numbers = {CAPABILITIES[name] for name in kept - without}
    for number in range(64):
        if number not in numbers:
            _libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0)


def _filter(service: dict[str, list[str]], without: set[str]) -> None:
    path = next(one.removeprefix("seccomp=") for one in service["security_opt"] if one.startswith("seccomp="))
    profile = json.loads((ROOT / path).read_text())
    assert profile["defaultAction"] == "SCMP_ACT_ERRNO"
    policy = pyseccomp.SyscallFilter(pyseccomp.ERRNO(errno.EPERM))
    policy.set_attr(pyseccomp.Attr.CTL_NNP, 0)
    for group in profile["syscalls"]:
        assert group["action"] == "SCMP_ACT_ALLOW"
        for name in set(group["names"]) - (NOT_IN_DOCKERS_PROFILE if "seccomp" in without else set()):
            with contextlib.suppress(ValueError, RuntimeError):  # newer than this host's library
                policy.add_rule(pyseccomp.ALLOW, name)
    policy.load()


def _mount(source: str, target: str, kind: str | None, flags: int) -> None:
    encoded = (None if text is None else os.fsencode(text) for text in (source, target, kind))
    _check(_libc.mount(*encoded, ctypes.c_ulong(flags), None), f"mount {target}")


def _check(result: int, what: str) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), what)


if __name__ == "__main__":
    main()
