// The panels of the page, made from the sidecar's JSON.

import { breakEven, evenChart, fit, hitChart, hitSteps } from "./charts.js";
import { bytes, count, duration, el, key, percent, seconds, show, table, tone } from "./dom.js";

const RECENT_S = 300;
const HOT_ROWS = 12;

export function tierNames(view) {
  return ["l2", ...Object.keys(view.tiers)];
}

// Hit rate of the last minutes, and since the start.
function hitRates(view, tiers) {
  const { history } = view;
  const last = history.time_s.length - 1;
  const total = (i) => tiers.reduce((sum, tier) => sum + (history.hit_tokens[tier]?.[i] ?? 0), 0);
  if (last < 0) return { recent: NaN, ever: NaN };
  let first = last;
  while (first > 0 && history.time_s[last] - history.time_s[first] < RECENT_S) first -= 1;
  const looked = history.lookup_tokens[last] - history.lookup_tokens[first];
  return {
    recent: looked > 0 ? Math.min(1, (total(last) - total(first)) / looked) : NaN,
    ever: history.lookup_tokens[last] > 0 ? total(last) / history.lookup_tokens[last] : NaN,
  };
}

export function tiles(view) {
  const tiers = tierNames(view);
  const rates = hitRates(view, tiers);
  const { l2 } = view;
  const sum = (name) => Object.values(view.tiers).reduce((total, tier) => total + (tier[name] ?? 0), 0);
  const lookups = view.users.reduce((total, user) => total + user.lookup_tokens, 0);
  const dropped = l2.tier_writes_dropped + l2.no_slot;
  const errors = sum("errors") + sum("checksum_failures");
  const tile = (name, value, more, bad) => el("div", { class: "tile" }, el("p", { class: "name" }, name),
    el("p", { class: bad ? "value bad-ink" : "value" }, value), el("p", { class: "more" }, more));
  show("tiles",
    tile("Hit rate, 5 min", percent(rates.recent), `${percent(rates.ever)} since the start`),
    tile("Host memory (L2)", percent(l2.slots_ready / l2.slots), `${count(l2.slots_free)} of ${count(l2.slots)} slots free`),
    tile("Tokens looked up", count(lookups), `${count(view.users.reduce((n, u) => n + u.saved_tokens, 0))} saved`),
    tile("Engines", String(view.clients), `${count(l2.slots_leased)} slots leased, ${count(l2.slots_pinned)} pinned`),
    tile("Dropped", count(dropped), `${count(l2.tier_writes_dropped)} writes, ${count(l2.no_slot)} saves`),
    tile("Errors", count(errors), `${count(sum("checksum_failures"))} checksum failures`, errors > 0));
}

export function hits(view) {
  const tiers = tierNames(view);
  fit("hits");
  const chart = hitChart(view.history, tiers);
  if (!chart) {
    show("hits", el("p", { class: "empty" }, view.history.time_s.length > 1
      ? "No prefix has been looked up yet." : "The first samples appear within ten seconds."));
    return;
  }
  const steps = hitSteps(view.history, tiers);
  const newest = steps[steps.length - 1];
  show("hits", chart, key(tiers.map((name, i) => [`${name} ${percent(newest.fractions[i])} in the last sample`, tone(tiers, name)])));
}

export function space(view) {
  const tiers = tierNames(view);
  const { l2 } = view;
  const rows = [["l2", l2.slots_ready * l2.slot_bytes, l2.slots * l2.slot_bytes, l2.slots_ready, l2.evictions]];
  for (const [name, tier] of Object.entries(view.tiers)) {
    rows.push([name, tier.bytes_used ?? 0, tier.bytes_capacity ?? 0, tier.blocks, tier.evictions]);
  }
  show("space", rows.map(([name, used, of, blocks, evictions]) => {
    const fraction = of > 0 ? Math.min(1, used / of) : 0;
    const words = of > 0 ? `${bytes(used)} of ${bytes(of)}` : `${bytes(used)}, capacity unknown`;
    const fill = el("i", { class: tone(tiers, name) });
    fill.style.width = `${(fraction * 100).toFixed(1)}%`;
    return el("div", { class: "meter" },
      el("div", { class: "row" }, el("b", {}, name), el("span", {}, `${words} · ${percent(fraction)}`)),
      el("div", { class: "bar", role: "img", "aria-label": `${name}: ${percent(fraction)} full` }, fill),
      el("p", { class: "hint" }, `${count(blocks ?? NaN)} blocks, ${count(evictions ?? 0)} evicted`));
  }));
}

