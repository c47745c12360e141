"""The logits, their cap, and the loss beside its definition."""

import math

from tests.tiny import build, record_inputs, set_knobs, tiny, tokens

import pytest
import torch
import torch.nn.functional as F


def test_the_loss_is_the_cross_entropy_of_the_logits():
    """By torch and by hand: minus the log of what softmax gives the target, on average."""
    config = tiny()
    model = build(config)
    x = tokens(config)
    y = tokens(config, seed=1)
    logits = model(x)
    loss = model(x, y)
    assert logits.shape == (2, 32, 61)
    assert logits.dtype == loss.dtype == torch.float32
    assert loss.shape == ()
    torch.testing.assert_close(loss, F.cross_entropy(logits.flatten(0, 1), y.flatten()))
    by_hand = []
    for row, targets in zip(logits.tolist(), y.tolist(), strict=True):
        for scores, target in zip(row, targets, strict=True):
            total = sum(math.exp(score) for score in scores)
            by_hand.append(-math.log(math.exp(scores[target]) / total))
    assert loss.item() == pytest.approx(sum(by_hand) / (2 * 32), rel=1e-5)


def large_logits(monkeypatch, cap):
    """A model whose logits reach far beyond 15, under a cap."""
    set_knobs(monkeypatch, LOGIT_SOFTCAP=cap)
    model = build(tiny())
    model.lm_head.weight.data *= 40
    return model


def test_a_cap_bends_the_logits(monkeypatch):
    x = tokens(tiny())
    raw = large_logits(monkeypatch, 0)(x)
    capped = large_logits(monkeypatch, 15)(x)
    assert raw.abs().max() > 30
    assert 14 < capped.abs().max() <= 15
    torch.testing.assert_close(capped, 15 * (raw / 15).tanh())


def test_without_a_cap_the_logits_are_the_products(monkeypatch):
    """And the loss has a gradient: a cap of 0, taken for a number, would make all logits 0."""
    model = large_logits(monkeypatch, 0)
    inputs = record_inputs(model.lm_head)
    x = tokens(model.config)
    y = tokens(model.config, seed=1)
    logits = model(x)
    torch.testing.assert_close(logits, inputs[0] @ model.lm_head.weight.T)
    model(x, y).backward()
    share = logits.softmax(-1) - F.one_hot(y, 61)  # the gradient of the loss, per logit
    expected = share.flatten(0, 1).T @ inputs[0].flatten(0, 1) / y.numel()
    torch.testing.assert_close(model.lm_head.weight.grad, expected, rtol=1e-4, atol=1e-6)
    for name, parameter in model.named_parameters():
        assert parameter.grad.abs().sum() > 0, name
