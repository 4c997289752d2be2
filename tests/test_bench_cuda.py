"""`nosquare bench cuda` as far as it goes without a card: suites, tables, clocks, refusals."""

from __future__ import annotations

import io
import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import nosquare as ns
from nosquare import records
from nosquare.bench import clocks, cuda, record, screen, table, watch
from nosquare.bench.cases import Case
from nosquare.bench.check import Check
from nosquare.bench.clocks import CudaClock, HostClock, Sample
from nosquare.bench.peers import named
from nosquare.bench.timing import Entry, Result, Rounds, measure

CONSOLE = pytest.importorskip("rich.console")
LINE = "forward bfloat16 B2 Hq16 Hk16 M8192 N8192 D128 full()"


def printed(show: Callable[[Any], None], width: int = 80) -> str:
    """What `show` prints on a terminal of that width, without styles."""
    console = CONSOLE.Console(width=width, file=io.StringIO(), highlight=False, color_system=None)
    show(console)
    text: str = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= width
    return text


# ---- suites ----


def test_suites_are_cases_that_the_grammar_reads() -> None:
    for suite in cuda.SUITES.values():
        for line in (*suite.cases, *suite.quick):
            assert str(Case.parse(line)) == line
        assert set(suite.quick) <= set(suite.cases)
        assert named(suite.peers)


def test_choosing_suites() -> None:
    assert list(cuda.chosen_suites("", None, False)) == list(cuda.SUITES)
    assert list(cuda.chosen_suites("decode, prefill,decode", None, False)) == ["decode", "prefill"]
    quick = cuda.chosen_suites("", None, True)
    assert quick
    assert all(suite.quick for suite in quick.values())
    (mine,) = cuda.chosen_suites("", LINE, False).values()
    assert mine.cases == mine.quick == (LINE,)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("prefil,decode", None, False),
         "There is no such suite.\n  suite     'prefil'\n  known     prefill, training, decode, "
         "dropout, bias, fp32, gqa, window, varlen\n  portable  portable_forward, "
         "portable_backward, portable_dropout_forward, portable_dropout_backward, "
         "portable_float32_forward, portable_float32_backward, portable_bias\n"
         "  hopper    hopper_forward, hopper_backward, hopper_grouped, hopper_window, "
         "hopper_padded, hopper_packed\n"
         "  Try: --suite prefill,training,decode."),
        (("dropout", None, True),
         "This suite has no quick cases.\n  suite  dropout\n  quick  prefill, training, decode, "
         "fp32\n  Try: the same without --quick."),
        (("decode", LINE, False),
         f"A run has one case, or suites, not both.\n  suite  decode\n  case   {LINE}\n"
         "  Try: --case alone."),
    ],
)  # fmt: skip
def test_suites_that_are_none(arguments: tuple[Any, ...], text: str) -> None:
    with pytest.raises(ns.ArgumentError) as error:
        cuda.chosen_suites(*arguments)
    assert str(error.value) == text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_no_card() -> None:
    with pytest.raises(ns.UnsupportedError) as error:
        cuda.bench_cuda()
    lines = str(error.value).splitlines()
    assert lines[0] == "torch sees no CUDA device here."
    assert lines[1] == f"  torch           {torch.__version__}"
    assert lines[3] == "  Try: `nosquare bench cpu`, or the same on a machine with an NVIDIA card."
    with pytest.raises(ns.ArgumentError, match="no such contestant"):  # said first
        cuda.bench_cuda(peers="x")
    with pytest.raises(ns.ArgumentError, match="not a benchmark case"):
        cuda.bench_cuda(case="x")


# ---- the table ----


def entry(name: str, time_us: float | None, error: float = 1.0, **more: Any) -> Entry:
    samples = [] if time_us is None else [time_us]
    checks = [] if time_us is None else [Check("o", error, 9.0, "float64")]
    return Entry(name, samples, checks=checks, **more)


def result(*entries: Entry, line: str = LINE) -> Result:
    return Result(Case.parse(line), 2 * 16 * 8192 * 8192, list(entries), "prefill", "cuda")


