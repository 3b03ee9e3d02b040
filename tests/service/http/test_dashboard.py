"""The dashboard in a real browser, and its routes: contents, access and content policy."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis_rig
from browser_rig import Browser
from sidecar_rig import LIMIT_S, NAMESPACE, ForkedSidecar, disk, get, hashes_of, put, wait_until

from kvstore.blocks.key import Namespace
from kvstore.ipc.client import Client

STATIC = Path(__file__).parents[3] / "kvstore" / "service" / "static"
TOKENS = {"token-a": "team-a", "token-b": "<b>team-b</b>"}
ADMIN = "token-of-the-admin"
EVIL = replace(NAMESPACE, model='<img src=x onerror="window.pwned=1">')

pytestmark = pytest.mark.browser


def patient(socket: str, namespace: Namespace, **about: Any) -> Client:
    """A client with timeouts long enough for a busy machine."""
    return Client(socket, namespace, response_timeout_s=LIMIT_S, **about)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    made = Browser(tmp_path_factory.mktemp("profile"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[redis_rig.Server]:
    server = redis_rig.Server(tmp_path_factory.mktemp("valkey"), redis_rig.valkey_binary())
    yield server
    server.kill()


@pytest.fixture(scope="module")
def loaded(
    tmp_path_factory: pytest.TempPathFactory, valkey: redis_rig.Server
) -> Iterator[ForkedSidecar]:
    """A sidecar that two tenants have used, over disk and Redis."""
    folder = tmp_path_factory.mktemp("loaded")
    tiers = disk(folder / "disk")["tiers"]
    tiers.append({"kind": "redis", "url": f"redis://{valkey.address}/0"})
    made = ForkedSidecar(
        folder, {"tiers": tiers, "server": {"auth_tokens": TOKENS, "admin_auth_token": ADMIN}}
    )
    use(made)
    yield made
    assert made.stop() == 0


@pytest.fixture(scope="module")
def unused(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedSidecar]:
    folder = tmp_path_factory.mktemp("unused")
    made = ForkedSidecar(folder, disk(folder / "disk"))
    yield made
    assert made.stop() == 0


def use(sidecar: ForkedSidecar) -> None:
    """Save prompts with a common front, with more blocks than L2 has slots."""
    front = hashes_of("front", 12)
    with (
        patient(sidecar.socket, EVIL, auth_token="token-a", traffic_label="chat") as one,
        patient(sidecar.socket, NAMESPACE, auth_token="token-b", traffic_label="rag") as two,
    ):
        for client in (one, two):
            for number in range(5):
                run = [*front, *hashes_of(f"tail {number}", 6)]
                _, tiers = get(client, run)
                put(client, run[len(tiers) :])
        wait_until(lambda: len(asked(sidecar, token=ADMIN)["history"]["time_s"]) > 1, "samples")
        get(one, front)
        wait_until(lambda: hit_is_sampled(sidecar), "a sample of a hit")


def hit_is_sampled(sidecar: ForkedSidecar) -> bool:
    history = asked(sidecar, token=ADMIN)["history"]
    return bool(history["hit_tokens"]["l2"][-1] > history["hit_tokens"]["l2"][0])


def request(
    sidecar: ForkedSidecar, path: str, token: str = ""
) -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection(urlsplit(sidecar.url).netloc, timeout=LIMIT_S)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer, body


def asked(sidecar: ForkedSidecar, token: str = "") -> dict[str, Any]:
    answer, body = request(sidecar, "/v1/dashboard", token)
    assert answer.status == 200, body
    view: dict[str, Any] = json.loads(body)
    return view


def show(browser: Browser, sidecar: ForkedSidecar, token: str = "", **how: Any) -> None:
    """Open the page with this auth token."""
    # Set it before the page's script runs: a first request without it would show an error.
    known = f"localStorage.clear(); sessionStorage.setItem('kvstore-token', {json.dumps(token)})"
    script = browser.call("Page.addScriptToEvaluateOnNewDocument", source=known)
    browser.events.clear()
    browser.open(f"{sidecar.url}/?again", **how)  # redirects to the page
    browser.call("Page.removeScriptToEvaluateOnNewDocument", **script)
    browser.until("document.querySelectorAll('.tile').length == 6")


# Without a browser.


def test_the_page_and_its_files_come_with_a_policy(unused: ForkedSidecar) -> None:
    assert request(unused, "/")[0].getheader("location") == "dashboard"
    for path in ("/dashboard", "/dashboard/app.js", "/dashboard/dashboard.css"):
        answer, body = request(unused, path)
        assert answer.status == 200
        assert body
        policy = answer.getheader("content-security-policy") or ""
        assert "default-src 'none'; script-src 'self';" in policy
        assert "unsafe" not in policy
        assert answer.getheader("x-content-type-options") == "nosniff"
    for path in ("/dashboard/none.js", "/dashboard/..%2Fapp.py", "/dashboard/../app.py"):
        assert request(unused, path)[0].status == 404


def test_the_page_has_no_external_or_inline_parts() -> None:
    for file in STATIC.iterdir():
        text = file.read_text()
        others = set(re.findall(r"https?://[^\"' )]+", text)) - {"http://www.w3.org/2000/svg"}
        assert not others, file
        markup = r"(inner|outer)HTML\s*=[^=]|insertAdjacentHTML|document\.write|eval\(|new Function"
        assert not re.search(markup, text), file
    page = (STATIC / "index.html").read_text()
    assert not re.search(r"<script(?![^>]*src=)|<style| style=| on[a-z]+=", page)


def test_a_view_depends_on_the_auth_token(loaded: ForkedSidecar) -> None:
    assert request(loaded, "/v1/dashboard")[0].status == 401
    assert request(loaded, "/v1/dashboard", "no token of ours")[0].status == 401
    whole, own = asked(loaded, ADMIN), asked(loaded, "token-a")
    assert (whole["admin"], whole["tenant"], own["admin"], own["tenant"]) == (
        True, None, False, "team-a",
    )  # fmt: skip
    assert {user["tenant"] for user in whole["users"]} == set(TOKENS.values())
    for view in (own["users"], own["prefixes"]["chains"]):
        assert {each["tenant"] for each in view} == {"team-a"}
    assert set(own["slots"]) <= {"team-a"}
    assert own["history"]["lookup_tokens"][-1] < whole["history"]["lookup_tokens"][-1]
    chain = whole["prefixes"]["chains"][0]
    where = f"?tenant=team-a&namespace={EVIL.digest}&hash={hashes_of('front', 12)[-1].hex()}"
    assert request(loaded, f"/v1/dashboard/prefix{where}", "token-a")[0].status == 401
    answer, body = request(loaded, f"/v1/dashboard/prefix{where}", ADMIN)
    assert answer.status == 200
    assert json.loads(body)["hashes"] == [name.hex() for name in hashes_of("front", 12)]
    assert chain["blocks"] == 12
    gone = where.replace(hashes_of("front", 12)[-1].hex(), "ab" * 32)
    assert request(loaded, f"/v1/dashboard/prefix{gone}", ADMIN)[0].status == 404


def test_colours_have_enough_contrast() -> None:
    """Contrast by WCAG 2: 4.5 for text, 3 for graphics."""
    css = (STATIC / "dashboard.css").read_text()
    for theme in re.findall(r":root[^{]*\{(.*?)\}", css, re.S)[:2]:
        colour = dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6})", theme))
        assert len(colour) >= 20
        pairs = [(ink, back) for ink in ("ink", "quiet") for back in ("ground", "card")]
        pairs += [(kind, f"{kind}-back") for kind in ("good", "bad", "warn")]
        pairs += [("primary-ink", "primary"), ("bad", "card"), ("ink", "button")]
        for ink, back in pairs:
            assert contrast(colour[ink], colour[back]) >= 4.5, (ink, back)
        for tier in range(5):
            assert contrast(colour[f"tier-{tier}"], colour["card"]) >= 3


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


# With one.


def test_under_load(browser: Browser, loaded: ForkedSidecar, tmp_path: Path) -> None:
    show(browser, loaded, ADMIN)
    browser.until("document.querySelectorAll('#hits rect').length > 0")
    assert "all tenants · admin" in browser.text("#about")
    assert "l2" in browser.text("#space")
    assert "redis" in browser.text("#space")
    assert "chat" in browser.text("#users")
    assert "192 tokens" not in browser.text("#hot")  # blocks of 4 tokens, prefixes of at most 18
    assert "48 tokens" in browser.text("#hot")
    assert browser.run("document.querySelectorAll('#radix details').length") >= 2
    assert "up" in browser.text("#tiers")
    # Names from outside are text, never markup.
    assert EVIL.model in browser.text("#hot")
    assert "<b>team-b</b>" in browser.text("#users")
    assert browser.run(
        "window.pwned === undefined && !document.querySelector('main img, main b b')"
    )
    assert browser.faults() == []
    host = urlsplit(loaded.url).netloc
    assert {urlsplit(url).netloc for url in browser.requests()} == {host}
    assert len(browser.requests()) >= 6
    browser.screenshot(tmp_path / "load.png")


def test_an_injected_script_does_not_run(browser: Browser, unused: ForkedSidecar) -> None:
    show(browser, unused)
    browser.run(
        "(() => { const s = document.createElement('script'); s.textContent = 'window.pwned = 2';"
        " document.body.append(s); })()"
    )
    assert browser.run("window.pwned === undefined")


def test_empty(browser: Browser, unused: ForkedSidecar) -> None:
    show(browser, unused)
    assert "No engine has connected yet." in browser.text("#users")
    assert "No prefix has been looked up yet." in browser.text("#hot")
    assert "no rate is measured" in browser.text("#even")
    assert browser.faults() == []


def test_keyboard_and_screen_reader(browser: Browser, loaded: ForkedSidecar) -> None:
    show(browser, loaded, ADMIN)
    browser.until("document.querySelectorAll('#hits rect').length > 0")
    nameless = (
        "[...document.querySelectorAll('button, input, select, [role=img], [role=region]')]"
        ".filter(e => !(e.getAttribute('aria-label') || e.getAttribute('aria-labelledby')"
        " || e.textContent.trim() || e.closest('label'))).map(e => e.outerHTML)"
    )
    assert browser.run(nameless) == []
    assert browser.run("document.querySelectorAll('table th:not([scope])').length") == 0
    levels = browser.run("[...document.querySelectorAll('h1, h2, h3')].map(e => +e.tagName[1])")
    assert levels[0] == 1
    assert set(levels[1:]) == {2}
    assert browser.run("document.documentElement.lang") == "en"
    browser.run("document.querySelector('#radix summary').focus()")
    assert browser.run("document.activeElement.tagName") == "SUMMARY"


def test_a_phone(browser: Browser, loaded: ForkedSidecar, tmp_path: Path) -> None:
    show(browser, loaded, ADMIN, wide=360, high=800)
    browser.until("document.querySelectorAll('#hits rect').length > 0")
    assert browser.run("document.documentElement.scrollWidth") <= 360
    sideways = (
        "[...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth)"
    )
    assert browser.run(f"{sideways}.length") == 0
    small = (
        "[...document.querySelectorAll('main *')].filter(e => e.childNodes.length && "
        "[...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()) && "
        "parseFloat(getComputedStyle(e).fontSize) < 11).length"
    )
    assert browser.run(small) == 0
    assert browser.run("document.querySelector('#hits svg').getBoundingClientRect().width") > 280
    browser.screenshot(tmp_path / "phone.png")


def test_light_and_dark(browser: Browser, unused: ForkedSidecar) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    show(browser, unused, dark=True)
    dark = browser.run(ground)
    show(browser, unused)
    light = browser.run(ground)
    assert dark != light
    browser.run(
        "(() => { const s = document.querySelector('#theme'); s.value = 'dark';"
        " s.dispatchEvent(new Event('change')); })()"
    )
    assert browser.run(ground) == dark
    browser.open(f"{unused.url}/dashboard")  # the choice is stored
    assert browser.run(ground) == dark


def test_a_tenant_sees_its_own_usage_and_no_buttons(
    browser: Browser, loaded: ForkedSidecar
) -> None:
    show(browser, loaded, "token-b")
    assert "tenant <b>team-b</b>" in browser.text("#about")
    assert "team-a" not in browser.text("main")
    assert browser.run("document.querySelectorAll('main button').length") == 0


def test_a_wrong_auth_token_shows_an_error(browser: Browser, loaded: ForkedSidecar) -> None:
    browser.open(f"{loaded.url}/dashboard")
    browser.run("sessionStorage.setItem('kvstore-token', 'wrong')")
    browser.open(f"{loaded.url}/dashboard?wrong")
    browser.until("document.querySelector('.notice.bad') !== null")
    assert "does not know the auth token" in browser.text("#notices")
    browser.click("#access")
    browser.run(f"document.querySelector('#token').value = {json.dumps(ADMIN)}")
    browser.click("#auth .primary")
    browser.until("document.querySelectorAll('.tile').length == 6")
    browser.until("document.querySelector('.notice.bad') === null")


def test_pin_unpin_and_clear(browser: Browser, loaded: ForkedSidecar) -> None:
    show(browser, loaded, ADMIN)
    pin = "[...document.querySelectorAll('#hot button')].find(e => e.textContent === '{}')"
    browser.until(f"{pin.format('Pin')} !== undefined")
    browser.run(f"{pin.format('Pin')}.click()")
    browser.until("document.querySelector('#notices').textContent.includes('Pinned 12 of 12')")
    assert loaded.stats(auth_token="token-a")["l2"]["slots_pinned"] == 12
    browser.until(f"{pin.format('Unpin')} !== undefined")
    browser.run(f"{pin.format('Unpin')}.click()")
    browser.until("document.querySelector('#notices').textContent.includes('Unpinned 12')")
    assert loaded.stats(auth_token="token-a")["l2"]["slots_pinned"] == 0
    clear = '[aria-label="Clear l2"]'
    browser.click(clear)
    assert "All blocks in l2 are deleted" in browser.text("#sure")
    # Open the dialog again before the close event of the first one.
    browser.run(f"""{{
        document.querySelector('#sure [value=no]').click();
        document.querySelector('{clear}').click();
    }}""")
    assert loaded.stats(auth_token="token-a")["l2"]["slots_ready"] > 0
    browser.click("#sure-yes")
    browser.until("document.querySelector('#notices').textContent.includes('Cleared l2')")
    assert loaded.stats(auth_token="token-a")["l2"]["slots_ready"] == 0
    assert browser.faults() == []


def test_break_even_follows_the_entered_rate(browser: Browser, loaded: ForkedSidecar) -> None:
    with patient(loaded.socket, NAMESPACE, auth_token="token-b") as client:
        get(client, hashes_of("front", 12))  # from a tier: L2 was cleared
    show(browser, loaded, ADMIN)
    browser.until("document.querySelector('#even svg') !== null")
    said = []
    for rate in (1, 1_000_000_000):
        browser.run(
            f"(() => {{ const r = document.querySelector('#rate'); r.value = {rate};"
            " r.dispatchEvent(new Event('input')); })()"
        )
        said.append(browser.text("#even"))
    assert "disk: loading is faster from 4 tokens." in said[0]
    assert "disk: loading is never faster." in said[1]


def test_a_tier_that_is_down(
    browser: Browser, loaded: ForkedSidecar, valkey: redis_rig.Server, tmp_path: Path
) -> None:
    valkey.kill()
    with patient(loaded.socket, NAMESPACE, auth_token="token-b") as client:

        def is_down() -> bool:
            put(client, hashes_of(f"after {len(client_names)}", 2))
            client_names.append(1)
            return str(asked(loaded, ADMIN)["tiers"]["redis"]["state"]) == "down"

        client_names: list[int] = []
        wait_until(is_down, "the breaker has opened")
    show(browser, loaded, ADMIN)
    browser.until("document.querySelector('.badge.down, .badge.probing') !== null")
    assert "Tier redis is down" in browser.text("#notices")
    assert browser.run("document.querySelectorAll('.tile .bad-ink').length") == 1
    assert browser.faults() == []
    browser.screenshot(tmp_path / "down.png")
