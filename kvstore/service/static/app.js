// Asks the sidecar for its numbers every few seconds and shows them; does what the buttons say.

import { el } from "./dom.js";
import * as panels from "./panels.js";

const EVERY_MS = 5000;
const LIMIT_MS = 15000;
const NOTICES_MAX = 4;

const state = { token: stored(sessionStorage, "kvstore-token"), paused: false, view: null, open: new Map(), said: [], fault: "" };
const $ = (id) => document.getElementById(id);

// Storage may be forbidden; the page works without.
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
    console.info("not kept:", error.message);
  }
}

async function ask(path, body) {
  const headers = state.token ? { Authorization: `Bearer ${state.token}` } : {};
  const options = { headers, signal: AbortSignal.timeout(LIMIT_MS) };
  if (body !== undefined) Object.assign(options, { method: "POST", body: JSON.stringify(body) });
  const answer = await fetch(path, options);
  const json = await answer.json();
  if (!answer.ok) throw Object.assign(new Error(json.error ?? `status ${answer.status}`), { status: answer.status });
  return json;
}

async function refresh() {
  try {
    state.view = await ask("v1/dashboard");
    state.fault = "";
  } catch (error) {
    state.fault = error.status === 401 ? `${error.message}. Give one under “Token”.` : `No answer from the sidecar: ${error.message}`;
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

// Given in the address (?prefill=8000), or typed in before.
function prefillRate() {
  const given = Number(new URLSearchParams(location.search).get("prefill"));
  const kept = Number(stored(localStorage, "kvstore-prefill"));
  return given > 0 ? given : kept > 0 ? kept : 5000;
}

function notices() {
  const lines = [];
  if (state.fault) lines.push(["bad", state.fault]);
  for (const [name, tier] of Object.entries(state.view?.tiers ?? {})) {
    if (tier.state === "down" || tier.state === "probing") {
      lines.push(["bad", `Tier ${name} is ${tier.state === "down" ? "down" : "down and being tried"}: what is asked of it is a miss, what is written to it is lost to it. Engines go on.`]);
    }
    if (tier.directories_down) lines.push(["warn", `Tier ${name}: ${tier.directories_down} of ${tier.directories} directories are down.`]);
  }
  lines.push(...state.said);
  const fresh = lines.map(([kind, text]) => el("p", { class: `notice ${kind}` }, text));
  const place = $("notices");
  if (place.textContent !== lines.map(([, text]) => text).join("")) place.replaceChildren(...fresh);
}

function say(kind, text) {
  state.said = [...state.said.slice(1 - NOTICES_MAX), [kind, text]];
  notices();
  setTimeout(() => {
    state.said = state.said.filter((line) => line[1] !== text);
    notices();
  }, 12000);
}

async function doing(words, work) {
  try {
    say("good", await work());
  } catch (error) {
    say("bad", `${words}: ${error.message}`);
  }
  await refresh();
}

async function runOf(chain) {
  const where = new URLSearchParams({ tenant: chain.tenant, namespace: chain.namespace, hash: chain.hash });
  const { hashes } = await ask(`v1/dashboard/run?${where}`);
  return { tenant: chain.tenant, namespace: chain.namespace, hashes };
}

const acts = {
  pin: (chain) => doing("Not pinned", async () => {
    const done = await ask("v1/pin", await runOf(chain));
    return `Pinned ${done.pinned} of ${done.wanted} blocks${done.reason ? `: ${done.reason}` : "."}`;
  }),
  unpin: (chain) => doing("Not unpinned", async () => `Unpinned ${(await ask("v1/unpin", await runOf(chain))).unpinned} blocks.`),
  clear: async (tier) => {
    $("sure-text").textContent = `Everything in ${tier} goes, for every tenant. Engines compute it again.`;
    if ((await dialog("sure")) !== "yes") return;
    await doing("Not cleared", async () => `Cleared ${(await ask(`v1/clear?tier=${encodeURIComponent(tier)}`, {})).cleared}.`);
  },
};

// Opens a dialog; its answer once it is closed. The event of its end comes some time after it: by
// then it may be open again, for another question.
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

function wire() {
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
    $("pause").textContent = state.paused ? "Go on" : "Pause";
  });
  $("access").addEventListener("click", async () => {
    $("token").value = state.token;
    if ((await dialog("ask")) !== "use") return;
    state.token = $("token").value.trim();
    store(sessionStorage, "kvstore-token", state.token);
    state.view = null;
    await refresh();
  });
}

async function live() {
  if (!state.paused && !document.hidden) await refresh();
  setTimeout(live, EVERY_MS);
}

wire();
let resized = 0;
addEventListener("resize", () => {
  clearTimeout(resized);
  resized = setTimeout(render, 150);
});
document.addEventListener("visibilitychange", () => {
  if (!document.hidden && !state.paused) refresh();
});
live();
