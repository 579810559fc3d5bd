"""What the environment may say."""

from __future__ import annotations

import re
import stat
import threading
from pathlib import Path

import pytest

from grader.errors import UserError
from grader.settings import Settings, known_variables

ROOT = Path(__file__).parents[2]


def test_nothing_needs_to_be_set():
    settings = Settings.from_env({})
    assert settings.database_url.startswith("sqlite:////")
    assert settings.embedded_broker
    assert (settings.host, settings.secure_cookies) == ("127.0.0.1", False)


def test_set_but_empty_is_unset():
    assert Settings.from_env({"TILEGRADE_PORT": "", "TILEGRADE_BROKER_URL": " "}) == Settings.from_env({})


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("postgres://u:p@h/d", "postgresql+psycopg://u:p@h/d"),
        ("postgresql://u:p@h/d", "postgresql+psycopg://u:p@h/d"),
        ("postgresql+psycopg://u:p@h/d", "postgresql+psycopg://u:p@h/d"),
        ("sqlite:////x.db", "sqlite:////x.db"),
    ],
)
def test_the_driver_is_ours_to_name(given, url):
    assert Settings.from_env({"TILEGRADE_DATABASE_URL": given}).database_url == url


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("PORT", "http", "TILEGRADE_PORT is 'http'; it must be a whole number of at least 1"),
        ("PORT", "0", "at least 1"),
        ("PORT", "-1", "at least 1"),
        ("PORT", "65536", "TILEGRADE_PORT is '65536'; it must be a whole number of at least 1 and at most 65535."),
        ("PORT", "²", "whole number"),
        ("LEASE_S", "nan", "a number above 0"),
        ("LEASE_S", "inf", "a number above 0"),
        ("SECURE_COOKIES", "maybe", "write 1 or 0"),
        ("DEVICE", "tpu", "it may be cpu or cuda"),
        ("DATABASE_URL", "mysql://x", "starts with 'mysql'; it must be sqlite:///PATH or postgresql://"),
        ("BROKER_URL", "amqp://x", "starts with 'amqp'; it must be redis://HOST:PORT/0 or redis+socket:///PATH."),
        ("BROKER_URL", "redis:/x", "starts with 'redis'; it must be redis://HOST:PORT/0"),
        ("SECRET_KEY", "x" * 31, "has 31 characters and needs 32"),
        ("HEARTBEAT_S", "20", "must outlast two heartbeats"),
        ("DATA", "/tmp/" + "x" * 100, "too long a name"),
    ],
)
def test_a_wrong_value_is_named_with_what_it_may_be(name, value, message):
    with pytest.raises(UserError, match=re.escape(message)):
        Settings.from_env({f"TILEGRADE_{name}": value})


def test_secrets_are_not_printed():
    settings = Settings.from_env(
        {
            "TILEGRADE_SECRET_KEY": "hush-key" * 4,
            "TILEGRADE_DATABASE_URL": "postgresql://u:hush-db@h/d",
            "TILEGRADE_BROKER_URL": "redis://:hush-broker@h",
        }
    )
    assert "hush" not in repr(settings)


def test_the_secret_key_is_made_once_and_is_its_owners(tmp_path):
    settings = Settings.from_env({"TILEGRADE_DATA": str(tmp_path / "data")})
    found = set()
    threads = [threading.Thread(target=lambda: found.add(settings.read_secret_key())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 1
    assert stat.S_IMODE((tmp_path / "data" / "secret_key").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "data").stat().st_mode) == 0o700
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["secret_key"]


def test_a_spoilt_secret_key_is_not_used(tmp_path):
    (tmp_path / "secret_key").write_text("short")
    with pytest.raises(UserError, match="delete it"):
        Settings.from_env({"TILEGRADE_DATA": str(tmp_path)}).read_secret_key()


def test_every_variable_is_explained_in_the_example():
    text = (ROOT / ".env.example").read_text()
    assert set(re.findall(r"^#? ?(TILEGRADE_[A-Z_]+)=", text, re.MULTILINE)) >= set(known_variables())
    assert set(re.findall(r"TILEGRADE_[A-Z_]+", text)) <= {*known_variables(), *COMPOSE_ONLY}


COMPOSE_ONLY = ("TILEGRADE_POSTGRES_PASSWORD", "TILEGRADE_PUBLISH")


def test_only_settings_reads_the_environment():
    readers = [
        path.name
        for path in (ROOT / "grader").rglob("*.py")
        if re.search(r"os\.environ(\[|\.get)|os\.getenv", path.read_text())
    ]
    assert readers == []
