"""Batches by their number: epochs, processes, workers, resumption."""

from __future__ import annotations

import pickle
from functools import partial
from itertools import islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_linear_attn.training.stream import BatchStream


def collate(rows, generator):
    """The rows, and a random number each."""
    return {"rows": torch.tensor(rows), "noise": torch.rand(len(rows), generator=generator)}


def stream(rows=11, batch_size=4, seed=3, **rest):
    return BatchStream(range(100, 100 + rows), collate, batch_size=batch_size, seed=seed, **rest)


def taken(made, count, start=0):
    return list(islice(made.read(start), count))


def seen(batches):
    return [row for batch in batches for row in batch["rows"].tolist()]


def assert_same(batches, others):
    assert len(batches) == len(others)
    for one, other in zip(batches, others, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def lengths(rows):
    """Token counts with long and short ones side by side, and some that are the same."""
    return [7 * row % 13 for row in range(rows)]


@pytest.mark.parametrize("grouped", [False, True])
@given(rows=st.integers(1, 30), batch_size=st.integers(1, 40), seed=st.integers(0, 2**63))
def test_epochs_are_permutations(rows, batch_size, seed, grouped):
    made = stream(rows, batch_size, seed, lengths=lengths(rows) if grouped else None)
    found = seen(taken(made, -(-3 * rows // batch_size)))
    for epoch in range(3):
        assert sorted(found[epoch * rows : (epoch + 1) * rows]) == list(range(100, 100 + rows))


def test_orders_differ_by_epoch_and_seed():
    found = seen(taken(stream(50, 50), 3))
    assert found[:50] != found[50:100] != found[100:]
    assert seen(taken(stream(50, 50, seed=4), 1)) != found[:50]
    assert seen(taken(stream(50, 50), 1)) == found[:50]


@pytest.mark.parametrize("grouped", [False, True])
@given(
    rows=st.integers(1, 20),
    batch_size=st.integers(1, 7),
    processes=st.integers(1, 5),
)
def test_processes_together_see_one_large_batch(rows, batch_size, processes, grouped):
    more = {"lengths": lengths(rows) if grouped else None, "together": batch_size * processes}
    large = taken(stream(rows, batch_size * processes, **more), 4)
    parts = [taken(stream(rows, batch_size, process=p, processes=processes, **more), 4) for p in range(processes)]
    for step, whole in enumerate(large):
        assert seen(part[step] for part in parts) == whole["rows"].tolist()
    # Accumulation sees the same examples too, and the same random numbers as the processes.
    alone = taken(stream(rows, batch_size, **more), 4 * processes)
    assert_same([part[step] for step in range(4) for part in parts], alone)


@pytest.mark.parametrize(("rows", "batch_size"), [(640, 8), (637, 8)])
def test_rows_of_alike_length_share_a_step(rows, batch_size):
    """In every epoch, also where epochs do not end with a step."""
    counts = torch.randint(10, 100, (rows,), generator=torch.Generator().manual_seed(0)).tolist()

    def padding(made):
        held = [[counts[row - 100] for row in batch["rows"].tolist()] for batch in taken(made, 3 * rows // batch_size)]
        return sum(max(batch) * len(batch) - sum(batch) for batch in held) / sum(map(sum, held))

    assert padding(stream(rows, batch_size)) > 0.5
    assert padding(stream(rows, batch_size, lengths=counts)) < 0.1


def test_steps_are_not_taken_by_length():
    """A whole epoch that went from short to long would teach the short rows first."""
    made = taken(stream(128, 8, lengths=lengths(128)), 16)
    firsts = [lengths(128)[batch["rows"][0] - 100] for batch in made]
    assert firsts != sorted(firsts)


@given(start=st.integers(0, 40), processes=st.integers(1, 3))
def test_reading_can_begin_anywhere(start, processes):
    made = stream(process=processes - 1, processes=processes)
    assert_same(taken(made, 3, start), taken(made, start + 3)[start:])


@pytest.mark.parametrize(("workers", "start"), [(1, 0), (2, 0), (2, 3)])
def test_workers_change_nothing(workers, start):
    plain = taken(stream(process=1, processes=2), 7, start)
    assert_same(taken(stream(process=1, processes=2, workers=workers), 7, start), plain)


def test_randomness_depends_on_seed_and_number_only():
    made = stream()
    first = [made.batch(number)["noise"] for number in (5, 0, 5)]
    assert torch.equal(first[0], first[2])
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], stream(seed=4).batch(5)["noise"])
    torch.manual_seed(99)
    again = BatchStream(range(200, 211), collate, batch_size=4, seed=3)
    assert torch.equal(again.batch(5)["noise"], first[0])


@pytest.mark.parametrize("workers", [0, 2])
def test_torchs_own_generator_is_left_alone(workers):
    """The loop seeds it before every step: a reader that begins in the middle must not shift what dropout draws."""
    torch.manual_seed(5)
    before = torch.get_rng_state()
    taken(stream(workers=workers), 3)
    assert torch.equal(torch.get_rng_state(), before)


def test_pickling():
    made = stream(process=1, processes=2)
    made.batch(0)
    copied = pickle.loads(pickle.dumps(made))
    assert vars(copied).keys() == vars(made).keys()
    assert_same(taken(copied, 5), taken(made, 5))
    assert copied.rows == made.rows


def test_a_batch_may_hold_several_epochs():
    found = seen(taken(stream(3, 10), 3))
    assert [sorted(found[at : at + 3]) for at in range(0, 30, 3)] == [[100, 101, 102]] * 10


def test_nothing_to_train_on():
    with pytest.raises(ValueError, match="There is no training example"):
        BatchStream([], partial(collate), batch_size=2, seed=0)
