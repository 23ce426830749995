"""However engines and data are spread over ranks, each response is drawn by one engine and learnt from once."""

import pytest

from dclightning.errors import UserError
from dclightning.rollout.shares import Shares
from tests.helpers import random_rollout

LAYOUTS = [(1, 1, 1), (4, 1, 1), (4, 2, 1), (4, 4, 1), (4, 1, 2), (4, 1, 4), (4, 2, 2), (8, 2, 4), (8, 4, 2), (8, 8, 2)]


@pytest.mark.parametrize(("ranks", "training", "engine"), LAYOUTS)
def test_every_response_is_drawn_once_and_learnt_from_once(ranks, training, engine):
    shares = [Shares(ranks, rank, training, engine) for rank in range(ranks)]
    prompts = list(range(2 * shares[0].prompts_multiple))
    rollout = random_rollout([i + 1 for i in range(2 * len(prompts))])
    drawn = []
    for share in shares:
        mine = share.drawn(prompts)
        drawn.append(rollout.select([2 * prompt + i for prompt in mine for i in range(2)]))
        assert share.leads_engine == (share.rank == share.engine * engine)
    assert [p for share in shares if share.leads_engine for p in share.drawn(prompts)] == prompts
    assert len({share.engine for share in shares}) == shares[0].engines == ranks // engine

    learnt = []
    for group in range(0, ranks, training):
        parts = drawn[group : group + training]
        members = [share.learnt(parts).response_lengths.tolist() for share in shares[group : group + training]]
        assert members == [members[0]] * training  # ranks that share layers learn from the same
        learnt += members[0]
    assert learnt == rollout.response_lengths.tolist()


@pytest.mark.parametrize(
    ("ranks", "training", "engine", "reason"),
    [
        (4, 1, 3, "engine tensor_parallel_size=3: must divide the number of ranks, 4"),
        (1, 1, 2, "engine tensor_parallel_size=2: must divide the number of ranks, 1"),
        (12, 2, 3, "engine tensor_parallel_size=3: must divide the strategy's, 2, or be a multiple of it"),
    ],
)
def test_engines_that_do_not_fit_are_refused(ranks, training, engine, reason):
    with pytest.raises(UserError, match=reason):
        Shares(ranks, 0, training, engine)
