"""Documents packed into one sequence that don't see each other.

The usual way to fill a context in pretraining (Llama 3, arXiv:2407.21783, section 3.2; Krell et
al., arXiv:2107.02027). Tiles between documents are empty, so the work is that of the documents
alone. If the documents needn't be one sequence for anything else, `primitives.sequence.varlen`
does the same without a mask.
"""

from __future__ import annotations

import torch

from fa4core import Variant, draw
from primitives import mask


def document(
    offsets: torch.Tensor | None = None,
    *,
    documents: int = 16,
    seqlen: int = 8192,
    seed: int = 0,
    causal: bool = True,
) -> Variant:
    """A query attends to its own document, causally or not.

    Args:
        offsets: int (documents + 1,): first token of each document, and the end of the last.
            Left out: `documents` of random lengths that fill `seqlen` tokens.
        documents: Number of random documents.
        seqlen: Tokens in all of them.
        seed: Of the random lengths.
        causal: Whether a token sees only what came before it in its document.
    """
    if offsets is None:
        offsets = random_offsets(documents, seqlen, seed)
    own = mask.document(offsets=offsets)
    return Variant(mask=own & mask.causal() if causal else own)


def random_offsets(documents: int, seqlen: int, seed: int = 0) -> torch.Tensor:
    """Offsets (documents + 1,) of documents of at least one token each, cut at random places.

    Raises:
        ValueError: Fewer tokens than documents, or no document.
    """
    if not 1 <= documents <= seqlen:
        raise ValueError(
            f"{documents} documents in {seqlen} tokens; 1 to {seqlen} documents are accepted"
        )
    generator = torch.Generator().manual_seed(seed)
    cuts = torch.randperm(seqlen - 1, generator=generator)[: documents - 1] + 1
    return torch.cat([torch.tensor([0]), cuts.sort().values, torch.tensor([seqlen])])


def main() -> None:
    """Draw it to `document.png`."""
    draw.variant(document(documents=16, seqlen=8192), "document.png", seqlen=8192)


if __name__ == "__main__":
    main()
