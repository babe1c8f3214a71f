"""Train a byte-level GPT on the source text of Python's own standard library.

lockstep run --nproc 2 examples/gpt.py

The held-out loss starts near ln 256 = 5.5 nats per byte, the loss of a uniform guess.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

import lockstep as ls

SKIPPED = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "encodings",
    "pydoc_data",
}
TRAINING_BYTES = 8 * 2**20
HELD_OUT_EVERY = 24
HELD_OUT_BYTES = 8192
TEMPERATURE = 0.9
PROMPT = b"def "


def read_text() -> tuple[bytes, bytes]:
    """Return the training text and the held-out text: the first 8 KiB of every 24th file."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(
        path
        for path in root.rglob("*.py")
        if not SKIPPED.intersection(path.relative_to(root).parts)
    )
    held_out = b"".join(path.read_bytes()[:HELD_OUT_BYTES] for path in files[::HELD_OUT_EVERY])
    training = bytearray()
    for number, path in enumerate(files):
        if number % HELD_OUT_EVERY and len(training) < TRAINING_BYTES:
            training += path.read_bytes()
    return bytes(training[:TRAINING_BYTES]), held_out


class Windows:
    """A dataset of windows of context + 1 bytes. The model predicts each byte but the first from
    those before it."""

    def __init__(self, text: bytes, context: int) -> None:
        self.windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(
            0, context + 1, context
        )

    def __len__(self) -> int:
        return len(self.windows)

    def __getitems__(self, indices: list[int]) -> Tensor:
        """Return a whole batch at once, of shape (batch, context + 1)."""
        return self.windows[indices].long()


class Embedding(nn.Module):
    """Embeddings of bytes and of their positions."""

    def __init__(self, width: int, context: int, dropout: float) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        for embedding in (self.bytes, self.positions):
            nn.init.normal_(embedding.weight, std=0.05)

    def forward(self, text: Tensor) -> Tensor:
        return self.dropout(self.bytes(text) + self.positions.weight[: text.shape[1]])


class Block(nn.Module):
    """A transformer block: causal self-attention, then an MLP, each with a residual connection."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.projection = nn.Linear(width, width, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width, bias=False),
            nn.GELU(),
            nn.Linear(4 * width, width, bias=False),
            nn.Dropout(dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.perceptron(x)

    def attention(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        # (batch, length, 3 * width) -> three of (batch, heads, length, width / heads)
        query, key, value = (
            self.query_key_value(x)
            .view(batch, length, 3, self.heads, width // self.heads)
            .permute(2, 0, 3, 1, 4)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.projection(mixed.transpose(1, 2).reshape(batch, length, width))


class Head(nn.Module):
    """The output layer. Its weight is also the embedding of bytes (tied weights)."""

    def __init__(self, width: int, weight: nn.Parameter) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.norm(x), self.weight)


class GPT(nn.Module):
    """(batch, length) bytes as int64 -> (batch, length, 256) logits of each next byte."""

    def __init__(
        self, *, layers: int, width: int, heads: int, context: int, dropout: float
    ) -> None:
        super().__init__()
        self.context = context
        self.embedding = Embedding(width, context, dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.head = Head(width, self.embedding.bytes.weight)

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(text)))

    @torch.no_grad()
    def generate(self, prompt: bytes, length: int, *, seed: int) -> bytes:
        """Return `prompt` followed by `length` bytes that are sampled from the model."""
        generator = torch.Generator().manual_seed(seed)
        text = torch.tensor([list(prompt)])
        for _ in range(length):
            logits = self(text[:, -self.context :])[0, -1]
            text = torch.cat(
                [
                    text,
                    torch.multinomial((logits / TEMPERATURE).softmax(0), 1, generator=generator)[
                        None
                    ],
                ],
                dim=1,
            )
        return bytes(text[0].tolist())


def cross_entropy(logits: Tensor, batch: Tensor) -> Tensor:
    """Return the mean over all predicted bytes, in nats."""
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a byte-level GPT on the source text of Python's own standard library."
    )
    parser.add_argument(
        "--steps", type=int, default=1000, help="optimizer steps (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--global-batch",
        type=int,
        default=16,
        help="windows of text per step, over all processes (default: %(default)s)",
    )
    parser.add_argument(
        "--microbatch",
        type=int,
        default=4,
        help="windows in one forward and backward (default: %(default)s)",
    )
    parser.add_argument(
        "--lr", type=float, default=4e-3, help="highest learning rate (default: %(default)s)"
    )
    parser.add_argument("--dropout", type=float, default=0.0, help="(default: %(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="(default: %(default)s)")
    parser.add_argument(
        "--width", type=int, default=128, help="embedding dim (default: %(default)s)"
    )
    parser.add_argument("--heads", type=int, default=2, help="(default: %(default)s)")
    parser.add_argument(
        "--context", type=int, default=128, help="bytes that the model sees (default: %(default)s)"
    )
    parser.add_argument(
        "--sample",
        type=int,
        default=500,
        help="bytes to generate at the end (default: %(default)s)",
    )
    options = parser.parse_args(argv)
    if options.width % options.heads:
        parser.error(
            f"--width {options.width} --heads {options.heads}: the heads divide the width; choose a"
            " width that is a multiple of --heads"
        )
    return options


def main(argv: list[str] | None = None) -> ls.Result:
    options = parse(argv)
    training, held_out = (Windows(text, options.context) for text in read_text())

    def build() -> GPT:
        return GPT(
            layers=options.layers,
            width=options.width,
            heads=options.heads,
            context=options.context,
            dropout=options.dropout,
        )

    recipe = ls.Recipe(
        model=build,
        data=training,
        inputs=lambda batch: batch[:, :-1],
        loss=cross_entropy,
        global_batch=options.global_batch,
        microbatch=options.microbatch,
        steps=options.steps,
        optimizer=lambda model: torch.optim.AdamW(
            model.parameters(), lr=options.lr, betas=(0.9, 0.99), weight_decay=0.1, fused=True
        ),
        schedule=ls.warmup_cosine(warmup=min(100, options.steps // 10), total=options.steps),
        clip_norm=1.0,
        seed=options.seed,
        stages=["embedding", "blocks.*", "head"],
        tensor={
            "blocks.*.query_key_value": "colwise_gathered",
            "blocks.*.projection": "rowwise_split",
            "blocks.*.perceptron.1": "colwise",
            "blocks.*.perceptron.3": "rowwise",
        },
        evaluation=ls.Evaluation(data=held_out, every=max(1, options.steps // 5), microbatch=32),
    )
    result = ls.train(recipe)
    if result.rank == 0:
        report(result, build(), options)
    return result


def report(result: ls.Result, model: GPT, options: argparse.Namespace) -> None:
    model.load_state_dict(load_file(Path(result.run_dir) / "model.safetensors"))
    model.eval()
    print(model.generate(PROMPT, options.sample, seed=options.seed).decode(errors="replace"))
    print("-" * 80)
    print(
        f"held-out loss  {result.metrics['loss']:.3f} nats per byte (knowing nothing:"
        f" {math.log(256):.3f})"
    )
    print(
        f"training       {result.steps} steps in {result.seconds:.0f} s,"
        f" {result.samples_per_second:.0f} samples/s"
    )
    print(f"plan           {result.plan}")
    print(f"fingerprint    {result.fingerprint}")
    print(f"run directory  {result.run_dir}")


if __name__ == "__main__":
    main()
