"""The simulated formats against torch's own casts, element by element."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dclightning.rollout.rounding import FORMATS, Rounding, nearest

FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
settings.register_profile("few", deadline=None, max_examples=40)
settings.load_profile("few")
seeds = st.integers(0, 2**32 - 1)
shapes = st.tuples(st.integers(1, 9), st.integers(1, 300))


def random(shape, seed):
    generator = torch.Generator().manual_seed(seed)
    size = torch.randn(shape, generator=generator)
    return size * torch.exp(2 * torch.randn(shape, generator=generator))


@given(shapes, seeds)
def test_fp8_per_channel_is_torchs_cast_of_each_row(shape, seed):
    values = random(shape, seed)
    scale = values.abs().amax(1, keepdim=True) / 448
    want = (values / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    assert torch.equal(FORMATS["fp8_per_channel"][0](values), want)


@given(shapes, seeds)
def test_fp8_with_one_scale_is_torchs_cast_of_the_whole(shape, seed):
    values = random(shape, seed)
    scale = values.abs().max() / 448
    want = (values / scale).to(torch.float8_e4m3fn).float() * scale
    assert torch.equal(FORMATS["fp8"][0](values), want)


@given(seeds)
def test_fp8_per_block_is_torchs_cast_of_each_block(seed):
    values = random((200, 300), seed)
    rounded = FORMATS["fp8_per_block"][0](values)
    for i in range(0, 200, 128):
        for j in range(0, 300, 128):
            block = values[i : i + 128, j : j + 128]
            scale = block.abs().max() / 448
            want = (block / scale).to(torch.float8_e4m3fn).float() * scale
            assert torch.equal(rounded[i : i + 128, j : j + 128], want)


@given(shapes, seeds)
def test_int8_is_torchs_fake_quantisation_of_each_row(shape, seed):
    values = random(shape, seed)
    scale = values.abs().amax(1) / 127
    zero = torch.zeros(len(values), dtype=torch.int32)
    want = torch.fake_quantize_per_channel_affine(values, scale, zero, 0, -127, 127)
    torch.testing.assert_close(FORMATS["int8"][0](values), want, rtol=1e-6, atol=0)


@given(st.integers(1, 5), seeds)
def test_int4_is_torchs_fake_quantisation_of_each_group(rows, seed):
    values = random((rows, 256), seed)
    groups = values.reshape(rows * 2, 128)
    scale = groups.abs().amax(1) / 7
    want = torch.fake_quantize_per_channel_affine(
        groups, scale, torch.zeros(len(groups), dtype=torch.int32), 0, -7, 7
    ).view_as(values)
    torch.testing.assert_close(FORMATS["int4"][0](values), want, rtol=1e-6, atol=0)


@given(st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=50))
def test_fp4_is_the_nearest_of_its_eight_magnitudes_ties_to_even(numbers):
    values = torch.tensor(numbers)
    rounded = nearest(values, "e2m1")
    distance = (FP4 - values.abs()[:, None]).abs()
    assert torch.equal((rounded.abs() - values.abs()).abs(), distance.min(1).values)
    for value, found in zip(values.abs().tolist(), rounded.abs().tolist(), strict=True):
        tied = [n for n, x in enumerate(FP4.tolist()) if abs(x - value) == abs(found - value)]
        assert len(tied) == 1 or FP4.tolist().index(found) % 2 == 0


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4"])
@given(seed=seeds)
def test_microscaling_scales_are_powers_of_two_that_torch_can_store(name, seed):
    values = random((3, 64), seed)
    rounding = FORMATS[name][0]
    largest = values.reshape(6, 32).abs().amax(1)
    exponent = {"mxfp8": 8, "mxfp4": 2}[name]  # of 448 and of 6
    scale = torch.exp2(largest.log2().floor() - exponent)
    assert torch.equal(scale.to(torch.float8_e8m0fnu).float(), scale)
    want = nearest(values.reshape(6, 32) / scale[:, None], rounding.element) * scale[:, None]
    assert torch.equal(rounding(values), want.view_as(values))


@given(seeds)
def test_nvfp4_scales_are_fp8_numbers_under_one_for_the_tensor(seed):
    values = random((4, 64), seed)
    whole = values.abs().max() / (6 * 448)
    scale = (values.reshape(16, 16).abs().amax(1) / 6 / whole).to(torch.float8_e4m3fn).float() * whole
    groups = values.reshape(16, 16)
    want = torch.where(scale[:, None] > 0, nearest(groups / scale[:, None], "e2m1") * scale[:, None], 0.0)
    torch.testing.assert_close(FORMATS["nvfp4"][0](values), want.view_as(values), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", FORMATS)
@given(shape=shapes, seed=seeds, exponent=st.integers(-10, 10))
def test_every_format_is_odd_keeps_zeros_and_does_not_mind_powers_of_two(name, shape, seed, exponent):
    values = random(shape, seed)
    values[0, 0] = 0
    for rounding in (r for r in FORMATS[name] if r):
        rounded = rounding(values)
        assert rounded[0, 0] == 0
        assert rounded.isfinite().all()
        assert torch.equal(rounding(-values), -rounded)
        torch.testing.assert_close(rounding(values * 2.0**exponent), rounded * 2.0**exponent, rtol=1e-6, atol=0)
        assert rounding(values.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("name", FORMATS)
@given(seed=seeds)
def test_what_a_token_is_rounded_to_does_not_depend_on_the_others(name, seed):
    rounding = FORMATS[name][1]
    if rounding is not None:
        tokens = random((3, 64), seed)
        assert torch.equal(rounding(torch.cat([tokens, 1000 * tokens]))[:3], rounding(tokens))


@pytest.mark.parametrize("name", FORMATS)
def test_zeros_stay_zeros_and_stacked_matrices_are_rounded_each_by_itself(name):
    rounding = FORMATS[name][0]
    assert torch.equal(rounding(torch.zeros(3, 40)), torch.zeros(3, 40))
    stacked = random((2, 5, 64), 0)
    assert torch.equal(rounding(stacked), torch.stack([rounding(stacked[0]), rounding(stacked[1])]))


@given(seeds)
def test_more_bits_and_smaller_groups_round_less(seed):
    values = random((64, 512), seed)

    def error(rounding):
        return float((rounding(values) - values).square().mean())

    assert error(FORMATS["int8"][0]) < error(Rounding("int4", (1, 0)))
    assert error(Rounding("int4", (1, 128))) < error(Rounding("int4", (1, 0)))
    assert error(FORMATS["fp8"][0]) < error(FORMATS["mxfp4"][0])
    assert error(FORMATS["nvfp4"][0]) < error(FORMATS["mxfp4"][0])
