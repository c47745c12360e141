"""
train.py, the subject of autoresearch: the GPT, MuonAdamW and the training loop. This is the only
file that a night of research edits.

    uv run train.py              train for TIME_BUDGET seconds, print val_bpb: lower is better
    grep -n '^# ----' train.py   the table of contents

prepare.py owns data, clock and metric. Importing this file starts no run.
Shapes: B rows, T tokens, C width, H heads, D head size, V vocabulary; K matrices of one shape.
"""

import atexit
import ctypes
import gc
import itertools
import logging
import math
import os
import signal
import sys
import timeit
from collections import Counter, defaultdict
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

from prepare import (  # before torch: this starts the clock of total_seconds
    CACHE,
    DEVICE,
    EVAL_BATCH,
    MAX_SEQ_LEN,
    SEED,
    TIME_BUDGET,
    Tokenizer,
    by_profile,
    elapsed,
    evaluate_bpb,
    fail,
    log_step,
    make_dataloader,
    start,
)

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    restore_flash_attention_impl,
)

# ---- Knobs: every number worth turning ----
# fmt: off
# Model
DEPTH             = by_profile(full=8, medium=4, small=3)              # layers
ASPECT_RATIO      = by_profile(full=64, medium=128, small=64)          # width / DEPTH, at least
HEAD_DIM          = by_profile(full=128, medium=128, small=64)         # channels per head
KV_HEADS          = 0             # key/value heads; 0: as many as query heads
WINDOW_PATTERN    = by_profile(full="SSSL", medium="SSSL", small="NSSL")  # N: none; the last is L
SHORT_WINDOW      = by_profile(full=1024, medium=256, small=32)        # tokens that S sees; 0: all
MLP_RATIO         = by_profile(full=4, medium=4, small=2)              # hidden size of MLP / width
ROPE_BASE         = 10000         # base of the rotary embedding (theta)
LOGIT_SOFTCAP     = 15            # tanh keeps logits within +-this; 0: off
VE_EVERY          = 2             # value embedding (ve) each n-th layer; 0: none
VE_GATE_CHANNELS  = 32            # input channels of its gate
NGRAM_ROWS        = by_profile(full=0, medium=0, small=16)             # n-grams' table / V; 0: none
# Initialisation
EMBEDDING_STD     = 1.0           # wte, normal
UNEMBEDDING_STD   = 0.001         # lm_head, normal: the first loss is ln V
MATRIX_SCALE      = 1.0           # q, k, v, up, ve: +-this * sqrt(3 / C)
RESID_INIT        = 1.0           # resid_lambdas: factor on the stream
X0_INIT           = 0.1           # x0_lambdas: share of x0 added; None: off
NGRAM_INIT        = 0.1           # ngram_lambda: share of n-grams in x0
# Batch
TOTAL_BATCH_SIZE  = by_profile(full=2**19, medium=2**15, small=2**12)  # tokens per step
DEVICE_BATCH_SIZE = by_profile(full=128, medium=16, small=8)           # rows at a time, at most
# Optimizer: Muon takes MATRIX_LR, AdamW the other rates
EMBEDDING_LR      = by_profile(full=0.6, medium=0.6, small=0.3)        # tables
UNEMBEDDING_LR    = by_profile(full=0.004, medium=0.004, small=0.002)  # lm_head
MATRIX_LR         = by_profile(full=0.04, medium=0.04, small=0.02)     # matrices in the blocks
SCALAR_LR         = by_profile(full=0.5, medium=0.5, small=0.1)        # x0_lambdas
RESID_LR          = 0.005         # resid_lambdas, ngram_lambda
VECTOR_LR         = 0.05          # gains, biases and the like in the blocks
WIDTH_LR_POWER    = -0.5          # lm_head, tables: lr * (C / 768) ** this
WEIGHT_DECAY      = 0.2           # of Muon's matrices, falls to 0 over the run
ADAM_BETAS        = (0.8, 0.95)   # beta1, beta2
X0_BETAS          = (0.96, 0.95)  # the same for x0_lambdas
MUON_BETAS        = (0.95, 0.95)  # final momentum, beta2 of NorMuon
MOMENTUM_START    = 0.85          # Muon's momentum at step 0
MOMENTUM_STEPS    = 300           # steps until it reaches MUON_BETAS[0]
EPS               = 1e-10         # of both optimizers
# Schedule
WARMUP_RATIO      = 0.0           # share of TIME_BUDGET in which the lr rises
WARMDOWN_RATIO    = 0.5           # share at the end in which it falls
FINAL_LR_FRAC     = 0.0           # final lr / peak lr
# Run
ATTENTION         = "auto"        # or fa3, fa4, varlen, blocks, sdpa
CPU_QUERY_BLOCK   = 32            # queries per block of attention on a CPU
COMPILE           = True          # False: slower, errors point at their line
# fmt: on


