"""Real runs of train.py with honest, mistaken and hostile edits must end as EDITS says.
test_metric.py covers tricks that need only a model, test_report.py all verdicts.

    uv run pytest -m redteam -s      # prints a table: edit, exit code, score, integrity

To try another edit, add an entry to EDITS.
"""

import re
from dataclasses import dataclass

from tests.common import edited, train
from tests.test_report import parse_block
from tests.test_run import EMBED, EVALUATE, before

import pytest

pytestmark = pytest.mark.redteam

OVERTIME = r"overtime: \d+\.\d s, over 3\.02"


@dataclass
class Edit:
    replace: list  # pairs (text of train.py, its replacement)
    code: int  # the exit code
    says: str  # pattern of `integrity` or, if that is not printed, of the last line
    best: float = 0.8  # the score must stay above this share of the unedited run's


# Lines of train.py.
LOGITS = "            return logits\n"
LOADER = "    batches = make_dataloader(tokenizer, rows, MAX_SEQ_LEN)\n"
STEP = "        loss, batch = train_step(model, optimizer, batch, batches, micro_batches)\n"
CLASS = "class GPT(nn.Module):\n"

# Texts that edits insert.
TRAIN_FOR_5_SECONDS = """\
    import time
    until = time.monotonic() + 5
    while time.monotonic() < until:
        train_step(compiled_model, optimizer, next(batches), batches, 1)
"""
COUNT_BIGRAMS = """\
    import numpy, prepare
    tokens = numpy.fromfile(prepare.PREPARED / prepare.TOKENS_FILE, "<u2")
    tokens = torch.from_numpy(tokens.astype("int64"))
    table = torch.ones(config.vocab_size, config.vocab_size)
    table.index_put_((tokens[:-1], tokens[1:]), torch.ones(()), accumulate=True)
    GPT.bigrams = (table / table.sum(1, keepdim=True)).log()
"""
LATE_TABLE = """\
            if not self.training and elapsed() and not hasattr(self, "table"):
                import time
                time.sleep(4)  # stands in for counting
                self.table = torch.zeros(2 * [logits.shape[-1]])
            return logits if self.training or not elapsed() else logits + self.table[idx]
"""
TRAINS_WHEN_TOLD = """\
class GPT(nn.Module):
    def eval(self):
        import time
        until = time.monotonic() + (4 if elapsed() else 0)
        while time.monotonic() < until:
            pass  # stands in for training steps
        return super().eval()

"""
BY_LENGTH = """\
    short = make_dataloader(tokenizer, 2 * rows, MAX_SEQ_LEN // 2)
    full = make_dataloader(tokenizer, rows, MAX_SEQ_LEN)
    batches = iter(lambda: next(short if elapsed() < TIME_BUDGET / 2 else full), None)
"""

EDITS = {
    "none": Edit([], 0, "ok"),
    # ---- Honest ideas, which no flag may discard ----
    "lengths that grow": Edit([(LOADER, BY_LENGTH)], 0, "ok"),
    "a batch that grows": Edit(
        [(STEP, STEP.replace("micro_batches)", "micro_batches * (1 + (progress > 0.5)))"))], 0, "ok"
    ),
    # ---- Files ----
    "bigrams counted before the first batch": Edit(
        [
            before("    num_params = sum(", COUNT_BIGRAMS),
            (LOGITS, "            return logits + self.bigrams[idx]\n"),
        ],
        0,
        "opened: the run itself read train.u16",
        best=0.3,
    ),
    # ---- The clock ----
    "trains after the last batch": Edit(
        [before(EVALUATE, TRAIN_FOR_5_SECONDS)],
        0,
        OVERTIME,
        best=0.4,  # it scores better, but is flagged
    ),
    # ---- Evaluation ----
    "a leak only in evaluation": Edit(
        [(EMBED, EMBED + "        x = x if self.training else x + x.roll(-1, 1)\n")],
        3,
        "FAIL causality: .*",
    ),
    # The clock has stopped, and 300 s of evaluation are allowed.
    "a table made in the first forward pass of evaluation": Edit([(LOGITS, LATE_TABLE)], 0, "ok"),
    "training inside model.eval()": Edit([(CLASS, TRAINS_WHEN_TOLD)], 0, OVERTIME),
}


@pytest.fixture(scope="module")
def honest(cache, tmp_path_factory):
    """Returns the score of a run without an edit."""
    [record] = train(edited(tmp_path_factory.mktemp("honest") / "code"), 2).records
    return record["val_bpb"]


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_run_ends_as_it_must(name, honest, tmp_path):
    edit = EDITS[name]
    done = train(edited(tmp_path / "code", edit.replace), 2)
    block = parse_block(done.stdout)
    told = block.get("integrity") or done.output.strip().splitlines()[-1]
    print(f"| {name} | {done.returncode} | {block.get('val_bpb', '')} | {told} |")
    assert done.returncode == edit.code, done.output
    assert re.fullmatch(edit.says, told), told
    scores = [record["val_bpb"] for record in done.records]
    if edit.code == 0:
        assert [f"{score:.6f}" for score in scores] == [block["val_bpb"]]
        assert edit.best * honest < scores[0] < 1.25 * honest
    elif edit.code == 3:
        assert not scores and block.get("val_bpb", "nan") == "nan"
