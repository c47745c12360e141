"""Tests learning rates, decay and momentum over a run."""

import train
from tests.tiny import build, build_optimizer, set_knobs, tiny

import pytest


def factors_at(*progress):
    return [train.lr_factor(share) for share in progress]


@pytest.mark.parametrize(
    ("up", "down", "final", "expected"),
    [
        (0.2, 0.4, 0.1, {0: 0, 0.1: 0.5, 0.2: 1, 0.6: 1, 0.8: 0.55, 1: 0.1}),
        # Overlapping ramps multiply.
        (0.75, 0.5, 0, {0: 0, 0.25: 1 / 3, 0.5: 2 / 3, 0.6: 0.64, 0.75: 0.5, 1: 0}),
        (0, 0.5, 0, {0: 1, 0.25: 1, 0.5: 1, 0.75: 0.5}),
        (0.5, 0, 0, {0: 0, 0.25: 0.5, 0.5: 1, 0.75: 1, 1: 1}),
    ],
)
def test_learning_rates_rise_stay_and_fall(monkeypatch, up, down, final, expected):
    assert [train.lr_factor(share) for share in (0, 0.5, 0.75, 1)] == [1, 1, 0.5, 0]  # as shipped
    set_knobs(monkeypatch, WARMUP_RATIO=up, WARMDOWN_RATIO=down, FINAL_LR_FRAC=final)
    assert {share: train.lr_factor(share) for share in expected} == pytest.approx(expected)


def test_the_momentum_rises_to_the_first_of_the_betas(monkeypatch):
    expected = {0: 0.85, 150: 0.9, 300: 0.95, 10**6: 0.95}
    assert {step: train.muon_momentum(step, 0.95) for step in expected} == pytest.approx(expected)
    set_knobs(monkeypatch, MOMENTUM_START=0.5, MOMENTUM_STEPS=10)
    assert [train.muon_momentum(step, 0.7) for step in (0, 5, 10, 11)] == [0.5, 0.6, 0.7, 0.7]
    set_knobs(monkeypatch, MOMENTUM_STEPS=0)
    assert train.muon_momentum(0, 0.95) == pytest.approx(0.95)


def test_each_group_follows_its_own_row(monkeypatch):
    set_knobs(monkeypatch, MUON_BETAS=(0.9, 0.7), FINAL_LR_FRAC=0.1)
    optimizer = build_optimizer(build(tiny()))
    assert len(optimizer.param_groups) == 8
    for progress, step, factor in ((0.0, 0, 1.0), (0.75, 150, 0.55), (1.0, 10**6, 0.1)):
        train.set_schedules(optimizer, progress, step)
        for group in optimizer.param_groups:
            decay = 0.2 * (1 - progress) if group["kind"] == "muon" else 0
            assert group["lr"] == pytest.approx(group["peak_lr"] * factor)
            assert group["weight_decay"] == pytest.approx(decay)
            if group["kind"] == "muon":
                risen = min(step / 300, 1)
                assert group["momentum"] == pytest.approx(0.85 + risen * (0.9 - 0.85))
