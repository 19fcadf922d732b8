"""What can't be traced: the error points at the user's line and names the remedy."""

from __future__ import annotations

import inspect
import math
import re

import numpy
import pytest
import torch

from primitives import DefinitionError, mask, score, sink

LIST, ARRAY, TABLE = [1, 2, 3], numpy.array([1, 2, 3]), torch.tensor([1, 2, 3])
MATRIX = torch.rand(100, 100)


# Each function's offending line is marked; the message is looked for after it.


def half(b, h, q, k):
    return TABLE[q / 2] > 1  # here: indexed by floats.*`//`


def half_taken(b, h, q, k):
    return torch.take(TABLE, k / 2) > 1  # here: indexed by floats.*`//`


def branch(b, h, q, k):
    if q >= k:  # here: `if`.*torch.where
        k = q + 1
    return q > k


def choice(b, h, q, k):
    return q if q > k else k  # here: `if`.*torch.where


def loop(b, h, q, k):
    while q > k:  # here: `while`
        q = q - 1
    return q == k


def check(b, h, q, k):
    assert q < 100  # here: truth value
    return q > k


def negation(b, h, q, k):
    return not q > k  # here: `not`.*~\(


def both(b, h, q, k):
    return (
        q > 3 and  # here: `and`.*&
        k > 2
    )  # fmt: skip


def either(b, h, q, k):
    return q > 3 or k > 2  # here: `or`.*\|


def chain(b, h, q, k):
    return 0 <= q < 5  # here: chained.*\(a <= x\) & \(x < b\)


def membership(b, h, q, k):
    return q in LIST  # here: `in`


def smallest(b, h, q, k):
    return min(q, k) > 3  # here: `min`.*torch.minimum


def largest(b, h, q, k):
    return max(q, 3) > k  # here: `max`.*torch.maximum


def several(b, h, q, k):
    return any([q > k, q < 3])  # here: `any`.*\|


def item(b, h, q, k):
    limit = 3
    return q.item() > limit  # here: `.item\(\)`.*Use the tensor itself


def captured_item(b, h, q, k):
    return q > TABLE.max().item()  # here: `.item\(\)`.*captured.*before the function


def integer(b, h, q, k):
    return int(q) > 3  # here: `int\(...\)`.*\.long\(\)


def floating(b, h, q, k):
    return float(q) > 3  # here: `float\(...\)`.*\.float\(\)


def by_math(b, h, q, k):
    return math.sqrt(q) > 3  # here: `math`.*torch


def counting(b, h, q, k):
    for _ in range(q):  # here: `range`.*fixed count
        k = k + 1
    return q > k


def list_index(b, h, q, k):
    return LIST[q] > k  # here: list.*torch.tensor\(values\)


def array_index(b, h, q, k):
    return ARRAY[q] > k  # here: (list|numpy).*tensor


def dict_key(b, h, q, k):
    return {0: 1, 1: 2}[h] > q  # here: dict.*Capture a tensor


def slice_bound(b, h, q, k):
    return TABLE[q : q + 2].sum() > 3  # here: slice.*start \+ i


def by_numpy(b, h, q, k):
    return numpy.sqrt(q) > 3  # here: numpy.*torch


def to_numpy(b, h, q, k):
    return q.numpy() > 3  # here: numpy


def random_numbers(b, h, q, k):
    return torch.rand(()) > 0.5  # here: random numbers.*mask.random


def dropped(b, h, q, k):
    return torch.nn.functional.dropout(q.float()) > 0.5  # here: not one a mask


def unsupported(b, h, q, k):
    return torch.linalg.inv(MATRIX)[q, k] > 0  # here: not one a mask or score function can use


def long_reduction(b, h, q, k):
    return MATRIX.sum() > q  # here: over 10000 elements.*Reduce before


def varying_shape(b, h, q, k):
    return torch.nonzero(TABLE)[0, 0] > q  # here: shape.*depends on values


def boolean_index(b, h, q, k):
    return TABLE[q < TABLE].sum() > 3  # here: boolean.*torch.where


def boolean_index_of_an_index(b, h, q, k):
    return torch.ones(9)[q > k] > 0  # here: ^a boolean index.*torch.where


def bucket(b, h, q, k):
    return torch.bucketize(q, TABLE) > 0  # here: `bucketize` needs.*`ids = torch.bucketize\(


def shape_of_an_index(b, h, q, k):
    return q < q.shape[0]  # here: no such dimension.*0-d.*keyword-only seqlen_q and seqlen_k


def size_of_an_index(b, h, q, k):
    return q < q.size(0)  # here: no such dimension.*0-d.*keyword-only seqlen_q and seqlen_k


def length_of_an_index(b, h, q, k):
    return q < len(q)  # here: no such dimension.*0-d.*keyword-only seqlen_q and seqlen_k


def tuple_index(b, h, q, k):
    return q < (1, 2)[len(LIST)]  # here: IndexError: tuple index out of range


def shape_at_an_index(b, h, q, k):
    return MATRIX.shape[h] > q  # here: a shape needs a number


def write(b, h, q, k):
    TABLE[0] = 5  # here: writes into a tensor at an index.*torch.where
    return q > k


def write_in_place(b, h, q, k):
    TABLE.add_(1)  # here: writes into a captured tensor
    return q > k


def write_view(b, h, q, k):
    TABLE.view(3, 1).mul_(2)  # here: writes in place into a tensor
    return q > k


