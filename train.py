"""
train.py, the subject of autoresearch: the whole GPT, MuonAdamW and the training loop. The one file that may be edited.

    uv run train.py                 train for exactly TIME_BUDGET seconds, then print val_bpb (lower is better)
    grep -n '^# ----' train.py      the table of contents

prepare.py owns data, clock and metric. Importing this file does nothing. README.md describes the environment.
Shapes: B rows, T tokens, C width, H heads, D head size, V vocabulary.
"""

import atexit
import ctypes
import gc
import math
import os
import resource
import signal
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from time import monotonic

import prepare
from prepare import MAX_SEQ_LEN, SEED, TIME_BUDGET, by_profile, elapsed, stop

import torch
import torch.nn.functional as F
from torch import nn

# ---- Knobs: every number worth turning, and none of them anywhere else -----------------------------------------------
# fmt: off
# Model
DEPTH            = by_profile(full=8, small=4)       # layers
ASPECT_RATIO     = by_profile(full=64, small=48)     # width = DEPTH * ASPECT_RATIO, up to a multiple of HEAD_DIM
HEAD_DIM         = by_profile(full=128, small=64)    # channels a head
KV_HEADS         = 0                                 # key and value heads; 0: as many as query heads
WINDOW_PATTERN   = "SSSL"                            # a letter a layer, repeated; the last layer is always L
SHORT_WINDOW     = by_profile(full=1024, small=128)  # positions an S layer looks back; an L layer sees all
MLP_RATIO        = 4                                 # hidden channels of the MLP per channel
ROPE_BASE        = 10000                             # longest wavelength of the rotary embedding, about, in positions
LOGIT_SOFTCAP    = 15                                # logits stay within +-this
VE_GATE_CHANNELS = 32                                # channels that the value embeddings' gates read
# Initialisation
EMBEDDING_STD    = 1.0                               # wte, normal
UNEMBEDDING_STD  = 0.001                             # lm_head, normal: the first loss is ln V
MATRIX_SCALE     = 1.0                               # of the blocks' uniform(-s, s), times s = sqrt(3 / width)
RESID_INIT       = 1.0                               # weight of the stream in front of each layer
X0_INIT          = 0.1                               # weight of the embedding, mixed in again in front of each layer
# Batch
TOTAL_BATCH_SIZE  = by_profile(full=2**19, small=2**12)  # tokens a step; smaller: more, noisier steps
DEVICE_BATCH_SIZE = by_profile(full=128, small=8)    # rows at a time; halved by itself where memory runs out
LOSS_CHUNK        = by_profile(full=8192, small=512)  # tokens whose logits exist at a time
# Optimizer
EMBEDDING_LR     = 0.6                               # wte and value embeddings, AdamW
UNEMBEDDING_LR   = 0.004                             # lm_head, AdamW
MATRIX_LR        = 0.04                              # matrices in the blocks, Muon
SCALAR_LR        = 0.5                               # x0 weights, AdamW
RESID_LR         = 0.005                             # stream weights, AdamW
WIDTH_LR_POWER   = -0.5                              # the first two scale with (width / 768) to this power
WEIGHT_DECAY     = 0.2                               # of the matrices, falls to 0 over the run
ADAM_BETAS       = (0.8, 0.95)
X0_BETAS         = (0.96, 0.95)
EPS              = 1e-10                             # guards both optimizers' divisions
MUON_BETA2       = 0.95                              # memory of NorMuon's second moment
MOMENTUM         = (0.85, 0.95)                      # Muon's, from, to
MOMENTUM_STEPS   = 300                               # steps the rise takes
# Schedule, as shares of TIME_BUDGET
WARMUP_RATIO     = 0.0                               # learning rates rise from 0
WARMDOWN_RATIO   = 0.5                               # they fall to FINAL_LR_FRAC
FINAL_LR_FRAC    = 0.0
# Run
ATTENTION        = "auto"                            # or one of fa3, varlen, flex, blocks, sdpa
CPU_QUERY_BLOCK  = 128                               # queries a block of attention on a CPU
COMPILE          = True                              # torch.compile; False for a stack trace that points at the line
# fmt: on


# ---- Derived values --------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Config:
    vocab_size: int
    sequence_len: int
    n_head: int
    n_kv_head: int
    head_dim: int
    windows: tuple  # a layer each, the positions that it looks back

    @property
    def n_embd(self):
        return self.n_head * self.head_dim

    def has_value_embedding(self, layer):
        return layer % 2 == (len(self.windows) - 1) % 2  # every other one, the last included

    def flops_per_token(self, matrix_params):
        """Forward and backward: 6 a parameter of blocks and lm_head, 12 a channel and position that attention sees."""
        seen = sum(min(window, self.sequence_len) for window in self.windows)
        return 6 * matrix_params + 12 * self.n_embd * seen