def test_ratios_are_over_the_best_peer() -> None:
    r = result(entry("nosquare", 5.0), entry("nosquare:torch_any", 1.0), entry("torch", 8.0),
               entry("fa3", 4.0), entry("flex", None))  # fmt: skip
    best = table.best_peer(r)
    assert best is not None
    assert best.contestant == "fa3"
    assert table._ratio(r, r.of("nosquare")) == pytest.approx(0.8)
    assert table._ratio(r, r.of("fa3")) == 1.0
    assert table.best_peer(result(entry("nosquare", 5.0))) is None
    assert math.isnan(table._ratio(result(entry("nosquare", 5.0)), entry("nosquare", 5.0)))


def test_error_ratios_are_of_equal_checks() -> None:
    yard = entry("torch", 1.0, 2.0)
    assert table.error_ratio(entry("x", 1.0, 3.0), yard) == pytest.approx(1.5)
    other = Entry("x", [1.0], checks=[Check("o", 3.0, 9.0, "elsewhere")])
    assert math.isnan(table.error_ratio(other, yard))
    assert math.isnan(table.error_ratio(entry("x", 1.0), None))


def test_the_table_at_80_columns() -> None:
    size = 300 * 2**20
    first = result(
        entry("nosquare:torch_fused", 2000.0, 2.0, peak_bytes=size, ran="torch_fused"),
        entry("nosquare", 2200.0, 2.0, peak_bytes=size, ran="torch_fused"),
        entry("torch", 1760.0, 1.0, peak_bytes=2 * size, ran="cudnn_attention"),
        entry("fa3", 1600.0, 1.5, peak_bytes=size, ran="x"),
        Entry("flex", refused="FlexAttention has no sinks."),
    )
    second = result(entry("nosquare", 100.0, host_us=60.0), entry("torch", 50.0, host_us=9.0),
                    Entry("fa3", refused="it has no such mask."), Entry("flex", refused="No."),
                    line=LINE.replace("full()", "causal(end)"))  # fmt: skip
    text = printed(lambda console: table.show(console, [first, second], "prefill"))
    lines = [line.rstrip() for line in text.splitlines()]
    names = {e.contestant for e in first.entries}
    rows = [x.split() for x in lines if x.split()[:1] and x.split()[0] in names]
    assert rows[:4] == [  # 2 * pairs * (128 + 128) flops in 1600 us
        ["fa3", "1.600", "687.2", "1.00", "1.50", "300"],
        ["torch", "1.760", "624.7", "0.91", "1.00", "600"],
        ["nosquare:torch_fused", "2.000", "549.8", "0.80", "2.00", "300"],
        ["nosquare", "2.200", "499.8", "0.73", "2.00", "300"],
    ]
    assert any("us" in x and "host us" in x for x in lines)
    assert "nosquare ran: torch_fused" in lines
    assert "not timed: fa3 [causal(end)]: it has no such mask." in lines
    assert "not timed: flex [full()]: FlexAttention has no sinks." in lines
    # 1600 / 2200 and 50 / 100
    verdict = "best peer's time / nosquare's: 0.60 (geometric mean of 2); least 0.50: causal(end)"
    assert " ".join(text.split()).endswith(verdict)


def test_a_decoding_table_speaks_of_bytes() -> None:
    line = "decode bfloat16 B1 Hq32 Hk8 M1 N4096 D128 full()"
    text = printed(lambda c: table.show(c, [result(entry("torch", 10.0), line=line)], "decode"))
    assert "GB/s" in text
    assert "1,678" in text  # 8 * 4096 * 256 * 2 bytes in 10 us


def test_nobody_was_timed() -> None:
    text = printed(lambda c: table.show(c, [result(Entry("torch", refused="No."))], "x"))
    assert "nobody was timed" in text
    assert "not timed: torch: No." in text


def test_progress_leaves_nothing_behind() -> None:
    def show(console: Any) -> None:
        with screen.progress(console, 2) as (tick, step):
            step("first")
            tick("checks")

    assert printed(show).strip() == ""