export function health(view, acts) {
  const columns = [["Tier", ""], ["State", ""], ["Queued", ""], ["Read, median", ""], ["95 %", ""], ["Write, median", ""], ["95 %", ""],
    ["Errors", ""], ["Checksum failures", ""], ["Deadline exceeded", ""], ["Breaker opened", ""], ["", "acts"]];
  const clear = (name) => (view.admin
    ? el("button", { class: "small danger", type: "button", "data-focus": `clear ${name}`, onclick: () => acts.clear(name), "aria-label": `Clear ${name}` }, "Clear") : "");
  const { l2 } = view;
  const wrong = (n) => (n ? el("span", { class: "bad-ink" }, count(n)) : "0");
  const rows = [["l2", el("span", { class: "badge up" }, "up"), "–", "–", "–", "–", "–", "–", "–", "–", "–", clear("l2")]];
  for (const [name, tier] of Object.entries(view.tiers)) {
    const state = ["up", "down", "probing"].includes(tier.state) ? tier.state : "up";
    rows.push([name, el("span", { class: `badge ${state}` }, state), `${count(tier.queued_reads)} / ${count(tier.queued_writes)}`,
      seconds(tier.read_p50_s), seconds(tier.read_p95_s), seconds(tier.write_p50_s), seconds(tier.write_p95_s),
      wrong(tier.errors), wrong(tier.checksum_failures), count(tier.deadline_exceeded ?? 0), count(tier.breaker_opened ?? 0), clear(name)]);
  }
  show("tiers", table("Tiers", columns, rows),
    el("p", { class: "hint" }, `Queued: reads / writes. Now ${count(l2.loads_in_flight)} loads and ${count(l2.tier_writes_in_flight)} tier writes are in flight.`));
}

function walk(chains, above = []) {
  return chains.flatMap((chain) => {
    const path = [...above, chain];
    return [path, ...walk(chain.children, path)];
  });
}

function byTier(view, cached, blocks) {
  const tiers = tierNames(view);
  const bar = el("span", { class: "bar cached", role: "img",
    "aria-label": tiers.filter((name) => cached[name]).map((name) => `${percent(cached[name] / blocks)} in ${name}`).join(", ") || "not cached" });
  for (const name of tiers.filter((each) => cached[each])) {
    const part = el("i", { class: tone(tiers, name) });
    part.style.width = `${((cached[name] / blocks) * 100).toFixed(1)}%`;
    bar.append(part);
  }
  return bar;
}

function model(view, digest) {
  return view.namespaces[digest]?.model ?? digest.slice(0, 8);
}

function tokensOf(view, digest, blocks) {
  const space = view.namespaces[digest];
  return space ? `${count(blocks * space.block_tokens)} tokens` : `${count(blocks)} blocks`;
}

export function hot(view, acts) {
  const paths = walk(view.prefixes.chains).filter((path) => path[path.length - 1].lookups > 1 || path.length === 1);
  paths.sort((a, b) => weight(b) - weight(a));
  if (!paths.length) {
    show("hot", el("p", { class: "empty" }, "No prefix has been looked up yet."));
    return;
  }
  const columns = [["Ends with block", "left"], ["Model", ""], ["Tenant", ""], ["Length", ""], ["Lookups", ""], ["Cached", ""], ["Pinned", ""], ["", "acts"]];
  const rows = paths.slice(0, HOT_ROWS).map((path) => {
    const chain = path[path.length - 1];
    const blocks = path.reduce((sum, each) => sum + each.blocks, 0);
    const pinned = path.reduce((sum, each) => sum + each.pinned, 0);
    const cached = {};
    for (const each of path) for (const [tier, n] of Object.entries(each.cached)) cached[tier] = (cached[tier] ?? 0) + n;
    const name = chain.hash.slice(0, 12);
    const button = (label, act) => el("button", { class: "small", type: "button", "data-focus": `${label} ${chain.hash}`,
      onclick: () => act(chain), "aria-label": `${label} the prefix that ends with ${name}` }, label);
    return [el("span", { class: "mono" }, name), model(view, chain.namespace), chain.tenant, tokensOf(view, chain.namespace, blocks),
      `${count(chain.lookups)} ×`, byTier(view, cached, blocks), pinned ? `${count(pinned)} blocks` : "–",
      view.admin ? [button("Pin", acts.pin), pinned ? button("Unpin", acts.unpin) : null] : ""];
  });
  const { dropped, lookups } = view.prefixes;
  show("hot", table("Hot prefixes", columns, rows), key(tierNames(view).map((name) => [name, tone(tierNames(view), name)])),
    dropped ? el("p", { class: "hint" }, `A sample: ${percent(lookups / (lookups + dropped))} of the lookups.`) : null);
}

