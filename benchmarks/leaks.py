"""
Measures what each leak is worth in bits per byte, and how often the probes see it. Whether a
position sees ahead depends on its place in the row or on the token that it holds.

    uv run benchmarks/leaks.py                    # needs a prepared cache of the small profile
    uv run benchmarks/leaks.py --steps 20 --more 20 --draws 3 "prefix of 8"
    uv run benchmarks/leaks.py --honest --draws 200      # how far are honest models from refusal?
    uv run benchmarks/leaks.py --memory --draws 20       # memories that forward() fills

A small GPT is trained without a leak. Copies of it take some more steps on the same batches, one
with each leak and one with none; the more steps, the stronger the leak. Then each copy is probed
with many draws of rows and cuts.

A memory notes which token came next after a context and looks it up, also for the row that it has
just noted. Unless the table says something else, it keeps the first that it saw. Whether it is
refused, and by what, does not depend on where Python keeps it.
"""

import argparse
import copy
import itertools
import math
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root of the repository
import prepare
import train
from benchmarks.common import print_header, print_row

import numpy as np
import torch
import torch.nn.functional as F

ROWS = 8  # per step
HONEST = tuple(itertools.product((3, 8), (torch.float32, torch.bfloat16, torch.float16)))


# ---- Leaks ----
# Each takes tokens [B, T] and returns a mask of the keys that queries see in addition to the causal
# ones: [T, T] if it depends on positions alone, else [B, 1, T, T].
def none(idx):
    return torch.zeros(idx.shape[1], idx.shape[1], dtype=torch.bool)


def one_ahead(where):
    """Returns a mask by which the queries where `where` [..., T] is true see one token ahead."""
    ahead = torch.ones(where.shape[-1] - 1).diag(1).bool()
    return where[..., None] & ahead


def prefix(length):
    """Lets the first tokens see one another, as global, sink or register tokens do."""

    def leak(idx):
        early = torch.arange(idx.shape[1]) < length
        return early[:, None] & early

    return leak


def last(count):
    """Lets the last positions of a row see one token ahead."""
    return lambda idx: one_ahead(torch.arange(idx.shape[1]) >= idx.shape[1] - count)


def chunk(length):
    """Lets the last position of each chunk see one token ahead: off by one in block attention."""
    return lambda idx: one_ahead(torch.arange(idx.shape[1]) % length == length - 1)


def after(tokens):
    """Lets positions that hold one of `tokens` see one token ahead."""
    is_one = torch.zeros(prepare.VOCAB_SIZE, dtype=torch.bool)
    is_one[torch.from_numpy(tokens)] = True
    return lambda idx: one_ahead(is_one[idx][:, None])


def all_leaks(rows):
    """Returns {name: leak}. The name of a leak by token gives its tokens' share of `rows`."""
    leaks = {f"prefix of {length}": prefix(length) for length in (4, 8, 16, 96)}
    leaks |= {f"last {count}": last(count) for count in (4, 8)}
    leaks |= {f"last of each {length}": chunk(length) for length in (16, 48, 160)}
    share = np.bincount(rows.ravel(), minlength=prepare.VOCAB_SIZE) / rows.size
    for wanted in (0.01, 0.02, 0.05):
        token = np.abs(share - wanted).argmin(keepdims=True)
        leaks[f"after a token, {share[token].sum():.1%}"] = after(token)
    rarer = np.argsort(-share)[100:]
    for wanted in (0.02, 0.05):
        tokens = rarer[: np.searchsorted(share[rarer].cumsum(), wanted) + 1]
        leaks[f"after {len(tokens)} rarer tokens, {share[tokens].sum():.1%}"] = after(tokens)
    return leaks


