"""What every view needs from the application that it belongs to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from threading import BoundedSemaphore

from flask import current_app

from grader.course import Catalog
from grader.db import Database
from grader.settings import Settings
from grader.web.charts import Gallery
from grader.web.shelf import Shelf

EXTENSION = "tilegrade"


@dataclass(frozen=True, slots=True, kw_only=True)
class House:
    """Built once by `create_app`; shared by all threads."""

    settings: Settings
    database: Database
    catalog: Catalog
    ring: Callable[[str], object]  # tells the workers of a device that there is work
    streams: BoundedSemaphore  # one for each live status stream
    gallery: Gallery  # charts, each drawn once
    shelf: Shelf  # reports and sources as they were last shown


def house() -> House:
    """The house of the application that answers this request."""
    found: House = current_app.extensions[EXTENSION]
    return found


def utc_now() -> datetime:
    return datetime.now(UTC)
