"""One llama3.1-8B decoder layer, 8192 tokens, forward + dgrad + wgrad, weights cached: ours beside every peer of the machine.

All take the same attention, the kernel that the plan chooses (on Hopper cuDNN's, where cudnn-frontend is installed). The error
of a row is the larger of those of the output and of dx, against the layer in FP32; the JSON file holds both, and where the time
goes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table

from te_plugin.bench import Options, breakdown, cuda
from te_plugin.bench.harness import Report, Row, interleaved, relative_error
from te_plugin.bench.layer_models import Inputs, Sizes, attention_kernel, ours, planned_attention, reference
from te_plugin.bench.layer_peers import peers

CASES = {"one segment": (8192,), "packed": (3000, 1500, 2500, 700, 492)}
# Our candidates and the options of their layers. TransformerEngine's and torchao's defaults take fast accumulation in the forward
# products: the last of ours is what compares with them.
CANDIDATES = {f"te_plugin {name}": {"precision": name} for name in ("bf16", "fp8_current", "fp8_delayed", "fp8_block")}
CANDIDATES["te_plugin fp8_current fast forward"] = {"precision": "fp8_current", "forward_accumulation": "fast"}
OP = "layer forward+backward"
TURN_MS = 100.0


@dataclass
class LayerReport(Report):
    """In details: case -> kernel -> errors of y and dx, milliseconds by group, and the longest kernels."""

    def print(self, console: Console) -> None:
        super().print(console)
        for case, found in self.details.items():
            table = Table(box=box.SIMPLE_HEAD, title=f"where the time goes, ms: {case}", title_justify="left")
            table.add_column("kernel")
            for name in (*breakdown.GROUPS, "error y", "error dx"):
                table.add_column(name, justify="right")
            for kernel, entry in found.items():
                table.add_row(kernel, *(f"{entry['ms'][name]:.3g}" for name in breakdown.GROUPS), f"{entry['error_y']:.1e}",
                              f"{entry['error_dx']:.1e}")
            console.print(table)


def run(options: Options) -> Report:
    """Measure the cases that the options name; --dtype has no meaning here beyond bf16."""
    options.select(CASES, ("bf16",))
    report = LayerReport("layer", cuda.device())
    for name, lengths in CASES.items():
        if not options.cases or name in options.cases:
            measure(report, name, lengths, Sizes(), options.seconds)
    return report


def measure(report: Report, name: str, lengths: tuple[int, ...], sizes: Sizes, seconds: float,
            candidates: Mapping[str, Mapping[str, str]] = CANDIDATES, with_peers: bool = True) -> None:
    """Add the rows and the breakdown of one packing to a report, on the report's device."""
    device = report.device
    inputs = Inputs.make(sizes, lengths, device)
    want = [t.double().cpu().numpy() for t in reference(inputs)]
    attention = attention_kernel(inputs)
    attend = planned_attention(inputs, attention)
    case = f"{name} {'+'.join(map(str, lengths))} {sizes}, {attention} attention"
    calls, is_ours = {}, set()
    for kernel, call in ours(inputs, attend, candidates):
        calls[kernel] = call
        is_ours.add(kernel)
    if with_peers:
        calls |= dict(peers(inputs, attend))
    errors = {kernel: [relative_error(got, exact) for got, exact in zip(call(), want, strict=True)]
              for kernel, call in calls.items()}
    # A layer among others: the host launches the next one while the GPU works, so a turn is several in a row.
    timings = interleaved(calls, seconds * len(calls), device=device, turn_ms=TURN_MS if device.type == "cuda" else 1.0)
    details = report.details.setdefault(case, {})
    for kernel, call in calls.items():
        took = timings[kernel]
        report.rows.append(Row(OP, case, kernel, kernel in is_ours, took.median * 1e3, took.low * 1e3, took.high * 1e3,
                               sum(lengths) / took.median, "tokens/s", max(errors[kernel]), turns=took.turns))
        found = breakdown.measure(call, device)
        details[kernel] = {"error_y": errors[kernel][0], "error_dx": errors[kernel][1], **found.as_json()}
