"""The doorbell: Celery over the Redis protocol. A message carries no work, so losing or doubling one changes nothing.

docs/decisions/0004-queue.md has the reasons at length.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

from celery import Celery, signals
from celery.beat import ScheduleEntry, Scheduler, SchedulingError
from celery.exceptions import CPendingDeprecationWarning
from kombu import Exchange, Queue
from kombu.exceptions import OperationalError

from grader import devices
from grader.settings import Settings

GRADE = "tilegrade.grade"
SWEEP = "tilegrade.sweep"
SWEEP_QUEUE = "sweep"
RING_TIMEOUT_S = 1.0
QUIET_AFTER_FAILURE_S = 5.0
# longer than any grading: Redis hands a message out again that was not acknowledged for so long
VISIBILITY_TIMEOUT_S = 3600

log = logging.getLogger("tilegrade.queue")


def make_celery(settings: Settings) -> Celery:
    """The Celery application, with each setting's reason beside it. Connects to nothing."""
    app = Celery("tilegrade", broker=settings.broker_url, set_as_current=False)
    app.conf.update(
        task_acks_late=True,  # a worker that dies gives its message back
        task_reject_on_worker_lost=True,  # also when the kernel killed it
        worker_prefetch_multiplier=1,  # a busy worker holds no bell that an idle one could answer
        task_ignore_result=True,  # the row is the result
        result_backend=None,
        task_store_errors_even_if_ignored=False,
        accept_content=["json"],  # never pickle: reading a message must not run code
        task_serializer="json",
        broker_transport_options={
            "visibility_timeout": VISIBILITY_TIMEOUT_S,
            "socket_keepalive": True,
            "health_check_interval": 25,  # finds a broker that went away without a word
        },
        broker_connection_retry_on_startup=True,  # a worker may start before its broker
        broker_connection_max_retries=None,  # and outlasts any outage; the rows wait
        worker_cancel_long_running_tasks_on_connection_loss=False,  # a grading needs no broker: let it finish
        worker_enable_remote_control=False,  # the database says what a worker does; nobody needs to ask it
        worker_send_task_events=False,
        worker_hijack_root_logger=False,  # each process sets up its own log
        worker_redirect_stdouts=False,
        enable_utc=True,
        timezone="UTC",
        task_default_queue=devices.KINDS[0],
        task_create_missing_queues=False,
        task_queues=[queue_of(name) for name in dict.fromkeys((*devices.KINDS, *heard_by(settings)))],
        beat_schedule={
            "sweep": {
                "task": SWEEP,
                "schedule": settings.sweep_every_s,
                # a sweep that nobody came to do is of no use later, and must not pile up
                "options": {"queue": SWEEP_QUEUE, "expires": settings.sweep_every_s},
            }
        },
        beat_scheduler="grader.queue:SweepScheduler",
    )
    return app


class SweepScheduler(Scheduler):  # type: ignore[misc]  # Celery has no types
    """Celery's own in memory: one entry, due at once after a restart, needs no file."""

    def apply_entry(self, entry: ScheduleEntry, producer: Any = None) -> None:
        """Send what is due. Without a broker a line a sweep says so; Celery's own would be a hundred each time."""
        try:
            self.apply_async(entry, producer=producer, advance=False)
        except SchedulingError as exc:
            log.warning("no bell for the sweep, trying again: %s", exc.__cause__ or exc)


def queue_of(name: str) -> Queue:
    """The queue of one device's bells, or of the sweep's."""
    # an exchange each: with a shared one every bell would ring everywhere
    return Queue(name, Exchange(name), routing_key=name)


def heard_by(settings: Settings) -> tuple[str, ...]:
    """Names of the queues that a worker listens to."""
    return (*devices.served_by(settings.device), SWEEP_QUEUE)


def log_to_stderr(name: str) -> None:
    """One line an event, as our long-running processes write it; libraries speak up only when something is wrong."""
    logging.basicConfig(level=logging.WARNING, format=f"%(asctime)s {name} %(levelname)s %(message)s")
    logging.getLogger("tilegrade").setLevel(logging.INFO)
    # several lines of advice for each lost connection, on a setting that we chose
    logging.getLogger("py.warnings").addFilter(
        lambda record: CPendingDeprecationWarning.__name__ not in record.getMessage()
    )
    # otherwise Celery configures logging over our heads
    signals.setup_logging.connect(_leave_logging_alone, weak=False)


def _leave_logging_alone(**_: Any) -> None:
    """Connected, and that is all that Celery asks."""


class Doorbell:
    """Rings for the web and the sweep. Never raises, never makes a page wait long; safe to share between threads."""

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._lock = threading.Lock()
        self._quiet_until = 0.0  # monotonic

    def ring(self, device: str) -> bool:
        """Tell the workers of `device` that something waits. Ring after the commit.

        Returns:
            False when the broker could not be reached. Nothing is lost: the sweep rings again.
        """
        with self._lock:
            if time.monotonic() < self._quiet_until:
                return False
        try:
            self._send(device)
        except (OperationalError, OSError) as exc:
            log.warning("the doorbell is silent, the sweep will ring: %s", exc)
            with self._lock:
                # one page waits for a dead broker, the next ones do not
                self._quiet_until = time.monotonic() + QUIET_AFTER_FAILURE_S
            return False
        return True

    def _send(self, device: str) -> None:
        # a connection of its own, with timeouts that would break a worker's long poll; opened anew, because a pooled
        # one may date from before a restart of the broker
        impatient: dict[str, Any] = {
            "socket_timeout": RING_TIMEOUT_S,
            "socket_connect_timeout": RING_TIMEOUT_S,
            "retry_on_timeout": False,
            "max_retries": 0,
        }
        connection = self._app.connection_for_write(
            transport_options=self._app.conf.broker_transport_options | impatient, connect_timeout=RING_TIMEOUT_S
        )
        with connection:
            connection.ensure_connection(max_retries=1, interval_start=0, interval_step=0, timeout=RING_TIMEOUT_S)
            with self._app.amqp.Producer(connection) as producer:
                self._app.send_task(
                    GRADE, queue=queue_of(device), producer=producer, retry=False, expires=VISIBILITY_TIMEOUT_S
                )
