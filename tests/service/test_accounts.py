"""Passwords, log-in, courses and the demo."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import argon2
import pytest
import sqlalchemy as sa

from grader import accounts, course, submissions
from grader.course import Catalog
from grader.errors import AssignmentError, UserError
from grader.models import CourseAssignment, Enrollment, LoginFailure, Role, User

NOW = datetime(2027, 2, 1, 12, 0, tzinfo=UTC)
PASSWORD = "correct horse battery"


@pytest.fixture
def ada(database):
    with database.write() as session:
        return accounts.create_user(session, name="Ada", password=PASSWORD, now=NOW)


@pytest.fixture
def log_in(database, settings):
    def attempt(name="ada", password=PASSWORD, *, address="192.0.2.1", now=NOW):
        with database.write() as session:
            return accounts.log_in(session, name=name, password=password, address=address, settings=settings, now=now)

    return attempt


def test_a_password_is_kept_as_a_hash_alone(database, ada):
    with database.read() as session:
        row = session.execute(sa.select(sa.text("*")).select_from(User)).one()
    assert PASSWORD not in str(row)
    assert ada.password_hash.startswith("$argon2id$")


@pytest.mark.parametrize("name", ["ada", "ADA", " Ada "])
def test_names_are_compared_without_case_and_blanks(ada, log_in, name):
    assert log_in(name).id == ada.id


def test_wrong_password_and_unknown_name_look_the_same(ada, log_in):
    assert log_in(password="wrong password") is None
    assert log_in("nobody") is None


def test_an_inactive_user_cannot_log_in(database, ada, log_in):
    with database.write() as session:
        session.get_one(User, ada.id).active = False
    assert log_in() is None


def test_guessing_is_slowed_down_by_name_and_address(ada, log_in, settings):
    for _ in range(settings.login_failures):
        assert log_in(password="a wrong guess") is None
    with pytest.raises(UserError, match="Wait 15 minutes"):
        log_in()
    assert log_in(address="192.0.2.2").id == ada.id  # somebody else's guesses do not lock Ada out
    assert log_in(now=NOW + timedelta(minutes=16)).id == ada.id


def test_guessing_many_names_is_slowed_down_by_address(ada, log_in, settings, database):
    with database.write() as session:
        for i in range(settings.login_failures_per_address):
            session.add(LoginFailure(name=f"user{i}", address="192.0.2.1", at=NOW))
    with pytest.raises(UserError, match="Too many"):
        log_in()


def test_a_right_password_forgives_earlier_wrong_ones(ada, log_in, settings):
    for _ in range(2):
        for _ in range(settings.login_failures - 1):
            log_in(password="a wrong guess")
        assert log_in() is not None


def test_old_failures_are_forgotten(database, log_in, settings):
    log_in("nobody")
    with database.write() as session:
        accounts.forget_old_failures(session, settings=settings, now=NOW + timedelta(minutes=16))
        assert session.scalars(sa.select(LoginFailure)).all() == []


def test_a_hash_of_a_weaker_cost_is_renewed_at_log_in(database, ada, log_in):
    weak = argon2.PasswordHasher(time_cost=1, memory_cost=8, parallelism=1).hash(PASSWORD)
    with database.write() as session:
        session.get_one(User, ada.id).password_hash = weak
    assert log_in().password_hash != weak
    assert log_in().id == ada.id


def test_a_new_password_ends_old_sessions(database, ada, log_in):
    with database.write() as session:
        user = session.get_one(User, ada.id)
        accounts.set_password(session, user, "another password", actor_id=ada.id, now=NOW)
        assert user.session_epoch == 1
    assert log_in() is None
    assert log_in(password="another password").id == ada.id
    with database.read() as session:
        assert [(event.action, who) for event, who in accounts.trail(session)] == [
            ("set-password", "ada"),
            ("add-user", None),
        ]


def test_a_closed_account_lets_nobody_in_and_keeps_what_is_there(school, log_in):
    submission_id = school.hand_in("ada").submission_id
    with school.database.write() as session:
        ada = session.get_one(User, school.user("ada").id)
        accounts.set_password(session, ada, PASSWORD, actor_id=None, now=NOW)
        before = ada.session_epoch
        assert accounts.close(session, ada, actor_id=None, now=NOW)
        assert not accounts.close(session, ada, actor_id=None, now=NOW)
        assert ada.session_epoch == before + 1
    assert log_in() is None
    with school.database.write() as session:
        ada = session.get_one(User, school.user("ada").id)
        assert submissions.find(session, submission_id).user is ada
        assert accounts.reopen(session, ada, actor_id=None, now=NOW)
        assert not accounts.reopen(session, ada, actor_id=None, now=NOW)
        assert ada.session_epoch == before + 1  # a cookie of before stays worthless
    assert log_in().id == ada.id
    with school.database.read() as session:
        told = [(event.action, event.detail) for event, _ in accounts.trail(session, limit=2)]
    assert told == [("open-user", "user ada"), ("close-user", "user ada")]


def test_whoever_changes_a_course_or_a_role_is_on_record(school):
    with school.database.write() as session:
        root = User(name="root", password_hash="-", created_at=NOW)
        session.add(root)
        session.flush()
        enrol = {"course_id": school.entry.course_id, "user_id": root.id, "now": NOW}
        for role, actor in ((Role.STUDENT, None), (Role.STUDENT, None), (Role.INSTRUCTOR, root.id)):
            course.enrol(session, **enrol, role=role, actor_id=actor)
        for changes in ({}, {"late_days": 2, "device": "cpu"}, {"late_days": 2}, {"deadline": NOW}):
            course.set_assignment(session, course_id=school.entry.course_id, slug="doubling", now=NOW, **changes)
    with school.database.read() as session:
        told = [(event.action, event.detail, who) for event, who in accounts.trail(session)]
        assert told == [
            ("set-assignment", f"assignment 1 (doubling); deadline None -> {NOW}", None),
            ("set-assignment", "assignment 1 (doubling); late_days 0 -> 2", None),
            ("enrol", "user root, course gpu: instructor, who was student", "root"),
            ("enrol", "user root, course gpu: student", None),
            ("set-assignment", "assignment 1 (doubling)", None),
            ("create-course", "course gpu", None),
        ]
        assert [event.action for event, _ in accounts.trail(session, actor_id=root.id)] == ["enrol"]
        assert len(accounts.trail(session, limit=3)) == 3


@pytest.mark.parametrize(
    ("name", "password", "message"),
    [
        pytest.param("", PASSWORD, "cannot be a user name", id="empty"),
        pytest.param("a b", PASSWORD, "cannot be a user name", id="blank-inside"),
        pytest.param("x" * 65, PASSWORD, "cannot be a user name", id="long"),
        pytest.param("ada", PASSWORD, "There is a user 'ada' already", id="taken"),
        pytest.param("bob", "short", "has 10 to 512 characters", id="short-password"),
        pytest.param("bob", "password123", "among the first that anybody tries", id="common-password"),
        pytest.param("bob", "qwertyuiop", "among the first that anybody tries", id="keyboard-row"),
        pytest.param("bob", "x" * 100, "among the first that anybody tries", id="one-letter"),
        pytest.param("bob", "1q2w3e4r5t", "among the first that anybody tries", id="keyboard-zigzag"),
        pytest.param("bob", "x" * 513, "has 10 to 512 characters", id="long-password"),
    ],
)
def test_bad_accounts_are_refused(database, ada, name, password, message):
    with pytest.raises(UserError, match=message), database.write() as session:
        accounts.create_user(session, name=name, password=password, now=NOW)


@pytest.mark.parametrize(
    "password",
    [
        "vier Wörter ohne Ziffern",
        "пароль из многих слов",
        "8261 7302 9455",
        "tile tile, kernel?",
        "🦉" * 3 + "x7Kd vRq2",
    ],
)
def test_a_password_may_be_made_of_anything(database, log_in, password):
    with database.write() as session:
        accounts.create_user(session, name="ada", password=password, now=NOW)
    assert log_in(password=password) is not None


def test_random_passwords_differ_and_are_long_enough():
    found = {accounts.random_password() for _ in range(100)}
    assert len(found) == 100
    assert {len(password) for password in found} == {23}


def test_roles_come_from_the_course_and_staff_have_all(school, staff):
    ira, ada, eve = school.user("ira", Role.INSTRUCTOR), school.user("ada"), school.user("eve", role=None)
    with school.database.read() as session:
        roles = [
            course.role_in(session, user=user, course_id=school.entry.course_id) for user in (ira, ada, eve, staff)
        ]
        assert roles == [Role.INSTRUCTOR, Role.STUDENT, None, Role.INSTRUCTOR]
        assert [len(course.courses_of(session, user)) for user in (ira, ada, eve, staff)] == [1, 1, 0, 1]


def test_nicknames_are_unique_in_a_course(school):
    def rename(name: str, nickname: str) -> None:
        with school.database.write() as session:
            user_id = school.user(name).id
            enrolled = course.enrollment_of(session, course_id=school.entry.course_id, user_id=user_id)
            course.rename(session, enrolled, nickname)

    for name in ("ada", "bob"):
        school.user(name)
    rename("ada", "  the   tiler ")
    rename("ada", "the tiler")
    with pytest.raises(UserError, match="'the tiler' is taken"):
        rename("bob", "the tiler")


@pytest.mark.parametrize("nickname", ["", " ", "x" * 41, "a\x00b", "a\u202eb"])
def test_nicknames_are_printable(school, nickname):
    ada = school.user("ada")
    with school.database.write() as session:
        enrolled = course.enrollment_of(session, course_id=school.entry.course_id, user_id=ada.id)
        with pytest.raises(UserError, match="printable"):
            course.rename(session, enrolled, nickname)


def test_the_demo_is_made_once(database, assignments_dir, log_in):
    catalog = Catalog(assignments_dir)
    with database.write() as session:
        logins = course.seed_demo(session, catalog, now=NOW)
    with database.write() as session:
        assert course.seed_demo(session, catalog, now=NOW) == []
    assert [(one.name, one.role) for one in logins] == [("student", Role.STUDENT), ("instructor", Role.INSTRUCTOR)]
    for one in logins:
        assert log_in(one.name, one.password) is not None
    with database.read() as session:
        assert session.scalars(sa.select(CourseAssignment.slug)).all() == ["doubling"]
        assert session.scalar(sa.select(sa.func.count(Enrollment.id))) == 2


def test_the_catalog_reads_a_changed_folder_again(tmp_path, assignments_dir):
    folder = tmp_path / "doubling"
    folder.mkdir()
    for path in (assignments_dir / "doubling").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    catalog = Catalog(tmp_path)
    first = catalog.load("doubling")
    assert catalog.load("doubling") is first
    (folder / "handout.md").write_text("# Another text\n")
    assert catalog.load("doubling").digest != first.digest
    (folder / "assignment.toml").write_text("title = 7")
    with pytest.raises(AssignmentError, match=r"assignment\.toml"):
        catalog.load("doubling")


@pytest.mark.parametrize("slug", ["../doubling", "/etc", "", "Doubling", "no-such-folder"])
def test_the_catalog_never_leaves_its_folder(assignments_dir, slug):
    with pytest.raises(AssignmentError):
        Catalog(assignments_dir).load(slug)


def test_every_log_in_failure_is_counted_even_beyond_the_columns_length(log_in, settings):
    for _ in range(settings.login_failures):
        assert log_in("x" * 300) is None
    with pytest.raises(UserError, match="Too many"):
        log_in("x" * 300)
