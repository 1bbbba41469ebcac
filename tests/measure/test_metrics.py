"""Per-request and per-run metrics from records made by hand; times in milliseconds after the schedule."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.measure import metrics
from paceline.measure.metrics import TokenSource, measure
from paceline.measure.records import Attempt, ErrorClass, RequestRecord, Usage
from paceline.measure.slo import Slo, goodput, parse_slos
from paceline.measure.stats import percentile
from paceline.measure.summary import measure_run, summarize
from tests.measure.making import failed, streamed


def ms(seconds: float | None) -> float | None:
    """Milliseconds without the dust of binary fractions."""
    return None if seconds is None else round(1e3 * seconds, 6)


def test_role_only_event_is_no_token() -> None:
    found = measure(streamed([5, 200, 220, 230, 231], kinds="RccUD", n=2))
    assert (ms(found.ttft_s), ms(found.tpot_s), found.output_tokens) == (200, 20, 2)
    assert (ms(found.e2e_s), ms(found.close_s)) == (220, 231)


def test_reasoning_counts_and_visible_is_kept_apart() -> None:
    found = measure(streamed([100.0 * i for i in range(1, 11)], kinds="r" * 9 + "c", n=10))
    assert (ms(found.ttft_s), ms(found.first_visible_s), ms(found.tpot_s)) == (100, 1000, 100)
    hidden = measure(streamed([100, 200], kinds="rr", n=2))
    assert hidden.first_visible_s is None
    assert ms(hidden.ttft_s) == 100


def test_tool_calls_carry_tokens() -> None:
    found = measure(streamed([100, 120, 140], kinds="ttt", n=30))
    assert (ms(found.ttft_s), found.output_tokens) == (100, 30)


@pytest.mark.parametrize("told", [(5, 1, 1, 1, 1, 1), ()])
def test_first_event_of_several_tokens(told: tuple[int, ...]) -> None:
    """n_first is what the server told, or for want of it what the characters suggest."""
    found = measure(streamed([100, 110, 120, 130, 140, 150], chars=[20, 4, 4, 4, 4, 4], n=10, row_tokens=told))
    assert ms(found.tpot_s) == 10
    assert found.tokens_estimated is (told == ())


def test_speculative_events_share_their_gap() -> None:
    found = measure(streamed([100 + 30.0 * i for i in range(10)], n=30))
    assert found.icl_s == pytest.approx([0.030] * 9)
    assert found.itl_s == pytest.approx([0.010] * 27)
    assert ms(found.tpot_s) == 10


def test_two_events_in_one_read_are_not_two_fast_tokens() -> None:
    found = measure(streamed([100, 100], n=2))
    assert found.icl_s == (0.0,)
    assert found.icl_read_s == []
    assert found.itl_s == []
    assert found.tpot_s is None  # both tokens had come at t_first
    assert metrics.applies("tpot", found)  # unknown, and so never passed
    later = measure(streamed([100, 130, 130], n=3))
    assert later.itl_s == pytest.approx([0.015, 0.015])
    assert ms(later.max_stall_s) == 30


def test_finish_event_after_the_last_token_adds_no_gap() -> None:
    found = measure(streamed([460, 480, 500, 530, 531], kinds="ccFUD", n=2))
    assert ms(found.e2e_s) == 480
    assert found.itl_s == pytest.approx([0.020])


def test_one_token_has_no_tpot_and_is_neither_good_nor_bad() -> None:
    found = measure(streamed([100], n=1))
    assert ms(found.ttft_s) == 100
    assert found.tpot_s is None
    assert found.itl_s == []
    assert Slo("tpot", 0.05).holds(found) is None
    judged = goodput([found], parse_slos("tpot<=50ms"), 1.0)
    assert (judged.share, judged.not_applicable, judged.per_s) == (None, 1, None)
    both = goodput([found], parse_slos("tpot<=50ms, ttft<=500ms"), 1.0)
    assert both.share == 1.0


def test_no_token_at_all_is_never_zero_milliseconds() -> None:
    found = measure(streamed([100, 101], kinds="FD", n=0))
    assert (found.ttft_s, found.e2e_s, found.output_tokens) == (None, None, 0)
    assert ms(found.close_s) == 101
    assert Slo("ttft", 1.0).holds(found) is False


def test_whole_body() -> None:
    found = measure(streamed([300], kinds="B", n=40, stream=False))
    assert found.ttft_s is None
    assert ms(found.e2e_s) == 300
    assert found.tpot_s is None
    assert Slo("tpot", 1.0).holds(found) is False  # unknown, not inapplicable


def test_unknown_tokens_stay_unknown() -> None:
    found = measure(streamed([100, 120]))
    assert (found.output_tokens, found.token_source, found.tpot_s) == (None, TokenSource.UNKNOWN, None)
    assert found.icl_s == pytest.approx([0.020])
    client = measure(streamed([100, 120], client_tokens=2))
    assert (client.output_tokens, client.token_source) == (2, TokenSource.CLIENT)
    told = measure(streamed([100, 120], row_tokens=(1, 2), client_tokens=9))
    assert (told.output_tokens, told.token_source) == (3, TokenSource.STREAM)
    run = measure_run([streamed([100, 120])])
    assert run.whole is not None
    assert run.whole.output_tokens.per_s is None
    assert run.whole.output_tokens.n_unknown == 1


def test_reasoning_details_are_part_of_the_total() -> None:
    usage = Usage(prompt_tokens=5, completion_tokens=100, reasoning_tokens=60)
    assert measure(streamed([100, 120], usage=usage)).output_tokens == 100


def test_response_and_service() -> None:
    found = measure(streamed([1200, 1220], sent_ms=1000, n=2))
    assert (ms(found.queue_delay_s), ms(found.ttft_s), ms(found.ttft_service_s)) == (1000, 1200, 200)
    assert (ms(found.e2e_s), ms(found.e2e_service_s)) == (1220, 220)


def test_retry_wait_is_inside_the_users_latency() -> None:
    attempt = Attempt(
        dispatched_s=0.0, ended_s=0.01, error=ErrorClass.REJECTED, status=429, retry_after_s=2.0, waited_s=2.0
    )
    record = streamed([2110, 2120], n=2, attempts=(attempt,))
    run = measure_run([record])
    assert ms(measure(record).ttft_s) == 2110
    assert run.rejected_attempts == 1


def test_failed_requests_have_no_latency() -> None:
    record = streamed([100, 120, 140], n=3, error=ErrorClass.TRANSPORT)
    found = measure(record)
    assert (found.ttft_s, found.tpot_s, found.e2e_s, found.icl_s) == (None, None, None, ())


def test_choices_are_streams_of_their_own() -> None:
    record = streamed([100, 100, 120, 120, 140, 140], n=6, row_choices=(0, 1, 0, 1, 0, 1))
    found = measure(record)
    assert sorted(found.icl_s) == pytest.approx([0.020] * 4)
    assert ms(found.tpot_s) == 20
    assert found.itl_s == pytest.approx([0.020] * 4)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.integers(0, 60))
def test_estimated_tokens_sum_to_the_total(chars: list[int], spare: int) -> None:
    total = len(chars) + spare
    record = streamed([100.0 + i for i in range(len(chars))], chars=chars, n=total)
    counts, _ = metrics.tokens_per_row(record, record.token_rows(), total)
    assert sum(counts) == total
    assert min(counts) >= 1


@given(
    st.lists(st.sampled_from([0.0, 1.0, 7.5]), min_size=2, max_size=30),
    st.integers(0, 40),
)
def test_gap_identities(steps: list[float], spare: int) -> None:
    """ITL is made of the same time as ICL: both sum to last minus first. TPOT is that over the later tokens."""
    times, now = [], 50.0
    for step in steps:
        now += step
        times.append(now)
    found = measure(streamed(times, n=len(times) + spare))
    span = (times[-1] - times[0]) / 1e3
    assert math.fsum(found.icl_s) == pytest.approx(span, abs=1e-9)
    assert math.fsum(found.itl_s) == pytest.approx(span, abs=1e-9)
    if found.tpot_s is not None:
        assert found.tpot_s == pytest.approx(span / len(found.itl_s) if found.itl_s else 0.0, abs=1e-9)
    assert found.max_stall_s == (pytest.approx(max(found.icl_s)) if found.gaps else None)


def test_failures_leave_success_latency_alone_and_show_in_the_tail() -> None:
    good = [streamed([100, 120], at_s=i, n=2) for i in range(50)]
    bad = [failed(at_s=i + 0.5) for i in range(50)]
    run = measure_run([r for pair in zip(good, bad, strict=True) for r in pair])
    ttft = run.latencies["ttft"]
    assert (ttft.n, ttft.n_failed) == (50, 50)
    p95, tail = ttft.quantile(95.0), ttft.quantile(95.0, with_failures=True)
    assert p95 is not None
    assert tail is not None
    assert p95.value == pytest.approx(0.1)
    assert tail.value == math.inf
    assert run.success_share == 0.5
    assert run.errors == {ErrorClass.REJECTED: 50}


def test_missing_values_are_counted_not_averaged_in() -> None:
    run = measure_run([streamed([100, 120], n=2), streamed([50, 51], kinds="FD", n=0, at_s=1)])
    ttft = run.latencies["ttft"]
    assert (ttft.n, ttft.n_undefined, ms(ttft.mean)) == (1, 1, 100)
    assert (run.latencies["tpot"].n, run.latencies["tpot"].n_not_applicable) == (1, 1)


def test_empty_metric_is_null_everywhere() -> None:
    found = summarize("ttft", [])
    assert (found.n, found.mean, found.low, found.quantiles[0].value) == (0, None, None, None)


def test_goodput_is_of_all_sent() -> None:
    records = [streamed([100, 120], n=2, at_s=i) for i in range(6)] + [failed(at_s=10 + i) for i in range(4)]
    run = measure_run(records, slos=parse_slos("ttft<=500ms"))
    assert run.goodput.share == pytest.approx(0.6)
    assert (run.goodput.good, run.goodput.sent) == (6, 10)


def test_cancelled_and_unsent_enter_nothing() -> None:
    unsent = RequestRecord(id="u", index=9, scheduled_s=9.0)
    cancelled = failed(ErrorClass.CANCELLED, at_s=8.0, status=None)
    run = measure_run([streamed([100, 120], n=2), cancelled, unsent])
    assert (len(run.requests), run.cancelled, run.unsent, run.failed) == (1, 1, 1, 0)


def test_first_wave_is_left_out_of_latencies() -> None:
    wave = [streamed([5000, 5020], n=2, id=f"w{i}", first_wave=True) for i in range(4)]
    rest = [streamed([100, 120], n=2, at_s=6.0 + i) for i in range(20)]
    run = measure_run(wave + rest, concurrency=4, open_loop=False)
    assert run.first_wave == 4
    assert run.latencies["ttft"].high == pytest.approx(0.1)
    assert len(run.requests) == 24
    alone = measure_run(wave, concurrency=4, open_loop=False)
    assert (alone.first_wave, alone.latencies["ttft"].n) == (0, 4)


def test_plateau_is_free_of_the_straggler() -> None:
    """Four slots, ten seconds at 40 tokens/s, then one answer that drains alone for another fifty seconds."""
    records = []
    for slot in range(3):
        for i in range(10):
            times = [100.0 * k for k in range(1, 11)]
            records.append(streamed(times, at_s=float(i), n=10, id=f"{slot}.{i}", close_ms=1000))
    records.append(streamed([100.0 * k for k in range(1, 601)], n=600, id="long", close_ms=60_000))
    run = measure_run(records, concurrency=4, open_loop=False)
    assert run.whole is not None
    assert run.plateau is not None
    assert run.whole.output_tokens.per_s == pytest.approx(15.0, rel=0.01)
    assert run.plateau.span.seconds == pytest.approx(10.0, rel=0.01)
    assert run.plateau.output_tokens.per_s == pytest.approx(40.0, rel=0.05)
    assert run.plateau.mean_in_flight == pytest.approx(4.0, rel=0.01)


def test_input_tokens_of_turns_add_up() -> None:
    turns = [
        streamed(
            [100, 120], at_s=float(t), turn=t, turns=3, usage=Usage(prompt_tokens=100 * (t + 1), completion_tokens=2)
        )
        for t in range(3)
    ]
    run = measure_run(turns)
    assert run.whole is not None
    assert run.whole.input_tokens.known == 600


def test_classes_are_measured_apart() -> None:
    records = [streamed([100, 120], n=2, at_s=float(i), traffic_class="chat") for i in range(5)]
    records += [streamed([900, 920], n=2, at_s=i + 0.5, traffic_class="batch") for i in range(5)]
    run = measure_run(records)
    assert run.classes["chat"].latencies["ttft"].mean == pytest.approx(0.1)
    assert run.classes["batch"].latencies["ttft"].mean == pytest.approx(0.9)


def test_coordinated_omission() -> None:
    """A FIFO server of 1 ms that stops for a second; 100 arrivals of 1,000 fall into the stop or queue behind it."""
    free_at, records = 0.0, []
    for i in range(1000):
        due = i * 0.010
        start = max(due, free_at)
        if 5.0 <= start < 6.0:
            start = 6.0
        free_at = start + 0.001
        records.append(streamed([(free_at - due) * 1e3], at_s=due, sent_ms=(start - due) * 1e3, n=1, id=str(i)))
    run = measure_run(records)
    exact = [request.ttft_s for request in run.requests if request.ttft_s is not None]
    ranked = [round(1e3 * (percentile(exact, q, "nearest-rank") or 0.0), 6) for q in (50.0, 90.0, 95.0, 99.0)]
    assert ranked == [1, 101, 551, 911]
    found = [round(1e3 * (q.value or 0.0), 2) for q in run.latencies["ttft"].quantiles]
    assert found == [1, 101.9, 551.45, 911.09]  # the same, interpolated
    assert run.latencies["ttft"].high == pytest.approx(1.001)
    service = run.latencies["ttft_service"].quantile(99.0)
    assert service is not None
    assert service.value == pytest.approx(0.001)


def test_nothing_is_rounded() -> None:
    assert measure(streamed([147.4, 150], n=2)).ttft_s == pytest.approx(0.1474, abs=1e-12)