def write_alias(b, h, q, k):
    row = q.view(1)
    row += 1  # here: views
    return row[0] > k


def write_at_index(b, h, q, k):
    row = torch.zeros(4)
    row[h] = 1.0  # here: torch.where
    return row[h] > 0


def too_many_indices(b, h, q, k):
    return MATRIX[b, h, q] > k  # here: 3 indices for a tensor of 2 dimensions


def shapes(b, h, q, k):
    return (TABLE + torch.arange(4))[q] > k  # here: broadcast a dimension of length 4


def zero(b, h, q, k):
    return q // 0 > k  # here: by the constant 0


def unknown_name(b, h, q, k):
    return undefined > q  # noqa: F821  # here: NameError.*undefined


def narrow(b, h, q, k):
    return q.to(torch.uint8) > k  # here: wrap around.*\.int\(\)


def narrow_sum(b, h, q, k):
    return TABLE.bool().to(torch.uint8)[q] + TABLE.bool().to(torch.uint8)[k] > 1  # here: wrap


LOCATED = [
    f for f in list(globals().values()) if inspect.isfunction(f) and f.__module__ == __name__
]


@pytest.mark.parametrize("function", LOCATED, ids=lambda f: f.__name__)
def test_error_points_at_the_line(function):
    lines, first = inspect.getsourcelines(function)
    (offset,) = (i for i, line in enumerate(lines) if "# here: " in line)
    code, pattern = (part.strip() for part in re.split(r"#.*here: ", lines[offset]))
    with pytest.raises(DefinitionError) as caught:
        mask.define(function)
    message = str(caught.value)
    place = f"cannot trace {function.__name__} ({__file__}, line {first + offset}):"
    assert message.startswith(place), message
    assert code in message
    _, _, remedy = message.partition("# here: ")[2].partition("\n")  # not the pattern itself
    assert re.search(pattern, remedy.replace("\n", " ")), message


RESULTS = {
    "mask returns int": (mask.define, lambda b, h, q, k: q - k, "returns int64.*`!= 0`"),
    "mask returns float": (mask.define, lambda b, h, q, k: q * 0.5, "float32.*score.define"),
    "mask returns None": (mask.define, lambda b, h, q, k: None, "None.*`return` missing"),
    "mask returns tuple": (mask.define, lambda b, h, q, k: (q > k, k), "a tuple"),
    "mask returns table": (mask.define, lambda b, h, q, k: q < TABLE, r"shape \(3,\).*one element"),
    "mask returns number": (mask.define, lambda b, h, q, k: 3, "returns a int"),
    "score returns bool": (score.define, lambda s, b, h, q, k: s > 3, "bool.*mask.define"),
    "score returns None": (score.define, lambda s, b, h, q, k: None, "None"),
    "score rounds": (score.define, lambda s, b, h, q, k: s.to(torch.float8_e5m2), "float8.*rounds"),
    "sink returns bool": (sink.define, lambda b, h, q: q > 3, "bool"),
    "score given as mask": (mask.define, lambda score, b, h, q, k: score, "score.define"),
    "mask given as score": (score.define, lambda b, h, q, k: q > k, "mask.define"),
    "two arguments": (mask.define, lambda q, k: q > k, r"\(b, h, q_idx, kv_idx\)"),
    "unknown keyword": (mask.define, lambda b, h, q, k, *, length: q > k, "seqlen_q and seqlen_k"),
    "no function": (mask.define, 3, "function is needed, got int"),
    "tensor": (mask.define, torch.ones(2, 2), "function is needed, got Tensor"),
    "sparse": (mask.define, lambda b, h, q, k: TABLE.to_sparse()[q] > k, "not one a mask"),
}  # fmt: skip


@pytest.mark.parametrize("name", RESULTS)
def test_wrong_results_and_signatures(name):
    define, function, message = RESULTS[name]
    with pytest.raises(DefinitionError) as caught:
        define(function)
    assert re.search(message, str(caught.value).replace("\n", " ")), str(caught.value)
    if callable(function):
        line = inspect.getsourcelines(function)[1]
        assert f"{__file__}, line {line}" in str(caught.value)


class Rule:
    def __call__(self, b, h, q_idx, kv_idx):
        return not q_idx > kv_idx


def test_error_of_a_callable_object():
    with pytest.raises(
        DefinitionError, match=r"(?s)cannot trace Rule.*not q_idx > kv_idx"
    ) as caught:
        mask.define(Rule())
    assert "`~(...)`" in str(caught.value)


def test_error_in_a_helper_points_into_the_helper():
    def helper(x):
        return 1 if x > 2 else 0

    with pytest.raises(DefinitionError, match="return 1 if x > 2 else 0"):
        mask.define(lambda b, h, q, k: helper(q) > k)


def test_source_that_is_gone():
    function = eval("lambda b, h, q, k: q if q > k else k")
    with pytest.raises(DefinitionError, match="truth value is needed here"):
        mask.define(function)


def test_tensors_of_a_transform():
    def inner(x):
        mask.define(lambda b, h, q, k: q > x)
        return x

    with pytest.raises(DefinitionError, match=r"torch\.func transform"):
        torch.vmap(inner)(torch.arange(3))


def test_captured_sparse_tensor():
    sparse = torch.eye(3).to_sparse()
    with pytest.raises(DefinitionError, match=r"layout.*to_dense"):
        mask.define(lambda b, h, q, k: sparse[q, k] > 0)
