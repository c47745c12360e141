"""
What a training step costs, with all levers, without each, and without any: a row a variant, each in its own process.

    uv run benchmarks/step.py                                      # train.py's own settings
    uv run benchmarks/step.py --set LOSS_CHUNK=1024 TOTAL_BATCH_SIZE=8192
    uv run benchmarks/step.py --memory-gb 8 12 16 24               # on a GPU: the rows that its back-off finds to fit
    uv run benchmarks/step.py --run plain                          # a whole run without the levers: what they are worth

Random tokens, no loader; the median step, forward, backward and update.
"""

import argparse
import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from time import perf_counter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

# Levers that a variant goes without. "plain" goes without all: eager fp32, a loss over all logits at once.
VARIANTS = {
    "plain": ("compile", "bf16", "attention", "chunked loss", "memory kept"),
    "plain, but compiled": ("bf16", "attention", "chunked loss", "memory kept"),
    "plain, but bf16": ("compile", "attention", "chunked loss", "memory kept"),
    "without compile": ("compile",),
    "without bf16": ("bf16",),
    "without train.py's choice of attention": ("attention",),
    "without chunked loss": ("chunked loss",),
    "without memory kept": ("memory kept",),
    "as shipped": (),
}


def prepared(without, settings):
    """The module train with levers taken away: (train, torch, device, name, dtype)."""
    import train

    import torch

    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(train.prepare.CACHE / "inductor"))
    for name, value in (item.split("=", 1) for item in settings):
        assert hasattr(train, name), f"train.py has no knob {name}"
        setattr(train, name, ast.literal_eval(value))
    if (
        "memory kept" in without
    ):  # the allocator's behaviour on a CPU cannot be taken back: choose_device must not set it
        train.ctypes = type("ctypes", (), {"CDLL": staticmethod(lambda _: None)})
    device, name, dtype, _ = train.choose_device()
    if "compile" in without:
        train.COMPILE = False
    if "attention" in without:
        train.ATTENTION = "sdpa"
    if "chunked loss" in without:
        forward = train.GPT.forward
        train.GPT.forward = lambda self, idx, targets=None: (
            forward(self, idx) if targets is None else forward(self, idx, targets, "none").mean()
        )
    return train, torch, device, name, torch.float32 if "bf16" in without else dtype


def measure(without, settings, steps, memory_gb=None):
    """One variant, in this process: a dictionary."""
    train, torch, device, name, dtype = prepared(without, settings)
    if memory_gb:
        total = torch.cuda.get_device_properties(device).total_memory / 2**30
        torch.cuda.set_per_process_memory_fraction(min(1.0, memory_gb / total))
    config = train.derive_config(train.prepare.VOCAB_SIZE)
    rung, attend = train.choose_attention(device, dtype, config)
    model = train.GPT(config, attend).to(device)
    callable_model, optimizer, rows = train.warm_up(model, dtype, train.prepare.EVAL_TOKENS // train.MAX_SEQ_LEN)
    micro = train.accumulation_steps(rows)

    def wait():
        if device.type == "cuda":
            torch.cuda.synchronize()
        return perf_counter()

    inputs, targets = torch.randint(config.vocab_size, (2, rows, train.MAX_SEQ_LEN), device=device)
    parts = []
    for _ in range(steps):
        forward = backward = 0.0
        for _ in range(micro):
            begun = wait()
            loss = callable_model(inputs, targets)
            middle = wait()
            (loss / micro).backward()
            end = wait()
            forward, backward = forward + middle - begun, backward + end - middle
        optimizer.step()
        parts.append((forward, backward, wait() - end))
    matrices = sum(p.numel() for p in (*model.blocks.parameters(), model.lm_head.weight))
    flops, peak = config.flops_per_token(matrices) * train.TOTAL_BATCH_SIZE, train.peak_flops(name)
    seconds = median(map(sum, parts))
    return {
        "seconds": seconds, "forward": median(p[0] for p in parts), "backward": median(p[1] for p in parts),
        "update": median(p[2] for p in parts), "tokens": train.TOTAL_BATCH_SIZE, "rows": rows, "device": name,
        "attention": rung, "mfu": 100 * flops / seconds / peak if peak else None, "memory": train.peak_memory_mb(device),
        "depth": train.DEPTH, "width": config.n_embd,
    }  # fmt: skip


def in_a_process(*arguments):
    """What `measure` returns, or the last line of what went wrong."""
    done = subprocess.run([sys.executable, __file__, *map(str, arguments)], capture_output=True, text=True)
    if done.returncode:
        return (done.stderr or done.stdout).strip().splitlines()[-1]
    return json.loads(done.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("--set", nargs="*", default=[], metavar="KNOB=value")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=1, help="processes a variant; the median counts (1)")
    parser.add_argument("--memory-gb", type=float, nargs="*", default=[])
    parser.add_argument("--variant", choices=VARIANTS, help="measure this one here and print JSON")
    parser.add_argument("--run", choices=VARIANTS, help="a whole run of train.py, data, clock and score included")
    args = parser.parse_args()
    common = ["--steps", args.steps, "--set", *args.set]
    if args.run:
        train, _, device, name, dtype = prepared(VARIANTS[args.run], args.set)
        train.choose_device = lambda: (device, name, dtype, args.run)
        return train.main()
    if args.variant:
        limit = args.memory_gb[0] if args.memory_gb else None
        return print(json.dumps(measure(VARIANTS[args.variant], args.set, args.steps, limit)))
    if args.memory_gb:
        print("| GB | rows at a time | tokens/s | allocated MB | reserved MB |\n|---|---|---|---|---|")
        for limit in args.memory_gb:
            found = in_a_process("--variant", "as shipped", "--memory-gb", limit, *common)
            if isinstance(found, str):
                print(f"| {limit:g} | {found} | | | |", flush=True)
                continue
            rate, (allocated, reserved) = found["tokens"] / found["seconds"], found["memory"]
            print(f"| {limit:g} | {found['rows']} | {rate:.0f} | {allocated:.0f} | {reserved:.0f} |", flush=True)
        return None
    print(
        "| variant | ms | forward | backward | update | tokens/s | ratio | MFU % | peak MB | attention |\n"
        + "|---" * 10
        + "|"
    )
    plain = None
    for variant in VARIANTS:
        results = [in_a_process("--variant", variant, *common) for _ in range(args.rounds)]
        if failed := [result for result in results if isinstance(result, str)]:
            print(f"| {variant} | {failed[0]} |" + " |" * 8, flush=True)
            continue
        found = sorted(results, key=lambda result: result["seconds"])[len(results) // 2]
        plain = plain or found["seconds"]
        columns = [f"{1000 * found[key]:.0f}" for key in ("seconds", "forward", "backward", "update")]
        columns += [f"{found['tokens'] / found['seconds']:.0f}", f"{plain / found['seconds']:.2f}"]
        columns += [f"{found['mfu']:.1f}" if found["mfu"] else "n/a", f"{found['memory'][0]:.0f}", found["attention"]]
        print(f"| {variant} | " + " | ".join(columns) + " |", flush=True)
    print(f"\n{found['device']}, depth {found['depth']}, width {found['width']}, {found['tokens']} tokens a step in rows of "
          f"{found['rows']} at a time, median of {args.steps} steps, {args.rounds} processes")  # fmt: skip
    return None


if __name__ == "__main__":
    main()
