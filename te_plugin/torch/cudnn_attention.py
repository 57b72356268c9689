"""cuDNN's packed attention (BF16, FP16), through NVIDIA's cudnn-frontend.

A cuDNN graph is built once for every set of shapes and strides and kept. Its number of rows is rounded up (graph_rows), so that a
graph serves many numbers of tokens: NVIDIA documents it as a bound on the length of a segment, which may exceed the rows of a
ragged tensor (docs/operations/Attention.md of cudnn-frontend: 5 tokens, S = 8). Addresses come from offsets and lengths alone.
Segment lists stay on the device: `segment_offsets` makes of them the lengths and element offsets that the graph reads. cuDNN
neither reads nor writes rows outside segments, and `fill_outside` zeroes them. Lists that reach outside the tensors are run as
empty segments (log-sum-exp -inf) and make the output and every gradient NaN, because reading them on the host would stop the GPU.
"""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass
from enum import IntEnum

import torch

from te_plugin import ffi
from te_plugin.ops.attention.cudnn import graph_rows
from te_plugin.plan import Plan
from te_plugin.torch.call import addressable, empty


class Uid(IntEnum):
    """The names of a graph's tensors."""

    Q, K, V, OUT, STATS, DOUT, DQ, DK, DV, LENGTHS_Q, LENGTHS_KV = range(1, 12)
    # Element offsets of segments, in the order of segment_offsets.
    OFFSETS_Q, OFFSETS_OUT, OFFSETS_STATS, OFFSETS_K, OFFSETS_V = range(12, 17)


@dataclass(frozen=True)
class Shape:
    """What a graph depends on. rows: at least those of the tensors. q, k, v: their strides (row, head) in elements; every other
    tensor is contiguous.
    """

    device: int
    segments: int
    rows_q: int
    rows_kv: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    scale: float
    left: int
    q: tuple[int, int]
    k: tuple[int, int]
    v: tuple[int, int]

    @property
    def out(self) -> tuple[int, int]:
        return self.heads * self.head_dim, self.head_dim


class _Handles(threading.local):
    """One cuDNN handle a thread and device: a handle must not be used by two threads at once."""

    def __init__(self):
        self.of: dict[int, object] = {}

    def get(self, device: int):
        import cudnn

        handle = self.of.get(device)
        if handle is None:
            handle = self.of[device] = cudnn.create_handle()
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(device).cuda_stream)
        return handle


_handles = _Handles()


class _Builder:
    """A cuDNN graph under construction, with the tensors that both directions share."""

    def __init__(self, shape: Shape):
        import cudnn

        self.cudnn, self.shape = cudnn, shape
        self.dtype = {torch.bfloat16: cudnn.data_type.BFLOAT16, torch.float16: cudnn.data_type.HALF}[shape.dtype]
        self.graph = cudnn.pygraph(io_data_type=self.dtype, intermediate_data_type=cudnn.data_type.FLOAT,
                                   compute_data_type=cudnn.data_type.FLOAT, handle=_handles.get(shape.device))
        lengths = [self._list(uid, shape.segments, cudnn.data_type.INT32) for uid in (Uid.LENGTHS_Q, Uid.LENGTHS_KV)]
        window = {} if shape.left < 0 else {"diagonal_band_left_bound": shape.left + 1}
        self.options = dict(attn_scale=shape.scale, use_padding_mask=True, seq_len_q=lengths[0], seq_len_kv=lengths[1],
                            diagonal_alignment=cudnn.diagonal_alignment.TOP_LEFT, diagonal_band_right_bound=0, **window)
        self.offsets = functools.cache(lambda uid: self._list(uid, shape.segments + 1, cudnn.data_type.INT64))

    def _list(self, uid: Uid, entries: int, dtype):
        return self.graph.tensor(dim=[entries, 1, 1, 1], stride=[1, 1, 1, 1], data_type=dtype, uid=int(uid), name=uid.name)

    def _sizes(self, heads: int, strides: tuple[int, int], of_q: bool) -> dict[str, list[int]]:
        rows, (row, head) = self.shape.rows_q if of_q else self.shape.rows_kv, strides
        return {"dim": [self.shape.segments, heads, rows, self.shape.head_dim], "stride": [rows * row, head, row, 1]}

    def input(self, uid: Uid, offsets: Uid, heads: int, strides: tuple[int, int], of_q: bool = True):
        return self.graph.tensor(**self._sizes(heads, strides, of_q), ragged_offset=self.offsets(offsets), data_type=self.dtype,
                                 uid=int(uid), name=uid.name)

    def output(self, tensor, uid: Uid, offsets: Uid, heads: int, strides: tuple[int, int], of_q: bool = True) -> None:
        sizes = self._sizes(heads, strides, of_q)
        tensor.set_output(True).set_uid(int(uid)).set_dim(sizes["dim"]).set_stride(sizes["stride"])
        tensor.set_ragged_offset(self.offsets(offsets))

    @property
    def stats_sizes(self) -> dict[str, list[int]]:
        """Log-sum-exp as [T, H]: the backward ignores any other strides."""
        heads, rows = self.shape.heads, self.shape.rows_q
        return {"dim": [self.shape.segments, heads, rows, 1], "stride": [heads * rows, 1, heads, 1]}

    def operands(self):
        s = self.shape
        return (self.input(Uid.Q, Uid.OFFSETS_Q, s.heads, s.q), self.input(Uid.K, Uid.OFFSETS_K, s.kv_heads, s.k, of_q=False),
                self.input(Uid.V, Uid.OFFSETS_V, s.kv_heads, s.v, of_q=False))

    def finish(self):
        self.graph.validate()
        self.graph.build_operation_graph()
        self.graph.create_execution_plans([self.cudnn.heur_mode.A])
        self.graph.check_support()
        self.graph.build_plans()
        return self.graph


