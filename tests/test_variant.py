"""A variant as a value: copies and pickles, alone and inside modules."""

import copy
import pickle

import torch

from fa4core import Variant, attention
from primitives import mask, score, sink, sparsity


def learned(parameter: torch.Tensor) -> Variant:
    return Variant(
        mask=mask.sliding_window(3) | mask.sink_tokens(1),
        score=score.alibi(parameter) >> score.softcap(20.0),
        sink=sink.learned(parameter),
        blocks=sparsity.from_topk(torch.tensor([[0]]), 1),
    )


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slopes = torch.nn.Parameter(torch.rand(2))
        self.variant = learned(self.slopes)


def test_a_deep_copy_captures_the_copied_parameters():
    layer = Layer()
    copied = copy.deepcopy(layer)
    assert any(t is copied.slopes for t in copied.variant.tensors)
    assert not any(t is layer.slopes for t in copied.variant.tensors)
    x = torch.randn(1, 8, 2, 8)
    attention(x, x, x, copied.variant).sum().backward()
    assert copied.slopes.grad is not None and layer.slopes.grad is None


def test_a_pickle_computes_the_same():
    variant = learned(torch.rand(2))
    loaded = pickle.loads(pickle.dumps(variant))
    assert loaded.key == variant.key
    x = torch.randn(1, 8, 2, 8)
    assert torch.equal(attention(x, x, x, loaded), attention(x, x, x, variant))


def test_copies_of_masks_are_equal():
    window = mask.sliding_window(3) & mask.causal()
    assert copy.deepcopy(window) == window
    assert copy.copy(window) == window
