"""A sparse 1x1 convolution against `F.conv2d`, on this machine.

    python benchmarks/conv1x1.py                    # about half a minute

One thread, float32, plain (NCHW) layout, packed without a hint. The cells are `F.conv2d` over fxsparse:
above 1 fxsparse is faster. All of a row are timed in turns, each is the least of many calls.
"""

from __future__ import annotations

import argparse

import common
import torch
import torch.nn.functional as F
from tabulate import tabulate

import fxsparse

#: Channels in and out, height and width: bottlenecks of a ResNet-50.
SHAPES = ((256, 256, 28), (64, 256, 56), (1024, 512, 14), (512, 2048, 7))


def sparse_conv(channels: int, out: int, sparsity: float) -> torch.nn.Module:
    conv = torch.nn.Conv2d(channels, out, 1)
    with torch.no_grad():
        conv.weight.mul_(torch.rand_like(conv.weight) >= sparsity)
    return fxsparse.compile(torch.nn.Sequential(conv), capture="modules")[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--sparsity", nargs="+", type=float, default=[0.7, 0.8, 0.9, 0.95])
    parser.add_argument("--seconds", type=float, default=3.0, help="for each row of the table")
    args = parser.parse_args()
    torch.set_num_threads(1)
    fxsparse.set_num_threads(1)
    lines = []
    for channels, out, size in SHAPES:
        layers = {s: sparse_conv(channels, out, s) for s in args.sparsity}
        weight, bias = torch.randn(out, channels, 1, 1), torch.randn(out)
        for batch in args.batch:
            x = torch.randn(batch, channels, size, size)
            calls = {s: lambda layer=layer, x=x: layer(x) for s, layer in layers.items()}
            calls["dense"] = lambda x=x, w=weight, b=bias: F.conv2d(x, w, b)
            best = common.least(calls, args.seconds, 4)
            ratios = [f"{best['dense'] / best[s]:.1f}" for s in args.sparsity]
            lines.append([f"{channels} -> {out}", f"{size}x{size}", batch, *ratios])
    print(f"{common.cpu_name()}, torch {torch.__version__}, {fxsparse._C.isa()}\n")
    print(tabulate(lines, ["channels", "pixels", "batch", *args.sparsity], tablefmt="github"))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
