"""Which system calls a candidate may make: an allow-list, because a deny-list misses what its library has no name for.

Everything else fails with EPERM. Left out on purpose: sockets, io_uring, keyctl, userfaultfd, ptrace and
process_vm_*, mounts and namespaces, bpf, perf, System V and POSIX queues, and calls of other architectures.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
from functools import cache
from typing import Any

_FILES = """
access chmod close close_range copy_file_range creat dup dup2 dup3 faccessat faccessat2 fadvise64 fallocate fchdir
fchmod fchmodat fcntl fdatasync flock fstat fstatfs fsync ftruncate getcwd chdir getdents getdents64 getxattr lgetxattr
link linkat lseek lstat mkdir mkdirat newfstatat open openat openat2 pread64 preadv preadv2 pwrite64 pwritev pwritev2
read readahead readlink readlinkat readv rename renameat renameat2 rmdir sendfile splice stat statfs statx symlink
symlinkat sync tee truncate umask unlink unlinkat utime utimensat utimes write writev
"""
_MEMORY = """
brk get_mempolicy madvise mbind membarrier mincore mlock mlock2 mmap mprotect mremap msync munlock munmap
set_mempolicy
"""
_PROCESSES = """
arch_prctl capget execve execveat exit exit_group fork futex get_robust_list getegid geteuid getgid getgroups getpgid
getpgrp getpid getpriority getppid getresgid getresuid getrlimit getrusage getsid gettid getuid kill pause
pidfd_open pidfd_send_signal prlimit64 restart_syscall rseq rt_sigaction rt_sigpending rt_sigprocmask
rt_sigqueueinfo rt_sigreturn rt_sigsuspend rt_sigtimedwait sched_get_priority_max sched_get_priority_min
sched_getaffinity sched_getattr sched_getparam sched_getscheduler sched_setaffinity sched_yield set_robust_list
set_tid_address setpgid setrlimit setsid sigaltstack tgkill times tkill uname vfork wait4 waitid
"""
_TIME = """
alarm clock_getres clock_gettime clock_nanosleep getitimer gettimeofday nanosleep setitimer time timer_create
timer_delete timer_getoverrun timer_gettime timer_settime timerfd_create timerfd_gettime timerfd_settime
"""
# sendto and its kin only reach the descriptors a candidate was given: without `socket` it can make no others but pairs
_WAITING = """
epoll_create epoll_create1 epoll_ctl epoll_pwait epoll_pwait2 epoll_wait eventfd eventfd2 getsockopt getsockname
pipe pipe2 poll ppoll pselect6 recvfrom recvmsg select sendmsg sendto shutdown
"""
_OTHER = "getrandom sysinfo"
_ALLOWED = (_FILES, _MEMORY, _PROCESSES, _TIME, _WAITING, _OTHER)

# Found by bisection: without them cuInit answers 304. CUDA talks to its driver by ioctl and, locally, by Unix sockets.
_CUDA = "ioctl memfd_create accept accept4 bind connect getpeername listen setsockopt"

_NEW_NAMESPACES = 0x7E020080  # CLONE_NEW{NS,CGROUP,UTS,IPC,USER,PID,NET,TIME}
# PR_[GS]ET_NAME, GET_DUMPABLE, GET_PDEATHSIG, CAPBSET_READ, [GS]ET_NO_NEW_PRIVS, GET_SECCOMP, SET_VMA: harmless ones
_PRCTLS = (15, 16, 3, 2, 23, 38, 39, 21, 0x53564D41)
_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # TCGETS TIOCGWINSZ FIONREAD FIONBIO FIONCLEX FIOCLEX


class SeccompError(Exception):
    """The library that compiles the filter is missing; the text says what to install."""


@cache
def candidate_filter(*, gpu: bool, fifos: bool = False) -> bytes:
    """Compile the allow-list to the BPF program that bubblewrap installs.

    Args:
        fifos: named pipes may be made too, by which compute-sanitizer talks to what runs under it.
    """
    try:
        import pyseccomp
    except (ImportError, RuntimeError, OSError) as exc:
        raise SeccompError("no system-call filter: `apt-get install libseccomp2` and `pip install pyseccomp`") from exc
    policy: Any = pyseccomp.SyscallFilter(defaction=pyseccomp.ERRNO(errno.EPERM))

    def allow(name: str, *conditions: Any) -> None:
        # older architectures' calls (open, fork, ...) have no number on arm64, and newer ones none in an old library
        if pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, name) >= 0:
            policy.add_rule(pyseccomp.ALLOW, name, *conditions)

    for name in " ".join(_ALLOWED).split():
        allow(name)
    for request in _PRCTLS:
        allow("prctl", pyseccomp.Arg(0, pyseccomp.EQ, request))
    allow("clone", pyseccomp.Arg(0, pyseccomp.MASKED_EQ, _NEW_NAMESPACES, 0))
    if fifos:
        # of the file types a fifo alone; found by leaving out one call after another on an H200
        allow("mknodat", pyseccomp.Arg(2, pyseccomp.MASKED_EQ, 0o170000, stat.S_IFIFO))
    # its flags are in memory, where a filter cannot look; ENOSYS makes libc use clone
    policy.add_rule(pyseccomp.ERRNO(errno.ENOSYS), "clone3")
    allow("socketpair", pyseccomp.Arg(0, pyseccomp.EQ, socket.AF_UNIX))
    if gpu:
        for name in _CUDA.split():
            allow(name)
        allow("socket", pyseccomp.Arg(0, pyseccomp.EQ, socket.AF_UNIX))
    else:
        for request in _IOCTLS:
            allow("ioctl", pyseccomp.Arg(1, pyseccomp.EQ, request))
    with os.fdopen(os.memfd_create("filter"), "w+b") as file:
        policy.export_bpf(file)
        file.seek(0)
        return file.read()
