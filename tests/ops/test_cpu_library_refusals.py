"""What the CPU library's functions refuse, by name and with what was expected; and the rows and tokens that they leave alone."""

import numpy as np
import pytest
import torch

from te_plugin import ffi

pytestmark = pytest.mark.skipif(not ffi.is_built("cpu"), reason="the CPU library is not built")


def call(name: str, *args):
    return ffi.function("cpu", name)(*args)


F32, U8 = torch.float32, torch.uint8


def z(*shape, dtype=F32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def i32(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


REFUSED = {
    "x of another dtype": (
        "quantize",
        (z(2, 4, dtype=torch.float64), z(2, 4, dtype=U8), z(1), z(2), 0, 0, 0),
        r"x is .*; expected dtype float32 or bfloat16 or float16",
    ),
    "x of another rank": (
        "quantize",
        (z(8), z(2, 4, dtype=U8), z(1), z(2), 0, 0, 0),
        r"x is float32\[8\]; expected 2 dimensions \[R, C\]",
    ),
    "columns of x with gaps": (
        "quantize",
        (z(2, 8)[:, ::2], z(2, 4, dtype=U8), z(1), z(2), 0, 0, 0),
        r"x .*stride 2.*expected stride 1",
    ),
    "data of another shape": (
        "quantize",
        (z(2, 4), z(4, 2, dtype=U8), z(1), z(2), 0, 0, 0),
        r"data is uint8\[4, 2\]; expected shape \[2, 4\] \(the shape of x\)",
    ),
    "data of another dtype": (
        "quantize",
        (z(2, 4), z(2, 4), z(1), z(2), 0, 0, 0),
        r"data is float32\[2, 4\]; expected dtype uint8 or float8",
    ),
    "scales of another granularity": (
        "quantize",
        (z(2, 4), z(2, 4, dtype=U8), z(1), z(2), 1, 0, 0),
        r"scale_inv is float32\[1\]; expected shape \[2\] \(granularity row\)",
    ),
    "FP32 scales for mx": (
        "quantize",
        (z(2, 32), z(2, 32, dtype=U8), z(2, 1), z(2), 4, 0, 0),
        r"scale_inv .*uint8 \(E8M0 exponents\)",
    ),
    "an unknown granularity": (
        "quantize",
        (z(2, 4), z(2, 4, dtype=U8), z(1), z(2), 9, 0, 0),
        r"granularity is 9; expected 0 \(tensor\)",
    ),
    "an unknown format": ("quantize", (z(2, 4), z(2, 4, dtype=U8), z(1), z(2), 0, 4, 0), r"format is 4; expected 0 \(e4m3\)"),
    "pow2 that is no flag": ("quantize", (z(2, 4), z(2, 4, dtype=U8), z(1), z(2), 0, 0, 2), r"pow2 is 2; expected 0 or 1"),
    "short statistics": (
        "quantize",
        (z(2, 4), z(2, 4, dtype=U8), z(1), z(1), 0, 0, 0),
        r"stats is float32\[1\]; expected shape \[2\]",
    ),
    "a transposed copy that is not": (
        "quantize_transpose",
        (z(2, 4), z(2, 4, dtype=U8), z(1), z(2, 4, dtype=U8), z(1), z(2), 0, 0, 0),
        r"data_t is uint8\[2, 4\]; expected shape \[4, 2\]",
    ),
    "a scale of zero": (
        "quantize_with_scale",
        (z(2, 4), z(1), z(2, 4, dtype=U8), z(1), z(2), 0),
        r"scale is 0; expected a finite value above 0",
    ),
    "an infinite scale": (
        "quantize_with_scale",
        (z(2, 4), z(1) + float("inf"), z(2, 4, dtype=U8), z(1), z(2), 0),
        r"scale is inf",
    ),
    "a weight of another size": (
        "rms_norm_forward",
        (z(2, 4), z(3), z(2, 4), z(2), 1e-5),
        r"w is float32\[3\]; expected shape \[4\]",
    ),
    "a y of another dtype": (
        "rms_norm_forward",
        (z(2, 4), z(4), z(2, 4, dtype=torch.bfloat16), z(2), 1e-5),
        r"y is bfloat16.*expected dtype float32",
    ),
    "a negative eps": (
        "rms_norm_forward",
        (z(2, 4), z(4), z(2, 4), z(2), -1.0),
        r"eps is -1; expected a finite value of at least 0",
    ),
    "a residual of another shape": (
        "rms_norm_residual_forward",
        (z(2, 4), z(2, 5), z(4), z(2, 4), z(2, 4), z(2), 1e-5),
        r"residual is float32\[2, 5\]; expected shape \[2, 4\]",
    ),
    "a gradient of h of another dtype": (
        "rms_norm_residual_backward",
        (z(2, 4), z(2, 4, dtype=torch.bfloat16), z(2, 4), z(4), z(2), z(2, 4), z(4)),
        r"dh is bfloat16.*expected dtype float32",
    ),
    "an odd gate and up": ("swiglu_forward", (z(2, 5), z(2, 2)), r"x is float32\[2, 5\]; expected an even number of columns"),
    "an odd head dimension": (
        "rope",
        (z(2, 1, 5), i32(0, 1), z(2), z(2, 1, 5), 0),
        r"x is float32\[2, 1, 5\]; expected an even head dimension",
    ),
    "64-bit positions": (
        "rope",
        (z(2, 1, 4), torch.tensor([0, 1]), z(2), z(2, 1, 4), 0),
        r"positions is int64\[2\]; expected dtype int32",
    ),
    "a label beyond the vocabulary": (
        "cross_entropy_forward",
        (z(2, 4), i32(1, 4), z(2), z(2)),
        r"labels\[1\] is 4; expected 0 to 3, or -100",
    ),
    "a negative label": ("cross_entropy_forward", (z(2, 4), i32(-1, 0), z(2), z(2)), r"labels\[0\] is -1"),
    "groups larger than the rows": (
        "grouped_gemm",
        (z(4, 2), z(2, 3, 2), i32(3, 2), z(4, 3)),
        r"group_sizes sum to more than the 4 rows of a: groups 0 to 1 hold 3 \+ 2 rows",
    ),
    "a negative group": (
        "grouped_gemm",
        (z(4, 2), z(2, 3, 2), i32(-1, 2), z(4, 3)),
        r"group_sizes\[0\] is -1; expected 0 or more",
    ),
    "too few groups": (
        "grouped_gemm",
        (z(4, 2), z(2, 3, 2), i32(4), z(4, 3)),
        r"group_sizes is int32\[1\]; expected shape \[2\]",
    ),
    "an inner size that differs": (
        "grouped_gemm",
        (z(4, 2), z(2, 3, 5), i32(2, 2), z(4, 3)),
        r"b is float32\[2, 3, 5\]; expected shape \[2, 3, 2\]",
    ),
    "a wgrad that is not FP32": (
        "grouped_gemm_wgrad",
        (z(4, 3), z(4, 2), i32(4), z(1, 3, 2, dtype=torch.bfloat16), 0),
        r"dw is bfloat16.*float32",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused_by_name_with_what_was_expected(case):
    name, args, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        call(name, *args)


def test_group_sizes_near_the_integer_limit_do_not_overflow():
    sizes = torch.tensor([2**62, 2**62, 2**62], dtype=torch.int64)
    with pytest.raises(ValueError, match="group_sizes sum to more than the 4 rows"):
        call("grouped_gemm", z(4, 2), z(3, 3, 2), sizes, z(4, 3))


def test_ignored_tokens_have_no_loss_and_no_gradient_whatever_their_logits_hold():
    logits = torch.full((3, 7), float("nan"))
    logits[1] = 0
    labels, loss, lse, grad = i32(-100, 2, -100), z(3), z(3), torch.full((3, 7), float("nan"))
    call("cross_entropy_forward", logits, labels, loss, lse)
    call("cross_entropy_backward", torch.ones(3), logits, labels, lse, grad)
    assert loss[0] == 0 and loss[2] == 0 and loss[1].item() == pytest.approx(np.log(7), rel=1e-6)
    assert torch.equal(grad[[0, 2]], torch.zeros(2, 7)) and grad[1].sum().abs() < 1e-6


def test_rows_past_the_last_group_are_zero_and_never_read():
    a, b = torch.ones(5, 3), torch.ones(2, 4, 3)
    a[3:] = float("nan")
    y, dw = torch.full((5, 4), float("nan")), torch.full((2, 4, 3), float("nan"))
    call("grouped_gemm", a, b, i32(3, 0), y)
    assert torch.equal(y, torch.cat([torch.full((3, 4), 3.0), torch.zeros(2, 4)]))
    call("grouped_gemm_wgrad", torch.ones(5, 4), a, i32(3, 0), dw, 0)
    assert torch.equal(dw, torch.stack([torch.full((4, 3), 3.0), torch.zeros(4, 3)]))
    call("grouped_gemm_wgrad", torch.ones(5, 4), a, i32(3, 0), dw, 1)
    assert torch.equal(dw, torch.stack([torch.full((4, 3), 6.0), torch.zeros(4, 3)]))
