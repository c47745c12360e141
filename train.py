"""
train.py, the subject of autoresearch: the GPT, the MuonAdamW optimizer and the training loop. This
is the only file that a night of research edits.

    uv run train.py              train for TIME_BUDGET seconds, print val_bpb: lower is better
    grep -n '^# ----' train.py   the table of contents

prepare.py owns data, clock and metric. Importing this file starts no run.
Shapes: B rows, T tokens, C width, H heads, D head size, V vocabulary.
"""

import gc
import math
import os
import re
import shutil
import sys
from collections import Counter, defaultdict, deque
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic

from prepare import (  # first: its import starts the clock of total_seconds
    CACHE,
    MAX_SEQ_LEN,
    SEED,
    TIME_BUDGET,
    Tokenizer,
    by_profile,
    elapsed,
    eval_batch_size,
    evaluate_bpb,
    largest_divisor,
    log_step,
    make_dataloader,
    start,
    stop,
)

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.adamw import adamw
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

# ---- Knobs: every number worth turning ----
# fmt: off
# Model
DEPTH             = by_profile(full=8, medium=4, small=3)              # layers
ASPECT_RATIO      = by_profile(full=64, medium=128, small=64)          # width / DEPTH; the width is
                                                     # rounded up to whole heads
HEAD_DIM          = by_profile(full=128, medium=128, small=64)         # channels per head
KV_HEADS          = 0                                # key/value heads; 0: as many as query heads
WINDOW_PATTERN    = "SSSL"                           # S short, L full; repeated, the last is L
SHORT_WINDOW      = by_profile(full=1024, medium=256, small=128)       # reach of S; 0: no limit
MLP_RATIO         = 4                                # hidden size of the MLP / width
ROPE_BASE         = 10000                            # base of the rotary embedding (theta)
LOGIT_SOFTCAP     = 15                               # tanh keeps logits within +-this; 0: off
VE_EVERY          = 2                                # value embedding on the last layer and every
                                                     # n-th before it; 0: none
VE_GATE_CHANNELS  = 32                               # input channels of a value embedding's gate
# Initialisation
EMBEDDING_STD     = 1.0                              # wte, normal
UNEMBEDDING_STD   = 0.001                            # lm_head, normal: the first loss is ln V
MATRIX_SCALE      = 1.0                              # q, k, v, up and value embeddings: uniform
                                                     # within +-this * sqrt(3 / C)
RESID_INIT        = 1.0                              # resid_lambdas: factor on the residual stream
                                                     # before each layer
X0_INIT           = 0.1                              # x0_lambdas: factor on the embedding, which is
                                                     # added there; None: not added
# Batch
TOTAL_BATCH_SIZE  = by_profile(full=2**19, medium=2**15, small=2**12)  # tokens per step
DEVICE_BATCH_SIZE = by_profile(full=128, medium=16, small=8)           # rows at a time, at most
# Optimizer: Muon takes MATRIX_LR, AdamW the other rates
EMBEDDING_LR      = by_profile(full=0.6, medium=0.6, small=0.3)        # wte, value embeddings
UNEMBEDDING_LR    = by_profile(full=0.004, medium=0.004, small=0.002)  # lm_head
MATRIX_LR         = by_profile(full=0.04, medium=0.04, small=0.02)     # matrices in the blocks
SCALAR_LR         = 0.5                              # x0_lambdas, vectors in the blocks
RESID_LR          = 0.005                            # resid_lambdas
WIDTH_LR_POWER    = -0.5                             # wte, value embeddings, lm_head: lr times
                                                     # (C / 768) ** this
WEIGHT_DECAY      = 0.2                              # of the matrices, falls to 0 over the run
ADAM_BETAS        = (0.8, 0.95)                      # beta1, beta2
X0_BETAS          = (0.96, 0.95)                     # the same for x0_lambdas
MUON_BETAS        = (0.95, 0.95)                     # final momentum, beta2 of NorMuon
MOMENTUM_START    = 0.85                             # Muon's momentum at step 0
MOMENTUM_STEPS    = 300                              # steps until it reaches MUON_BETAS[0]
EPS               = 1e-10                            # of both optimizers
# Schedule
WARMUP_RATIO      = 0.0                              # share of TIME_BUDGET in which the lr rises
WARMDOWN_RATIO    = 0.5                              # share at the end in which it falls
FINAL_LR_FRAC     = 0.0                              # final lr / peak lr
# Run
ATTENTION         = "auto"                           # or fa3, varlen, blocks, sdpa
CPU_QUERY_BLOCK   = 64                               # queries per block of attention on a CPU
RECOMPUTE         = False                            # True: a third less memory, 8 % slower (CPU)
COMPILE           = True                             # False: slower, errors point at their line
# fmt: on


# ---- Model ----
@dataclass(frozen=True)
class Config:
    """Sizes that follow from the knobs and the tokenizer; derive_config makes it."""

    vocab_size: int
    sequence_len: int
    n_head: int
    n_kv_head: int
    head_dim: int
    windows: tuple  # for each layer, how many positions it looks back
    value_layers: tuple  # the layers with a value embedding

    @property
    def n_embd(self):
        return self.n_head * self.head_dim

    @property
    def kv_dim(self):
        return self.n_kv_head * self.head_dim


