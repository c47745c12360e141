"""
What a training step costs with all levers, without each, and without any.

    uv run benchmarks/step.py                                    # train.py's own settings
    uv run benchmarks/step.py --set DEPTH=6 TOTAL_BATCH_SIZE=8192
    uv run benchmarks/step.py --variants "as shipped" "without memory kept" --rounds 7
    uv run benchmarks/step.py --memory-gb 12                     # a smaller GPU: how many rows fit
    uv run benchmarks/step.py --profile                          # where the time of a step goes
    uv run benchmarks/step.py --attention                        # each back-end that loads here

Random tokens, no loader; medians of a step, its forward and backward passes and its update. Each
variant is a process of its own, the variants in turn; the ratio is the speed beside the first. A
value after --set is a Python literal. An error of attention is the largest of those of the output
and of three gradients, |got - want| / |want|, beside sdpa in fp32 on one row; its ratio is the speed
beside sdpa at the largest window.
"""

import argparse
import json
import os
import re
import resource
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median
from time import perf_counter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root of the repository
from benchmarks.common import (
    PARTS,
    RunError,
    build,
    import_train,
    last_words,
    print_header,
    print_row,
    set_knobs,
    take_step,
)

LEVERS = {"compile", "bf16", "attention chosen", "memory kept"}  # the last on a CPU
VARIANTS = {"plain": set(), "as shipped": LEVERS}  # name: the levers it has
VARIANTS |= {f"without {lever}": LEVERS - {lever} for lever in sorted(LEVERS)}


# ---- Variants ----
def build_with(levers, setting):
    """The Subject of this train.py with some of the levers."""
    import torch

    train = import_train()
    set_knobs(train, setting)
    if "compile" not in levers:
        train.COMPILE = False
    if "attention chosen" not in levers:
        train.ATTENTION = "sdpa"
    if "memory kept" not in levers:
        sys.modules["prepare"].keep_memory = lambda: None
    return build(train, None if "bf16" in levers else torch.float32)


def measure(levers, setting, steps, memory_gb=None):
    """A dictionary of what was measured, milliseconds and more."""
    import torch

    if memory_gb:
        total = torch.cuda.get_device_properties(0).total_memory / 2**30
        torch.cuda.set_per_process_memory_fraction(min(1.0, memory_gb / total))
    subject = build_with(levers, setting)
    train = subject.train
    prepare = sys.modules["prepare"]
    taken = zip(*(take_step(subject) for _ in range(steps)), strict=True)
    milliseconds = [1000 * median(seconds) for seconds in taken]
    speed = 1000 * train.TOTAL_BATCH_SIZE / milliseconds[0]
    peak = 1e12 * train.PEAK_TFLOPS.get(prepare.DEVICE_NAME, 0)
    memory = 2**10 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if subject.device.type == "cuda":
        memory = torch.cuda.max_memory_allocated()
    return {
        "milliseconds": milliseconds,  # in the order of PARTS
        "tokens_per_second": speed,
        "mfu": 100 * subject.model.flops_per_token() * speed / peak if peak else None,
        "peak_mb": memory / 2**20,
        "attention": subject.attention,
        "shape": f"{prepare.DEVICE_NAME}, depth {train.DEPTH}, width "
        f"{subject.model.config.n_embd}, {train.TOTAL_BATCH_SIZE} tokens per step, "
        f"{subject.rows} rows at a time",
    }


def measure_in_a_process(variant, args):
    """What `measure` returns. Raises RunError."""
    command = [sys.executable, __file__, "--variant", variant, "--steps", str(args.steps)]
    if args.memory_gb:
        command += ["--memory-gb", str(args.memory_gb)]
    command += ["--set", *args.set]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RunError(last_words(done.stdout + done.stderr))
    return json.loads(done.stdout.splitlines()[-1])


