"""Who people are: passwords, log-in with a brake, and the record of who did what."""

from __future__ import annotations

import ipaddress
import re
import secrets
from datetime import datetime, timedelta
from functools import cache

import argon2
from sqlalchemy import delete, func, select, update
from sqlalchemy.orm import Session
from zxcvbn import zxcvbn

from grader.errors import UserError
from grader.models import AuditEvent, LoginFailure, User
from grader.settings import Settings

MAX_NAME_CHARACTERS = 64
MIN_PASSWORD_CHARACTERS = 10
MAX_PASSWORD_CHARACTERS = 512  # hashing is slow on purpose; nobody may feed it a megabyte
MIN_GUESSES = 10**6
_MOST_RATED = 72  # characters that zxcvbn takes
_NAME = re.compile(rf"[a-z0-9][a-z0-9._@+-]{{0,{MAX_NAME_CHARACTERS - 1}}}")
# OWASP's cost for argon2id, of 2023: 19 MiB, two passes, one thread. It leaves the second core to a grading
_HASHER = argon2.PasswordHasher(memory_cost=19456, time_cost=2, parallelism=1)
# without 0/O, 1/l/I: people type these from a terminal
_READABLE = "abcdefghijkmnpqrstuvwxyzABCDEFGHJKLMNPQRSTUVWXYZ23456789"


def random_password() -> str:
    """About 116 bits, easy to read aloud."""
    return "-".join("".join(secrets.choice(_READABLE) for _ in range(5)) for _ in range(4))


def create_user(session: Session, *, name: str, password: str, now: datetime, is_staff: bool = False) -> User:
    """Add somebody. The password is kept as an argon2 hash alone.

    Raises:
        UserError: the name is taken or not a name, or the password is too short.
    """
    name = normal_name(name)
    if not _NAME.fullmatch(name):
        raise UserError(
            f"{name!r} cannot be a user name; use 1 to 64 of a-z, 0-9 and . _ @ + -, and begin with a letter or digit."
        )
    if find_user(session, name) is not None:
        raise UserError(f"There is a user {name!r} already.")
    user = User(name=name, password_hash=_hash(password), is_staff=is_staff, created_at=now)
    session.add(user)
    session.flush()
    detail = f"user {user.name}, staff" if is_staff else f"user {user.name}"
    audit(session, actor_id=None, action="add-user", detail=detail, now=now)
    return user


def close(session: Session, user: User, *, actor_id: int | None, now: datetime) -> bool:
    """Let somebody in no longer, and end every session of theirs at once; False when that was done before.

    What they handed in stays, with its grades.
    """
    if not user.active:
        return False
    user.active = False
    user.session_epoch += 1  # a cookie of before must not be good again once the account is opened
    audit(session, actor_id=actor_id, action="close-user", detail=f"user {user.name}", now=now)
    return True


def reopen(session: Session, user: User, *, actor_id: int | None, now: datetime) -> bool:
    """Let somebody in again, with the password that they had; False when the account is not closed."""
    if user.active:
        return False
    user.active = True
    audit(session, actor_id=actor_id, action="open-user", detail=f"user {user.name}", now=now)
    return True


def set_password(session: Session, user: User, password: str, *, actor_id: int | None, now: datetime) -> None:
    """Change a password and end every session that was opened with the old one."""
    user.password_hash = _hash(password)
    user.session_epoch += 1
    audit(session, actor_id=actor_id, action="set-password", detail=f"user {user.name}", now=now)


def end_sessions(session: Session, user_id: int) -> None:
    """Make every cookie of that person worthless, copies too: a session is a signed cookie, and there is no list."""
    session.execute(update(User).where(User.id == user_id).values(session_epoch=User.session_epoch + 1))


def find_user(session: Session, name: str) -> User | None:
    return session.scalars(select(User).where(User.name == normal_name(name))).one_or_none()


def users(session: Session) -> list[User]:
    """Everybody, by name."""
    return list(session.scalars(select(User).order_by(User.name)))


def normal_name(name: str) -> str:
    """Names are compared without case and surrounding blanks."""
    return name.strip().lower()