def norm(x):
    return F.rms_norm(x, x.shape[-1:])


class Linear(nn.Linear):
    """Its weights stay in fp32 for the optimizer and are cast to the dtype of x."""

    def __init__(self, in_features, out_features, bias=False):
        super().__init__(in_features, out_features, bias=bias)

    def forward(self, x):
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


def rotate(x, cos, sin):
    """Rotary embedding (RoFormer, arXiv 2104.09864) of x [B, T, H, D]; cos, sin [T, 1, D / 2]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos + b * sin, b * cos - a * sin), dim=-1)


class Attention(nn.Module):
    """Causal self-attention, with QK-norm (arXiv 2010.04245) after the rotary embedding. In value
    layers an embedding of the token is added to the values (ResFormer, arXiv 2410.17897), times a
    gate for each key-value head."""

    def __init__(self, config, layer, attend):
        super().__init__()
        self.head_dim = config.head_dim
        self.group = config.n_head // config.n_kv_head
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
        q = norm(rotate(q, cos, sin))
        k = norm(rotate(k, cos, sin))
        if self.group > 1:
            k = k.repeat_interleave(self.group, dim=2)
            v = v.repeat_interleave(self.group, dim=2)
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
        self.attention = Attention(config, layer, attend)
        self.mlp = MLP(config)

    def forward(self, x, ve, cos, sin):
        x = x + self.attention(norm(x), ve, cos, sin)
        return x + self.mlp(norm(x))


def keep_products():
    """For `checkpoint`: of a block keeps the matrix products and attention for the backward pass.
    All else is cheap and is computed again."""

    def policy(context, operator, *args, **kwargs):
        is_product = re.search("mm|att", str(operator))
        return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.MUST_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class GPT(nn.Module):
    def __init__(self, config, attend):
        super().__init__()
        self.config = config
        n_layer = len(config.windows)
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.value_embeddings = nn.ModuleDict(
            {str(i): nn.Embedding(config.vocab_size, config.kv_dim) for i in config.value_layers}
        )
        self.blocks = nn.ModuleList(Block(config, i, attend) for i in range(n_layer))
        self.lm_head = Linear(config.n_embd, config.vocab_size)
        # In fp32 but used as 0-D, since a weight of shape [1] would turn the stream to fp32.
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
        x = norm(self.wte(idx))
        x0 = x
        for i, block in enumerate(self.blocks):
            x = self.resid_lambdas[i] * x
            if self.x0_lambdas is not None:
                x = x + self.x0_lambdas[i] * x0
            ve = self.value_embeddings[str(i)](idx) if i in self.config.value_layers else None
            if RECOMPUTE and self.training:
                x = checkpoint(
                    block, x, ve, cos, sin, use_reentrant=False, context_fn=keep_products
                )
            else:
                x = block(x, ve, cos, sin)
        x = norm(x)

        logits = self.lm_head(x).float()
        if LOGIT_SOFTCAP:
            # softcap * tanh(logits / softcap), but tanh itself is slow where a CPU compiles it
            logits = LOGIT_SOFTCAP * (2 * torch.sigmoid(2 / LOGIT_SOFTCAP * logits) - 1)
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def flops_per_token(self):
        """Forward and backward: 6 per weight of a matrix product, 12 per channel and position in
        the window, also those in the future (as in PaLM, arXiv 2204.02311)."""
        weights = sum(p.numel() for p in self.blocks.parameters()) + self.lm_head.weight.numel()
        T = self.config.sequence_len
        seen = sum(min(window, T) for window in self.config.windows)
        return 6 * weights + 12 * self.config.n_embd * seen


# ---- Initialisation ----
@torch.no_grad()
def initialise(model, dtype, seed):
    """Sets every parameter and floating-point buffer; the embedding tables become `dtype`."""
    config = model.config
    device = model.lm_head.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    s = MATRIX_SCALE * math.sqrt(3 / config.n_embd)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.fill_(math.nan)  # marks what the lines below forget
    model.wte.to(dtype)  # in place
    model.value_embeddings.to(dtype)

    model.wte.weight.normal_(0, EMBEDDING_STD, generator=generator)
    model.lm_head.weight.normal_(0, UNEMBEDDING_STD, generator=generator)
    for table in model.value_embeddings.values():
        table.weight.uniform_(-s, s, generator=generator)
    for block in model.blocks:
        attention = block.attention
        attention.q.weight.uniform_(-s, s, generator=generator)
        attention.k.weight.uniform_(-s, s, generator=generator)
        attention.v.weight.uniform_(-s, s, generator=generator)
        attention.out.weight.zero_()
        if attention.gate is not None:
            attention.gate.weight.zero_()
        block.mlp.up.weight.uniform_(-s, s, generator=generator)
        block.mlp.down.weight.zero_()
    model.resid_lambdas.fill_(RESID_INIT)
    if model.x0_lambdas is not None:
        model.x0_lambdas.fill_(X0_INIT)

    frequency = ROPE_BASE ** -(torch.arange(0, config.head_dim, 2, device=device) / config.head_dim)
    position = torch.arange(config.sequence_len, device=device).float()
    angle = torch.outer(position, frequency)[:, None]  # [T, 1, D / 2]
    model.cos = angle.cos().to(dtype)
    model.sin = angle.sin().to(dtype)

    tensors = (*model.named_parameters(), *model.named_buffers())
    forgotten = [name for name, tensor in tensors if tensor.isnan().any()]
    if forgotten:
        stop(f"initialise sets no value, or NaN, for {', '.join(forgotten)}; add a line there.")


# ---- Parameter groups ----
def require(condition, sentence):
    if not condition:
        stop(sentence)


def parameter_groups(model):
    """One row per group; each parameter of the model is in exactly one. Muon takes the matrices in
    the blocks, a group per shape; AdamW takes the rest. Before each step `set_schedules` derives
    lr, weight_decay and Muon's momentum from peak_lr, peak_decay and betas[0]."""
    scale = (model.config.n_embd / 768) ** WIDTH_LR_POWER
    head_lr = UNEMBEDDING_LR * scale
    table_lr = EMBEDDING_LR * scale
    head = list(model.lm_head.parameters())
    tables = list(model.value_embeddings.parameters())
    x0 = [] if model.x0_lambdas is None else [model.x0_lambdas]
    vectors = [p for p in model.blocks.parameters() if p.ndim < 2]  # gains, biases and the like
    matrices = defaultdict(list)
    for p in model.blocks.parameters():
        if p.ndim == 2:
            matrices[p.shape].append(p)

    # fmt: off
    columns =    ("kind",  "params",              "peak_lr",  "betas",    "peak_decay", "eps")
    rows = [
                 ("adamw", head,                  head_lr,    ADAM_BETAS, 0.0,          EPS),
                 ("adamw", [model.wte.weight],    table_lr,   ADAM_BETAS, 0.0,          EPS),
                 ("adamw", tables,                table_lr,   ADAM_BETAS, 0.0,          EPS),
                 ("adamw", [model.resid_lambdas], RESID_LR,   ADAM_BETAS, 0.0,          EPS),
                 ("adamw", x0,                    SCALAR_LR,  X0_BETAS,   0.0,          EPS),
                 ("adamw", vectors,               SCALAR_LR,  ADAM_BETAS, 0.0,          EPS),
    ]
    for params in matrices.values():
        rows += [("muon",  params,                MATRIX_LR,  MUON_BETAS, WEIGHT_DECAY, EPS)]
    # fmt: on
    groups = [dict(zip(columns, row, strict=True)) for row in rows]
    count = Counter(id(p) for group in groups for p in group["params"])
    wrong = [name for name, p in model.named_parameters() if count[id(p)] != 1]
    if wrong:
        stop(f"not in exactly one row of parameter_groups: {', '.join(wrong)}; fix the rows.")
    for group in groups:
        if group["kind"] == "muon":
            same = len({p.shape for p in group["params"]}) == 1 and group["params"][0].ndim == 2
            require(same, "a row of kind muon takes matrices of one shape; fix parameter_groups.")
        else:
            require(group["kind"] == "adamw", f"kind {group['kind']!r} is neither adamw nor muon.")
    return [group for group in groups if group["params"]]


