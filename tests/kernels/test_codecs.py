"""Stored hidden states: sizes, layouts, rounding, self-contained rows."""

import subprocess
import sys
import warnings
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mopd_kernels import CODECS, LossyCodecWarning, codecs, decode, encode, row_bytes
from mopd_kernels.testing import relative_error
from mopd_kernels.torch_rows.quant import decode_rows, encode_rows

LOSSY = ("int8", "fp8", "mxfp4")


@pytest.fixture(autouse=True)
def _mxfp4_warns_by_design():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LossyCodecWarning)
        yield


def hidden_states(rows=7, width=300, seed=0):
    """Like a real model's: most channels of order one, a few a hundred times larger."""
    generator = torch.Generator().manual_seed(seed)
    channels = torch.ones(width)
    channels[::97] = 100.0
    return torch.randn(rows, width, generator=generator) * channels


@pytest.mark.parametrize(
    ("codec", "width", "size"),
    [
        ("fp32", 576, 2304), ("bf16", 576, 1152), ("int8", 576, 608), ("fp8", 576, 608), ("mxfp4", 576, 320),
        ("int8", 4096, 4224), ("mxfp4", 4096, 2176), ("bf16", 3, 16), ("int8", 1, 16), ("mxfp4", 33, 32),
    ],
)  # fmt: skip
def test_row_sizes_are_part_of_the_stored_format(codec, width, size):
    assert row_bytes(codec, width) == size
    assert encode(torch.ones(2, width), codec).shape == (2, size)


@pytest.mark.parametrize("codec", CODECS)
@settings(max_examples=12, deadline=None)
@given(width=st.integers(1, 400), rows=st.integers(0, 5), seed=st.integers(0, 99))
def test_any_range_of_rows_decodes_from_its_own_bytes(codec, width, rows, seed):
    encoded = encode(hidden_states(rows, width, seed), codec)
    whole = decode(encoded, codec, width, torch.float32)
    payload, size = encoded.numpy().tobytes(), row_bytes(codec, width)
    for first in range(rows):
        part = torch.frombuffer(bytearray(payload[first * size :]), dtype=torch.uint8).reshape(-1, size)
        assert torch.equal(decode(part, codec, width, torch.float32), whole[first:])


@pytest.mark.parametrize("codec", CODECS)
def test_rows_coded_in_parts_have_the_bytes_of_all_together(codec, monkeypatch):
    states = hidden_states(rows=29)
    whole = encode(states, codec)
    decoded = decode(whole, codec, 300, torch.float32)
    monkeypatch.setitem(codecs.PART, "cpu", 4 * 300)
    assert torch.equal(encode(states, codec), whole)
    assert torch.equal(decode(whole, codec, 300, torch.float32), decoded)


def test_plain_codecs_are_exact():
    states = hidden_states()
    assert torch.equal(decode(encode(states, "fp32"), "fp32", 300, torch.float32), states)
    assert torch.equal(decode(encode(states.bfloat16(), "bf16"), "bf16", 300), states.bfloat16())


# Half a step of the largest value of a group, on Gaussian groups of 128 (int8, fp8) or 32 (mxfp4).
@pytest.mark.parametrize(("codec", "bound"), [("int8", 0.01), ("fp8", 0.03), ("mxfp4", 0.13)])
def test_rounding_error(codec, bound):
    states = torch.randn(64, 512, generator=torch.Generator().manual_seed(1))
    error = relative_error(decode(encode(states, codec), codec, 512, torch.float32), states)
    assert bound / 3 < error < bound


@pytest.mark.parametrize("codec", LOSSY)
def test_a_large_channel_costs_only_its_own_group(codec):
    states = torch.randn(8, 512, generator=torch.Generator().manual_seed(1))
    loud = states.clone()
    loud[:, 5] = 1000.0
    group = CODECS[codec].group
    quiet = decode(encode(states, codec), codec, 512, torch.float32)
    loud_states = decode(encode(loud, codec), codec, 512, torch.float32)
    assert torch.equal(loud_states[:, group:], quiet[:, group:])
    assert not torch.equal(loud_states[:, :group], quiet[:, :group])


def test_rotation_keeps_one_loud_channel_from_silencing_its_neighbours():
    """A channel 30 times louder than its group sets the step of all 128 elements, unless it is spread over them."""
    states = torch.randn(64, 512, generator=torch.Generator().manual_seed(1))
    states[:, 5::128] *= 30.0
    rotated = relative_error(decode(encode(states, "int8"), "int8", 512, torch.float32), states)
    plain = replace(CODECS["int8"], rotated=False)
    unrotated = relative_error(decode_rows(encode_rows(states, plain), plain, 512, torch.float32), states)
    assert rotated < unrotated / 2


@pytest.mark.parametrize("codec", LOSSY)
def test_encoding_what_was_decoded_changes_nothing(codec):
    once = decode(encode(hidden_states(), codec), codec, 300, torch.float32)
    again = decode(encode(once, codec), codec, 300, torch.float32)
    # Rotated spans come back to the rounding of their largest element.
    torch.testing.assert_close(again, once, rtol=1e-6, atol=1e-6 * once.abs().max().item())


@pytest.mark.parametrize("codec", LOSSY)
def test_signs_zeros_and_extreme_sizes(codec):
    states = torch.zeros(4, 256)
    states[1], states[2, ::2], states[3] = -1.0, 3e37, 1e-30
    decoded_states = decode(encode(states, codec), codec, 256, torch.float32)
    assert not decoded_states[0].any()
    torch.testing.assert_close(decoded_states[1], states[1])
    size = torch.tensor([[3e37], [1e-30]])
    tolerance = 0.26 if codec == "mxfp4" else 0.01
    torch.testing.assert_close(decoded_states[2:] / size, states[2:] / size, rtol=tolerance, atol=1e-6)


def test_mxfp4_values_and_ties_follow_the_ocp_format():
    """e2m1 holds 0, .5, 1, 1.5, 2, 3, 4, 6; ties go to the even code."""
    row = torch.zeros(1, 32)
    row[0, :10] = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -5.5, 0.26])
    values = decode(encode(row, "mxfp4"), "mxfp4", 32, torch.float32)[0, :10]
    assert values.tolist() == [6.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, -6.0, 0.5]


def test_mxfp4_warns_and_the_others_do_not():
    with pytest.warns(LossyCodecWarning, match="int8 costs twice the bytes"):
        encode(hidden_states(), "mxfp4")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for codec in ("fp32", "bf16", "int8", "fp8"):
            encode(hidden_states(), codec)


def test_wrong_input_is_refused():
    states = hidden_states()
    with pytest.raises(ValueError, match="unknown codec 'int4'; choose one of fp32, bf16, int8, fp8, mxfp4"):
        encode(states, "int4")
    with pytest.raises(ValueError, match="must be float \\[N, D\\]"):
        encode(states.long(), "int8")
    states[5, 1] = float("inf")
    with pytest.raises(ValueError, match="row 5 holds NaN or infinity"):
        encode(states, "int8")
    with pytest.raises(ValueError, match="int8 rows of width 301 are uint8 \\[N, 320\\], got"):
        decode(torch.zeros(2, 608, dtype=torch.uint8), "int8", 301)
    with pytest.raises(ValueError, match="width must be at least 1"):
        row_bytes("int8", 0)


def test_row_bytes_needs_no_torch():
    code = "import sys, mopd_kernels; print(mopd_kernels.row_bytes('int8', 576), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["608", "False"]
