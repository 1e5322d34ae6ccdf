"""Floors are the operations and bytes of exact GRPO, counted by hand."""

from __future__ import annotations

import pytest
import torch
from floor import Machine, measure_accelerator, measure_machine, sampling_floor, training_floor
from materials import make_model, make_words
from workloads import GroupWork, ModelShape


@pytest.fixture
def shape():
    return ModelShape(
        vocab_size=10, hidden_size=4, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=2, intermediate_size=8
    )


def machine(gflops: float, gigabytes_per_second: float):
    return Machine(gflops=gflops, decode_gflops=gflops, gigabytes_per_second=gigabytes_per_second)


def group(*lengths: int, prompt: int = 3, live: bool = True):
    return GroupWork(prompt, lengths, live)


def test_parameters_of_a_shape(shape):
    assert shape.layer_parameters == 4 * 4 + 2 * 4 * 2 + 4 * 4 + 3 * 4 * 8  # q, k and v, o, mlp
    assert (shape.head_parameters, shape.num_parameters) == (40, 144 + 2 * 40)


def test_parameters_are_those_of_the_model(shape):
    model = make_model(shape, make_words(shape.vocab_size))
    assert shape.num_parameters == sum(p.numel() for p in model.parameters() if p.ndim == 2)


def test_sampling_where_multiplications_are_slow(shape):
    prefill = 2 * 144 * 3 + 2 * 40 + 16 * 4.5  # layers, head for the first token, attention of 3 * 3 / 2 pairs
    step = 2 * 184 + 16 * 4  # one row is left, with 3 + 1 keys
    assert sampling_floor(shape, machine(1, 1e9), [group(2, 1)]) == pytest.approx((prefill + step) * 1e-9)


def test_sampling_where_memory_is_slow(shape):
    floats = (184 + 4 * 3) + (184 + 4 * (3 + 1))  # weights, 4 key and value floats a token
    assert sampling_floor(shape, machine(1e9, 1), [group(2, 1)]) == pytest.approx(4 * floats * 1e-9)


def test_half_the_bytes_are_read_in_half_the_time(shape):
    half = Machine(gflops=1e9, decode_gflops=None, gigabytes_per_second=1, bytes_per_number=2)
    groups = [group(2, 1)]
    assert 2 * sampling_floor(shape, half, groups) == pytest.approx(sampling_floor(shape, machine(1e9, 1), groups))


def test_prompts_are_read_once_a_group_and_not_after_its_last_row(shape):
    two_groups = sampling_floor(shape, machine(1e9, 1), [group(2, 2, 2), group(1, 1, 1, prompt=5)])
    floats = (184 + 4 * 8) + (184 + 4 * (3 + 3))
    assert two_groups == pytest.approx(4 * floats * 1e-9)


def test_training_counts_prompts_once_and_forward_thrice(shape):
    pairs = 4.5 + (2 * 3 + 2) + (1 * 3 + 0.5)
    forward = 2 * 144 * (3 + 3) + 2 * 40 * 3 + 16 * pairs
    assert training_floor(shape, machine(1, 1), [group(2, 1)]) == pytest.approx(3 * forward * 1e-9)


def test_groups_without_variance_cost_nothing_in_training(shape):
    alive = training_floor(shape, machine(1, 1), [group(2, 1)])
    assert training_floor(shape, machine(1, 1), [group(2, 1), group(9, 9, live=False)]) == alive


def test_measuring_gives_positive_numbers():
    measured = measure_machine(0.0, square=64, megabytes=1)
    assert min(measured.gflops, measured.decode_gflops, measured.gigabytes_per_second) > 0
    assert "GB/s" in measured.describe()


def test_measuring_another_type():
    measured = measure_accelerator("cpu", torch.bfloat16, 0.0, square=64, megabytes=1)
    assert min(measured.gflops, measured.gigabytes_per_second) > 0
    assert (measured.bytes_per_number, measured.decode_gflops) == (2, None)