# ---- Optimizer ----
# Polar Express (arXiv 2505.16932): odd polynomials that together drive singular values to 1.
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


def orthogonalise(g, dtype):
    """Approximately the nearest semi-orthogonal matrices of a stack [K, rows, cols], computed in
    `dtype`."""
    x = g.to(dtype)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-6)  # singular values must be below 1
    tall = x.shape[-2] > x.shape[-1]
    for a, b, c in POLAR_EXPRESS:
        gram = x.mT @ x if tall else x @ x.mT  # the smaller of the two
        poly = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, x, poly, beta=a) if tall else torch.baddbmm(x, poly, x, beta=a)
    return x


def muon_update(p, grad, exp_avg, exp_avg_sq, lr, decay, momentum, beta2, eps, dtype):
    """Returns what Muon subtracts from a stack p [K, rows, cols]: Nesterov momentum, orthogonal;
    then NorMuon (arXiv 2510.05491), which divides the update by a running second moment per row or
    column and keeps its norm; then cautious weight decay, where update and weight have one sign."""
    rows, cols = p.shape[-2:]
    shorter = -1 if rows >= cols else -2
    exp_avg.lerp_(grad, 1 - momentum)
    update = orthogonalise(grad.lerp(exp_avg, momentum), dtype).float()
    square = update.square().mean(shorter, keepdim=True)  # what the norms follow from
    exp_avg_sq.lerp_(square, 1 - beta2)
    scale = exp_avg_sq.clamp_min(eps).rsqrt()
    before = square.mean((-2, -1), keepdim=True)
    after = (square * scale.square()).mean((-2, -1), keepdim=True)
    update = update * (scale * (before / after.clamp_min(eps)).sqrt())
    update = update + decay * p * (update * p >= 0)
    return lr * max(1, rows / cols) ** 0.5 * update


def uncompiled(function):
    """Stands in for torch.compile where nothing is compiled."""
    return function


