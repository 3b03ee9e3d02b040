// Fetches the sidecar's JSON every few seconds, shows it, and handles the buttons.

import { el } from "./dom.js";
import * as panels from "./panels.js";

const INTERVAL_MS = 5000;
const TIMEOUT_MS = 15000;
const MAX_NOTICES = 4;

const state = { token: stored(sessionStorage, "kvstore-token"), paused: false, view: null, open: new Map(), messages: [], error: "" };
const $ = (id) => document.getElementById(id);

// The browser may forbid storage. The page works without it.
function stored(where, name) {
  try {
    return where.getItem(name) ?? "";
  } catch {
    return "";
  }
}

function store(where, name, value) {
  try {
    where.setItem(name, value);
  } catch (error) {
    console.info("not stored:", error.message);
  }
}

async function request(path, body) {
  const headers = state.token ? { Authorization: `Bearer ${state.token}` } : {};
  const options = { headers, signal: AbortSignal.timeout(TIMEOUT_MS) };
  if (body !== undefined) Object.assign(options, { method: "POST", body: JSON.stringify(body) });
  const response = await fetch(path, options);
  const json = await response.json();
  if (!response.ok) throw Object.assign(new Error(json.error ?? `status ${response.status}`), { status: response.status });
  return json;
}

async function refresh() {
  try {
    state.view = await request("v1/dashboard");
    state.error = "";
  } catch (error) {
    state.error = error.status === 401 ? `${error.message}. Use the button “Auth token”.` : `No response from the sidecar: ${error.message}`;
  }
  render();
}

function render() {
  notices();
  const { view } = state;
  if (!view) return;
  panels.about(view);
  panels.tiles(view);
  panels.hits(view);
  panels.space(view);
  panels.health(view, acts);
  panels.hot(view, acts);
  panels.radix(view, state.open);
  panels.users(view);
  renderEven();
}

function renderEven() {
  if (!$("even-rate")) {
    const input = el("input", { id: "rate", type: "number", min: "1", step: "any", inputmode: "decimal", value: prefillRate() });
    const label = el("label", { class: "rate", id: "even-rate" }, "Prefill, tokens per second", input);
    $("even").before(label);
    input.addEventListener("input", () => {
      if (!(Number(input.value) > 0)) return;
      store(localStorage, "kvstore-prefill", input.value);
      if (state.view) panels.even(state.view, Number(input.value));
    });
  }
  panels.even(state.view, Number($("rate").value) > 0 ? Number($("rate").value) : prefillRate());
}

// From the address (?prefill=8000), or from earlier input.
function prefillRate() {
  const given = Number(new URLSearchParams(location.search).get("prefill"));
  const kept = Number(stored(localStorage, "kvstore-prefill"));
  return given > 0 ? given : kept > 0 ? kept : 5000;
}

function notices() {
  const lines = [];
  if (state.error) lines.push(["bad", state.error]);
  for (const [name, tier] of Object.entries(state.view?.tiers ?? {})) {
    if (tier.state === "down" || tier.state === "probing") {
      lines.push(["bad", `Tier ${name} is ${tier.state === "down" ? "down" : "down and being probed"}. Reads are misses and writes are dropped. Engines continue.`]);
    }
    if (tier.directories_down) lines.push(["warn", `Tier ${name}: ${tier.directories_down} of ${tier.directories} directories are down.`]);
  }
  lines.push(...state.messages);
  const fresh = lines.map(([kind, text]) => el("p", { class: `notice ${kind}` }, text));
  const place = $("notices");
  if (place.textContent !== lines.map(([, text]) => text).join("")) place.replaceChildren(...fresh);
}

function say(kind, text) {
  state.messages = [...state.messages.slice(1 - MAX_NOTICES), [kind, text]];
  notices();
  setTimeout(() => {
    state.messages = state.messages.filter((line) => line[1] !== text);
    notices();
  }, 12000);
}

async function perform(failure, work) {
  try {
    say("good", await work());
  } catch (error) {
    say("bad", `${failure}: ${error.message}`);
  }
  await refresh();
}

async function prefixOf(chain) {
  const where = new URLSearchParams({ tenant: chain.tenant, namespace: chain.namespace, hash: chain.hash });
  const { hashes } = await request(`v1/dashboard/prefix?${where}`);
  return { tenant: chain.tenant, namespace: chain.namespace, hashes };
}

const acts = {
  pin: (chain) => perform("Not pinned", async () => {
    const done = await request("v1/pin", await prefixOf(chain));
    return `Pinned ${done.pinned} of ${done.wanted} blocks${done.reason ? `: ${done.reason}` : "."}`;
  }),
  unpin: (chain) => perform("Not unpinned", async () => `Unpinned ${(await request("v1/unpin", await prefixOf(chain))).unpinned} blocks.`),
  clear: async (tier) => {
    $("sure-text").textContent = `All blocks in ${tier} are deleted, for every tenant. Engines compute them again.`;
    if ((await dialog("sure")) !== "yes") return;
    await perform("Not cleared", async () => `Cleared ${(await request(`v1/clear?tier=${encodeURIComponent(tier)}`, {})).cleared}.`);
  },
};

// Open a dialog; resolves with its result once it is closed. The close event arrives later: by then
// the dialog may be open again, for another question.
const answers = {};
function dialog(id) {
  const box = $(id);
  answers[id]?.();
  return new Promise((resolve) => {
    answers[id] = () => {
      delete answers[id];
      resolve(box.returnValue);
    };
    box.onclose = () => {
      if (!box.open) answers[id]?.();
    };
    box.returnValue = "";
    box.showModal();
  });
}

function theme(choice) {
  const dark = choice === "dark" || (choice === "auto" && matchMedia("(prefers-color-scheme: dark)").matches);
  document.documentElement.dataset.theme = dark ? "dark" : "light";
}

function start() {
  const choice = stored(localStorage, "kvstore-theme") || "auto";
  $("theme").value = choice;
  theme(choice);
  $("theme").addEventListener("change", () => {
    store(localStorage, "kvstore-theme", $("theme").value);
    theme($("theme").value);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => theme($("theme").value));
  $("pause").addEventListener("click", () => {
    state.paused = !state.paused;
    $("pause").setAttribute("aria-pressed", String(state.paused));
    $("pause").textContent = state.paused ? "Continue" : "Pause";
  });
  $("access").addEventListener("click", async () => {
    $("token").value = state.token;
    if ((await dialog("auth")) !== "use") return;
    state.token = $("token").value.trim();
    store(sessionStorage, "kvstore-token", state.token);
    state.view = null;
    await refresh();
  });
}

async function live() {
  if (!state.paused && !document.hidden) await refresh();
  setTimeout(live, INTERVAL_MS);
}

start();
let resized = 0;
addEventListener("resize", () => {
  clearTimeout(resized);
  resized = setTimeout(render, 150);
});
document.addEventListener("visibilitychange", () => {
  if (!document.hidden && !state.paused) refresh();
});
live();
