"""cuDNN's packed attention as XLA calls it: the lists it is given and what is made of its answers, with a stand-in for it."""

import dataclasses
import importlib

import jax.numpy as jnp
import numpy as np
import pytest

from te_plugin.jax import composite_attention, xla_attention
from te_plugin.ops.attention import cudnn
from te_plugin.ops.attention.problem import AttentionProblem
from te_plugin.plan import PlanError, Target, plan

H, G, D = 4, 2, 8
LISTS = [
    ([0, 5, 12, 16], [0, 5, 12, 16], 16),
    ([0, 5, 5, 12], [0, 5, 5, 12], 16),  # an empty segment, and rows behind the last
    ([0, 4, 4, 7, 7], [2, 8, 9, 16, 16], 16),  # gaps; unused entries at the end
    ([0, 3], [0, 3], 3),  # one segment
    ([0, 3], [6, 16], 16),
    ([0, 0, 0], [0, 0, 0], 4),  # no segment with rows
]


class StandIn:
    """One of JAX's primitives: reads and writes the rows that lengths and offsets name; everything else it leaves as NaN."""

    def __init__(self, backward: bool):
        self.backward = backward

    def bind(self, q, k, v, bias, lengths_q, lengths_k, offsets_q, offsets_k, page_k, page_v, *others, scale, **options):
        assert bias.size == page_k.size == page_v.size == 0 and options["mask_type"].name == "PADDING_CAUSAL"
        (segments,) = lengths_q.shape[1:]
        assert segments > 1 and offsets_q.shape == offsets_k.shape == (1, segments + 1)
        q, k, v = (np.asarray(x[0], np.float64) for x in (q, k, v))
        spread = lambda x: np.repeat(x, H // G, axis=1)  # noqa: E731
        gather = lambda x: x.reshape(len(x), G, H // G, D).sum(2)  # noqa: E731
        results = [np.full(x.shape, np.nan) for x in ((q, k, v) if self.backward else (q,))]
        stats = np.full((segments, H, len(q)), np.nan)
        for n in range(segments):
            at, length = int(offsets_q[0, n]), int(lengths_q[0, n])
            assert (length, at) == (int(lengths_k[0, n]), int(offsets_k[0, n])) or not length
            rows = slice(at, at + length)
            scores = np.einsum("qhd,khd->hqk", q[rows], spread(k[rows])) * scale
            scores[:, np.arange(length)[:, None] < np.arange(length)] = -np.inf
            if not self.backward:
                stats[n, :, :length] = np.log(np.exp(scores).sum(-1))
                results[0][rows] = np.einsum("hqk,khd->qhd", np.exp(scores - stats[n, :, :length, None]), spread(v[rows]))
                continue
            given, out, dout = (np.asarray(x, np.float64) for x in others)
            assert np.isposinf(given[n, :, length:]).all()  # no probability behind the end
            p = np.exp(scores - given[n, :, :length, None])
            out, dout = out[0, rows], dout[0, rows]
            ds = p * (np.einsum("qhd,khd->hqk", dout, spread(v[rows])) - (dout * out).sum(-1).T[..., None]) * scale
            results[0][rows] = np.einsum("hqk,khd->qhd", ds, spread(k[rows]))
            results[1][rows] = gather(np.einsum("hqk,qhd->khd", ds, q[rows]))
            results[2][rows] = gather(np.einsum("hqk,qhd->khd", p, dout))
        answers = [x[None] for x in results] + ([] if self.backward else [stats])
        return [jnp.asarray(x, jnp.float32) for x in answers]


@pytest.fixture
def stand_in(monkeypatch):
    module = importlib.import_module(cudnn.JAX_MODULE)
    monkeypatch.setattr(module, cudnn.JAX_FORWARD, StandIn(backward=False))
    monkeypatch.setattr(module, cudnn.JAX_BACKWARD, StandIn(backward=True))


def problem(rows: int, segments: int, **changes) -> AttentionProblem:
    plain = AttentionProblem(rows, rows, segments, H, G, D, dtype="bf16", mask="causal", needs_backward=True)
    return dataclasses.replace(plain, **changes)


def both_ways(kernel, cu, starts, rows, rng):
    chosen = plan(problem(rows, len(cu) - 1), Target("sm90", "jax"), kernel="xla")
    draw = lambda heads: jnp.asarray(rng.standard_normal((rows, heads, D)), jnp.float32)  # noqa: E731
    q, k, v, dout = draw(H), draw(G), draw(G), draw(H)
    lists = [jnp.asarray(x, jnp.int32) for x in (cu, cu, starts, starts)]
    out, lse = kernel.forward(chosen, q, k, v, *lists)
    return out, lse, *kernel.backward(chosen, dout, q, k, v, out, lse, *lists)


@pytest.mark.parametrize("cu,starts,rows", LISTS, ids=str)
def test_every_segment_is_what_framework_maths_makes_of_it(stand_in, cu, starts, rows):
    got = both_ways(xla_attention, cu, starts, rows, np.random.default_rng(1))
    want = both_ways(composite_attention, cu, starts, rows, np.random.default_rng(1))
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("cu,starts", [
    ([0, 30], [0, 30]), ([0, 9, 5], [0, 9, 16]), ([0, 5, 9], [0, 4, 16]), ([0, 9, 5], [-9, 3, 16]), ([1, 5], [0, 16]),
], ids=str)  # fmt: skip
def test_lists_that_lie_give_nan(stand_in, cu, starts):
    out, lse, *grads = both_ways(xla_attention, cu, starts, 16, np.random.default_rng(1))
    assert np.isneginf(lse).all() and all(np.isnan(x).all() for x in (out, *grads))


@pytest.mark.parametrize("changes,words", [
    ({"dtype": "fp32"}, "fp32"), ({"mask": "none"}, "mask none"), ({"window": (3, 0)}, "window"),
    ({"deterministic": True}, "deterministic"), ({"head_dim": 12}, "multiple of 8"),
    ({"tokens_q": 2**20, "tokens_kv": 2**20, "heads": 32, "head_dim": 128}, "32 bits"),
])  # fmt: skip
def test_what_it_cannot_take_is_refused_by_name(changes, words):
    with pytest.raises(PlanError, match=words):
        plan(problem(64, 2, **changes), Target("sm90", "jax"), kernel="xla")


def test_a_jax_without_the_names_is_refused(monkeypatch):
    assert cudnn.absent_in_jax() is None  # the installed one has them
    monkeypatch.setattr(cudnn, "JAX_BACKWARD", "_renamed")
    assert cudnn.absent_in_jax.__wrapped__() == f"{cudnn.JAX_MODULE}._renamed"


def test_auto_takes_it_on_hopper():
    assert plan(problem(64, 2), Target("sm90", "jax")).kernel.name == "xla"


def test_scratch_is_a_slot_of_all_rows_for_each_segment():
    """258 MiB each, measured on an H200 with JAX 0.11.2: 32 heads, head dim 128, 8192 rows."""
    large = {"heads": 32, "kv_heads": 8, "head_dim": 128}
    for segments, megabytes in ((1, 516), (5, 1290), (64, 16512)):
        made = plan(problem(8192, segments, **large), Target("sm90", "jax"))
        assert made.kernel.own_scratch(made.problem) == megabytes * 2**20


def test_rows_of_a_batch_are_calls_of_their_own_where_a_call_has_slots(stand_in, monkeypatch):
    attention = importlib.import_module("te_plugin.jax.attention")  # the package has a function of this name
    rng, seen = np.random.default_rng(3), []
    draw = lambda heads: jnp.asarray(rng.standard_normal((2, 12, heads, D)), jnp.bfloat16)  # noqa: E731
    q, k, v, ids = draw(H), draw(G), draw(G), jnp.asarray([[1] * 5 + [2] * 7, [1] * 9 + [0] * 3], jnp.int32)
    composite = composite_attention.forward
    counted = lambda chosen, *x: seen.append(chosen.problem.tokens_q) or composite(chosen, *x)  # noqa: E731
    monkeypatch.setattr(composite_attention, "forward", counted)
    whole = attention.attention_by_segment_ids(q, k, v, ids, max_segments=4, kernel="composite")
    monkeypatch.setattr(attention, "rows_one_by_one", lambda *asked: True)
    apart = attention.attention_by_segment_ids(q, k, v, ids, max_segments=4, kernel="composite")
    np.testing.assert_array_equal(np.asarray(whole, np.float32), np.asarray(apart, np.float32))
    assert seen[0] == 24 and set(seen[1:]) == {12}
    assert cudnn.rows_one_by_one(problem(24, 8), Target("sm90", "jax"), "auto", "error")
    assert not cudnn.rows_one_by_one(problem(24, 8), Target("cpu", "jax"), "auto", "error")
