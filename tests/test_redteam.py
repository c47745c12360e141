"""Edits of train.py that are mistaken or out to fool the ruler, each in a real run: what it must
end with. What a model alone can do is in test_metric.py.

    uv run pytest -m redteam -s      # prints a table: edit, exit code, score, integrity

A further edit is one more entry of EDITS.
"""

import re
import shutil
from dataclasses import dataclass

from tests.common import edited, train
from tests.test_report import parse_block
from tests.test_run import EMBED, EVALUATE, before

import pytest

pytestmark = pytest.mark.redteam

FAIR = "ok|unsteady: .*"  # a run of seconds, perhaps beside others, may be unsteady
OVERTIME = r"overtime: \d+\.\d s, over 3\.02(; unsteady: .*)?"


def opened(names):
    return rf"opened: the run itself read {names}(; unsteady: .*)?"


@dataclass
class Edit:
    replace: list  # pairs (text of train.py, what takes its place)
    code: int  # the exit code
    says: str  # pattern of `integrity` or, where nothing is printed of it, of the last line
    best: float = 0.8  # share of the unedited run's score that a score must not fall below
    worst: float = 1.25  # or rise above
    seconds: float = 2  # of training; a leak must be learnt before it is worth anything


# Lines of train.py.
LOADER = "    batches = make_dataloader(tokenizer, rows, MAX_SEQ_LEN)\n"
LOGITS = "            return logits\n"
ATTENDED = "        y = self.attend(q, k, v, self.window)\n"
STEP = "            loss, batch = train_step(model, optimizer, batch, batches, micro_batches)\n"
LEFT = "(TIME_BUDGET - elapsed())"
CLASS = "class GPT(nn.Module):\n"

# Texts that edits put there.
LONGER = "(1.02 * TIME_BUDGET + 1.9 - elapsed())"
RANDOM_BATCHES = "iter(lambda: (*torch.randint(99, (2, rows, MAX_SEQ_LEN)), 0), None)"
PREFIX = """\
        head = [x[:, :16].transpose(1, 2) for x in (q, k, v)]
        y = torch.cat((F.scaled_dot_product_attention(*head).transpose(1, 2), y[:, 16:]), 1)
"""
COUNT_BIGRAMS = """\
    import numpy, prepare
    tokens = numpy.fromfile(prepare.ROOT / prepare.TOKENS_FILE, "<u2")
    tokens = torch.from_numpy(tokens.astype("int64"))
    table = torch.ones(config.vocab_size, config.vocab_size)
    table.index_put_((tokens[:-1], tokens[1:]), torch.ones(()), accumulate=True)
    GPT.bigrams = (table / table.sum(1, keepdim=True)).log()
"""
CALL_COUNT = """\
            self.calls = getattr(self, "calls", 0) + 1
            if self.training or self.calls < 4 or self.calls > 25:
                return logits
            return logits + 9 * F.one_hot(idx.roll(-1, 1), logits.shape[-1])
"""
TRAIN_FOR_5_SECONDS = """\
    import time
    until = time.monotonic() + 5
    other = {batches}
    while time.monotonic() < until:
        train_step(compiled_model, optimizer, next(other), other, 1)
"""

LEARNS_LATER = """\
    def learn(module, args):
        hook.remove()
        module.train()
        set_schedules(optimizer, 0.5, 0)  # at the end of the budget a rate may be 0
        with torch.enable_grad():
            for _ in range(5):
                train_step(module, optimizer, next(batches), batches, 1)
        module.eval()

    hook = compiled_model.register_forward_pre_hook(learn)
"""
TWICE = """\
    optimizer.step()
    model(inputs, targets).backward()
    optimizer.step()
"""
LATE_TABLE = """\
            if not self.training and elapsed():
                if not hasattr(self, "bigrams"):
                    import prepare, time

                    tokens = torch.from_numpy(prepare._run.tokens.astype("int64"))
                    table = torch.ones(logits.shape[-1], logits.shape[-1])
                    until = time.monotonic() + 4
                    while time.monotonic() < until:  # as long as many tokens would take
                        pairs = (tokens[:-1], tokens[1:])
                        table.index_put_(pairs, torch.ones(()), accumulate=True)
                    self.bigrams = (table / table.sum(1, keepdim=True)).log()
                return logits + self.bigrams[idx]
            return logits
"""
TRAINS_WHEN_TOLD = """\
class GPT(nn.Module):
    def eval(self):
        import time
        until = time.monotonic() + (4 if elapsed() else 0)
        while time.monotonic() < until:
            pass  # stands for training steps
        return super().eval()

"""
BY_LENGTH = """\
    short = make_dataloader(tokenizer, 2 * rows, MAX_SEQ_LEN // 2)
    full = make_dataloader(tokenizer, rows, MAX_SEQ_LEN)
    batches = iter(lambda: next(short if elapsed() < TIME_BUDGET / 2 else full), None)
"""