# ---- Derived values ----
def derive_config(vocab_size, dtype):
    """The sizes that follow from the knobs, and the dtype of activations."""
    if not WINDOW_PATTERN or set(WINDOW_PATTERN) - set("NSL"):
        fail(f"WINDOW_PATTERN = {WINDOW_PATTERN!r} must consist of N, S and L; change it.")
    n_head = math.ceil(DEPTH * ASPECT_RATIO / HEAD_DIM)
    n_kv_head = KV_HEADS or n_head
    width = n_head * HEAD_DIM
    if width != DEPTH * ASPECT_RATIO:
        print(f"width: DEPTH * ASPECT_RATIO = {DEPTH * ASPECT_RATIO} is rounded up to {width}")
    pattern = (WINDOW_PATTERN * DEPTH)[: DEPTH - 1] + "L"
    short = min(SHORT_WINDOW or MAX_SEQ_LEN, MAX_SEQ_LEN)
    sizes = {"N": 0, "S": short, "L": MAX_SEQ_LEN}
    windows = [sizes[letter] for letter in pattern]
    attending = [i for i, window in enumerate(windows) if window]
    return SimpleNamespace(
        dtype=dtype,
        vocab_size=vocab_size,
        sequence_len=MAX_SEQ_LEN,
        n_embd=width,
        n_head=n_head,
        n_kv_head=n_kv_head,
        head_dim=HEAD_DIM,
        kv_dim=n_kv_head * HEAD_DIM,
        windows=windows,  # per layer; 0: no attention
        value_layers=[i for i in attending if VE_EVERY and (DEPTH - 1 - i) % VE_EVERY == 0],
    )


def accumulation_steps(rows):
    """Micro-batches of `rows` rows per step."""
    count, rest = divmod(TOTAL_BATCH_SIZE, rows * MAX_SEQ_LEN)
    if rest:
        fail(
            f"TOTAL_BATCH_SIZE = {TOTAL_BATCH_SIZE} must be a multiple of {rows} rows of "
            f"{MAX_SEQ_LEN} tokens; change it or DEVICE_BATCH_SIZE."
        )
    return count


def choose_dtype():
    """The dtype of activations: bf16 where it is fast, otherwise fp16 on an NVIDIA GPU and fp32
    elsewhere. Intel CPUs without AMX multiply bf16 at half the speed of fp32."""
    if DEVICE.type == "cuda":
        return torch.bfloat16 if torch.cuda.get_device_capability() >= (8, 0) else torch.float16

    def seconds(dtype):
        x = torch.ones(256, 256, dtype=dtype)
        return min(timeit.repeat(lambda: x @ x, number=1, repeat=20))

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads of a busy machine wait
    is_fast = DEVICE.type == "cpu" and seconds(torch.bfloat16) < 0.8 * seconds(torch.float32)
    torch.set_num_threads(threads)
    return torch.bfloat16 if is_fast else torch.float32


# ---- Model ----
def norm(x):
    return F.rms_norm(x, x.shape[-1:])


class Linear(nn.Linear):
    """Keeps fp32 weights for the optimizer; each forward pass casts them to the dtype of x. Cast a
    gain, too: an fp32 vector that multiplies x makes fp32 of all that follows."""

    def __init__(self, in_features, out_features, bias=False):
        super().__init__(in_features, out_features, bias=bias)

    def forward(self, x):
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


