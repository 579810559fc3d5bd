"""The whole service on one machine with a GPU, as its users meet it. A program, run by hand; it prints tables.

    python tests/gpu/serve_on_gpu.py [--device cuda] [--out FOLDER] [--queue 40] [--queue-s 150] [--only PART ...]

commands: `tilegrade grade --json` on one file. service: `tilegrade up` on SQLite and its own Valkey, three files for
each assignment through `tilegrade submit`. queue: many hand-ins of one file at once; gradings an hour, and for how long
each held the GPU and nobody held it before. killed: the worker dies by SIGKILL in the middle of a grading. What a part
found is appended to serve.jsonl in FOLDER, beside the logs. Exits 1 when a part failed; the others run all the same.
With --device cpu all but the GPU's lock is tried. No page with a chart is asked for: the extra `web` may be missing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import urllib.request
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

PROJECT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PROJECT))

from sqlalchemy import select  # noqa: E402

from grader import measurement, submissions  # noqa: E402
from grader.course import Catalog, assignment_in  # noqa: E402
from grader.db import Database  # noqa: E402
from grader.models import State, Submission, User, Worker  # noqa: E402
from grader.queue import Doorbell, make_celery  # noqa: E402
from grader.settings import Settings  # noqa: E402

CORPUS = PROJECT / "tests" / "corpus"
FILES = {
    "fused-bias-dropout-layernorm": ("ok-single-block", "ok-row-group-class", "not-fused"),
    "online-softmax": ("ok-raw-pointers", "ok-row-block", "tail-unmasked"),
    "flash-attention-forward": ("ok-raw-strides", "ok-block-pointers", "stored-scores"),
    "flash-attention": ("ok-three-kernels", "ok-shared-backward-kernel", "missing-delta"),
}
QUEUE_OF = ("flash-attention-forward", "ok-raw-strides")
TILEGRADE = [sys.executable, "-m", "grader.cli"]
NO_LONGER = (State.DONE, State.FAULTED, State.CANCELLED)
QUARANTINE_S = 60.0  # a worker whose host failed the check looks again after 5 s, which takes half a minute


class NoWorkerError(Exception):
    """No worker takes work, so no part can find anything."""


class Service:
    """`tilegrade up` in a folder of its own, and the database it writes."""

    def __init__(self, device: str, log: Path) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="serve-"))
        self.device = device
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.env = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, (str(PROJECT), os.environ.get("PYTHONPATH")))),
            "TILEGRADE_DATA": str(self.folder / "data"),
            "TILEGRADE_PORT": str(self.port),
            "TILEGRADE_HAND_INS_PER_MINUTE": "10000",
            "TILEGRADE_HAND_INS_PER_HOUR": "10000",
            "TILEGRADE_MAX_WAITING_PER_STUDENT": "10000",
        }
        self.settings = Settings.from_env(self.env)
        command = [*TILEGRADE, "up", "--device", device]
        with log.open("wb") as file:
            self.process = subprocess.Popen(command, env=self.env, stdout=file, stderr=subprocess.STDOUT)
        self.database = Database(self.settings.database_url)

    def tilegrade(self, *arguments: str) -> str:
        """One command's output. Raises CalledProcessError, with what it said, when it fails."""
        done = subprocess.run(
            [*TILEGRADE, *arguments], env=self.env, capture_output=True, text=True, check=False, timeout=60
        )
        if done.returncode:
            print(done.stdout, done.stderr, sep="\n", flush=True)
            done.check_returncode()
        return done.stdout.strip()

    def wait_until_it_answers(self, seconds: float) -> float:
        """Until a page can be had."""
        began = time.monotonic()
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        while time.monotonic() - began < seconds:
            with contextlib.suppress(OSError), opener.open(f"http://127.0.0.1:{self.port}/health", timeout=1) as answer:
                if answer.status == 200:
                    return time.monotonic() - began
            time.sleep(0.1)
        raise TimeoutError(f"no page within {seconds:.0f} s: see web.log")

    def wait_for_worker(self, seconds: float) -> float:
        """Until a worker says that it waits for work. One in quarantine looks again once while it is waited for."""
        began = time.monotonic()
        until, shut = began + seconds, False
        while True:
            rows, now = self.reported(), time.monotonic()
            if any(row.status in ("idle", "grading") for row in rows):
                return now - began
            if not shut and any(row.status == "quarantined" for row in rows):
                shut, until = True, min(until, now + QUARANTINE_S)
            if now >= until:
                said = [(row.name, row.status, row.note) for row in rows]
                raise NoWorkerError(f"no worker within {now - began:.0f} s: {said}")
            time.sleep(0.2)

    def hand_in_many(self, slug: str, data: bytes, count: int) -> list[int]:
        """What `tilegrade submit` does, `count` times, without a process for each."""
        bell = Doorbell(make_celery(self.settings))
        assignment = Catalog(self.settings.assignments_dir).load(slug)
        ids = []
        with self.database.write() as session:
            entry = assignment_in(session, course_slug="demo", slug=slug)
            user = session.scalars(select(User).where(User.name == "instructor")).one()
            assert entry is not None
            for number in range(count):
                accepted = submissions.hand_in(
                    session,
                    user=user,
                    entry=entry,
                    assignment=assignment,
                    data=data + f"# {number}\n".encode(),
                    settings=self.settings,
                    now=datetime.now(UTC),
                )
                ids.append(accepted.submission_id)
        bell.ring(entry.device)
        return ids

    def rows(self, ids: list[int]) -> list[Submission]:
        with self.database.read() as session:
            found = [submissions.find(session, number) for number in ids]
        return [row for row in found if row is not None]

    def wait_for(self, ids: list[int], seconds: float) -> None:
        """Until all are graded, or the time is over."""
        until = time.monotonic() + seconds
        while any(row.state not in NO_LONGER for row in self._states(ids)) and time.monotonic() < until:
            time.sleep(0.2)

    def _states(self, ids: list[int]) -> list[Submission]:
        with self.database.read() as session:
            return list(session.scalars(select(Submission).where(Submission.id.in_(ids))))

    def reported(self) -> list[Worker]:
        """The workers, as they say of themselves."""
        with self.database.read() as session:
            return submissions.workers(session)

    def workers(self) -> list[int]:
        """Process numbers of the worker processes."""
        return [pid for pid in processes_below(self.process.pid) if "workers.tasks" in command_of(pid)]

    def stop(self) -> float:
        """End it as an operator does; by force, with all that it started, when it takes longer than a minute."""
        began = time.monotonic()
        started = list(processes_below(self.process.pid))
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            for pid in started:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.database.close()
        return time.monotonic() - began


