"""Several tensors at once: results in order, errors with their result, torch's threads given back."""

import threading
import time

import pytest
import torch

from lowq_cli.workers import AHEAD, GPU_WORKERS, MAX_WORKERS, in_order, on_free_device, shared_threads, worker_devices

CPU, GPUS = torch.device("cpu"), (torch.device("cuda:0"), torch.device("cuda:1"))


@pytest.fixture(autouse=True)
def four_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    assert torch.get_num_threads() == 4
    torch.set_num_threads(before)


def test_results_come_in_order_and_at_most_so_many_run():
    running, most, lock, together = 0, 0, threading.Lock(), threading.Barrier(3, timeout=60)

    def work(i):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        if i < 3:
            together.wait()  # two alone would wait in vain
        time.sleep(0.002 * (i % 3))
        with lock:
            running -= 1
        return i * i

    with in_order(range(20), work, 3) as results:
        assert list(results) == [i * i for i in range(20)]
    assert most == 3


def test_an_error_is_raised_by_its_result_after_the_running_jobs_end():
    finished = []

    def work(i):
        if i == 1:
            raise ValueError("one")
        time.sleep(0.1)
        finished.append(i)
        return i

    with pytest.raises(ValueError, match="one"), in_order(range(100), work, 2) as results:
        list(results)
    count = len(finished)
    time.sleep(0.2)
    assert len(finished) == count < 2 * AHEAD - 2  # of those given out; on a busy machine some more are done than two


def test_workers_share_the_threads_of_torch():
    with in_order(range(4), lambda _: torch.get_num_threads(), 2) as results:
        assert set(results) == {2}
    with shared_threads(8):
        assert torch.get_num_threads() == 1


def test_one_worker_for_each_device_several_for_the_cpu_one_for_dependent_tensors():
    assert worker_devices((CPU,)) == (CPU,) * min(4, MAX_WORKERS)
    assert worker_devices((CPU, CPU)) == (CPU, CPU)
    assert worker_devices(GPUS) == GPUS * GPU_WORKERS
    assert worker_devices(GPUS[:1]) == GPUS[:1] * GPU_WORKERS
    assert worker_devices((CPU,), independent=False) == (CPU,)
    assert worker_devices(GPUS, independent=False) == GPUS[:1]


def test_no_two_calls_share_a_device():
    names = (torch.device("meta", 0), torch.device("meta", 1), torch.device("meta", 2))
    busy, used, lock, together = set(), [], threading.Lock(), threading.Barrier(3, timeout=60)

    def work(i, device):
        with lock:
            assert device not in busy
            busy.add(device)
        if i < 3:
            together.wait()
        time.sleep(0.001 * (i % 4))
        with lock:
            busy.remove(device)
            used.append(device)
        if i == 17:
            raise ValueError("a failed call gives its device back")
        return i

    with in_order(range(17), on_free_device(work, names), len(names)) as results:
        assert list(results) == list(range(17))
    assert set(used) == set(names)
    one = on_free_device(work, names[:1])
    for _ in range(3):
        with pytest.raises(ValueError, match="gives its device back"):
            one(17)