def derive_config(vocab_size):
    heads = -(-DEPTH * ASPECT_RATIO // HEAD_DIM)
    if heads * HEAD_DIM != (width := DEPTH * ASPECT_RATIO):
        print(f"width: DEPTH * ASPECT_RATIO = {width} is rounded up to {heads * HEAD_DIM}, a multiple of HEAD_DIM")
    if heads % (KV_HEADS or heads):
        stop(f"KV_HEADS = {KV_HEADS} does not divide the {heads} heads; choose a divisor.")
    if not set("SL").issuperset(WINDOW_PATTERN) or not WINDOW_PATTERN:
        stop(f"WINDOW_PATTERN = {WINDOW_PATTERN!r}; it is made of the letters S and L.")
    pattern = (WINDOW_PATTERN * DEPTH)[: DEPTH - 1] + "L"
    windows = tuple(SHORT_WINDOW if letter == "S" else MAX_SEQ_LEN for letter in pattern)
    return Config(vocab_size, MAX_SEQ_LEN, heads, KV_HEADS or heads, HEAD_DIM, windows)


def accumulation_steps(rows):
    """Micro-batches of `rows` rows in a step."""
    if rows < 1 or TOTAL_BATCH_SIZE % (rows * MAX_SEQ_LEN):
        stop(f"TOTAL_BATCH_SIZE = {TOTAL_BATCH_SIZE} is not a multiple of DEVICE_BATCH_SIZE * MAX_SEQ_LEN = {rows} * "
             f"{MAX_SEQ_LEN} = {rows * MAX_SEQ_LEN}; make it a multiple, or change DEVICE_BATCH_SIZE.")  # fmt: skip
    return TOTAL_BATCH_SIZE // (rows * MAX_SEQ_LEN)


# ---- Device and precision --------------------------------------------------------------------------------------------
# Dense bf16 peaks in TFLOP/s from the vendors' data sheets, the more specific name first.
PEAK_TFLOPS = {
    "GB200": 2500, "B200": 2250, "B100": 1800, "H200 NVL": 836, "H200 PCIe": 836, "H200": 989, "H100 NVL": 835,
    "H100 PCIe": 756, "H100": 989, "H800 NVL": 989, "H800": 756, "A100": 312, "A800": 312, "A40": 149.7, "A30": 165,
    "L40S": 362, "L4": 121, "MI355": 2500, "MI325": 1307, "MI300X": 1307, "MI300A": 980.6, "MI250X": 383, "MI250": 362,
    "RTX 5090 Laptop": None, "RTX 5090": 209.5, "RTX 4090 Laptop": None, "RTX 4090": 165.2, "RTX 3090": 71,
}  # fmt: skip


def peak_flops(name):
    """Of the GPU that is there, FLOP/s; None where the table has no such card: never another chip's peak."""
    words = set(name.replace("-", " ").split())
    tflops = next((tflops for card, tflops in PEAK_TFLOPS.items() if words.issuperset(card.split())), None)
    return tflops and tflops * 1e12


def choose_device():
    """(device, its name, dtype of activations and embeddings, why that)."""
    if torch.cuda.is_available():
        torch.set_float32_matmul_precision("high")  # TF32
        major, minor = torch.cuda.get_device_capability()
        dtype = torch.bfloat16 if major >= 8 else torch.float32  # before Ampere it is emulated
        return torch.device("cuda"), torch.cuda.get_device_name(), dtype, f"compute capability {major}.{minor}"
    if prepare.GPU_PRESENT:
        stop("torch finds no usable GPU; mend driver (580 or newer) or CUDA_VISIBLE_DEVICES (-1: do without a GPU).")
    if torch.backends.mps.is_available():
        return torch.device("mps"), "mps", torch.float32, "not every Apple chip has bfloat16"
    # glibc gives large blocks back to the kernel, which zeroes them anew every step, a tenth of it: do without.
    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda option, value: None)
    mallopt(-4, 0), mallopt(-1, -1)  # M_MMAP_MAX, M_TRIM_THRESHOLD
    found = [name for name in ("avx512_bf16", "amx_bf16") if torch.cpu.get_capabilities().get(name)]
    dtype = torch.bfloat16 if found else torch.float32
    return torch.device("cpu"), "cpu", dtype, ", ".join(found) or "neither AVX512-BF16 nor AMX"