def command_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def processes_below(root: int) -> Iterator[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(entry.read_text(errors="replace").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.parent.name))
    waiting = [root]
    while waiting:
        for pid in children.get(waiting.pop(), []):
            waiting.append(pid)
            yield pid


def processes_of_candidates() -> list[str]:
    """Commands that run as a slot's user."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if 61000 <= entry.stat().st_uid < 62000:
                found.append(f"{entry.name} {command_of(int(entry.name))[:60]}")
    return found


def gpu_memory_mib() -> str:
    if shutil.which("nvidia-smi") is None:
        return "-"
    asked = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    with contextlib.suppress(subprocess.TimeoutExpired):  # as it does where the driver hangs
        return subprocess.run(asked, capture_output=True, text=True, check=False, timeout=10).stdout.strip()
    return "no answer from nvidia-smi,"


def seconds(start: datetime | None, end: datetime | None) -> str:
    return f"{(end - start).total_seconds():.1f}" if start and end else "-"


def show(rows: list[Submission], names: list[str]) -> bool:
    """A table of submissions. True when all of them are graded."""
    print("| file | state | verdict | points | device | queued s | running s | attempt | stages s |\n|" + " --- |" * 9)
    for row, name in zip(rows, names, strict=True):
        verdict = points = device = stages = "-"
        if row.result is not None:
            exam = measurement.loads(row.result.examination)
            verdict, points = row.result.verdict, f"{row.result.points:g}/{row.result.out_of:g}"
            device = exam.device.name
            stages = ", ".join(f"{one.name} {one.seconds:.1f}" for one in exam.stages)
        cells = (
            name, row.state.value, verdict, points, device, seconds(row.submitted_at, row.started_at),
            seconds(row.started_at, row.finished_at), row.attempt, stages,
        )  # fmt: skip
        print("|", " | ".join(map(str, cells)), "|", flush=True)
        if row.fault_note:
            print(f"    {row.fault_note[:1500]}", flush=True)
    return all(row.state is State.DONE for row in rows)


# -- parts ------------------------------------------------------------------------------------------------------------


def commands(arguments: argparse.Namespace) -> bool:
    """The command that grades without a service, which starts `python -m workers grade`."""
    slug, name = QUEUE_OF
    command = [*TILEGRADE, "grade", str(CORPUS / slug / f"{name}.py"), "--assignment", slug, "--json"]
    began = time.monotonic()
    done = subprocess.run(
        [*command, "--device", arguments.device],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        timeout=arguments.left_s(180),
        check=False,
    )
    took = time.monotonic() - began
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        answer = {}
    fine = done.returncode == 0 and "error" not in answer
    said = {key: answer.get(key) for key in ("verdict", "score", "device", "provisional") if key in answer}
    keep(arguments, "commands", {"status": done.returncode, "seconds": took, "said": said})
    if not fine:
        print(done.stdout[-2000:], done.stderr[-4000:], sep="\n", flush=True)
    return fine


def each_assignment(service: Service, arguments: argparse.Namespace) -> bool:
    """Files for each assignment, through the command that hands in: they wait before the worker is ready."""
    ids, names = [], []
    began = time.monotonic()
    for slug, files in FILES.items():
        for name in files[: arguments.each]:
            path = CORPUS / slug / f"{name}.py"
            ids.append(int(service.tilegrade("submit", str(path), "--user", "instructor", "--assignment", slug)))
            names.append(f"{slug}/{name}")
    print(f"handed in after {time.monotonic() - began:.1f} s", flush=True)
    await_worker(service, arguments)
    try:
        service.wait_for(ids, arguments.left_s(arguments.service_s))
    finally:  # also when this program is told to end
        rows = service.rows(ids)
        keep(arguments, "service", {"seconds": time.monotonic() - began, "rows": [facts_of(row) for row in rows]})
        fine = show(rows, names)
    return fine


def await_worker(service: Service, arguments: argparse.Namespace) -> None:
    """Wait until a worker takes work, and say what it says of itself."""
    print(f"worker takes work after another {service.wait_for_worker(arguments.left_s(180)):.1f} s", flush=True)
    for row in service.reported():
        print(f"    {row.name} on {row.device}: {row.note}", flush=True)


def facts_of(row: Submission) -> dict[str, Any]:
    """What the numbers of a part are made from; moments are seconds of the wall clock."""
    facts: dict[str, Any] = {"state": row.state.value, "attempt": row.attempt}
    facts |= {"started": row.started_at and row.started_at.timestamp()}
    facts |= {"finished": row.finished_at and row.finished_at.timestamp()}
    if row.result is not None:
        gpu = measurement.loads(row.result.examination).gpu
        facts |= {"verdict": row.result.verdict, "points": row.result.points}
        facts |= {"held_s": gpu and gpu.held_s, "idle_s": gpu and gpu.idle_s}
    return facts


def queue_numbers(graded: list[dict[str, Any]]) -> dict[str, Any]:
    """Gradings an hour, and seconds for which each held the GPU and for which nobody had before it.

    The first one is left out: it waits for what is not warm. So is what nothing tells, as in the interpreter.
    """
    found: dict[str, Any] = {"graded": len(graded), "verdicts": sorted({row["verdict"] for row in graded})}
    steady = sorted(graded, key=lambda row: row["finished"])[1:]
    if len(steady) > 1:
        found["an_hour"] = 3600 * (len(steady) - 1) / (steady[-1]["finished"] - steady[0]["finished"])
    values = {key: [row[key] for row in steady if row[key] is not None] for key in ("held_s", "idle_s")}
    values["claim_to_grade_s"] = [row["finished"] - row["started"] for row in steady]
    for key, some in values.items():
        if some:
            found[key] = {"median": round(median(some), 4), "most": round(max(some), 4)}
    return found


def keep(arguments: argparse.Namespace, part: str, found: dict[str, Any]) -> None:
    """Print what a part found, and append it to serve.jsonl."""
    shown = {key: value for key, value in found.items() if key not in ("rows", "gradings")}
    print(f"{part}: {json.dumps(shown)[:1500]}", flush=True)
    with (arguments.out / "serve.jsonl").open("a") as file:
        file.write(json.dumps({"part": part, "at": datetime.now(UTC).isoformat(timespec="seconds")} | found) + "\n")


def full_queue(service: Service, arguments: argparse.Namespace) -> bool:
    """Many hand-ins of one correct file: gradings an hour, and how long nobody holds the GPU between two."""
    slug, name = QUEUE_OF
    await_worker(service, arguments)
    ids = service.hand_in_many(slug, (CORPUS / slug / f"{name}.py").read_bytes(), arguments.queue)
    try:
        service.wait_for(ids, arguments.left_s(arguments.queue_s))
    finally:  # also when this program is told to end
        rows = service.rows(ids)
        done = [row for row in rows if row.state is State.DONE]
        graded = [facts_of(row) for row in done]
        keep(arguments, "queue", {"handed_in": len(ids)} | queue_numbers(graded) | {"gradings": graded})
    show(done[-2:], [name] * len(done[-2:]))
    for row in rows:
        if row.state not in NO_LONGER:
            with service.database.write() as session:
                submissions.cancel(session, row.id, actor_id=None, now=datetime.now(UTC))
    return len(done) > 5


def killed_worker(service: Service, arguments: argparse.Namespace) -> bool:
    """SIGKILL to the worker while it grades: nothing is left behind, and the hand-in is graded all the same."""
    slug, name = QUEUE_OF
    await_worker(service, arguments)
    (number,) = service.hand_in_many(slug, (CORPUS / slug / f"{name}.py").read_bytes() + b"# again\n", 1)
    until = time.monotonic() + arguments.left_s(60)
    stages: dict[str, float] = {}
    while not stages.keys() & {"numerics", "memory", "speed"} and time.monotonic() < until:
        time.sleep(0.05)
        stages = submissions.stages_of(service.rows([number])[0])
    before, candidates = service.workers(), set(processes_of_candidates())
    began = time.monotonic()
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    while candidates & set(processes_of_candidates()) and time.monotonic() - began < 10:
        time.sleep(0.01)
    gone_s = time.monotonic() - began
    print(f"GPU {gpu_memory_mib()} MiB", flush=True)
    service.wait_for([number], arguments.left_s(180))
    rows = service.rows([number])
    found = {"workers": len(before), "stages": stages, "candidates": len(candidates), "candidates_gone_s": gone_s}
    keep(arguments, "killed", found | {"graded_s": time.monotonic() - began} | facts_of(rows[0]))
    return show(rows, [name]) and rows[0].attempt > 1


def main() -> int:
    """Run the parts in order; a part that fails does not keep the others from running."""
    parts: dict[str, Callable[..., bool]] = {"service": each_assignment, "queue": full_queue, "killed": killed_worker}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--out", type=Path, default=PROJECT / "artifacts" / "serve")
    parser.add_argument("--only", nargs="*", choices=["commands", *parts], default=["commands", *parts])
    parser.add_argument("--queue", type=int, default=40)
    parser.add_argument("--queue-s", type=float, default=150)
    parser.add_argument("--service-s", type=float, default=300)
    parser.add_argument("--each", type=int, default=3, help="files for each assignment")
    parser.add_argument("--stop-s", type=float, default=1e9, help="no waiting after so many seconds in all")
    arguments = parser.parse_args()
    stop_at = time.monotonic() + arguments.stop_s
    arguments.left_s = lambda most: max(0.0, min(most, stop_at - time.monotonic()))
    arguments.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the service is stopped, and its logs are kept
    wanted = {name: parts[name] for name in arguments.only if name in parts}
    fine = dict.fromkeys(arguments.only, False)
    if "commands" in arguments.only:
        fine["commands"] = _guarded(commands, arguments)
    if wanted:
        _guarded(with_service, wanted, arguments, fine)
    print(json.dumps(fine))
    return 0 if all(fine.values()) else 1


def with_service(wanted: dict[str, Callable[..., bool]], arguments: argparse.Namespace, fine: dict[str, bool]) -> bool:
    """Parts beside one `tilegrade up`; says in `fine` how each ended."""
    print(f"GPU before: {gpu_memory_mib()} MiB", flush=True)
    service = Service(arguments.device, arguments.out / "up.log")
    try:
        # no part needs a page: without any, how files are graded is worth knowing all the same
        fine["pages"] = _guarded(pages, service, arguments)
        for name, part in wanted.items():
            print(f"=== {name}", flush=True)
            fine[name] = _guarded(part, service, arguments)
    except NoWorkerError as exc:
        print(f"what is left is not tried: {exc}", flush=True)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it stops already
        took = service.stop()
        for log in (service.folder / "data" / "log").glob("*.log"):
            shutil.copy(log, arguments.out / log.name)
        print(f"stopped in {took:.1f} s; left: {processes_of_candidates() or 'nothing'}; GPU {gpu_memory_mib()} MiB")
        shutil.rmtree(service.folder, ignore_errors=True)
    return True


def pages(service: Service, arguments: argparse.Namespace) -> bool:
    """The web server answers."""
    keep(arguments, "pages", {"first_after_s": service.wait_until_it_answers(arguments.left_s(60))})
    return True


def _guarded(part: Callable[..., bool], *arguments: Any) -> bool:
    try:
        return part(*arguments)
    except NoWorkerError:  # nor would any other part find one
        raise
    except Exception:
        traceback.print_exc()
        return False


if __name__ == "__main__":
    sys.exit(main())
