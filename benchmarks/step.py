"""
Shows where the time of a training step goes, and how fast each attention back-end is.

    uv run benchmarks/step.py                                    # train.py's own settings
    uv run benchmarks/step.py --set DEPTH=6 TOTAL_BATCH_SIZE=8192
    uv run benchmarks/step.py --attention                        # each back-end that loads here

Tokens are random; a value after --set is a Python literal. The ratio is a part's share of a step.
For attention, the error is the largest |got - want| / |want| of the output and three gradients,
against sdpa in fp32 on one row; the ratio is the speed relative to sdpa with the largest window.
benchmarks/compare.py --steps compares settings, for example `. .:COMPILE=False`.
"""

import argparse
import os
import re
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median
from time import perf_counter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root of the repository
from benchmarks.common import (
    build,
    import_train,
    print_header,
    print_row,
    set_knobs,
    take_step,
    update_and_clear,
)

# ---- Where the time goes ----
# Names of kernels and operators on CPU and GPU. In the two passes every batched matmul belongs to
# attention, and so does every softmax except the loss's log_softmax.
ATTENTION = re.compile("(?<!log)_softmax|bmm|flash|fmha")
MATMUL = re.compile("mm$|gemm|nvjet|cutlass|xmma")
NO_KERNEL = re.compile("^## Call|Torch-Compiled|CompiledFunction|TorchDynamo|AOTDispatcher|^cuda")


def median_seconds(function, times, device):
    """Returns the median time of a call, including what it queues on a GPU."""
    import torch

    seconds = []
    for _ in range(times):
        begun = perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(perf_counter() - begun)
    return median(seconds)


def measured_peak(device, dtype):
    """Measures the FLOP/s of a large matmul."""
    import torch

    size = 8192 if device.type == "cuda" else 2048
    a, b = torch.randn(2, size, size, device=device, dtype=dtype)
    return 2 * size**3 / median_seconds(lambda: a @ b, 9, device)


def where_time_goes(subject, steps):
    """Returns {part of a step: milliseconds}, including the profiler's own time."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    on_gpu = subject.device.type == "cuda"
    activities = [ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]
    found = defaultdict(float)

    def two_passes():
        for _ in range(subject.micro_batches):
            subject.compiled_model(*subject.batch).backward()

    def profiled(function, name_of_part):
        with profile(activities=activities) as profiler:
            begun = perf_counter()
            function()
            if on_gpu:
                torch.cuda.synchronize()
            rest = 1000 * (perf_counter() - begun)
        for event in profiler.key_averages():
            if not NO_KERNEL.search(event.key):
                time = event.self_device_time_total if on_gpu else event.self_cpu_time_total
                found[name_of_part(event.key)] += time / 1000 / steps
                rest -= time / 1000
        found["no kernel: Python, launching"] += rest / steps

    def part_of_passes(name):
        if ATTENTION.search(name):
            return "attention"
        return "matmuls" if MATMUL.search(name) else "other kernels: element-wise, norms, loss"

    def part_of_update(name):
        return "update: matmuls" if MATMUL.search(name) else "update: other kernels"

    for _ in range(steps):
        profiled(two_passes, part_of_passes)
        profiled(lambda: update_and_clear(subject), part_of_update)
    return found


def loader_milliseconds(subject):
    """Times loading a step's batches of prepared text."""
    prepare = sys.modules["prepare"]
    tokenizer = prepare.Tokenizer.from_directory()
    batches = prepare.make_dataloader(tokenizer, subject.rows, prepare.MAX_SEQ_LEN)
    return 1000 * subject.micro_batches * median_seconds(lambda: next(batches), 50, subject.device)


