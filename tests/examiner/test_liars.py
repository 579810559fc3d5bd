"""Candidates that answer with anything: no answer ends the examiner, none earns what it should not, all are ended."""

import dataclasses
import time

import pytest
from liars import Liars, facts, loaded, result, say, softmax

from grader.judging import judge
from grader.measurement import FailureKind, ProbeFailed, ProbeMeasured, dumps, loads
from grader.verdicts import AxisVerdict, Verdict
from workers.examination import Examiner, examine

SLUG = "online-softmax"


@pytest.fixture
def question(assignment_named):
    """The assignment with the named probes alone."""

    def pick(*names, **limits):
        whole = assignment_named(SLUG)
        return dataclasses.replace(
            whole,
            cases=tuple(whole.case(name) for name in names or ("random",)),
            limits=dataclasses.replace(whole.limits, **limits),
        )

    return pick


def answering(call, load=lambda message, _arena: [loaded(message)]):
    """Liars that load, answer every other request with `call`, and have no result where launches are switched off."""

    def answer(message, arena):
        if message.get("launches") == "off":
            return [result(message, [])]
        return (load if message["op"] == "load" else call)(message, arena)

    return Liars(answer)


def ask(assignment, liars):
    found = examine(assignment, b"", sandboxes=liars, seed=1)
    assert liars.alive == []
    assert loads(dumps(found)) == found
    return found, judge(assignment, found)


def test_who_answers_right_is_believed(question):
    liars = answering(lambda message, arena: [result(message, softmax(message, arena))])
    found, grade = ask(question(), liars)
    assert isinstance(found.probes[0], ProbeMeasured)
    assert grade.numerics.verdict is AxisVerdict.PASS
    assert grade.structure.verdict is AxisVerdict.PASS
    assert found.evidence == ()


def test_who_answers_right_without_its_kernels_has_none(question):
    def right(message, arena):
        return [loaded(message) if message["op"] == "load" else result(message, softmax(message, arena))]

    found, grade = ask(question(), Liars(right))
    assert found.right_without_launches == ("lse", "y")
    assert grade.verdict is Verdict.REFUSED
    assert grade.score.points == 0


def test_who_never_reads_its_inputs_has_computed_nothing(question):
    def right(message, arena):
        return [result(message, softmax(message, arena), facts=facts(unread_inputs=["x"]))]

    _, grade = ask(question(), answering(right))
    assert grade.verdict is Verdict.REFUSED
    assert grade.score.points == 0


@pytest.mark.parametrize(
    ("said", "shown"), [(["time.time"], "time.time"), ("x", "something unreadable"), ([1, {}], "1, {}")], ids=repr
)
def test_who_says_that_it_replaced_functions_is_held_whatever_it_says(question, said, shown):
    liars = answering(lambda message, arena: [result(message, softmax(message, arena), replaced=said)])
    found, grade = ask(question(), liars)
    assert {one.kind for one in found.evidence} == {"functions-replaced"}
    assert shown in found.evidence[0].message
    assert grade.verdict is Verdict.HELD


def test_library_attention_in_any_probe_is_refused(question):
    def right(message, arena):
        more = (
            facts(library_calls=[{"op": "_scaled_dot_product_cudnn_attention"}]) if message["watch"] == "bounds" else {}
        )
        return [result(message, softmax(message, arena), **({"facts": more} if more else {}))]

    found, grade = ask(question(), answering(right))
    assert found.library_calls
    assert grade.verdict is Verdict.REFUSED


def test_a_torch_operation_in_one_probe_alone_is_seen(question):
    def right(message, arena):
        more = {"facts": facts(torch_ops=[{"op": "bmm", "bytes": 1 << 20}])} if message["watch"] == "bounds" else {}
        return [result(message, softmax(message, arena), **more)]

    _, grade = ask(question(), answering(right))
    (check,) = [check for check in grade.structure.checks if check.name == "torch-ops"]
    assert (check.ok, check.found) == (False, "bmm")


