"""What the examiner reads from a hostile process: bounded, strict, and never more than it asked for."""

import json
import socket
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.protocol import (
    MAX_FRAME_BYTES,
    Channel,
    PeerGoneError,
    ProtocolError,
    TimedOutError,
    decode,
    encode,
)


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    yield Channel(ours), theirs
    ours.close()
    theirs.close()


def test_a_message_arrives_as_it_was_sent(pair):
    channel, peer = pair
    message = {"op": "result", "n": 3, "x": 1.5, "text": "é\u202e", "list": [None, True]}
    Channel(peer).send(message)
    assert channel.receive(1) == message


def test_two_messages_in_one_packet_are_two_messages(pair):
    channel, peer = pair
    peer.sendall(encode({"op": "a"}) + encode({"op": "b"}))
    assert [channel.receive(1)["op"], channel.receive(1)["op"]] == ["a", "b"]


def test_half_a_frame_is_kept_until_the_rest_arrives(pair):
    channel, peer = pair
    frame = encode({"op": "a"})
    peer.sendall(frame[:5])
    with pytest.raises(TimedOutError):
        channel.receive(0.01)
    peer.sendall(frame[5:])
    assert channel.receive(1) == {"op": "a"}


def test_a_closed_peer_is_said_so(pair):
    channel, peer = pair
    peer.close()
    with pytest.raises(PeerGoneError):
        channel.receive(1)


@pytest.mark.parametrize("size", [MAX_FRAME_BYTES + 1, 2**32 - 1])
def test_an_oversized_frame_is_refused_before_it_is_read(pair, size):
    channel, peer = pair
    peer.sendall(struct.pack(">I", size))
    with pytest.raises(ProtocolError, match="frame of"):
        channel.receive(1)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b'{"op": NaN}', id="nan"),
        pytest.param(b'{"op": "a", "x": NaN}', id="nan-value"),
        pytest.param(b'{"op": "a", "x": -Infinity}', id="infinity"),
        pytest.param(b'{"op": "a", "x": 1e999}', id="overflowing-float"),
        pytest.param(b'{"op": "a", "op": "b"}', id="duplicate-keys"),
        pytest.param(b'{"op": "a", "x": 123456789012345678901234567890}', id="huge-integer"),
        pytest.param(b'{"op": "a", "x": "\\ud800"}', id="lone-surrogate"),
        pytest.param(b'{"op": "a", "\\udfff": 1}', id="lone-surrogate-key"),
        pytest.param(b'{"op": "a", "x": ' + b"[" * 500 + b"]" * 500 + b"}", id="deep"),
        pytest.param(b"[" * 60000, id="unclosed-deep"),
        pytest.param(b'["op"]', id="not-an-object"),
        pytest.param(b'{"x": 1}', id="no-op"),
        pytest.param(b'{"op": 1}', id="op-not-text"),
        pytest.param(b"\xff\xfe", id="not-utf8"),
        pytest.param(b"", id="empty"),
    ],
)
def test_what_is_not_a_frame_of_ours_is_refused(body):
    with pytest.raises(ProtocolError):
        decode(body)


def test_a_long_message_in_any_script_fits_a_frame():
    # 4,000 characters of message and as many of traceback are the most that a candidate sends about an error
    message = {"op": "failed", "message": "\U0001f40d" * 4000, "traceback": "\x1b" * 4000}
    assert decode(encode(message)[4:]) == message


@pytest.mark.parametrize("text", ["\ud800", "\udfff"])  # noqa: PT014 (ruff takes all lone surrogates for one)
def test_a_lone_surrogate_is_not_sent(text):
    with pytest.raises(ProtocolError, match="cannot be sent"):
        encode({"op": text})


def test_a_message_larger_than_a_frame_is_not_sent():
    with pytest.raises(ProtocolError, match="a frame holds"):
        encode({"op": "x" * MAX_FRAME_BYTES})


@given(st.binary(max_size=200))
def test_no_bytes_make_the_reader_fail_otherwise(body):
    try:
        message = decode(body)
    except ProtocolError:
        return
    assert json.loads(encode(message)[4:]) == message
