"""What an operator can set. The only reader of the environment; `.env.example` explains every variable.

Nothing here is read at import. A door calls `Settings.from_env(os.environ)` once and hands the value on.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from grader import devices
from grader.errors import UserError

PREFIX = "TILEGRADE_"
_ROOT = Path(__file__).resolve().parent.parent
MIN_KEY_CHARACTERS = 32
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
_MAX_SOCKET_PATH_BYTES = 100  # the kernel's limit is 108 with the closing NUL, and Valkey adds a suffix


@dataclass(frozen=True, kw_only=True)  # no slots: `from_env` reads the defaults from the class
class Settings:
    """Everything that differs between installations. The defaults serve one laptop."""

    data_dir: Path
    assignments_dir: Path
    database_url: str = field(repr=False)  # may hold a password
    broker_url: str = field(repr=False)
    embedded_broker: bool  # True: `tilegrade up` starts Valkey itself, on a socket in data_dir
    secret_key: str = field(default="", repr=False)  # empty: kept in data_dir, made on first use; see `read_secret_key`

    host: str = "127.0.0.1"
    port: int = 8000
    web_processes: int = 1
    secure_cookies: bool = False  # True wherever the service is reached over https
    proxies: int = 0  # reverse proxies in front, whose X-Forwarded-For is believed
    session_hours: float = 12.0

    max_source_bytes: int = 256 * 1024
    hand_ins_per_minute: int = 6
    hand_ins_per_hour: int = 60
    max_waiting_per_student: int = 5
    login_failures: int = 5  # for one name from one address, within login_window_s
    login_failures_per_address: int = 50
    login_window_s: float = 900.0

    device: str = "cpu"  # what a worker of this process grades with
    slot: int | None = None  # number of this worker on its host, of its GPU with `cuda`; None: 0, or one for each GPU
    recheck_s: float = 60.0  # a worker whose host failed its check looks again at least so often
    lease_s: float = 30.0
    heartbeat_s: float = 5.0
    sweep_every_s: float = 10.0
    max_lost_attempts: int = 3
    allow_reduced_sandbox: bool = False  # grade where the host cannot isolate fully; the report says so

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Settings:
        """Read the variables that are set; the rest keep their defaults.

        Raises:
            UserError: a value does not parse; the message names the variable and what it may hold.
        """
        return cls._read(_Environment(environ))

    @classmethod
    def _read(cls, env: _Environment) -> Settings:
        data_dir = env.path("DATA", _ROOT / "var")
        broker_url = env.text("BROKER_URL", "")
        settings = cls(
            data_dir=data_dir,
            assignments_dir=env.path("ASSIGNMENTS", _ROOT / "assignments"),
            database_url=_database_url(env.text("DATABASE_URL", f"sqlite:///{data_dir / 'tilegrade.db'}")),
            broker_url=_broker_url(broker_url) if broker_url else _embedded_broker_url(data_dir),
            embedded_broker=not broker_url,
            secret_key=_secret_key(env.text("SECRET_KEY", "")),
            host=env.text("HOST", cls.host),
            port=env.integer("PORT", cls.port, least=1, most=65535),
            # more gain nothing beside a database and workers on the same few processors
            web_processes=env.integer("WEB_PROCESSES", min(2, len(os.sched_getaffinity(0))), least=1),
            secure_cookies=env.flag("SECURE_COOKIES", cls.secure_cookies),
            proxies=env.integer("PROXIES", cls.proxies),
            session_hours=env.number("SESSION_HOURS", cls.session_hours),
            max_source_bytes=env.integer("MAX_SOURCE_BYTES", cls.max_source_bytes, least=1),
            hand_ins_per_minute=env.integer("HAND_INS_PER_MINUTE", cls.hand_ins_per_minute, least=1),
            hand_ins_per_hour=env.integer("HAND_INS_PER_HOUR", cls.hand_ins_per_hour, least=1),
            max_waiting_per_student=env.integer("MAX_WAITING_PER_STUDENT", cls.max_waiting_per_student, least=1),
            login_failures=env.integer("LOGIN_FAILURES", cls.login_failures, least=1),
            login_failures_per_address=env.integer(
                "LOGIN_FAILURES_PER_ADDRESS", cls.login_failures_per_address, least=1
            ),
            login_window_s=env.number("LOGIN_WINDOW_S", cls.login_window_s),
            device=env.choice("DEVICE", devices.KINDS, cls.device),
            slot=env.optional_integer("SLOT"),
            recheck_s=env.number("RECHECK_S", cls.recheck_s),
            lease_s=env.number("LEASE_S", cls.lease_s),
            heartbeat_s=env.number("HEARTBEAT_S", cls.heartbeat_s),
            sweep_every_s=env.number("SWEEP_EVERY_S", cls.sweep_every_s),
            max_lost_attempts=env.integer("MAX_LOST_ATTEMPTS", cls.max_lost_attempts, least=1),
            # the demo on a laptop may; a service that somebody set up must say so
            allow_reduced_sandbox=env.flag("ALLOW_REDUCED_SANDBOX", not broker_url),
        )
        if settings.heartbeat_s * 2 > settings.lease_s:
            raise UserError(
                f"{PREFIX}HEARTBEAT_S is {settings.heartbeat_s:g} and {PREFIX}LEASE_S is {settings.lease_s:g}; "
                f"a lease must outlast two heartbeats, or a healthy worker loses its submission."
            )
        return settings

    @property
    def lease(self) -> timedelta:
        return timedelta(seconds=self.lease_s)

    @property
    def broker_socket(self) -> Path:
        """Where the embedded Valkey listens."""
        return self.data_dir / "valkey.sock"

    def read_secret_key(self) -> str:
        """The key that signs sessions: the variable's value, or a random one kept in the data folder with mode 0600."""
        if self.secret_key:
            return self.secret_key
        path = self.data_dir / "secret_key"
        self.make_data_dir()
        if not path.exists():
            # written aside and then linked: of two processes that start together both read the whole of one key
            fd, aside = tempfile.mkstemp(dir=self.data_dir, prefix=".secret_key-")  # mkstemp makes it 0600
            os.write(fd, f"{secrets.token_hex(32)}\n".encode())
            os.close(fd)
            with contextlib.suppress(FileExistsError):
                path.hardlink_to(aside)
            Path(aside).unlink()
        found = path.read_text(encoding="ascii").strip()
        if len(found) < MIN_KEY_CHARACTERS:
            raise UserError(f"{path} holds no key; delete it and start again (everybody logs in anew).")
        return found

    def make_data_dir(self) -> None:
        """Create the data folder, readable by its owner alone: students' files and password hashes lie in it.

        Raises:
            UserError: it cannot be made.
        """
        make_private_dir(self.data_dir)