def rotate(x, cos, sin):
    """Rotary embedding (RoFormer, arXiv 2104.09864) of x [B, T, H, D]; cos, sin [T, 1, D / 2]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos + b * sin, b * cos - a * sin), dim=-1)


def look_up(embedding, idx):
    """Returns embedding(idx). On a CPU it takes gather, in fp32: its gradient needs no atomics,
    which saves a twentieth of a step."""
    if idx.device.type != "cpu":
        return embedding(idx)
    index = idx.flatten()[:, None].expand(-1, embedding.embedding_dim)
    return embedding.weight.float().gather(0, index).view(*idx.shape, -1)


class Attention(nn.Module):
    """Causal self-attention with QK-norm (arXiv 2010.04245). The layers of `value_layers` add to
    their values ve [B, T, KV heads * D], a learned embedding of the token, times a gate per KV head
    (ResFormer, arXiv 2410.17897)."""

    def __init__(self, config, layer, attend):
        super().__init__()
        self.head_dim = config.head_dim
        self.window = config.windows[layer]
        self.attend = attend
        self.q = Linear(config.n_embd, config.n_embd)
        self.k = Linear(config.n_embd, config.kv_dim)
        self.v = Linear(config.n_embd, config.kv_dim)
        self.out = Linear(config.n_embd, config.n_embd)
        self.gate = None
        if layer in config.value_layers:
            self.gate = Linear(VE_GATE_CHANNELS, config.n_kv_head)

    def forward(self, x, ve, cos, sin):
        q = self.q(x).unflatten(-1, (-1, self.head_dim))  # [B, T, H, D]
        k = self.k(x).unflatten(-1, (-1, self.head_dim))
        v = self.v(x).unflatten(-1, (-1, self.head_dim))
        if self.gate is not None:
            gate = 2 * torch.sigmoid(self.gate(x[..., :VE_GATE_CHANNELS]))  # 1 at the start
            v = v + gate[..., None] * ve.view(v.shape)
        # Without these norms, or with gains in them, set ATTENTION to "sdpa" on a CPU: exp in
        # attend_blocks could overflow.
        q = rotate(norm(q), cos, sin)
        k = rotate(norm(k), cos, sin)
        y = self.attend(q, k, v, self.window)
        return self.out(y.flatten(2))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        hidden = int(MLP_RATIO * config.n_embd)
        self.up = Linear(config.n_embd, hidden)
        self.down = Linear(hidden, config.n_embd)

    def forward(self, x):
        return self.down(F.relu(self.up(x)).square())  # ReLU squared (Primer, arXiv 2109.08668)


class Block(nn.Module):
    def __init__(self, config, layer, attend):
        super().__init__()
        self.attention = Attention(config, layer, attend) if config.windows[layer] else None
        self.mlp = MLP(config)

    def forward(self, x, ve, cos, sin):
        if self.attention is not None:
            x = x + self.attention(norm(x), ve, cos, sin)
        return x + self.mlp(norm(x))


class GPT(nn.Module):
    def __init__(self, config, attend):
        super().__init__()
        self.config = config
        n_layer = len(config.windows)
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.value_embeddings = nn.ModuleDict(
            {str(i): nn.Embedding(config.vocab_size, config.kv_dim) for i in config.value_layers}
        )
        if NGRAM_ROWS:
            self.ngrams = nn.Embedding(NGRAM_ROWS * config.vocab_size, config.n_embd)
            self.ngram_lambda = nn.Parameter(torch.empty(()))
        self.blocks = nn.ModuleList(Block(config, i, attend) for i in range(n_layer))
        self.lm_head = Linear(config.n_embd, config.vocab_size)
        # All lambdas act as 0-D: fp32 of shape [1] would promote the bf16 stream to fp32.
        self.resid_lambdas = nn.Parameter(torch.empty(n_layer))
        self.x0_lambdas = None if X0_INIT is None else nn.Parameter(torch.empty(n_layer))
        table = torch.empty(config.sequence_len, 1, config.head_dim // 2)
        self.register_buffer("cos", table, persistent=False)
        self.register_buffer("sin", table.clone(), persistent=False)

    def forward(self, idx, targets=None):
        """Logits, fp32 [B, T, V], of token ids [B, T]; with `targets` [B, T], their mean
        cross-entropy in nats."""
        T = idx.shape[1]
        cos = self.cos[:T]
        sin = self.sin[:T]
        x = norm(look_up(self.wte, idx).to(self.config.dtype))
        if NGRAM_ROWS:  # hashed pairs and triples that end here (arXiv 2501.16975)
            pair = 36313 * idx ^ 27191 * F.pad(idx, (1, 0))[:, :-1]
            triple = pair ^ 51749 * F.pad(idx, (2, 0))[:, :-2]
            row = torch.stack((pair, triple)) % self.ngrams.num_embeddings
            x = x + self.ngram_lambda * look_up(self.ngrams, row).sum(0).to(x.dtype)
        x0 = x
        for i, block in enumerate(self.blocks):
            x = self.resid_lambdas[i] * x
            if self.x0_lambdas is not None:
                x = x + self.x0_lambdas[i] * x0
            ve = None
            if i in self.config.value_layers:
                ve = look_up(self.value_embeddings[str(i)], idx).to(x.dtype)
            x = block(x, ve, cos, sin)
        x = norm(x)

        logits = self.lm_head(x).float()
        if LOGIT_SOFTCAP:
            # softcap * tanh(logits / softcap); tanh itself is slow when compiled for a CPU
            logits = LOGIT_SOFTCAP * (2 * torch.sigmoid(2 / LOGIT_SOFTCAP * logits) - 1)
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def flops_per_token(self):
        """Counts forward and backward: 6 per weight of a matmul; for attention 12 per channel and
        position in the window, not halved for causality (as in PaLM, arXiv 2204.02311)."""
        weights = sum(p.numel() for p in self.blocks.parameters()) + self.lm_head.weight.numel()
        return 6 * weights + 12 * self.config.n_embd * sum(self.config.windows)


# ---- Initialisation ----
def embeddings(model):
    return [module for module in model.modules() if isinstance(module, nn.Embedding)]


@torch.no_grad()
def initialise(model, seed):
    """Sets every parameter and buffer of GPT as shipped. Embedding tables become bf16 if that is
    the dtype of activations; with fp16 they stay fp32, or AdamW's second moments would underflow.
    """
    config = model.config
    device = model.lm_head.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    s = MATRIX_SCALE * math.sqrt(3 / config.n_embd)
    if config.dtype == torch.bfloat16:
        for embedding in embeddings(model):
            embedding.to(config.dtype)  # in place

    model.wte.weight.normal_(0, EMBEDDING_STD, generator=generator)
    model.lm_head.weight.normal_(0, UNEMBEDDING_STD, generator=generator)
    for table in model.value_embeddings.values():
        table.weight.uniform_(-s, s, generator=generator)
    for block in model.blocks:
        attention = block.attention
        if attention is not None:
            attention.q.weight.uniform_(-s, s, generator=generator)
            attention.k.weight.uniform_(-s, s, generator=generator)
            attention.v.weight.uniform_(-s, s, generator=generator)
            attention.out.weight.zero_()
            if attention.gate is not None:
                attention.gate.weight.zero_()
        block.mlp.up.weight.uniform_(-s, s, generator=generator)
        block.mlp.down.weight.zero_()
    if NGRAM_ROWS:
        model.ngrams.weight.zero_()
        model.ngram_lambda.fill_(NGRAM_INIT)
    model.resid_lambdas.fill_(RESID_INIT)
    if model.x0_lambdas is not None:
        model.x0_lambdas.fill_(X0_INIT)

    frequency = ROPE_BASE ** -(torch.arange(0, config.head_dim, 2, device=device) / config.head_dim)
    position = torch.arange(config.sequence_len, device=device).float()
    angle = torch.outer(position, frequency)[:, None]  # [T, 1, D / 2]
    model.cos = angle.cos().to(config.dtype)
    model.sin = angle.sin().to(config.dtype)


# ---- Parameter groups ----
def group(kind, params, lr, betas, decay=0.0):
    """Returns a row of parameter_groups. Before each step `set_schedules` derives from it lr,
    weight_decay and Muon's momentum, which rises to betas[0]."""
    return dict(kind=kind, params=list(params), peak_lr=lr, betas=betas, peak_decay=decay, eps=EPS)


