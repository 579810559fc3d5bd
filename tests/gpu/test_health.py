"""Whether a GPU is fit to grade, without one: NVML is played, the kernels' rates are numbers."""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
from nvml_fakes import FakeCard, FakeNvml, NVMLError

from grader import devices
from grader.assignment import load_assignment
from grader.errors import UserError
from grader.measurement import (
    Ceilings,
    Device,
    Examination,
    Failure,
    FailureKind,
    Isolation,
    ProbeFailed,
    ProbeMeasured,
)
from workers import ceilings, health, selfcheck
from workers.devices import nvml

ASSIGNMENTS = Path(__file__).parents[2] / "assignments"
FULL_SPEED = Ceilings(copy_bytes_per_s=4.24e12, flops_per_s={"bfloat16": 780e12})


@pytest.fixture
def card():
    return FakeCard()


@pytest.fixture
def library(card, monkeypatch):
    found = FakeNvml(card)
    monkeypatch.setitem(sys.modules, "pynvml", found)
    monkeypatch.setattr(health, "GONE_WITHIN_S", 0.3)
    yield found
    assert found.open == 0, "NVML was left open"


def failed(checks):
    for one in checks:
        assert bool(one.remedy) is not one.ok
    return {one.name for one in checks if not one.ok}


def read(card):
    return nvml.read(nvml.cards()[0])


def test_a_healthy_card_passes(library, card):
    checks = health.judge_reading(read(card))
    assert failed(checks) == set()
    assert [one.name for one in checks] == ["gpu", "gpu processes", "gpu memory", "gpu errors", "gpu temperature"]


@pytest.mark.parametrize(
    ("change", "name", "said"),
    [
        pytest.param({"ecc": 2}, "gpu errors", "2 uncorrected errors", id="uncorrected"),
        pytest.param({"rows": (0, 1, 1, 0)}, "gpu errors", "damaged row", id="remap-pending"),
        pytest.param({"rows": (0, 1, 0, 1)}, "gpu errors", "no spare rows", id="remap-failed"),
        pytest.param({"temperature": 90}, "gpu temperature", "90 C", id="hot"),
        pytest.param({"processes": {4711: 3 << 30}}, "gpu processes", "process 4711 with 3.0 GiB", id="shared"),
        pytest.param({"used": 30 << 30}, "gpu memory", "30.0 of 140 GiB", id="memory-of-nobody"),
        pytest.param({"mode": 3}, "gpu mode", "one process in alone", id="exclusive"),
    ],
)
def test_what_is_wrong_is_named_with_what_to_do(library, card, change, name, said):
    for attribute, value in change.items():
        setattr(card, attribute, value)
    checks = health.judge_reading(read(card))
    assert failed(checks) == {name}
    assert said in selfcheck.why_not(checks)


def test_rows_that_were_replaced_long_ago_are_no_fault(library, card):
    card.rows = (1, 2, 0, 0)
    assert failed(health.judge_reading(read(card))) == set()


@pytest.mark.parametrize("lacks", ["ecc", "rows", "temperature", "slowdown", "mode"])
def test_what_a_card_does_not_tell_is_not_held_against_it(library, card, lacks):
    card.lacks = {lacks}
    assert failed(health.judge_reading(read(card))) == set()


@pytest.mark.parametrize("value", [0, 5, 4294967294], ids=["zero", "a-margin", "a-negative-margin"])
def test_a_threshold_that_is_none_is_not_compared(library, card, value):
    card.slowdown = value
    assert failed(health.judge_reading(read(card))) == set()


def test_beside_a_worker_of_ours_processes_and_memory_say_nothing(library, card):
    card.processes, card.used = {17: 50 << 30}, 60 << 30
    assert failed(health.judge_reading(read(card), in_use=True)) == set()


# -- rates --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("factors", "ok"),
    [
        pytest.param((1.0, 1.0), True, id="as-recorded"),
        pytest.param((0.93, 0.95), True, id="a-little-slower"),
        pytest.param((0.6, 1.0), False, id="memory-throttled"),
        pytest.param((1.0, 0.6), False, id="clocks-capped"),
        pytest.param((1.3, 1.0), False, id="faster-than-such-a-card"),
        pytest.param((float("nan"), 1.0), False, id="no-number"),
    ],
)
def test_known_kernels_must_take_as_long_as_is_recorded(library, card, factors, ok):
    found = Ceilings(copy_bytes_per_s=4.22e12 * factors[0], flops_per_s={"bfloat16": 782e12 * factors[1]})
    assert health.judge_rates(nvml.cards()[0], found).ok is ok


def test_a_model_without_a_record_is_not_compared(library, card):
    card.name = "NVIDIA Nonesuch"
    check = health.judge_rates(nvml.cards()[0], FULL_SPEED)
    assert check.ok
    assert "none recorded for NVIDIA Nonesuch" in check.found


def test_the_records_are_whole():
    assert "NVIDIA H200" in health.models()
    for model in health.models().values():
        assert 0 < model.within < 0.5
        assert model.copy_bytes_per_s > 1e11
        assert model.bfloat16_flops_per_s > 1e13


