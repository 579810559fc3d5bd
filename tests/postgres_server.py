"""A PostgreSQL server of one's own, for tests and benchmarks."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psycopg


@dataclass(frozen=True)
class PostgresCluster:
    """A running server on a Unix socket in a folder of its own."""

    folder: Path
    options: str = field(repr=False)

    def start(self) -> None:
        _run(self.folder, "pg_ctl", "-D", "data", "-l", "log", "-w", "-o", self.options, "start")

    def stop(self, mode: str = "immediate") -> None:
        """`immediate` is a crash, from which the next start recovers; `fast` is what an operator would do."""
        _run(self.folder, "pg_ctl", "-D", "data", "-m", mode, "-w", "stop")

    def url(self, name: str) -> str:
        return f"postgresql+psycopg://postgres@/{name}?host={self.folder}"

    def create(self, name: str) -> str:
        """Make one more database; returns its URL."""
        with self.connect("postgres") as connection:
            connection.execute(f'CREATE DATABASE "{name}"')
        return self.url(name)

    def connect(self, name: str) -> psycopg.Connection:
        return psycopg.connect(host=str(self.folder), user="postgres", dbname=name, autocommit=True)


def postgres_programs() -> Path | None:
    """The folder of the newest server programs; None where they are not installed."""
    found = Path("/usr/lib/postgresql").glob("*/bin")
    return max(found, key=lambda path: int(path.parent.name), default=None)


@contextmanager
def start_postgres(*, durable: bool) -> Iterator[PostgresCluster]:
    """Start a server; it is gone with its data at the end of the block.

    Args:
        durable: as an operator would run it. False is faster and does not survive a crash.
    """
    folder = Path(tempfile.mkdtemp(prefix="pg", dir="/tmp"))  # a socket's name must be short
    owner = _unprivileged_user()
    if owner is not None:
        os.chown(folder, owner.pw_uid, owner.pw_gid)
    options = f"-k {folder} -c listen_addresses="
    if not durable:
        options += " -c fsync=off -c synchronous_commit=off -c full_page_writes=off"
    cluster = PostgresCluster(folder, options)
    _run(folder, "initdb", "-D", "data", "-U", "postgres", "--auth=trust", "--encoding=UTF8", "--no-sync")
    cluster.start()
    try:
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(folder)


def _run(folder: Path, program: str, *arguments: str) -> None:
    programs = postgres_programs()
    assert programs is not None, "PostgreSQL's server programs are not installed: apt-get install postgresql"
    owner = _unprivileged_user()
    done = subprocess.run(
        [programs / program, *arguments],
        user=owner.pw_uid if owner else None,
        group=owner.pw_gid if owner else None,
        extra_groups=[] if owner else None,
        cwd=folder,
        env={"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=60,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def _unprivileged_user() -> pwd.struct_passwd | None:
    """PostgreSQL refuses to run as root."""
    if os.geteuid() != 0:
        return None
    try:
        return pwd.getpwnam("postgres")
    except KeyError:
        return pwd.getpwnam("nobody")