def parameter_groups(model):
    """Each parameter of the model is in exactly one group. Muon takes the matrices in the blocks, a
    group per shape; AdamW takes the rest."""
    scale = (model.config.n_embd / 768) ** WIDTH_LR_POWER
    tables = [embedding.weight for embedding in embeddings(model)]
    x0 = [] if model.x0_lambdas is None else [model.x0_lambdas]
    lambdas = [model.resid_lambdas, *([model.ngram_lambda] if NGRAM_ROWS else [])]
    vectors = [p for p in model.blocks.parameters() if p.ndim < 2]  # none, as shipped
    matrices = defaultdict(list)
    for p in model.blocks.parameters():
        if p.ndim == 2:
            matrices[p.shape].append(p)

    # At step 0 the blocks add nothing: the lambdas' gradient is rounding, of which Adam makes a
    # whole step. Hence the low SCALAR_LR of `small`.
    groups = [
        group("adamw", model.lm_head.parameters(), UNEMBEDDING_LR * scale, ADAM_BETAS),
        group("adamw", tables, EMBEDDING_LR * scale, ADAM_BETAS),
        group("adamw", lambdas, RESID_LR, ADAM_BETAS),
        group("adamw", x0, SCALAR_LR, X0_BETAS),
        group("adamw", vectors, VECTOR_LR, ADAM_BETAS),
    ]
    for params in matrices.values():
        groups.append(group("muon", params, MATRIX_LR, MUON_BETAS, WEIGHT_DECAY))
    count = Counter(id(p) for row in groups for p in row["params"])
    wrong = [name for name, p in model.named_parameters() if count[id(p)] != 1]
    if wrong:
        fail(f"not in exactly one row of parameter_groups: {', '.join(wrong)}; fix the rows.")
    return [row for row in groups if row["params"]]


# ---- Optimizer ----
# Muon (kellerjordan.github.io/posts/muon) replaces a matrix's momentum with the nearest orthogonal
# matrix, so that rare directions move as far as common ones. An SVD would be slow. Instead, X
# becomes a X + b (X X^T) X + c (X X^T)^2 X five times, which turns each singular value s into
# a s + b s^3 + c s^5: with the coefficients of Polar Express (arXiv 2505.16932), nearly into 1.
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


def orthogonalise(g, dtype):
    """Approximates the orthogonal matrices nearest to a stack g [K, rows, cols], in `dtype`."""
    # The Frobenius norm bounds the singular values; 1.02 keeps them below 1 after rounding.
    x = g / (g.norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-6)
    x = x.to(dtype)
    tall = x.shape[-2] > x.shape[-1]
    for a, b, c in POLAR_EXPRESS:
        gram = x.mT @ x if tall else x @ x.mT  # the smaller of the two
        poly = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)  # b gram + c gram^2
        x = torch.baddbmm(x, x, poly, beta=a) if tall else torch.baddbmm(x, poly, x, beta=a)
    return x


