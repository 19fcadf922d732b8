"""Every prebuilt mask against a plain Python rule, element by element; validation; algebra."""

from __future__ import annotations

import itertools

import pytest
import torch
from evaluation import by_python, table

from primitives import mask, parameter
from primitives.mask.random import RANGE, hashed

BATCH, HEADS = 2, 3
LENGTHS = [(7, 7), (5, 9), (9, 5), (1, 6)]


def tensor(*values, **options):
    return torch.tensor(values, **options)


def window(left, right, shift):
    return lambda b, h, q, k: -right(h) <= q + shift - k <= left(h)


def always(value):
    return lambda _: value


INFINITE = always(10**9)

# Name: mask, and its rule as a function of the shift that aligns the last query with the last key.
BY_DISTANCE = {
    "full": (mask.full(), lambda s: lambda b, h, q, k: True),
    "causal": (mask.causal(), lambda s: lambda b, h, q, k: k <= q + s),
    "causal top left": (mask.causal("top_left"), lambda s: lambda b, h, q, k: k <= q),
    "window": (mask.sliding_window(2), lambda s: window(always(2), always(0), s)),
    "window both": (mask.sliding_window(1, 3), lambda s: window(always(1), always(3), s)),
    "window left": (mask.sliding_window(2, None), lambda s: window(always(2), INFINITE, s)),
    "window right": (mask.sliding_window(None, 1), lambda s: window(INFINITE, always(1), s)),
    "window none": (mask.sliding_window(None, None), lambda s: lambda b, h, q, k: True),
    "window zero": (mask.sliding_window(0), lambda s: lambda b, h, q, k: k == q + s),
    "window top left": (mask.sliding_window(1, 1, "top_left"),
                        lambda s: lambda b, h, q, k: abs(q - k) <= 1),
    "window per head": (mask.sliding_window(tensor(0, 2, 5), tensor(1, 0, 3)),
                        lambda s: window([0, 2, 5].__getitem__, [1, 0, 3].__getitem__, s)),
    "dilated": (mask.dilated_window(4, 2),
                lambda s: lambda b, h, q, k: 0 <= q + s - k <= 4 and (q + s - k) % 2 == 0),
    "dilated both": (mask.dilated_window(None, 3, 3, "top_left"),
                     lambda s: lambda b, h, q, k: k - q <= 3 and (q - k) % 3 == 0),
    "dilated per head": (mask.dilated_window(6, tensor(1, 2, 3)),
                         lambda s: lambda b, h, q, k: 0 <= q + s - k <= 6
                         and (q + s - k) % (h + 1) == 0),
    "prefix": (mask.prefix_lm(3), lambda s: lambda b, h, q, k: k < 3 or k <= q + s),
    "prefix per batch": (mask.prefix_lm(tensor(0, 4)),
                         lambda s: lambda b, h, q, k: k < (0, 4)[b] or k <= q + s),
    "sinks": (mask.sink_tokens(2), lambda s: lambda b, h, q, k: k < 2),
    "sinks per head": (mask.sink_tokens(tensor(0, 1, 4)),
                       lambda s: lambda b, h, q, k: k < (0, 1, 4)[h]),
    "chunked": (mask.chunked(3), lambda s: lambda b, h, q, k: (q + s) // 3 == k // 3),
    "chunked top left": (mask.chunked(2, "top_left"),
                         lambda s: lambda b, h, q, k: q // 2 == k // 2),
    "chunked per head": (mask.chunked(tensor(1, 2, 4)),
                         lambda s: lambda b, h, q, k: (q + s) // (1, 2, 4)[h] == k // (1, 2, 4)[h]),
    "block causal": (mask.block_causal(3), lambda s: lambda b, h, q, k: k // 3 <= (q + s) // 3),
    "global count": (mask.global_tokens(2), lambda s: lambda b, h, q, k: q < 2 or k < 2),
}  # fmt: skip


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("name", BY_DISTANCE)
def test_mask_by_distance(name, lengths):
    built, rule = BY_DISTANCE[name]
    expected = by_python(rule(lengths[1] - lengths[0]), *lengths, BATCH, HEADS)
    assert torch.equal(table(built.expr, *lengths, BATCH, HEADS), expected)


IDS = [0, 0, 1, 1, 1, 4, 4]
SHUFFLED = [2, 0, 2, 1, 0, 0, 1]
TREE = [-1, 0, 0, 1, 1, 2, -1]
PATHS = [{0}, {0, 1}, {0, 2}, {0, 1, 3}, {0, 1, 4}, {0, 2, 5}, {6}]
GLOBAL = [True, False, False, True, False, False, False]
ALLOWED = torch.rand(2, 3, 7, 7, generator=torch.Generator().manual_seed(0)) < 0.4


def by_segment(q, k, segment=(0, 0, 0, 1, 1, 2, 2), prefix=(0, 0, 2)):
    return k <= q and segment[k] in (segment[q], prefix[segment[q]])


ON_TABLES = {
    "document": (mask.document(tensor(*IDS)), lambda b, h, q, k: IDS[q] == IDS[k]),
    "document int8": (mask.document(tensor(*IDS, dtype=torch.int8)),
                      lambda b, h, q, k: IDS[q] == IDS[k]),
    "document unsorted": (mask.document(tensor(*SHUFFLED)),
                          lambda b, h, q, k: SHUFFLED[q] == SHUFFLED[k]),
    "document batched": (mask.document(tensor(IDS, SHUFFLED)),
                         lambda b, h, q, k: (IDS, SHUFFLED)[b][q] == (IDS, SHUFFLED)[b][k]),
    "document keys": (mask.document(tensor(*IDS), tensor(*SHUFFLED)),
                      lambda b, h, q, k: IDS[q] == SHUFFLED[k]),
    "document offsets": (mask.document(offsets=[0, 2, 2, 5, 7]),
                         lambda b, h, q, k: (0, 0, 2, 2, 2, 3, 3)[q] == (0, 0, 2, 2, 2, 3, 3)[k]),
    "document cu_seqlens": (mask.document(offsets=tensor(0, 3, 7), key_offsets=tensor(0, 1, 7)),
                            lambda b, h, q, k: (q >= 3) == (k >= 1)),
    "shared prefix": (mask.shared_prefix([0, 3, 5, 7], [0, 0, 2]),
                      lambda b, h, q, k: by_segment(q, k)),
    "shared prefix all": (mask.shared_prefix(tensor(0, 3, 5, 7)),
                          lambda b, h, q, k: by_segment(q, k, prefix=(0, 0, 0))),
    "global": (mask.global_tokens(tensor(*GLOBAL)), lambda b, h, q, k: GLOBAL[q] or GLOBAL[k]),
    "global batched": (mask.global_tokens(tensor(GLOBAL, GLOBAL[::-1])),
                       lambda b, h, q, k: bool(b == 0 and (GLOBAL[q] or GLOBAL[k]))
                       or bool(b == 1 and (GLOBAL[6 - q] or GLOBAL[6 - k]))),
    "tree parents": (mask.tree(TREE), lambda b, h, q, k: k in PATHS[q]),
    "tree batched": (mask.tree(tensor(TREE, [-1, 0, 1, 2, 3, 4, 5])),
                     lambda b, h, q, k: (k in PATHS[q]) if b == 0 else k <= q),
    "tree ancestors": (mask.tree(torch.ones(7, 7).tril().bool()), lambda b, h, q, k: k <= q),
    "dense": (mask.dense(ALLOWED[0, 0]), lambda b, h, q, k: ALLOWED[0, 0, q, k]),
    "dense heads": (mask.dense(ALLOWED[0]), lambda b, h, q, k: ALLOWED[0, h, q, k]),
    "dense batch": (mask.dense(ALLOWED), lambda b, h, q, k: ALLOWED[b, h, q, k]),
    "dense broadcast": (mask.dense(ALLOWED[:, :1]), lambda b, h, q, k: ALLOWED[b, 0, q, k]),
    "dense strided": (mask.dense(ALLOWED.transpose(2, 3)), lambda b, h, q, k: ALLOWED[b, h, k, q]),
    "select": (mask.select([True, False, True], mask.causal(), ~mask.causal()),
               lambda b, h, q, k: (k <= q) == (h != 1)),
    "per head": (mask.per_head([mask.causal(), mask.full(), mask.sink_tokens(1)]),
                 lambda b, h, q, k: (k <= q, True, k < 1)[h]),
}  # fmt: skip


@pytest.mark.parametrize("name", ON_TABLES)
def test_mask_on_tables(name):
    built, rule = ON_TABLES[name]
    assert torch.equal(table(built.expr, 7, 7, BATCH, HEADS), by_python(rule, 7, 7, BATCH, HEADS))


def test_tree_sees_its_context():
    context = 4

    def rule(b, h, q, k):
        return k < context or k - context in PATHS[q]

    assert torch.equal(table(mask.tree(TREE).expr, 7, 11), by_python(rule, 7, 11))


@pytest.mark.parametrize("block", [1, 2, 3, 8])
def test_block_diffusion(block):
    clean = 6

    def rule(b, h, q, k):
        q_block, k_block = q % clean // block, k % clean // block
        if q < clean:
            return q_block == k_block if k < clean else k_block < q_block
        return k >= clean and k_block <= q_block

    expected = by_python(rule, 2 * clean, 2 * clean)
    for built in (mask.block_diffusion(block), mask.block_diffusion(block, clean)):
        assert torch.equal(table(built.expr, 2 * clean), expected)


def neighbours(i, length, kernel, dilation, stride, causal):
    """Coordinates that `i` sees on one axis, counted out rather than computed."""
    group = [j for j in range(length) if j % dilation == i % dilation]
    place = group.index(i)
    first = place // stride * stride
    members = [p for p in range(first, first + stride)]
    leader = min(members[-1] if causal else members[len(members) // 2], len(group) - 1)
    if causal:
        return {group[p] for p in range(max(leader - kernel + 1, 0), place + 1)}
    start = min(max(leader - kernel // 2, 0), len(group) - kernel)
    return {group[p] for p in range(start, start + kernel)}


@pytest.mark.parametrize(
    ("canvas", "kernel", "dilation", "stride", "causal"),
    [
        (9, 3, 1, 1, False),
        (9, 4, 2, 1, False),
        (10, 3, 3, 1, True),
        (11, 5, 1, 3, False),
        (11, 5, 2, 2, True),
        ((4, 5), 3, 1, 1, False),
        ((4, 6), (3, 2), (1, 3), (2, 1), (False, True)),
        ((3, 4, 4), (3, 3, 2), (1, 1, 2), (1, 2, 1), (True, False, False)),
    ],
)
def test_natten(canvas, kernel, dilation, stride, causal):
    lengths = (canvas,) if isinstance(canvas, int) else canvas

    def axes(value):
        return (value,) * len(lengths) if isinstance(value, int) else value

    rows = list(zip(lengths, *map(axes, (kernel, dilation, stride, causal)), strict=True))
    places = list(itertools.product(*map(range, lengths)))

    def rule(b, h, q, k):
        pairs = zip(places[q], places[k], rows, strict=True)
        return all(y in neighbours(x, *row) for x, y, row in pairs)

    count = len(places)
    built = mask.natten(canvas, kernel, dilation, stride, causal)
    assert torch.equal(table(built.expr, count), by_python(rule, count, count))


def test_natten_sees_as_many_keys_everywhere():
    counts = table(mask.natten((5, 6), (3, 4)).expr, 30).sum(-1)
    assert (counts == 12).all()


def test_random_is_reproducible_and_fair():
    seen = table(mask.random(0.3, seed=7).expr, 128, 128, 2, 4)
    again = table(mask.random(0.3, seed=7).expr, 16, 64, 2, 4)
    assert torch.equal(seen[:, :, :16, :64], again)  # an element doesn't depend on the sizes
    assert not torch.equal(table(mask.random(0.3, seed=8).expr, 128, 128, 2, 4), seen)
    shares = [seen.float().mean(d) for d in ((0, 1, 2), (0, 1, 3), (2, 3))]
    for share in shares:
        deviation = (0.3 * 0.7 / (seen.numel() / share.numel())) ** 0.5
        assert (share - 0.3).abs().max() < 4.5 * deviation
    heads = seen.flatten(2).flatten(0, 1).double()
    assert torch.corrcoef(heads).fill_diagonal_(0).abs().max() < 0.04
    rows = torch.corrcoef(seen[0, 0].double()).fill_diagonal_(0)
    assert rows.abs().mean() < 0.09  # 0.07 for independent rows of 128
    assert not table(mask.random(0.0).expr, 9).any() and table(mask.random(1.0).expr, 9).all()


def test_random_never_leaves_32_bits():
    """The same integers in int32 with wrap-around and in int64, and uniform over the range."""
    q, k = torch.arange(0, 1 << 20, 997), torch.arange(0, 1 << 20, 1009)[:500]
    wide = hashed(torch.tensor(2**32 - 1), torch.tensor(3), torch.tensor(5), q[:, None], k)
    seed = torch.tensor(-1, dtype=torch.int32)
    narrow = hashed(seed, torch.tensor(3).int(), torch.tensor(5).int(), q.int()[:, None], k.int())
    assert narrow.dtype == torch.int32 and torch.equal(wide, narrow.long())
    assert wide.min() >= 0 and wide.max() < RANGE
    counts = torch.histc(wide.double(), 64, 0, RANGE)
    chi_square = ((counts - counts.mean()) ** 2 / counts.mean()).sum()
    assert chi_square < 120  # 63 degrees of freedom: 1 in 10^5


# ----------------------------------------------------------------------------------- run-time sizes


SAME_KEY = {
    "window": lambda n: mask.sliding_window(n, n + 1),
    "window per head": lambda n: mask.sliding_window(tensor(n, n + 1)),
    "dilated": lambda n: mask.dilated_window(n, n),
    "prefix": mask.prefix_lm,
    "sinks": mask.sink_tokens,
    "chunked": mask.chunked,
    "block causal": mask.block_causal,
    "block diffusion": lambda n: mask.block_diffusion(n, 10 * n),
    "document": lambda n: mask.document(torch.arange(n + 5)),
    "shared prefix": lambda n: mask.shared_prefix([0, n, n + 2]),
    "global": mask.global_tokens,
    "natten": lambda n: mask.natten((n + 5, n + 7), (n, n + 1), causal=(True, False)),
    "tree": lambda n: mask.tree([-1] * n),
    "random": lambda n: mask.random(1 / n, seed=n),
    "dense": lambda n: mask.dense(torch.ones(n + 2, n + 3, dtype=torch.bool)),
    "shift": lambda n: mask.causal().shift(q=n, k=-n),
    "select": lambda n: mask.select([True] * n, mask.causal(), mask.full()),
}


@pytest.mark.parametrize("name", SAME_KEY)
def test_new_sizes_keep_the_key(name):
    first, second = SAME_KEY[name](2), SAME_KEY[name](3)
    assert first.key == second.key
    assert first != second


def test_equality_is_by_graph_and_run_time_values():
    assert mask.sliding_window(3) == mask.sliding_window(3)
    assert hash(mask.sliding_window(3)) == hash(mask.sliding_window(3))
    assert mask.sliding_window(3) != mask.sliding_window(4)
    assert mask.sliding_window(3) != mask.causal()
    assert len({mask.causal(), mask.causal(), mask.full()}) == 2


# ------------------------------------------------------------------------------------------ algebra


def test_algebra():
    a, b = mask.causal(), mask.chunked(3)
    t_a, t_b = table(a.expr, 8), table(b.expr, 8)
    for built, expected in (
        (a & b, t_a & t_b),
        (a | b, t_a | t_b),
        (a ^ b, t_a ^ t_b),
        (a - b, t_a & ~t_b),
        (~a, ~t_a),
    ):
        assert torch.equal(table(built.expr, 8), expected)
    assert a & b == b & a and ~~a == a and a & a == a and a | ~a == mask.full()
    assert ~(a & b) == ~a | ~b and a ^ b == b ^ a and a - b == a & ~b


def test_shift_and_restrict():
    moved = mask.define(lambda b, h, q, k: q == k).shift(q=2, k=1)
    assert torch.equal(table(moved.expr, 6), by_python(lambda b, h, q, k: q - 2 == k - 1, 6, 6))
    inside = mask.full().restrict(q=(1, 4), k=(0, 2))
    assert torch.equal(
        table(inside.expr, 6), by_python(lambda b, h, q, k: 1 <= q < 4 and k < 2, 6, 6)
    )
    assert sorted(t.item() for t in moved.tensors) == [1, 2]


def test_a_parameter_may_change_in_place():
    width = parameter(1)
    built = mask.sliding_window(width)
    before = table(built.expr, 5).sum()
    width.fill_(3)
    assert table(built.expr, 5).sum() > before


# --------------------------------------------------------------------------------------- validation

REFUSED = {
    "negative window": (lambda: mask.sliding_window(-1), "left=-1.*int >= 0"),
    "negative window tensor": (lambda: mask.sliding_window(1, tensor(0, -2)), "right has.*-2"),
    "float window": (lambda: mask.sliding_window(1.5), "left=1.5"),
    "float tensor window": (lambda: mask.sliding_window(tensor(1.5)), "float32.*integer tensor"),
    "bool window": (lambda: mask.sliding_window(True), "left=True"),
    "matrix of windows": (lambda: mask.sliding_window(tensor([1], [2])), r"shape \(2, 1\)"),
    "align": (lambda: mask.causal("left"), "bottom_right.*top_left"),
    "align of window": (lambda: mask.sliding_window(1, 0, "no"), "accepted are"),
    "dilation": (lambda: mask.dilated_window(4, 0), "dilation=0.*>= 1"),
    "prefix": (lambda: mask.prefix_lm(-3), r"prefix=-3.*\(batch,\)"),
    "chunk": (lambda: mask.chunked(0), "chunk=0"),
    "block": (lambda: mask.block_diffusion("8"), "block='8'"),
    "document without": (mask.document, "needs ids or offsets"),
    "document twice": (lambda: mask.document(tensor(0), offsets=[0, 1]), "both given"),
    "document floats": (lambda: mask.document(tensor(0.5)), "float32"),
    "document rank": (lambda: mask.document(torch.zeros(1, 1, 1).int()), "shape"),
    "offsets decrease": (lambda: mask.document(offsets=[0, 4, 2]), "increasing"),
    "offsets start": (lambda: mask.document(offsets=[1, 4]), "start with 0"),
    "offsets short": (lambda: mask.document(offsets=[0]), "1 entries"),
    "prefix later": (lambda: mask.shared_prefix([0, 1, 2], [1, 1]), r"prefix_of\[0\]=1"),
    "prefix of prefix": (lambda: mask.shared_prefix([0, 1, 2, 3], [0, 0, 1]), r"prefix_of\[2\]=1"),
    "prefix count": (lambda: mask.shared_prefix([0, 1, 2], [0]), "1 entry for 2 segments"),
    "global floats": (lambda: mask.global_tokens(tensor(0.5)), "tokens"),
    "global rank": (lambda: mask.global_tokens(tensor(1, 2)), "leading tokens"),
    "natten kernel": (lambda: mask.natten((4, 4), (5, 3)), "first axis kernel 5"),
    "natten dilation": (lambda: mask.natten(8, 3, 3), "exceeds the length 8"),
    "natten stride": (lambda: mask.natten(8, 3, stride=4), "stride 4 exceeds kernel 3"),
    "natten axes": (lambda: mask.natten((4, 4), (3, 3, 3)), "3 entries for a canvas of 2"),
    "natten four": (lambda: mask.natten((2, 2, 2, 2), 1), "one, two or three axes"),
    "natten zero": (lambda: mask.natten((4, 0), 1), "ints >= 1"),
    "natten causal": (lambda: mask.natten((4, 4), 1, causal=(1, 0)), "bools are accepted"),
    "tree later": (lambda: mask.tree([1, 0]), "parent of node 0 is 1"),
    "tree shape": (lambda: mask.tree(torch.ones(2, 3).bool()), r"\(2, 3\)"),
    "tree floats": (lambda: mask.tree(tensor(0.5)), "float32"),
    "keep": (lambda: mask.random(1.5), "between 0 and 1"),
    "seed": (lambda: mask.random(0.5, -1), "seed=-1"),
    "dense floats": (lambda: mask.dense(torch.rand(2, 2)), "score.dense_bias"),
    "dense rank": (lambda: mask.dense(torch.ones(3).bool()), r"shape \(3,\)"),
    "combine": (lambda: mask.causal() & (lambda b, h, q, k: q > k), "mask.define"),
    "truth": (lambda: bool(mask.causal()), "no truth value"),
    "per head": (lambda: mask.per_head([]), "at least one mask"),
    "per head function": (
        lambda: mask.per_head([mask.full(), lambda b, h, q, k: q > k]),
        r"per_head takes masks; masks\[1\] is a function. Wrap a function with mask.define",
    ),
    "per head mask": (lambda: mask.per_head(mask.full()), "a sequence of masks.*got Mask"),
    "select function": (
        lambda: mask.select([True], lambda b, h, q, k: q > k, mask.full()),
        "select takes masks; chosen is a function. Wrap a function with mask.define",
    ),
    "select otherwise": (lambda: mask.select([True], mask.full(), 3), r"otherwise is a int\.$"),
    "select": (lambda: mask.select([1, 0], mask.causal(), mask.full()), "1-d bool table"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    build, message = REFUSED[name]
    with pytest.raises((TypeError, ValueError), match=message):
        build()
