import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dclightning.corrections import (
    Correction,
    GeometricMask,
    SequenceMIS,
    SequenceTIS,
    TokenMIS,
    TokenTIS,
    TrustRegionMask,
    Veto,
    check_corrections,
    corrected,
)
from dclightning.policy_loss import CISPO, DPPO, GSPO, PPOClip
from tests import plain

CORRECTIONS = {
    "token-tis": (TokenTIS(), lambda *given: plain.token_tis(*given, 2.0)),
    "token-tis-low": (TokenTIS(0.5), lambda *given: plain.token_tis(*given, 0.5)),
    "sequence-tis": (SequenceTIS(), lambda *given: plain.sequence_tis(*given, 2.0)),
    "token-mis": (TokenMIS(), lambda *given: plain.token_mis(*given, 0.5, 5.0)),
    "token-mis-0": (TokenMIS(0.0, 1.0), lambda *given: plain.token_mis(*given, 0.0, 1.0)),
    "sequence-mis": (SequenceMIS(), lambda *given: plain.sequence_mis(*given, 0.5, 5.0)),
    "geometric": (GeometricMask(), lambda *given: plain.geometric_mask(*given, 0.999, 1.001)),
    "geometric-wide": (GeometricMask(0.5, 2.0), lambda *given: plain.geometric_mask(*given, 0.5, 2.0)),
    "veto": (Veto(), lambda *given: plain.veto(*given, 1e-4)),
    "trust-region": (TrustRegionMask(), lambda *given: plain.trust_region_mask(*given, 0.05)),
    "trust-region-wide": (TrustRegionMask(1.0), lambda *given: plain.trust_region_mask(*given, 1.0)),
}
every_correction = pytest.mark.parametrize(("correction", "plainly"), CORRECTIONS.values(), ids=CORRECTIONS)
WEIGHING = [TokenTIS(), SequenceTIS(), TokenMIS(), SequenceMIS()]
MASKING = [GeometricMask(), Veto(), TrustRegionMask()]

log_ratios = st.lists(st.lists(plain.gaps, max_size=6), max_size=5)
close_log_ratios = st.lists(st.lists(plain.close_gaps, max_size=6), max_size=5)


def ragged(rows):
    return [gap for row in rows for gap in row], [len(row) for row in rows]


def tensors(rows):
    log_ratio, lengths = ragged(rows)
    return torch.tensor(log_ratio), torch.tensor(lengths, dtype=torch.int64)


@every_correction
@plain.many
@given(rows=log_ratios | close_log_ratios)
def test_equals_a_plain_loop(correction, plainly, rows):
    weights, keep = correction(*tensors(rows))
    want = np.array(plainly(*ragged(rows))).reshape(-1, 2)
    assert (weights.dtype, keep.dtype) == (torch.float32, torch.bool)
    assert keep.tolist() == want[:, 1].astype(bool).tolist()
    plain.assert_close(weights[keep], want[keep.numpy(), 0])


@every_correction
@pytest.mark.parametrize("gap", [-200.0, -20.0, 0.0, 20.0, 200.0])
def test_weights_are_finite_at_extreme_ratios(correction, plainly, gap):
    weights, keep = corrected([correction], torch.tensor([gap, 0.0, gap, gap]), torch.tensor([2, 0, 1, 1]))
    assert weights.isfinite().all()
    assert (weights >= 0).all()
    assert keep.shape == weights.shape


@pytest.mark.parametrize("name", [name for name in CORRECTIONS if name != "token-tis-low"])
@plain.few
@given(lengths=st.lists(st.integers(0, 5), max_size=5))
def test_ratios_of_1_keep_everything_at_weight_1(name, lengths):
    weights, keep = CORRECTIONS[name][0](torch.zeros(sum(lengths)), torch.tensor(lengths, dtype=torch.int64))
    assert weights.tolist() == [1.0] * sum(lengths)
    assert keep.all()


@plain.few
@given(rows=log_ratios | close_log_ratios, weighing=st.sampled_from(WEIGHING), order=st.permutations(range(4)))
def test_the_order_of_a_stack_changes_nothing(rows, weighing, order):
    stack = [weighing, *MASKING]
    weights, keep = corrected(stack, *tensors(rows))
    shuffled = corrected([stack[i] for i in order], *tensors(rows))
    assert torch.equal(weights, shuffled[0])
    assert torch.equal(keep, shuffled[1])