# ---- Models ----
class Leaky(train.GPT):
    leak = staticmethod(none)

    def __init__(self, config):
        super().__init__(config, self.attend)

    def forward(self, idx, targets=None):
        self.leaked = self.leak(idx)
        return super().forward(idx, targets)

    def attend(self, q, k, v, window):
        """Does what train.py's attend_sdpa does, but queries also see what leaks."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        position = torch.arange(q.shape[2])
        distance = position[:, None] - position
        seen = (distance >= 0) & (distance <= window) | self.leaked
        return F.scaled_dot_product_attention(q, k, v, seen).transpose(1, 2)


def build(depth=2, dtype=torch.float32):
    train.DEPTH = depth
    train.ASPECT_RATIO = 64 / depth
    train.HEAD_DIM = 32
    train.WINDOW_PATTERN = "S"
    train.SHORT_WINDOW = 128
    train.LOGIT_SOFTCAP = 0  # the cap takes a third of so small a model's time
    model = Leaky(train.derive_config(prepare.VOCAB_SIZE, dtype))
    train.initialise(model, 0)
    return model


def train_on(model, batches):
    """Takes a step per batch; the learning rate falls to 0."""
    optimizer = train.MuonAdamW(train.parameter_groups(model), model.config.dtype)
    model.train()
    for step, batch in enumerate(batches):
        train.set_schedules(optimizer, step / len(batches), step)
        train.train_step(model, optimizer, [batch])
    return model.eval()


# ---- Memories ----
class Memory(torch.nn.Module):
    """Adds `bonus` to the logit of the token that, by its memory, follows the last `length`."""

    def __init__(
        self,
        gpt,
        length=6,
        bonus=20.0,
        places=2**61 - 1,
        full=math.inf,
        calls=(1, 10**9),
        notes_first=True,
    ):
        super().__init__()
        self.gpt = gpt
        self.length = length
        self.bonus = bonus
        self.places = places  # for hashes of contexts
        self.full = full  # entries
        self.calls = range(*calls)  # in which it notes something
        self.notes_first = notes_first  # before it looks up
        self.call = 0
        self.table = {}

    def contexts(self, tokens):
        """Returns a number for each position's last tokens, [B, T]."""
        found = np.zeros_like(tokens)
        for i in range(self.length):
            found[:, i:] = found[:, i:] * 6007 + tokens[:, : tokens.shape[1] - i] + 1
        return found % self.places

    def note(self, keys, following):
        for key, token in zip(keys.ravel().tolist(), following.ravel().tolist()):
            if len(self.table) < self.full:
                self.table.setdefault(key, token)

    def forward(self, idx):
        logits = self.gpt(idx)
        keys = self.contexts(idx.numpy())
        self.call += 1
        notes = self.call in self.calls
        if notes and self.notes_first:
            self.note(keys[:, :-1], idx[:, 1:])
        found = torch.tensor([self.table.get(key, -1) for key in keys.ravel().tolist()])
        known = found >= 0
        logits.flatten(0, 1)[known, found[known]] += self.bonus
        if notes and not self.notes_first:
            self.note(keys[:, :-1], idx[:, 1:])
        return logits


class LastSeen(Memory):
    def note(self, keys, following):
        self.table.update(zip(keys.ravel().tolist(), following.ravel().tolist()))


class OfRows(Memory):
    """Knows a row by its first 16 tokens."""

    def contexts(self, tokens):
        first = super().contexts(tokens[:, :16])[:, -1:] * 6007
        return np.where(np.arange(tokens.shape[1]) < 16, -1, first + np.arange(tokens.shape[1]))

    def note(self, keys, following):
        super().note(keys[:, 16:], following[:, 16:])


class OfKnownText(Memory):
    """Notes only what follows three tokens that training has seen in this order."""

    def __init__(self, gpt):
        super().__init__(gpt, length=3)
        text = prepare.begin_run().tokens[:3_000_000].astype(np.int64)
        self.seen = np.unique(self.contexts(text[None]))

    def note(self, keys, following):
        known = np.isin(keys, self.seen)
        super().note(keys[known], following.numpy()[known])


class Nearest(Memory):
    """Compares the states before lm_head with those of its first three batches."""

    def __init__(self, gpt):
        super().__init__(gpt)
        self.states = []
        self.following = []

    def forward(self, idx):
        kept = []
        hook = self.gpt.lm_head.register_forward_pre_hook(lambda _, x: kept.append(x[0][:, :-1]))
        logits = self.gpt(idx)
        hook.remove()
        states = F.normalize(kept[0].flatten(0, 1), dim=-1)
        if len(self.states) < 3:
            self.states.append(states)
            self.following.append(idx[:, 1:].flatten())
        likeness, nearest = (states @ torch.cat(self.states).mT).max(-1)
        tokens = torch.cat(self.following)[nearest].view(len(idx), -1, 1)
        bonus = self.bonus * (likeness > 0.99).view(tokens.shape)
        logits[:, :-1].scatter_add_(-1, tokens, bonus.to(logits.dtype))
        return logits


MEMORIES = {  # name: (class, options)
    "none": (Memory, {"full": 0}),
    "last two tokens": (Memory, {"length": 2}),
    "last three": (Memory, {"length": 3}),
    "last six": (Memory, {}),
    "hashed into 65,536 places": (Memory, {"places": 2**16}),
    "at most 20,000 entries": (Memory, {"full": 20_000}),
    "only the first batch": (Memory, {"calls": (1, 2)}),
    "from the fourth batch on": (Memory, {"calls": (4, 10**9)}),
    "worth 1 nat": (Memory, {"bonus": 1.0}),
    "worth a half": (Memory, {"bonus": 0.5}),
    "worth a quarter": (Memory, {"bonus": 0.25}),
    "rows by their beginning": (OfRows, {}),
    "contexts known from training": (OfKnownText, {}),
    "nearest neighbour": (Nearest, {}),
    "keeps the last it saw": (LastSeen, {}),
    "of other rows": (Memory, {"notes_first": False}),
    "of other rows, 20,000 entries": (Memory, {"notes_first": False, "full": 20_000}),
}


