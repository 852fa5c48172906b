"""Sessions merged in time, and prompts as chunk ids."""

import random

import numpy as np
import pytest

from saria_vllm.errors import ConfigError
from saria_vllm.sim.arrivals import arrivals, arrivals_with_ids, chunk_ids, starts
from saria_vllm.sim.formats import Trace
from saria_vllm.sim.trace import Request, Session, append_runs


def request(time_s=0.0, tokens=0, runs=(), thread=0, session="s"):
    return Request(session, thread, time_s, tokens, 1, "unknown", tuple(runs))


def trace(*sessions, block_tokens=64, absolute=False):
    made = [Session(f"s{n}", block_tokens, 0, 0, "", tuple(requests)) for n, requests in enumerate(sessions)]
    return Trace(made, "compact", absolute, 0)


def test_starts_are_one_uniform_draw_each_in_file_order():
    rng = np.random.default_rng(7)
    assert starts(5, 3600.0, 7) == [rng.uniform(0, 3600.0) for _ in range(5)]
    assert starts(5, 3600.0, 7)[:3] == starts(3, 3600.0, 7)
    assert starts(5, 3600.0, 7) != starts(5, 3600.0, 8)


def test_requests_come_in_order_of_time_then_of_session():
    one = [request(5.0), request(6.0), request(9.0)]
    two = [request(0.0), request(1.0)]
    found = [(time_s, number) for time_s, number, _ in arrivals(trace(one, two), [10.0, 10.0])]
    assert found == [(10.0, 0), (10.0, 1), (11.0, 0), (11.0, 1), (14.0, 0)]


def test_real_times_are_kept():
    found = [
        (time_s, number) for time_s, number, _ in arrivals(trace([request(5.0)], [request(3.0)], absolute=True), [])
    ]
    assert found == [(3.0, 1), (5.0, 0)]


def test_a_chunk_has_the_id_of_its_last_block():
    each = request(tokens=64 * 7 + 10, runs=[(100, 3), (500, 5)])
    assert chunk_ids(each, 64, 64) == [100, 101, 102, 500, 501, 502, 503]
    assert chunk_ids(each, 128, 64) == [101, 500, 502]
    assert chunk_ids(each, 192, 64) == [102, 502]
    assert chunk_ids(each, 1024, 64) == []


def test_a_block_is_split_into_chunks_up_to_the_last_full_one():
    each = request(tokens=512 + 200, runs=[(3, 2)])
    assert chunk_ids(each, 64, 512) == [24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34]
    assert chunk_ids(each, 512, 512) == [3]


@pytest.mark.parametrize("chunk_tokens", [96, 48, 0, -64])
def test_chunks_that_do_not_fit_the_blocks_are_refused(chunk_tokens):
    with pytest.raises(ConfigError, match=f"chunks of {chunk_tokens} tokens .* expected a multiple or a divisor of 64"):
        chunk_ids(request(tokens=64, runs=[(1, 1)]), chunk_tokens, 64)
    with pytest.raises(ConfigError):
        list(arrivals_with_ids(trace([request(tokens=64, runs=[(1, 1)])]), [0.0], chunk_tokens))


@pytest.mark.parametrize("chunk_tokens", [16, 32, 64, 128, 320])
@pytest.mark.parametrize("seed", range(4))
def test_ids_built_from_the_request_before_are_those_built_alone(chunk_tokens, seed):
    rng = random.Random(seed)
    sessions = []
    fresh = 1
    for _ in range(6):
        runs = {0: (), 1: ()}
        requests = []
        for turn in range(12):
            thread = rng.randrange(2)
            had = sum(count for _, count in runs[thread])
            keep = rng.choice([had, rng.randint(0, had)])
            add = []
            for _ in range(rng.randrange(3)):
                fresh += rng.randrange(2)
                add.append((fresh, count := rng.randint(1, 9)))
                fresh += count
            runs[thread] = append_runs(runs[thread], keep, add)
            blocks = sum(count for _, count in runs[thread])
            if blocks:
                tokens = blocks * 64 + rng.choice([0, 5, -5])
                requests.append(request(float(turn), tokens, runs[thread], thread))
        sessions.append(requests)
    made = trace(*sessions)
    seen = list(arrivals_with_ids(made, starts(6, 5.0, seed), chunk_tokens))
    assert len(seen) == sum(map(len, sessions))
    for _, _, each, ids in seen:
        assert ids == chunk_ids(each, chunk_tokens, 64)
