"""An option that a layer's scaling cannot use is refused where it is given."""

import pytest
import torch

import te_plugin.torch as tp


@pytest.mark.parametrize("precision, options", [
    ("fp8_delayed", {"pow2_scale": True}), ("fp8_current", {"history_len": 4}), ("fp8_block", {"amax_compute": "most_recent"}),
    ("fp8_current", {"amax_compute": "nonsense"})], ids=str)  # fmt: skip
def test_options_that_would_do_nothing_are_refused(precision, options):
    with pytest.raises(ValueError, match=f"{next(iter(options))}=.*{precision}"):
        tp.Linear(128, 128, precision=precision, **options)


def test_a_call_and_its_state_agree_on_the_kind_of_scale():
    x, w = torch.ones(16, 64), torch.ones(64, 64)
    with pytest.raises(ValueError, match="state has pow2_scale=False, the call asks for True"):
        tp.linear(x, w, precision="fp8_current", state=tp.LinearState("fp8_current"), pow2_scale=True)
    with pytest.raises(ValueError, match="state has pow2_scale=True, the call asks for False"):
        tp.grouped_linear(x, w[None], torch.tensor([16]), "fp8_current", state=tp.LinearState("fp8_current", pow2_scale=True))
