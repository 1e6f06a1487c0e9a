"""Ablation: what each compute gains in the whole model, and what is unseated for it."""

from __future__ import annotations

import math
from typing import Any

import hand_made
import pytest
import torch
from torch import nn

from kernelgraft import patch
from kernelgraft.models import Loaded
from kernelgraft.pipeline import ablation, integration
from kernelgraft.pipeline.points import BASE, Point, Use
from kernelgraft.records import Contribution, Graft

USE = Use(batches=(1, 2), prefills=(16,))
FAMILIES = {"rms_norm", "gated_mlp"}


@pytest.fixture(scope="module")
def loaded() -> Any:
    return hand_made.load("llama")


@pytest.fixture(scope="module")
def graft(loaded: Loaded) -> Graft:
    """Two patches with seats for two batches of decode steps, a short and a long prefill."""
    made = hand_made.make_graft(loaded, only=FAMILIES)
    patches = []
    for one in made.patches:
        places: list[dict[str, Any]] = [
            {"regime": "decode", "batch": 1, "work": 1},
            {"regime": "decode", "batch": 2, "work": 2},
            {"regime": "prefill", "batch": 1, "work": 5},
            {"regime": "prefill", "batch": 1, "work": 16, "prompt_tokens": 16},
        ]
        seats = tuple(one.seats[0].model_copy(update=place) for place in places)
        patches.append(one.model_copy(update={"seats": seats}))
    return made.model_copy(update={"policy": "fastest", "patches": tuple(patches)})


def families_on(model: nn.Module, regime: str, point: Point) -> set[str]:
    """Those that serve such a run."""
    applied = patch.find_applied(model)
    here = (regime, point.batch, point.prompt_tokens)
    accepted = () if applied is None else applied.graft.accepted
    return {p.family for p in accepted for s in p.seats if s.seated and (s.regime, s.batch, s.prompt_tokens) == here}