# ---- whose answer it is


def test_an_answer_sent_before_the_question_is_none(question):
    def load(message, _arena):
        return [loaded(message), result(message, [say("y", [4, 64], "float32")])]

    liars = answering(lambda message, arena: [result(message, softmax(message, arena))], load)
    found, grade = ask(question(), liars)
    (probe,) = found.probes
    assert probe.failure.kind is FailureKind.NOT_OURS
    assert "another request" in found.evidence[0].message
    assert grade.score.points == 0


@pytest.mark.parametrize("number", [0, -1, True, None, "1", 1.5, []])
def test_an_answer_with_any_other_number_is_none(question, number):
    liars = answering(lambda message, arena: [result(message, softmax(message, arena), request=number)])
    found, grade = ask(question(), liars)
    assert {evidence.kind for evidence in found.evidence} == {"broken-protocol"}
    assert grade.score.points == 0


def test_a_flood_of_answers_is_read_one_by_one_and_ends_the_candidate(question):
    def flood(message, arena):
        yield result(message, softmax(message, arena))
        while True:
            yield result(message, [])

    _, grade = ask(question("random", "tail"), answering(flood))
    assert [case.passed for case in grade.numerics.cases] == [True, False]


# ---- what the answer says


@pytest.mark.parametrize(
    "said",
    [
        pytest.param({"dtype": "qint8"}, id="quantised"),
        pytest.param({"dtype": "complex64"}, id="complex"),
        pytest.param({"dtype": "bool"}, id="bool"),
        pytest.param({"dtype": "float4_e2m1fn_x2"}, id="packed"),
        pytest.param({"dtype": "bits16"}, id="bits"),
        pytest.param({"dtype": "_inductor"}, id="a-module-of-torch"),
        pytest.param({"dtype": ["float32"]}, id="dtype-is-a-list"),
        pytest.param({"shape": []}, id="a-single-number"),
        pytest.param({"shape": [2**32, 2**32]}, id="a-size-that-overflows-to-zero"),
        pytest.param({"shape": [0, 2**53, 2**53]}, id="huge-and-empty"),
        pytest.param({"shape": [0]}, id="empty"),
        pytest.param({"shape": [True]}, id="bool-is-no-size"),
        pytest.param({"shape": [4.0, 64.0]}, id="float-is-no-size"),
        pytest.param({"shape": [-1]}, id="negative"),
        pytest.param({"shape": "ab"}, id="shape-is-text"),
        pytest.param({"alternative": -1}, id="alternative-below-none"),
        pytest.param({"alternative": True}, id="alternative-is-no-number"),
        pytest.param({"alternative": 2**40}, id="alternative-out-of-the-arena"),
        pytest.param({"name": "x"}, id="an-output-that-is-none"),
        pytest.param({"name": None}, id="no-name"),
        pytest.param({"copied": 1}, id="copied-is-no-bool"),
    ],
)
def test_an_output_that_cannot_be_is_wrong_and_no_more(question, said):
    def call(message, arena):
        outputs = softmax(message, arena)
        return [result(message, [outputs[0] | said, *outputs[1:]])]

    _, grade = ask(question("random", "repeat"), answering(call))
    assert not any(case.passed for case in grade.numerics.cases)
    assert grade.score.points == 0


@pytest.mark.parametrize("outputs", [None, {}, "y", [1], [[]], [{}]], ids=repr)
def test_outputs_in_no_form_of_ours_are_wrong_and_no_more(question, outputs):
    _, grade = ask(question(), answering(lambda message, _arena: [result(message, outputs)]))
    assert grade.score.points == 0


