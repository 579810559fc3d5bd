"""docker-compose.yml and what it builds, as far as can be known without Docker: schema, commands, files, profile."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import click
import jsonschema
import pytest
import yaml

from grader.cli import cli
from grader.settings import Settings, known_variables

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
PROFILE = json.loads((ROOT / "docker" / "seccomp.json").read_text())
DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))

STRINGS = {"type": "array", "items": {"type": "string"}, "minItems": 1}
DURATION = {"type": "string", "pattern": r"^(\d+(h|m|s|ms))+$"}
# the part of the Compose specification that this file uses; nothing else may appear
SCHEMA = {
    "type": "object",
    "required": ["services"],
    "additionalProperties": False,
    "patternProperties": {"^x-": {}},
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z0-9][a-z0-9_-]*$"},
        "volumes": {"type": "object", "additionalProperties": {"type": ["object", "null"]}},
        "services": {
            "type": "object",
            "patternProperties": {"^[a-zA-Z0-9._-]+$": {"$ref": "#/$defs/service"}},
            "additionalProperties": False,
        },
    },
    "$defs": {
        "service": {
            "type": "object",
            "additionalProperties": False,
            "required": ["image"],
            "properties": {
                "image": {"type": "string"},
                "build": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["context", "dockerfile"],
                    "properties": {"context": {"type": "string"}, "dockerfile": {"type": "string"}},
                },
                "command": STRINGS,
                "environment": {"type": "object", "additionalProperties": {"type": "string"}},
                "ports": STRINGS,
                "volumes": STRINGS,
                "tmpfs": STRINGS,
                "profiles": STRINGS,
                "cap_add": STRINGS,
                "cap_drop": STRINGS,
                "security_opt": STRINGS,
                "init": {"type": "boolean"},
                "read_only": {"type": "boolean"},
                "restart": {"enum": ["no", "always", "on-failure", "unless-stopped"]},
                "stop_grace_period": DURATION,
                "healthcheck": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["test"],
                    "properties": {
                        "test": {
                            "type": "array",
                            "prefixItems": [{"enum": ["CMD", "CMD-SHELL"]}],
                            "items": {"type": "string"},
                            "minItems": 2,
                        },
                        "interval": DURATION,
                        "timeout": DURATION,
                        "start_period": DURATION,
                        "retries": {"type": "integer", "minimum": 1},
                    },
                },
                "depends_on": {
                    "type": "object",
                    "additionalProperties": {
                        "type": "object",
                        "additionalProperties": False,
                        "required": ["condition"],
                        "properties": {
                            "condition": {
                                "enum": ["service_started", "service_healthy", "service_completed_successfully"]
                            }
                        },
                    },
                },
                "deploy": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {
                        "resources": {
                            "type": "object",
                            "additionalProperties": False,
                            "properties": {
                                "reservations": {
                                    "type": "object",
                                    "additionalProperties": False,
                                    "properties": {
                                        "devices": {
                                            "type": "array",
                                            "items": {
                                                "type": "object",
                                                "additionalProperties": False,
                                                "required": ["capabilities"],
                                                "properties": {
                                                    "driver": {"type": "string"},
                                                    "count": {"const": "all"},
                                                    "device_ids": STRINGS,
                                                    "capabilities": STRINGS,
                                                },
                                            },
                                        }
                                    },
                                }
                            },
                        }
                    },
                },
            },
        }
    },
}


def test_the_file_keeps_to_the_compose_specification():
    jsonschema.Draft202012Validator(SCHEMA).validate(COMPOSE)


def test_the_parts_of_the_service_are_there():
    assert set(COMPOSE["services"]) == {"migrate", "web", "beat", "worker", "worker-gpu", "postgres", "redis"}
    assert COMPOSE["services"]["worker-gpu"]["profiles"] == ["gpu"]


def test_whatever_runs_for_long_has_a_health_check_or_is_told_by_the_database():
    without = {name for name, one in COMPOSE["services"].items() if "healthcheck" not in one and one["restart"] != "no"}
    assert without == {"beat"}  # a sweep that dies is started again; nothing waits for it


def test_what_is_depended_on_can_fulfil_it():
    for service in COMPOSE["services"].values():
        for name, wanted in service.get("depends_on", {}).items():
            other = COMPOSE["services"][name]
            if wanted["condition"] == "service_healthy":
                assert "healthcheck" in other
            if wanted["condition"] == "service_completed_successfully":
                assert other["restart"] == "no"


def test_every_volume_is_declared_and_used():
    used = {volume.split(":")[0] for one in COMPOSE["services"].values() for volume in one.get("volumes", [])}
    assert used == set(COMPOSE["volumes"])


def _commands():
    for name, service in COMPOSE["services"].items():
        yield f"{name}-command", service.get("command", [])
        yield f"{name}-healthcheck", service.get("healthcheck", {}).get("test", [])[1:]
    for path in DOCKERFILES:
        yield path.name, json.loads(re.search(r"^CMD (.*)$", path.read_text(), re.MULTILINE)[1])
    for number, line in enumerate((ROOT / "docker" / "README.md").read_text().splitlines()):
        if match := re.search(r"docker compose exec \w+ (tilegrade .*?)(`|$)", line):
            yield f"README-{number}", shlex.split(match[1])


@pytest.mark.parametrize(
    "words", [pytest.param(words, id=name) for name, words in _commands() if words[:1] == ["tilegrade"]]
)
def test_every_command_is_one_of_ours(words):
    command: click.Command = cli
    rest = words[1:]
    while isinstance(command, click.Group):
        assert rest[0] in command.commands, f"{' '.join(words)}: there is no {rest[0]!r}"
        command, rest = command.commands[rest[0]], rest[1:]
    command.make_context("tilegrade", list(rest))  # raises UsageError where options or arguments do not fit


def test_the_healthcheck_of_the_web_asks_a_page_that_exists():
    asked = COMPOSE["services"]["web"]["healthcheck"]["test"][-1]
    port = Settings.from_env({}).port
    assert f"http://127.0.0.1:{port}/health" in asked
    assert '"/health"' in (ROOT / "grader" / "web" / "__init__.py").read_text()


BY_WORKERS = frozenset(
    {
        *("DATABASE_URL", "BROKER_URL", "LEASE_S", "HEARTBEAT_S", "RECHECK_S"),
        *("MAX_LOST_ATTEMPTS", "ALLOW_REDUCED_SANDBOX"),
    }
)
READ_BY = {
    "web": {
        *("DATABASE_URL", "BROKER_URL", "SECRET_KEY", "WEB_PROCESSES", "SECURE_COOKIES", "PROXIES", "SESSION_HOURS"),
        *("MAX_SOURCE_BYTES", "HAND_INS_PER_MINUTE", "HAND_INS_PER_HOUR", "MAX_WAITING_PER_STUDENT"),
        *("LOGIN_FAILURES", "LOGIN_FAILURES_PER_ADDRESS", "LOGIN_WINDOW_S"),
    },
    "migrate": {"DATABASE_URL"},
    "beat": {"BROKER_URL", "SWEEP_EVERY_S"},
    "worker": BY_WORKERS,
    "worker-gpu": BY_WORKERS,
}
NOT_PASSED_ON = {
    "DATA": "the image says where its volume is",
    "ASSIGNMENTS": "the image says where it has them",
    "HOST": "the image listens on every address of its container",
    "PORT": "the container's own; TILEGRADE_PUBLISH is the host's",
    "DEVICE": "each of the two services of workers has its own",
    "SLOT": "one worker a container, or one for each GPU",
}


def test_every_setting_reaches_the_services_that_read_it_and_no_other():
    passed = {
        service: {name.removeprefix("TILEGRADE_") for name in one["environment"] if name.startswith("TILEGRADE_")}
        for service, one in COMPOSE["services"].items()
        if "environment" in one
    }
    assert passed == READ_BY | {"postgres": set()}
    every = set().union(*READ_BY.values(), NOT_PASSED_ON)
    assert every == {name.removeprefix("TILEGRADE_") for name in known_variables()}


OTHER_THAN_DEFAULT = {
    **{name: str(7000 + number) for number, name in enumerate(sorted(set().union(*READ_BY.values())))},
    "DATABASE_URL": "postgresql://other/db",
    "BROKER_URL": "redis://other:6379/0",
    "SECRET_KEY": "0123456789" * 4,
    "SECURE_COOKIES": "1",
    "ALLOW_REDUCED_SANDBOX": "1",
    "WEB_PROCESSES": "3",
    "HEARTBEAT_S": "11",
}


@pytest.mark.parametrize("service", READ_BY)
def test_what_the_env_file_says_is_what_a_service_reads(service):
    urls = {"DATABASE_URL": "postgresql://tilegrade:secret@postgres/tilegrade", "BROKER_URL": "redis://redis:6379/0"}
    for said in ({}, OTHER_THAN_DEFAULT):
        env_file = {f"TILEGRADE_{name}": value for name, value in said.items()}
        found = _in_container(service, {"TILEGRADE_POSTGRES_PASSWORD": "secret", **env_file})
        expected = {name: value for name, value in (urls | said).items() if name in READ_BY[service]}
        assert Settings.from_env(found) == Settings.from_env({f"TILEGRADE_{k}": v for k, v in expected.items()})


def _in_container(service, env_file):
    """What Compose gives that service where `.env` says so, by the rules of its interpolation."""

    def value(text):
        # innermost first; a name alone, with a default where it is unset or empty, or with a complaint
        while found := re.search(r"\$\{(\w+)(?:(:-|:\?)([^${}]*))?\}", text):
            name, how, rest = found.groups()
            said = env_file.get(name, "")
            assert said or how != ":?", rest
            text = text[: found.start()] + (said or rest or "") + text[found.end() :]
        return text

    return {name: value(text) for name, text in COMPOSE["services"][service]["environment"].items()}


def test_what_is_not_passed_on_is_said_in_the_example():
    said = re.search(r"In containers ([^.]*) are settled", (ROOT / ".env.example").read_text())
    assert set(re.findall(r"[A-Z]+", said[1])) == set(NOT_PASSED_ON)


def test_no_service_is_given_a_whole_env_file():
    """It would carry the key that signs sessions into workers."""
    assert "env_file" not in (ROOT / "docker-compose.yml").read_text()


def test_no_password_is_in_the_file():
    text = (ROOT / "docker-compose.yml").read_text()
    assert re.findall(r"TILEGRADE_POSTGRES_PASSWORD(?!:\?)", text.split("name: tilegrade")[1]) == []


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_what_an_image_copies_is_there(path):
    for line in re.findall(r"^COPY (.*)$", path.read_text(), re.MULTILINE):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists(), source
    for name in re.findall(r"(TILEGRADE_[A-Z_]+)=", path.read_text()):
        assert name in known_variables()


def test_builds_name_files_that_are_there():
    for service in COMPOSE["services"].values():
        if "build" in service:
            assert (ROOT / service["build"]["dockerfile"]).is_file()
        for option in service.get("security_opt", []):
            if option.startswith("seccomp="):
                assert (ROOT / option.removeprefix("seccomp=")).is_file()


def test_only_workers_may_do_more_than_a_container_usually_may():
    more = {name for name, one in COMPOSE["services"].items() if one.get("cap_add")}
    assert more == {"worker", "worker-gpu"}
    for name in ("web", "beat", "migrate"):
        service = COMPOSE["services"][name]
        assert (service["cap_drop"], service["read_only"]) == (["ALL"], True)


def test_the_profile_is_an_allow_list_without_what_breaks_out():
    assert PROFILE["defaultAction"] == "SCMP_ACT_ERRNO"
    assert {group["action"] for group in PROFILE["syscalls"]} == {"SCMP_ACT_ALLOW"}
    names = [name for group in PROFILE["syscalls"] for name in group["names"]]
    assert len(names) == len(set(names))
    assert {"clone", "unshare", "setns", "mount", "umount2", "pivot_root"} <= set(names)
    dangerous = """
        acct add_key bpf create_module delete_module finit_module init_module io_uring_enter io_uring_register
        io_uring_setup iopl ioperm kexec_file_load kexec_load keyctl lookup_dcookie memfd_secret modify_ldt
        open_by_handle_at perf_event_open process_vm_readv process_vm_writev ptrace quotactl reboot request_key
        settimeofday clock_settime swapon swapoff syslog userfaultfd vhangup
    """
    assert set(names) & set(dangerous.split()) == set()


# -- what a worker's container needs, and no more: tried with all that an engine would do to a process ---------------

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: capabilities and mounts are taken from it")
needs_bwrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")


def check_in_container(service, *without, allow_reduced=False):
    """What `tilegrade worker check` finds in that service's container, as far as that can be had here."""
    left_out = [word for name in without for word in ("--without", name)]
    flags = ["--allow-reduced"] if allow_reduced else []
    done = subprocess.run(
        [
            *(sys.executable, str(Path(__file__).parent / "contained.py"), service, *left_out, "--"),
            *(sys.executable, "-m", "workers", "check", *flags),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# options without which a worker takes no work, and the wall that its check then misses
WALL_OF = {
    **dict.fromkeys(("SYS_ADMIN", "SETUID", "SETGID", "seccomp", "systempaths"), "sandbox"),
    "writable-cgroups": "memory",
}


@pytest.mark.slow
@needs_root
@needs_bwrap
@pytest.mark.parametrize("service", ["worker", "worker-gpu"])
def test_every_wall_stands_in_a_workers_container(service):
    found = check_in_container(service)
    assert [one for one in found["checks"] if not one["ok"]] == []
    assert len(found["checks"]) == 10


@pytest.mark.slow
@needs_root
@needs_bwrap
@pytest.mark.parametrize(("option", "wall"), WALL_OF.items(), ids=WALL_OF)
def test_no_option_of_a_workers_container_is_there_for_nothing(option, wall):
    found = check_in_container("worker", option)
    assert found["ok"] is False
    failed = {one["name"]: one["remedy"] for one in found["checks"] if not one["ok"]}
    assert wall in failed
    assert "docker/README.md" in failed[wall] or "In Docker" in failed[wall]


@pytest.mark.slow
@needs_root
@needs_bwrap
def test_without_writable_cgroups_a_worker_that_may_be_reduced_grades():
    found = check_in_container("worker", "writable-cgroups", allow_reduced=True)
    assert found["ok"] is True
    assert {one["name"] for one in found["checks"] if not one["ok"]} == {"memory"}


def test_workers_have_exactly_these_options():
    for name in ("worker", "worker-gpu"):
        service = COMPOSE["services"][name]
        assert service["cap_drop"] == ["ALL"]
        assert service["cap_add"] == ["KILL", "SETGID", "SETUID", "SYS_ADMIN"]
        assert set(service["security_opt"]) == {
            "no-new-privileges:true",
            "seccomp=docker/seccomp.json",
            "apparmor=unconfined",
            "systempaths=unconfined",
            "writable-cgroups=true",
        }
        assert (service["read_only"], service["init"]) == (True, True)
        assert not {"privileged", "pid", "ipc", "network_mode", "devices", "userns_mode"} & set(service)


def test_the_options_that_a_worker_cannot_do_without_are_named():
    said = re.search(r"Without ([^.]*) the worker's own check\s+fails", (ROOT / "docker" / "README.md").read_text())
    assert set(re.findall(r"`([^`]+)`", said[1])) == set(WALL_OF)


def test_every_option_of_a_workers_container_is_explained():
    text = (ROOT / "docker" / "README.md").read_text()
    service = COMPOSE["services"]["worker"]
    for option in (*service["security_opt"], *service["cap_add"], "cap_drop", "read_only", "init", "tmpfs", "slots"):
        assert f"`{option}" in text or f"{option}`" in text, option


def test_no_secret_is_mounted_where_a_candidate_could_look():
    """A candidate sees /usr, the interpreter's folders and its own scratch; nothing of those is a volume."""
    for name in ("worker", "worker-gpu"):
        targets = [volume.split(":")[1] for volume in COMPOSE["services"][name]["volumes"]]
        assert targets == ["/run/tilegrade"]
    for path in DOCKERFILES:
        for line in re.findall(r"^(?:COPY|ENV|ARG|RUN) (.*)$", path.read_text(), re.MULTILINE):
            assert not re.search(r"(?i)password|secret|token|BROKER_URL|DATABASE_URL", line)
