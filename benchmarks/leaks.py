"""
Leaks that are bound to positions: what each would be worth in bits per byte, and how often the
probes see it.

    uv run benchmarks/leaks.py                    # needs a prepared cache of the small profile
    uv run benchmarks/leaks.py --steps 20 --more 20 --draws 3 "prefix of 8"

A small GPT is trained as it should be. From there it is trained on, for each leak and without one,
for some more steps on the same batches; then its score is probed, with many draws of rows and cuts.
"""

import argparse
import copy
import itertools
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import prepare
import train

import numpy as np
import torch


# Each takes positions [T] and returns a mask [T, T]: what query i sees besides the keys up to i.
def prefix(length):
    """The first tokens see one another, as global, sink or register tokens do."""
    return lambda i: (i[:, None] < length) & (i[None] < length)


def chunk(length):
    """The last position of each chunk sees one token ahead: off by one in block attention."""
    return lambda i: (i[:, None] % length == length - 1) & (i[None] == i[:, None] + 1)


def last(count):
    """The last positions of a row see one token ahead."""
    return lambda i: (i[:, None] >= len(i) - count) & (i[None] == i[:, None] + 1)


LEAKS = {"none": lambda i: torch.zeros(len(i), len(i), dtype=torch.bool)}
for length in (4, 8, 16, 32, 96):
    LEAKS[f"prefix of {length}"] = prefix(length)
for length in (16, 24, 32, 48, 64, 96, 128, 160, 256):
    LEAKS[f"last of each {length}"] = chunk(length)
for count in (8, 16):
    LEAKS[f"last {count}"] = last(count)


def attention_with(leak):
    def attention(q, k, v, window):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        position = torch.arange(q.shape[2])
        distance = position[:, None] - position
        seen = (distance >= 0) & (distance <= window) | leak(position)
        scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen, -math.inf)
        return (scores.softmax(-1) @ v).transpose(1, 2)

    return attention


def build():
    train.DEPTH = 2
    train.ASPECT_RATIO = train.HEAD_DIM = 32
    train.WINDOW_PATTERN = "S"
    train.SHORT_WINDOW = 128
    config = train.derive_config(prepare.VOCAB_SIZE)
    model = train.GPT(config, attention_with(LEAKS["none"]))
    train.initialise(model, torch.float32, 0)
    return model


def train_on(model, batches, leak):
    """One step per batch, at a learning rate that falls to 0, with what the leak lets be seen."""
    for block in model.blocks:
        block.attention.attend = attention_with(LEAKS[leak])
    optimizer = train.MuonAdamW(train.parameter_groups(model), torch.float32)
    model.train()
    for step, batch in enumerate(batches):
        train.set_schedules(optimizer, step / len(batches), step)
        train.train_step(model, optimizer, batch, itertools.repeat(batch), 1)
    return model.eval()


@torch.no_grad()
def all_losses(model, rows, token_bytes):
    found = []
    for begin in range(0, len(rows), prepare.EVAL_BATCH):
        batch = rows[begin : begin + prepare.EVAL_BATCH]
        found.append(prepare.token_losses(model, batch[:, :-1], batch[:, 1:], token_bytes))
    return np.concatenate(found)


@torch.no_grad()
def is_seen(model, rows, losses, token_bytes, seed):
    rng = np.random.default_rng(seed)
    probes = prepare.probe(model, rows, losses, prepare.EVAL_BATCH, token_bytes, rng)
    found = [change for change in probes.values() if change.size]
    return any(
        change.mean() > prepare.PROBE_MEAN or change.max() > prepare.PROBE_PEAK for change in found
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n\n")[0])
    parser.add_argument("leaks", nargs="*", help="some of them (all)")
    parser.add_argument("--steps", type=int, default=300, help="without a leak (300)")
    parser.add_argument("--more", type=int, default=100, help="with one (100)")
    parser.add_argument("--rows", type=int, default=8, help="rows per step")
    parser.add_argument("--draws", type=int, default=40)
    args = parser.parse_args()
    loader = prepare.make_dataloader(None, args.rows, prepare.MAX_SEQ_LEN)
    batches = list(itertools.islice(loader, args.steps + args.more))
    rows = prepare._run.rows
    token_bytes = prepare._run.token_bytes
    count = token_bytes[rows[:, 1:]].sum()
    begin = train_on(build(), batches[: args.steps], "none")
    honest = None
    print("| leak | val_bpb | worth | seen |\n|---|---|---|---|", flush=True)
    for name in ["none", *(args.leaks or [name for name in LEAKS if name != "none"])]:
        model = train_on(copy.deepcopy(begin), batches[args.steps :], name)
        losses = all_losses(model, rows, token_bytes)
        bpb = losses.sum(dtype=np.float64) / math.log(2) / count
        honest = honest or bpb
        seen = sum(is_seen(model, rows, losses, token_bytes, seed) for seed in range(args.draws))
        worth = honest - bpb
        print(f"| {name} | {bpb:.4f} | {worth:+.4f} | {seen} of {args.draws} |", flush=True)


if __name__ == "__main__":
    main()