# -- one GPU among several ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_cards", [1, 3])
def test_a_process_sees_its_own_gpu_alone(library, monkeypatch, n_cards):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    library.cards = [FakeCard(uuid=f"GPU-{letter}") for letter in "abc"[:n_cards]]
    nvml.show_only(health.choose(n_cards - 1))
    # one alone needs no hiding
    assert nvml.visible_devices() == (None if n_cards == 1 else "GPU-c")
    assert [one.uuid for one in nvml.cards(nvml.visible_devices())] == [library.cards[-1].uuid]


def test_clocks_that_were_low_at_first_are_tried_again(library, monkeypatch):
    rates = [2e12, 4.2e12]
    monkeypatch.setattr(health, "use_context", lambda: None)
    monkeypatch.setattr(ceilings, "measure", lambda: dataclasses.replace(FULL_SPEED, copy_bytes_per_s=rates.pop(0)))
    monkeypatch.setitem(sys.modules, "workers.devices.cuda", types.SimpleNamespace(gpu_lock=contextlib.nullcontext))
    assert failed(health.check_gpu(0, visible=None, in_use=False)) == set()
    assert rates == []


@pytest.mark.parametrize(
    ("visible", "uuids"),
    [
        pytest.param(None, ["GPU-a", "GPU-b", "GPU-c"], id="all"),
        pytest.param("2,0", ["GPU-c", "GPU-a"], id="by-number"),
        pytest.param("GPU-b", ["GPU-b"], id="by-uuid"),
        pytest.param("1,7,0", ["GPU-b"], id="nothing-after-an-unknown-one"),
        pytest.param("", [], id="none"),
    ],
)
def test_what_is_visible_is_counted_from_0(library, visible, uuids):
    library.cards = [FakeCard(uuid=f"GPU-{letter}") for letter in "abc"]
    found = nvml.cards(visible)
    assert [one.uuid for one in found] == uuids
    assert [one.index for one in found] == list(range(len(uuids)))


def test_a_gpu_that_is_not_there_is_a_check_that_fails(library):
    checks = health.check_gpu(1, visible=None, in_use=False)
    assert failed(checks) == {"gpu"}
    assert "there is no GPU number 1; NVML counts 1" in selfcheck.why_not(checks)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        pytest.param(NVMLError(999), "Unknown Error", id="driver"),
        pytest.param(None, "nvidia-ml-py is missing: `DEVICE=gpu make setup`", id="package"),
    ],
)
def test_a_host_without_a_driver_or_its_package_is_told_so(monkeypatch, broken, said):
    library = FakeNvml()
    library.broken = broken
    monkeypatch.setitem(sys.modules, "pynvml", library if broken else None)
    checks = health.check_gpu(0, visible=None, in_use=False)
    assert said in selfcheck.why_not(checks)


def test_the_contexts_of_a_worker_that_was_killed_are_waited_for(library, card, monkeypatch):
    monkeypatch.setattr(health, "GONE_WITHIN_S", 10.0)
    card.processes = {99: 1 << 30}
    pauses = []

    def rest(seconds):
        pauses.append(seconds)
        if len(pauses) == 3:
            card.processes = {}

    monkeypatch.setattr(time, "sleep", rest)
    monkeypatch.setattr(health, "_known_kernels", lambda one: health.judge_rates(one, FULL_SPEED))
    assert failed(health.check_gpu(0, visible=None, in_use=False)) == set()
    assert len(pauses) == 3


@pytest.mark.parametrize(
    ("stranger", "wrong"),
    [pytest.param({}, set(), id="alone"), pytest.param({4711: 1 << 30}, {"gpu processes"}, id="beside-a-stranger")],
)
def test_whoever_asks_beside_a_worker_that_grades_hears_of_strangers_alone(library, card, monkeypatch, stranger, wrong):
    monkeypatch.setattr(health, "_known_kernels", lambda one: health.judge_rates(one, FULL_SPEED))
    command = [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)", "workers.tasks"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        worker.stdout.readline()
        card.processes, card.used = {worker.pid: 60 << 30, **stranger}, 61 << 30
        checks = health.check_gpu(0, visible=None, in_use=False)
        worker.kill()
    assert failed(checks) == wrong


def test_kernels_are_not_timed_on_a_card_that_is_not_well(library, card, monkeypatch):
    monkeypatch.setattr(health, "_known_kernels", lambda _card: pytest.fail("timed a broken card"))
    card.ecc = 1
    assert failed(health.check_gpu(0, visible=None, in_use=False)) == {"gpu errors"}


def test_a_driver_that_does_not_fit_torch_is_a_check_that_fails(library, monkeypatch):
    def measure():
        raise RuntimeError("The NVIDIA driver on your system is too old\nand more")

    monkeypatch.setattr(ceilings, "measure", measure)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (check,) = (one for one in health.check_gpu(0, visible=None, in_use=False) if one.name == "gpu kernels")
    assert not check.ok
    assert "torch.cuda.init()" in check.remedy


# -- while grading ------------------------------------------------------------------------------------------------