@functools.lru_cache(maxsize=256)
def _forward_graph(shape: Shape):
    build = _Builder(shape)
    out, stats = build.graph.sdpa(*build.operands(), generate_stats=True, **build.options)
    build.output(out, Uid.OUT, Uid.OFFSETS_OUT, shape.heads, shape.out)
    stats.set_output(True).set_uid(int(Uid.STATS)).set_data_type(build.cudnn.data_type.FLOAT)
    stats.set_dim(build.stats_sizes["dim"]).set_stride(build.stats_sizes["stride"])
    stats.set_ragged_offset(build.offsets(Uid.OFFSETS_STATS))
    return build.finish()


def _backward_candidate(shape: Shape, **limits):
    build = _Builder(shape)
    operands = build.operands()
    out = build.input(Uid.OUT, Uid.OFFSETS_OUT, shape.heads, shape.out)
    dout = build.input(Uid.DOUT, Uid.OFFSETS_OUT, shape.heads, shape.out)
    stats = build.graph.tensor(**build.stats_sizes, ragged_offset=build.offsets(Uid.OFFSETS_STATS),
                               data_type=build.cudnn.data_type.FLOAT, uid=int(Uid.STATS), name=Uid.STATS.name)
    dq, dk, dv = build.graph.sdpa_backward(*operands, out, dout, stats, **build.options, **limits)
    build.output(dq, Uid.DQ, Uid.OFFSETS_Q, shape.heads, shape.q)
    build.output(dk, Uid.DK, Uid.OFFSETS_K, shape.kv_heads, shape.k, of_q=False)
    build.output(dv, Uid.DV, Uid.OFFSETS_V, shape.kv_heads, shape.v, of_q=False)
    return build.finish()


@functools.lru_cache(maxsize=256)
def _backward_graph(shape: Shape):
    """The smaller of cuDNN's two layouts of its scratch: a slot of the longest length for each segment, or one for all rows.

    A plan has an upper bound of it (backward_scratch)."""
    slots = _backward_candidate(shape)
    rows = _backward_candidate(shape, max_total_seq_len_q=shape.rows_q, max_total_seq_len_kv=shape.rows_kv)
    return min(slots, rows, key=lambda graph: graph.get_workspace_size())


