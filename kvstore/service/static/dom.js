// Creates elements and formats numbers. Text is always set as text, never parsed as markup, because
// names of models, tenants and traffic labels come from outside.

const SVG = "http://www.w3.org/2000/svg";

// Create an element with attributes and children (elements or text).
export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "onclick") node.addEventListener("click", value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return node;
}

// Replace the content of an element. Unchanged content stays, and keeps its focus.
export function show(id, ...content) {
  const place = document.getElementById(id);
  const fresh = el("div", {}, ...content);
  if (place.innerHTML === fresh.innerHTML) return;
  const focused = place.contains(document.activeElement) ? document.activeElement.dataset.focus : null;
  place.replaceChildren(...fresh.childNodes);
  if (focused) place.querySelector(`[data-focus="${CSS.escape(focused)}"]`)?.focus();
}

// A table that becomes cards on a narrow screen. columns: [name, class or ""], rows: lists of cells.
export function table(caption, columns, rows) {
  const head = el("tr", {}, columns.map(([name, kind]) => el("th", { scope: "col", class: kind }, name)));
  const body = rows.map((cells) =>
    el("tr", {}, cells.map((cell, index) => {
      const [name, kind] = columns[index];
      return index === 0
        ? el("th", { scope: "row", class: "left" }, cell)
        : el("td", { class: cell === "–" ? `${kind} none` : kind || undefined, "data-name": name || undefined }, cell);
    })));
  return el("table", { class: "stack", "aria-label": caption }, el("thead", {}, head), el("tbody", {}, body));
}

export function count(value) {
  if (!Number.isFinite(value)) return "–";
  if (value >= 1e9) return `${(value / 1e9).toFixed(1)} G`;
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)} M`;
  if (value >= 1e4) return `${(value / 1e3).toFixed(1)} k`;
  return String(Math.round(value));
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit === 0 || value >= 100 ? Math.round(value) : value.toFixed(1)} ${units[unit]}`;
}

export function seconds(value) {
  if (!value) return "–";
  if (value < 1e-3) return `${Math.round(value * 1e6)} µs`;
  if (value < 1) return `${rounded(value * 1e3)} ms`;
  return `${rounded(value)} s`;
}

function rounded(value) {
  return value < 10 ? String(Number(value.toFixed(1))) : String(Math.round(value));
}

export function duration(value) {
  const minutes = Math.floor(value / 60);
  if (minutes < 1) return `${Math.floor(value)} s`;
  if (minutes < 60) return `${minutes} min`;
  if (minutes < 48 * 60) return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  return `${Math.floor(minutes / 1440)} d`;
}

export function percent(fraction) {
  return Number.isFinite(fraction) ? `${(fraction * 100).toFixed(fraction > 0 && fraction < 0.1 ? 1 : 0)} %` : "–";
}

// The colour class of a tier, by its position from l2 down.
export function tone(tiers, name) {
  return `tier-${Math.min(4, Math.max(0, tiers.indexOf(name)))}`;
}

export function key(entries) {
  return el("div", { class: "key" }, entries.map(([name, kind]) => el("span", { class: kind }, el("b", {}, name))));
}