@pytest.fixture
def watched(library, card):
    state = {"works": True, "xids": [], "n": 0}

    def examine(*_):
        state["n"] += 1
        state["during"]()
        return "measurements"

    def use():
        if not state["works"]:
            raise RuntimeError("CUDA error: unspecified launch failure")

    state["during"] = lambda: None
    made = health.Watched(examine, read=lambda: read(card), xids=lambda: list(state["xids"]), still_works=use)
    return made, state


def lose(card, _state):
    card.lost = True


def count_error(card, _state):
    card.ecc += 1


def remap(card, _state):
    card.rows = (0, 1, 1, 0)


def run_out_of_rows(card, _state):
    card.rows = (0, 0, 0, 1)


def report_79(_card, state):
    state["xids"].append(79)


@pytest.mark.parametrize(
    ("happens", "said"),
    [
        pytest.param(lose, "no longer answers", id="fell-off-the-bus"),
        pytest.param(count_error, "uncorrected errors went from 0 to 1", id="ecc"),
        pytest.param(remap, "remapped rows went from 0 to 1", id="row"),
        pytest.param(run_out_of_rows, "no spare rows", id="no-rows-left"),
        pytest.param(report_79, "Xid 79", id="xid"),
    ],
)
def test_what_was_measured_on_a_sick_gpu_is_not_recorded(watched, card, happens, said):
    examine, state = watched
    assert examine() == "measurements"
    state["during"] = lambda: happens(card, state)
    with pytest.raises(health.SickGpuError, match=said):
        examine()
    card.lost = False


def test_a_context_that_broke_is_seen_after_the_fault_and_not_while_others_are_timed(watched):
    examine, state = watched
    state["works"] = False
    assert examine() == "measurements"
    assert "own context is broken: CUDA error" in examine.trouble_after_fault()
    state["works"] = True
    assert examine.trouble_after_fault() == ""


@pytest.mark.parametrize("xid", [13, 31, 43, 45])
def test_errors_that_a_students_file_causes_by_itself_are_the_files(watched, xid):
    examine, state = watched
    state["during"] = lambda: state["xids"].append(xid)
    assert examine() == "measurements"


def test_errors_before_the_start_are_old_news(library, card):
    made = health.Watched(lambda: 1, read=lambda: read(card), xids=lambda: [79], still_works=lambda: None)
    assert made() == 1


def test_xids_are_heard_as_they_come(library, card):
    watch = nvml.XidWatch(nvml.cards()[0])
    assert watch.works
    card.xids.put(31)
    card.xids.put(79)
    until = time.monotonic() + 5
    while len(watch.heard()) < 2 and time.monotonic() < until:
        time.sleep(0.01)
    watch.close()
    assert watch.heard() == [31, 79]


def test_a_host_that_reports_no_xids_is_watched_without(library, card):
    card.lacks = {"events"}
    watch = nvml.XidWatch(nvml.cards()[0])
    watch.close()
    assert (watch.works, watch.heard()) == (False, [])


def examined(**changes):
    found = Examination(
        assignment="online-softmax", assignment_digest="0", source_sha256="0", device=Device(kind="cuda", name="x"),
        isolation=Isolation(level="full"), versions={}, seed=1,
    )  # fmt: skip
    return dataclasses.replace(found, **changes)


def test_a_reference_kernel_that_fails_here_is_told_to_staff():
    assignment = load_assignment(ASSIGNMENTS / "online-softmax")
    required = next(case.name for case in assignment.cases if case.required)
    failure = Failure(kind=FailureKind.RAISES, message="CUDA error: no kernel image")
    failed_probe = ProbeFailed(name=required, failure=failure)
    assert required in health.reference_trouble(assignment, examined(probes=(failed_probe,)))
    assert "no kernel image" in health.reference_trouble(assignment, examined(load_failure=failure))
    assert "no probe ran" in health.reference_trouble(assignment, examined())
    passed = ProbeMeasured(name=required, outputs=(), largest_score=1.0)
    assert health.reference_trouble(assignment, examined(probes=(passed,))) == ""


# -- models -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("NVIDIA H200", "cuda:h200"),
        ("NVIDIA H100 80GB HBM3", "cuda:h100"),
        ("NVIDIA A100-SXM4-80GB", "cuda:a100"),
        ("NVIDIA GeForce RTX 4090", "cuda:rtx4090"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "cuda:rtxpro6000"),
        ("Tesla T4", "cuda:t4"),
        ("NVIDIA Thing Without A Number At All", "cuda:thingwithou"),
        ("", "cuda"),
    ],
)
def test_a_model_is_a_short_word_that_fits_its_column(name, device):
    assert devices.on_gpu(name) == device
    assert len(device) <= devices.MAX_LENGTH
    assert devices.parse(device) == device
    assert devices.serves(device, "cuda")
    assert devices.serves(device, device)
    assert not devices.serves("cuda", "cuda:b300")
    assert not devices.serves(device, "cpu")


@pytest.mark.parametrize("text", ["gpu", "cuda:", "cuda:H 200", "cuda:averyverylongname", "cpu:x", ""])
def test_what_is_no_device_is_refused_with_an_example(text):
    with pytest.raises(UserError, match="cuda:h200"):
        devices.parse(text)
