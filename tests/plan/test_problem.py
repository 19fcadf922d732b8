"""`Problem` checks its own fields: what it names and what it accepts."""

import pytest
import torch

from fa4core import Problem

GOOD = {
    "batch": 2,
    "heads_q": 4,
    "heads_kv": 2,
    "head_dim": 64,
    "head_dim_v": 32,
    "seqlens_q": (8, 0),
    "seqlens_k": (8, 3),
}


WRONG = {
    "group": ({"heads_kv": 3}, ValueError, "4 query heads on 3 KV heads.*must be a multiple"),
    "no KV heads": ({"heads_kv": 0}, ValueError, "heads_kv=0; an int >= 1"),
    "negative heads": ({"heads_q": -2}, ValueError, "heads_q=-2; an int >= 0"),
    "negative dim": ({"head_dim": -1}, ValueError, "head_dim=-1; an int >= 1"),
    "half dim": ({"head_dim": 64.5}, TypeError, "head_dim=64.5; an int >= 1"),
    "value dim": ({"head_dim_v": 0}, ValueError, "head_dim_v=0; an int >= 1"),
    "float batch": ({"batch": 2.0}, TypeError, "batch=2.0; an int >= 0"),
    "bool batch": ({"batch": True}, TypeError, "batch=True"),
    "negative batch": ({"batch": -1}, ValueError, "batch=-1; an int >= 0"),
    "int dtype": ({"dtype": torch.int32}, TypeError, "dtype=torch.int32; torch.float16"),
    "text dtype": ({"dtype": "float16"}, TypeError, "dtype='float16'; torch.float16"),
    "one number": ({"seqlens_q": 8}, TypeError, r"seqlens_q is 8, a int.*q=\(8,\) \* batch"),
    "text": ({"seqlens_k": "88"}, TypeError, "seqlens_k is '88', a str"),
    "tensor": ({"seqlens_k": torch.ones(2)}, TypeError, "seqlens_k is a Tensor.*tolist"),
    "none": ({"seqlens_k": None}, TypeError, "seqlens_k is a NoneType"),
    "too few": ({"seqlens_k": (8,)}, ValueError, "seqlens_k has 1 entry for batch=2; one int"),
    "negative length": ({"seqlens_q": (8, -1)}, ValueError, r"seqlens_q\[1\] is -1; one int >= 0"),
    "half length": ({"seqlens_q": (8.5, 1)}, TypeError, r"seqlens_q\[0\] is 8.5"),
    "starts": ({"starts_k": (0,)}, ValueError, "starts_k has 1 entry for batch=2"),
    "page": ({"page_size": 0}, ValueError, "page_size=0; an int >= 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_sizes_are_named(name):
    fields, kind, message = WRONG[name]
    with pytest.raises(kind, match=message):
        Problem(**GOOD | fields)


def test_lists_are_lengths_too():
    given = Problem(**GOOD | {"seqlens_q": [8, 0], "seqlens_k": [8, 3]})
    assert given == Problem(**GOOD) and hash(given) == hash(Problem(**GOOD))


def test_a_batch_may_be_empty():
    assert Problem(**GOOD | {"batch": 0, "seqlens_q": (), "seqlens_k": ()}).group == 2