def test_a_result_among_several_guesses_is_not_picked_for_the_candidate(question):
    def call(message, arena):
        outputs = softmax(message, arena)
        y = message["outputs"][0]
        size = y["shape"][0] * y["shape"][1] * 4
        arena[y["offset"] + y["capacity"] : y["offset"] + y["capacity"] + size] = arena[
            y["offset"] : y["offset"] + size
        ]
        arena[y["offset"] : y["offset"] + size] = bytes(size)
        return [result(message, [outputs[0], outputs[0] | {"alternative": 1}, *outputs[1:]])]

    _, grade = ask(question(), answering(call))
    assert grade.score.points == 0


def test_one_claim_repeated_is_read_once(question, monkeypatch):
    from workers.devices import cpu

    reads = []
    read = cpu.Arena.read
    monkeypatch.setattr(cpu.Arena, "read", lambda *given: reads.append(given) or read(*given))
    ask(question(), answering(lambda message, arena: [result(message, softmax(message, arena) * 30)]))
    assert len(reads) == 2 * 3  # two outputs of the probe and of both audited calls


@pytest.mark.parametrize(
    "said",
    [{"entry": 5}, {"entry": None}, {"op": "failed"}, {"op": "failed", "kind": 3}, {"op": "failed", "line": -1}],
    ids=repr,
)
def test_any_answer_to_load_is_an_answer(question, said):
    liars = answering(
        lambda message, arena: [result(message, softmax(message, arena))],
        load=lambda message, _arena: [loaded(message, **said)],
    )
    found, grade = ask(question(), liars)
    assert found.load_failure is not None
    assert found.load_failure.kind is FailureKind.NOT_OURS
    assert grade.score.points == 0


NO_COUNT = [-1, 2**53 + 1, 1.5, True, None, "1", [], {}]
NO_ROWS = [-1, True, None, "1", {}, [1], [[]], [None]]
NO_TABLE = [-1, True, None, "1", [], {"y": 1}, {"y": {"unwritten_elements": -1}}]
LAUNCH = {"kernel": "k", "args": []}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("n_launches", value) for value in NO_COUNT),
        *(("unique_bytes", value) for value in NO_COUNT),
        *(("unread_inputs", value) for value in (-1, "x", {}, [1], [None])),
        *(("findings", value) for value in NO_ROWS),
        *(("saved", value) for value in NO_ROWS),
        *(("outputs", value) for value in NO_TABLE),
        ("torch_ops", [{"op": "add", "bytes": 1.5}]),
        ("findings", [{"kind": "race", "line": "3"}]),
        ("saved", [{"shape": [True]}]),
        ("launches", [LAUNCH | {"grid": [1, 2, True]}]),
        ("launches", [LAUNCH | {"args": [{"shape": [-1]}]}]),
    ],
    ids=repr,
)
def test_facts_in_no_form_of_ours_are_no_audit(question, key, value):
    liars = answering(
        lambda message, arena: [result(message, softmax(message, arena), facts=facts(**{key: value}))],
    )
    found, grade = ask(question("large"), liars)
    assert found.audit is None
    assert found.audit_failure.kind is FailureKind.NOT_OURS
    assert grade.structure.points == 0


@pytest.mark.parametrize("told", [None, [], "x", {"forward": []}, {"forward": 1}, {}], ids=repr)
def test_no_facts_earn_no_structure(question, told):
    liars = answering(lambda message, arena: [result(message, softmax(message, arena), facts=told)])
    _, grade = ask(question(), liars)
    assert grade.structure.points == 0


# ---- when it stops answering


@pytest.fixture
def audit(assignment_named):
    """The audit and memory sweep of the attention assignment."""

    def run(call):
        assignment = assignment_named("flash-attention-forward")
        liars = answering(lambda message, _arena: call(message))
        found = Examiner(assignment, b"", liars, lambda _stage, _fraction: None, 1).audit()
        assert liars.alive == []
        return assignment, found

    return run


def test_a_sweep_whose_last_answer_cannot_be_read_is_not_a_shorter_sweep(audit):
    calls = []

    def call(message):
        calls.append(message)
        return [result(message, [], facts=facts(peak_bytes=-1 if len(calls) == 3 + 3 else 1000))]

    assignment, found = audit(call)
    assert [point.size for point in found.memory] == list(assignment.memory.sizes)
    assert [point.failure is None for point in found.memory] == [True, True, False]
    assert [evidence.kind for evidence in found.evidence] == ["broken-protocol"]


