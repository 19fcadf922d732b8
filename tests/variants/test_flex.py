"""flex_attention beside torch's own, run eagerly: outputs, statistics and gradients."""

import math
import warnings

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask

from variants.flex import block_map, flex_attention

B, H, HKV, M, N, D = 2, 4, 2, 200, 300, 16


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """torch warns that its eager path is slow; here it is the yardstick, in its simplest form."""
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


def drawn(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()


def qkv(heads_kv=H, batch_kv=B):
    return [drawn(B, H, M, D), drawn(batch_kv, heads_kv, N, D), drawn(batch_kv, heads_kv, N, D)]


SLOPES = drawn(H, seed=5)
BIAS = drawn(H, M, N, seed=6)
DOCUMENTS = torch.arange(N) // 70


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def documents(b, h, q_idx, kv_idx):
    return (DOCUMENTS[q_idx] == DOCUMENTS[kv_idx]) & (q_idx >= kv_idx)


def by_head(b, h, q_idx, kv_idx):
    return torch.where(h == 0, q_idx >= kv_idx, (q_idx - kv_idx).abs() < 40 + 30 * b)


def nothing_for_some(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx % 3 != 0)


def alibi(score, b, h, q_idx, kv_idx):
    return score + SLOPES[h] * (kv_idx - q_idx)


def bias_and_cap(score, b, h, q_idx, kv_idx):
    return 5 * torch.tanh((score + BIAS[h, q_idx, kv_idx]) / 5)


def cut(score, b, h, q_idx, kv_idx):
    return torch.where(q_idx >= kv_idx, score, -math.inf)


def dense(q, k, v, score_mod=None, mask_mod=None, enable_gqa=False, scale=None):
    """FlexAttention's definition in plain torch, differentiable in what the functions capture.

    torch's own can't be differentiated on a CPU.
    """
    group = q.shape[1] // k.shape[1]
    k, v = (t.expand(B, -1, -1, -1).repeat_interleave(group, 1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * (D**-0.5 if scale is None else scale)
    sizes = (torch.arange(n) for n in scores.shape)
    b, h, i, j = (t.view([-1] + [1] * (3 - d)) for d, t in enumerate(sizes))
    if score_mod is not None:
        scores = score_mod(scores, b, h, i, j)
    if mask_mod is not None:
        scores = torch.where(mask_mod(b, h, i, j), scores, -math.inf)
    lse = scores.logsumexp(-1, keepdim=True)
    p = torch.exp(scores - torch.where(lse == -math.inf, 0.0, lse))
    return p @ v, lse.squeeze(-1)


def both(arguments, learned=(), mask_mod=None, **options):
    """Outputs beside torch's flex_attention, gradients beside the definition's."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        detached = [t.detach() for t in arguments]
        expected = torch_flex.flex_attention(*detached, **options, return_lse=True)
    got = flex_attention(*arguments, **options, return_lse=True)
    torch.testing.assert_close(got[1].double(), expected[1].double(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got[0], expected[0])
    options.pop("block_mask", None)
    defined = dense(*arguments, mask_mod=mask_mod, **options)
    weights = [drawn(*t.shape, seed=8).detach() for t in got]
    grads = []
    for out, lse in (got, defined):
        finite = torch.where(lse.isfinite(), lse, 0.0)
        loss = (out * weights[0]).sum() + (finite * weights[1]).sum()
        grads.append(torch.autograd.grad(loss, [*arguments, *learned]))
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize(
    "score_mod, learned",
    [(None, ()), (alibi, (SLOPES,)), (bias_and_cap, (BIAS,)), (cut, ())],
    ids=["none", "alibi", "bias_and_cap", "cut"],
)
def test_score_mods(score_mod, learned):
    both(qkv(), learned, score_mod=score_mod)


@pytest.mark.parametrize("mask_mod", [causal, documents, by_head, nothing_for_some])
@pytest.mark.parametrize("block", [128, (64, 32)])
def test_block_masks(mask_mod, block):
    sizes = (B, H) if mask_mod is by_head else (None, None)
    blocks = create_block_mask(mask_mod, *sizes, M, N, device="cpu", BLOCK_SIZE=block)
    both(qkv(), (SLOPES,), mask_mod, block_mask=blocks, score_mod=alibi)


def test_gqa_scale_and_a_broadcast_batch():
    both(qkv(HKV), enable_gqa=True, scale=0.3)
    blocks = create_block_mask(causal, B, None, M, N, device="cpu")
    both(qkv(H, 1), (), causal, block_mask=blocks)


def test_block_lists_decide_where_a_mask_function_does_not():
    """Torch's eager path looks at the mask function only; its kernels, and this, at the lists."""
    counts = torch.tensor([[[1, 2]]], dtype=torch.int32)
    lists = torch.tensor([[[[2, 0, 1], [0, 1, 2]]]], dtype=torch.int32)
    full_counts = torch.tensor([[[1, 0]]], dtype=torch.int32)
    full_lists = torch.tensor([[[[0, 1, 2], [0, 1, 2]]]], dtype=torch.int32)
    for full, mask_mod in (((None, None), None), ((full_counts, full_lists), causal)):
        blocks = BlockMask.from_kv_blocks(
            counts, lists, *full, BLOCK_SIZE=(128, 128), mask_mod=mask_mod, seq_lengths=(M, N)
        )
        i, j = torch.arange(M)[:, None] // 128, torch.arange(N) // 128
        allowed = ((i == 0) & (j == 2)) | ((i == 1) & (j < 2))
        if mask_mod:
            allowed &= torch.arange(M)[:, None] >= torch.arange(N)
            allowed |= (i == 0) & (j == 0)
        q, k, v = qkv()
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        expected = torch.where(allowed.any(-1)[:, None], expected, 0.0)
        torch.testing.assert_close(flex_attention(q, k, v, block_mask=blocks), expected)


def test_a_block_mask_becomes_its_block_map():
    blocks = create_block_mask(causal, None, None, 384, 320, device="cpu", BLOCK_SIZE=(128, 64))
    got = block_map(blocks)
    assert got.full.shape == (1, 1, 3, 5) and (got.block_q, got.block_k) == (128, 64)
    assert got.full[0, 0].int().tolist() == [[0, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 1, 0]]
    assert not (got.full & got.partial).any()
    assert torch.equal((got.full | got.partial).int()[0, 0], blocks.to_dense()[0, 0].int())


def test_what_is_returned():
    q, k, v = qkv()
    out = flex_attention(q, k, v)
    assert out.shape == (B, H, M, D)
    pair = flex_attention(q, k, v, return_lse=True)
    assert pair[1].shape == (B, H, M)
    _, aux = flex_attention(q, k, v, return_aux=AuxRequest(max_scores=True))
    assert aux.lse is None and aux.max_scores.shape == (B, H, M)


def test_one_import_changed_and_compiled():
    torch._dynamo.reset()
    q, k, v = qkv()
    compiled = torch.compile(flex_attention, backend="eager")
    torch.testing.assert_close(
        compiled(q, k, v, score_mod=alibi), flex_attention(q, k, v, score_mod=alibi)
    )


@pytest.mark.parametrize(
    "options, message",
    [
        ({"return_lse": True, "return_aux": AuxRequest(lse=True)}, "return_aux only"),
        ({"block_mask": create_block_mask(causal, None, None, 64, 64, device="cpu")}, "64, 64"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        flex_attention(*qkv(), **options)


def test_bad_shapes():
    q, k, v = qkv(HKV)
    with pytest.raises(ValueError, match="enable_gqa=True"):
        flex_attention(q, k, v)
    with pytest.raises(ValueError, match="batch 2 and key 1"):
        flex_attention(q, *qkv(H, 1)[1:])
    with pytest.raises(ValueError, match=r"\(batch, heads, seqlen, d\)"):
        flex_attention(q[0], k, v)


def test_kernel_options_are_not_ignored_in_silence():
    with pytest.warns(UserWarning, match="no effect here"):
        flex_attention(*qkv(), kernel_options={"BLOCK_M": 64})
