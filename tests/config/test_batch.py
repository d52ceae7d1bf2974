"""The batch triangle and the ranks that enter it."""

import pytest
from hypothesis import given, strategies as st

from hadal.config import load_config
from hadal.config.general import Given, Sizes, complete

from .faults import faults_of, only_fault

NAMES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def batch(train=None, micro=None, accumulation=None):
    sizes = dict(zip(NAMES, (train, micro, accumulation), strict=True))
    return {name: size for name, size in sizes.items() if size is not None}


def sizes_of(config):
    return tuple(getattr(config, name) for name in NAMES)


@pytest.mark.claims(*NAMES)
@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((32, 4, 2), (32, 4, 2)),
        ((32, 4, None), (32, 4, 2)),
        ((32, None, 2), (32, 4, 2)),
        ((None, 4, 2), (32, 4, 2)),
        ((32, None, None), (32, 8, 1)),
        ((None, 4, None), (16, 4, 1)),
    ],
)
def test_omitted_values_are_inferred(sizes, expected):
    config = load_config(batch(*sizes), world_size=4)
    assert sizes_of(config) == expected
    for name, size in zip(NAMES, sizes, strict=True):
        assert config.origins[name] == ("inferred" if size is None else "you")


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            (30, 4, 2),
            "30, but 4 (micro-batch) x 2 (accumulation) x 4 ranks = 32; remove one of the three",
        ),
        (
            (32, 5, None),
            "32 is not divisible by 5 (micro-batch) x 4 ranks = 20; use a multiple of 20",
        ),
        ((30, None, None), "30 is not divisible by 4 ranks; use a multiple of 4"),
        (
            (20, None, 2),
            "20 is not divisible by 2 (accumulation) x 4 ranks = 8; use a multiple of 8",
        ),
        ((2, None, None), "2 is not divisible by 4 ranks; use a multiple of 4"),
    ],
)
def test_sizes_that_do_not_agree(sizes, message):
    assert only_fault(batch(*sizes), world_size=4) == ("train_batch_size", message)


@pytest.mark.parametrize("sizes", [(None, None, None), (None, None, 2)])
def test_neither_train_nor_micro(sizes):
    assert only_fault(batch(*sizes)) == (
        "train_batch_size",
        "neither this nor train_micro_batch_size_per_gpu is set; set one of the two",
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [0, -1, 2.5, True, "x", None])
def test_sizes_are_integers_above_0(name, size):
    path, message = only_fault({"train_batch_size": 8, **batch(8, 8, 1), name: size})
    assert path == name
    assert message.startswith("expected an integer > 0, got ")


@given(
    micro=st.integers(1, 64),
    accumulation=st.integers(1, 64),
    ranks=st.integers(1, 64),
    given_keys=st.sets(st.sampled_from(NAMES)),
)
def test_omitted_parts_are_restored(micro, accumulation, ranks, given_keys):
    train = micro * accumulation * ranks
    whole = Sizes(train, micro, accumulation)
    known = dict(zip(NAMES, (train, micro, accumulation), strict=True))
    kept = Given(*(known[name] if name in given_keys else None for name in NAMES))
    found = complete(kept, ranks)
    if not given_keys - {NAMES[2]}:
        assert not isinstance(found, Sizes)
        return
    assert isinstance(found, Sizes)
    assert found.train == found.micro * found.accumulation * ranks
    if len(given_keys) >= 2:
        assert found == whole


@given(
    sizes=st.tuples(*[st.none() | st.integers(1, 40)] * 3),
    ranks=st.integers(1, 8),
)
def test_sizes_agree_or_there_is_a_fault(sizes, ranks):
    found = complete(Given(*sizes), ranks)
    if isinstance(found, Sizes):
        assert found.train == found.micro * found.accumulation * ranks
        for size, result in zip(sizes, (found.train, found.micro, found.accumulation), strict=True):
            assert size in (None, result)
            assert result >= 1
    else:
        assert found.path == "train_batch_size"


def test_ranks_that_share_a_sequence_count_once():
    config = load_config(batch(micro=4), world_size=8, sequence_parallel_size=2)
    assert sizes_of(config) == (16, 4, 1)
    config = load_config({**batch(micro=4), "sequence_parallel_size": 4}, world_size=8)
    assert sizes_of(config) == (8, 4, 1)
    assert all(type(size) is int for size in sizes_of(config))


