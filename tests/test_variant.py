"""A variant as a value: copies and pickles, alone and inside modules."""

import copy
import pickle
import warnings

import pytest
import torch

from fa4core import Variant, attention
from primitives import exp, mask, score, sink, sparsity


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


def test_a_learned_tensor_that_only_a_mask_captures_is_warned_of():
    learned = torch.rand(2, requires_grad=True)
    banded = mask.define(lambda b, h, q_idx, kv_idx: q_idx - kv_idx > learned[h] * 10)
    with pytest.warns(UserWarning, match=r"shape \(2,\) that requires grad.*no gradient") as found:
        Variant(mask=banded & mask.causal())
    assert found[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Variant(mask=banded, score=score.alibi(learned))  # gets one, by the score mod
        still = learned.detach()
        Variant(mask=mask.define(lambda b, h, q_idx, kv_idx: q_idx - kv_idx > still[h] * 10))


@pytest.mark.parametrize(
    "given, message",
    [
        ({"mask": score.softcap(3.0)}, r"a Mask is accepted; a ScoreMod belongs to .*score="),
        ({"score": mask.causal()}, r"a ScoreMod is accepted; a Mask belongs to .*mask="),
        ({"sink": exp.hardware()}, r"an Exp belongs to Variant\(exp="),
        ({"sink": torch.zeros(2)}, r"make it one with sink\.learned"),
        ({"mask": lambda *_: True}, r"wrap the function with mask\.define"),
        ({"rescale_threshold": True}, "rescale_threshold is a bool; a float"),
        ({"rescale_threshold": "8"}, "rescale_threshold is a str; a float"),
    ],
)
def test_parts_in_the_wrong_place(given, message):
    with pytest.raises(TypeError, match=message):
        Variant(**given)
