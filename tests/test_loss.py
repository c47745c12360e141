"""Tests the logits, their cap, and the loss by its definition."""

from tests.tiny import build, record_inputs, set_knobs, tiny, tokens

import torch
import torch.nn.functional as F


def test_the_loss_is_the_cross_entropy_of_the_logits():
    """The loss is minus the log of the target's softmax, averaged over all positions."""
    model = build(tiny())
    x = tokens(model.config)
    y = tokens(model.config, seed=1)
    logits = model(x)
    loss = model(x, y)
    assert logits.shape == (2, 32, 61) and loss.shape == ()
    assert logits.dtype == loss.dtype == torch.float32
    shares = logits.exp() / logits.exp().sum(-1, keepdim=True)
    torch.testing.assert_close(loss, -shares[F.one_hot(y, 61).bool()].log().mean())


def test_a_cap_bends_the_logits(monkeypatch):
    """Without a cap the logits are lm_head's output, and gradients flow. A cap of 0, if it were
    applied, would make all logits 0."""
    model = build(tiny())
    model.lm_head.weight.data *= 40
    inputs = record_inputs(model.lm_head)
    x = tokens(model.config)
    y = tokens(model.config, seed=1)
    set_knobs(monkeypatch, LOGIT_SOFTCAP=15)
    capped = model(x)
    set_knobs(monkeypatch, LOGIT_SOFTCAP=0)
    raw = model(x)
    assert raw.abs().max() > 30
    torch.testing.assert_close(raw, inputs[0] @ model.lm_head.weight.T)
    torch.testing.assert_close(capped, 15 * (raw / 15).tanh())
    model(x, y).backward()
    share = raw.softmax(-1) - F.one_hot(y, 61)  # the gradient of the loss, per logit
    expected = share.flatten(0, 1).T @ inputs[0].flatten(0, 1) / y.numel()
    torch.testing.assert_close(model.lm_head.weight.grad, expected, rtol=1e-4, atol=1e-6)
    for name, parameter in model.named_parameters():
        assert parameter.grad.abs().sum() > 0, name
