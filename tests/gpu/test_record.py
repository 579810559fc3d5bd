"""Records of what a call did on a GPU: bytes that a hostile process wrote. No GPU needed."""

import dataclasses
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers import record
from workers.record import Dtype, Kernel, Launch, Operation, Pointer, Record, RecordError, View

IMAGE = b"\x7fELF" + bytes(60)
OUT = View(2, 0, "float32", (4, 8), (8, 1))
RECORD = Record(
    n_inputs=2,
    buffers=(4 * 8 * 4, 64),
    kernels=(Kernel("flash_fwd", IMAGE, 49152, 4), Kernel("other", IMAGE + b"x", 0, 8, 128, 16)),
    forward=(
        Operation("zeros.default", ([4, 8],), {"dtype": Dtype("float32")}, (OUT,)),
        Launch(0, (8, 2, 1), (Pointer(0), Pointer(2, 16), Pointer(None), b"\x01\x00\x00\x00", b"\x00" * 8)),
        Operation("mul.Tensor", (OUT, -math.inf), {}, (OUT,)),
    ),
    backward=(Operation("sum.dim_IntList", (OUT, [-1], True), {}, (View(3, 0, "float32", (4, 1), (1, 1)),)),),
    outputs={"o": OUT},
)


def test_a_record_comes_back_as_it_was():
    assert record.parse(record.dump(RECORD)) == RECORD


def test_operations_are_left_out_of_one_phase_by_their_base_name():
    kept = RECORD.without("forward", {"mul"})
    assert [type(step).__name__ for step in kept.forward] == ["Operation", "Launch"]
    assert kept.backward == RECORD.backward
    assert kept.n_launches == 1


def body_of(data):
    length = int.from_bytes(data[8:12], "little")
    return json.loads(data[12 : 12 + length]), data[12 + length :]


def bytes_of(body, images):
    text = json.dumps(body).encode()
    return record.MAGIC + len(text).to_bytes(4, "little") + text + images


def changed(path, value):
    """The record's bytes with one thing in its JSON replaced."""
    body, images = body_of(record.dump(RECORD))
    at = body
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return bytes_of(body, images)