# ---- clocks ----


class Scripted(CudaClock):
    """A card's clock that says what it is told to."""

    def __init__(self, samples: list[Sample]) -> None:
        self.device, self.cold, self.left = torch.device("cuda", 0), True, samples
        self._lead_us = clocks.WeakKeyDictionary()

    def sample(self, call: Callable[[], Any], calls: int) -> Sample:
        return self.left.pop(0)


@pytest.mark.parametrize(
    ("times", "calls"),
    [
        ([9.0, 1.0, 1.0, 1.01, 5.0], 4),  # steady: three in a row within 3%
        ([1.0, 1.0, 1.0], 3),
        ([float(2**n) for n in range(60)], clocks.WARM_UP_CALLS),  # never steady
    ],
)
def test_warm_up_ends_when_times_are_steady(times: list[float], calls: int) -> None:
    clock = Scripted([Sample(t, 7.0) for t in times])
    call = lambda: None  # noqa: E731
    assert clock.warm_up(call) == (calls, 1)
    assert clock._lead_us[call] == 14.0


def test_a_slow_host_gets_a_lead_with_a_limit() -> None:
    clock = Scripted([Sample(1.0, h) for h in (10.0**6, 10.0**5, 10.0**4)])
    call = lambda: None  # noqa: E731
    clock.warm_up(call)
    assert clock._lead_us[call] == clocks.LEAD_LIMIT_US


def test_the_hosts_clock_repeats_short_calls() -> None:
    clock = HostClock()
    warm_up, calls = clock.warm_up(lambda: None)
    assert (warm_up, calls > 100) == (21, True)
    with clock.watched() as seen:
        pass
    assert seen.summary() is None


# ---- clocks and power of a card ----


def test_what_nvidia_smi_says_is_summed_up() -> None:
    lines = ["1980, 3201, 120.5, 40\n", "1500, 3201, 690.25, 55\n", "[N/A], 1, 1, 1\n",
             "1600, 3201, 680.00, 60\n", "1700, 32"]  # fmt: skip
    found = watch.summary(lines)
    assert records.faults(found, watch.STATE) == []
    assert found is not None
    assert found["readings"] == 3
    assert found["sm_clock_mhz"] == {"first": 1980, "least": 1500, "median": 1600, "most": 1980,
                                     "last": 1600}  # fmt: skip
    assert found["power_w"]["most"] == 690.25
    assert watch.summary(["No devices were found\n"]) is None


def test_a_watch_reads_what_its_program_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    program = "print('1, 2, 3, 4', flush=True); input()"
    command = [sys.executable, "-c", program]
    monkeypatch.setattr(watch, "smi_command", lambda device, fields: command)
    seen = watch.Watch(torch.device("cuda", 0))
    for _ in range(2):  # it can be used again
        with seen:
            assert seen._process is not None
            while not seen._lines:
                pass
        assert seen._process is None
        summary = seen.summary()
        seen.begin()
        assert seen.summary() is None
        assert summary is not None
        assert summary["power_w"]["last"] == 3


# ---- the record ----


def test_a_cards_record_is_valid() -> None:
    case = Case.parse("forward float32 B1 Hq2 Hk2 M16 N16 D8 full()")
    found = measure(case, named("torch,nosquare,fa3"), Rounds(1, 1, 0.0), suite="prefill")
    state = watch.summary(["1980, 3201, 120.5, 40"])
    on_card = Result(found.case, found.pairs, found.entries, "prefill", "cuda", found.timing, state)
    for one in on_card.entries:
        one.host_us = 3.25
    line = record.of(on_card, records.surroundings())
    assert records.faults(line, record.SCHEMA) == []
    assert (line["schema"], line["kind"], line["device"]) == (3, "bench", "cuda")
    assert line["timing"]["numbers"] == "drawn on the CPU"
    assert line["contestants"][0]["host_us"] == 3.25
    assert line["gpu_state"]["temperature_c"]["most"] == 40
