"""Against which golden arm a MaxText run is held."""

from te_plugin.convergence.golden import Arm, Golden


def golden() -> Golden:
    row = {"step": 1, "loss": 5.0, "grad_norm": 1.0, "band": 0.002, "norm_band": 0.02, "wide_band": 0.008, "wide_norm_band": 0.05}
    return Golden({"arm": "fp8_current"}, {name: Arm(name, [row]) for name in ("fp8_current", "bf16")})


def test_an_fp8_run_that_scales_other_tensors_is_held_to_the_wide_band_and_the_arm_says_so():
    arm = golden().arm_for("fp8_current", "maxtext")
    assert (arm.at(1)["band"], arm.at(1)["norm_band"]) == (0.008, 0.05)
    assert "adapter=maxtext" in arm.name


def test_without_fp8_maxtext_is_held_to_the_noise_like_megatron():
    assert golden().arm_for("bf16", "maxtext").at(1)["band"] == 0.002
    assert golden().arm_for("fp8_current", "megatron").at(1)["band"] == 0.002