def print_variants(args):
    """A row per variant: of its rounds the one in the middle."""
    found = {variant: [] for variant in args.variants}
    failed = {}
    for _ in range(args.rounds):
        for variant in args.variants:
            try:
                found[variant].append(measure_in_a_process(variant, args))
            except RunError as failure:
                failed[variant] = failure
    columns = ("ms", *PARTS[1:], "tokens/s", "ratio", "MFU %", "peak MB", "attention")
    print_header("variant", *columns)
    base = None
    for variant, results in found.items():
        if variant in failed:
            print_row(variant, failed[variant], *[""] * (len(columns) - 1))
            continue
        results.sort(key=lambda result: result["tokens_per_second"])
        middle = results[len(results) // 2]
        speed = middle["tokens_per_second"]
        base = base or speed
        print_row(
            variant,
            *[f"{value:.0f}" for value in middle["milliseconds"]],
            f"{speed:.0f}",
            f"{speed / base:.2f}",
            f"{middle['mfu']:.1f}" if middle["mfu"] else "n/a",
            f"{middle['peak_mb']:.0f}",
            middle["attention"],
        )
    if base is None:
        raise SystemExit(1)
    print(f"\n{middle['shape']}, median of {args.steps} steps, of {args.rounds} processes")


# ---- Where the time goes ----
# Names of kernels and operators, of CPU and GPU. In the two passes every batched product is one of
# attention, and a softmax is too unless it is the loss's log_softmax.
ATTENTION = re.compile("(?<!log)_softmax|bmm|flash|fmha")
PRODUCT = re.compile("mm$|gemm|nvjet|cutlass|xmma")
NO_KERNEL = re.compile("^## Call|Torch-Compiled|CompiledFunction|TorchDynamo|AOTDispatcher|^cuda")


def median_seconds(function, times, device):
    """Of one call, with what it has queued on a GPU."""
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
    """FLOP/s of a large matrix product, here and now."""
    import torch

    size = 8192 if device.type == "cuda" else 2048
    a, b = torch.randn(2, size, size, device=device, dtype=dtype)
    return 2 * size**3 / median_seconds(lambda: a @ b, 9, device)


def where_time_goes(subject, steps):
    """{part of a step: milliseconds}, while the profiler looks on, which itself takes some."""
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
        return "products" if PRODUCT.search(name) else "other kernels: element-wise, norms, loss"

    def part_of_update(name):
        return "update: products" if PRODUCT.search(name) else "update: other kernels"

    for _ in range(steps):
        profiled(two_passes, part_of_passes)
        profiled(subject.optimizer.step, part_of_update)
    return found


def loader_milliseconds(subject):
    """Of the batches of a step, from the prepared text."""
    prepare = sys.modules["prepare"]
    tokenizer = prepare.Tokenizer.from_directory()
    batches = prepare.make_dataloader(tokenizer, subject.rows, prepare.MAX_SEQ_LEN)
    return 1000 * subject.micro_batches * median_seconds(lambda: next(batches), 50, subject.device)


def print_profile(args):
    # Names the kernels of a CPU; they are compiled anew for it.
    os.environ["TORCHINDUCTOR_CPP_ENABLE_KERNEL_PROFILE"] = "1"
    subject = build_with(LEVERS, args.set)
    seconds = median(take_step(subject)[0] for _ in range(args.steps))
    speed = subject.train.TOTAL_BATCH_SIZE / seconds
    dtype = subject.train.choose_dtype(subject.device)
    peak = measured_peak(subject.device, dtype)
    parts = where_time_goes(subject, args.steps)
    parts["loader"] = loader_milliseconds(subject)
    whole = sum(parts.values())
    print_header("part of a step", "ms", "ratio")
    for name, milliseconds in sorted(parts.items(), key=lambda part: -part[1]):
        print_row(name, f"{milliseconds:.1f}", f"{milliseconds / whole:.3f}")
    used = subject.model.flops_per_token() * speed
    print(
        f"\nwithout the profiler {1000 * seconds:.0f} ms per step, {speed:.0f} tokens/s: "
        f"{used / 1e9:.0f} GFLOP/s by the model's count, {used / peak:.3f} of what a large product "
        f"of {str(dtype).removeprefix('torch.')} does here, {peak / 1e9:.0f} GFLOP/s"
    )


# ---- Attention ----
def forward_and_backward(attend, q, k, v, grad, window):
    """The output and three gradients."""
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
    """{(back-end, window): (error, milliseconds)}; prints why a back-end does not load."""
    import torch

    device = sys.modules["prepare"].DEVICE
    dtype = train.choose_dtype(device)
    heads = train.derive_config(1).n_head

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
            except Exception as failure:  # anything may come from a foreign kernel
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
    parser.add_argument("--rounds", type=int, default=1, help="processes per variant (1)")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--memory-gb", type=float, help="limit of GPU memory")
    parser.add_argument("--profile", action="store_true", help="where the time of a step goes")
    parser.add_argument("--attention", action="store_true", help="speed and error of back-ends")
    parser.add_argument("--variant", choices=VARIANTS, help="measure one here and print JSON")
    args = parser.parse_args()
    if args.variant:
        print(json.dumps(measure(VARIANTS[args.variant], args.set, args.steps, args.memory_gb)))
    elif args.profile:
        print_profile(args)
    elif args.attention:
        print_attention(args)
    else:
        print_variants(args)


if __name__ == "__main__":
    main()