def muon_update(p, grad, exp_avg, exp_avg_sq, lr, decay, momentum, beta2, eps, dtype):
    """Returns what Muon subtracts from a stack p [K, rows, cols]; `grad` and the momentum `exp_avg`
    have its shape, lr, decay, momentum and beta2 are 0-D.

    NorMuon (arXiv 2510.05491): the rows of an orthogonal update still differ in norm, so each is
    divided by the root of its running mean square, `exp_avg_sq` [K, rows, 1]; then the whole update
    is rescaled to the norm it had. In a wide matrix this is done to columns, so `exp_avg_sq` is
    [K, 1, cols].
    Cautious weight decay (arXiv 2510.12402): decay applies where the update shrinks the weight."""
    rows, cols = p.shape[-2:]
    reduced_dim = -1 if rows >= cols else -2
    exp_avg.lerp_(grad, 1 - momentum)
    nesterov = grad.lerp(exp_avg, momentum)
    update = orthogonalise(nesterov, dtype).float()
    square = update.square().mean(reduced_dim, keepdim=True)
    exp_avg_sq.lerp_(square, 1 - beta2)
    scale = exp_avg_sq.clamp_min(eps).rsqrt()
    before = square.mean((-2, -1), keepdim=True)  # mean squares, before and after scaling
    after = (square * scale.square()).mean((-2, -1), keepdim=True)
    update = update * (scale * (before / after.clamp_min(eps)).sqrt())
    update = update + decay * p * (update * p >= 0)
    return lr * max(1, rows / cols) ** 0.5 * update


class MuonAdamW:
    """Applies Muon or AdamW (arXiv 1711.05101) to each group, by its kind. torch's AdamW keeps the
    dictionaries it is given, so it sees the rates that set_schedules writes. `update` is
    muon_update, compiled or not."""

    def __init__(self, groups, dtype, update=muon_update):
        self.param_groups = groups
        self.adamw = torch.optim.AdamW([g for g in groups if g["kind"] == "adamw"], fused=True)
        self.muon_groups = [g for g in groups if g["kind"] == "muon"]
        self.muon_update = update
        self.dtype = dtype
        # Keeps small gradients in fp16 above 0, and calls `step`:
        self.scaler = torch.amp.GradScaler(DEVICE.type, enabled=dtype == torch.float16)
        for group in self.muon_groups:
            params = group["params"]
            rows, cols = params[0].shape
            per_side = (rows, 1) if rows >= cols else (1, cols)
            group["exp_avg"] = params[0].new_zeros(len(params), rows, cols)
            group["exp_avg_sq"] = params[0].new_zeros(len(params), *per_side)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:  # the parameter had no part in this step
                    p.grad = torch.zeros_like(p)
        self.adamw.step()  # fused, it rounds a bf16 table once, after decay and update
        for group in self.muon_groups:
            self.step_muon(group)

    def step_muon(self, group):
        params = group["params"]
        stack = torch.stack(params)
        grads = torch.stack([p.grad for p in params])
        # 0-D tensors, since a Python number that changes would make the update compile again.
        numbers = (group["lr"], group["weight_decay"], group["momentum"], group["betas"][1])
        scalars = [torch.tensor(number) for number in numbers]
        update = self.muon_update(
            stack, grads, group["exp_avg"], group["exp_avg_sq"], *scalars, group["eps"], self.dtype
        )
        torch._foreach_sub_(params, update.unbind())


# ---- Schedules ----
def lr_factor(progress):
    """Returns learning rate / peak at `progress`, the share of TIME_BUDGET that has passed."""
    factor = 1.0
    if progress < WARMUP_RATIO:
        factor = progress / WARMUP_RATIO
    if progress > 1 - WARMDOWN_RATIO:
        left = (1 - progress) / WARMDOWN_RATIO
        factor *= left + (1 - left) * FINAL_LR_FRAC
    return factor


def muon_momentum(step, peak):
    risen = min(step / MOMENTUM_STEPS, 1.0) if MOMENTUM_STEPS else 1.0
    return MOMENTUM_START + risen * (peak - MOMENTUM_START)


def set_schedules(optimizer, progress, step):
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * lr_factor(progress)
        group["weight_decay"] = group["peak_decay"] * (1 - progress)
    for group in optimizer.muon_groups:
        group["momentum"] = muon_momentum(step, group["betas"][0])


# ---- Training loop ----
def train_step(model, optimizer, batches):
    """Takes one optimizer step over a list of batches. Returns their mean loss, a 0-D tensor that a
    GPU may still be computing."""
    total = 0.0
    for inputs, targets, _ in batches:
        loss = model(inputs, targets) / len(batches)
        optimizer.scaler.scale(loss).backward()
        total = total + loss.detach()
    optimizer.scaler.step(optimizer)  # in fp16 it skips the step if a gradient has overflowed
    optimizer.scaler.update()
    model.zero_grad(set_to_none=True)
    return total