@plain.few
@given(rows=log_ratios | close_log_ratios)
def test_a_stack_is_the_product_of_weights_and_what_all_keep(rows):
    alone = [correction(*tensors(rows)) for correction in (SequenceTIS(), *MASKING)]
    weights, keep = corrected([SequenceTIS(), *MASKING], *tensors(rows))
    assert torch.equal(weights, alone[0][0])
    assert keep.tolist() == [all(keeps) for keeps in zip(*[keep.tolist() for _, keep in alone], strict=True)]


def test_what_is_dropped_on_a_hand_case():
    log_ratio = torch.tensor([0.32, 0.0, -0.32, 0.0, -10.0, 10.0, 0.001, -0.001])
    lengths = torch.tensor([2, 2, 0, 2, 2])
    kept = {
        TokenMIS(): [1, 1, 1, 1, 0, 0, 1, 1],
        SequenceMIS(): [1, 1, 1, 1, 1, 1, 1, 1],  # the product of the third is 1
        GeometricMask(): [0, 0, 0, 0, 1, 1, 1, 1],
        Veto(): [1, 1, 1, 1, 0, 0, 1, 1],
        TrustRegionMask(): [0, 0, 1, 1, 0, 0, 1, 1],  # 0.057 and 0.046 for ratios of e^0.32 and e^-0.32
    }
    for correction, keep in kept.items():
        assert correction(log_ratio, lengths)[1].int().tolist() == keep


def test_without_corrections_all_tokens_count_the_same():
    weights, keep = corrected([], torch.tensor([-200.0, 0.3]), torch.tensor([0, 2]))
    assert weights.tolist() == [1.0, 1.0]
    assert keep.tolist() == [True, True]


def test_a_correction_of_ones_own_needs_a_call_only():
    class FirstTokens(Correction):
        def __call__(self, log_ratio, lengths):
            return torch.full_like(log_ratio, 0.5), torch.arange(len(log_ratio)) < 2

    weights, keep = corrected([TokenTIS(), FirstTokens()], torch.zeros(3), torch.tensor([3]))
    assert weights.tolist() == [0.5] * 3
    assert keep.tolist() == [True, True, False]
    check_corrections([TokenTIS(), FirstTokens()], ratio_is_used=False)


@every_correction
def test_weights_and_masks_are_constants(correction, plainly):
    log_ratio = torch.tensor([0.1, -0.1, 0.0], requires_grad=True)
    weights, keep = corrected([correction], log_ratio, torch.tensor([2, 1]))
    assert not weights.requires_grad
    assert not keep.requires_grad


@pytest.mark.parametrize("pair", itertools.combinations(WEIGHING, 2))
def test_weighing_twice_is_refused(pair):
    names = f"{type(pair[0]).__name__} and {type(pair[1]).__name__} both weigh"
    with pytest.raises(ValueError, match=names):
        check_corrections([*MASKING, *pair], ratio_is_used=False)


@pytest.mark.parametrize("weighing", WEIGHING)
def test_weighing_what_the_loss_has_in_its_ratio_is_refused(weighing):
    with pytest.raises(ValueError, match=f"{type(weighing).__name__} weighs by a ratio that the loss has"):
        check_corrections([*MASKING, weighing], DPPO().uses_inference_ratio)
    for loss in (PPOClip(), GSPO(), CISPO()):
        check_corrections([*MASKING, weighing], loss.uses_inference_ratio)
    check_corrections(MASKING, DPPO().uses_inference_ratio)


@pytest.mark.parametrize(
    ("correction", "settings", "message"),
    [
        (TokenTIS, {"cap": 0.0}, "cap=0.0"),
        (TokenTIS, {"cap": math.nan}, "cap=nan"),
        (SequenceTIS, {"product_cap": -1.0}, "SequenceTIS.product_cap=-1.0"),
        (TokenMIS, {"low": -0.1}, "low=-0.1, high=5.0"),
        (TokenMIS, {"low": 5.0}, "low=5.0, high=5.0"),
        (SequenceMIS, {"product_high": 0.5}, "product_low=0.5, product_high=0.5"),
        (GeometricMask, {"mean_high": 0.9}, "mean_low=0.999, mean_high=0.9"),
        (Veto, {"min_ratio": 0.0}, "Veto.min_ratio=0.0"),
        (TrustRegionMask, {"max_kl": -1.0}, "TrustRegionMask.max_kl=-1.0"),
    ],
)
def test_bad_settings_are_named(correction, settings, message):
    with pytest.raises(ValueError, match=message):
        correction(**settings)
