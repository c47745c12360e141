"""
What the metric costs beside the bare forward passes over the same rows, and its probes within it.

    uv run benchmarks/evaluate.py                             # the small profile, train.py's model
    uv run benchmarks/evaluate.py --profile full --rounds 1   # the full profile's 10,240 rows

Random rows and weights. On a CPU the full profile takes a model of one narrow layer, or this would
last for hours.
"""

import argparse
import os
import sys
from pathlib import Path
from statistics import median
from time import perf_counter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root of the repository
from benchmarks.common import print_header, print_row


def measure(args):
    """Prints the table. It imports prepare.py, which reads the profile from the environment."""
    import prepare
    import train

    import numpy as np
    import torch

    device = prepare.DEVICE
    dtype = train.choose_dtype(device)
    if device.type == "cpu" and args.profile == "full":
        train.DEPTH = 1
        train.ASPECT_RATIO = 32
        train.HEAD_DIM = 32
    config = train.derive_config(prepare.VOCAB_SIZE)
    attention, attend = train.choose_attention(device, dtype, config)
    model = train.GPT(config, attend).to(device)
    train.initialise(model, dtype, 0)
    model = torch.compile(model, dynamic=False)

    T = prepare.MAX_SEQ_LEN
    count = args.rows or prepare.EVAL_TOKENS // T
    size = prepare.largest_divisor(count, min(args.batch, prepare.EVAL_BATCH))
    rng = np.random.default_rng(0)
    rows = rng.integers(0, prepare.VOCAB_SIZE, (count, T + 1), dtype=np.uint16)
    token_bytes = rng.integers(1, 9, prepare.VOCAB_SIZE, dtype=np.int32)
    batches = np.split(rows, count // size)

    def forward():
        for batch in batches:
            logits = model(torch.from_numpy(batch[:, :-1].astype(np.int64)).to(device))
        logits.flatten()[0].item()  # waits for a GPU

    def token_losses():
        losses = []
        for batch in batches:
            found = prepare.token_losses(model, batch[:, :-1], batch[:, 1:], token_bytes)
            losses.append(found)
        return np.concatenate(losses)

    def probes():
        prepare.probe(model, rows, losses, size, token_bytes, np.random.default_rng(0))

    def score():
        prepare.score(model, rows, token_bytes, args.batch, rng=0)

    parts = {
        "bare forward passes": forward,
        "losses of all rows": token_losses,
        "probes": probes,
        "score, which is both": score,
    }
    times = {name: [] for name in parts}
    model.eval()
    with torch.no_grad():
        losses = token_losses()  # compiles; the probes need them
        for _ in range(args.rounds):
            for name, part in parts.items():
                begun = perf_counter()
                part()
                times[name].append(perf_counter() - begun)
    print(
        f"\n{prepare.DEVICE_NAME}, {args.profile} profile, {count} rows of {T} tokens in "
        f"batches of {size}, depth {train.DEPTH}, width {config.n_embd}, attention {attention}, "
        f"median of {args.rounds}\n"
    )
    print_header("part", "seconds", "tokens/s", "ratio")
    base = median(times["bare forward passes"])
    for name, values in times.items():
        seconds = median(values)
        speed = "" if name == "probes" else f"{count * T / seconds:.0f}"
        print_row(name, f"{seconds:.3f}", speed, f"{seconds / base:.3f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("--profile", choices=("small", "medium", "full"), default="small")
    parser.add_argument("--rows", type=int, help="instead of the profile's number")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    os.environ["AUTORESEARCH_PROFILE"] = args.profile
    measure(args)


if __name__ == "__main__":
    main()