def train(model, optimizer, loader, micro_batches):
    """Takes steps of `micro_batches` batches until TIME_BUDGET is over. Returns their number."""
    step = 0
    batches = list(itertools.islice(loader, micro_batches))  # starts the clock
    while (progress := elapsed() / TIME_BUDGET) < 1:
        set_schedules(optimizer, progress, step)
        loss = train_step(model, optimizer, batches)
        step += 1
        shown = {"lr": f"x{lr_factor(progress):.2f}", "epoch": batches[-1][2]}
        batches = list(itertools.islice(loader, micro_batches))  # while a GPU is busy
        log_step(step, loss, **shown)  # waits for it
    return step


# ---- Attention back-ends ----
# Each is a function attend(q, k, v, window) on [B, T, H, D], in which query i sees the keys j with
# 0 <= i - j <= window; k and v may have fewer heads, each for a group of those of q.
def load_fa3():
    """FlashAttention 3 (arXiv 2407.08608) from the kernel hub, for Hopper only. Later runs use the
    copy that the first one downloaded, since a version on the hub is a branch, which may move."""
    if torch.cuda.get_device_capability() != (9, 0):
        raise RuntimeError("needs compute capability 9.0")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from kernels import get_kernel

    repository = "kernels-community/flash-attn3"
    pin = CACHE / f"flash-attn3-v1-{torch.__version__}"  # holds the path of that copy
    copy = pin.read_text() if pin.exists() else ""
    if os.path.isdir(copy):
        os.environ.setdefault("LOCAL_KERNELS", f"{repository}={copy}")
    module = get_kernel(repository, version=1)
    snapshot = "local"
    for folder in Path(module.__file__).parents:
        if folder.parent.name == "snapshots":  # where the hub keeps a download, by its commit
            snapshot = folder.name[:8]
            if os.access(CACHE, os.W_OK):
                new = pin.with_suffix(f".{os.getpid()}")
                new.write_text(str(folder))
                new.replace(pin)  # since another run may be reading it

    def attend(q, k, v, window):
        size = window_size(window, q.shape[1])
        out = module.flash_attn_func(q, k, v, causal=True, window_size=size)
        return out[0] if isinstance(out, tuple) else out

    attend.snapshot = snapshot  # for the record
    return attend


def window_size(window, T):
    """Returns (left, right) as flash attention takes them. -1 means all, faster on some GPUs."""
    return (-1, 0) if window >= T - 1 else (window, 0)


def load_varlen():
    """torch's own attention; only its varlen interface takes a window."""
    if torch.cuda.get_device_capability() < (8, 0):
        raise RuntimeError("needs compute capability 8.0")
    from torch.nn.attention.varlen import varlen_attn

    if current_flash_attention_impl():  # fa4 was tried before
        restore_flash_attention_impl()

    def attend(q, k, v, window):
        B, T = q.shape[:2]
        ends = torch.arange(0, (B + 1) * T, T, dtype=torch.int32, device=q.device)
        size = window_size(window, T)
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        out = varlen_attn(q, k, v, ends, ends, T, T, window_size=size, enable_gqa=True)
        return out.unflatten(0, (B, T))

    return attend


def load_fa4():
    """FlashAttention 4 (arXiv 2603.05451), which varlen_attn calls once it is switched on, though
    torch 2.15 may take cuDNN where the window covers the row. It needs the package flash-attn-4,
    and Hopper or a Blackwell of the data centre."""
    if torch.cuda.get_device_capability()[0] not in (9, 10):
        raise RuntimeError("needs compute capability 9.x or 10.x")
    attend = load_varlen()
    activate_flash_attention_impl("FA4")  # raises an error without the package
    attend.snapshot = version("flash-attn-4")
    return attend


def attend_blocks(q, k, v, window):
    """Cuts the row into N blocks of queries. Each sees the keys of its own block and of the
    `before` blocks ahead of it, as far as the window reaches. Compiled for a CPU, with a short
    window, this is three to seven times as fast as sdpa. Its softmax subtracts no maximum, a
    twentieth of a step, since QK-norm keeps the scores within +-sqrt(D)."""
    T = q.shape[1]
    size = math.gcd(T, CPU_QUERY_BLOCK)
    before = math.ceil(window / size)
    if (before + 1) * size >= T:  # the window spans all blocks: use one
        size = T
        before = 0
    group = q.shape[2] // k.shape[2]
    if group > 1:
        k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    q, k, v = (x.unflatten(1, (-1, size)).transpose(2, 3) for x in (q, k, v))

    def with_blocks_before(x):  # [B, N, H, size, D] -> [B, N, H, (before + 1) * size, D]
        shifted = [F.pad(x[:, :-i], (0, 0, 0, 0, 0, 0, i, 0)) for i in range(before, 0, -1)]
        return torch.cat((*shifted, x), dim=3)

    # Positions count from the start of the block; from that of the row it is 5 % slower.
    integers = {"dtype": torch.int32, "device": q.device}
    query = torch.arange(size, **integers)[:, None]
    key = torch.arange(-before * size, size, **integers)
    begin = torch.arange(0, T, size, **integers)[:, None, None, None]
    before_row = begin + key < 0
    hidden = (key > query) | (key < query - window) | before_row  # [N, 1, size, keys]
    # Added to the scores, since masking is slow in compiled code.
    bias = torch.zeros_like(hidden, dtype=q.dtype).masked_fill(hidden, -math.inf)
    scores = q @ with_blocks_before(k).mT * q.shape[-1] ** -0.5
    weights = (scores + bias).exp()  # in bf16, or the backward pass takes exp again
    total = weights.sum(-1, keepdim=True, dtype=torch.float32)
    out = (weights @ with_blocks_before(v) / total).to(v.dtype)
    return out.transpose(2, 3).flatten(1, 2)