@dataclass(frozen=True)
class _Segments:
    """The lists of one call, as the graphs and the filling read them."""

    cu_q: torch.Tensor
    cu_kv: torch.Tensor
    start_q: torch.Tensor
    start_kv: torch.Tensor
    valid: torch.Tensor
    pointers: dict[int, torch.Tensor]

    @classmethod
    def make(cls, shape: Shape, rows_q: int, rows_kv: int, cu_q, cu_kv, start_q, start_kv) -> _Segments:
        device = cu_q.device
        lengths = empty((2, shape.segments), torch.int32, device)
        offsets = empty((5, shape.segments + 1), torch.int64, device)
        valid = empty((1,), torch.int32, device)
        ffi.function("sm90", "segment_offsets")(
            cu_q, start_q, cu_kv, start_kv, rows_q, rows_kv, (shape.q[0], shape.out[0], shape.heads),
            (shape.k[0], shape.v[0]), 1, lengths, offsets, valid)
        names = (Uid.OFFSETS_Q, Uid.OFFSETS_OUT, Uid.OFFSETS_STATS, Uid.OFFSETS_K, Uid.OFFSETS_V)
        pointers = {int(uid): row for uid, row in zip(names, offsets, strict=True)}
        pointers |= {int(Uid.LENGTHS_Q): lengths[0], int(Uid.LENGTHS_KV): lengths[1]}
        return cls(cu_q, cu_kv, start_q, start_kv, valid, pointers)

    def fill(self, *, of_q: tuple[torch.Tensor, ...], of_kv: tuple[torch.Tensor, ...] = ()) -> None:
        """Zero, or NaN for lists that are not valid, in the rows that no segment holds."""
        fill = ffi.function("sm90", "fill_outside")
        for x in of_q:
            fill(x, self.cu_q, self.start_q, self.valid)
        for x in of_kv:
            fill(x, self.cu_kv, self.start_kv, self.valid)


def _shape(plan: Plan, q, k, v) -> Shape:
    problem = plan.problem
    strides = lambda x: (x.stride(0), x.stride(1))  # noqa: E731
    return Shape(q.device.index, problem.segments, graph_rows(q.shape[0]), graph_rows(k.shape[0]), problem.heads,
                 problem.kv_heads, problem.head_dim, q.dtype, problem.scale, problem.window[0], strides(q), strides(k),
                 strides(v))


def _run(graph, tensors: dict[Uid, torch.Tensor], segments: _Segments, device: torch.device) -> None:
    workspace = empty((max(1, graph.get_workspace_size()),), torch.uint8, device)
    pointers = {int(uid): tensor for uid, tensor in tensors.items()} | segments.pointers
    graph.execute(pointers, workspace, handle=_handles.get(device.index))


def forward(plan: Plan, q, k, v, cu_q, cu_k, start_q, start_k):
    """out[Tq,H,D], lse[H,Tq]: the contract of the planned attention kernels."""
    device = q.device
    out = empty(q.shape, q.dtype, device)
    stats = torch.full((q.shape[0], q.shape[1]), float("-inf"), dtype=torch.float32, device=device)
    with torch.cuda.device(device):
        q, k, v = (addressable(x.contiguous() if 0 in x.stride() else x) for x in (q, k, v))  # heads that share memory (expand)
        shape = _shape(plan, q, k, v)
        segments = _Segments.make(shape, q.shape[0], k.shape[0], cu_q, cu_k, start_q, start_k)
        if shape.segments and q.numel() and k.numel():
            tensors = {Uid.Q: q, Uid.K: k, Uid.V: v, Uid.OUT: out, Uid.STATS: stats}
            _run(_forward_graph(shape), tensors, segments, device)
        segments.fill(of_q=(out,))
    return out, stats.T.contiguous()


def backward(plan: Plan, dout, q, k, v, out, lse, cu_q, cu_k, start_q, start_k):
    """dq, dk, dv in the inputs' dtype: the contract of the planned attention kernels.

    Operands are made contiguous: cuDNN's backward writes dQ and dK at the offsets of Q and K, whatever offsets and strides the
    graph gives them, which in a tensor of other strides puts every segment but the first into the wrong rows.
    """
    device = q.device
    dq, dk, dv = (empty(x.shape, x.dtype, device) for x in (q, k, v))
    with torch.cuda.device(device):
        q, k, v, dout = (addressable(x.contiguous()) for x in (q, k, v, dout))
        shape = _shape(plan, q, k, v)
        segments = _Segments.make(shape, q.shape[0], k.shape[0], cu_q, cu_k, start_q, start_k)
        if shape.segments and q.numel() and k.numel():
            tensors = {Uid.Q: q, Uid.K: k, Uid.V: v, Uid.OUT: out, Uid.STATS: lse.T.contiguous(), Uid.DOUT: dout, Uid.DQ: dq,
                       Uid.DK: dk, Uid.DV: dv}
            _run(_backward_graph(shape), tensors, segments, device)
        segments.fill(of_q=(dq,), of_kv=(dk, dv))
    return dq, dk, dv
