#!/usr/bin/env python3
"""The reference for speed: one training step of GPT-2 (124M) in plain PyTorch, on the CPU or on a GPU.

    sudo apt install python3-torch libopenblas0    # libopenblas0, or PyTorch runs on the slow reference BLAS
    /usr/bin/python3 tests/bench/pytorch_gpt2.py --threads 2 --steps 5

A step is forward, cross-entropy, backward and AdamW in fp32, on batch 4 x 64 tokens. On a GPU (--device cuda), and with
--fast on the CPU, it takes fused attention and the fused optimizer; --dtype bf16 runs it under autocast: PyTorch's fastest
modes without compilation. The model equals the Hugging Face GPT-2 without dropout: pre-norm blocks, gelu (tanh), learned positions,
weights stored (in, out), output head tied to the token embedding. The last line of output is JSON;
tests/bench/compare_gpt2.py runs this program and bench_gpt2 alternately and prints the ratio.
"""

import argparse
import json
import math
import re
import resource
import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn


class Projection(nn.Module):
    """x W + b with W stored (in, out), as GPT-2 does."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs).normal_(std=0.02))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x):
        y = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return y.view(x.size()[:-1] + (self.weight.size(1),))


class Block(nn.Module):
    def __init__(self, width, heads, context, fast):
        super().__init__()
        self.heads, self.fast = heads, fast
        self.ln_1 = nn.LayerNorm(width, eps=1e-5)
        self.attention = Projection(width, 3 * width)
        self.attention_out = Projection(width, width)
        self.ln_2 = nn.LayerNorm(width, eps=1e-5)
        self.up = Projection(width, 4 * width)
        self.down = Projection(4 * width, width)
        self.register_buffer("causal", torch.ones(context, context, dtype=torch.bool).tril(), persistent=False)

    def attend(self, x):
        batch, length, width = x.shape
        q, k, v = (part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
                   for part in self.attention(x).split(width, dim=2))
        if x.is_cuda or self.fast:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.attention_out(y.transpose(1, 2).reshape(batch, length, width))
        scores = q @ k.transpose(-1, -2) / math.sqrt(width // self.heads)  # (batch, heads, length, length)
        scores = scores.masked_fill(~self.causal[:length, :length], torch.finfo(scores.dtype).min)
        y = (scores.softmax(dim=-1) @ v).transpose(1, 2).reshape(batch, length, width)
        return self.attention_out(y)

    def forward(self, x):
        x = x + self.attend(self.ln_1(x))
        return x + self.down(F.gelu(self.up(self.ln_2(x)), approximate="tanh"))


class Gpt2(nn.Module):
    def __init__(self, layers, heads, width, vocabulary, context, fast):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(width, heads, context, fast) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width, eps=1e-5)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.size(1), device=ids.device))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.ln_f(x), self.tokens.weight)  # tied head


def blas_in_use():
    """The library that computes PyTorch's matrix products, from the memory map of this process."""
    with open("/proc/self/maps") as maps:
        paths = re.findall(r"(/\S*/lib(?:openblas|blas|blis|mkl_rt)[^/\s]*\.so\S*)", maps.read())
    return paths[0] if paths else "unknown"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5, help="measured steps; the median is reported")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--time", type=int, default=64, help="tokens in a sequence")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--vocabulary", type=int, default=50257)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="f32", choices=["f32", "f16", "bf16"])
    parser.add_argument("--foreach", action="store_true", help="AdamW over lists of tensors (default: one by one)")
    parser.add_argument("--fast", action="store_true", help="fused attention and AdamW on the CPU, too (PyTorch 2.4 or later)")
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    torch.manual_seed(1)
    model = Gpt2(options.layers, options.heads, options.width, options.vocabulary, max(1024, options.time),
                 options.fast).to(options.device)
    on_gpu = options.device.startswith("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1,
                                  **({"fused": True} if on_gpu or options.fast else {"foreach": options.foreach}))
    half = {"f32": None, "f16": torch.float16, "bf16": torch.bfloat16}[options.dtype]
    text = torch.randint(options.vocabulary, (options.batch, options.time + 1))
    ids, labels = (part.contiguous().to(options.device) for part in (text[:, :-1], text[:, 1:]))

    seconds, losses = [], []
    for step in range(options.warmup + options.steps):
        start = time.perf_counter()
        with torch.autocast(options.device.split(":")[0], dtype=half, enabled=half is not None):
            loss = F.cross_entropy(model(ids).view(-1, options.vocabulary), labels.view(-1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if on_gpu:
            torch.cuda.synchronize()
        took = time.perf_counter() - start
        if step >= options.warmup:
            seconds.append(took)
        print(f"step {step}: loss {losses[-1]:.4f}, {took:.3f} s", flush=True)

    median = statistics.median(seconds)
    print(json.dumps({
        "framework": "pytorch " + torch.__version__,
        "blas": blas_in_use(),
        "parameters": sum(p.numel() for p in model.parameters()),
        "threads": options.threads,
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "dtype": options.dtype,
        "batch": options.batch,
        "time": options.time,
        "foreach": options.foreach,
        "seconds_per_step": median,
        "seconds": seconds,
        "tokens_per_second": options.batch * options.time / median,
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }))


if __name__ == "__main__":
    main()