def attend_sdpa(q, k, v, window):
    """Lets torch choose a kernel; masks if the window is short. Works on every device."""
    T = q.shape[1]
    mask = None
    if window < T - 1:
        position = torch.arange(T, device=q.device)
        distance = position[:, None] - position
        mask = (distance >= 0) & (distance <= window)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = k.shape[1] < q.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=grouped)
    return out.transpose(1, 2)


BACKENDS = {
    "fa3": load_fa3,
    "fa4": load_fa4,
    "varlen": load_varlen,
    "blocks": lambda: attend_blocks,
    "sdpa": lambda: attend_sdpa,
}
BACKEND_ORDER = {
    "cuda": ("fa3", "fa4", "varlen", "sdpa"),
    "cpu": ("blocks",),
    "mps": ("sdpa",),
}
ATTENTION_TOLERANCE = 0.02  # relative; bf16 rounding gives 0.004, a wrong window over 0.1


def probe_attention(attend, config):
    """Compares forward and backward with sdpa in fp32, at the real sizes and windows, since a
    kernel that imports may still be wrong. Raises RuntimeError."""
    if COMPILE and DEVICE.type == "cuda":
        attend = torch.compile(attend, dynamic=False)  # may fail although the kernel works
    generator = torch.Generator().manual_seed(0)
    # For q, k, v and the output's gradient:
    heads = (config.n_head, config.n_kv_head, config.n_kv_head, config.n_head)
    shapes = [(2, config.sequence_len, count, config.head_dim) for count in heads]
    for window in sorted(set(config.windows) - {0}):
        tensors = [torch.randn(s, generator=generator).to(DEVICE, config.dtype) for s in shapes]
        results = []
        for function, precision in ((attend, config.dtype), (attend_sdpa, torch.float32)):
            *inputs, grad = (x.to(precision, copy=True).requires_grad_() for x in tensors)
            out = function(*inputs, window)
            results.append((out, *torch.autograd.grad(out, inputs, grad)))
        for name, got, want in zip(("forward", "dq", "dk", "dv"), *results, strict=True):
            error = ((got.float() - want).norm() / want.norm()).item()
            if not error <= ATTENTION_TOLERANCE:
                raise RuntimeError(f"{name} is off by {error:.3f} at window {window}")


def describe(error):
    """Returns an error as one line: the compiler's `error:` line, or the first paragraph."""
    text = str(error).strip()
    line = next((line for line in text.splitlines() if "error: " in line), "")
    reason = line[-180:] or " ".join(text.split("\n\n")[0].split())[:180]
    return f"{type(error).__name__}: {reason.strip()}"


def choose_attention(config):
    """Returns (name, attend) of the first back-end for this device that passes the probe; prints
    why others were rejected."""
    names = BACKEND_ORDER[DEVICE.type] if ATTENTION == "auto" else (ATTENTION,)
    for name in names:
        try:
            attend = BACKENDS[name]()
            probe_attention(attend, config)
            return f"{name} {getattr(attend, 'snapshot', '')}".strip(), attend
        except Exception as error:  # a foreign kernel can raise anything: try the next
            print(f"attention: not {name}: {describe(error)}")
    return fail(
        "no attention back-end works, for the reasons above; install gcc if that is missing, or "
        "change ATTENTION, KV_HEADS, HEAD_DIM or COMPILE."
    )


# ---- Warm-up and plumbing, which experiments rarely change ----
def build(config, attend, compiles):
    """Seeds torch. Returns (model, compiled model, optimizer) as a run begins with them."""
    torch.manual_seed(SEED)
    with DEVICE:
        model = GPT(config, attend)
    initialise(model, SEED)
    compiled_model = model
    update = muon_update
    if compiles:
        torch._dynamo.config.recompile_limit = 64  # Muon's update is compiled once per shape
        compiled_model = torch.compile(model, dynamic=False)
        update = torch.compile(muon_update, dynamic=False)
    return model, compiled_model, MuonAdamW(parameter_groups(model), config.dtype, update)


def for_evaluation(model, compiled_model):
    """The model to score, without CUDA the uncompiled one: compiling takes 20 s after each change
    and saves 2 s."""
    return compiled_model if DEVICE.type == "cuda" else model


