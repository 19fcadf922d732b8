"""Train a small language model of characters: packed documents, learned ALiBi slopes.

    python examples/train.py

Each row of a batch is packed with documents, and no token sees another document's. Nothing tells
the model positions but ALiBi, whose slopes are learned, one a head and layer, beside a model whose
slopes stay 0. The text is this project's own: every docstring and page is a document. On a CPU the
reference computes attention, on a GPU its kernels do, forward and backward. About three minutes on
two cores; writes a picture of both losses and of the slopes.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import attrs
import click
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from fa4core import Variant, attention
from primitives import mask, score

ROOT = Path(__file__).parents[1]


@attrs.frozen
class Sizes:
    """Of the model and its batches."""

    seqlen: int = 256
    batch: int = 8
    heads: int = 4
    head_dim: int = 32
    layers: int = 3

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


class Block(nn.Module):
    """Attention with slopes of its own, and an MLP."""

    def __init__(self, sizes: Sizes, learned: bool):
        super().__init__()
        self.sizes = sizes
        self.slopes = nn.Parameter(torch.zeros(sizes.heads), requires_grad=learned)
        self.before_attention, self.before_mlp = (
            nn.LayerNorm(sizes.width),
            nn.LayerNorm(sizes.width),
        )
        self.qkv = nn.Linear(sizes.width, 3 * sizes.width, bias=False)
        self.out = nn.Linear(sizes.width, sizes.width, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(sizes.width, 4 * sizes.width),
            nn.GELU(),
            nn.Linear(4 * sizes.width, sizes.width),
        )

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        variant = Variant(
            mask=mask.causal() & mask.document(documents), score=score.alibi(self.slopes)
        )
        split = *x.shape[:2], 3, self.sizes.heads, self.sizes.head_dim
        q, k, v = self.qkv(self.before_attention(x)).view(split).bfloat16().unbind(2)
        x = x + self.out(attention(q, k, v, variant).flatten(2).to(x.dtype))
        return x + self.mlp(self.before_mlp(x))


class Model(nn.Module):
    """Characters in, logits of the next ones out."""

    def __init__(self, sizes: Sizes, characters: int, learned: bool, checkpointed: bool):
        super().__init__()
        self.checkpointed = checkpointed
        self.embedding = nn.Embedding(characters, sizes.width)
        nn.init.normal_(self.embedding.weight, std=0.02)  # it makes the logits, too
        self.blocks = nn.ModuleList(Block(sizes, learned) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.width)

    def forward(self, text: Tensor, documents: Tensor) -> Tensor:
        x = self.embedding(text)
        for block in self.blocks:
            if self.checkpointed:
                x = checkpoint(block, x, documents, use_reentrant=False)
            else:
                x = block(x, documents)
        return functional.linear(self.norm(x), self.embedding.weight)

    def slopes(self) -> Tensor:
        """(layers, heads)."""
        return torch.stack([block.slopes.detach() for block in self.blocks]).cpu()


def corpus() -> list[str]:
    """The project's docstrings and pages."""
    pages = [path.read_text() for path in sorted(ROOT.glob("docs/**/*.md"))]
    nodes = (ast.Module, ast.ClassDef, ast.FunctionDef)
    for folder in ("primitives", "fa4core", "variants"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            tree = ast.parse(path.read_text())
            pages += [ast.get_docstring(n) or "" for n in ast.walk(tree) if isinstance(n, nodes)]
    return [page for page in pages if len(page) > 40]


def pack(texts: list[str], sizes: Sizes) -> tuple[Tensor, Tensor]:
    """Documents one behind the other, cut into rows of one more than `seqlen`: text and number of
    the document of each character, (rows, seqlen + 1)."""
    alphabet = sorted(set("".join(texts)))
    number = {character: i for i, character in enumerate(alphabet)}
    text = torch.tensor([number[c] for page in texts for c in page])
    document = torch.repeat_interleave(
        torch.arange(len(texts)), torch.tensor([len(page) for page in texts])
    )
    rows = len(text) // (sizes.seqlen + 1)
    return tuple(x[: rows * (sizes.seqlen + 1)].view(rows, -1) for x in (text, document))


def batches(text: Tensor, document: Tensor, size: int, seed: int) -> Iterator[tuple[Tensor, ...]]:
    """Random rows for ever."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        rows = torch.randint(len(text), (size,), generator=generator)
        yield text[rows], document[rows]


def loss_of(model: Model, text: Tensor, document: Tensor) -> Tensor:
    """Nats for each character that has one before it in its document."""
    logits = model(text[:, :-1], document[:, :-1])
    losses = functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten(), reduction="none")
    inside = (document[:, 1:] == document[:, :-1]).flatten()
    return (losses * inside).sum() / inside.sum()


def train(
    data: tuple[Tensor, Tensor], sizes: Sizes, learned: bool, steps: int, checkpointed: bool
) -> tuple[list[float], Tensor]:
    """The loss at each step, and the slopes before each, (steps, layers, heads)."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Model(sizes, int(data[0].max()) + 1, learned, checkpointed).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses: list[float] = []
    slopes: list[Tensor] = []
    drawn = batches(*data, sizes.batch, seed=1)
    with click.progressbar(range(steps), label=f"slopes {'learned' if learned else 'at 0'}") as bar:
        for _ in bar:
            loss = loss_of(model, *(x.to(device) for x in next(drawn)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            slopes.append(model.slopes())
    return losses, torch.stack(slopes)


def draw(path: Path, losses: dict[str, list[float]], slopes: Tensor) -> None:
    """Losses, smoothed over 10 steps, and every head's slope."""
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for name, values in losses.items():
        smooth = torch.tensor(values).unfold(0, min(10, len(values)), 1).mean(1)
        left.plot(smooth, label=name)
    left.set(xlabel="step", ylabel="nats a character", title="Loss")
    left.legend()
    for layer in range(slopes.shape[1]):
        for head in range(slopes.shape[2]):
            name = f"layer {layer}" if head == 0 else None
            right.plot(slopes[:, layer, head], color=f"C{layer}", label=name)
    right.set(xlabel="step", ylabel="slope", title="Learned ALiBi slopes, one a head")
    right.legend()
    figure.savefig(path, dpi=120)


@click.command(help=__doc__)
@click.option("--steps", default=300, show_default=True)
@click.option("--seqlen", default=256, show_default=True, help="Characters of a row.")
@click.option("--checkpoint", "checkpointed", is_flag=True, help="Recompute activations.")
@click.option("--picture", type=click.Path(path_type=Path), default=Path("train.png"))
def main(steps: int, seqlen: int, checkpointed: bool, picture: Path) -> None:
    sizes = Sizes(seqlen=seqlen)
    data = pack(corpus(), sizes)
    found = {
        name: train(data, sizes, learned, steps, checkpointed)
        for name, learned in (("learned slopes", True), ("no positions", False))
    }
    for name, (losses, _) in found.items():
        last = losses[-10:]
        click.echo(f"{name}: {losses[0]:.3f} at first, {sum(last) / len(last):.3f} at the end")
    draw(picture, {name: losses for name, (losses, _) in found.items()}, found["learned slopes"][1])
    click.echo(f"Losses and slopes are drawn in {picture}.")


if __name__ == "__main__":
    main()
