"""
Every rung of the attention ladder that loads here, forward and backward, against the fp32 reference and in milliseconds.

    uv run benchmarks/attention.py                       # the shapes of this machine's profile
    uv run benchmarks/attention.py --rows 64 --tokens 2048 --heads 4 --head-dim 128 --windows 256 1024 2048

The error is that of the worst of output and three gradients, |got - reference| / |reference|, on one row; the ratio is
to scaled_dot_product_attention at the full window.
"""

import argparse
import sys
from pathlib import Path
from statistics import median
from time import perf_counter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def main():
    import train
    from prepare import by_profile

    import torch

    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("--rows", type=int, default=by_profile(full=64, small=8))
    parser.add_argument("--tokens", type=int, default=train.MAX_SEQ_LEN)
    parser.add_argument("--heads", type=int, default=by_profile(full=4, small=3))
    parser.add_argument("--kv-heads", type=int, help="as many as heads")
    parser.add_argument("--head-dim", type=int, default=train.HEAD_DIM)
    parser.add_argument(
        "--windows", type=int, nargs="+", default=by_profile(full=[256, 1024, 2048], small=[64, 128, 512])
    )
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    device, name, dtype, _ = train.choose_device()
    kv_heads, T = args.kv_heads or args.heads, args.tokens

    def tensors(rows):
        shapes = [(rows, T, heads, args.head_dim) for heads in (args.heads, kv_heads, kv_heads, args.heads)]
        return [torch.randn(shape, device=device, dtype=dtype, requires_grad=i < 3) for i, shape in enumerate(shapes)]

    def both(attention, q, k, v, grad, window):
        out = attention(q, k, v, window)
        return out, *torch.autograd.grad(out, (q, k, v), grad.to(out.dtype))

    def timed(attention, window):
        """(error, median milliseconds of forward and backward)."""
        single = tensors(1)
        pairs = zip(both(attention, *single, window), both(train.reference_attention, *single, window), strict=True)
        error = max(((got.float() - want.float()).norm() / want.float().norm()).item() for got, want in pairs)
        many, times = tensors(args.rows), []
        for _ in range(args.rounds + 3):
            begun = perf_counter()
            both(attention, *many, window)
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append(1000 * (perf_counter() - begun))
        return error, median(times[3:])

    results = {}
    print(f"{name}, {str(dtype).removeprefix('torch.')}, B {args.rows}, T {T}, heads {args.heads} of {args.head_dim}, key and "
          f"value heads {kv_heads}, torch {torch.__version__}, median of {args.rounds}\n")  # fmt: skip
    for rung, load in train.LADDER.items():
        for window in args.windows:
            torch._dynamo.reset()
            config = train.Config(train.prepare.VOCAB_SIZE, T, args.heads, kv_heads, args.head_dim, (window,))
            try:
                results[rung, window] = timed(torch.compile(load(device, config), dynamic=False), window)
            except Exception as error:  # a rung that fails here is a row of the table
                print(f"{rung}: {(str(error).strip() or type(error).__name__).splitlines()[0][:160]}")
                break
    base = results["sdpa", max(args.windows)][1]
    print("\n| rung | window | ms, forward and backward | ratio | error |\n|---|---|---|---|---|")
    for (rung, window), (error, milliseconds) in results.items():
        print(f"| {rung} | {window} | {milliseconds:.2f} | {base / milliseconds:.2f} | {error:.4f} |")


if __name__ == "__main__":
    main()
