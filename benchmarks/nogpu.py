"""
Examines train.py's CUDA path for a card that is not there: kernels, launches, memory.

    uv run benchmarks/nogpu.py                          # seven cards, about a minute each
    uv run benchmarks/nogpu.py sm_86 --memory 8 16      # only the memory of steps of 8 and 16 rows
    AUTORESEARCH_PROFILE=full uv run benchmarks/nogpu.py sm_90 --rung varlen

torch is made to believe that the card exists, which also chooses the profile, and all tensors are
fakes, which have a shape but no values. The training step, both optimizers and the forward pass of
an evaluation are traced, differentiated and lowered as on a GPU; Triton compiles each kernel for
the card, with the assembler in its own wheel. The generated code runs on the fakes, so that
launches are counted and live memory is added up. The last lines give a verdict per card; the exit
code is 1 if anything failed.

It needs no GPU, driver or C compiler. It cannot see numerics, speed, attention's own kernels and
their workspace, fragmentation or drivers. FlashAttention 3 is a stand-in with the real interface;
FlashAttention 4 is compiled for sm_90 and sm_100, with --rung fa4, where its package is installed.
"""

import argparse
import contextlib
import ctypes
import os
import sys
import tempfile
import types
import warnings
import weakref
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the root of the repository
from benchmarks.common import print_header, print_row

GIB = 2**30
COLUMNS = ("rung", "rows", "kernels", "breaks", "launches", "GiB in a step", "in evaluation")


@dataclass(frozen=True)
class Card:
    name: str
    capability: tuple
    processors: int
    shared: int  # KiB of shared memory that a block may use
    threads: int  # per processor
    memory: int  # GiB


CARDS = {
    "sm_75": Card("Tesla T4", (7, 5), 40, 64, 1024, 16),
    "sm_80": Card("NVIDIA A100-SXM4-80GB", (8, 0), 108, 163, 2048, 80),
    "sm_86": Card("NVIDIA GeForce RTX 3060", (8, 6), 28, 99, 1536, 12),
    "sm_89": Card("NVIDIA GeForce RTX 4090", (8, 9), 128, 99, 1536, 24),
    "sm_90": Card("NVIDIA H100 80GB HBM3", (9, 0), 132, 227, 2048, 80),
    "sm_100": Card("NVIDIA B200", (10, 0), 148, 227, 2048, 180),
    "sm_120": Card("NVIDIA GeForce RTX 5090", (12, 0), 170, 99, 1536, 32),
}


# ---- A card that is not there ----
def pretend_card(card):
    """Makes torch.cuda answer as on a machine with this card."""
    import torch
    from torch._dynamo.device_interface import CudaInterface
    from torch._subclasses import fake_tensor

    properties = SimpleNamespace(
        name=card.name,
        major=card.capability[0],
        minor=card.capability[1],
        total_memory=card.memory * GIB,
        multi_processor_count=card.processors,
        warp_size=32,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=card.threads,
        max_threads_per_block=1024,
        shared_memory_per_block=48 * 1024,
        shared_memory_per_block_optin=card.shared * 1024,
        shared_memory_per_multiprocessor=(card.shared + 1) * 1024,
        L2_cache_size=50 * 2**20,
        gcnArchName="",
        is_integrated=0,
        is_multi_gpu_board=0,
        uuid="none",
    )

    stream = SimpleNamespace(cuda_stream=0, stream_id=0)
    answers = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: card.capability[0] >= 8,
        "is_current_stream_capturing": lambda: False,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "current_stream": lambda device=None: stream,
        "set_device": lambda device: None,
        "_exchange_device": lambda device: 0,
        "_maybe_exchange_device": lambda device: 0,
        "_lazy_init": lambda: None,
        "_DeviceGuard": contextlib.nullcontext,
        "device": contextlib.nullcontext,
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: card.capability,
        "get_device_name": lambda device=None: card.name,
        "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda state, device=None: None,
        "memory_allocated": lambda device=None: 0,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
    }
    number = 10 * card.capability[0] + card.capability[1]
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
        own = name.removeprefix("_")
        if hasattr(CudaInterface, own):  # it copied torch.cuda's when it was imported
            setattr(CudaInterface, own, answer if own == "device" else staticmethod(answer))
    CudaInterface.get_raw_stream = staticmethod(lambda device: 0)
    CudaInterface.get_compute_capability = staticmethod(lambda device=None: number)
    CudaInterface.Worker.get_device_properties = staticmethod(lambda device=None: properties)
    CudaInterface.Worker.current_device = staticmethod(lambda: 0)
    torch._C._cuda_getCurrentRawStream = lambda device: 0
    torch._C._cuda_getDevice = lambda: 0
    torch.backends.cudnn.version = lambda: 92600
    fake_tensor.init_gpu_context = lambda device: None
    fake_tensor.FakeTensorMode.avoid_device_init = property(lambda self: True)
    deny_context()
    pretend_driver(card, number)


