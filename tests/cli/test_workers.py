"""Several tensors at once: results in order, errors with their result, torch's threads given back."""

import threading
import time

import pytest
import torch

from lowq_cli.workers import MAX_WORKERS, in_order, shared_threads, worker_count


@pytest.fixture(autouse=True)
def four_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    assert torch.get_num_threads() == 4
    torch.set_num_threads(before)


def test_results_come_in_order_and_at_most_so_many_run():
    running, most, lock = 0, 0, threading.Lock()

    def work(i):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.002 * (i % 3))
        with lock:
            running -= 1
        return i * i

    with in_order(range(20), work, 3) as results:
        assert list(results) == [i * i for i in range(20)]
    assert 2 <= most <= 3


def test_an_error_comes_with_its_result_and_what_runs_is_waited_for():
    finished = []

    def work(i):
        if i == 1:
            raise ValueError("one")
        time.sleep(0.01)
        finished.append(i)
        return i

    with pytest.raises(ValueError, match="one"), in_order(range(100), work, 2) as results:
        list(results)
    count = len(finished)
    time.sleep(0.05)
    assert len(finished) == count < 5


def test_workers_share_the_threads_of_torch():
    with in_order(range(4), lambda _: torch.get_num_threads(), 2) as results:
        assert set(results) == {2}
    with shared_threads(8):
        assert torch.get_num_threads() == 1


def test_a_gpu_and_dependent_tensors_get_one_worker():
    assert worker_count(torch.device("cpu")) == min(4, MAX_WORKERS)
    assert worker_count(torch.device("cpu"), independent=False) == 1
    assert worker_count(torch.device("cuda")) == 1