def log_in(
    session: Session, *, name: str, password: str, address: str, settings: Settings, now: datetime
) -> User | None:
    """The user of that name and password; None when they do not fit, which is counted against name and address.

    Call it in a session that commits even when the answer is None, or failures are forgotten.

    Raises:
        UserError: too many failures of late; nothing was checked.
    """
    name, address = normal_name(name)[:64], _network(address)
    since = now - timedelta(seconds=settings.login_window_s)
    recent = select(func.count()).where(LoginFailure.address == address, LoginFailure.at > since)
    by_name = session.scalar(recent.where(LoginFailure.name == name)) or 0
    by_address = session.scalar(recent) or 0
    if by_name >= settings.login_failures or by_address >= settings.login_failures_per_address:
        minutes = max(1, round(settings.login_window_s / 60))
        raise UserError(f"Too many wrong passwords. Wait {minutes} minutes and try again.")
    user = find_user(session, name)
    fits = _verify(user.password_hash if user else _decoy_hash(), password)
    if user is None or not fits or not user.active:
        session.add(LoginFailure(name=name, address=address, at=now))
        return None
    session.execute(delete(LoginFailure).where(LoginFailure.name == name, LoginFailure.address == address))
    if _HASHER.check_needs_rehash(user.password_hash):  # our cost went up since it was stored
        user.password_hash = _HASHER.hash(password)
    return user


def forget_old_failures(session: Session, *, settings: Settings, now: datetime) -> None:
    """Delete log-in failures that no longer count."""
    session.execute(delete(LoginFailure).where(LoginFailure.at <= now - timedelta(seconds=settings.login_window_s)))


def audit(
    session: Session,
    *,
    actor_id: int | None,
    action: str,
    now: datetime,
    submission_id: int | None = None,
    detail: str = "",
) -> None:
    """Write down who did what. `actor_id` None means a command on the server, or the service itself."""
    session.add(AuditEvent(at=now, actor_id=actor_id, action=action, submission_id=submission_id, detail=detail))


def trail(
    session: Session, *, submission_id: int | None = None, actor_id: int | None = None, limit: int = 50
) -> list[tuple[AuditEvent, str | None]]:
    """What was written down, the latest first, with the name of who did it; None: a command, or the service itself.

    Args:
        submission_id: only what was done to that one.
        actor_id: only what that person did.
    """
    query = select(AuditEvent, User.name).outerjoin(User, User.id == AuditEvent.actor_id)
    if submission_id is not None:
        query = query.where(AuditEvent.submission_id == submission_id)
    if actor_id is not None:
        query = query.where(AuditEvent.actor_id == actor_id)
    latest_first = query.order_by(AuditEvent.at.desc(), AuditEvent.id.desc()).limit(limit)
    return [(event, name) for event, name in session.execute(latest_first)]


def _network(address: str) -> str:
    """Whom failures are counted against: an IPv6 host has 2**64 addresses to try from, so there its /64 is one."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address[:64]
    if isinstance(found, ipaddress.IPv6Address) and not found.ipv4_mapped:
        return str(ipaddress.IPv6Network((found, 64), strict=False))
    return str(found)


def _hash(password: str) -> str:
    if not MIN_PASSWORD_CHARACTERS <= len(password) <= MAX_PASSWORD_CHARACTERS:
        raise UserError(
            f"A password has {MIN_PASSWORD_CHARACTERS} to {MAX_PASSWORD_CHARACTERS} characters; this one has "
            f"{len(password)}."
        )
    # common ones, keyboard rows, one letter again and again
    if zxcvbn(password[:_MOST_RATED])["guesses"] < MIN_GUESSES:
        raise UserError("That password is among the first that anybody tries. Take a few words instead.")
    return _HASHER.hash(password)


def _verify(password_hash: str, password: str) -> bool:
    try:
        return len(password) <= MAX_PASSWORD_CHARACTERS and _HASHER.verify(password_hash, password)
    except (argon2.exceptions.VerifyMismatchError, argon2.exceptions.InvalidHashError):
        return False  # what is no hash is an account that nobody logs into by password


@cache
def _decoy_hash() -> str:
    """A hash that nothing fits: an unknown name must take as long as a wrong password, or names can be guessed."""
    return _HASHER.hash(secrets.token_hex(16))