function weight(path) {
  const chain = path[path.length - 1];
  return chain.lookups * path.reduce((sum, each) => sum + each.blocks, 0);
}

export function radix(view, open) {
  const { chains, more, blocks } = view.prefixes;
  if (!chains.length) {
    show("radix", el("p", { class: "empty" }, "No prefix has been looked up yet."));
    return;
  }
  const left = (n) => (n ? el("li", { class: "more" }, `and ${count(n)} more`) : null);
  const branch = (chain) => {
    const label = el("span", { class: "label" }, el("span", { class: "mono" }, chain.hash.slice(0, 8)),
      ` ${tokensOf(view, chain.namespace, chain.blocks)}, ${count(chain.lookups)} ×`,
      chain.depth ? "" : ` · ${model(view, chain.namespace)} · ${chain.tenant}`);
    const line = [label, byTier(view, chain.cached, chain.blocks)];
    if (!chain.children.length && !chain.more) return el("li", {}, el("div", { class: "leaf" }, line));
    const name = `${chain.tenant} ${chain.namespace} ${chain.hash}`;
    const is = open.has(name) ? open.get(name) : chain.depth === 0;
    const details = el("details", { open: is },
      el("summary", { "data-focus": name }, line), el("ul", {}, chain.children.map(branch), left(chain.more)));
    details.addEventListener("toggle", () => open.set(name, details.open));
    return el("li", {}, details);
  };
  const place = document.getElementById("radix");
  const at = place.querySelector(".treebox")?.scrollTop ?? 0;
  show("radix", el("div", { class: "treebox" }, el("ul", { class: "tree" }, chains.map(branch), left(more))),
    el("p", { class: "hint" }, `${count(blocks)} blocks. The least recently looked-up blocks are dropped first.`));
  const box = place.querySelector(".treebox");
  if (box) box.scrollTop = at;
}

export function even(view, rate) {
  const tiers = tierNames(view);
  const space = Object.values(view.namespaces)[0];
  const known = Object.entries(view.tiers).filter(([, tier]) => tier.read_mean_s > 0);
  if (!space || !known.length) {
    show("even", el("p", { class: "empty" }, "No tier has been read yet, so no rate is measured."));
    return;
  }
  const overhead = (view.request_mean_s.match ?? 0) + (view.request_mean_s.load ?? 0);
  const rows = known.map(([name, tier]) => {
    const at = breakEven(tier, space.block_tokens, overhead, rate);
    const words = at ? `${name}: loading is faster from ${count(at)} tokens.` : `${name}: loading is never faster.`;
    return { ...tier, name, even: at, words };
  });
  fit("even");
  show("even", evenChart(rows, tiers, space.block_tokens, overhead, rate),
    key([[`compute at ${count(rate)} tokens/s`, "ink"], ...rows.map((row) => [row.words, tone(tiers, row.name)])]),
    el("p", { class: "hint" }, `Blocks of ${space.block_tokens} tokens, ${bytes(space.block_bytes)}; `,
      rows.map((row) => `${row.name} reads one in ${seconds(row.read_mean_s)} on average, ${row.workers_read} in parallel`).join("; "), "."));
}

export function users(view) {
  const tiers = tierNames(view);
  if (!view.users.length) {
    show("users", el("p", { class: "empty" }, "No engine has connected yet."));
    return;
  }
  const columns = [["Tenant", "left"], ["Traffic label", ""], ["Looked up", ""], ["Hit rate", ""], ["By tier", ""], ["Saved", ""], ["L2 slots", ""]];
  const rows = [...view.users].sort((a, b) => b.lookup_tokens - a.lookup_tokens).map((user) => {
    const hit = tiers.reduce((sum, tier) => sum + (user.hit_tokens[tier] ?? 0), 0);
    return [user.tenant, user.traffic || "–", count(user.lookup_tokens), user.lookup_tokens ? percent(Math.min(1, hit / user.lookup_tokens)) : "–",
      byTier(view, user.hit_tokens, Math.max(1, user.lookup_tokens)), count(user.saved_tokens), count(view.slots[user.tenant] ?? 0)];
  });
  show("users", table("Usage by tenant and traffic label, in tokens", columns, rows));
}

export function about(view) {
  document.getElementById("about").textContent =
    `${view.version} · up ${duration(view.uptime_s)} · ${view.tenant === null ? "all tenants" : `tenant ${view.tenant}`}${view.admin ? " · admin" : ""}`;
}