@pytest.mark.parametrize("dies_in", [2, 3], ids=["other-order", "twice-the-size"])
def test_what_the_first_audited_call_showed_stands_when_a_later_one_fails(audit, dies_in):
    calls = []

    def call(message):
        calls.append(message)
        if len(calls) == dies_in:
            return [{"op": "failed", "request": message["request"], "kind": "raises", "message": "no"}]
        return [result(message, [], facts=facts(library_calls=[{"op": "scaled_dot_product_attention"}]))]

    _, found = audit(call)
    assert found.failure is not None
    assert found.audit is not None
    assert [one.op for one in found.audit.library_calls] == ["scaled_dot_product_attention"]
    assert found.memory == []


def test_library_attention_earns_nothing_when_the_file_fails_in_a_later_audited_call(question):
    calls = []

    def call(message, arena):
        if message.get("watch") == "full":
            calls.append(message)
        if message.get("order") == "reverse":
            return [{"op": "failed", "request": message["request"], "kind": "raises", "message": "no"}]
        told = facts(library_calls=[{"op": "softmax"}])
        return [result(message, softmax(message, arena), facts=told)]

    found, grade = ask(question(), answering(call))
    assert found.audit_failure is not None
    assert grade.numerics.required_passed
    assert grade.score.points == 0


def test_a_failed_audit_earns_no_structure(question):
    def call(message, arena):
        if message.get("order") == "reverse":
            return [{"op": "failed", "request": message["request"], "kind": "raises", "message": "no"}]
        return [result(message, softmax(message, arena))]

    _, grade = ask(question(), answering(call))
    assert grade.structure.verdict is AxisVerdict.NOT_RUN
    assert grade.structure.points == 0


def test_quick_calls_end_with_the_examination_too(question):
    def call(message, arena):
        time.sleep(0.4)
        return [result(message, softmax(message, arena))]

    started = time.monotonic()
    found, _ = ask(question("random", "tail", "one-row", "one-column", "long", "large", total_s=1.0), answering(call))
    assert time.monotonic() - started < 4
    last = found.probes[-1]
    assert isinstance(last, ProbeFailed)
    assert last.failure.kind is FailureKind.TIME_LIMIT
    assert "limit for all calls together" in last.failure.message
    assert len(found.probes) < 6


def test_loading_ends_with_the_examination_too(question):
    liars = answering(lambda message, _arena: [], load=lambda message, _arena: time.sleep(2) or [loaded(message)])
    started = time.monotonic()
    found, _ = ask(question(load_s=30.0, total_s=1.0), liars)
    assert time.monotonic() - started < 5
    assert found.load_failure.kind is FailureKind.TIME_LIMIT


def test_a_candidate_that_cannot_be_frozen_is_no_pass_and_is_ended(question, monkeypatch):
    from liars import _Liar

    from workers.sandbox import NotFrozenError

    def refuse(_self):
        raise NotFrozenError("3 processes not stopped")

    monkeypatch.setattr(_Liar, "freeze", refuse)
    liars = answering(lambda message, arena: [result(message, softmax(message, arena))])
    with pytest.raises(NotFrozenError):
        examine(question(), b"", sandboxes=liars, seed=1)
    assert liars.alive == []


def test_an_arena_that_cannot_be_made_leaves_no_candidate(question):
    class Bench:
        kind = "interpreter"

        def arena(self, _interview):
            raise RuntimeError("out of device memory")

    liars = answering(lambda message, _arena: [])
    examiner = Examiner(question(), b"", liars, lambda _stage, _fraction: None, 1, Bench())
    with pytest.raises(RuntimeError, match="out of device memory"):
        examiner.begin()
    assert len(liars.taken) == 1
    assert liars.alive == []
