"""The one timer, and the decision that is made from its times."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable

import pytest
import torch

from kernelgraft import machine
from kernelgraft.errors import UsageError
from kernelgraft.evaluate import Timing, decide, interleave
from kernelgraft.evaluate.timer import ROUNDS_AT_LEAST, timing


class Clock:
    """Time passes only when a function says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def function(self, *times_us: float) -> Callable[[], None]:
        """A function that takes these times in turn."""
        turns = itertools.cycle(times_us)

        def run() -> None:
            self.now_s += next(turns) * 1e-6

        return run


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(machine, "clock", made)
    return made


def test_times_are_medians_of_one_call_in_microseconds(clock: Clock) -> None:
    functions = {"short": clock.function(20), "long": clock.function(250)}
    found = interleave(functions, rounds=15, min_batch_us=200.0)
    assert list(found) == ["short", "long"]
    assert found["short"].median_us == pytest.approx(20) and found["long"].median_us == pytest.approx(250)
    assert len(found["long"].samples) == 15 and found["long"].mad_us == pytest.approx(0, abs=1e-6)


def test_one_slow_sample_does_not_count(clock: Clock) -> None:
    found = interleave({"f": clock.function(*[300] * 10, 90_000)}, rounds=11, warmup=1)
    assert found["f"].median_us == pytest.approx(300)
    assert max(found["f"].samples) == pytest.approx(90_000)


def test_short_functions_are_timed_in_batches() -> None:
    calls = 0

    def tick() -> None:
        nonlocal calls
        calls += 1

    found = interleave({"tick": tick}, rounds=5, warmup=2, min_batch_us=300.0)
    assert calls > 5 * 100, "a batch of a 0.1 µs function has many calls"
    assert 0 < found["tick"].median_us < 20


def test_the_budget_ends_the_rounds_but_not_before_five(clock: Clock) -> None:
    slow = clock.function(10_000)
    found = interleave({"slow": slow}, rounds=1000, warmup=1, budget_s=0.001)
    assert len(found["slow"].samples) == ROUNDS_AT_LEAST
    more = interleave({"slow": slow}, rounds=1000, warmup=1, budget_s=0.115)
    assert len(more["slow"].samples) == 12
    assert len(interleave({"slow": slow}, rounds=7)["slow"].samples) == 7


def test_the_order_changes_from_round_to_round() -> None:
    order: list[str] = []
    functions = {name: lambda name=name: order.append(name) for name in "abc"}
    interleave(functions, rounds=12, warmup=1, min_batch_us=0.0)
    rounds = ["".join(order[i : i + 3]) for i in range(3, len(order), 3)]
    assert len(rounds) == 12
    assert all(sorted(r) == ["a", "b", "c"] for r in rounds), "every function once a round"
    assert len(set(rounds)) > 1, "not always in the same order"


def test_collection_waits_and_comes_back() -> None:
    seen: list[bool] = []
    interleave({"look": lambda: seen.append(gc.isenabled())}, rounds=5, warmup=1, min_batch_us=0.0)
    assert seen[-1] is False and gc.isenabled()
    gc.disable()
    try:
        interleave({"look": lambda: None}, rounds=1)
        assert not gc.isenabled(), "it was off before"
    finally:
        gc.enable()
    with pytest.raises(ZeroDivisionError):
        interleave({"fails": lambda: 1 / 0}, rounds=1)
    assert gc.isenabled()


@pytest.mark.gpu
def test_on_a_gpu_the_device_is_waited_for() -> None:
    x = torch.randn(4096, 4096, device="cuda")
    found = interleave({"product": lambda: x @ x}, rounds=10)
    flops = 2 * 4096**3
    assert flops / (found["product"].median_us * 1e-6) < 1e15, "faster than any device: it was not waited for"


def test_median_and_mad() -> None:
    found = timing([10.0, 11.0, 12.0, 13.0, 100.0])
    assert (found.median_us, found.mad_us) == (12.0, 1.0)
    assert found.error_us == pytest.approx(1.2533 * 1.4826 / 5**0.5)
    assert timing([5.0]).error_us == 0


def at(median: float, mad: float = 0.1, count: int = 25) -> Timing:
    return Timing(median, mad, (median,) * count)


def test_the_faster_candidate_wins() -> None:
    found = decide({"original": at(100), "original again": at(101), "a": at(80), "b": at(60)})
    assert (found.winner, found.best, found.tie) == ("b", "b", False)
    assert (found.original_us, found.best_us) == (100.5, 60)


def test_a_difference_within_the_two_originals_is_a_tie_and_keeps_the_original() -> None:
    found = decide({"original": at(100), "original again": at(110), "a": at(96)})
    assert found.spread_us == 10
    assert (found.winner, found.best, found.tie) == ("original", "a", True)
    assert decide({"original": at(100), "original again": at(110), "a": at(94)}).winner == "a"


def test_a_difference_within_the_noise_is_a_tie_even_if_the_originals_agree() -> None:
    noisy = {"original": at(100, 8), "original again": at(100, 8), "a": at(95, 8)}
    found = decide(noisy)
    assert found.tie and found.winner == "original"
    assert found.spread_us == pytest.approx(3 * 1.2533 * 1.4826 * 8 / 5 * (0.5 + 1) ** 0.5)
    assert decide({**noisy, "a": at(80, 8)}).winner == "a"


def test_a_slower_candidate_loses_and_is_no_tie() -> None:
    found = decide({"original": at(100), "original again": at(100.1), "a": at(150)})
    assert (found.winner, found.best, found.tie) == ("original", "a", False)


def test_policy_verified_seats_the_best_whatever_the_original_takes() -> None:
    times = {"original": at(100), "original again": at(100.1), "a": at(150), "b": at(140)}
    assert decide(times, policy="verified").winner == "b"
    assert decide(times, policy="fastest").winner == "original"


def test_without_candidates_the_original_stays() -> None:
    for policy in ("fastest", "verified"):
        found = decide({"original": at(100), "original again": at(102)}, policy=policy)
        assert (found.winner, found.best, found.best_us) == ("original", None, None)
        assert found.spread_us == 2


def test_other_names_for_the_original() -> None:
    found = decide({"o": at(10), "o2": at(10), "a": at(5)}, original="o", repeat="o2")
    assert found.winner == "a"


def test_the_original_has_to_be_timed_twice() -> None:
    with pytest.raises(UsageError, match="`original again` was not timed"):
        decide({"original": at(100), "a": at(50)})