# ---- Measurements ----
def validation():
    """Returns the rows and the bytes per token."""
    data = prepare.begin_run()
    return data.rows, prepare.Tokenizer(data.manifest["vocabulary"]).token_bytes


@torch.no_grad()
def all_losses(model):
    """Returns the losses of the validation rows, [N, T]."""
    rows, token_bytes = validation()
    found = []
    for batch in np.split(rows, len(rows) // prepare.EVAL_BATCH):
        found.append(prepare.token_losses(model, batch[:, :-1], batch[:, 1:], token_bytes))
    return np.concatenate(found)


@torch.no_grad()
def draw(model, losses, seed):
    """Returns {probe: mean and largest change in nats} of one draw of rows and cuts."""
    rng = np.random.default_rng(seed)
    rows, token_bytes = validation()
    changes = prepare.probe(model, rows, losses, token_bytes, rng)
    return {name: (x.mean(), x.max()) for name, x in changes.items() if x.size}


def is_refused(found):
    limits = (prepare.PROBE_MEAN, prepare.PROBE_PEAK)
    return any(not (mean <= limits[0] and peak <= limits[1]) for mean, peak in found.values())


def print_honest(batches, seeds):
    """Prints, by depth and dtype, how many draws refuse the model, and the largest changes."""
    print(f"limits: {prepare.PROBE_MEAN:g} on average, {prepare.PROBE_PEAK:g} at one position\n")
    print_header("depth", "dtype", "refused", "probe: mean, largest")
    for depth, dtype in HONEST:
        model = train_on(build(depth, dtype), batches)
        losses = all_losses(model)
        draws = [draw(model, losses, seed) for seed in seeds]
        refused = sum(map(is_refused, draws))
        worst = "; ".join(
            "{}: {:.1e}, {:.1e}".format(name, *np.max([found[name] for found in draws], axis=0))
            for name in draws[0]
        )
        name = str(dtype).removeprefix("torch.")
        print_row(depth, name, f"{refused} of {len(draws)}", worst)


def print_leaks(names, batches, more, seeds):
    """Prints a row for each leak, with which the model takes the last `more` steps."""
    rows, token_bytes = validation()
    leaks = all_leaks(rows)
    count = token_bytes[rows[:, 1:]].sum()
    begin = train_on(build(), batches[:-more])
    print_header("leak", "val_bpb", "worth", "seen")
    honest = None
    for name, leak in {"none": none, **{name: leaks[name] for name in names or leaks}}.items():
        model = copy.deepcopy(begin)
        model.leak = leak
        train_on(model, batches[-more:])
        losses = all_losses(model)
        bpb = losses.sum(dtype=np.float64) / math.log(2) / count
        honest = honest or bpb
        seen = sum(is_refused(draw(model, losses, seed)) for seed in seeds)
        print_row(name, f"{bpb:.4f}", f"{honest - bpb:+.4f}", f"{seen} of {len(seeds)}")


def print_memories(names, batches, seeds):
    """Prints, for each memory, the score and how often it is refused, and by what."""
    gpt = train_on(build(), batches)
    rows, token_bytes = validation()
    print_header("memory", "val_bpb without probes", "refused", "by")
    for name in names or MEMORIES:
        kind, options = MEMORIES[name]
        bpb = all_losses(kind(gpt, **options)).sum(dtype=np.float64) / math.log(2)
        by = Counter()
        for seed in seeds:
            try:
                prepare.score(kind(gpt, **options).eval(), rows, token_bytes, seed)
            except prepare.IntegrityError as error:
                by[str(error).split(":")[0]] += 1
        told = ", ".join(f"{probe} {count}" for probe, count in by.items()) or "-"
        refused = f"{by.total()} of {len(seeds)}"
        print_row(name, f"{bpb / token_bytes[rows[:, 1:]].sum():.4f}", refused, told)


def main():
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n\n")[0])
    parser.add_argument("leaks", nargs="*", help="names of leaks, or of memories (all)")
    parser.add_argument("--honest", action="store_true", help="probe models without a leak instead")
    parser.add_argument("--memory", action="store_true", help="score models with a memory instead")
    parser.add_argument("--steps", type=int, default=300, help="steps without a leak (300)")
    parser.add_argument("--more", type=int, default=100, help="steps with one (100)")
    parser.add_argument("--draws", type=int, default=40)
    args = parser.parse_args()
    loader = prepare.make_dataloader(None, ROWS, prepare.MAX_SEQ_LEN)
    if args.memory:
        batches = list(itertools.islice(loader, args.steps))
        print_memories(args.leaks, batches, range(args.draws))
    elif args.honest:
        print_honest(list(itertools.islice(loader, args.steps)), range(args.draws))
    else:
        batches = list(itertools.islice(loader, args.steps + args.more))
        print_leaks(args.leaks, batches, args.more, range(args.draws))


if __name__ == "__main__":
    main()