def test_the_division_must_be_exact():
    faults = faults_of(batch(micro=4), world_size=8, sequence_parallel_size=3)
    assert faults == {"sequence_parallel_size": "3 does not divide the 8 ranks; use a divisor"}
    assert only_fault({**batch(micro=4), "sequence_parallel_size": 3}, world_size=8) == (
        "sequence_parallel_size",
        "3 does not divide the 8 ranks; use a divisor",
    )


def test_the_program_knows_its_ranks_better_than_the_world_does():
    # 8 ranks, of which 2 hold each part of a model: 4 see different samples.
    config = load_config(
        batch(micro=4), world_size=8, data_parallel_size=4, sequence_parallel_size=1
    )
    assert sizes_of(config) == (16, 4, 1)
    path, message = only_fault(
        batch(30, 4, 2), world_size=8, data_parallel_size=4, sequence_parallel_size=1
    )
    assert (path, "4 ranks = 32" in message) == ("train_batch_size", True)


@pytest.mark.claims("data_parallel_size")
def test_data_parallel_size_is_checked_with_sequence_parallel_size():
    both = {**batch(micro=4), "sequence_parallel_size": 2, "data_parallel_size": 4}
    assert load_config(both, world_size=8).notes == ()
    assert only_fault({**both, "data_parallel_size": 3}, world_size=8) == (
        "data_parallel_size",
        "3 is not the 4 ranks that see different samples; leave it out",
    )
    alone = load_config({**batch(micro=4), "data_parallel_size": 3}, world_size=8)
    assert alone.notes == ("data_parallel_size: 3 has no effect without sequence_parallel_size",)
    assert alone.train_batch_size == 32


def test_the_key_may_not_contradict_the_program():
    source = {**batch(micro=4), "sequence_parallel_size": 2}
    load_config(source, world_size=8, sequence_parallel_size=2)
    path, message = only_fault(source, world_size=8, sequence_parallel_size=4)
    assert path == "sequence_parallel_size"
    assert message.startswith("2 differs from 4, which the program passes")
    assert message.endswith("leave it out")


@pytest.mark.claims("vocabulary_size")
def test_a_vocabulary_that_does_not_divide_is_reported():
    (note,) = load_config({**batch(micro=1), "vocabulary_size": 50257}).notes
    assert note == "vocabulary_size: 50257 is not a multiple of 8; a multiple of 8 would be faster"
    assert load_config({**batch(micro=1), "vocabulary_size": 50304}).notes == ()


@pytest.mark.claims("graph_harvesting")
def test_a_leftover_of_older_releases_is_reported():
    (note,) = load_config({**batch(micro=1), "graph_harvesting": True}).notes
    assert note == "graph_harvesting: true has no effect"


def test_one_rank_without_a_word():
    assert sizes_of(load_config(batch(train=6))) == (6, 6, 1)


def test_tensor_parallel_ranks_read_the_same_samples():
    source = {**batch(micro=1), "tensor_parallel": {"autotp_size": 2}}
    assert load_config(source, world_size=4).train_batch_size == 2


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_unmanaged_border_needs_a_stage_that_can_overlap(stage):
    source = {**batch(micro=1), "managed_gradient_accumulation": False}
    source["zero_optimization"] = {"stage": stage, "overlap_comm": True}
    if stage < 2:
        told = "false needs stage 2 or 3, or zero_optimization.overlap_comm false"
        assert only_fault(source) == ("managed_gradient_accumulation", told)
    else:
        assert not load_config(source).managed_gradient_accumulation
    source["zero_optimization"]["overlap_comm"] = False
    assert not load_config(source).managed_gradient_accumulation


@pytest.mark.parametrize(
    ("section", "content"), [("compile", {"deepcompile": True}), ("amp", {"enabled": True})]
)
def test_and_excludes_other_owners_of_the_step(section, content):
    source = {**batch(micro=1), "managed_gradient_accumulation": False, section: content}
    assert "cannot be combined" in faults_of(source)["managed_gradient_accumulation"]


def test_elasticity_chooses_the_batch():
    elastic = {"enabled": True, "max_train_batch_size": 8, "micro_batch_sizes": [2]}
    path, message = next(iter(faults_of({**batch(micro=1), "elasticity": elastic}).items()))
    assert path == NAMES[1]
    assert "ignore_non_elastic_batch_info" in message
    elastic["ignore_non_elastic_batch_info"] = True
    assert sizes_of(load_config({**batch(micro=1), "elasticity": elastic})) == (8, 2, 4)


def test_the_programs_objects_are_in_the_effective_configuration():
    config = load_config(batch(micro=4), world_size=8, sequence_parallel_size=2)
    assert config.sequence_parallel_size == 2
    assert config.origins["sequence_parallel_size"] == "inferred"
