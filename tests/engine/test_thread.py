"""The engine's thread: no caller waits without limit, even after the loop fails."""

from __future__ import annotations

import queue
import threading

import pytest

from kvstore.engine.loop import Engine
from kvstore.engine.request import Output, QueueFull, Request
from kvstore.engine.thread import EngineDead, EngineThread
from kvstore.errors import ConfigError
from kvstore.testing.fake_engine import FakeLoaded, FakeRunner, reference_tokens

VOCAB = 97


class GatedRunner(FakeRunner):
    """Waits at each step until released; raises `fault` if it is set."""

    def __init__(self) -> None:
        super().__init__(64, 4, VOCAB)
        self.open = threading.Event()
        self.entered = threading.Event()
        self.fault: Exception | None = None

    def step(self, rows):
        self.entered.set()
        assert self.open.wait(20)
        if self.fault is not None:
            raise self.fault
        return super().step(rows)


def make(max_live: int = 100, *, is_open: bool = True) -> tuple[EngineThread, GatedRunner]:
    runner = GatedRunner()
    if is_open:
        runner.open.set()
    engine = Engine(FakeLoaded(), num_pages=64, page_tokens=4, runner=runner)
    thread = EngineThread(engine, max_live=max_live)
    thread.start()
    return thread, runner


def request(name: str, **fields) -> Request:
    return Request(**{"request_id": name, "prompt_tokens": [1, 2, 3], "max_tokens": 3, **fields})


def read_all(outputs: queue.Queue[Output]) -> list[Output]:
    """Return the outputs of one request up to its last."""
    read = [outputs.get(timeout=20)]
    while read[-1].finish_reason is None:
        read.append(outputs.get(timeout=20))
    return read


def test_outputs_go_to_the_submitter() -> None:
    thread, _ = make()
    answers: list[queue.Queue[Output]] = [queue.Queue() for _ in range(10)]
    for index, answer in enumerate(answers):
        thread.submit(request(str(index), prompt_tokens=[index, 5]), answer.put)
    for index, answer in enumerate(answers):
        tokens = [token for output in read_all(answer) for token in output.tokens]
        assert tokens == reference_tokens([index, 5], 3, VOCAB)
    thread.call(lambda engine: engine.check())
    thread.stop()
    assert not thread.alive
    thread.stop()


def test_an_invalid_request_is_rejected_at_submit() -> None:
    thread, _ = make()
    with pytest.raises(ConfigError, match="empty"):
        thread.submit(request("a", prompt_tokens=[]), lambda output: None)
    thread.stop()


def test_a_request_rejected_by_the_loop_ends_with_an_error() -> None:
    thread, _ = make()
    answer: queue.Queue[Output] = queue.Queue()
    thread.submit(
        request("a", cache_salt="\ud800"), answer.put
    )  # not valid text: it cannot be hashed
    (output,) = read_all(answer)
    assert output.finish_reason == "error"
    assert "Unicode" in output.error
    assert thread.alive
    thread.stop()


def test_live_requests_are_bounded() -> None:
    thread, runner = make(max_live=2, is_open=False)
    answer: queue.Queue[Output] = queue.Queue()
    thread.submit(request("a"), answer.put)
    thread.submit(request("b"), answer.put)
    with pytest.raises(QueueFull, match="2 requests"):
        thread.submit(request("c"), answer.put)
    runner.open.set()
    read_all(answer)
    read_all(answer)
    thread.submit(request("c"), answer.put)
    thread.stop()


def test_an_abort_reaches_a_running_request() -> None:
    thread, runner = make(is_open=False)
    answer: queue.Queue[Output] = queue.Queue()
    thread.submit(request("a", max_tokens=200), answer.put)
    assert runner.entered.wait(20)
    thread.abort("a")
    thread.abort("unknown")
    runner.open.set()
    assert read_all(answer)[-1].finish_reason == "abort"
    thread.stop()


def test_an_exception_in_the_loop_ends_every_request_and_call() -> None:
    thread, runner = make(is_open=False)
    answers: list[queue.Queue[Output]] = [queue.Queue() for _ in range(3)]
    for index, answer in enumerate(answers):
        thread.submit(request(str(index)), answer.put)
    runner.fault = RuntimeError("the device is gone")
    runner.open.set()
    for answer in answers:
        output = read_all(answer)[-1]
        assert output.finish_reason == "error"
        assert "the device is gone" in output.error
    with pytest.raises(EngineDead, match="the device is gone"):
        thread.submit(request("late"), answers[0].put)
    with pytest.raises(EngineDead):
        thread.call(lambda engine: None)
    assert not thread.alive


def test_stop_ends_live_requests() -> None:
    thread, runner = make(is_open=False)
    answer: queue.Queue[Output] = queue.Queue()
    thread.submit(request("a", max_tokens=200), answer.put)
    assert runner.entered.wait(20)
    stopping = threading.Thread(target=thread.stop)
    stopping.start()
    runner.open.set()
    stopping.join(20)
    assert read_all(answer)[-1].finish_reason in ("error", "abort")
    assert not thread.alive


def test_a_call_without_a_response_times_out() -> None:
    thread, runner = make(is_open=False)
    thread.submit(request("a"), lambda output: None)
    assert runner.entered.wait(20)
    with pytest.raises(EngineDead, match="no response"):
        thread.call(lambda engine: None, timeout_s=0.01)
    runner.open.set()
    with pytest.raises(ZeroDivisionError):
        thread.call(lambda engine: 1 // 0)
    assert thread.alive
    thread.stop()
