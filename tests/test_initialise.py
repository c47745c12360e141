"""initialise sets everything, by its table, and says what it forgot."""

import math

import train
from tests.tiny import build, set_knobs, snapshot, take_steps, tiny

import pytest
import torch


def test_initialisation_follows_the_table():
    model = build(tiny(layers=3), scramble=False)
    s = math.sqrt(3 / 64)
    assert 0.95 < model.wte.weight.std() < 1.05
    assert 0.0009 < model.lm_head.weight.std() < 0.0011
    for block in model.blocks:
        attention = block.attention
        for layer in (attention.q, attention.k, attention.v, block.mlp.up):
            assert 0.9 * s < layer.weight.abs().max() <= s
            assert layer.weight.min() < -0.9 * s
        assert not attention.out.weight.any()
        assert not block.mlp.down.weight.any()
        assert attention.gate is None or not attention.gate.weight.any()
    assert list(model.value_embeddings) == ["0", "2"]
    for table in model.value_embeddings.values():
        assert 0.9 * s < table.weight.abs().max() <= s
    assert model.resid_lambdas.tolist() == [1.0] * 3
    assert model.x0_lambdas.tolist() == pytest.approx([0.1] * 3)


def test_each_number_of_the_table_is_a_knob(monkeypatch):
    set_knobs(monkeypatch, EMBEDDING_STD=3.0, UNEMBEDDING_STD=0.5, MATRIX_SCALE=0.25)
    set_knobs(monkeypatch, RESID_INIT=0.75, X0_INIT=-2.0)
    model = build(tiny(), scramble=False)
    s = 0.25 * math.sqrt(3 / 64)
    assert model.wte.weight.std().item() == pytest.approx(3, rel=0.05)
    assert model.lm_head.weight.std().item() == pytest.approx(0.5, rel=0.05)
    for weight in (model.blocks[0].attention.q.weight, model.value_embeddings["1"].weight):
        assert 0.9 * s < weight.abs().max() <= s
    assert model.resid_lambdas.tolist() == [0.75] * 2
    assert model.x0_lambdas.tolist() == [-2.0] * 2


@pytest.mark.parametrize("base", [10000, 50])
def test_the_angles_are_those_of_the_definition(monkeypatch, base):
    """Position t, pair d of D / 2: t * base ** (-2 d / D)."""
    set_knobs(monkeypatch, ROPE_BASE=base)
    model = build(tiny())
    assert model.cos.shape == model.sin.shape == (32, 1, 16)
    for t in (0, 1, 31):
        for d in (0, 1, 15):
            angle = t * base ** (-2 * d / 32)
            assert model.cos[t, 0, d].item() == pytest.approx(math.cos(angle), abs=1e-5)
            assert model.sin[t, 0, d].item() == pytest.approx(math.sin(angle), abs=1e-5)


def test_tables_take_the_precision_and_matrices_stay_in_fp32():
    model = train.GPT(tiny(), train.load_sdpa())
    train.initialise(model, torch.bfloat16, 1)
    dtypes = {name: p.dtype for name, p in model.named_parameters()}
    low = {name for name, dtype in dtypes.items() if dtype == torch.bfloat16}
    assert low == {"wte.weight", "value_embeddings.1.weight"}
    assert set(dtypes.values()) == {torch.bfloat16, torch.float32}
    assert model.cos.dtype == model.sin.dtype == torch.bfloat16


def test_the_seed_decides_and_nothing_of_before_remains():
    model = build(tiny(), seed=1, scramble=False)
    first = snapshot(model)
    take_steps(model, 3)
    model.cos.zero_()
    train.initialise(model, torch.float32, 1)
    assert all(torch.equal(first[name], p) for name, p in model.named_parameters())
    assert model.cos[0].eq(1).all()
    other = snapshot(build(tiny(), seed=2, scramble=False))
    assert not torch.equal(first["wte.weight"], other["wte.weight"])
    assert not torch.equal(first["blocks.0.mlp.up.weight"], other["blocks.0.mlp.up.weight"])


def forget_a_scalar(model):
    model.temperature = torch.nn.Parameter(torch.ones(1))
    return "temperature"


def forget_a_vector(model):
    model.blocks[1].mlp.gain = torch.nn.Parameter(torch.ones(64))
    return "blocks.1.mlp.gain"


def forget_a_bias(model):
    model.blocks[0].mlp.up = train.Linear(64, 256, bias=True)
    return "blocks.0.mlp.up.bias"


def forget_a_buffer(model):
    model.register_buffer("positions", torch.ones(8))
    return "positions"


@pytest.mark.parametrize(
    "change", [forget_a_scalar, forget_a_vector, forget_a_bias, forget_a_buffer]
)
def test_a_forgotten_parameter_is_named(capsys, change):
    model = build(tiny())
    name = change(model)
    with pytest.raises(SystemExit) as stop:
        train.initialise(model, torch.float32, 1)
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error == f"error: initialise sets no value, or NaN, for {name}; add a line there.\n"


def test_all_that_is_forgotten_is_named_in_one_sentence(capsys):
    model = build(tiny())
    names = [forget_a_scalar(model), forget_a_bias(model), forget_a_vector(model)]
    with pytest.raises(SystemExit):
        train.initialise(model, torch.float32, 1)
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"for {', '.join(names)};" in error


def test_a_value_that_is_no_number_is_named(monkeypatch, capsys):
    set_knobs(monkeypatch, X0_INIT=math.nan)
    with pytest.raises(SystemExit):
        build(tiny())
    assert "or NaN, for x0_lambdas;" in capsys.readouterr().err


def test_a_parameter_that_is_set_in_part_is_named(monkeypatch, capsys):
    model = build(tiny())
    weight = model.lm_head.weight

    def set_the_first_row(mean, std, generator):
        weight[0] = 0

    monkeypatch.setattr(weight, "normal_", set_the_first_row)
    with pytest.raises(SystemExit):
        train.initialise(model, torch.float32, 1)
    assert "or NaN, for lm_head.weight;" in capsys.readouterr().err


def test_a_buffer_of_whole_numbers_is_left_alone():
    model = build(tiny())
    model.register_buffer("positions", torch.arange(8))
    train.initialise(model, torch.float32, 1)
    assert model.positions.tolist() == list(range(8))