def deny_context():
    """Makes the fifth virtual function of torch's CUDA hooks return False. Autograd calls it to ask
    whether the card has a context; without a GPU the original raises."""
    import torch

    library = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"))
    get_hooks = library._ZN2at6detail12getCUDAHooksEv  # at::detail::getCUDAHooks()
    get_hooks.restype = ctypes.c_void_p
    hooks = ctypes.cast(get_hooks(), ctypes.POINTER(ctypes.c_void_p))
    header = 2  # entries before the first function
    old = ctypes.cast(hooks[0] - 8 * header, ctypes.POINTER(ctypes.c_void_p))
    table = (ctypes.c_void_p * 96)(*old[:90])
    says_no = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_byte)(lambda *_: False)
    table[header + 4] = ctypes.cast(says_no, ctypes.c_void_p)
    hooks[0] = ctypes.addressof(table) + 8 * header
    deny_context.kept = (table, says_no)  # torch holds the addresses


def pretend_driver(card, number):
    import torch
    from torch._inductor.runtime import triton_helpers
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    known = {
        "max_shared_mem": card.shared * 1024,
        "multiprocessor_count": card.processors,
        "warpSize": 32,
    }

    class Driver:
        utils = SimpleNamespace(get_device_properties=lambda device: known, CudaLauncher=None)

        def get_current_target(self):
            return GPUTarget("cuda", number, 32)

        def get_current_device(self):
            return 0

        def get_current_stream(self, device=None):
            return 0

        def get_active_torch_device(self):
            return torch.device("cuda", 0)

        def get_device_interface(self):
            return torch.cuda

    driver.set_active(Driver())
    triton_helpers.set_driver_to_gpu = lambda: None


# ---- Kernels ----
@dataclass
class Kernel:
    name: str
    compiled: list  # per configuration, Triton's result or the exception
    launches: int = 0

    def run(self, *arguments, **options):
        """Counts a launch instead of launching."""
        self.launches += 1


def collect_kernels(compile_them):
    """Makes inductor put its Triton kernels into the list that this returns, and the generated code
    allocate fakes."""
    import torch
    from torch._inductor import async_compile, config

    config.compile_threads = 1
    config.joint_graph_constant_folding = False  # it would make tensors on the card
    config.shape_padding = False  # it would time matmuls there
    config.force_disable_caches = True
    kernels = []
    known = {}  # source without the name: results

    def compiled(name, source):
        if not compile_them:
            return []
        key = source.replace(name, "kernel")
        if key not in known:
            kernel = async_compile._load_triton_kernel_from_source(name, source)
            known[key] = []
            for configuration in kernel.configs:
                try:
                    result = kernel._precompile_config(configuration).kernel
                except Exception as error:  # report whatever a compiler raises
                    result = error
                known[key].append(result)
        return known[key]

    def triton(self, kernel_name, source_code, device_str="cuda"):
        kernels.append(Kernel(kernel_name, compiled(kernel_name, source_code)))
        return kernels[-1]

    async_compile.AsyncCompile.triton = triton
    async_compile.AsyncCompile.wait = lambda self, scope: None
    async_compile.AsyncCompile.use_process_pool = classmethod(lambda cls: False)

    def view(tensor, size, stride, offset=0):
        return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)

    guards = torch._C._dynamo.guards
    guards._empty_strided_cuda = lambda size, stride, dtype: torch.empty_strided(
        size, stride, dtype=dtype, device="cuda:0"
    )
    guards._reinterpret_tensor = view
    for check in ("assert_size_stride", "assert_size_stride_grouped", "assert_alignment"):
        setattr(guards, check, lambda *arguments, **options: None)
    return kernels