class MuonAdamW:
    """Muon or AdamW for each group, by its kind. `compiler` compiles Muon's update; what changes
    from step to step enters it as 0-D tensors, so that nothing recompiles."""

    def __init__(self, groups, dtype, compiler=uncompiled):
        self.param_groups = groups
        self.dtype = dtype
        self.muon_update = compiler(muon_update)
        self.reset()

    def reset(self):
        """Back to before the first step."""
        for group in self.param_groups:
            params = group["params"]
            if group["kind"] == "muon":
                rows, cols = params[0].shape
                per_side = (rows, 1) if rows >= cols else (1, cols)
                group["exp_avg"] = params[0].new_zeros(len(params), rows, cols)
                group["exp_avg_sq"] = params[0].new_zeros(len(params), *per_side)
            else:
                group["exp_avg"] = [torch.zeros_like(p) for p in params]
                group["exp_avg_sq"] = [torch.zeros_like(p) for p in params]
                group["steps"] = [torch.zeros((), device=p.device) for p in params]

    @torch.no_grad()
    def step(self):
        """One update of every parameter; clears the gradients."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:  # it had no part in this step
                    p.grad = torch.zeros_like(p)
            if group["kind"] == "muon":
                self.step_muon(group)
            else:
                self.step_adamw(group)
            for p in group["params"]:
                p.grad = None

    def step_muon(self, group):
        params = group["params"]
        stack = torch.stack(params)
        grads = torch.stack([p.grad for p in params])
        numbers = (group["lr"], group["weight_decay"], group["momentum"], group["betas"][1])
        scalars = [torch.tensor(number) for number in numbers]
        update = self.muon_update(
            stack, grads, group["exp_avg"], group["exp_avg_sq"], *scalars, group["eps"], self.dtype
        )
        for p, change in zip(params, update, strict=True):
            p.sub_(change)

    def step_adamw(self, group):
        """torch's AdamW (arXiv 1711.05101), one kernel that rounds a table in bf16 once, after
        decay and update. Decay in a step of its own, p *= 1 - lr * decay, would round back to p."""
        beta1, beta2 = group["betas"]
        adamw(
            group["params"],
            [p.grad for p in group["params"]],
            group["exp_avg"],
            group["exp_avg_sq"],
            max_exp_avg_sqs=[],
            state_steps=group["steps"],
            fused=True,
            amsgrad=False,
            maximize=False,
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
        )


# ---- Schedules ----
def lr_factor(progress):
    """Share of the peak learning rates at `progress`, the share of TIME_BUDGET that has passed."""
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
        group["momentum"] = muon_momentum(step, group["betas"][0])


# ---- Training loop ----
def train_step(model, optimizer, batches, micro_batches):
    """One optimizer step. Returns the loss as a 0-D tensor, without waiting for the device, and the
    epoch."""
    total = 0.0
    for _ in range(micro_batches):
        inputs, targets, epoch = next(batches)
        loss = model(inputs, targets) / micro_batches
        loss.backward()
        total = total + loss.detach()
    optimizer.step()
    return total, epoch


def read_later(loss):
    """A function that waits for this loss and returns it as a float. On a GPU `loss.item()` would
    wait for all that was queued by then, the next step too."""
    if loss.device.type != "cuda":
        return loss.item
    copy = loss.to("cpu", non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def read():
        copied.synchronize()
        return copy.item()

    return read


# Dense bf16 peaks in TFLOP/s, from the vendors' data sheets, by the names that torch gives.
# fmt: off
PEAK_TFLOPS = {
    "NVIDIA B200": 2250, "NVIDIA GB200": 2500, "NVIDIA H200": 989, "NVIDIA H200 NVL": 836,
    "NVIDIA H100 80GB HBM3": 989, "NVIDIA H100 PCIe": 756, "NVIDIA H100 NVL": 835,
    "NVIDIA A100-SXM4-40GB": 312, "NVIDIA A100-SXM4-80GB": 312, "NVIDIA A100-PCIE-40GB": 312,
    "NVIDIA A100 80GB PCIe": 312, "NVIDIA A800-SXM4-80GB": 312, "NVIDIA A40": 149.7,
    "NVIDIA A30": 165, "NVIDIA L40S": 362, "NVIDIA L4": 121, "NVIDIA GeForce RTX 5090": 209.5,
    "NVIDIA GeForce RTX 4090": 165.2, "NVIDIA GeForce RTX 3090": 71,
}
# fmt: on


def tokens_per_second(tokens):
    """The speed since the first batch; 0 if none came from make_dataloader: evaluate_bpb tells."""
    return tokens / (elapsed() or math.inf)


def mfu_percent(flops_per_token, tokens):
    """The percentage of the card's peak that `tokens` took; None where the table lacks it."""
    peak = torch.cuda.is_available() and PEAK_TFLOPS.get(torch.cuda.get_device_name())
    return 100 * flops_per_token * tokens_per_second(tokens) / (peak * 1e12) if peak else None


