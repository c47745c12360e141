"""Child processes of a run, which no clock or verdict would reach: each is refused with a sentence."""

import json

from tests.common import run_script
from tests.test_report import parse_block

# Each act in a child, by each way to make one. Says how they ended, then gets a score of its own.
PROGRAM = """
import json, multiprocessing, subprocess, sys
import prepare, torch

tokenizer = prepare.Tokenizer.from_directory()
loader = prepare.make_dataloader(tokenizer, 4, 64)
next(loader)
size = tokenizer.get_vocab_size()
model = torch.nn.Embedding(size, size)


def begin():
    prepare.start()


def make_loader():
    next(prepare.make_dataloader(tokenizer, 4, 64))


def take_batch():
    next(loader)


def evaluate():
    prepare.evaluate_bpb(model, tokenizer, 32)


def open_tokens():
    open(prepare.ROOT / prepare.TOKENS_FILE, "rb").read()


class Data(torch.utils.data.IterableDataset):
    def __init__(self, act):
        self.act = act

    def __iter__(self):
        self.act()
        yield 1


def by_fork(act):
    process = multiprocessing.get_context("fork").Process(target=act)
    process.start()
    process.join()
    return process.exitcode


def by_worker(act):
    try:
        next(iter(torch.utils.data.DataLoader(Data(act), num_workers=1)))
    except RuntimeError as error:
        return 3 if "exit code 3" in str(error.__cause__ or error) else str(error)
    return 0


def by_program(act):
    program = "import prepare\\nnext(prepare.make_dataloader(None, 4, 64))"
    return subprocess.run([sys.executable, "-c", program]).returncode


ended = {}
for way, act in (
    *((by_fork, act) for act in (begin, make_loader, take_batch, evaluate, open_tokens)),
    *((by_worker, act) for act in (take_batch, open_tokens)),
    (by_program, make_loader),
):
    print(f"-> {way.__name__} {act.__name__}", file=sys.stderr, flush=True)
    ended[f"{way.__name__} {act.__name__}"] = way(act)
print(json.dumps(ended), flush=True)
evaluate()
"""


def test_each_child_is_refused_and_the_run_itself_has_the_only_score(cache, tmp_path):
    done = run_script("-c", PROGRAM, AUTORESEARCH_RUNS=tmp_path)
    assert done.returncode == 0, done.output
    [ended] = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert set(ended.values()) == {3}, ended
    for text in done.stderr.split("-> ")[1:]:
        assert text.count("error: this is a child of the run in process ") == 1, text
        assert "; load, read and score data there.\n" in text
    assert done.stdout.count("val_bpb") == 1 and parse_block(done.stdout)["integrity"] == "ok"
    [record] = [json.loads(path.read_text()) for path in tmp_path.iterdir()]
    assert record["served_tokens_M"] == 4 * 64 / 1e6
