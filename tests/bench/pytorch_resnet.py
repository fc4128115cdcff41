#!/usr/bin/env python3
"""The reference for speed: one training step of ResNet-18 for small images in plain PyTorch, on the CPU or on a GPU.

    /usr/bin/python3 tests/bench/pytorch_resnet.py --threads 2 --steps 5

A step is forward, cross-entropy, backward and SGD with momentum, on 16 images of 3 x 32 x 32; with --precision bf16
under autocast. The model is that of bench_resnet.cpp. The last line of output is JSON in the
format of bench_resnet: run the two in turn.
"""

import argparse
import json
import re
import resource
import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn


class BasicBlock(nn.Module):
    def __init__(self, channels, filters, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, filters, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(filters)
        self.conv2 = nn.Conv2d(filters, filters, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(filters)
        self.shortcut = nn.Identity()
        if stride != 1 or channels != filters:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, filters, 1, stride, bias=False), nn.BatchNorm2d(filters))

    def forward(self, x):
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


class ResNet18(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        blocks, channels = [], 64
        for filters in (64, 128, 256, 512):
            for i in range(2):
                blocks.append(BasicBlock(channels, filters, 2 if i == 0 and filters > 64 else 1))
                channels = filters
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(512, 10)

    def forward(self, images):
        x = self.blocks(F.relu(self.bn1(self.conv1(images))))
        return self.head(x.mean((2, 3)))


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
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--size", type=int, default=32, help="height and width of an image")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="f32", choices=["f32", "f16", "bf16"])
    parser.add_argument("--channels-last", action="store_true")
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    torch.manual_seed(1)
    model = ResNet18().to(options.device)
    images = torch.randn(options.batch, 3, options.size, options.size, device=options.device)
    labels = torch.randint(10, (options.batch,), device=options.device)
    if options.channels_last:
        model = model.to(memory_format=torch.channels_last)
        images = images.to(memory_format=torch.channels_last)
    on_gpu = options.device.startswith("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    half = {"f32": None, "f16": torch.float16, "bf16": torch.bfloat16}[options.precision]

    seconds, losses = [], []
    for step in range(options.warmup + options.steps):
        start = time.perf_counter()
        with torch.autocast(options.device.split(":")[0], dtype=half, enabled=half is not None):
            loss = F.cross_entropy(model(images), labels)
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
        "precision": options.precision,
        "batch": options.batch,
        "seconds_per_step": median,
        "seconds": seconds,
        "images_per_second": options.batch / median,
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }))


if __name__ == "__main__":
    main()
