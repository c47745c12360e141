"""Child processes of a run, which no clock or verdict would reach: a sentence refuses each."""

import json
import re

from tests.common import run_script
from tests.test_report import parse_block

# Each act in a child of a run. Says how they ended, then gets a score of its own.
PROGRAM = """
import json, multiprocessing, subprocess, sys
import prepare, torch

loader = prepare.make_dataloader(None, 4, 64)
next(loader)
size = prepare.Tokenizer.from_directory().get_vocab_size()
model = torch.nn.Embedding(size, size)


def take_batch():
    next(loader)


def evaluate():
    prepare.evaluate_bpb(model, None, 32)


def open_tokens():
    open(prepare.ROOT / prepare.TOKENS_FILE, "rb").read()


ended = []
for act in (prepare.start, take_batch, evaluate, open_tokens):
    process = multiprocessing.get_context("fork").Process(target=act)
    process.start()
    process.join()
    ended.append(process.exitcode)
program = "import prepare\\nnext(prepare.make_dataloader(None, 4, 64))"
ended.append(subprocess.run([sys.executable, "-c", program]).returncode)
print(json.dumps(ended), flush=True)
evaluate()
"""


def test_each_child_is_refused_and_the_run_itself_has_the_only_score(cache, tmp_path):
    done = run_script("-c", PROGRAM, AUTORESEARCH_RUNS=tmp_path)
    assert done.returncode == 0, done.output
    assert "\n[3, 3, 3, 3, 3]\n" in done.stdout
    told = r"error: this is a child of the run in process \d+; load, read and score data there\."
    assert len(re.findall(told, done.stderr)) == 5, done.stderr
    assert done.stdout.count("val_bpb") == 1 and parse_block(done.stdout)["integrity"] == "ok"
    [record] = [json.loads(path.read_text()) for path in tmp_path.iterdir()]
    assert record["served_tokens_M"] == 4 * 64 / 1e6