def rehearse(rows, config, attend, compiles):
    """Runs a training step and an evaluation batch on random tokens, so that everything is compiled
    and known to fit. Its model is thrown away: only compiled code reaches the run."""
    micro_batches = min(accumulation_steps(rows), 2)  # the second adds to the first's gradients
    model, compiled_model, optimizer = build(config, attend, compiles)
    inputs = torch.randint(config.vocab_size, (rows, MAX_SEQ_LEN), device=DEVICE)
    batch = (inputs, inputs.clone(), 0)  # the same tensor twice would compile differently
    set_schedules(optimizer, 0.0, 0)
    optimizer.step()  # compiles and allocates; in fp16 the scaler may skip the step below
    train_step(compiled_model, optimizer, [batch] * micro_batches)
    inputs = torch.randint(config.vocab_size, (EVAL_BATCH, MAX_SEQ_LEN), device=DEVICE)
    model.eval()
    with torch.no_grad():
        for_evaluation(model, compiled_model)(inputs)


def is_out_of_memory(error):
    """Knows the errors of GPUs, CPUs and compilers by these words."""
    return any(words in str(error) for words in ("out of memory", "allocate memory"))


def can_compile():
    """Without CUDA compiles a sum. If that fails, the machine lacks a compiler or Python's headers,
    and the model has no bug. Prints the reason."""
    if DEVICE.type == "cuda":
        return True
    try:
        torch.compile(lambda x: x + 1)(torch.zeros(1, device=DEVICE))
        return True
    except Exception as error:
        print(f"continuing without compilation, which is slower: {describe(error)}")
        return False


def warm_up(config, attend, compiles):
    """Rehearses with DEVICE_BATCH_SIZE rows at a time, halved until they fit in memory. Returns
    their number."""
    rows = max(min(DEVICE_BATCH_SIZE, TOTAL_BATCH_SIZE // MAX_SEQ_LEN), 1)
    while True:
        try:
            rehearse(rows, config, attend, compiles)
            break
        except Exception as error:
            if rows == 1 or not is_out_of_memory(error):
                raise
        print(f"out of memory: {rows} -> {rows // 2} rows at a time; a step stays the same")
        rows //= 2
        torch._dynamo.reset()  # drops what was compiled for more rows
        gc.collect()
        torch.accelerator.empty_cache()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()  # the final block shows the peak of training
    return rows


CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # microseconds per period, or "max"


def tune_cpu():
    """Keeps glibc from returning freed memory, which the kernel would zero again (a tenth of a
    step), asks for pages of 2 MB (a fortieth), limits threads to a container's quota, and starts
    no processes that compile Triton."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(-4, 0)  # M_MMAP_MAX
        mallopt(-1, -1)  # M_TRIM_THRESHOLD
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # read by torch's allocator
    quota = CPU_QUOTA.read_text().split() if CPU_QUOTA.exists() else ["max"]
    if quota[0] != "max":
        allowed = max(1, int(quota[0]) // int(quota[1]))
        torch.set_num_threads(min(torch.get_num_threads(), allowed))
    os.environ.setdefault("TORCH_WARM_POOL", "0")
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # "no nvcc"


# ---- Main ----
def main():
    if sys.argv[1:]:
        fail("train.py takes no arguments; its knobs are at the top of the file.")
    start()
    if DEVICE.type == "cpu":
        tune_cpu()
    torch.set_float32_matmul_precision("high")  # TF32, where a GPU has it
    tokenizer = Tokenizer.from_directory()
    config = derive_config(tokenizer.get_vocab_size(), choose_dtype())
    backend, attend = choose_attention(config)
    compiles = COMPILE and can_compile()
    if compiles:
        print("warming up: 10 s, or up to two minutes if the model has to be compiled", flush=True)
    rows = warm_up(config, attend, compiles)
    model, compiled_model, optimizer = build(config, attend, compiles)
    gc.freeze()  # else a full collection takes two seconds for what was there
    atexit.register(gc.unfreeze)  # else bindings complain of leaks

    num_params = sum(p.numel() for p in model.parameters())
    flops_per_token = model.flops_per_token()
    print(
        f"model: depth {DEPTH}, width {config.n_embd}, {config.n_head} heads of {HEAD_DIM}, "
        f"windows {config.windows}, {num_params / 1e6:.1f} M parameters, {flops_per_token:.2e} "
        f"FLOPs per token, {config.dtype}, attention {backend}, torch {torch.__version__}"
    )
    count = accumulation_steps(rows)
    print(f"training: steps of {count} x {rows} rows = {TOTAL_BATCH_SIZE} tokens", flush=True)

    loader = make_dataloader(tokenizer, rows, MAX_SEQ_LEN)
    steps = train(compiled_model, optimizer, loader, count)
    evaluate_bpb(
        for_evaluation(model, compiled_model),
        tokenizer,
        rows,
        num_steps=steps,
        num_params_M=num_params / 1e6,
        flops_per_token=flops_per_token,
        depth=DEPTH,
        attention=backend,
    )


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a traceback of compilers
    try:
        main()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        fail(f"{describe(error)}; lower DEPTH, ASPECT_RATIO or DEVICE_BATCH_SIZE.", 5)
