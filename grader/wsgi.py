"""For any WSGI server: `gunicorn 'grader.wsgi:make_app()'`. `tilegrade web` serves the same with waitress."""

from __future__ import annotations

import os

from flask import Flask

from grader import db
from grader.db import Database
from grader.queue import Doorbell, make_celery
from grader.settings import Settings
from grader.web import create_app


def make_app(settings: Settings | None = None) -> Flask:
    """The application with everything that it needs. Raises UserError while a migration is due."""
    settings = settings or Settings.from_env(os.environ)
    database = Database(settings.database_url)
    db.demand_current(database)
    return create_app(settings, ring=Doorbell(make_celery(settings)).ring, database=database)
