"""Pictures: what they show, and what they say if matplotlib is missing."""

import sys

import numpy as np
import pytest
import torch

from fa4core import Problem, Variant, draw
from fa4core.plan.tiles import EMPTY, FULL, PARTIAL
from primitives import mask, score
from primitives.score.core import named

pytest.importorskip("matplotlib").use("Agg")

distance = named("distance", lambda s, b, h, q_idx, kv_idx: s - (h + 1.0) * (q_idx - kv_idx).abs())
softcap = named("softcap", lambda s, b, h, q_idx, kv_idx: 30.0 * torch.tanh(s / 30.0))


@pytest.fixture(autouse=True)
def close_figures():
    yield
    import matplotlib.pyplot as plt

    plt.close("all")


def image(figure, panel):
    return np.asarray(figure.axes[panel].images[0].get_array())


def titles(figure):
    return [axes.get_title() for axes in figure.axes]


def test_the_tile_map_is_drawn():
    figure = draw.variant(Variant(mask=mask.causal()), seqlen=1024)
    kinds = image(figure, 0)
    i, j = np.indices((8, 8))
    assert (kinds == np.select([i == j, i > j], [PARTIAL, FULL], EMPTY)).all()
    assert titles(figure)[0] == "tile map: 8 x 8 tiles of 128 x 128"
    legend = [t.get_text() for t in figure.axes[0].get_legend().get_texts()]
    assert legend == ["EMPTY  43.8%", "PARTIAL  12.5%", "FULL  43.8%"]


def test_the_mask_is_drawn_element_by_element():
    built = mask.define(lambda b, h, q_idx, kv_idx: (q_idx * kv_idx) % 3 == 1)
    figure = draw.variant(Variant(mask=built), seqlen=(50, 70))
    q, k = np.indices((50, 70))
    assert (image(figure, 1) == (q * k % 3 == 1)).all()
    assert titles(figure)[1] == "mask, every element"


def test_a_large_mask_is_shown_where_it_is_cut():
    built = mask.define(lambda b, h, q_idx, kv_idx: kv_idx >= 3000)
    figure = draw.variant(Variant(mask=built), seqlen=4096)
    shown = image(figure, 1)
    assert shown.shape == (draw.MAX_ELEMENTS,) * 2
    assert 0 < shown.mean() < 1
    assert "of the frame" in titles(figure)[1]


def test_many_tiles_are_drawn_as_larger_ones():
    figure = draw.variant(Variant(mask=mask.causal()), seqlen=1 << 17)
    assert image(figure, 0).shape == (128, 128)
    assert "tiles of 1024 x 1024" in titles(figure)[0]


def test_the_heat_map_is_the_mod_where_the_mask_allows():
    figure = draw.variant(Variant(mask=mask.causal(), score=distance), seqlen=100, head=2, heads=4)
    shown = np.ma.filled(figure.axes[2].images[0].get_array().astype(float), np.nan)
    q, k = np.indices((100, 100))
    np.testing.assert_allclose(shown, np.where(q >= k, -3.0 * (q - k), np.nan))
    assert titles(figure)[2] == "score mod applied to a score of 0, head 2"


def test_a_factor_is_drawn_on_a_score_that_shows_it():
    factor = score.define(lambda s, b, h, q_idx, kv_idx: s * (1 + kv_idx))
    figure = draw.variant(Variant(score=factor), seqlen=50)
    shown = np.asarray(figure.axes[2].images[0].get_array())
    np.testing.assert_allclose(shown[7], np.arange(1, 51))
    assert titles(figure)[2] == "score mod applied to a score of 1"


def test_a_mod_of_the_score_alone_is_a_curve():
    figure = draw.variant(Variant(score=softcap), seqlen=64)
    unchanged, mod = figure.axes[2].lines[:2]
    np.testing.assert_allclose(mod.get_ydata(), 30 * np.tanh(unchanged.get_ydata() / 30))


@pytest.mark.parametrize("value", [float("nan"), -float("inf")])
def test_scores_that_are_not_finite_are_left_blank(value):
    mod = score.define(
        lambda s, b, h, q_idx, kv_idx: torch.where(q_idx > kv_idx, s + kv_idx, value)
    )
    draw.variant(Variant(score=mod), seqlen=40)
    everywhere = score.define(lambda s, b, h, q_idx, kv_idx: s + value * (kv_idx + 1.0))
    draw.variant(Variant(score=everywhere), seqlen=40)


def test_a_head_and_sequence_of_a_problem(tmp_path):
    windows = torch.tensor([5, 50])
    problem = Problem(2, 2, 2, 64, 64, (100, 300), (100, 300))
    shown = [
        image(draw.variant(Variant(mask=mask.sliding_window(windows)), problem=problem, head=h), 1)
        for h in (0, 1)
    ]
    assert shown[0].sum() < shown[1].sum()
    figure = draw.variant(Variant(mask=mask.causal()), problem=problem, sequence=1)
    assert image(figure, 0).shape == (3, 3)
    with pytest.raises(ValueError, match="sequence 2, head 0 of a problem with 2 sequences"):
        draw.variant(Variant(), problem=problem, sequence=2)


def test_files_are_written(tmp_path):
    path = tmp_path / "picture.png"
    draw.variant(Variant(mask=mask.causal(), score=distance), path, seqlen=256, title="A title")
    assert path.read_bytes()[:4] == b"\x89PNG"
    explanation = Variant(mask=mask.causal()).explain(
        problem=Problem(1, 1, 1, 64, 64, (256,), (256,)), target="sm90"
    )
    figure = explanation.draw(tmp_path / "explained.svg")
    assert "tiles of 192 x 128" in titles(figure)[0]
    assert (tmp_path / "explained.svg").stat().st_size > 0


def test_nothing_to_draw():
    with pytest.raises(ValueError, match="0 queries and 5 keys"):
        draw.variant(Variant(), seqlen=(0, 5))


def test_matplotlib_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match=r"pip install 'fa4core\[plot\]'"):
        draw.variant(Variant(), seqlen=64)
