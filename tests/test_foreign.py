"""A train.py of the well-known shape: five names of prepare, its own clock, its own block, no report.
It runs here unchanged and gets a number, a verdict and a record."""

import json
import re

from tests.common import CACHE, ROOT, run_script

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

    def forward(self, idx, targets=None, reduction="mean"):
        logits = self.table(idx)
        if targets is None:
            return logits
        return F.cross_entropy(
            logits.view(-1, logits.size(-1)), targets.view(-1), reduction=reduction
        )


t_start = time.time()
tokenizer = Tokenizer.from_directory()
model = Model(tokenizer.get_vocab_size())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.3)
train_loader = make_dataloader(tokenizer, 4, MAX_SEQ_LEN, "train")
x, y, epoch = next(train_loader)  # prefetch
total_training_time = 0
step = 0
while True:
    t0 = time.time()
    loss = model(x, y)
    loss.backward()
    x, y, epoch = next(train_loader)
    optimizer.step()
    model.zero_grad(set_to_none=True)
    if step > 10:  # the first steps are not counted
        total_training_time += time.time() - t0
    step += 1
    if step > 10 and total_training_time >= TIME_BUDGET * SHARE:
        break
model.eval()
val_bpb = evaluate_bpb(model, tokenizer, 4)
print("---")
print(f"val_bpb:          {val_bpb:.6f}")
print(f"training_seconds: {total_training_time:.1f}")
print(f"total_seconds:    {time.time() - t_start:.1f}")
print(f"num_steps:        {step}")
'''


def run_foreign(folder, share, runs):
    (folder / "prepare.py").write_bytes((ROOT / "prepare.py").read_bytes())
    (folder / "train.py").write_text(FOREIGN.replace("SHARE", str(share)))
    environment = {"AUTORESEARCH_TIME_BUDGET": 2, "AUTORESEARCH_RUNS": runs}
    return run_script(folder / "train.py", cwd=folder, **environment)


@pytest.mark.parametrize(("share", "verdict"), [(2.5, "overtime"), (0.4, "ok")])
def test_a_foreign_train_py_gets_a_number_a_verdict_and_a_record(cache, tmp_path, share, verdict):
    done = run_foreign(tmp_path, share, tmp_path / "runs")
    assert done.returncode == 0, done.output
    [integrity] = re.findall(r"^integrity: (.*)$", done.stdout, re.M)
    score = float(re.search(r"^val_bpb: +(\S+)$", done.stdout, re.M)[1])
    assert 0.5 < score < 10
    if verdict == "overtime":
        assert re.match(r"overtime: [\d.]+ of 2 s", integrity)
    else:
        # Beside other tests the speed may change by more than a run should.
        assert integrity == "ok" or integrity.startswith("unsteady")
    [path] = (tmp_path / "runs").glob("*.json")
    record = json.loads(path.read_text())
    assert record["val_bpb"] == pytest.approx(score, abs=1e-6)
    assert record["integrity"] == integrity
    assert record["training_seconds"] > 0.8
    assert record["served_tokens_M"] > 0
    assert record["train"] and record["data"] and record["prepare"]
    for unknown in ("num_steps", "total_tokens_M", "depth", "mfu_percent", "train_loss", "curve"):
        assert record[unknown] is None


def test_names_that_other_harnesses_import_are_there(cache):
    program = (
        "from prepare import (CACHE_DIR, DATA_DIR, TOKENIZER_DIR, Tokenizer, get_token_bytes)\n"
        "tokenizer = Tokenizer.from_directory()\n"
        "ids = tokenizer.encode(['ab c', 'd'], prepend=tokenizer.get_bos_token_id(), num_threads=8)\n"
        "table = get_token_bytes(device='cpu')\n"
        "print(CACHE_DIR, DATA_DIR, TOKENIZER_DIR, table[ids[0]].sum().item(), table.dtype)\n"
    )
    done = run_script("-c", program)
    root = CACHE / "small"
    assert done.stdout.split() == [
        str(root),
        str(root / "data"),
        str(root / "tokenizer"),
        "4",
        "torch.int32",
    ], done.output
