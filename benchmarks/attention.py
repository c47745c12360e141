"""
Every attention back-end that loads here, forward and backward: milliseconds, and the error beside
sdpa in fp32.

    uv run benchmarks/attention.py                       # the shapes of this machine's profile
    uv run benchmarks/attention.py --rows 64 --tokens 2048 --heads 4 --head-dim 128 \
        --windows 256 1024 2048

The error is the largest of those of the output and of three gradients, |got - want| / |want|, on
one row. The ratio is the speed beside sdpa at the largest window.
"""

import argparse
import sys
from pathlib import Path
from statistics import median
from time import perf_counter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root of the repository
import prepare
import train
from benchmarks.common import print_header, print_row

import torch

WARM_ROUNDS = 3


def random_tensors(shape, device, dtype):
    """q, k and v [B, T, H, D], which take gradients, and the gradient of the output."""
    tensors = [torch.randn(shape, device=device, dtype=dtype) for _ in range(4)]
    for tensor in tensors[:3]:
        tensor.requires_grad_()
    return tensors


def forward_and_backward(attention, q, k, v, grad, window):
    """The output and three gradients."""
    out = attention(q, k, v, window)
    return [out, *torch.autograd.grad(out, (q, k, v), grad.to(out.dtype))]


def largest_error(attention, tensors, window):
    results = forward_and_backward(attention, *tensors, window)
    wanted = forward_and_backward(train.attend_sdpa, *(x.float() for x in tensors), window)
    errors = []
    for got, want in zip(results, wanted, strict=True):
        difference = got.float() - want.float()
        errors.append((difference.norm() / want.float().norm()).item())
    return max(errors)


def time_attention(attention, tensors, window, rounds):
    """Median milliseconds."""
    times = []
    for _ in range(WARM_ROUNDS + rounds):
        begun = perf_counter()
        forward_and_backward(attention, *tensors, window)
        if tensors[0].is_cuda:
            torch.cuda.synchronize()
        times.append(1000 * (perf_counter() - begun))
    return median(times[WARM_ROUNDS:])


def measure(args, device, dtype):
    """{(name, window): (error, milliseconds)}; prints why a back-end does not load."""
    single = random_tensors((1, args.tokens, args.heads, args.head_dim), device, dtype)
    many = random_tensors((args.rows, args.tokens, args.heads, args.head_dim), device, dtype)
    results = {}
    for name, load in train.BACKENDS.items():
        for window in args.windows:
            torch._dynamo.reset()
            try:
                attention = torch.compile(load(), dynamic=False)
                error = largest_error(attention, single, window)
                milliseconds = time_attention(attention, many, window, args.rounds)
            except Exception as failure:  # anything may come from a foreign kernel
                reason = (str(failure).strip() or type(failure).__name__).splitlines()[0]
                print(f"{name}: {reason[:160]}")
                break
            results[name, window] = (error, milliseconds)
    return results


def parse_arguments():
    by_profile = prepare.by_profile
    windows = by_profile(full=[256, 1024, 2048], medium=[256, 1024, 2048], small=[64, 128, 512])
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("--rows", type=int, default=by_profile(full=64, medium=16, small=8))
    parser.add_argument("--tokens", type=int, default=prepare.MAX_SEQ_LEN)
    parser.add_argument("--heads", type=int, default=by_profile(full=4, medium=4, small=3))
    parser.add_argument("--head-dim", type=int, default=train.HEAD_DIM)
    parser.add_argument("--windows", type=int, nargs="+", default=windows)
    parser.add_argument("--rounds", type=int, default=20)
    return parser.parse_args()


def main():
    args = parse_arguments()
    device = prepare.DEVICE
    dtype = train.choose_dtype(device)
    print(
        f"{prepare.DEVICE_NAME}, {str(dtype).removeprefix('torch.')}, "
        f"{args.rows} rows of {args.tokens} tokens, {args.heads} heads of {args.head_dim}, "
        f"torch {torch.__version__}, median of {args.rounds}\n"
    )
    results = measure(args, device, dtype)
    _, base = results["sdpa", max(args.windows)]
    print()
    print_header("back-end", "window", "ms, forward and backward", "ratio", "error")
    for (name, window), (error, milliseconds) in results.items():
        ratio = base / milliseconds
        print_row(name, window, f"{milliseconds:.2f}", f"{ratio:.2f}", f"{error:.4f}")


if __name__ == "__main__":
    main()