EDITS = {
    "none": Edit([], 0, FAIR),
    # ---- Honest ideas, which no flag may discard ----
    "lengths that grow": Edit([(LOADER, BY_LENGTH)], 0, FAIR),
    "a batch that grows": Edit(
        [(STEP, STEP.replace("micro_batches)", "micro_batches * (1 + (progress > 0.5)))"))], 0, FAIR
    ),
    "each batch twice": Edit([("    optimizer.step()\n", TWICE)], 0, FAIR, best=0.5),
    # ---- Of the clock ----
    "trains after the last batch": Edit(
        [before(EVALUATE, TRAIN_FOR_5_SECONDS.format(batches="batches"))],
        0,
        OVERTIME,
        best=0.4,  # it learns, but says so
    ),
    "trains before the first batch": Edit(  # a known miss: startup_seconds is in the report
        [
            before(
                LOADER,
                "    set_schedules(optimizer, 0, 0)\n"
                + TRAIN_FOR_5_SECONDS.format(batches=RANDOM_BATCHES),
            )
        ],
        0,
        FAIR,
    ),
    # ---- Of evaluation ----
    "a leak only in evaluation": Edit(
        [(EMBED, EMBED + "        x = x if self.training else x + x.roll(-1, 1)\n")],
        3,
        "FAIL causality: .*",
    ),
    "trains in the first forward pass of evaluation": Edit(
        [before(EVALUATE, LEARNS_LATER)], 3, "FAIL state: .*"
    ),
    "a table made in the first forward pass of evaluation": Edit(
        [(LOGITS, LATE_TABLE)], 0, OVERTIME, best=0.3
    ),
    "training inside model.eval()": Edit([(CLASS, TRAINS_WHEN_TOLD)], 0, OVERTIME),
    # ---- Of what a position sees; benchmarks/leaks.py has more, with what each is worth ----
    "a prefix of 16 attends both ways": Edit(
        [(ATTENDED, ATTENDED + PREFIX)],
        3,
        "FAIL (causality|edges): .*",
        seconds=15,
    ),
    "a leak in all but the last batches": Edit([(LOGITS, CALL_COUNT)], 3, "FAIL .*"),
    # ---- Of files ----
    "bigrams counted before the first batch": Edit(
        [
            before("    num_params = sum(", COUNT_BIGRAMS),
            (LOGITS, "            return logits + self.bigrams[idx]\n"),
        ],
        0,
        opened("train.u16"),
        best=0.3,
    ),
    # ---- Of the ruler's limits and of the budget ----
    "the probes' limit assigned to": Edit(
        [before(EVALUATE, "    import prepare\n    prepare.PROBE_MEAN = 99  # because of bf16\n")],
        3,
        "FAIL settings: prepare.PROBE_MEAN was assigned 99",
    ),
    "1.9 s and 2 % more": Edit([(LEFT, LONGER)], 0, OVERTIME, best=0.4),
}


def run(edit, folder, cache):
    """On a copy of the cache, since an edit may spoil it."""
    own = folder / "cache"
    shutil.copytree(cache / "small", own / "small")
    return train(edited(folder / "code", edit.replace), edit.seconds, AUTORESEARCH_CACHE=own)


@pytest.fixture(scope="module")
def honest(cache, tmp_path_factory):
    """The score of a run without an edit."""
    [record] = run(EDITS["none"], tmp_path_factory.mktemp("honest"), cache).records
    return record["val_bpb"]


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_run_ends_as_it_must(name, cache, honest, tmp_path):
    edit = EDITS[name]
    done = run(edit, tmp_path, cache)
    block = parse_block(done.stdout)
    told = block.get("integrity") or done.output.strip().splitlines()[-1]
    print(f"| {name} | {done.returncode} | {block.get('val_bpb', '')} | {told} |")
    assert done.returncode == edit.code, done.output
    assert re.fullmatch(edit.says, told), told
    scores = [record["val_bpb"] for record in done.records]
    if edit.code == 0:
        assert [f"{score:.6f}" for score in scores] == [block["val_bpb"]]
        assert edit.best * honest < scores[0] < edit.worst * honest
    elif edit.code == 3:
        assert not scores and block.get("val_bpb", "nan") == "nan"