def print_profile(args):
    # Gives CPU kernels names, for which they must be compiled again.
    os.environ["TORCHINDUCTOR_CPP_ENABLE_KERNEL_PROFILE"] = "1"
    os.environ["KINETO_LOG_LEVEL"] = "6"  # or the profiler prints two lines each time
    import torch

    train = import_train()
    set_knobs(train, args.set)
    subject = build(train)
    seconds = median(take_step(subject)[0] for _ in range(args.steps))
    speed = train.TOTAL_BATCH_SIZE / seconds
    dtype = train.choose_dtype(subject.device)
    peak = measured_peak(subject.device, dtype)
    memory = ""
    if subject.device.type == "cuda":
        memory = f", {torch.cuda.max_memory_allocated() / 2**20:.0f} MB"
    parts = where_time_goes(subject, args.steps)
    parts["loader"] = loader_milliseconds(subject)
    whole = sum(parts.values())
    print_header("part of a step", "ms", "ratio")
    for name, milliseconds in sorted(parts.items(), key=lambda part: -part[1]):
        print_row(name, f"{milliseconds:.1f}", f"{milliseconds / whole:.3f}")
    used = subject.model.flops_per_token() * speed
    print(
        f"\n{sys.modules['prepare'].DEVICE_NAME}, attention {subject.attention}, {subject.rows} "
        f"rows at a time{memory}; without the profiler {1000 * seconds:.0f} ms per step, "
        f"{speed:.0f} tokens/s: {used / 1e9:.0f} GFLOP/s by the model's count, "
        f"{used / peak:.3f} of what a large {str(dtype).removeprefix('torch.')} matmul does here, "
        f"{peak / 1e9:.0f} GFLOP/s"
    )


# ---- Attention ----
def forward_and_backward(attend, q, k, v, grad, window):
    """Returns the output and three gradients."""
    import torch

    out = attend(q, k, v, window)
    return [out, *torch.autograd.grad(out, (q, k, v), grad.to(out.dtype))]


def largest_error(train, attend, tensors, window):
    results = forward_and_backward(attend, *tensors, window)
    wanted = forward_and_backward(train.attend_sdpa, *(x.float() for x in tensors), window)
    errors = []
    for got, want in zip(results, wanted, strict=True):
        difference = got.float() - want.float()
        errors.append((difference.norm() / want.float().norm()).item())
    return max(errors)


def measure_attention(train, rows, windows, steps):
    """Returns {(back-end, window): (error, milliseconds)}. Prints why a back-end does not load."""
    import torch

    device = sys.modules["prepare"].DEVICE
    dtype = train.choose_dtype(device)
    heads = train.derive_config(1, dtype).n_head

    def random_tensors(rows):
        shape = (rows, train.MAX_SEQ_LEN, heads, train.HEAD_DIM)
        tensors = [torch.randn(shape, device=device, dtype=dtype) for _ in range(4)]
        return [x.requires_grad_() for x in tensors[:3]] + tensors[3:]

    single = random_tensors(1)
    many = random_tensors(rows)
    found = {}
    for name, load in train.BACKENDS.items():
        for window in windows:
            torch._dynamo.reset()
            try:
                attend = torch.compile(load(), dynamic=False)
                error = largest_error(train, attend, single, window)
                forward_and_backward(attend, *many, window)  # compiles
                seconds = median_seconds(
                    lambda attend=attend, window=window: forward_and_backward(
                        attend, *many, window
                    ),
                    steps,
                    device,
                )
            except Exception as failure:  # a foreign kernel may raise anything
                reason = (str(failure).strip() or type(failure).__name__).splitlines()[0]
                print(f"{name}: {reason[:160]}")
                break
            found[name, window] = (error, 1000 * seconds)
    return found


def print_attention(args):
    train = import_train()
    set_knobs(train, args.set)
    rows = train.DEVICE_BATCH_SIZE
    windows = sorted({train.SHORT_WINDOW // 2, train.SHORT_WINDOW, train.MAX_SEQ_LEN})
    found = measure_attention(train, rows, windows, args.steps)
    _, base = found["sdpa", train.MAX_SEQ_LEN]
    print(f"\n{rows} rows of {train.MAX_SEQ_LEN} tokens, median of {args.steps}\n")
    print_header("back-end", "window", "ms, forward and backward", "ratio", "error")
    for (name, window), (error, milliseconds) in found.items():
        ratio = base / milliseconds
        print_row(name, window, f"{milliseconds:.2f}", f"{ratio:.2f}", f"{error:.4f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("--set", nargs="*", default=[], metavar="KNOB=value")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--attention", action="store_true", help="speed and error of back-ends")
    args = parser.parse_args()
    if args.attention:
        print_attention(args)
    else:
        print_profile(args)


if __name__ == "__main__":
    main()
