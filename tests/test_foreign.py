"""A train.py in the style of karpathy/autoresearch, with five imports from prepare, its own clock
and its own block, runs here unchanged and gets a score, a verdict and a record."""

import json
import shutil

from tests.common import ROOT, run_script
from tests.test_report import parse_block

import pytest

FOREIGN = '''
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

from prepare import MAX_SEQ_LEN, TIME_BUDGET, Tokenizer, evaluate_bpb, make_dataloader


class Model(nn.Module):
    """A bigram model that can return its loss, as such models do."""

    def __init__(self, vocab_size):
        super().__init__()
        self.table = nn.Embedding(vocab_size, vocab_size)
        nn.init.zeros_(self.table.weight)

    def forward(self, idx, targets=None):
        logits = self.table(idx)
        if targets is None:
            return logits
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


t_start = time.time()
tokenizer = Tokenizer.from_directory()
model = Model(tokenizer.get_vocab_size())
train_loader = make_dataloader(tokenizer, 4, MAX_SEQ_LEN, "train")
x, y, epoch = next(train_loader)  # prefetch
total_training_time = 0
step = 0
while True:
    t0 = time.time()
    loss = model(x, y)
    loss.backward()
    x, y, epoch = next(train_loader)
    with torch.no_grad():
        model.table.weight -= 100 * model.table.weight.grad
    model.zero_grad(set_to_none=True)
    if step > 10:  # the first steps are not counted
        total_training_time += time.time() - t0
    step += 1
    if step > 10 and total_training_time >= TIME_BUDGET:
        break
model.eval()
val_bpb = evaluate_bpb(model, tokenizer, 4)
print("---")
print(f"val_bpb:          {val_bpb:.6f}")
print(f"training_seconds: {total_training_time:.1f}")
print(f"total_seconds:    {time.time() - t_start:.1f}")
print(f"num_steps:        {step}")
'''


def test_a_foreign_train_py_gets_a_number_a_verdict_and_a_record(cache, tmp_path):
    shutil.copy(ROOT / "prepare.py", tmp_path)
    (tmp_path / "train.py").write_text(FOREIGN)
    told = {"AUTORESEARCH_TIME_BUDGET": 1, "AUTORESEARCH_RUNS": tmp_path / "runs"}
    done = run_script("train.py", cwd=tmp_path, **told)
    assert done.returncode == 0, done.output
    _, _, own = done.stdout.partition("\nintegrity: ")
    integrity, _, own = own.partition("\n")
    assert integrity == "ok"
    score = float(parse_block(own)["val_bpb"])
    assert 0.5 < score < 10
    [path] = (tmp_path / "runs").glob("*.json")
    record = json.loads(path.read_text())
    assert record["val_bpb"] == pytest.approx(score, abs=1e-6)
    assert record["integrity"] == integrity
    assert record["training_seconds"] > 0.8
    assert record["total_tokens_M"] > 0 and record["tokens_per_second"] > 0
    assert record["data"] and record["prepare"] and record["curve"] is None
