"""Two optimizer steps of two microbatches in one CUDA graph: replayed, they give the bits of eager.

Weights are cast once a step and cached for its microbatches, weight gradients go into FP32 main_grad, delayed scaling moves on
at the end of each step: all of it lies inside the graph.
"""

import pytest
import torch

import te_plugin.torch as tp
from te_plugin.torch.state import states

PRECISIONS = ["bf16", "fp8_current", "fp8_delayed", "fp8_block"]
STEPS, MICROBATCHES, ROWS, HIDDEN, FFN = 2, 2, 256, 256, 512


class Run:
    """A LayerNormMLP and a Linear with everything that their training reads and writes, in memory that never moves."""

    def __init__(self, precision: str, device: str):
        torch.manual_seed(0)
        common = dict(precision=precision, dtype=torch.bfloat16, device=device, accumulate_main_grad=True)
        self.model = torch.nn.Sequential(tp.LayerNormMLP(HIDDEN, FFN, **common),
                                         tp.Linear(HIDDEN, HIDDEN, bias=False, **common))  # fmt: skip
        for name, parameter in self.model.named_parameters():
            if "norm" in name:
                parameter.grad = torch.zeros_like(parameter)
            else:
                parameter.main_grad = torch.zeros(parameter.shape, device=device)
        shape = (STEPS, MICROBATCHES, ROWS, HIDDEN)
        self.x, self.dy = (torch.empty(shape, dtype=torch.bfloat16, device=device) for _ in range(2))
        self.set_inputs(1)

    def set_inputs(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for tensor in (self.x, self.dy):
            tensor.copy_(torch.randn(tensor.shape, generator=generator))

    def kept(self) -> list[torch.Tensor]:
        """What a step leaves for the next one."""
        parameters = list(self.model.parameters())
        gradients = [p.main_grad if hasattr(p, "main_grad") else p.grad for p in parameters]
        return [*gradients, *self.model.state_dict().values()]

    def save(self) -> list[torch.Tensor]:
        return [t.clone() for t in self.kept()]

    def restore(self, saved: list[torch.Tensor]) -> None:
        for tensor, value in zip(self.kept(), saved, strict=True):
            tensor.copy_(value)
        # The values changed behind the version counters that the weight caches look at.
        for _, state in states(self.model):
            state.new_step()

    def train(self) -> list[torch.Tensor]:
        """The steps; returns every output, input gradient and weight gradient, and each step's weights."""
        seen = []
        for step in range(STEPS):
            for micro in range(MICROBATCHES):
                x = self.x[step, micro].detach().requires_grad_()
                y = self.model(x)
                y.backward(self.dy[step, micro])
                seen += [y.detach().clone(), x.grad]
            with torch.no_grad():
                for parameter in self.model.parameters():
                    gradient = parameter.main_grad if hasattr(parameter, "main_grad") else parameter.grad
                    seen.append(gradient.clone())
                    parameter.sub_(gradient.to(parameter.dtype), alpha=1e-3)
                    gradient.zero_()
                    seen.append(parameter.detach().clone())
            tp.advance_scaling(self.model)
            seen += [value.clone() for value in self.model.state_dict().values()]
        return seen


def check_equal(got, want):
    assert len(got) == len(want)
    for index, (one, other) in enumerate(zip(got, want, strict=True)):
        assert torch.isfinite(one.float()).all() and torch.equal(one, other), index


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_same_steps_from_the_same_state_give_the_same_bits(precision):
    """What the graph is compared with: `kept` is everything that a step depends on, and a weight is cast once a step."""
    run = Run(precision, "cpu")
    run.train()
    saved = run.save()
    first = run.train()
    casts = [state.weight_casts for _, state in states(run.model)]
    run.restore(saved)
    check_equal(run.train(), first)
    assert all(state.weight_casts - before == STEPS for before, (_, state) in zip(casts, states(run.model), strict=True))
    run.set_inputs(2)
    run.restore(saved)
    assert not torch.equal(run.train()[0], first[0])


@pytest.mark.gpu
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_replayed_graph_equals_eager(precision):
    run, stream = Run(precision, "cuda"), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # plans, libraries, workspaces and the first scales are there before anything is captured
            run.train()
        saved = run.save()
        eager = run.train()
        run.restore(saved)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = run.train()
    for seed in (1, 2):
        run.set_inputs(seed)
        if seed == 2:
            run.restore(saved)
            eager = run.train()
        for _ in range(2):  # a graph that kept a cached weight of its first replay would fail in the second
            run.restore(saved)
            for tensor in captured:
                tensor.zero_()
            graph.replay()
            torch.cuda.synchronize()
            check_equal(captured, eager)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_step_waits_for_nothing_on_the_host(precision):
    run = Run(precision, "cuda")
    run.train()
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run.train()
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.mark.gpu
def test_an_operand_that_stays_zero_is_waited_for_by_nobody():
    """Its scale has no values to begin with, and no call may ask the GPU for them and wait."""
    layer = tp.Linear(HIDDEN, HIDDEN, precision="fp8_delayed", device="cuda")
    x = torch.zeros(ROWS, HIDDEN, device="cuda", requires_grad=True)
    layer(x).sum().backward()  # plans and libraries
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            layer(x).mul(0).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode(before)
