"""initialise sets all parameters and buffers as the knobs say."""

import math
import re

import train
from tests.tiny import build, record_inputs, set_knobs, snapshot, tiny, tokens

import pytest
import torch


def test_initialisation_follows_the_knobs(monkeypatch):
    set_knobs(monkeypatch, EMBEDDING_STD=3.0, UNEMBEDDING_STD=0.5, MATRIX_SCALE=0.25)
    set_knobs(monkeypatch, RESID_INIT=0.75, X0_INIT=-2.0)
    model = build(tiny(layers=3), scramble=False)
    assert model.wte.weight.std().item() == pytest.approx(3, rel=0.05)
    assert model.lm_head.weight.std().item() == pytest.approx(0.5, rel=0.05)
    assert model.resid_lambdas.tolist() == [0.75] * 3
    assert model.x0_lambdas.tolist() == [-2.0] * 3
    s = 0.25 * math.sqrt(3 / 64)
    names = []
    for name, weight in model.named_parameters():
        if re.search(r"\.(out|down|gate)\.", name):
            assert not weight.any()
        elif "." in name.removesuffix(".weight"):  # a value table or a matrix in a block
            assert 0.9 * s < weight.max() <= s
            assert -s <= weight.min() < -0.9 * s
        names.append(name)
    assert len(names) == 2 + 2 + 2 + 3 * 6 + 2  # outside, lambdas, tables, matrices, gates


def test_the_angles_are_those_of_the_definition(monkeypatch):
    """Pair d of D / 2 turns by t * base ** (-2 d / D) at position t."""
    set_knobs(monkeypatch, ROPE_BASE=50)
    model = build(tiny())
    angles = [[[t * 50 ** (-2 * d / 32) for d in range(16)]] for t in range(32)]
    angles = torch.tensor(angles, dtype=torch.float64)
    torch.testing.assert_close(model.cos.double(), angles.cos(), atol=1e-5, rtol=0)
    torch.testing.assert_close(model.sin.double(), angles.sin(), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("dtype", "tables"),
    [(torch.bfloat16, {"wte.weight", "value_embeddings.1.weight"}), (torch.float16, set())],
)
def test_tables_take_the_precision_and_matrices_stay_in_fp32(dtype, tables):
    """In fp16 the tables stay in fp32 too, and with them AdamW's second moments."""
    config = tiny()
    config.dtype = dtype
    model = train.GPT(config, train.attend_sdpa)
    train.initialise(model, 1)
    low = {name for name, p in model.named_parameters() if p.dtype != torch.float32}
    assert low == tables
    assert model.cos.dtype == model.sin.dtype == dtype
    seen = record_inputs(model.blocks[1])
    model(tokens(model.config))
    assert seen[0].dtype == dtype


def test_the_seed_decides():
    """test_warmup.py checks that no old value remains."""
    first, other = (snapshot(build(tiny(), seed=seed, scramble=False)) for seed in (1, 2))
    for name in ("wte", "lm_head", "blocks.0.mlp.up"):
        assert not torch.equal(first[f"{name}.weight"], other[f"{name}.weight"])