def train(model, optimizer, batches, micro_batches, flops_per_token):
    """Takes steps until the next one would not finish within TIME_BUDGET. Returns their number."""
    # A GPU gets the next step while it works on this one: each loss is read one step late.
    late = 1 if torch.cuda.is_available() else 0
    unread = deque()

    def log_oldest():
        step, read, factor, epoch = unread.popleft()
        tokens = step * TOTAL_BATCH_SIZE
        mfu = mfu_percent(flops_per_token, tokens)
        log_step(
            step,
            read(),
            lr=f"x{factor:.2f}",
            tokens_per_second=f"{tokens_per_second(tokens):.0f}",
            mfu=f"{mfu:.1f}%" if mfu else "n/a",
            epoch=epoch,
        )

    step = 0
    time_left = True
    while time_left:
        began = monotonic()
        progress = min(elapsed() / TIME_BUDGET, 1.0)
        set_schedules(optimizer, progress, step)
        loss, epoch = train_step(model, optimizer, batches, micro_batches)
        step += 1
        unread.append((step, read_later(loss), lr_factor(progress), epoch))
        if len(unread) > late:
            log_oldest()
        # On a GPU this step is still running, so that two must fit: this one and the next.
        needed = (1 + late) * (monotonic() - began)
        # 0: no batch came from make_dataloader; evaluate_bpb will say so.
        time_left = 0 < elapsed() <= TIME_BUDGET - needed
    while unread:
        log_oldest()
    return step


# ---- Below this line few experiments need to look ----