LAUNCH = ("forward", 1)
HOSTILE = [
    pytest.param(("n_inputs",), -1, id="negative-count"),
    pytest.param(("n_inputs",), True, id="a-bool-for-a-number"),
    pytest.param(("n_inputs",), 1e9, id="a-float-for-a-number"),
    pytest.param(("buffers",), [1 << 60], id="a-buffer-beyond-any-gpu"),
    pytest.param(("buffers",), [1] * 5000, id="too-many-buffers"),
    pytest.param(("kernels", 0, 0), "../../etc", id="a-kernel-named-like-a-path"),
    pytest.param(("kernels", 0, 0), "k\u202e", id="a-name-that-is-not-ascii"),
    pytest.param(("kernels", 0, 1), 1 << 40, id="an-image-longer-than-the-record"),
    pytest.param(("kernels", 0, 1), 3, id="an-image-cut-short"),
    pytest.param(("kernels", 0, 2), 1 << 40, id="shared-memory-without-end"),
    pytest.param(("kernels", 0, 3), 0, id="no-warps"),
    pytest.param(("kernels", 0, 3), 4096, id="too-many-warps"),
    pytest.param((*LAUNCH, 1), 7, id="a-kernel-that-is-not-there"),
    pytest.param((*LAUNCH, 1), -1, id="a-negative-kernel"),
    pytest.param((*LAUNCH, 2), [1, 1], id="a-grid-of-two"),
    pytest.param((*LAUNCH, 2), [1, 70000, 1], id="a-grid-that-no-gpu-takes"),
    pytest.param((*LAUNCH, 3, 0), ["p", 9, 0], id="a-buffer-that-is-not-there"),
    pytest.param((*LAUNCH, 3, 1), ["p", 2, 4096], id="an-address-outside-its-buffer"),
    pytest.param((*LAUNCH, 3, 0), ["p", 0, -8], id="an-address-before-its-buffer"),
    pytest.param((*LAUNCH, 3, 3), ["s", "00" * 3], id="a-number-of-three-bytes"),
    pytest.param((*LAUNCH, 3, 3), ["s", "00" * 16], id="a-number-of-sixteen-bytes"),
    pytest.param((*LAUNCH, 3, 3), ["s", "zz"], id="a-number-that-is-not-hex"),
    pytest.param((*LAUNCH, 3, 3), ["x", "00"], id="an-argument-of-no-kind"),
    pytest.param(("forward", 0, 1), "__import__.default", id="an-operation-of-pythons"),
    pytest.param(("forward", 0, 1), "zeros", id="an-operation-without-overload"),
    pytest.param(("forward", 0, 1), "zeros.default; rm", id="an-operation-with-more"),
    pytest.param(("forward", 0, 3), {"dtype": ["d", "object"]}, id="a-dtype-of-no-gpu"),
    pytest.param(("forward", 2, 2), [["l", [["l", [["l", [["l", [["l", []]]]]]]]]]], id="nested-deep"),
    pytest.param(("forward", 2, 2), [["v", 1 << 80]], id="a-huge-integer"),
    pytest.param(("forward", 2, 2), [["v", {}]], id="an-object-for-a-value"),
    pytest.param(("forward", 2, 4), [["t", 2, 0, "float32", [1 << 39, 8], [8, 1]]], id="a-tensor-outside-its-buffer"),
    pytest.param(("forward", 2, 4), [["t", 2, 0, "float32", [4, 8], [8]]], id="shape-and-strides-of-two-lengths"),
    pytest.param(("forward", 2, 4), [["t", 2, 0, "float32", [-4, 8], [8, 1]]], id="a-negative-size"),
    pytest.param(("forward",), ["launch"], id="a-step-that-is-text"),
    pytest.param(("forward",), [["eval", "1"]], id="a-step-of-no-kind"),
    pytest.param(("forward",), [["launch", 0, [1, 1, 1], []]] * 9000, id="too-many-steps"),
    pytest.param(("outputs",), {"o" * 100: ["t", 2, 0, "float32", [1], [1]]}, id="an-output-with-a-long-name"),
    pytest.param(("outputs",), [], id="outputs-that-are-a-list"),
    pytest.param(("reasons",), ["x" * 5000], id="a-long-reason"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value"), HOSTILE)
def test_a_record_that_does_not_fit_is_refused(path, value):
    with pytest.raises(RecordError):
        record.parse(changed(path, value))


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"TGREC001", id="only-the-magic"),
        pytest.param(b"TGREC001\xff\xff\xff\xff", id="a-length-beyond-the-end"),
        pytest.param(b"TGREC001\x02\x00\x00\x00[]", id="a-list"),
        pytest.param(b'TGREC001\x0d\x00\x00\x00{"n_inputs":1', id="json-cut-short"),
        pytest.param(bytes_of({"n_inputs": 1}, b""), id="keys-missing"),
        pytest.param(bytes_of([[]] * 10**5, b""), id="many-lists"),
        pytest.param(b"TGREC001" + (10**5 * 2).to_bytes(4, "little") + b"[" * 10**5 + b"]" * 10**5, id="nested-json"),
        pytest.param(record.dump(RECORD) + b"more", id="bytes-behind-the-last-kernel"),
        pytest.param(record.dump(RECORD)[:-5], id="the-last-kernel-cut-short"),
        pytest.param(bytes(record.MOST_BYTES + 1), id="too-large"),
    ],
)
def test_bytes_that_are_no_record_are_refused(data):
    with pytest.raises(RecordError):
        record.parse(data)


@pytest.mark.parametrize("text", ["NaN", "Infinity", "1e999"])
def test_numbers_that_are_none_are_refused(text):
    body, images = body_of(record.dump(RECORD))
    body["buffers"][0] = "HERE"
    raw = json.dumps(body).replace('"HERE"', text).encode()
    with pytest.raises(RecordError):
        record.parse(record.MAGIC + len(raw).to_bytes(4, "little") + raw + images)


@given(st.binary(max_size=400))
@settings(max_examples=300, deadline=None)
def test_no_bytes_make_anything_but_a_record_or_an_error(data):
    for candidate in (data, record.MAGIC + data, record.MAGIC + len(data).to_bytes(4, "little") + data):
        try:
            found = record.parse(candidate)
        except RecordError:
            continue
        assert record.parse(record.dump(found)) == found


@given(st.integers(0, 2000), st.integers(0, 255))
@settings(max_examples=400, deadline=None)
def test_a_changed_byte_is_another_record_or_an_error(at, value):
    data = bytearray(record.dump(RECORD))
    data[at % len(data)] = value
    try:
        found = record.parse(bytes(data))
    except RecordError:
        return
    assert isinstance(found, Record)


def test_reasons_survive():
    with_reasons = dataclasses.replace(RECORD, reasons=("takes a tensordesc",))
    assert record.parse(record.dump(with_reasons)).reasons == ("takes a tensordesc",)
