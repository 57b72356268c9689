"""The layer benchmark on a tiny layer: every candidate is the same layer, and its time is accounted for."""

import io
import json

import pytest
import torch
from rich.console import Console

from te_plugin.bench import breakdown, layer
from te_plugin.bench.layer_models import Inputs, OurLayer, Sizes, TorchLayer, planned_attention, reference, train_call
from te_plugin.oracle.metrics import compare

TINY = Sizes(hidden=128, ffn=256, heads=4, kv_heads=2, dim=32)
# BF16 rounds the residual stream; FP8 rounds every product's operands.
BOUND = {"te_plugin bf16": 1e-2, "te_plugin fp8_current": 6e-2, "te_plugin fp8_delayed": 6e-2, "te_plugin fp8_block": 6e-2}


@pytest.fixture(scope="module")
def report():
    made = layer.LayerReport("layer", torch.device("cpu"))
    here = {name: options for name, options in layer.CANDIDATES.items() if name in BOUND}  # the CPU adds in FP32
    layer.measure(made, "packed", (40, 17, 7), TINY, seconds=0.0, candidates=here, with_peers=False)
    return made


def test_every_precision_is_compared_with_the_fp32_layer(report):
    assert [row.kernel for row in report.rows] == list(BOUND)
    for row in report.rows:
        assert row.ours and row.unit == "tokens/s" and 1e-4 < row.rel_error < BOUND[row.kernel], (row.kernel, row.rel_error)
    case = report.rows[0].case
    assert case == "packed 40+17+7 C128 F256 H4 G2 D32, cpu attention"
    for row in report.rows:
        found = report.details[case][row.kernel]
        assert row.rel_error == pytest.approx(max(found["error_y"], found["error_dx"]))


def test_one_candidate_more_adds_up_as_the_peers_do():
    inputs = Inputs.make(TINY, (40, 17, 7), torch.device("cpu"))
    (name,) = set(layer.CANDIDATES) - set(BOUND)
    assert name == "te_plugin fp8_current fast forward"
    made = OurLayer(inputs, planned_attention(inputs, "cpu"), **layer.CANDIDATES[name])
    linears = [part for part in made.modules() if hasattr(part, "forward_accumulation")]
    assert [(part.precision, part.forward_accumulation) for part in linears] == [("fp8_current", "fast")] * 4


def test_the_time_is_accounted_for_in_the_file_and_on_the_screen(report, tmp_path):
    data = json.loads(report.write(tmp_path)[0].read_text(encoding="utf-8"))
    (found,) = data["details"].values()
    for entry in found.values():
        assert set(entry["ms"]) == set(breakdown.GROUPS) and entry["ms"]["gemm"] > 0
        kernels = entry["kernels"]
        assert kernels and {"name", "group", "ms", "launches"} == set(kernels[0])
        assert [k["ms"] for k in kernels] == sorted((k["ms"] for k in kernels), reverse=True)
    json.dumps(data)
    screen = Console(file=io.StringIO(), width=200)
    report.print(screen)
    assert "where the time goes" in screen.file.getvalue() and "gaps" in screen.file.getvalue()


def test_the_peer_computes_the_same_layer():
    inputs = Inputs.make(TINY, (40, 17, 7), torch.device("cpu"))
    attend = planned_attention(inputs, "cpu")
    peer = TorchLayer(inputs, attend)
    for got, want in zip(train_call(peer, peer.parameters(), inputs)(), reference(inputs), strict=True):
        assert compare(got.double().numpy(), want.double().numpy()).relative < 1e-2


@pytest.mark.parametrize("name,group", [
    ("void te::quantize_kernel<te::NormSource, 0, 0, true>(te::NormSource, te::QuantArgs, ...)", "norm + activation + rope"),
    ("void te::norm_cast_kernel<0, 2, true, true>(te::NormCast, te::QuantArgs)", "norm + activation + rope"),
    ("void te::rows_kernel<2, true, true>(te::RowInputs<__nv_bfloat16>, ...)", "norm + activation + rope"),
    ("void te::quantize_rows_kernel<__nv_bfloat16, 0, 4, true>(...)", "quantise"),
    ("void te::quantize_kernel<te::PlainSource<__nv_bfloat16, true>, 0, 1, true>(...)", "quantise"),
    ("te::swiglu_backward_kernel<__nv_bfloat16>", "norm + activation + rope"),
    ("void te::gemm_kernel<128, 256, 2>(...)", "gemm"),
    ("nvjet_sm90_tst_128x256_64x4_1x2_h_bz_coopA_NTT", "gemm"),
    ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Traits<128, cutlass::bfloat16_t>>", "attention"),
    ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0", "attention"),
    ("triton_red_fused__fused_rms_norm_0", "norm + activation + rope"),
    ("triton_poi_fused_silu_mul_1", "norm + activation + rope"),
    ("triton_poi_fused__to_copy_add_2", "norm + activation + rope"),
    ("triton_per_fused_abs_amax_3", "quantise"),
    ("Memcpy DtoD (Device -> Device)", "other"),
    ("void at::native::elementwise_kernel<128, 4>", "other"),
])  # fmt: skip
def test_kernels_are_grouped_by_their_names(name, group):
    assert breakdown.group_of(name) == group


def test_gaps_are_those_of_calls_that_follow_one_another():
    """The first call of a profile waits for the host: 40 us between its kernels, where the later ones have 1."""
    first = [("gemm", 0, 10), ("quantize", 50, 52)]
    later = [event for at in (53, 67) for event in (("gemm", at, at + 10), ("quantize", at + 11, at + 13))]
    found = breakdown.of_events([*later, *first], calls=2)
    ms = {name: round(value * 1e3, 3) for name, value in found.groups.items()}
    assert ms == {"gemm": 10, "quantise": 2, "gaps": 1.5, "norm + activation + rope": 0, "attention": 0, "other": 0}
    assert [(kernel.name, kernel.launches) for kernel in found.kernels] == [("gemm", 1), ("quantize", 1)]
