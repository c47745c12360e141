"""Learning rates, decay and momentum over a run."""

import train
from tests.tiny import build, build_optimizer, set_knobs, tiny

import pytest


def factors_at(*progress):
    return [train.lr_factor(share) for share in progress]


def test_learning_rates_at_their_ends(monkeypatch):
    flat = 1 - train.WARMDOWN_RATIO
    assert factors_at(0.0, flat, 1.0) == pytest.approx([1.0, 1.0, 0.0])
    set_knobs(monkeypatch, WARMUP_RATIO=0.2, WARMDOWN_RATIO=0.4, FINAL_LR_FRAC=0.1)
    expected = [0, 0.5, 1, 1, 0.55, 0.1]
    assert factors_at(0, 0.1, 0.2, 0.6, 0.8, 1) == pytest.approx(expected)
    set_knobs(monkeypatch, WARMUP_RATIO=0.75, WARMDOWN_RATIO=0.5, FINAL_LR_FRAC=0)
    expected = [0, 1 / 3, 2 / 3, 4 / 5 * 4 / 5, 1 / 2, 0]  # ramps that overlap multiply
    assert factors_at(0, 0.25, 0.5, 0.6, 0.75, 1) == pytest.approx(expected)


def test_a_ratio_of_zero_switches_a_ramp_off(monkeypatch):
    set_knobs(monkeypatch, WARMUP_RATIO=0, WARMDOWN_RATIO=0.5)
    assert factors_at(0, 0.25, 0.5, 0.75) == [1, 1, 1, 0.5]
    set_knobs(monkeypatch, WARMUP_RATIO=0.5, WARMDOWN_RATIO=0)
    assert factors_at(0, 0.25, 0.5, 0.75, 1) == [0, 0.5, 1, 1, 1]
    set_knobs(monkeypatch, WARMUP_RATIO=0, WARMDOWN_RATIO=0)
    assert factors_at(0, 0.5, 1) == [1, 1, 1]


def test_the_momentum_rises_to_the_first_of_the_betas(monkeypatch):
    assert train.muon_momentum(0, 0.95) == 0.85
    assert train.muon_momentum(150, 0.95) == pytest.approx(0.9)
    assert train.muon_momentum(300, 0.95) == pytest.approx(0.95)
    assert train.muon_momentum(10**6, 0.95) == pytest.approx(0.95)
    set_knobs(monkeypatch, MOMENTUM_START=0.5, MOMENTUM_STEPS=10)
    assert [train.muon_momentum(step, 0.7) for step in (0, 5, 10, 11)] == [0.5, 0.6, 0.7, 0.7]
    set_knobs(monkeypatch, MOMENTUM_STEPS=0)
    assert train.muon_momentum(0, 0.95) == pytest.approx(0.95)


def test_each_group_follows_its_own_row(monkeypatch):
    set_knobs(monkeypatch, MUON_BETAS=(0.9, 0.7), WEIGHT_DECAY=0.2, FINAL_LR_FRAC=0.1)
    optimizer = build_optimizer(build(tiny()))
    muon = [group for group in optimizer.param_groups if group["kind"] == "muon"]
    adamw = [group for group in optimizer.param_groups if group["kind"] == "adamw"]
    assert len(muon) == 4
    assert len(adamw) == 5
    for progress, step, factor in ((0.0, 0, 1.0), (0.75, 150, 0.55), (1.0, 10**6, 0.1)):
        train.set_schedules(optimizer, progress, step)
        for group in optimizer.param_groups:
            assert group["lr"] == pytest.approx(group["peak_lr"] * factor)
        for group in adamw:
            assert group["weight_decay"] == 0
        for group in muon:
            assert group["weight_decay"] == pytest.approx(0.2 * (1 - progress))
            risen = min(step / 300, 1)
            assert group["momentum"] == pytest.approx(0.85 + risen * (0.9 - 0.85))
            assert group["betas"][1] == 0.7