# ---- Attention back-ends ----
# Each is a function attend(q, k, v, window) on [B, T, H, D], in which query i sees the keys j with
# 0 <= i - j <= window.
def reference_attention(q, k, v, window):
    """The definition, in fp32: the back-ends are probed and tested against it."""
    q, k, v = (x.float().transpose(1, 2) for x in (q, k, v))
    position = torch.arange(q.shape[2], device=q.device)
    distance = position[:, None] - position
    hidden = (distance < 0) | (distance > window)
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(hidden, -math.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


def load_fa3():
    """FlashAttention 3 (arXiv 2407.08608) from the kernel hub, for Hopper alone. Later runs load it
    from the folder of the first, without the hub: a version is a branch there, which moves."""
    if torch.cuda.get_device_capability() != (9, 0):
        raise RuntimeError("needs compute capability 9.0")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from kernels import get_kernel

    repository = "kernels-community/flash-attn3"
    known = CACHE / "flash-attn3-v1"
    if known.exists() and os.path.isdir(known.read_text()):
        os.environ.setdefault("LOCAL_KERNELS", f"{repository}={known.read_text()}")
    module = get_kernel(repository, version=1)
    snapshot = "local"
    for folder in Path(module.__file__).parents:
        if folder.parent.name == "snapshots":
            snapshot = folder.name[:8]
            if os.access(CACHE, os.W_OK):
                known.write_text(str(folder))

    def attend(q, k, v, window):
        size = window_size(window, q.shape[1])
        out = module.flash_attn_func(q, k, v, causal=True, window_size=size)
        return out[0] if isinstance(out, tuple) else out

    attend.snapshot = snapshot  # for the record
    return attend


def window_size(window, T):
    """As flash attention takes it. For what covers the row torch has a quicker kernel on some
    cards, but only if the window is written as -1."""
    return (-1, 0) if window >= T - 1 else (window, 0)


def load_varlen():
    """torch's own flash attention, whose interface for rows of any length takes a window."""
    if torch.cuda.get_device_capability() < (8, 0):
        raise RuntimeError("needs compute capability 8.0")
    from torch.nn.attention.varlen import varlen_attn

    def attend(q, k, v, window):
        B, T, H, D = q.shape
        ends = torch.arange(0, (B + 1) * T, T, dtype=torch.int32, device=q.device)
        q, k, v = (x.reshape(B * T, H, D) for x in (q, k, v))
        out = varlen_attn(q, k, v, ends, ends, T, T, window_size=window_size(window, T))
        return out.view(B, T, H, D)

    return attend


def by_blocks(q, k, v, window, size):
    """Cuts q [B, T, H, D] into N blocks of at most `size` positions, q [B, N, H, S, D]. Beside each
    stand the K keys that its window reaches, k and v [B, N, H, K, D], and what a query must not
    see, hidden [N, 1, S, K]. One block if the window reaches most of the row anyway."""
    T = q.shape[1]
    size = largest_divisor(T, size)
    before = math.ceil(window / size)  # blocks
    if (before + 1) * size >= T:
        size = T
        before = 0
    q, k, v = (x.unflatten(1, (-1, size)).transpose(2, 3) for x in (q, k, v))

    def with_blocks_before(x):
        shifted = [F.pad(x[:, :-i], (0, 0, 0, 0, 0, 0, i, 0)) for i in range(before, 0, -1)]
        return torch.cat((*shifted, x), dim=3)

    begin = torch.arange(0, T, size, device=q.device)[:, None, None, None]
    query = torch.arange(size, device=q.device)[:, None]  # relative to the block's begin
    key = torch.arange(-before * size, size, device=q.device)
    hidden = (key > query) | (key < query - window) | (begin + key < 0)
    return q, with_blocks_before(k), with_blocks_before(v), hidden


def load_blocks():
    """Plain products and a softmax: on a CPU, compiled and with a short window, two to four times
    as fast as torch's own kernel."""

    def attend(q, k, v, window):
        q, k, v, hidden = by_blocks(q, k, v, window, CPU_QUERY_BLOCK)
        scores = q @ k.mT * q.shape[-1] ** -0.5
        # A sum and not a mask, which is slow in compiled code.
        bias = torch.zeros_like(hidden, dtype=q.dtype).masked_fill(hidden, -math.inf)
        out = (scores + bias).softmax(-1) @ v
        return out.transpose(2, 3).flatten(1, 2)

    return attend


def load_sdpa():
    """torch's choice of kernel, in blocks if the window is short. Works on every device."""

    def attend(q, k, v, window):
        B, T = q.shape[:2]
        if window < T - 1:
            q, k, v, hidden = by_blocks(q, k, v, window, max(window // 2, 64))
            visible = ~hidden.expand(B, -1, -1, -1, -1)
            q, k, v, visible = (x.flatten(0, 1) for x in (q, k, v, visible))
            out = F.scaled_dot_product_attention(q, k, v, visible)
            return out.unflatten(0, (B, -1)).transpose(2, 3).flatten(1, 2)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    return attend


BACKENDS = {"fa3": load_fa3, "varlen": load_varlen, "blocks": load_blocks, "sdpa": load_sdpa}
LADDER = {"cuda": ("fa3", "varlen", "sdpa"), "cpu": ("blocks", "sdpa"), "mps": ("sdpa",)}
# Relative. Rounding to bf16 makes 0.004, a wrong window or mask over 0.1.
ATTENTION_TOLERANCE = 0.02


def probe_attention(attend, device, dtype, config):
    """Compares forward and backward with the reference, at the real head size and windows, since a
    kernel that imports may still be wrong. Raises RuntimeError."""
    if COMPILE and device.type == "cuda":
        attend = torch.compile(attend, dynamic=False)  # may fail where the kernel does not
    generator = torch.Generator().manual_seed(0)
    shape = (1, config.sequence_len, config.n_head, config.head_dim)
    for window in sorted(set(config.windows)):
        q, k, v, grad = torch.randn(4, *shape, generator=generator).to(device, dtype)
        results = []
        for function in (attend, reference_attention):
            inputs = [x.clone().requires_grad_() for x in (q, k, v)]
            out = function(*inputs, window)
            results.append((out, *torch.autograd.grad(out, inputs, grad.to(out.dtype))))
        for name, got, want in zip(("forward", "dq", "dk", "dv"), *results, strict=True):
            error = ((got.float() - want.float()).norm() / want.float().norm()).item()
            if not error <= ATTENTION_TOLERANCE:
                raise RuntimeError(f"{name} is off by {error:.3f} at window {window}")


def choose_attention(device, dtype, config):
    """(name, attend) of the first back-end for this device that passes the probe; prints why others
    were rejected."""
    names = LADDER[device.type] if ATTENTION == "auto" else (ATTENTION,)
    if ATTENTION == "auto" and torch.version.hip:  # AMD: its flash attention was never tried
        names = ("sdpa",)
    for name in names:
        try:
            attend = BACKENDS[name]()
            probe_attention(attend, device, dtype, config)
            return f"{name} {getattr(attend, 'snapshot', '')}".strip(), attend
        except Exception as error:  # a foreign kernel can raise anything: try the next
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            print(f"attention: not {name}: {reason[:160]}")
    if ATTENTION == "auto":
        stop("no attention works here, see above; update the driver, or set ATTENTION in train.py.")
    return stop(f"no attention works with ATTENTION = {ATTENTION!r}; set it to auto.")


# ---- Derived values ----
def check_knobs():
    """Ends the run with one sentence if a knob has an impossible value."""
    checks = (
        (
            "DEPTH HEAD_DIM VE_GATE_CHANNELS TOTAL_BATCH_SIZE DEVICE_BATCH_SIZE CPU_QUERY_BLOCK",
            "a whole number above 0",
            lambda value: isinstance(value, int) and value > 0,
        ),
        (
            "KV_HEADS SHORT_WINDOW VE_EVERY",
            "a whole number, 0 or above",
            lambda value: isinstance(value, int) and value >= 0,
        ),
        ("ASPECT_RATIO MLP_RATIO ROPE_BASE EPS", "above 0", lambda value: value > 0),
        ("WEIGHT_DECAY MOMENTUM_STEPS", "0 or above", lambda value: value >= 0),
        (
            "WARMUP_RATIO WARMDOWN_RATIO FINAL_LR_FRAC",
            "a share, from 0 to 1",
            lambda value: 0 <= value <= 1,
        ),
    )
    for names, wanted, is_good in checks:
        for name in names.split():
            value = globals()[name]
            require(is_good(value), f"{name} = {value}; it must be {wanted}.")
    require(HEAD_DIM % 2 == 0, f"HEAD_DIM = {HEAD_DIM}; the rotation needs an even number.")
    require(
        ATTENTION == "auto" or ATTENTION in BACKENDS,
        f"ATTENTION = {ATTENTION!r}; choose auto or one of {', '.join(BACKENDS)}.",
    )
    accumulation_steps(DEVICE_BATCH_SIZE)  # ends the run if the batch sizes do not divide


def derive_config(vocab_size):
    n_head = math.ceil(DEPTH * ASPECT_RATIO / HEAD_DIM)
    width = n_head * HEAD_DIM
    if width != DEPTH * ASPECT_RATIO:
        print(f"width: DEPTH * ASPECT_RATIO = {DEPTH * ASPECT_RATIO} is rounded up to {width}")
    n_kv_head = KV_HEADS or n_head
    require(
        n_head % n_kv_head == 0,
        f"KV_HEADS = {KV_HEADS} does not divide the {n_head} heads; choose a divisor.",
    )
    require(
        VE_EVERY == 0 or width >= VE_GATE_CHANNELS,
        f"VE_GATE_CHANNELS = {VE_GATE_CHANNELS} is more than the width, {width}; lower it.",
    )
    require(
        WINDOW_PATTERN and set(WINDOW_PATTERN) <= set("SL"),
        f"WINDOW_PATTERN = {WINDOW_PATTERN!r}; it is made of the letters S and L.",
    )
    pattern = (WINDOW_PATTERN * DEPTH)[: DEPTH - 1] + "L"
    short = SHORT_WINDOW or MAX_SEQ_LEN
    windows = tuple(short if letter == "S" else MAX_SEQ_LEN for letter in pattern)
    value_layers = [i for i in range(DEPTH) if VE_EVERY and (DEPTH - 1 - i) % VE_EVERY == 0]
    return Config(
        vocab_size=vocab_size,
        sequence_len=MAX_SEQ_LEN,
        n_head=n_head,
        n_kv_head=n_kv_head,
        head_dim=HEAD_DIM,
        windows=windows,
        value_layers=tuple(value_layers),
    )


def accumulation_steps(rows):
    """Micro-batches of `rows` rows per step."""
    tokens = rows * MAX_SEQ_LEN
    require(
        TOTAL_BATCH_SIZE % tokens == 0,
        f"TOTAL_BATCH_SIZE = {TOTAL_BATCH_SIZE} is not a multiple of DEVICE_BATCH_SIZE * "
        f"MAX_SEQ_LEN = {rows} * {MAX_SEQ_LEN} = {tokens}; change one of the first two.",
    )
    return TOTAL_BATCH_SIZE // tokens


def choose_dtype(device):
    """(dtype of activations and embeddings, why): bf16 where the device has it in hardware."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability()
        dtype = torch.bfloat16 if major >= 8 else torch.float32  # before Ampere it is emulated
        return dtype, f"compute capability {major}.{minor}"
    if device.type == "mps":
        return torch.float32, "not every Apple chip has bfloat16"
    capabilities = torch.cpu.get_capabilities()
    found = [name for name in ("avx512_bf16", "amx_bf16") if capabilities.get(name)]
    if found:
        return torch.bfloat16, ", ".join(found)
    return torch.float32, "neither AVX512-BF16 nor AMX"


# ---- Warm-up ----
def rehearse(model, dtype, rows, compiler):
    """Runs, on random tokens, all that training and evaluation will run, so that it is compiled and
    known to fit; then resets model and optimizer. Returns (compiled model, optimizer)."""
    device = model.lm_head.weight.device
    initialise(model, dtype, SEED)
    # Muon's update is mostly matrix products: on a CPU compiling it takes 17 s, for 3 % of a step.
    muon_compiler = compiler if device.type == "cuda" else uncompiled
    optimizer = MuonAdamW(parameter_groups(model), dtype, muon_compiler)
    set_schedules(optimizer, 0.0, 0)
    compiled_model = compiler(model)

    def random_batches():
        while True:
            shape = (2, rows, MAX_SEQ_LEN)
            inputs, targets = torch.randint(model.config.vocab_size, shape, device=device)
            yield inputs, targets, 0

    batches = random_batches()
    # Only the second step meets what all later ones meet. Of many micro-batches two will do: the
    # first makes the gradients, the second adds to them.
    for _ in range(2):
        train_step(compiled_model, optimizer, batches, min(accumulation_steps(rows), 2))
    model.eval()
    with torch.no_grad():
        inputs, _, _ = next(batches)
        for_evaluation(model, compiled_model)(inputs[: eval_batch_size(rows)])
    model.train()
    initialise(model, dtype, SEED)
    optimizer.reset()
    return compiled_model, optimizer


def for_evaluation(model, compiled_model):
    """The one that is scored. On a CPU it is not compiled, which would take 20 s after a change of
    the model and save 2 s per run."""
    return compiled_model if model.lm_head.weight.device.type == "cuda" else model


MEMORY_SHARE = 0.92  # of a GPU's memory that warm-up may fill; what grows later takes the rest


def first_rows(model):
    """DEVICE_BATCH_SIZE, but on a GPU no more than free memory suggests: each failed try would
    compile everything once more."""
    rows = DEVICE_BATCH_SIZE
    if model.lm_head.weight.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info()
        # Activations of two bytes per layer and channel, found with benchmarks/nogpu.py --memory.
        activations = 14 if RECOMPUTE else 22
        row = activations * 2 * len(model.blocks) * MAX_SEQ_LEN * model.config.n_embd
        while rows > 1 and rows * row > MEMORY_SHARE * free:
            rows = fewer_rows(rows, "by free memory")
    return rows


def fewer_rows(rows, why):
    """The largest number of rows up to half as many that divides the batch."""
    fewer = largest_divisor(TOTAL_BATCH_SIZE // MAX_SEQ_LEN, rows // 2)
    print(f"{why}: DEVICE_BATCH_SIZE {rows} -> {fewer}, TOTAL_BATCH_SIZE stays {TOTAL_BATCH_SIZE}")
    return fewer


def is_out_of_memory(error):
    """Whether that is what it means: compilation wraps the exception, and libraries have classes
    and words of their own."""
    while error is not None:
        words = str(error).lower()
        if isinstance(error, torch.OutOfMemoryError):
            return True
        if "out of memory" in words or "alloc_failed" in words or "allocate memory" in words:
            return True
        error = error.__cause__ or error.__context__
    return False


def failed_allocations():
    """How often the GPU's memory did not suffice; FlashAttention 3 says no more than that it
    failed."""
    return torch.cuda.memory_stats()["num_ooms"] if torch.cuda.is_initialized() else 0


def check_compiler():
    """Ends the run if Triton, which builds a launcher for each kernel, would find no C compiler."""
    names = [os.environ.get("CC", ""), "cc", "gcc", "clang"]
    found = any(shutil.which(name) for name in names)
    require(found, "Triton needs a C compiler and there is none; install gcc, or set CC to one.")


def warm_up(model, dtype):
    """`rehearse` with DEVICE_BATCH_SIZE rows at a time, halved until they fit in memory; on a CPU
    without compilation if there is no compiler. Returns (compiled model, optimizer, rows)."""
    on_gpu = model.lm_head.weight.device.type == "cuda"
    rows = first_rows(model)
    compiler = uncompiled
    if COMPILE:
        torch._dynamo.config.recompile_limit = 64  # Muon's update is compiled once per shape
        compiler = partial(torch.compile, dynamic=False)
    if on_gpu:
        torch.cuda.set_per_process_memory_fraction(MEMORY_SHARE)
    while True:
        failed = failed_allocations()
        try:
            compiled_model, optimizer = rehearse(model, dtype, rows, compiler)
            break
        except Exception as error:
            if is_out_of_memory(error) or failed_allocations() > failed:
                if rows == 1:
                    stop("out of memory with one row; lower DEPTH or ASPECT_RATIO.", 5)
                rows = fewer_rows(rows, "out of memory")
            elif isinstance(error, torch._dynamo.exc.TorchDynamoException):
                reason = why_not_compiled(error)
                if on_gpu:  # a run that is not compiled belongs in another table
                    stop(f"torch.compile failed: {reason}; set COMPILE = False to see where.")
                print(f"continuing without compilation, which is slower: {reason}")
                compiler = uncompiled
            else:
                raise
        # Before the next try, out here, where the exception no longer holds any tensors:
        torch._dynamo.reset()  # drops what was compiled for more rows
        model.zero_grad(set_to_none=True)
        gc.collect()
        torch.cuda.empty_cache()
    if on_gpu:
        torch.cuda.set_per_process_memory_fraction(1.0)
    return compiled_model, optimizer, rows


def why_not_compiled(error):
    lines = [line for line in str(error).splitlines() if line.strip()]
    lines = [line for line in lines if not line.endswith("raised:")]
    return lines[0][:160] if lines else type(error).__name__


# ---- Main ----
def run():
    device = start()
    check_knobs()
    torch.manual_seed(SEED)
    torch.set_float32_matmul_precision("high")  # TF32, where a GPU has it
    tokenizer = Tokenizer.from_directory()
    config = derive_config(tokenizer.get_vocab_size())
    dtype, why = choose_dtype(device)
    print(f"precision: {str(dtype).removeprefix('torch.')} ({why}), torch {torch.__version__}")
    if COMPILE and device.type == "cuda":
        check_compiler()
    backend, attend = choose_attention(device, dtype, config)

    with device:
        model = GPT(config, attend)
    num_params = sum(p.numel() for p in model.parameters())
    flops_per_token = model.flops_per_token()
    print(
        f"model: depth {DEPTH}, width {config.n_embd}, {config.n_head} heads of {HEAD_DIM}, "
        f"windows {config.windows}, attention {backend}, {num_params / 1e6:.1f} M parameters, "
        f"{flops_per_token:.2e} FLOPs per token"
    )
    if COMPILE:
        print(
            "warming up: compiling takes 1 to 2 minutes after a change, otherwise about 10 s",
            flush=True,
        )
    compiled_model, optimizer, rows = warm_up(model, dtype)
    micro_batches = accumulation_steps(rows)
    print(
        f"training: steps of {micro_batches} x {rows} rows = {TOTAL_BATCH_SIZE} tokens", flush=True
    )

    batches = make_dataloader(tokenizer, rows, MAX_SEQ_LEN)
    steps = train(compiled_model, optimizer, batches, micro_batches, flops_per_token)
    tokens = steps * TOTAL_BATCH_SIZE
    evaluate_bpb(
        for_evaluation(model, compiled_model),
        tokenizer,
        rows,
        mfu_percent=mfu_percent(flops_per_token, tokens),
        total_tokens_M=tokens / 1e6,
        num_steps=steps,
        num_params_M=num_params / 1e6,
        depth=DEPTH,
        attention=backend,
        tokens_per_second=tokens_per_second(tokens),
    )


def main():
    if sys.argv[1:]:
        stop("train.py takes no arguments; its knobs are at the top of the file.")
    try:
        run()
    except Exception as error:
        if is_out_of_memory(error):
            stop("out of memory; lower DEVICE_BATCH_SIZE, DEPTH or ASPECT_RATIO.", 5)
        raise


if __name__ == "__main__":
    main()