def make_private_dir(folder: Path) -> None:
    """Create a folder that only its owner reads. Raises UserError where it cannot be made."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as exc:
        raise UserError(
            f"The folder {folder} cannot be made ({exc.strerror}). {PREFIX}DATA names another one for what is kept."
        ) from None


def check_flags(settings: Settings) -> list[str]:
    """What `python -m workers check` must know of an installation."""
    flags = ["--device", devices.kind_of(settings.device), "--gpu", str(settings.slot or 0)]
    flags += ["--allow-reduced"] if settings.allow_reduced_sandbox else []
    for path in (settings.data_dir, settings.assignments_dir):
        flags += ["--hidden", str(path)]
    return flags


def known_variables() -> list[str]:
    """Every variable that `Settings.from_env` reads."""
    env = _Environment({})
    Settings._read(env)
    return env.asked


class _Environment:
    """Typed reading of one mapping, with complaints that name the variable."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self.asked: list[str] = []

    def text(self, name: str, default: str) -> str:
        self.asked.append(PREFIX + name)
        # set but empty is unset: that is what `NAME=` in an env file and Compose's `${NAME:-}` give
        return self._environ.get(PREFIX + name, "").strip() or default

    def path(self, name: str, default: Path) -> Path:
        return Path(self.text(name, str(default))).expanduser().absolute()

    def choice(self, name: str, among: tuple[str, ...], default: str) -> str:
        value = self.text(name, default)
        if value not in among:
            raise UserError(f"{PREFIX}{name} is {value!r}; it may be {' or '.join(among)}.")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.text(name, "1" if default else "0").lower()
        if value not in _TRUE + _FALSE:
            raise UserError(f"{PREFIX}{name} is {value!r}; write 1 or 0.")
        return value in _TRUE

    def integer(self, name: str, default: int, *, least: int = 0, most: int | None = None) -> int:
        value = self.text(name, str(default))
        is_number = value.isascii() and value.isdigit()
        if not is_number or int(value) < least or (most is not None and int(value) > most):
            limit = "" if most is None else f" and at most {most}"
            raise UserError(f"{PREFIX}{name} is {value!r}; it must be a whole number of at least {least}{limit}.")
        return int(value)

    def optional_integer(self, name: str) -> int | None:
        return self.integer(name, 0) if self.text(name, "") else None

    def number(self, name: str, default: float) -> float:
        value = self.text(name, str(default))
        try:
            found = float(value)
        except ValueError:
            found = math.nan
        if not 0 < found < math.inf:
            raise UserError(f"{PREFIX}{name} is {value!r}; it must be a number above 0.")
        return found


def _database_url(url: str) -> str:
    """The same URL with the driver that we install named, where the operator left it out."""
    for prefix in ("postgres://", "postgresql://"):
        if url.startswith(prefix):
            return "postgresql+psycopg://" + url.removeprefix(prefix)
    if not url.startswith(("sqlite:", "postgresql+psycopg:")):
        scheme = url.partition(":")[0]
        raise UserError(
            f"{PREFIX}DATABASE_URL starts with {scheme!r}; it must be sqlite:///PATH or postgresql://USER:PASSWORD@HOST/NAME."
        )
    return url


def _broker_url(url: str) -> str:
    if not url.startswith(("redis://", "rediss://", "redis+socket://")):
        scheme = url.partition(":")[0]
        raise UserError(
            f"{PREFIX}BROKER_URL starts with {scheme!r}; it must be redis://HOST:PORT/0 or redis+socket:///PATH."
        )
    return url


def _secret_key(key: str) -> str:
    if key and len(key) < MIN_KEY_CHARACTERS:
        raise UserError(
            f"{PREFIX}SECRET_KEY has {len(key)} characters and needs {MIN_KEY_CHARACTERS}: who guesses it is whoever "
            f'they like. python3 -c "import secrets; print(secrets.token_hex(32))" makes one.'
        )
    return key


def _embedded_broker_url(data_dir: Path) -> str:
    socket = data_dir / "valkey.sock"
    if len(os.fsencode(socket)) > _MAX_SOCKET_PATH_BYTES:
        raise UserError(
            f"{PREFIX}DATA is {data_dir}, and a socket in it would have too long a name for the kernel; "
            f"choose a folder with a path of at most {_MAX_SOCKET_PATH_BYTES - 12} bytes, or set {PREFIX}BROKER_URL."
        )
    return f"redis+socket://{socket}"