# ---- FlashAttention 3, by its interface ----
def fa3_stand_in():
    """Returns a module whose flash_attn_func is a custom operator with a fake and a gradient."""
    import torch

    @torch.library.custom_op("nogpu::fa3_forward", mutates_args=())
    def forward(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError

    @forward.register_fake
    def _(q, k, v, window):
        B, T, H, D = q.shape
        assert k.shape == v.shape == (B, T, k.shape[2], D) and H % k.shape[2] == 0
        assert q.dtype == k.dtype == v.dtype == torch.bfloat16 and q.stride(-1) == 1
        return torch.empty_like(q), q.new_empty(B, H, T, dtype=torch.float32)

    @torch.library.custom_op("nogpu::fa3_backward", mutates_args=())
    def backward(
        grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lse: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        raise NotImplementedError

    @backward.register_fake
    def _(grad, q, k, v, lse):
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)

    def setup_context(ctx, inputs, output):
        q, k, v, _ = inputs
        ctx.save_for_backward(q, k, v, output[1])

    def gradient(ctx, grad, grad_lse):
        q, k, v, lse = ctx.saved_tensors
        return *backward(grad.contiguous(), q, k, v, lse), None

    forward.register_autograd(gradient, setup_context=setup_context)

    def flash_attn_func(q, k, v, causal=False, window_size=(-1, -1)):
        assert causal
        return forward(q, k, v, list(window_size))[0]

    return SimpleNamespace(flash_attn_func=flash_attn_func, __file__="stand-in")


def check_varlen():
    """Makes varlen_attn check its arguments, since torch's fake accepts more than the kernel."""
    import torch
    from torch.nn.attention import varlen

    attention = varlen.varlen_attn

    def checked(q, k, v, ends_q, ends_k, max_q, max_k, **options):
        for ends in (ends_q, ends_k):
            assert ends.dtype == torch.int32, f"ends of rows are int32, not {ends.dtype}"
        assert q.dtype == k.dtype == v.dtype == torch.bfloat16
        assert q.shape[1] % k.shape[1] == 0 and k.shape == v.shape
        return attention(q, k, v, ends_q, ends_k, max_q, max_k, **options)

    varlen.varlen_attn = checked


# ---- FlashAttention 4, by its compiler ----
def compile_fa4(config, rows):
    """Compiles its kernels for each window, forward and backward. The step does not: for fakes,
    varlen_attn answers without calling a kernel."""
    import prepare
    import train

    import torch
    from torch.nn.attention import _fa4

    T = prepare.MAX_SEQ_LEN
    heads = (config.n_head, config.n_kv_head, config.n_kv_head, config.n_head)
    shapes = [(rows * T, count, config.head_dim) for count in heads]
    q, k, v, grad = (torch.empty(s, dtype=torch.bfloat16, device="cuda") for s in shapes)
    warnings.filterwarnings("ignore", "Argument aux_data ")  # its compiler's, once per kernel
    ends = torch.empty(rows + 1, dtype=torch.int32, device="cuda")
    lengths = (ends, ends, T, T, 0.0, False)
    for window in sorted(set(config.windows)):
        left, right = train.window_size(window, T)
        sides = {"window_size_left": left, "window_size_right": right}
        out, lse, *_ = _fa4._fa4_flash_attention_forward_impl(q, k, v, *lengths, False, **sides)
        tensors = (grad, q, k, v, out, lse)
        _fa4._fa4_flash_attention_backward_impl(*tensors, *lengths, None, None, **sides)


# ---- One card ----
class Meter:
    """While `mode` is entered, sums the live memory on the card, in the allocator's blocks of 512
    bytes."""

    def __init__(self):
        import torch
        from torch.utils._python_dispatch import TorchDispatchMode

        self.live = {}
        self.now = 0
        self.peak = 0
        meter = self

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                out = func(*args, **(kwargs or {}))
                torch.utils._pytree.tree_map_only(torch.Tensor, meter.see, out)
                return out

            @classmethod
            def is_infra_mode(cls):
                return True

        self.mode = Mode()

    def see(self, tensor):
        storage = tensor.untyped_storage()
        if tensor.device.type != "cuda" or storage._cdata in self.live:
            return
        size = -(-storage.nbytes() // 512) * 512
        self.live[storage._cdata] = size
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self.forget, storage._cdata)

    def forget(self, key):
        self.now -= self.live.pop(key)


def to_card(model):
    """Replaces parameters and buffers with fakes on the card."""
    import torch

    def fake(tensor):
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda")

    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:
                module._parameters[name] = torch.nn.Parameter(fake(p))
        for name, buffer in module._buffers.items():
            module._buffers[name] = fake(buffer)


def examine(name, rungs, rows):
    """Returns the facts about one card, and what is wrong; without `rows` its kernels are compiled,
    too. Call it once per process, since it patches torch."""
    scratch = tempfile.TemporaryDirectory(prefix="nogpu-", ignore_cleanup_errors=True)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = scratch.name
    os.environ["TRITON_CACHE_DIR"] = f"{scratch.name}/triton"
    import torch
    import torch._functorch.config
    from torch._dynamo.utils import counters
    from torch._subclasses.fake_tensor import FakeTensorMode

    torch._functorch.config.enable_autograd_cache = False
    card = CARDS[name]
    os.environ["CUTE_DSL_ARCH"] = f"{name}a"  # what FlashAttention 4 is compiled for
    pretend_card(card)
    kernels = collect_kernels(compile_them=rows is None)
    import prepare
    import train

    check_varlen()
    # In fp16 a step asks whether the gradients are finite, which fakes cannot tell.
    torch.amp.GradScaler._maybe_opt_step = lambda scaler, optimizer, state: optimizer.step()
    hub = types.ModuleType("kernels")
    hub.get_kernel = lambda *arguments, **options: fa3_stand_in()
    sys.modules["kernels"] = hub
    device = torch.device("cuda")
    dtype = train.choose_dtype()
    config = train.derive_config(prepare.VOCAB_SIZE, dtype)
    for rung in rungs or train.BACKEND_ORDER["cuda"]:
        with contextlib.suppress(RuntimeError, ImportError):  # a rung that this card lacks
            attend = train.BACKENDS[rung]()
            break
    else:
        raise RuntimeError(f"it has no rung {rung}")
    model = train.GPT(config, attend)
    train.initialise(model, 0)
    rows = rows or train.DEVICE_BATCH_SIZE
    meter = Meter()
    with FakeTensorMode(allow_non_fake_inputs=True):
        if rung == "fa4":
            compile_fa4(config, rows)
        to_card(model)
        update = torch.compile(train.muon_update, dynamic=False)
        optimizer = train.MuonAdamW(train.parameter_groups(model), dtype, update)
        train.set_schedules(optimizer, 0.0, 0)
        compiled_model = torch.compile(model, dynamic=False)

        def random_batches():
            while True:
                shape = (2, rows, train.MAX_SEQ_LEN)
                inputs, targets = torch.randint(prepare.VOCAB_SIZE, shape, device=device)
                yield inputs, targets, 0

        loader = random_batches()
        train.train_step(compiled_model, optimizer, [next(loader), next(loader)])  # compiles
        for kernel in kernels:
            kernel.launches = 0
        for tensor in (*model.parameters(), *model.buffers()):
            meter.see(tensor)
        states = [*optimizer.adamw.state.values(), *optimizer.muon_groups]
        for tensor in (state[name] for state in states for name in ("exp_avg", "exp_avg_sq")):
            meter.see(tensor)
        with meter.mode:
            train.train_step(compiled_model, optimizer, [next(loader), next(loader)])
            shape = (prepare.EVAL_BATCH, train.MAX_SEQ_LEN)
            inputs = torch.randint(prepare.VOCAB_SIZE, shape, device=device)
        launches = sum(kernel.launches for kernel in kernels)
        training_peak = meter.peak
        model.eval()
        with torch.no_grad():
            compiled_model(inputs)
            meter.peak = meter.now
            with meter.mode:
                compiled_model(inputs)
    errors = []
    for kernel in kernels:
        for result in kernel.compiled:
            if isinstance(result, Exception):
                errors.append(f"{kernel.name}: {describe(result)}")
                continue
            shared = getattr(result, "metadata", result).shared  # torch keeps one of two classes
            if shared > card.shared * 1024:
                errors.append(f"{kernel.name}: {shared} bytes of shared memory")
    if counters["graph_break"]:
        errors.append(f"graph breaks: {list(counters['graph_break'])}"[:300])
    breaks = sum(counters["graph_break"].values())
    memory = (f"{training_peak / GIB:.2f}", f"{meter.peak / GIB:.2f}")
    return (rung, rows, len(kernels), breaks, launches, *memory), errors


# ---- All cards ----
def describe(error):
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def main():
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("cards", nargs="*", metavar="CARD", help=f"any of {', '.join(CARDS)} (all)")
    parser.add_argument(
        "--memory", nargs="+", type=int, metavar="ROWS", help="only memory, of steps of ROWS rows"
    )
    parser.add_argument(
        "--rung", nargs=1, help="rung of the attention ladder (the first that the card has)"
    )
    args = parser.parse_args()
    unknown = [card for card in args.cards if card not in CARDS]
    if unknown:
        parser.error(f"{unknown[0]} is none of {', '.join(CARDS)}")
    verdicts = {}
    print_header("card", *COLUMNS)
    jobs = [(name, rows) for name in args.cards or CARDS for rows in args.memory or [None]]
    fresh = {"mp_context": get_context("spawn"), "max_tasks_per_child": 1}  # a process per job
    with ProcessPoolExecutor(max(1, (os.cpu_count() or 2) // 2), **fresh) as pool:
        found = {job: pool.submit(examine, job[0], args.rung, job[1]) for job in jobs}
        for (name, rows), future in found.items():
            try:
                facts, errors = future.result()
                print_row(name, *facts)
            except Exception as error:  # report whatever torch raises
                errors = [describe(error)]
            of_rows = f", {rows} rows" if rows else ""
            verdicts[f"{name} ({CARDS[name].name}){of_rows}"] = "; ".join(errors) or "ok"
    print()
    for subject, verdict in verdicts.items():
        print(f"{subject}: {verdict}")
    raise SystemExit(set(verdicts.values()) != {"ok"})


if __name__ == "__main__":
    main()
