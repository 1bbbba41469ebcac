"""A simulated client reads tokens when the pace line shows them, as a real one does."""

from __future__ import annotations

from itertools import pairwise

from paceline.core.pace import Pace
from paceline.core.sampling import SamplingParams
from paceline.core.step import Accepted, Finish, FinishReason, RequestSpec, StepEvents
from paceline.measure.records import ErrorClass
from paceline.simulate.ledger import Ledger
from paceline.simulate.overheads import Overheads
from paceline.simulate.traffic import Arrival


def sent(name: str, pace: Pace | None, overheads: Overheads | None = None) -> Ledger:
    ledger = Ledger(overheads)
    spec = RequestSpec(name, (2, 3), SamplingParams(max_tokens=9))
    ledger.sent(Arrival(index=0, at_s=0.0, spec=spec, output_tokens=9))
    ledger.accepted(Accepted(name, pace))
    return ledger


def test_tokens_held_back_are_read_one_by_one_and_the_rest_at_the_end() -> None:
    ledger = sent("r", Pace(0.1, hold=3))
    for step in range(8):
        ledger.heard(StepEvents(step, ("r",), ((0,),)), 1.0 + 0.01 * step)
    ledger.heard(StepEvents(8, ("r",), ((0,),)), 1.42)
    ledger.finished(Finish("r", FinishReason.LENGTH), 1.42)
    (record,) = ledger.records
    assert len(record.read_s) == 9
    assert record.read_s[0] == 1.0
    assert record.closed_s == 1.42
    assert list(record.read_s) == sorted(record.read_s)
    assert max(b - a for a, b in pairwise(record.read_s)) <= 0.1 + 1e-9


def test_without_a_pace_they_are_read_as_they_come() -> None:
    ledger = sent("r", None, Overheads(after_s=0.25))
    for step in range(3):
        ledger.heard(StepEvents(step, ("r",), ((0,),)), float(step))
    ledger.finished(Finish("r", FinishReason.LENGTH), 2.0)
    assert ledger.records[0].read_s == (0.25, 1.25, 2.25)


def test_who_is_cut_off_has_read_what_was_made() -> None:
    ledger = sent("r", Pace(1.0, hold=3), Overheads(after_s=0.1, after_row_s=0.01))
    for step in range(3):
        ledger.heard(StepEvents(step, ("r",), ((0,),)), 1.0 + 0.01 * step)
    ledger.cut_off(1.02, ErrorClass.CANCELLED)
    (record,) = ledger.records
    assert len(record.read_s) == 3
    assert list(record.read_s) == sorted(record.read_s)