def peak_memory_mb(device):
    """(allocated, reserved) on the GPU; elsewhere the process's peak resident memory, twice."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20, torch.cuda.max_memory_reserved() / 2**20
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10),) * 2


# ---- Attention -------------------------------------------------------------------------------------------------------
# One meaning everywhere: attention(q, k, v, window) on [B, T, H, D], where query i sees the keys j with
# 0 <= i - j <= window. k and v may have fewer heads; query head h then reads head h // (H / H_kv).
def reference_attention(q, k, v, window):
    """By the definition, in fp32: what the rungs are probed and tested against."""
    group, distance = q.shape[2] // k.shape[2], torch.arange(q.shape[1], device=q.device)
    q, k, v = (x.float().transpose(1, 2) for x in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
    distance = distance[:, None] - distance
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill((distance < 0) | (distance > window), -math.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


def load_fa3(device, config):
    """FlashAttention 3 (arXiv 2407.08608) from the kernel hub, Hopper only."""
    if device.type != "cuda" or torch.cuda.get_device_capability() != (9, 0):
        raise RuntimeError("needs compute capability 9.0")
    from kernels import get_kernel

    flash = get_kernel("kernels-community/flash-attn3", version=1).flash_attn_func

    def attention(q, k, v, window):
        out = flash(q, k, v, causal=True, window_size=(window, 0))
        return out[0] if isinstance(out, tuple) else out

    return attention


def load_varlen(device, config):
    """torch's own flash attention with a window."""
    if device.type != "cuda" or torch.cuda.get_device_capability() < (8, 0):
        raise RuntimeError("needs compute capability 8.0")
    from torch.nn.attention.varlen import varlen_attn

    def attention(q, k, v, window):
        B, T, H, D = q.shape
        k, v = (x.repeat_interleave(H // x.shape[2], 2) for x in (k, v))  # grouped heads only come with torch 2.15
        ends = torch.arange(0, (B + 1) * T, T, dtype=torch.int32, device=q.device)
        q, k, v = (x.reshape(B * T, H, D) for x in (q, k, v))
        return varlen_attn(q, k, v, ends, ends, T, T, window_size=(window, 0)).view(B, T, H, D)

    return attention


def load_flex(device, config):
    """FlexAttention (arXiv 2412.05496), which skips the blocks that no query sees."""
    if device.type != "cuda":
        raise RuntimeError("needs CUDA")
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    T, flex = config.sequence_len, torch.compile(flex_attention, dynamic=False)
    masks = {w: create_block_mask(lambda b, h, i, j, w=w: (i >= j) & (i - j <= w), None, None, T, T, device=device)
             for w in set(config.windows)}  # fmt: skip

    def attention(q, k, v, window):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return flex(q, k, v, block_mask=masks[window], enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2)

    return attention


def by_blocks(attend, size):
    """attention() from `attend` on blocks of `size` queries, each with just the keys that its window reaches: exact,
    and what lies outside costs nothing, where a mask of T x T would be slower than no window at all."""

    def attention(q, k, v, window):
        T, H = q.shape[1:3]
        q, k, v = (x.repeat_interleave(H // x.shape[2], 2).transpose(1, 2) for x in (q, k, v))  # [B, H, T, D]
        position, out = torch.arange(T, device=q.device), []
        for begin in range(0, T, size):
            queries, keys = slice(begin, min(begin + size, T)), slice(max(0, begin - window), min(begin + size, T))
            distance = position[queries, None] - position[keys]
            mask = (distance >= 0) & (distance <= window)
            out.append(attend(q[:, :, queries], k[:, :, keys], v[:, :, keys], mask))
        return torch.cat(out, 2).transpose(1, 2)

    return attention


def load_blocks(device, config):
    """Plain products and a softmax, compiled: on a CPU twice as fast as torch's flash kernel there."""
    if device.type != "cpu":
        raise RuntimeError("is for CPUs")

    def attend(q, k, v, mask):
        scores = (q @ k.mT * q.shape[-1] ** -0.5).float().masked_fill(~mask, -math.inf)
        return scores.softmax(-1).to(v.dtype) @ v

    return by_blocks(attend, max(CPU_QUERY_BLOCK, config.sequence_len // 8))


def load_sdpa(device, config):
    """Runs everywhere: torch's choice of kernel, full causal or, for a short window, by blocks of half its length."""

    def attention(q, k, v, window):
        if window < q.shape[1] - 1:
            return by_blocks(F.scaled_dot_product_attention, max(window // 2, 64))(q, k, v, window)
        q, k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2).transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    return attention


LADDER = {"fa3": load_fa3, "varlen": load_varlen, "flex": load_flex, "blocks": load_blocks, "sdpa": load_sdpa}
PROBE_TOLERANCE = 0.02  # |out - reference| / |reference|: bf16 rounds to 0.004, and a wrong window or mask is past 0.1


def probe_attention(attention, device, dtype, config):
    """Forward and backward at the real head size and windows: an import proves nothing. Raises RuntimeError."""
    generator = torch.Generator().manual_seed(0)
    for window in sorted(set(config.windows)):
        shapes = [(1, config.sequence_len, heads, config.head_dim) for heads in (config.n_head, config.n_kv_head)]
        q, k, v, grad = (torch.randn(shapes[i], generator=generator).to(device, dtype) for i in (0, 1, 1, 0))
        results = []
        for function in (attention, reference_attention):
            inputs = [x.detach().clone().requires_grad_() for x in (q, k, v)]
            out = function(*inputs, window)
            results.append((out, *torch.autograd.grad(out, inputs, grad.to(out.dtype))))
        for name, got, want in zip(("forward", "dq", "dk", "dv"), *results, strict=True):
            error = ((got.float() - want.float()).norm() / want.float().norm()).item()
            if not error <= PROBE_TOLERANCE:
                raise RuntimeError(f"{name} is off by {error:.3f} at window {window}")


def choose_attention(device, dtype, config):
    """(name, attention) of the first rung that passes the probe; says why for each one passed over."""
    if ATTENTION != "auto" and ATTENTION not in LADDER:
        stop(f"ATTENTION = {ATTENTION!r}; choose auto or one of {', '.join(LADDER)}.")
    for name, load in LADDER.items() if ATTENTION == "auto" else [(ATTENTION, LADDER[ATTENTION])]:
        try:
            attention = load(device, config)
            probe_attention(attention, device, dtype, config)
            return name, attention
        except Exception as error:  # of a foreign kernel anything may come; the next rung is the answer to all of it
            reason = (str(error).strip() or type(error).__name__).splitlines()[0][:160]
            print(f"attention: not {name}: {reason}")
    return stop(f"no attention works with ATTENTION = {ATTENTION!r}; set it to auto, or mend what is named above.")


# ---- Model -----------------------------------------------------------------------------------------------------------
def norm(x):
    return F.rms_norm(x, x.shape[-1:])


class Linear(nn.Linear):
    """The weight stays in fp32 for the optimizer and is cast to the activations' precision."""

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype))


def rotate(x, cos, sin):
    """Rotary embedding (RoFormer, arXiv 2104.09864) of [B, T, H, D] by halves; cos, sin [T, 1, D / 2]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos + b * sin, b * cos - a * sin), dim=-1)


class Attention(nn.Module):
    """QK-norm (arXiv 2010.04245) behind the rotation; value embeddings (ResFormer, arXiv 2410.17897) on every other
    layer, gated a kv head: the gate's zero weights make the factor 1 at the start."""

    def __init__(self, config, layer, attend):
        super().__init__()
        self.head_dim, self.window, self.attend = config.head_dim, config.windows[layer], attend
        kv_dim = config.n_kv_head * config.head_dim
        self.q, self.k, self.v = (Linear(config.n_embd, width, bias=False) for width in (config.n_embd, kv_dim, kv_dim))
        self.out = Linear(config.n_embd, config.n_embd, bias=False)
        gated = config.has_value_embedding(layer)
        self.gate = Linear(VE_GATE_CHANNELS, config.n_kv_head, bias=False) if gated else None

    def forward(self, x, ve, cos, sin):
        q, k, v = (layer(x).unflatten(-1, (-1, self.head_dim)) for layer in (self.q, self.k, self.v))  # [B, T, H, D]
        if self.gate is not None:
            gate = 2 * torch.sigmoid(self.gate(x[..., :VE_GATE_CHANNELS]))  # [B, T, H_kv]
            v = v + gate[..., None] * ve.view(v.shape)
        q, k = norm(rotate(q, cos, sin)), norm(rotate(k, cos, sin))
        return self.out(self.attend(q, k, v, self.window).flatten(2))


class Block(nn.Module):
    """The MLP is ReLU squared (Primer, arXiv 2109.08668)."""

    def __init__(self, config, layer, attend):
        super().__init__()
        self.attention = Attention(config, layer, attend)
        self.up = Linear(config.n_embd, MLP_RATIO * config.n_embd, bias=False)
        self.down = Linear(MLP_RATIO * config.n_embd, config.n_embd, bias=False)

    def forward(self, x, x0, resid_lambda, x0_lambda, ve, cos, sin):
        x = resid_lambda * x + x0_lambda * x0
        x = x + self.attention(norm(x), ve, cos, sin)
        return x + self.down(F.relu(self.up(norm(x))).square())


class GPT(nn.Module):
    def __init__(self, config, attend):
        super().__init__()
        self.config, layers = config, range(len(config.windows))
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        kv_dim = config.n_kv_head * config.head_dim
        value_layers = [str(i) for i in layers if config.has_value_embedding(i)]
        self.value_embeddings = nn.ModuleDict({i: nn.Embedding(config.vocab_size, kv_dim) for i in value_layers})
        self.blocks = nn.ModuleList(Block(config, i, attend) for i in layers)
        self.lm_head = Linear(config.n_embd, config.vocab_size, bias=False)
        self.resid_lambdas, self.x0_lambdas = (nn.Parameter(torch.empty(len(layers))) for _ in range(2))
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.empty(config.sequence_len, 1, config.head_dim // 2), persistent=False)

    def forward(self, idx, targets=None, reduction="mean"):
        """Logits, fp32 [B, T, V], of token ids [B, T]; with `targets` [B, T] their cross-entropy in nats, the mean or,
        with reduction "none", [B, T]."""
        x = x0 = norm(self.wte(idx))
        cos, sin = self.cos[: idx.shape[1]], self.sin[: idx.shape[1]]
        for i, block in enumerate(self.blocks):
            ve = self.value_embeddings[str(i)](idx) if str(i) in self.value_embeddings else None
            x = block(x, x0, self.resid_lambdas[i], self.x0_lambdas[i], ve, cos, sin)
        x = norm(x)
        if targets is not None and reduction == "mean":
            loss = torch.compiler.disable(ChunkedLoss.apply) if COMPILE else ChunkedLoss.apply
            return loss(x.flatten(0, 1), self.lm_head.weight, targets.flatten())
        logits = LOGIT_SOFTCAP * torch.tanh(self.lm_head(x).float() / LOGIT_SOFTCAP)
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction).view_as(targets)


def loss_chunk(x, weight, targets, scale):
    """Softcapped cross-entropy of x [N, C] against targets [N], summed and times `scale`, and its gradients by x and by
    weight [V, C]: of z = x W^T the softcap's derivative is 1 - tanh(z / cap)^2, of the loss softmax - one-hot."""
    capped = torch.tanh((x @ weight.to(x.dtype).mT).float() / LOGIT_SOFTCAP)  # [N, V]
    logits = LOGIT_SOFTCAP * capped
    total = logits.logsumexp(-1, keepdim=True)
    hit = targets[:, None] == torch.arange(weight.shape[0], device=x.device)
    grad = ((torch.exp(logits - total) - hit.float()) * (1 - capped * capped) * scale).to(x.dtype)
    return (total - logits.gather(-1, targets[:, None])).sum() * scale, grad @ weight.to(x.dtype), (grad.mT @ x).float()


class ChunkedLoss(torch.autograd.Function):
    """The mean of `loss_chunk`, LOSS_CHUNK tokens at a time, gradients at once: [B, T, V] logits, the largest tensor of
    a step by far, never exist, and on a CPU each chunk stays in the cache."""

    chunk = staticmethod(loss_chunk)  # warm_up compiles it: one chunk, called often, not an unrolled loop

    @staticmethod
    def forward(ctx, x, weight, targets):
        parts = zip(x.split(LOSS_CHUNK), targets.split(LOSS_CHUNK), strict=True)
        losses, by_x, by_weight = zip(*(ChunkedLoss.chunk(a, weight, b, 1 / len(x)) for a, b in parts), strict=True)
        ctx.save_for_backward(torch.cat(by_x), sum(by_weight))
        return sum(losses)

    @staticmethod
    def backward(ctx, grad):
        return *(saved * grad for saved in ctx.saved_tensors), None


# ---- Initialisation --------------------------------------------------------------------------------------------------
@torch.no_grad()
def initialise(model, dtype, seed):
    """Sets every parameter and buffer of a materialised model; embedding tables take `dtype`."""
    config, device = model.config, model.lm_head.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    s = MATRIX_SCALE * math.sqrt(3 / config.n_embd)
    model.wte.to(dtype).weight.normal_(0, EMBEDDING_STD, generator=generator)
    model.lm_head.weight.normal_(0, UNEMBEDDING_STD, generator=generator)
    for table in model.value_embeddings.values():
        table.to(dtype).weight.uniform_(-s, s, generator=generator)
    for block in model.blocks:
        for layer in (block.attention.q, block.attention.k, block.attention.v, block.up):
            layer.weight.uniform_(-s, s, generator=generator)
        for layer in (block.attention.out, block.down, block.attention.gate):
            if layer is not None:
                layer.weight.zero_()
    model.resid_lambdas.fill_(RESID_INIT)
    model.x0_lambdas.fill_(X0_INIT)
    frequency = ROPE_BASE ** -(torch.arange(0, config.head_dim, 2, device=device) / config.head_dim)
    angle = torch.outer(torch.arange(config.sequence_len, device=device).float(), frequency)[:, None]  # [T, 1, D / 2]
    model.cos, model.sin = angle.cos().to(dtype), angle.sin().to(dtype)


# ---- Parameter groups ------------------------------------------------------------------------------------------------
def parameter_groups(model):
    """A row a group; Muon's matrices are stacked by shape. Together they hold every parameter exactly once."""
    scale = (model.config.n_embd / 768) ** WIDTH_LR_POWER
    values, shapes = [table.weight for table in model.value_embeddings.values()], {}
    for parameter in model.blocks.parameters():
        shapes.setdefault(parameter.shape, []).append(parameter)
    adamw = partial(dict, kind="adamw", betas=ADAM_BETAS)
    groups = [
        adamw(params=[model.lm_head.weight], peak_lr=UNEMBEDDING_LR * scale),
        adamw(params=[model.wte.weight], peak_lr=EMBEDDING_LR * scale),
        adamw(params=values, peak_lr=EMBEDDING_LR * scale),
        adamw(params=[model.resid_lambdas], peak_lr=RESID_LR),
        adamw(params=[model.x0_lambdas], peak_lr=SCALAR_LR, betas=X0_BETAS),
        *(dict(kind="muon", params=matrices, peak_lr=MATRIX_LR) for matrices in shapes.values()),
    ]
    grouped = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(grouped) == sorted(map(id, model.parameters())), "the groups do not partition the parameters"
    return [group for group in groups if group["params"]]  # value embeddings may all be gone


# ---- Optimizer -------------------------------------------------------------------------------------------------------
# Polar Express (arXiv 2505.16932): the best odd polynomials, one after another, that drive singular values to 1.
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


def orthogonalise(g, dtype):
    """The nearest semi-orthogonal matrices, about, of a stack [K, rows, cols], worked out in `dtype`."""
    x = g.to(dtype)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-6)  # the polynomials need singular values below 1
    tall = x.shape[-2] > x.shape[-1]
    for a, b, c in POLAR_EXPRESS:
        gram = x.mT @ x if tall else x @ x.mT  # the smaller one
        poly = b * gram + c * gram @ gram
        x = a * x + (x @ poly if tall else poly @ x)
    return x


def adamw_update(p, grad, mean, square, lr, beta1, beta2, correction1, correction2):
    """AdamW (arXiv 1711.05101) without decay; the corrections are 1 - beta^t."""
    mean.mul_(beta1).add_(grad * (1 - beta1))
    square.mul_(beta2).add_(grad * grad * (1 - beta2))
    p.sub_(lr / correction1 * mean / ((square / correction2).sqrt() + EPS))


def muon_update(p, grad, velocity, square, lr, momentum, weight_decay, dtype):
    """What Muon with Nesterov momentum takes from the stack p [K, rows, cols]. NorMuon (arXiv 2510.05491): a running
    second moment a row or a column, along the longer side, evens the update out, whose norm is kept. Decay only where
    its sign agrees with the update's."""
    velocity.mul_(momentum).add_(grad * (1 - momentum))
    update = orthogonalise(grad * (1 - momentum) + velocity * momentum, dtype).float()
    size = update.norm(dim=(-2, -1), keepdim=True)
    shorter = -1 if p.shape[-2] >= p.shape[-1] else -2
    square.mul_(MUON_BETA2).add_(update.square().mean(shorter, keepdim=True) * (1 - MUON_BETA2))
    update = update * square.clamp_min(EPS).rsqrt()
    update = update * (size / update.norm(dim=(-2, -1), keepdim=True).clamp_min(EPS))
    return lr * max(1, p.shape[-2] / p.shape[-1]) ** 0.5 * (update + weight_decay * p * (update * p >= 0))


class MuonAdamW:
    """Muon for groups of matrices of one shape, AdamW for the rest. What changes from step to step (lr, momentum,
    decay) enters the compiled updates as 0-D tensors, so that nothing recompiles."""

    def __init__(self, groups, dtype):
        self.param_groups, self.dtype, self.adamw, self.muon = groups, dtype, adamw_update, muon_update
        self.reset()

    def reset(self):
        """Back to before the first step. Groups take lr, momentum and weight_decay from `set_schedules`."""
        self.steps = 0
        for group in self.param_groups:
            first, *_ = params = group["params"]
            if group["kind"] == "muon":
                rows, cols = first.shape
                group["mean"] = first.new_zeros(len(params), rows, cols)
                group["square"] = first.new_zeros(len(params), *((rows, 1) if rows >= cols else (1, cols)))
            else:
                group["mean"], group["square"] = ([torch.zeros_like(p) for p in params] for _ in range(2))

    @torch.no_grad()
    def step(self):
        self.steps += 1
        for group in self.param_groups:
            params, grads = group["params"], [p.grad for p in group["params"]]
            if group["kind"] == "muon":
                scalars = (torch.tensor(group[key]) for key in ("lr", "momentum", "weight_decay"))
                stacks = torch.stack(params), torch.stack(grads), group["mean"], group["square"]
                torch._foreach_sub_(params, list(self.muon(*stacks, *scalars, self.dtype).unbind()))
            else:
                betas = group["betas"]
                scalars = [torch.tensor(x) for x in (group["lr"], *betas, *(1 - beta**self.steps for beta in betas))]
                for tensors in zip(params, grads, group["mean"], group["square"], strict=True):
                    self.adamw(*tensors, *scalars)
            for p in params:
                p.grad = None


# ---- Schedules -------------------------------------------------------------------------------------------------------
def lr_factor(progress):
    """Of the peak learning rates at `progress`, the share of TIME_BUDGET that has passed: up, flat, down."""
    if progress < WARMUP_RATIO:
        return progress / WARMUP_RATIO
    left = min(1.0, (1 - progress) / WARMDOWN_RATIO) if WARMDOWN_RATIO else 1.0
    return left + (1 - left) * FINAL_LR_FRAC


def muon_momentum(step):
    return MOMENTUM[0] + min(step / max(MOMENTUM_STEPS, 1), 1) * (MOMENTUM[1] - MOMENTUM[0])


def set_schedules(optimizer, progress, step):
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * lr_factor(progress)
        group["momentum"] = muon_momentum(step)
        group["weight_decay"] = WEIGHT_DECAY * (1 - progress)


# ---- Main ------------------------------------------------------------------------------------------------------------
def train_step(model, optimizer, batches, micro_batches):
    """One optimizer step over `micro_batches` of `batches`; returns the loss, 0-D and not waited for, and the epoch."""
    total = 0.0
    for _ in range(micro_batches):
        inputs, targets, epoch = next(batches)
        loss = model(inputs, targets) / micro_batches
        loss.backward()
        total = total + loss.detach()
    optimizer.step()
    return total, epoch


def warm_up(model, dtype, validation_rows):
    """Compiles and runs, on random tokens and outside the clock, all that training and evaluation will run, then puts
    model and optimizer back to their beginning. Halves the device batch until memory suffices, and goes on without
    compilation where there is no compiler. Returns (callable model, optimizer, rows at a time)."""
    device, rows = model.lm_head.weight.device, DEVICE_BATCH_SIZE
    compiler = partial(torch.compile, dynamic=False) if COMPILE else lambda function: function
    batches = iter(lambda: (*torch.randint(model.config.vocab_size, (2, rows, MAX_SEQ_LEN), device=device), 0), None)
    while True:
        initialise(model, dtype, SEED)
        model.zero_grad(set_to_none=True)
        optimizer, callable_model = MuonAdamW(parameter_groups(model), dtype), compiler(model)
        if device.type == "cuda":  # on a CPU the updates are all products: compiling them costs 25 s and gains nothing
            optimizer.adamw, optimizer.muon = compiler(adamw_update), compiler(muon_update)
        set_schedules(optimizer, 0.0, 0)
        ChunkedLoss.chunk = staticmethod(compiler(loss_chunk))
        try:
            for _ in range(2):  # memory peaks in the second, when gradients meet optimizer state
                train_step(callable_model, optimizer, batches, min(accumulation_steps(rows), 2))
            model.eval()
            with torch.no_grad():
                callable_model(next(batches)[0][: prepare.eval_batch_size(validation_rows, rows)])
            break
        except torch.OutOfMemoryError:
            if rows == 1:
                stop("out of memory with one row at a time; make the model smaller (DEPTH, ASPECT_RATIO).", 5)
            rows //= 2
            print(f"out of memory: DEVICE_BATCH_SIZE {2 * rows} -> {rows}, TOTAL_BATCH_SIZE stays {TOTAL_BATCH_SIZE}")
        except torch._dynamo.exc.TorchDynamoException as error:
            reasons = [line for line in str(error).splitlines() if line.strip() and not line.endswith("raised:")]
            print(f"going on without compilation, slower: {[*reasons, type(error).__name__][0][:160]}")
            compiler = lambda function: function  # noqa: E731
        del optimizer, callable_model
        gc.collect()
        torch.cuda.empty_cache()
    model.train()
    initialise(model, dtype, SEED)
    optimizer.reset()
    return callable_model, optimizer, rows


def train(model, optimizer, batches, micro_batches, flops, peak):
    """Steps until the next one would not finish inside TIME_BUDGET; returns (steps, smoothed loss)."""
    lag = torch.cuda.is_available()  # there the loss is read a step late, so that the GPU never waits for the reading
    step, smooth, previous, seconds, printed, live = 0, 0.0, None, 0.0, -math.inf, sys.stdout.isatty()
    while step == 0 or 0 < elapsed() <= TIME_BUDGET - (1 + lag) * seconds:  # 0: the ruler's loader serves nothing
        began, progress = monotonic(), min(elapsed() / TIME_BUDGET, 1.0)
        set_schedules(optimizer, progress, step)
        loss, epoch = train_step(model, optimizer, batches, micro_batches)
        known, previous, step = previous if lag else loss, loss, step + 1
        if known is not None:
            value = known.item()
            if not value <= 100:  # NaN too: no comparison with it holds
                print(f"\nFAIL: training diverged, loss {value:g} at step {step}", flush=True)
                raise SystemExit(4)
            smooth += (value - smooth) * max(0.1, 1 / (step - lag))
        seconds = monotonic() - began
        if step == 1:  # no pauses from here on: what exists now stays, and a run is too short to need collection
            gc.collect(), gc.freeze(), gc.disable(), atexit.register(gc.unfreeze)  # else nanobind's leaks end the log
        if live or monotonic() - printed > 5:
            printed, rate = monotonic(), TOTAL_BATCH_SIZE / seconds
            mfu = f"{100 * flops * rate / peak:.1f}%" if peak else "n/a"
            line = (f"step {step:5d} {100 * progress:3.0f}% loss {smooth:.4f} lr x{lr_factor(progress):.2f} "
                    f"{rate:7.0f} tok/s mfu {mfu} epoch {epoch} left {TIME_BUDGET - elapsed():3.0f} s")  # fmt: skip
            print(f"\r\033[K{line}" if live else line, end="" if live else "\n", flush=True)  # in 80 columns
    print(end="\n" * live)
    return step, smooth


def run():
    validation_rows = prepare.check_cache()["files"]["val/rows.bin"][0] // (2 * (MAX_SEQ_LEN + 1))
    prepare.RUNS.mkdir(parents=True, exist_ok=True)
    own = os.access(prepare.CACHE, os.W_OK)  # or somebody else's, then nothing is written but in RUNS
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str((prepare.CACHE if own else prepare.RUNS) / "inductor"))
    tempfile.tempdir = os.environ.setdefault("TMPDIR", tempfile.gettempdir() if own else str(prepare.RUNS))
    tempfile.TemporaryFile(dir=prepare.RUNS).close()  # where the result cannot be written, better known now
    torch.manual_seed(SEED)
    tokenizer = prepare.Tokenizer.from_directory()
    config = derive_config(tokenizer.get_vocab_size())
    device, name, dtype, why = choose_device()
    print(f"device: {name}, {str(dtype).removeprefix('torch.')} ({why}), torch {torch.__version__}")
    rung, attend = choose_attention(device, dtype, config)
    with torch.device("meta"):
        model = GPT(config, attend)
    model = model.to_empty(device=device)
    matrices = sum(p.numel() for p in (*model.blocks.parameters(), model.lm_head.weight))
    params, flops = sum(p.numel() for p in model.parameters()), config.flops_per_token(matrices)
    print(f"model: depth {DEPTH}, width {config.n_embd}, {config.n_head} heads of {HEAD_DIM}, windows "
          f"{config.windows}, attention {rung}, {params / 1e6:.1f} M parameters, {flops:.2e} FLOPs/token")  # fmt: skip
    print("warming up", flush=True)  # compiles, one or two minutes where nothing is in the cache
    callable_model, optimizer, rows = warm_up(model, dtype, validation_rows)
    micro_batches, peak = accumulation_steps(rows), peak_flops(name)
    print(f"run: {prepare.PROFILE} profile, {TIME_BUDGET:g} s, seed {SEED}, {TOTAL_BATCH_SIZE} tokens a step in "
          f"{micro_batches} x {rows} rows, commit {prepare.commit()}", flush=True)  # fmt: skip
    batches = prepare.make_dataloader(tokenizer, rows, MAX_SEQ_LEN)
    steps, loss = train(callable_model, optimizer, batches, micro_batches, flops, peak)
    val_bpb = prepare.evaluate_bpb(callable_model, tokenizer, rows)
    (allocated, reserved), tokens = peak_memory_mb(device), steps * TOTAL_BATCH_SIZE
    prepare.report(
        val_bpb, total_tokens=tokens, num_steps=steps, num_params_M=params / 1e6, depth=DEPTH, train_loss=loss,
        mfu_percent=100 * flops * tokens / elapsed() / peak if peak else "n/a", peak_vram_mb=allocated,
        peak_reserved_mb=reserved, device=name, attention=rung,
    )  # fmt: skip


def main():
    if sys.argv[1:]:
        stop("train.py takes no arguments: its knobs are in the file, SEED and the like are variables (README.md).")
    names = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGALRM: "AUTORESEARCH_WALL_LIMIT"}
    for number in names:
        signal.signal(number, lambda n, _: stop(f"{names[n]} after {elapsed():.0f} s of training; no score.", 128 + n))
    signal.setitimer(signal.ITIMER_REAL, prepare.WALL_LIMIT)
    try:
        run()
    except torch.OutOfMemoryError:
        stop("out of memory; lower DEVICE_BATCH_SIZE, DEPTH or ASPECT_RATIO.", 5)
    except OSError as error:
        stop(f"{error}; free space or set AUTORESEARCH_RUNS to a writable folder; a score above has no record.")


if __name__ == "__main__":
    main()