@pytest.fixture
def clocked(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Times that follow from what is on the model: each family takes its milliseconds off 10 (or adds them)."""
    gains: dict[str, float] = {}
    drift = [0.0]

    def times(model: nn.Module, ids: torch.Tensor, point: Point) -> ablation.Times:
        drift[0] += 0.001
        found = {}
        for regime in ("prefill", "decode") if point.prompt_tokens is None else ("prefill",):
            own = sum(gains.get(f"{f} {regime}", gains.get(f, 0.0)) for f in families_on(model, regime, point))
            found[regime, point] = 10.0 - own + drift[0] * 0.01
        return found  # type: ignore[return-value]

    monkeypatch.setattr(ablation, "_times", times)
    return gains


def test_the_runs_are_the_batches_and_the_longest_prompt(loaded: Loaded) -> None:
    long = loaded.model.config.max_position_embeddings
    use = Use(batches=(1, 3), prefills=(8, 16, long))
    assert ablation.settings(loaded, use) == [BASE, Point(3, None), Point(1, 16)]


def test_a_contribution_is_the_model_without_it_less_the_model_with_it(
    loaded: Loaded, graft: Graft, clocked: dict[str, float]
) -> None:
    clocked |= {"rms_norm": 1.0, "gated_mlp": 3.0}
    found = ablation.ablate(loaded, graft, USE, rounds=4)
    assert len(found) == 3 * 5
    gains = {c.family: c.gain_ms for c in found if c.regime == "decode" and c.batch == 2}
    assert gains == pytest.approx({"all": 4.0, "rms_norm": 1.0, "gated_mlp": 3.0}, abs=0.01)
    whole = next(c for c in found if c.family == "all" and c.prompt_tokens == 16)
    assert whole.on_ms == pytest.approx(6.0, abs=0.01)
    assert whole.interval_ms == pytest.approx((4.0, 4.0), abs=0.01)
    assert whole.gain_percent == pytest.approx(40.0, abs=0.1)
    assert {len(c.sites) for c in found if c.family == "all"} == {0}
    assert patch.find_applied(loaded.model) is None


def test_a_slow_model_runs_with_the_whole_and_without_it_only(
    loaded: Loaded, graft: Graft, clocked: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    clocked |= {"rms_norm": 1.0, "gated_mlp": 3.0}
    heard: list[str] = []
    seconds = iter(range(0, 100_000, 100))
    monkeypatch.setattr("kernelgraft.machine.clock", lambda: float(next(seconds)))
    found = ablation.ablate(loaded, graft, USE, progress=lambda stage, done, total, text: heard.append(text))
    assert {c.family for c in found} == {"all"}
    assert heard[-1] == "3 rounds of 2 versions"


def test_a_single_patch_is_the_whole(loaded: Loaded, graft: Graft, clocked: dict[str, float]) -> None:
    clocked |= {"rms_norm": 1.0}
    one = graft.model_copy(update={"patches": tuple(p for p in graft.patches if p.family == "rms_norm")})
    found = ablation.ablate(loaded, one, USE, rounds=3)
    assert {c.family for c in found} == {"all", "rms_norm"}
    assert all(c.gain_ms == pytest.approx(1.0, abs=0.01) for c in found if c.batch == 1)


def test_the_first_round_with_its_compilation_does_not_count(
    loaded: Loaded, graft: Graft, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Point] = []

    def times(model: nn.Module, ids: torch.Tensor, point: Point) -> ablation.Times:
        calls.append(point)
        return {("decode", point): 1000.0 if len(calls) <= 4 * 3 else 10.0}

    monkeypatch.setattr(ablation, "_times", times)
    found = ablation.ablate(loaded, graft, USE, rounds=3)
    assert {(c.on_ms, c.off_ms) for c in found} == {(10.0, 10.0)}
    assert len(calls) == 4 * 4 * 3


def test_the_model_really_generates(loaded: Loaded, graft: Graft) -> None:
    before = {n: set(vars(m)) for n, m in loaded.model.named_modules()}
    found = ablation.ablate(loaded, graft, USE, rounds=3)
    assert all(c.on_ms > 0 and c.off_ms > 0 and all(map(math.isfinite, c.interval_ms)) for c in found)
    assert {(c.regime, c.batch, c.prompt_tokens) for c in found} == {
        ("prefill", 1, None),
        ("decode", 1, None),
        ("prefill", 2, None),
        ("decode", 2, None),
        ("prefill", 1, 16),
    }
    assert {n: set(vars(m)) for n, m in loaded.model.named_modules()} == before


def test_nothing_accepted_is_nothing_to_measure(loaded: Loaded, graft: Graft) -> None:
    assert ablation.ablate(loaded, graft.model_copy(update={"patches": ()}), USE) == ()


def seated(graft: Graft, family: str) -> set[tuple[str, int | None, int | None]]:
    found = next(p for p in graft.patches if p.family == family)
    return {(s.regime, s.batch, s.prompt_tokens) for s in found.seats if s.seated}


def entry(graft: Graft, family: str, interval: tuple[float, float], **changes: Any) -> Contribution:
    own = next((p for p in graft.patches if p.family == family), None)
    mean = sum(interval) / 2
    fields: dict[str, Any] = {
        "family": family,
        "sites": () if own is None else tuple(s.key for s in own.sites),
        "regime": "decode",
        "batch": 1,
        "prompt_tokens": None,
        "on_ms": 10.0 - mean,
        "off_ms": 10.0,
        "interval_ms": interval,
    }
    return Contribution(**fields | changes)


EVERY = {("decode", 1, None), ("decode", 2, None), ("prefill", 1, None), ("prefill", 1, 16)}


def test_losers_and_ties_that_gain_nothing_lose_their_seats(graft: Graft) -> None:
    def left(*found: Contribution) -> set[Any]:
        return seated(ablation.without_losers(graft, found), "rms_norm")

    assert left(entry(graft, "rms_norm", (0.1, 0.3))) == EVERY
    assert left(entry(graft, "rms_norm", (-0.3, -0.1))) == EVERY - {("decode", 1, None)}
    assert left(entry(graft, "rms_norm", (-0.3, 0.2))) == EVERY, "what it claims is not known"
    assert left(entry(graft, "rms_norm", (-0.1, 0.2))) == EVERY
    assert left(entry(graft, "rms_norm", (-3.0, -1.0), regime="prefill")) == EVERY
    long = entry(graft, "rms_norm", (-3.0, -1.0), regime="prefill", prompt_tokens=16)
    assert left(long) == EVERY - {("prefill", 1, 16)}
    assert left(entry(graft, "gated_mlp", (-3.0, -1.0))) == EVERY
    assert ablation.without_losers(graft, [entry(graft, "rms_norm", (0.1, 0.3))]) is graft


@pytest.mark.parametrize(("claim_us", "lost"), [(100.0, True), (70.0, False), (None, False)])
def test_a_tie_is_lost_where_it_refutes_what_the_seat_gained_in_its_place(
    graft: Graft, claim_us: float | None, lost: bool
) -> None:
    norm = next(p for p in graft.patches if p.family == "rms_norm")
    count = sum(len(site.instances) for site in norm.sites)
    seats = tuple(s.model_copy(update={"gain_us": claim_us}) for s in norm.seats)
    told = graft.model_copy(
        update={"patches": tuple(p.model_copy(update={"seats": seats}) if p is norm else p for p in graft.patches)}
    )
    tie = entry(told, "rms_norm", (-0.06 * count, 0.04 * count))
    assert (("decode", 1, None) not in seated(ablation.without_losers(told, [tie]), "rms_norm")) == lost
    gain = entry(told, "rms_norm", (-0.03 * count, 0.04 * count))
    assert ablation.without_losers(told, [gain]) is told


def test_a_patch_without_seats_is_rejected_with_the_figures(graft: Graft) -> None:
    only = graft.patches[0].model_copy(update={"seats": graft.patches[0].seats[:1]})
    one = graft.model_copy(update={"patches": (only, *graft.patches[1:])})
    left = ablation.without_losers(one, [entry(one, only.family, (-0.4, -0.2))])
    gone = left.patches[0]
    assert gone.status == "rejected"
    assert gone.reason == "end to end it gains nothing: decode 1×short 10.30 ms with it, 10.00 ms without"
    assert left.patches[1] is one.patches[1]


def test_a_whole_that_is_slower_keeps_no_seat_there(graft: Graft) -> None:
    slow = entry(graft, "all", (-0.4, -0.2), batch=2)
    left = ablation.without_slow_settings(graft, [slow])
    assert all(seated(left, f) == EVERY - {("decode", 2, None)} for f in FAMILIES)
    assert ablation.without_slow_settings(graft, [entry(graft, "all", (-0.4, 0.2))]) is graft


def test_end_to_end_unseats_measures_again_and_keeps_the_record(
    loaded: Loaded, graft: Graft, clocked: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[set[str]] = []

    def filtered(given: Graft, _: Loaded) -> Graft:
        checked.append({p.family for p in given.accepted})
        return given

    monkeypatch.setattr("kernelgraft.pipeline.gate.filter_patches", filtered)
    clocked |= {"rms_norm decode": 1.0, "rms_norm prefill": 1.0, "gated_mlp decode": -2.0, "gated_mlp prefill": 2.0}
    left = integration.end_to_end(loaded, graft, USE)
    assert seated(left, "rms_norm") == EVERY
    assert seated(left, "gated_mlp") == {("prefill", 1, None), ("prefill", 1, 16)}
    assert checked == [FAMILIES]
    assert {c.family for c in left.contributions} == {"all", *FAMILIES}
    taken = [c for c in left.contributions if not c.seated]
    assert {(c.family, c.regime, c.batch) for c in taken} == {("gated_mlp", "decode", 1), ("gated_mlp", "decode", 2)}
    assert all(c.gain_ms > -0.05 for c in left.contributions if c.seated), "no loss that the graft has no longer"
    whole = [c.gain_ms for c in left.contributions if c.family == "all" and c.regime == "decode"]
    assert whole == pytest.approx([1.0, 1.0], abs=0.01), "measured without what was taken away"
    clocked.clear()
    clocked |= {"rms_norm": 1.0, "gated_mlp": 1.0}
    assert integration.end_to_end(loaded, graft, USE).patches == graft.patches
    assert len(checked) == 1
    for other in ({"policy": "verified"}, {"mode": "graph"}):
        kept = graft.model_copy(update=other)
        assert integration.end_to_end(loaded, kept, USE) is kept
        measured = integration.end_to_end(loaded, kept, USE, ablate=True)
        assert measured.contributions
        assert measured.patches == graft.patches


def test_a_slow_setting_is_measured_again_when_its_seats_are_gone(
    loaded: Loaded, graft: Graft, clocked: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kernelgraft.pipeline.gate.filter_patches", lambda given, _: given)
    # Each gains alone, so neither is a loser; together they lose, as two that are in each other's way would.
    clocked |= {"rms_norm": 1.0, "gated_mlp": 1.0}
    plain = ablation._times

    def clash(model: nn.Module, ids: torch.Tensor, point: Point) -> ablation.Times:
        found = plain(model, ids, point)
        for setting in found:
            if setting == ("decode", Point(2, None)) and families_on(model, *setting):
                found[setting] += 5.0
        return found

    monkeypatch.setattr(ablation, "_times", clash)
    left = integration.end_to_end(loaded, graft, USE)
    gone = ("decode", 2, None)
    assert all(seated(left, family) == EVERY - {gone} for family in FAMILIES)
    rows = [c for c in left.contributions if (c.regime, c.batch) == ("decode", 2)]
    assert {c.family for c in rows} == {"all", *FAMILIES}
    assert not any(c.seated for c in rows)
    assert next(c for c in rows if c.family == "all").gain_ms == pytest.approx(0.0, abs=0.1)
    others = [c for c in left.contributions if c not in rows]
    assert all(c.seated and c.gain_ms > -0.05 for c in others)


def test_what_a_graft_does_not_serve_is_told(graft: Graft) -> None:
    norm = next(p for p in graft.patches if p.family == "rms_norm")
    seats = tuple(s.model_copy(update={"seated": s.regime == "decode"}) for s in norm.seats)
    less = graft.model_copy(
        update={"patches": tuple(p.model_copy(update={"seats": seats}) if p is norm else p for p in graft.patches)}
    )
    found = ablation.told(
        less,
        [
            entry(less, "rms_norm", (1.0, 2.0)),
            entry(less, "rms_norm", (1.0, 2.0), regime="prefill"),
            entry(less, "rms_norm", (1.0, 2.0), regime="prefill", prompt_tokens=99),
            entry(less, "all", (1.0, 2.0), regime="prefill"),
        ],
    )
    assert [c.seated for c in found] == [True, False, True, True], "without a seat for a length another one serves it"


def test_an_interval_is_students() -> None:
    low, high = ablation.interval([1.0, 2.0, 3.0])
    assert (low, high) == pytest.approx((2 - 4.30 / math.sqrt(3), 2 + 4.30 / math.sqrt(3)))
    assert ablation.interval([1.0]) == (-math.inf, math.inf)
