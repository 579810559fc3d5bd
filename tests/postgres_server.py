"""A PostgreSQL server of one's own, for tests and benchmarks."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg


@dataclass(frozen=True)
class PostgresCluster:
    """A running server on a Unix socket in a folder of its own."""

    folder: Path

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
    programs = postgres_programs()
    assert programs is not None, "PostgreSQL's server programs are not installed: apt-get install postgresql"
    folder = Path(tempfile.mkdtemp(prefix="pg", dir="/tmp"))  # a socket's name must be short
    owner = _unprivileged_user()
    if owner is not None:
        os.chown(folder, owner.pw_uid, owner.pw_gid)
    data = folder / "data"

    def run(program: str, *arguments: str) -> None:
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

    run("initdb", "-D", str(data), "-U", "postgres", "--auth=trust", "--encoding=UTF8", "--no-sync")
    options = f"-k {folder} -c listen_addresses="
    if not durable:
        options += " -c fsync=off -c synchronous_commit=off -c full_page_writes=off"
    run("pg_ctl", "-D", str(data), "-l", str(folder / "log"), "-w", "-o", options, "start")
    try:
        yield PostgresCluster(folder)
    finally:
        run("pg_ctl", "-D", str(data), "-m", "immediate", "-w", "stop")
        shutil.rmtree(folder)


def _unprivileged_user() -> pwd.struct_passwd | None:
    """PostgreSQL refuses to run as root."""
    if os.geteuid() != 0:
        return None
    try:
        return pwd.getpwnam("postgres")
    except KeyError:
        return pwd.getpwnam("nobody")
