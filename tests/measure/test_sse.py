"""Server-sent events: the same events whatever the cuts, the line ends and the decoration."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.measure.sse import Event, SSEParser

PLAIN = (
    'data: {"a":"x y"}\n\n: ping\n\ndata: {"b":"é世"}\n\ndata:no space\n\n'
    "event: note\ndata: 1\ndata: 2\n\ndata: [DONE]\n\n"
)
EXPECTED = [
    (b'{"a":"x y"}', ""),
    ('{"b":"é世"}'.encode(), ""),
    (b"no space", ""),
    (b"1\n2", "note"),
    (b"[DONE]", ""),
]


def parse(*pieces: bytes) -> list[Event]:
    parser = SSEParser()
    events = [event for read, piece in enumerate(pieces) for event in parser.feed(piece, read)]
    return events + parser.close()


def plain(events: list[Event]) -> list[tuple[bytes, str]]:
    return [(event.data, event.name) for event in events]


@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
def test_every_single_cut_gives_the_same_events(line_end: str) -> None:
    stream = PLAIN.replace("\n", line_end).encode()
    for cut in range(len(stream) + 1):
        assert plain(parse(stream[:cut], stream[cut:])) == EXPECTED, cut


@given(st.lists(st.integers(0, len(PLAIN.encode())), max_size=12), st.sampled_from(["\n", "\r\n", "\r"]))
def test_any_set_of_cuts_gives_the_same_events(cuts: list[int], line_end: str) -> None:
    stream = PLAIN.replace("\n", line_end).encode()
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    assert plain(parse(*(stream[a:b] for a, b in itertools.pairwise(edges)))) == EXPECTED


@given(st.binary(max_size=300), st.integers(0, 300))
def test_no_bytes_break_it_and_cuts_never_matter(stream: bytes, cut: int) -> None:
    assert plain(parse(stream)) == plain(parse(stream[:cut], stream[cut:]))


@pytest.mark.parametrize(
    ("pieces", "read"),
    [
        ([b"data: a\n\n"], 0),
        ([b"data: a", b"\n\n"], 0),  # the data was there with the first read; the line end came later
        ([b"data: a\n", b"\n"], 0),
        ([b"data: ", b"a\n\n"], 1),
        ([b"da", b"ta: a", b"\n", b"\n"], 1),
        ([b"data: a\r", b"\n\r\n"], 0),
        ([b"data: a"], 0),  # the stream ends without its blank line
        ([b"data: a", b""], 0),
    ],
)
def test_an_event_is_stamped_with_the_read_of_its_last_data_byte(pieces: list[bytes], read: int) -> None:
    (event,) = parse(*pieces)
    assert (event.data, event.read) == (b"a", read)


def test_two_events_of_one_read_share_it() -> None:
    assert [event.read for event in parse(b"", b"data: 1\n\ndata: 2\n\n")] == [1, 1]


def test_comments_are_counted_and_carry_nothing() -> None:
    parser = SSEParser()
    assert parser.feed(b": keep-alive\n\n: again\n\n", 0) == []
    assert parser.comments == 2


def test_a_byte_order_mark_is_skipped_also_when_cut() -> None:
    stream = b"\xef\xbb\xbfdata: a\n\n"
    for cut in range(len(stream)):
        assert plain(parse(stream[:cut], stream[cut:])) == [(b"a", "")]


def test_blank_data_is_an_event_without_data_and_fields_without_data_are_none() -> None:
    assert plain(parse(b"data: \n\n")) == [(b"", "")]
    assert plain(parse(b"event: x\n\nid: 3\nretry: 10\n\n")) == []


def test_a_megabyte_event_in_small_reads() -> None:
    data = b"x" * (1 << 20)
    stream = b"data: " + data + b"\n\n"
    pieces = [stream[i : i + 65536] for i in range(0, len(stream), 65536)]
    (event,) = parse(*pieces)
    assert event.data == data
    # The last piece that held data, not the one with the line end.
    assert event.read == (len(stream) - 3) // 65536
