"""The server over HTTP: the real openai client against a real uvicorn."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator

import httpx
import openai
import pytest
import torch
import uvicorn

from kvstore.engine.loader import random_model
from kvstore.engine.loop import Engine
from kvstore.engine.runner import Runner
from kvstore.engine.server import create_app, listen
from kvstore.engine.thread import EngineThread
from kvstore.errors import ConfigError
from kvstore.testing.fake_engine import FakeHooks

MODEL = "tiny"
PAGE_TOKENS = 4
BLOCK_TOKENS = 8


class Served:
    """One engine behind uvicorn on a free port."""

    def __init__(self, *, slow_s: float = 0.0, **options) -> None:
        torch.set_num_threads(1)
        loaded = random_model(7, layers=2, hidden=32, heads=2, kv_heads=1, vocab=320)
        self.runner = SlowRunner(loaded, 256, PAGE_TOKENS, slow_s)
        # A view of the same memory, indexed by page first, as FakeHooks needs it.
        by_page = self.runner.pool.permute(2, 0, 1, 3, 4, 5).numpy()
        self.hooks = FakeHooks(by_page, PAGE_TOKENS, BLOCK_TOKENS)
        self.engine = Engine(
            loaded,
            num_pages=256,
            page_tokens=PAGE_TOKENS,
            runner=self.runner,
            hooks=self.hooks,
            **options,
        )
        self.thread = EngineThread(self.engine)
        app = create_app(self.thread, model_name=MODEL)
        self.socket = listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self.server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
        self.running = threading.Thread(
            target=self.server.run, kwargs={"sockets": [self.socket]}, daemon=True
        )
        self.running.start()
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)
        self.http = httpx.Client(base_url=self.url, timeout=30)
        while self.http.get("/health").status_code != 200:
            time.sleep(0.01)

    def close(self) -> None:
        self.client.close()
        self.http.close()
        self.server.should_exit = True
        self.running.join(20)
        assert not self.running.is_alive()
        assert not self.thread.alive
        self.socket.close()

    def until_idle(self) -> None:
        while self.thread.call(lambda engine: engine.busy):
            time.sleep(0.01)
        self.thread.call(lambda engine: engine.check())

    def reset(self) -> None:
        self.until_idle()
        assert self.http.post("/reset_prefix_cache").json() == {"reset": True}
        self.hooks.blocks.clear()


class SlowRunner(Runner):
    def __init__(self, loaded, num_pages: int, page_tokens: int, slow_s: float) -> None:
        super().__init__(loaded, num_pages, page_tokens)
        self.slow_s = slow_s

    def step(self, rows):
        time.sleep(self.slow_s)
        return super().step(rows)


@pytest.fixture(scope="module")
def module_served() -> Iterator[Served]:
    served = Served()
    yield served
    served.close()


@pytest.fixture
def served(module_served: Served) -> Served:
    module_served.reset()
    return module_served


NO_END = {"ignore_eos": True}
TEXT = "The store keeps what the engine computed, so that nobody computes it twice. "


def cached_by_tier(usage) -> dict[str, int]:
    return usage.prompt_tokens_details.cached_tokens_by_tier


# ---- completions ----


def test_usage_reports_cached_tokens_by_tier(served: Served) -> None:
    def ask():
        return served.client.completions.create(
            model=MODEL, prompt=TEXT, max_tokens=5, temperature=0, extra_body=NO_END
        )

    cold, warm = ask(), ask()
    served.until_idle()
    assert served.http.post("/reset_prefix_cache").status_code == 200
    loaded = ask()
    length = len(TEXT)
    assert cold.usage.prompt_tokens == length
    assert cold.usage.completion_tokens == 5
    assert cold.usage.total_tokens == length + 5
    assert cached_by_tier(cold.usage) == {"l1": 0}
    assert warm.usage.prompt_tokens_details.cached_tokens == (length - 1) // 4 * 4
    assert cached_by_tier(warm.usage) == {"l1": (length - 1) // 4 * 4}
    assert cached_by_tier(loaded.usage) == {"l1": 0, "l2": length // 8 * 8}
    assert cold.choices[0].text == warm.choices[0].text == loaded.choices[0].text
    assert cold.choices[0].finish_reason == "length"
    assert loaded.usage.kvstore["ttft_ms"] > 0
    assert loaded.usage.kvstore["queue_ms"] >= 0


def test_every_form_of_prompt(served: Served) -> None:
    def ask(prompt):
        answer = served.client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=4, temperature=0, extra_body=NO_END
        )
        return [choice.text for choice in answer.choices], answer.usage

    ids = list(TEXT.encode())
    (one,), usage = ask(TEXT)
    assert ask(ids)[0] == [one]
    assert ask([TEXT])[0] == [one]
    assert ask([ids])[0] == [one]
    (other,), _ = ask("Another prompt.")
    both, usage = ask([TEXT, "Another prompt."])
    assert both == [one, other]
    assert usage.prompt_tokens == len(TEXT) + len("Another prompt.")
    assert usage.completion_tokens == 8
    assert ask([ids, list(b"Another prompt.")])[0] == [one, other]


def test_a_stream_adds_up_to_the_whole(served: Served) -> None:
    fields = {"model": MODEL, "prompt": [TEXT, "Another."], "max_tokens": 24, "temperature": 0}
    fields["extra_body"] = NO_END
    whole = served.client.completions.create(**fields)
    parts = list(
        served.client.completions.create(
            **fields, stream=True, stream_options={"include_usage": True}
        )
    )
    texts = ["", ""]
    reasons: list[list[str]] = [[], []]
    for part in parts[:-1]:
        (choice,) = part.choices
        texts[choice.index] += choice.text
        if choice.finish_reason:
            reasons[choice.index].append(choice.finish_reason)
        assert part.usage is None
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == [["length"], ["length"]]
    assert parts[-1].choices == []
    assert parts[-1].usage.completion_tokens == 48
    assert parts[-1].usage.prompt_tokens_details.cached_tokens > 0
    without = list(served.client.completions.create(**fields, stream=True))
    assert all(part.choices and part.usage is None for part in without)


def test_a_stream_ends_with_done(served: Served) -> None:
    body = {"model": MODEL, "prompt": "Hi", "max_tokens": 2, "stream": True, **NO_END}
    lines = [
        line for line in served.http.post("/v1/completions", json=body).text.split("\n") if line
    ]
    assert lines[-1] == "data: [DONE]"
    assert len(lines) == 3


def test_sampling_is_determined_by_its_seed(served: Served) -> None:
    def ask(seed: int) -> str:
        answer = served.client.completions.create(
            model=MODEL, prompt=TEXT, max_tokens=12, temperature=1.5, top_p=0.9, seed=seed
        )
        return answer.choices[0].text

    assert ask(3) == ask(3)
    assert len({ask(seed) for seed in range(4)}) > 1


def test_salts_keep_prefixes_apart(served: Served) -> None:
    def ask(salt: str):
        return served.client.completions.create(
            model=MODEL, prompt=TEXT, max_tokens=1, extra_body={"cache_salt": salt}
        ).usage.prompt_tokens_details.cached_tokens

    assert ask("a") == 0
    assert ask("b") == 0
    assert ask("a") > 0


def test_a_stop_string_ends_the_text_before_it(served: Served) -> None:
    fields = {"model": MODEL, "prompt": TEXT, "max_tokens": 40, "temperature": 0}
    fields["extra_body"] = NO_END
    text = served.client.completions.create(**fields).choices[0].text
    stop = text[9:12]
    at = text.index(stop)
    answer = served.client.completions.create(**fields, stop=["never met, surely", stop])
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (text[:at], "stop")
    streamed = served.client.completions.create(**fields, stop=stop, stream=True)
    assert "".join(part.choices[0].text for part in streamed) == text[:at]


# ---- chat ----


def test_chat_whole_and_streamed(served: Served) -> None:
    fields = {
        "model": MODEL,
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Hello."}]},
        ],
        "temperature": 0,
        "max_completion_tokens": 12,
        "extra_body": NO_END,
    }
    whole = served.client.chat.completions.create(**fields)
    message = whole.choices[0].message
    assert message.role == "assistant"
    assert whole.usage.completion_tokens == 12
    prompt = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello.<|im_end|>\n"
    prompt += "<|im_start|>assistant\n"
    plain = served.client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=12, temperature=0, extra_body=NO_END
    )
    assert plain.choices[0].text == message.content
    parts = list(
        served.client.chat.completions.create(
            **fields, stream=True, stream_options={"include_usage": True}
        )
    )
    assert parts[0].choices[0].delta.role == "assistant"
    content = [part.choices[0].delta.content or "" for part in parts if part.choices]
    assert "".join(content) == message.content
    assert parts[-1].usage.prompt_tokens_details.cached_tokens > 0


def test_chat_without_max_tokens_fills_the_context(served: Served) -> None:
    answer = served.http.post(
        "/v1/chat/completions",
        json={"model": MODEL, "messages": [{"role": "user", "content": "x" * 950}], **NO_END},
    ).json()
    assert answer["usage"]["total_tokens"] == 256 * PAGE_TOKENS + 1
    assert answer["choices"][0]["finish_reason"] == "length"


# ---- invalid input ----


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({"prompt": ""}, 400, ["empty"]),
        ({"prompt": []}, 400, ["empty"]),
        ({"prompt": [1, 320]}, 400, ["320", "0 to 319"]),
        ({"prompt": [1, -1]}, 400, ["-1"]),
        ({"prompt": {"a": 1}}, 400, ["prompt", "token ids"]),
        ({"prompt": ["x"] * 257}, 400, ["257", "256"]),
        ({"prompt": "x" * 5000}, 400, ["5000", "4096"]),
        ({"max_tokens": 4000}, 400, ["4000", "256 pages"]),
        ({"max_tokens": -1}, 400, ["max_tokens", "-1"]),
        ({"max_tokens": "many"}, 400, ["max_tokens"]),
        ({"temperature": -1}, 400, ["temperature"]),
        ({"top_p": 2}, 400, ["top_p"]),
        ({"n": 2}, 400, ["n=2"]),
        ({"echo": True}, 400, ["echo"]),
        ({"logprobs": 0}, 400, ["logprobs"]),
        ({"presence_penalty": 0.5}, 400, ["presence_penalty"]),
        ({"cache_slat": "a"}, 400, ["cache_slat", "cache_salt"]),
        ({"stream_options": {"include_usage": True}}, 400, ["stream_options"]),
        ({"stop": ["a"] * 17}, 400, ["17", "16"]),
        ({"model": "gpt"}, 404, ["gpt", MODEL]),
    ],
)
def test_invalid_input_is_one_line_in_openais_format(
    served: Served, fields: dict, status: int, words: list[str]
) -> None:
    body = {"model": MODEL, "prompt": "x", **fields}
    for stream in (False, True):
        if stream and "stream_options" in fields:
            continue
        answer = served.http.post("/v1/completions", json={**body, "stream": stream})
        assert answer.status_code == status
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert "\n" not in error["message"]
        for word in words:
            assert word in error["message"]
    assert not served.engine.busy


def test_the_openai_client_raises_its_own_error(served: Served) -> None:
    with pytest.raises(openai.BadRequestError, match="empty"):
        served.client.completions.create(model=MODEL, prompt="")
    with pytest.raises(openai.NotFoundError, match="unknown model"):
        served.client.completions.create(model="gpt", prompt="x")


def test_broken_json_and_missing_fields(served: Served) -> None:
    answer = served.http.post("/v1/completions", content=b"{nonsense")
    assert answer.status_code == 400
    answer = served.http.post("/v1/completions", json={"model": MODEL})
    assert "missing field 'prompt'" in answer.json()["error"]["message"]
    answer = served.http.post("/v1/chat/completions", json={"model": MODEL, "messages": []})
    assert "messages" in answer.json()["error"]["message"]


# ---- service ----


def test_models_health_stats_and_metrics(served: Served) -> None:
    before = served.http.get("/stats").json()
    assert [model.id for model in served.client.models.list()] == [MODEL]
    for _ in range(2):
        served.client.completions.create(model=MODEL, prompt=TEXT, max_tokens=2)
    stats = served.http.get("/stats").json()
    assert stats["requests"] - before["requests"] == 2
    hit_tokens = stats["cached_tokens"]["l1"]
    assert hit_tokens - before["cached_tokens"]["l1"] == (len(TEXT) - 1) // 4 * 4
    text = served.http.get("/metrics").text
    assert f'kvstore_engine_hit_tokens_total{{tier="l1"}} {float(hit_tokens)}' in text
    assert f"kvstore_engine_requests_total {float(stats['requests'])}" in text
    for name in ("running", "waiting", "preemptions_total"):
        assert f"\nkvstore_engine_{name} " in text
    for cache in ("hit", "miss"):
        assert f'kvstore_engine_ttft_seconds_count{{cache="{cache}"}}' in text


def test_tokens_are_counted_by_traffic_label(served: Served) -> None:
    body = {"model": MODEL, "prompt": "a separate prompt " + TEXT, "max_tokens": 2}
    for _ in range(2):
        answer = served.http.post(
            "/v1/completions", json=body, headers={"X-KVStore-Traffic-Label": "rag"}
        )
        assert answer.status_code == 200
    text = served.http.get("/metrics").text
    tokens = len(body["prompt"])
    assert f'kvstore_engine_traffic_prompt_tokens_total{{traffic="rag"}} {2.0 * tokens}' in text
    hit = (tokens - 1) // 4 * 4
    assert (
        f'kvstore_engine_traffic_hit_tokens_total{{tier="l1",traffic="rag"}} {float(hit)}' in text
    )
    wrong = served.http.post(
        "/v1/completions", json=body, headers={"X-KVStore-Traffic-Label": "a b"}
    )
    assert wrong.status_code == 400
    assert "traffic label 'a b'" in wrong.json()["error"]["message"]
    old = served.http.post("/v1/completions", json=body, headers={"X-KVStore-Route": "rag"})
    assert old.status_code == 400
    line = "header X-KVStore-Route is now X-KVStore-Traffic-Label"
    assert old.json()["error"]["message"] == line


def test_traffic_labels_are_bounded() -> None:
    from kvstore.engine.meters import MAX_TRAFFIC_LABELS, EngineMeters
    from kvstore.engine.request import Output, Times

    meters = EngineMeters()
    for number in range(2 * MAX_TRAFFIC_LABELS):
        meters.observe(Output(f"r{number}", [1], "", "stop", 10, {}, Times()), f"route-{number}")
    lines = [
        line for line in meters.text({}).decode().splitlines() if "prompt_tokens_total{" in line
    ]
    assert len(lines) == MAX_TRAFFIC_LABELS + 1
    assert f'traffic="(other)"}} {10.0 * MAX_TRAFFIC_LABELS}' in lines[-1]


def test_a_client_that_disconnects_aborts_its_request() -> None:
    served = Served(slow_s=0.02)
    try:
        body = {"model": MODEL, "prompt": TEXT, "max_tokens": 900, **NO_END}
        with served.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
            next(answer.iter_lines())
        served.until_idle()
        raw = socket.create_connection(("127.0.0.1", served.socket.getsockname()[1]))
        data = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n"
        raw.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + data)
        while not served.http.get("/stats").json()["running"]:
            time.sleep(0.01)
        assert served.http.post("/reset_prefix_cache").status_code == 409
        raw.close()
        served.until_idle()
        made = served.engine.counts["computed_tokens"] - served.engine.counts["prompt_tokens"]
        assert made < 900
        assert sum(served.hooks.aborted.values()) == 2
    finally:
        served.close()


def test_concurrent_requests_do_not_mix(served: Served) -> None:
    prompts = [f"{n}: {TEXT}" for n in range(8)]

    def ask(prompt: str) -> str:
        answer = served.client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=10, temperature=0, extra_body=NO_END
        )
        return answer.choices[0].text

    alone = [ask(prompt) for prompt in prompts]
    served.reset()
    together: dict[str, str] = {}
    threads = [
        threading.Thread(target=lambda p=prompt: together.update({p: ask(p)})) for prompt in prompts
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[prompt] for prompt in prompts] == alone


def test_a_port_in_use_raises_one_line() -> None:
    taken = listen("127.0.0.1", 0)
    port = taken.getsockname()[1]
    with pytest.raises(ConfigError, match=f"127.0.0.1:{port}.*in use"):
        listen("127.0.0.1", port)
    taken.close()
